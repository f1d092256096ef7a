"""Run a configuration for a few steps to see where they go, and again with one lever changed at a time.

Invariant: nothing of the real run is touched: a capture trains from the start in a directory of its own that
is removed. The profiler slows many small ops down, so rates are measured without it. The cost: each lever
that is tried costs a build of the model and some steps.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from training.config import TrainingConfig
from training.remedies import candidates
from training.step_profile import of_metrics
from training.trace import Breakdown

WARM_UP = 2  # steps that are not timed
MOST_STEPS = 50  # within which a profile must have been made


@dataclass(frozen=True)
class Gain:
    """What one changed line of the YAML file does to the speed: 1.2 is a fifth more tokens a second."""

    line: str
    times: float


def captured(config: TrainingConfig, steps: int = 4) -> tuple[list[Breakdown], float | None]:
    """Where the time of some steps goes, of each rank, and the MFU without the profiler where it is known.

    Of several processes only the first is told of all. Raises what training raises.
    """
    found: list[Breakdown] = []
    mfu = None

    def after(metrics: dict[str, Any]) -> bool:
        nonlocal found, mfu
        found, mfu = of_metrics(metrics), metrics.get("mfu")
        return bool(found) or metrics["steps"] > MOST_STEPS

    with tempfile.TemporaryDirectory(prefix="capture-") as directory:
        _train(config.model_copy(update={"profile_steps": steps}), Path(directory), after)
    return found, mfu


def step_seconds(config: TrainingConfig, steps: int = 4) -> float:
    """Seconds of a step, the median of some. Raises what training raises."""
    ends: list[float] = []

    def after(metrics: dict[str, Any]) -> bool:
        ends.append(time.perf_counter())
        return bool(metrics["steps"] >= WARM_UP + steps)

    with tempfile.TemporaryDirectory(prefix="capture-") as directory:
        _train(config.model_copy(update={"profile_steps": 0}), Path(directory), after)
    timed = ends[WARM_UP - 1 :][: steps + 1]
    return median(late - early for early, late in pairwise(timed))


def gains(config: TrainingConfig, say: Callable[[str], None] = lambda line: None) -> list[Gain]:
    """What each lever wins by itself, the largest first; a lever that cannot be used is left out.

    Each is compared with the mean of the configuration's own speed just before and just after it, as a
    machine that others use is not the same a minute later.
    """
    import torch

    before = step_seconds(config)
    found = []
    for remedy in candidates(config, cuda=torch.cuda.is_available()):
        try:
            changed = step_seconds(remedy.config)
        except Exception as error:  # a lever that this machine lacks must not end the diagnosis
            say(f"{remedy.line}: not possible here: {' '.join(str(error).split())[:200]}")
            continue
        after = step_seconds(config)
        times = (before + after) / 2 / changed
        before = after
        found.append(Gain(remedy.line, times))
        say(f"{remedy.line}: {times:.2f} ×")
    return sorted(found, key=lambda gain: -gain.times)


def _train(config: TrainingConfig, directory: Path, after: Callable[[dict[str, Any]], bool]) -> None:
    """Train until `after`, which hears the metrics of each step that has ended, says that it is enough."""
    from training.trainer import Stopped, train

    enough = False

    def report(metrics: dict[str, Any]) -> None:
        nonlocal enough
        if not enough:
            enough = after(metrics)

    long = config.model_copy(update={"steps": 10_000, "checkpoint_every": 10_000})
    with contextlib.suppress(Stopped):
        train(long, directory, report=report, stopping=lambda: enough)
