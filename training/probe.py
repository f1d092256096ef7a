"""Measure a configuration for a few steps: in this process, or in fresh ones that may run out of memory.

Invariant: a probe trains on the run's own model and batches and leaves nothing behind; what it measures is
whole optimizer steps after one that warms up. A probe that fails, for whatever reason, is an answer too.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.config import TrainingConfig

EXIT_MEMORY = 77


@dataclass(frozen=True)
class Probe:
    """What a probe found. `tokens_per_s` of all processes together is None when it failed."""

    tokens_per_s: float | None
    step_s: float | None = None
    memory_bytes: float | None = None  # of the first process at its fullest
    flops_per_token: float | None = None
    precision: str = "fp32"
    losses: tuple[float, ...] = ()
    occupancy: float | None = None
    occupancy_source: str = ""
    problem: str = ""
    out_of_memory: bool = False


def measure(config: TrainingConfig, steps: int, watch: Callable[[Any], None] = lambda parts: None) -> Probe:
    """Time steps in this process, one of a world; the first is not counted. `watch` sees the parts first."""
    import torch

    from training.communication import flat_sum
    from training.corpus import load_text, with_local_model
    from training.hardware import measured_peak
    from training.occupancy import occupancy_meter
    from training.processes import joined, world_from_environment
    from training.resolve import prepare_device, resolve
    from training.trainer import OutOfMemory, Run
    from training.watchdog import Watchdog

    world = world_from_environment()
    device = prepare_device(config, world, lambda line: None)
    config = with_local_model(config)
    windows, _ = load_text(config)
    with (
        joined(world, device),
        Watchdog(config.hang_seconds) as watchdog,
        tempfile.TemporaryDirectory() as scratch,
    ):
        config, _ = resolve(config.model_copy(update={"adapt": False}), world, device)
        from training.checkpoints import LocalCheckpoints
        from training.feed import Feed

        place = Path(scratch)
        run = Run(config, place, LocalCheckpoints(place / "none"), world, lambda line: None)
        run.build(device, windows, None)
        watch(run.parts)
        ahead, workers = int(config.prefetch_batches), int(config.loader_workers)
        times: list[float] = []
        losses: list[float] = []
        per_token = run.flops_per_token
        own_tokens = run.own_batch * config.seq_len
        occupancy = occupancy_meter(
            device,
            lambda: per_token * own_tokens / min(times[1:]),
            lambda: measured_peak(device, run.parts.peak_precision).flops_per_s,
        )
        progress = run.start
        with Feed(windows, device, ahead, workers, config.pinned is True) as feed:
            for count in range(steps + 1):
                watchdog.beat(f"step {count + 1} of a probe")
                began = time.perf_counter()
                loss, _, problem = run.step(feed, progress, False)
                times.append(time.perf_counter() - began)
                losses.append(loss)
                progress = run.after(progress, loss, problem, times[-1])
        if run.micro_batch != config.micro_batch:
            raise OutOfMemory(f"out of memory with micro_batch {config.micro_batch}")
        # The fastest step: what the machine does else only ever makes one slower.
        busy = occupancy() if per_token else None
        step = flat_sum((min(times[1:]),), device, world)[0] / world.size
    used = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident()
    tokens = run.global_batch * config.seq_len
    return Probe(
        tokens / step,
        step,
        used,
        per_token,
        config.precision,
        tuple(losses),
        busy.share if busy else None,
        busy.source if busy else "",
    )


def probe(config: TrainingConfig, processes: int = 1, steps: int | None = None) -> Probe:
    """Measure in fresh processes of this machine."""
    from training.processes import free_port, run_quietly

    with tempfile.TemporaryDirectory() as scratch:
        command, answer = probe_command(config, Path(scratch), steps)
        environment = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
        }
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        code, said = run_quietly(command, processes, environment)
        return answered(code, answer, said)


def probe_command(config: TrainingConfig, scratch: Path, steps: int | None = None) -> tuple[list[str], Path]:
    """The command of one process of a probe, and where the first of them leaves its answer."""
    import yaml

    file, answer = scratch / "probe.yaml", scratch / "answer.json"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    command = [sys.executable, "-m", "training", "probe", str(file), "--answer", str(answer)]
    return [*command, "--steps", str(steps or config.tune_steps)], answer


def answered(code: int, answer: Path, said: str) -> Probe:
    """What the processes of a probe found; without an answer, what they said last."""
    if code == 0 and answer.is_file():
        told = json.loads(answer.read_text(encoding="utf-8"))
        return Probe(**{**told, "losses": tuple(told["losses"])})
    lines = said.strip().splitlines()
    return Probe(None, problem=lines[-1] if lines else f"exit code {code}", out_of_memory=code == EXIT_MEMORY)


def answer_probe(config: TrainingConfig, steps: int, answer: Path) -> int:
    """The program of a probe's process: leaves what it found in a file; its exit code."""
    import torch

    from training.trainer import OutOfMemory

    try:
        measured = measure(config, steps)
    except (torch.OutOfMemoryError, MemoryError) as error:
        print(f"out of memory: {error}", file=sys.stderr)
        return EXIT_MEMORY
    except OutOfMemory as error:
        print(str(error), file=sys.stderr)
        return EXIT_MEMORY
    if os.environ.get("RANK", "0") == "0":
        answer.write_text(json.dumps(asdict(measured)), encoding="utf-8")
    return 0


def _resident() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
