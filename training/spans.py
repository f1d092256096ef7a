"""Sets of instants, as sorted (begin, end) pairs that lie apart."""

from collections.abc import Iterable
from typing import Any

Spans = list[tuple[float, float]]


def span(event: dict[str, Any]) -> tuple[float, float]:
    """When a complete event of a trace was."""
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """Any pairs, as one set."""
    found = Spans()
    for low, high in sorted(spans):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        elif high > low:
            found.append((low, high))
    return found


def without(spans: Spans, other: Spans) -> Spans:
    """What of `spans` lies outside `other`; both sorted and merged."""
    found, place = Spans(), 0
    for low, high in spans:
        while place < len(other) and other[place][1] <= low:
            place += 1
        at = place
        while at < len(other) and other[at][0] < high:
            if other[at][0] > low:
                found.append((low, other[at][0]))
            low = max(low, other[at][1])
            at += 1
        if low < high:
            found.append((low, high))
    return found


def both(spans: Spans, other: Spans) -> Spans:
    """What lies in the one and in the other."""
    return without(spans, without(spans, other))


def length(spans: Spans) -> float:
    """All of it."""
    return sum(high - low for low, high in spans)
