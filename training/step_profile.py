"""A few steps of a run under the profiler, so that its outcome says where the time of a step goes.

Invariant: what is learned and what is measured of the run is not touched: profiled steps are not timed, and a
profiler that fails ends the profile, never the run. The profiler slows a loop of many small ops; as the steps
just before were timed without it, what it added is taken out again: of idle time, then of a processor's ops.
All ranks profile the same steps and the first hears of all. The cost: some steps in a hundred run at half
speed or so, once an attempt.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from training.processes import World
from training.signs import GRAPH_BREAKS, PREEMPTED, graph_breaks
from training.trace import Breakdown, compared, read

if TYPE_CHECKING:
    import torch

FRESH, PLAIN = 1, 4  # steps that warm the process up, and that are timed for comparison, before the profiler
MOST_SHARE = 0.05  # of the steps that an attempt has before it
MOST_PASSES = 24  # forward and backward passes in a trace, which is read into memory
MOST_RANKS = 64  # whose breakdowns are kept


class StepProfile:
    """Profiles `steps` steps of a run, after some that are only timed."""

    def __init__(
        self, steps: int, left: int, passes: int, device: "torch.device", log: Callable[[str], None]
    ) -> None:
        few = min(steps, max(MOST_PASSES // passes, 1))
        self.steps = few if few and few + 1 <= MOST_SHARE * left else 0  # one more warms the profiler up
        self.device, self.log = device, log
        self.plain: list[float] = []
        self.seen = 0
        self.breaks = graph_breaks()
        self.delay = self.preempted = 0.0
        self.profiler: Any = None
        self.traced: Breakdown | None = None

    def before(self) -> bool:
        """A step is about to be made; whether the profiler runs in it."""
        if not self.steps:
            return False
        self.delay = _delay()
        if self.seen == FRESH + PLAIN:
            try:
                self.profiler = self._started()
            except Exception as error:  # no diagnosis is no reason to end a run
                self._failed(error)
        return self.profiler is not None

    def after(self, seconds: float, world: World) -> list[Breakdown]:
        """A step was made; the breakdowns of all ranks, if it was the last to be profiled.

        Every rank calls this after every step.
        """
        if not self.steps:
            return []
        if FRESH <= self.seen < FRESH + PLAIN:
            self.plain.append(seconds)
        self.seen += 1
        if self.profiler is not None:
            if self.seen > FRESH + PLAIN + 1:  # the first one under the profiler only warms it up
                self.preempted += _delay() - self.delay
            try:
                self.profiler.step()
            except Exception as error:
                self._failed(error)
        if self.seen < FRESH + PLAIN + 1 + self.steps:
            return []
        self.steps, self.profiler = 0, None
        return _of_all(self.traced, world)

    def close(self) -> None:
        """Stop a profiler that still runs, as when the run ends early."""
        profiler, self.profiler = self.profiler, None
        if profiler is not None:
            try:
                profiler.stop()
            except Exception as error:
                self._failed(error)

    def _started(self) -> Any:
        from torch.profiler import ProfilerActivity, profile, schedule

        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        how = schedule(wait=0, warmup=1, active=self.steps, repeat=1)
        profiler = profile(activities=activities, schedule=how, on_trace_ready=self._keep)
        profiler.start()
        return profiler

    def _keep(self, done: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="profile-") as directory:
            file = Path(directory, "trace.json")
            done.export_chrome_trace(str(file))
            began = time.perf_counter()
            traced = read([file])[0].at_most(median(self.plain))
            seen = {GRAPH_BREAKS: float(graph_breaks() - self.breaks)}
            if self.device.type == "cpu":
                seen[PREEMPTED] = min(self.preempted, traced.total)
            self.traced = replace(traced, signs={**traced.signs, **seen})
            if (took := time.perf_counter() - began) > 5:
                self.log(f"reading the profile of {self.steps} steps took {took:.0f} s")

    def _failed(self, error: Exception) -> None:
        self.profiler = None
        self.log(f"no profile of the steps: {' '.join(str(error).split())[:200] or type(error).__name__}")


def of_metrics(metrics: dict[str, Any]) -> list[Breakdown]:
    """The breakdowns that a run's metrics hold, if any."""
    found = json.loads(metrics.get("breakdowns") or "[]")
    lists = ("own_of_steps", "collectives")
    return [Breakdown(**one | {name: tuple(one.get(name, ())) for name in lists}) for one in found]


def as_metrics(found: list[Breakdown]) -> dict[str, Any]:
    """The breakdowns for a run's metrics; `of_metrics` reads them."""
    return {"breakdowns": json.dumps([asdict(one) for one in found[:MOST_RANKS]])} if found else {}


def _delay() -> float:
    """Seconds that this thread has waited for a processor; 0 where the system does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _of_all(own: Breakdown | None, world: World) -> list[Breakdown]:
    """The breakdowns of all ranks that have one."""
    if world.size == 1:
        return compared([own]) if own else []
    import torch.distributed as dist

    every: list[dict[str, Any] | None] = [None] * world.size
    dist.all_gather_object(every, asdict(own) if own else None)
    found = [Breakdown(**{**one, "rank": rank}) for rank, one in enumerate(every) if one]
    return compared(found) if found else []
