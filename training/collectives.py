"""What ranks spend on exchanging, apart from waiting for whoever comes last.

A collective ends on all ranks at about the same time, and the last rank to come waits for nobody: what it
spends there is the exchange itself. Invariant: only instants count that nothing hides, each for the
collective that ends first of those under way. The median step counts, as in any one step the machine may
have done something else. The cost: ranks whose collectives differ, as in a pipeline, are not told apart so.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from statistics import median
from typing import Any

from training.spans import Spans, span

Collective = tuple[int, str, float]  # the step it began in, its name, seconds that nothing hides


def exposed_of_each(events: Iterable[dict[str, Any]], exposed: Spans, windows: Spans) -> list[Collective]:
    """The collectives of one rank, as they began; `exposed` is when one was under way and nothing else,
    `windows` are the steps."""
    begins, steps = [begin for begin, _ in exposed], [begin for begin, _ in windows]
    sums = [0.0, *accumulate(end - begin for begin, end in exposed)]

    def until(instant: float) -> float:
        place = bisect_right(begins, instant)
        return sums[place] - max(exposed[place - 1][1] - instant, 0.0) if place else 0.0

    found, done = [], -math.inf
    for begin, end, name in sorted(
        ((*span(event), str(event.get("name", ""))) for event in events), key=lambda each: each[1]
    ):
        seconds = max(until(end) - until(max(begin, done)), 0.0) / 1e6
        done = end
        found.append((begin, bisect_right(steps, begin) - 1, name, seconds))
    return [(step, name, seconds) for _, step, name, seconds in sorted(found) if step >= 0]


def exchange_seconds(ranks: Sequence[Sequence[Collective]], steps: int) -> float | None:
    """Seconds that exchanges take in so many steps; None where the ranks' are not the same ones."""
    first, *others = ([(step, name) for step, name, _ in one] for one in ranks)
    if not first or any(other != first for other in others):
        return None
    of_steps = dict.fromkeys(range(steps), 0.0)
    for same in zip(*ranks, strict=True):
        of_steps[same[0][0]] += min(seconds for *_, seconds in same)
    return steps * median(of_steps.values())
