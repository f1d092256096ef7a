"""Run a configuration for a few steps to see where they go, and again with one lever changed at a time.

Invariant: nothing of the real run is touched: a capture trains from the start in a directory of its own that
is removed. The profiler slows many small ops down, so rates are measured without it. The cost: each lever
that is tried costs a build of the model and some steps.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from training.config import TrainingConfig
from training.trace import WAITING, Breakdown, read

WARM_UP = 2  # steps that are neither profiled nor timed

# Levers in the order they are tried, with the value that usually wins; those that a configuration does not
# know are passed over.
_LEVERS: tuple[tuple[str, Any], ...] = (
    ("precision", "bf16"),
    ("compile", True),
    ("fused_optimizer", True),
    ("sync", "last"),
    ("bucket_mb", 100.0),
    ("reshard", False),
    ("pinned", True),
    ("prefetch_batches", 1),
    ("loader_workers", 1),
    ("keep_host_memory", True),
    ("loss_chunk", "auto"),
)


@dataclass(frozen=True)
class Gain:
    """What one changed line of the YAML file does to the speed: 1.2 is a fifth more tokens a second."""

    line: str
    times: float


def captured(config: TrainingConfig, steps: int = 4) -> Breakdown:
    """Where the time of some steps goes. Raises what training raises."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with tempfile.TemporaryDirectory(prefix="capture-") as directory:
        file = Path(directory, "trace.json")
        profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(str(file)),
        )

        def after(step: int) -> bool:
            if step == WARM_UP:
                profiler.start()
            elif step > WARM_UP:
                profiler.step()
            if step == WARM_UP + 1 + steps:
                profiler.stop()
                return True
            return False

        with _waits_named():
            _train(config, Path(directory), after)
        return read([file])[0]


def step_seconds(config: TrainingConfig, steps: int = 4) -> float:
    """Seconds of a step, the median of some. Raises what training raises."""
    ends: list[float] = []

    def after(step: int) -> bool:
        ends.append(time.perf_counter())
        return step >= WARM_UP + steps

    with tempfile.TemporaryDirectory(prefix="capture-") as directory:
        _train(config, Path(directory), after)
    timed = ends[WARM_UP - 1 :][: steps + 1]
    return median(late - early for early, late in pairwise(timed))


def gains(config: TrainingConfig, say: Callable[[str], None] = lambda line: None) -> list[Gain]:
    """What each lever wins by itself, the largest first; a lever that cannot be used is left out."""
    before = step_seconds(config)
    found = []
    for line, changed in candidates(config):
        try:
            after = step_seconds(changed)
        except Exception as error:  # a lever that this machine lacks must not end the diagnosis
            say(f"{line}: not possible here: {' '.join(str(error).split())[:200]}")
            continue
        found.append(Gain(line, before / after))
        say(f"{line}: {before / after:.2f} ×")
    return sorted(found, key=lambda gain: -gain.times)


def candidates(config: TrainingConfig) -> Iterator[tuple[str, TrainingConfig]]:
    """Configurations that differ in one line (and, for the micro-batch, keep the global batch)."""
    import torch

    if isinstance(config.micro_batch, int):
        passes = config.accumulation_for(1)
        for times in sorted({factor for factor in (2, passes) if factor > 1 and passes % factor == 0}):
            update: dict[str, Any] = {"micro_batch": config.micro_batch * times}
            if config.global_batch is None:
                update["accumulation"] = passes // times
            yield f"micro_batch: {update['micro_batch']}", config.model_copy(update=update)
    for name, value in _LEVERS:
        if name not in type(config).model_fields or getattr(config, name) == value:
            continue
        if name == "pinned" and not torch.cuda.is_available():
            continue
        yield f"{name}: {str(value).lower()}", config.model_copy(update={name: value})


def _train(config: TrainingConfig, directory: Path, after: Callable[[int], bool]) -> None:
    """Train until `after`, which hears the number of each step that has ended, says that it is enough."""
    from training.trainer import Stopped, train

    enough = False

    def report(metrics: dict[str, Any]) -> None:
        nonlocal enough
        if not enough:
            enough = after(int(metrics["steps"]))

    long = config.model_copy(update={"steps": 10_000, "checkpoint_every": 10_000})
    with contextlib.suppress(Stopped):
        train(long, directory, report=report, stopping=lambda: enough)


@contextlib.contextmanager
def _waits_named() -> Iterator[None]:
    """Making a batch shows in the trace under its own name; in the training thread that is waiting."""
    from torch.profiler import record_function

    from training.data import Windows

    made = Windows.at

    def at(self: Windows, position: int, count: int) -> Any:
        with record_function(WAITING):
            return made(self, position, count)

    Windows.at = at  # type: ignore[method-assign]
    try:
        yield
    finally:
        Windows.at = made  # type: ignore[method-assign]
