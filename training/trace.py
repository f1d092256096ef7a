"""Where a step's time goes, from a trace that torch.profiler (Kineto) wrote, on GPUs or on a CPU.

Each instant of the profiled steps belongs to one cause. Computing comes first, so that communication or
copies that run beside it cost nothing; then optimizer, copies between host and device, communication, waiting
for data; the rest is idle. Invariant: the causes of a rank add up to its time. On a CPU, ops stand for
kernels, and whoever waits for data or runs the optimizer does so in the same thread, so that those come
first. The cost: a trace is read whole into memory.
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from training.collectives import Collective, exchange_seconds, exposed_of_each
from training.signs import HOST_READ_IDLE, LONG_IDLE, PREEMPTED, UNCOMPILED, is_collective, signs
from training.spans import Spans, both, length, merged, span, without

CAUSES = ("compute", "optimizer", "copies", "communication", "data", "idle")
# More than the median rank's own work, as a share of the step; processes on a CPU share it and its caches.
STRAGGLES = {"cuda": 0.05, "cpu": 0.2}

WAITING = "making a batch"  # a range that a loop of one's own marks so is waiting for data too
_DATA = ("enumerate(DataLoader)", WAITING)


class TraceError(Exception):
    """A trace that cannot be read or holds no work; the message names the file."""


@dataclass(frozen=True)
class Breakdown:
    """One rank's seconds by cause, over all profiled steps."""

    rank: int
    steps: int
    seconds: dict[str, float]
    hidden_communication: float  # seconds that ran beside something else
    device: str  # cuda or cpu
    signs: dict[str, float] = field(default_factory=dict)  # see training.signs
    own_of_steps: tuple[float, ...] = ()  # seconds of each step in which the rank waits for no other
    exchange: float | None = None  # seconds of `communication` in which no rank is waited for, where known
    collectives: tuple[Collective, ...] = ()  # until the ranks are compared

    @property
    def total(self) -> float:
        """Seconds of all steps."""
        return sum(self.seconds.values())

    def at_most(self, step_seconds: float) -> "Breakdown":
        """The breakdown without the time that the profiler itself took, as steps last so long without it.

        What it adds falls between ops first, and then on what a processor's take; kernels are not slowed.
        """
        added = max(self.total - step_seconds * self.steps, 0.0)
        idle = max(self.seconds["idle"] - added, 0.0)
        added -= self.seconds["idle"] - idle
        compute = self.seconds["compute"]
        if self.device == "cpu":
            compute = max(compute - added, 0.0)
        part = compute / self.seconds["compute"] if compute else 0.0
        limits = {HOST_READ_IDLE: idle, LONG_IDLE: idle, UNCOMPILED: self.signs.get(UNCOMPILED, 0.0) * part}
        found = {name: min(value, limits.get(name, value)) for name, value in self.signs.items()}
        return replace(self, seconds={**self.seconds, "idle": idle, "compute": compute}, signs=found)

    def share(self, cause: str) -> float:
        """Of the time."""
        return self.seconds[cause] / self.total

    @property
    def waiting(self) -> float:
        """Seconds of `communication` in which the rank waits for another; 0 where that is not known."""
        return 0.0 if self.exchange is None else self.seconds["communication"] - self.exchange

    @property
    def own_work(self) -> float:
        """Seconds in which the rank waits for no other, and not for a processor that others have."""
        return self.total - self.seconds["communication"] - self.signs.get(PREEMPTED, 0.0)


def read(files: Sequence[Path]) -> list[Breakdown]:
    """A breakdown for each file, in the order of ranks. Raises TraceError."""
    found = [breakdown(*_load(file, place), str(file)) for place, file in enumerate(files)]
    ranks = [one.rank for one in found]
    if len(set(ranks)) < len(ranks):
        raise TraceError(f"{files[0]}: ranks {ranks}: two traces are of the same rank")
    for one, file in zip(found, files, strict=True):
        if one.device != found[0].device:
            raise TraceError(
                f"{file}: of a {one.device}, {files[0]} of a {found[0].device}; expected one kind"
            )
    return compared(sorted(found, key=lambda one: one.rank))


def compared(ranks: Sequence[Breakdown]) -> list[Breakdown]:
    """The ranks with what their exchanges take, when nobody is waited for."""
    steps = {one.steps for one in ranks}
    same = len(steps) == 1
    known = exchange_seconds([one.collectives for one in ranks], *steps) if same else None
    return [
        replace(
            one, collectives=(), exchange=None if known is None else min(known, one.seconds["communication"])
        )
        for one in ranks
    ]


def breakdown(events: list[dict[str, Any]], rank: int, name: str = "trace") -> Breakdown:
    """The causes of one rank's time. Raises TraceError when there is nothing to see."""
    spans = [event for event in events if event.get("ph") == "X" and event.get("dur") is not None]
    steps = [event for event in spans if str(event.get("name", "")).startswith("ProfilerStep")]
    steps = [event for event in steps if event.get("cat") != "gpu_user_annotation"] or steps
    # Batches that another thread makes ahead keep nobody waiting.
    threads = {event.get("tid") for event in steps}
    spans = [
        event for event in spans if not (threads and _is_data(event) and event.get("tid") not in threads)
    ]
    kernels = [event for event in spans if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    parts = _on_device(spans, kernels) if kernels else _on_host(spans)
    if not any(parts.values()):
        raise TraceError(f"{name}: no kernels and no CPU ops; expected a trace of torch.profiler")
    within = merged(span(event) for event in steps) or _hull(parts.values())
    within = _whole_device_steps(within, parts) if kernels else within
    clipped = {cause: both(part, within) for cause, part in parts.items()}
    if not any(clipped.values()):
        raise TraceError(f"{name}: no work inside its {len(steps)} ProfilerSteps")
    order = ("compute", "optimizer", "copies", "communication", "data")
    if not kernels:
        order = ("data", "optimizer", "compute", "copies", "communication")
    seconds, taken, taken_by = {}, Spans(), {}
    for cause in order:
        own = without(clipped[cause], taken)
        taken_by[cause] = own
        seconds[cause] = length(own)
        taken = merged([*taken, *own])
    seconds["idle"] = length(within) - length(taken)
    hidden = length(clipped["communication"]) - seconds["communication"]
    ordered = {cause: seconds[cause] / 1e6 for cause in CAUSES}
    nothing = without(within, taken)
    found = signs(spans, within, nothing, taken_by["copies"], bool(kernels))
    own = without(within, taken_by["communication"])
    windows = _windows(steps, within)
    own_of_steps = tuple(length(both(own, [window])) / 1e6 for window in windows)
    device = "cuda" if kernels else "cpu"
    exchanging = [event for event in kernels or spans if is_collective(event, bool(kernels))]
    each = exposed_of_each(exchanging, taken_by["communication"], windows or within)
    return Breakdown(
        rank, max(len(steps), 1), ordered, hidden / 1e6, device, found, own_of_steps, collectives=tuple(each)
    )


def stragglers(ranks: Sequence[Breakdown]) -> list[tuple[int, float]]:
    """Ranks whose own work is longer than that of the others, and by how many seconds.

    Others wait for a straggler inside collectives, so that it has the least exposed communication itself. One
    that is late in some steps only is none: that may happen to anyone.
    """
    if len(ranks) < 2:
        return []
    own = [one.own_work / one.steps for one in ranks]
    typical = median(own) if len(ranks) > 2 else min(own)
    least = STRAGGLES[ranks[0].device] * max(one.total / one.steps for one in ranks)
    late = [(one, each - typical) for one, each in zip(ranks, own, strict=True)]
    return [(one.rank, excess * one.steps) for one, excess in late if excess > least and _always(one, ranks)]


def _always(one: Breakdown, ranks: Sequence[Breakdown]) -> bool:
    """Whether a rank is later than the others in each step, as far as steps can be compared."""
    if len({len(each.own_of_steps) for each in ranks}) > 1:
        return True
    others = [each.own_of_steps for each in ranks if each is not one]
    least = 0.5 * STRAGGLES[one.device] * max(each.total / each.steps for each in ranks)
    return all(own - median(rest) > least for own, *rest in zip(one.own_of_steps, *others, strict=True))


def _windows(steps: list[dict[str, Any]], within: Spans) -> Spans:
    """From the begin of each step to that of the next; the last ends with all that is seen."""
    begins = sorted({span(event)[0] for event in steps})
    return list(zip(begins, [*begins[1:], within[-1][1]], strict=True)) if begins else []


def _on_device(spans: list[dict[str, Any]], kernels: list[dict[str, Any]]) -> dict[str, Spans]:
    """Spans by cause, of a trace with kernels."""
    launched = {
        event["args"]["correlation"]: event
        for event in spans
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    optimizing = merged(
        span(event) for event in spans if _is_optimizer(event) and event.get("cat") != _GPU_RANGE
    )
    found: dict[str, list[tuple[float, float]]] = {cause: [] for cause in CAUSES}
    for event in kernels:
        launch = launched.get(event.get("args", {}).get("correlation"))
        found[_device_cause(event, launch, optimizing)].append(span(event))
    found["data"] = [span(event) for event in spans if _is_data(event)]
    return {cause: merged(part) for cause, part in found.items() if cause != "idle"}


_GPU_RANGE = "gpu_user_annotation"


def _device_cause(event: dict[str, Any], launch: dict[str, Any] | None, optimizing: Spans) -> str:
    name = str(event.get("name", "")).casefold()
    if "nccl" in name or "rccl" in name:
        return "communication"
    if event.get("cat") == "gpu_memcpy" and ("htod" in name or "dtoh" in name):
        return "copies"
    if launch is not None and any(low <= launch["ts"] <= high for low, high in optimizing):
        return "optimizer"
    if launch is None and any(word in name for word in ("adam", "multi_tensor_apply")):
        return "optimizer"
    return "compute"


def _on_host(spans: list[dict[str, Any]]) -> dict[str, Spans]:
    """Spans by cause, of a trace without kernels."""
    found: dict[str, list[tuple[float, float]]] = {cause: [] for cause in CAUSES}
    for event in spans:
        name = str(event.get("name", "")).casefold()
        if _is_data(event):
            found["data"].append(span(event))
        elif _is_optimizer(event):
            found["optimizer"].append(span(event))
        elif is_collective(event, False):
            found["communication"].append(span(event))
        elif event.get("cat") == "cpu_op" and not name.startswith("c10d::"):
            found["compute"].append(span(event))
    return {cause: merged(part) for cause, part in found.items() if cause != "idle"}


def _is_data(event: dict[str, Any]) -> bool:
    return str(event.get("name", "")).startswith(_DATA) and event.get("cat") != _GPU_RANGE


def _is_optimizer(event: dict[str, Any]) -> bool:
    return str(event.get("name", "")).startswith("Optimizer.step")


def _whole_device_steps(within: Spans, parts: dict[str, Spans]) -> Spans:
    """Kernels run behind the host: the last ones of a step belong to it though the host has gone on."""
    last = max((part[-1][1] for part in parts.values() if part), default=within[-1][1])
    return [*within[:-1], (within[-1][0], max(within[-1][1], last))]


def _load(file: Path, place: int) -> tuple[list[dict[str, Any]], int]:
    try:
        raw = file.read_bytes()
        found = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        if isinstance(found, dict) and "traceEvents" not in found:
            raise ValueError("it has no traceEvents")
        events = found["traceEvents"] if isinstance(found, dict) else found
        about = (found.get("distributedInfo") if isinstance(found, dict) else None) or {}
        rank = int(about.get("rank", place))
        return [_checked(event) for event in events if isinstance(event, dict)], rank
    except OSError as error:
        raise TraceError(f"{file}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, EOFError, zlib.error, AttributeError, RecursionError) as error:
        raise TraceError(f"{file}: not a Chrome trace: {' '.join(str(error).split())[:120]}") from None


def _checked(event: dict[str, Any]) -> dict[str, Any]:
    """An event with the fields that are used as they should be. Raises ValueError."""
    if event.get("ph") == "X" and event.get("dur") is not None:
        for field in ("ts", "dur"):
            value = event.get(field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                name = str(event.get("name", ""))[:40]
                raise ValueError(f"{field} of event {name!r}: {value!r}; expected microseconds")
    told = event.get("args")
    arguments = told if isinstance(told, dict) else {}
    if not isinstance(arguments.get("correlation", 0), int | str):
        arguments = {}
    return event if told is arguments else {**event, "args": arguments}


def _hull(parts: Iterable[Spans]) -> Spans:
    ends = [span for part in parts for span in part]
    return [(min(low for low, _ in ends), max(high for _, high in ends))]
