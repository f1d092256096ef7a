"""From a configuration to a finished run: decide what is `auto`, measure the baseline, start the processes.

Invariant: what is measured runs in fresh processes, before the run holds any memory; the run itself then gets
a configuration in which nothing that needs measuring is open. Where the processes are there already, as under
torchrun, they measure together (`training.gang`).
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.config import TrainingConfig, halved, plain_of
from training.probe import EXIT_MEMORY, Probe, probe
from training.processes import World, free_port, launch

Say = Callable[[str], None]


@dataclass(frozen=True)
class Baseline:
    """The plain loop on the same hardware and batch."""

    tokens_per_s: float
    mfu: float | None


def decided(
    config: TrainingConfig,
    processes: int,
    say: Say,
    measure: Callable[[TrainingConfig, int], Probe] | None = None,
) -> TrainingConfig:
    """The configuration with the levers that are open measured and chosen, by `measure` or on this machine.

    Raises ConfigError.
    """
    from training import tuner
    from training.corpus import with_local_model
    from training.resolve import prepare_device

    if not tuner.open_levers(config):
        return config
    ask = measure or probe
    device = prepare_device(config.model_copy(update={"keep_host_memory": False}), World(), say)
    machine = tuner.Machine.of(device, config.memory_gb)
    found = tuner.tune(with_local_model(config), processes, machine, lambda tried: ask(tried, processes), say)
    say(f"tuner: {', '.join(f'{name} {value}' for name, value in found.chosen.items())}: {found.why}")
    record = {
        "chosen": found.chosen,
        "auto": dict.fromkeys(found.chosen, found.why),
        "probes": [{**setting, "tokens_per_s": rate} for setting, rate in found.probes],
    }
    return config.model_copy(update={**found.chosen, "record": record})


def as_before(config: TrainingConfig, resolved: Path) -> TrainingConfig:
    """The configuration with the open levers as an earlier start of the same run decided them."""
    from training.config import load_config
    from training.tuner import open_levers

    names = open_levers(config)
    before = load_config(resolved)
    return config.model_copy(
        update={**{name: getattr(before, name) for name in names}, "record": before.record}
    )


def plain_baseline(
    config: TrainingConfig,
    processes: int,
    say: Say,
    measure: Callable[[TrainingConfig, int], Probe] | None = None,
) -> Baseline | None:
    """Measure the plain loop for a few steps, by `measure` or on this machine; None where it does not run, as
    for want of memory."""
    found = (measure or probe)(plain_of(config, processes), processes)
    if found.tokens_per_s is None:
        say(f"plain baseline: it does not run: {found.problem}")
        return None
    share = mfu_of(found, processes)
    said = "" if share is None else f", MFU {share:.1%} of the fp32 peak"
    say(f"plain baseline: {found.tokens_per_s:.0f} tokens/s{said}")
    return Baseline(found.tokens_per_s, share)


def mfu_of(found: Probe, processes: int) -> float | None:
    """A probe's share of the peak in its own precision."""
    import torch

    from training.hardware import HardwareError
    from training.occupancy import share_of_peak
    from training.precision import PEAK_OF

    if not found.tokens_per_s or not found.flops_per_token:
        return None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        known = share_of_peak(
            found.flops_per_token, found.tokens_per_s / processes, device, PEAK_OF[found.precision]
        )
    except (HardwareError, KeyError):  # no published peak, and no matmul to measure one with
        return None
    return known[0] if known else None


def gain(metrics: dict[str, Any], plain: Baseline | None) -> dict[str, Any]:
    """A run's metrics, with what the plain loop reached beside them if that is known, and the hours by which
    it would have taken longer for the same tokens."""
    if plain is None:
        return metrics
    rate, tokens = metrics.get("tokens_per_s"), metrics.get("tokens")
    found = {"plain_tokens_per_s": plain.tokens_per_s, "plain_mfu": plain.mfu}
    if rate:
        found["gain"] = rate / plain.tokens_per_s
    if rate and tokens:
        found["saved_hours"] = tokens * (1 / plain.tokens_per_s - 1 / rate) / 3600
    return {**metrics, **found}


def launch_workers(
    config: TrainingConfig, output: Path, processes: int, checkpoints: str | None, say: Say
) -> int:
    """Train in several processes of this machine; the first failure's exit code, or 0.

    When one runs out of memory, what the others hold is in doubt: all start again from the newest checkpoint,
    with half of the micro-batch and the same global batch.
    """
    while True:
        code = _launched(config, output, processes, checkpoints)
        if code != EXIT_MEMORY:
            return code
        smaller = halved(int(config.micro_batch)) if config.global_batch is not None else 0
        if not smaller:
            return 1
        say(f"micro_batch {config.micro_batch} -> {smaller}: out of memory; on from the newest checkpoint")
        config = config.model_copy(update={"micro_batch": smaller})


def _launched(config: TrainingConfig, output: Path, processes: int, checkpoints: str | None) -> int:
    import yaml

    output.mkdir(parents=True, exist_ok=True)
    file = output / ".launched.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    command = [sys.executable, "-m", "training", "run", str(file), "--output", str(output)]
    command += ["--checkpoints", checkpoints] if checkpoints else []
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    try:
        return launch(command, processes, environment, 0, 1)
    finally:
        file.unlink(missing_ok=True)


class MetricsFile:
    """The metrics of each step as JSON lines; a run that goes on drops the lines of steps made again."""

    def __init__(self, file: Path, first_step: int = 0) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        kept: list[str] = []
        if file.exists():
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    if json.loads(line)["steps"] <= first_step:
                        kept.append(line)
                except (ValueError, KeyError, TypeError):  # a line cut short by a kill
                    continue
        file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def add(self, metrics: dict[str, Any]) -> None:
        """One more step."""
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(metrics) + "\n")
