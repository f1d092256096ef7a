"""When nodes of a replay go and come back: from a file, or drawn by the seed.

Invariant: a node's outages do not overlap, and what is drawn for one node depends on the seed and its name
alone: another node more or a longer window changes nothing of it.
"""

import csv
import math
import random
from dataclasses import dataclass
from pathlib import Path

from tasks.cluster import Cluster
from tasks.trace import Trace, TraceError

REPAIR_HOURS = 4.0  # mean time until a node that failed by chance is back

Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class NodeEvent:
    """A node goes or comes back; seconds count from the window's begin."""

    at_s: float
    node: str
    lost: bool


def node_events(failures: str | None, cluster: Cluster, trace: Trace, seed: int) -> tuple[NodeEvent, ...]:
    """The events in order. `failures` is a file (node, from_s, to_s, on the clock of `submit_s`) or the mean
    days between failures of a node; None for none. Raises TraceError.
    """
    names = [node.name for node in cluster.nodes]
    spans: dict[str, Spans] = {name: [] for name in names}
    if failures is not None:
        try:
            days = float(failures)
        except ValueError:
            _read(Path(failures), spans, trace.begin_s)
        else:
            if not 0 < days < math.inf:
                raise TraceError(f"--failures: {failures}; expected a file, or days above 0")
            for name in names:
                spans[name] = _drawn(days * 86400, trace.seconds, random.Random(f"{seed}/{name}"))
    events = [
        NodeEvent(at, name, lost)
        for name, found in spans.items()
        for span in _merged(found)
        for at, lost in zip(span, (True, False), strict=True)
    ]
    return tuple(sorted(events, key=lambda event: (event.at_s, event.lost)))


def _drawn(between_s: float, window_s: float, chance: random.Random) -> Spans:
    spans, at = [], chance.expovariate(1 / between_s)
    while at < window_s:
        back = at + chance.expovariate(1 / (REPAIR_HOURS * 3600))
        spans.append((at, back))
        at = back + chance.expovariate(1 / between_s)
    return spans


def _merged(spans: Spans) -> Spans:
    """Outages of a node that touch are one."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _read(file: Path, spans: dict[str, Spans], begin_s: float) -> None:
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            rows = csv.DictReader(lines)
            for row in rows:
                place = f"{file}: line {rows.line_num}"
                if (node := row.get("node")) not in spans:
                    raise TraceError(f"{place}: node: {node!r:.60}; expected one of {', '.join(spans)}")
                begin, end = (_seconds(place, name, row.get(name)) for name in ("from_s", "to_s"))
                if not begin < end:
                    raise TraceError(f"{place}: to_s: {end:g}; expected more than from_s, {begin:g}")
                spans[node].append((begin - begin_s, end - begin_s))
    except OSError as error:
        raise TraceError(
            f"--failures: {file}: cannot be read: {error.strerror}; expected a file or days"
        ) from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise TraceError(f"--failures: {file}: cannot be read: {error}; expected CSV") from None


def _seconds(place: str, name: str, value: str | None) -> float:
    try:
        seconds = float(value or "")
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise TraceError(f"{place}: {name}: {value!r:.40}; expected seconds")
    return seconds
