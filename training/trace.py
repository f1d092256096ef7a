"""Where a step's time goes, from a trace that torch.profiler (Kineto) wrote, on GPUs or on a CPU.

Each instant of the profiled steps belongs to one cause. Computing comes first, so that communication or
copies that run beside it cost nothing; then optimizer, copies between host and device, communication, waiting
for data; the rest is idle. Invariant: the causes of a rank add up to its time. On a CPU, ops stand for
kernels, and whoever waits for data or runs the optimizer does so in the same thread, so that those come
first. The cost: a trace is read whole into memory.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from training.signs import HOST_READ_IDLE, signs
from training.spans import Spans, both, length, merged, span, without

CAUSES = ("compute", "optimizer", "copies", "communication", "data", "idle")
STRAGGLES = 0.05  # more than the median rank's own work, as a share of the step

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

    @property
    def total(self) -> float:
        """Seconds of all steps."""
        return sum(self.seconds.values())

    def at_most(self, step_seconds: float) -> "Breakdown":
        """The breakdown without the time that the profiler itself took, as steps last so long without it."""
        added = max(self.total - step_seconds * self.steps, 0.0)
        idle = max(self.seconds["idle"] - added, 0.0)
        found = {
            name: min(value, idle) if name == HOST_READ_IDLE else value for name, value in self.signs.items()
        }
        return replace(self, seconds={**self.seconds, "idle": idle}, signs=found)

    def share(self, cause: str) -> float:
        """Of the time."""
        return self.seconds[cause] / self.total

    @property
    def own_work(self) -> float:
        """Seconds in which the rank waits for no other."""
        return self.total - self.seconds["communication"]


def read(files: Sequence[Path]) -> list[Breakdown]:
    """A breakdown for each file, in the order of ranks. Raises TraceError."""
    found = [breakdown(*_load(file, place), str(file)) for place, file in enumerate(files)]
    ranks = [one.rank for one in found]
    if len(set(ranks)) < len(ranks):
        raise TraceError(f"{files[0]}: ranks {ranks}: two traces are of the same rank")
    return sorted(found, key=lambda one: one.rank)


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
    return Breakdown(rank, max(len(steps), 1), ordered, hidden / 1e6, "cuda" if kernels else "cpu", found)


def stragglers(ranks: Sequence[Breakdown]) -> list[tuple[int, float]]:
    """Ranks whose own work is longer than that of the others, and by how many seconds.

    Others wait for a straggler inside collectives, so that it has the least exposed communication itself.
    """
    if len(ranks) < 2:
        return []
    typical = (
        median([one.own_work for one in ranks]) if len(ranks) > 2 else min(one.own_work for one in ranks)
    )
    longest = max(one.total for one in ranks)
    late = [(one.rank, one.own_work - typical) for one in ranks]
    return [(rank, excess) for rank, excess in late if excess > STRAGGLES * longest]


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
        elif name.startswith(("gloo:", "mpi:", "nccl:")):
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
        events = found["traceEvents"] if isinstance(found, dict) else found
        rank = found.get("distributedInfo", {}).get("rank", place) if isinstance(found, dict) else place
        return [event for event in events if isinstance(event, dict)], int(rank)
    except OSError as error:
        raise TraceError(f"{file}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, EOFError, zlib.error, AttributeError) as error:
        raise TraceError(f"{file}: not a Chrome trace: {' '.join(str(error).split())[:120]}") from None


def _hull(parts: Iterable[Spans]) -> Spans:
    ends = [span for part in parts for span in part]
    return [(min(low for low, _ in ends), max(high for _, high in ends))]
