"""The resolved file beside the checkpoints: what a run was made with, and a configuration that repeats it.

Invariant: the file is a configuration: `python -m training run resolved.yaml` makes the same run on the same
hardware, with every `auto` as it was decided. What made it so (versions, hardware, the commit of the code,
why each `auto` became what it is) stands under `record`, from which no run is made.
"""

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from training.config import TrainingConfig
from training.processes import World

if TYPE_CHECKING:
    import torch

KEPT = ("chosen", "probes", "plain", "measuring_s")  # of the record that a configuration comes with
PACKAGES = ("torch", "transformers", "torchao", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def write_resolved(
    file: Path, config: TrainingConfig, reasons: Mapping[str, str], world: World, device: "torch.device"
) -> None:
    """Write the file, in one step."""
    import yaml

    given = config.record or {}
    record = {
        **{key: value for key, value in given.items() if key in KEPT},
        "auto": {**given.get("auto", {}), **reasons},
        "processes": world.size,
        "hardware": hardware_of(device),
        "versions": versions(),
        "git_commit": git_commit(),
    }
    # What follows from timing may not vary when the run is made again.
    body = config.model_copy(update={"record": record, "adapt": False}).model_dump(mode="json")
    if config.global_batch is None:
        body["accumulation"] = config.accumulation_for(world.size)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(yaml.safe_dump(body, sort_keys=False, allow_unicode=True), encoding="utf-8")
    temporary.replace(file)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result, as far as they are there."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware_of(device: "torch.device") -> str:
    """The device in words: a GPU's name, or the processor and its threads."""
    import torch

    from training.hardware import _processor

    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return f"{_processor()}, {torch.get_num_threads()} threads"


def git_commit() -> str | None:
    """The commit of the code that runs, `+` when files were changed; None outside a checkout."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "diff", "--quiet", "HEAD", "--", "."], cwd=here, timeout=10, check=False
        ).returncode
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")
