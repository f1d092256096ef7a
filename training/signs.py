"""What a trace shows of well-known mistakes, beside the causes of time: counts, and the seconds they explain.

Invariant: a sign's seconds are part of a cause's, so that nothing is counted twice: un-pinned copies of
exposed copies, what reading a value on the host (`.item()`, a printed loss) leaves idle of idle time. On a
CPU neither exists: there is no second processor to wait for. There, between any two ops some time is idle
because ops are sent one by one; what lies between them for long is something else.
"""

import re
import sys
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from training.spans import Spans, both, length, merged, span
from training.uncompiled import uncompiled_seconds

UNPINNED, HOST_READ_IDLE = "unpinned_seconds", "host_read_idle_seconds"
LONG_IDLE, PREEMPTED = "long_idle_seconds", "preempted_seconds"  # on a CPU
HOST_READS, COLLECTIVES, GRAPH_BREAKS = "host_reads", "collectives", "graph_breaks"  # counts
UNCOMPILED = "uncompiled_seconds"  # what lies between pieces that torch.compile made
UNBROKEN = "unbroken_seconds"  # by which the steps were shorter without graph breaks, where that was measured
FUSED = "fused_optimizer"  # 1 where the optimizer is one kernel
LONG_US = 1000.0  # many times what sending an op takes
_FUSED = re.compile("_?fused_?(adam|sgd|adagrad)", re.IGNORECASE)
_READ = "aten::_local_scalar_dense"
_READS = (_READ, "cudaStreamSynchronize", "cudaDeviceSynchronize", "hipStreamSynchronize")


def signs(
    events: list[dict[str, Any]], within: Spans, idle: Spans, copies: Spans, on_device: bool
) -> dict[str, float]:
    """The signs in complete events; `idle` and `copies` are when nothing ran, and copies that nothing hid."""

    def inside(wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        return [event for event in events if wanted(event) and both([span(event)], within)]

    found = {COLLECTIVES: float(len(inside(lambda event: is_collective(event, on_device))))}
    found[UNCOMPILED] = uncompiled_seconds(events, within)
    found[FUSED] = float(any(_FUSED.search(str(event.get("name", ""))) is not None for event in events))
    if not on_device:
        found[LONG_IDLE] = sum(end - begin for begin, end in idle if end - begin >= LONG_US) / 1e6
        return found
    pageable = merged(span(event) for event in inside(_is_unpinned))
    found[UNPINNED] = length(both(copies, pageable)) / 1e6
    waits = inside(lambda event: str(event.get("name", "")).startswith(_READS))
    reads = merged(span(event) for event in waits)
    found[HOST_READS] = float(sum(event["name"] == _READ for event in waits))
    # The device runs dry while the host waits for it, and stays so until what the host then sends arrives.
    found[HOST_READ_IDLE] = sum(end - begin for begin, end in idle if _read_before(reads, begin, end)) / 1e6
    return found


def graph_breaks() -> int:
    """Graph breaks that torch.compile has met in this process; it counts each once, when it compiles."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # nothing was compiled unless it is there
    return sum(dynamo.counters["graph_break"].values()) if dynamo else 0


def _read_before(reads: Spans, begin: float, end: float) -> bool:
    """Whether the host waited for the device when it ran dry at `begin`, or since."""
    place = bisect_right(reads, (end, end)) - 1
    return place >= 0 and reads[place][1] >= begin


def _is_unpinned(event: dict[str, Any]) -> bool:
    return event.get("cat") == "gpu_memcpy" and "pageable" in str(event.get("name", "")).casefold()


def is_collective(event: dict[str, Any], on_device: bool) -> bool:
    """Whether an event is a collective at work: a kernel where there is a GPU."""
    name = str(event.get("name", "")).casefold()
    if on_device:
        return event.get("cat") == "kernel" and ("nccl" in name or "rccl" in name)
    return name.startswith(("gloo:", "mpi:", "nccl:")) and event.get("cat") != "gpu_user_annotation"
