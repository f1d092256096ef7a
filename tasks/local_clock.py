"""A history on the wall clock of a service's users, and what is forecast on it back on slots.

People come at nine by their own clock, whatever that is in UTC. When the clock changes, a load's season moves
by an hour in UTC, and what was known of the same hour of yesterday and of last week is known of another.

Invariant: slot 0 keeps its place, and where the clock does not change in what is seen, all is as it came. The
hour that a clock leaves out is unknown; of the hour that comes twice the mean is known. The cost: while that
hour comes again, for an hour a year, nothing is put right.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, tzinfo

import numpy as np
from numpy.typing import NDArray

from tasks.forecast import Calendar, Forecast

DAY = timedelta(days=1)


@dataclass(frozen=True)
class OnWallClock:
    """What a forecaster sees: `history` ends before slot 0, `steps` are to be forecast, and the `calendar` of
    the zone. `rows` says for each slot that is asked for which of the steps is meant."""

    history: Sequence[float | None]
    steps: int
    calendar: Calendar
    rows: Sequence[int]

    def put_back(self, found: Forecast) -> Forecast:
        """The forecast for the slots that are asked for."""
        return replace(found, quantiles=tuple(found.quantiles[row] for row in self.rows))


def on_wall_clock(
    history: Sequence[float | None], steps: int, begin: datetime, slot: timedelta, zone: tzinfo
) -> OnWallClock:
    """A history by the clock of a zone. `begin` is the instant at which slot 0 begins, with its own zone."""
    calendar = Calendar(begin.astimezone(zone).replace(tzinfo=None), slot)
    moved = _moved(begin, slot, zone, -len(history), steps)
    places = np.arange(-len(history), steps) + moved
    past, rows = places[: len(history)], places[len(history) :]
    if not moved.any() or (past >= 0).any():
        return OnWallClock(history, steps, calendar, range(steps))
    known = np.array([np.nan if value is None else value for value in history], dtype=np.float64)
    seen = np.isfinite(known)
    sums, counts = (np.zeros(-int(past.min(initial=0))) for _ in range(2))
    np.add.at(sums, past[seen], known[seen])  # places count from the end
    np.add.at(counts, past[seen], 1)
    means = [float(total / count) if count else None for total, count in zip(sums, counts, strict=True)]
    return OnWallClock(means, int(rows.max()) + 1, calendar, tuple(int(row) for row in rows))


def _moved(begin: datetime, slot: timedelta, zone: tzinfo, first: int, last: int) -> NDArray[np.int64]:
    """By how many slots the clock is ahead of what it was in slot 0, for the slots from `first` to before
    `last`. Only days at whose ends it differs are looked at slot by slot."""

    def ahead(place: int) -> int:
        offset = (begin + place * slot).astimezone(zone).utcoffset()
        return round(((offset or timedelta(0)) - now) / slot)

    now = begin.astimezone(zone).utcoffset() or timedelta(0)
    found = np.zeros(last - first, dtype=np.int64)
    day = max(1, round(DAY / slot))
    for low in range(first, last, day):
        high = min(low + day, last)
        ends = ahead(low), ahead(high - 1)
        same = ends[0] == ends[1]
        found[low - first : high - first] = ends[0] if same else [ahead(each) for each in range(low, high)]
    return found
