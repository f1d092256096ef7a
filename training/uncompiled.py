"""What runs uncompiled between pieces that torch.compile made: what its graph breaks cost.

Invariant: only what a break put there counts. Parts of a model that were never compiled lie outside the
compiled layers, and gradients are added to weights between them in any case; matmuls and attention take as
long compiled. So the rest, which would be fused into its neighbours, is the most that a run without the
breaks would win. The cost of plainness: what it would still take when fused is not taken off; on a processor
a fifth to a half of what is said was seen to be that.
"""

import itertools
import math
import re
from bisect import bisect_right
from typing import Any

from training.spans import Spans, both, length, merged, span, without

_REGION = "Torch-Compiled Region"
_FORWARD, _BACKWARD = "CompiledFunction", "CompiledFunctionBackward"
_WORK = ("aten::", "autograd::engine::evaluate_function: ")
_ACCUMULATE = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
_MATMULS = re.compile(
    r"gemm|cutlass|xmma|nvjet|flash|fmha|attention|^aten::(\w*mm|matmul|linear)\b", re.IGNORECASE
)


def uncompiled_seconds(events: list[dict[str, Any]], within: Spans) -> float:
    """Seconds of the complete events of a trace, on a GPU where it has one, else on the host."""
    named: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        named.setdefault(str(event.get("name", "")), []).append(span(event))
    regions = merged(each for name, spans in named.items() if name.startswith(_REGION) for each in spans)
    if not regions:
        return 0.0
    forward = without(regions, merged(named.get(_FORWARD, [])))
    backward = [
        (left[1], right[0])
        for left, right in itertools.pairwise(sorted(named.get(_BACKWARD, [])))
        if left[1] < right[0] and not _overlaps(regions, left[1], right[0])
    ]
    work = merged(each for name, spans in named.items() if name.startswith(_WORK) for each in spans)
    work = without(work, merged(named.get(_ACCUMULATE, [])))
    between = both(_hulls(both(merged([*forward, *backward]), within), work), within)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        return length(without(between, merged(span(event) for event in events if _is_matmul(event)))) / 1e6
    sent = {
        event.get("args", {}).get("correlation")
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and _overlaps(between, *span(event))
    }
    theirs = [event for event in kernels if event.get("args", {}).get("correlation") in sent]
    return length(merged(span(event) for event in theirs if not _is_matmul(event))) / 1e6


def _hulls(gaps: Spans, work: Spans) -> Spans:
    """From the first to the last work in each gap: what only leads from one compiled piece to the next is not
    the break's."""
    found: dict[int, tuple[float, float]] = {}
    for begin, end in both(gaps, work):
        gap = bisect_right(gaps, (begin, math.inf)) - 1
        found[gap] = (found.get(gap, (begin, end))[0], end)
    return [found[gap] for gap in sorted(found)]


def _overlaps(spans: Spans, begin: float, end: float) -> bool:
    place = bisect_right(spans, (end, 0.0)) - 1
    return place >= 0 and spans[place][1] > begin


def _is_matmul(event: dict[str, Any]) -> bool:
    return _MATMULS.search(str(event.get("name", ""))) is not None
