"""What a service will need: quantiles of its load for each slot of the horizon, from its own past.

Invariant: whatever the history holds (gaps, zeros, one absurd spike, nothing at all), the answer has `steps`
rows of ten finite numbers, none negative, none falling as the level rises, and depends on the history alone.
Two opinions are averaged, quantile by quantile: a blend of cheap experts with its own past errors, and small
networks that learned on recorded services what such errors look like. The cost of the choice: it knows the
season, seven of them and weekends, not holidays or launches.

`python -m tasks.forecast` makes, scores and trains forecasts (`forecast_command`).
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import numpy as np
from scipy.special import ndtri

from tasks import quantile_model
from tasks.experts import LEVELS as LEVELS
from tasks.experts import MOST_SEASONS as MOST_SEASONS
from tasks.experts import Array, Blend, blend
from tasks.forecast_scores import seasonal_naive

# Quantiles of real load as multiples of the mean that its operator stated, measured across recorded services.
STATED_LEVELS, STATED_MULTIPLIERS = (0.1, 0.5, 0.83, 0.9, 0.95), (0.58, 0.98, 1.38, 1.48, 1.49)

LONGEST_SPIKE = 2  # slots; what stays high for longer is load


@dataclass(frozen=True)
class Calendar:
    """When slot 0 begins by the clocks of the service's users, and how long a slot is."""

    begin: datetime
    slot: timedelta

    def weekend(self, before: int, after: int) -> Array:
        """1 for each slot that begins on a Saturday or Sunday, from `before` slots before slot 0 on."""
        monday = self.begin.replace(hour=0, minute=0, second=0, microsecond=0)
        since = (self.begin - monday + timedelta(days=self.begin.weekday())) / self.slot
        days = (since + np.arange(-before, after)) * (self.slot / timedelta(days=1)) // 1
        return (days % 7 >= 5).astype(np.float64)

    def later(self, slots: int) -> "Calendar":
        """The same with a later slot 0."""
        return Calendar(self.begin + slots * self.slot, self.slot)


@dataclass(frozen=True)
class Forecast:
    """Quantiles at LEVELS, one row for each slot from slot 0 on; how they were made, and why so."""

    quantiles: tuple[tuple[float, ...], ...]
    method: str
    reason: str
    # Of the hour's forecast: who made it, what all forecasters said, and how much of the past was known.
    forecaster: str | None = None
    rivals: Mapping[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    coverage: float | None = None


def forecast(
    history: Sequence[float | None], steps: int, season: int, stated: float, calendar: Calendar | None = None
) -> Forecast:
    """The load of the next `steps` slots.

    `history` ends with the slot before slot 0; None (and anything that is not a finite number from 0 up) is
    unknown. `season` is in slots. `stated` is the mean that the operator expects, used while little is known.
    """
    return _forecast(history, steps, season, stated, calendar, averaged, "blend and model")


def forecast_by_blend(
    history: Sequence[float | None], steps: int, season: int, stated: float, calendar: Calendar | None = None
) -> Forecast:
    """The same by the experts and their own errors alone."""
    return _forecast(history, steps, season, stated, calendar, own, "blend")


def forecast_seasonal(
    history: Sequence[float | None], steps: int, season: int, stated: float, calendar: Calendar | None = None
) -> Forecast:
    """The seasonal naive one: the value a season before, the last week's seasonal differences around it."""
    known = usable(history, season)
    if np.isnan(known[-season:]).all() or len(known) <= season:
        return forecast(history, steps, season, stated, calendar)
    told = "the season before, and the differences of the last seven"
    return _answer(seasonal_naive(known, steps, season, LEVELS), "seasonal naive", told)


def _forecast(
    history: Sequence[float | None],
    steps: int,
    season: int,
    stated: float,
    calendar: Calendar | None,
    made_of: Callable[[Blend], Array],
    method: str,
) -> Forecast:
    if steps < 1 or season < 1:
        raise ValueError(f"forecast: steps {steps} and season {season}; expected at least 1 of each")
    known = usable(history, season)
    stated = stated if math.isfinite(stated) and stated > 0 else 0.0
    seen = np.flatnonzero(~np.isnan(known))
    if not len(seen):
        return _answer(np.tile(_stated(stated), (steps, 1)), "stated", "no history; the stated mean is used")
    late = len(known) - 1 - int(seen[-1])
    told = f"{len(seen)} known slots" + (f", the last one {late} slots ago" if late else "")
    if len(seen) < season or seen[-1] - seen[0] < season:
        rows = _level(known[seen], steps, season, stated)
        told = f"{told}, not more than a season of {season}; the recent level is used"
        if len(seen) == season and not late:
            rows = (rows + np.resize(known[seen], steps)[:, None] * _stated(1.0)) / 2
            told += " and the only season, half each"
        return _answer(rows, "level", told)
    found = expected(known, steps, season, calendar)
    told = f"{told} in seasons of {season}; {found.leader} did best lately"
    return _answer(made_of(found), method, told)


def usable(history: Sequence[float | None], season: int) -> Array:
    """The part of a history that is looked at, NaN where it says nothing."""
    known = np.array([math.nan if value is None else value for value in history[-MOST_SEASONS * season :]])
    known[~(np.isfinite(known) & (known >= 0))] = np.nan
    return known


def expected(known: Array, steps: int, season: int, calendar: Calendar | None) -> Blend:
    """What the experts expect of the `steps` slots after a history (see `usable`) with something in it."""
    seen = np.flatnonzero(~np.isnan(known))
    late = len(known) - 1 - int(seen[-1])
    # A source that is late: forecast from its last known slot on; a long gap is cut, its phase kept.
    gap = late if late <= 2 * season else 2 * season + late % season
    z = _without_spikes(np.sqrt(known[seen[0] : seen[-1] + 1]))
    weekend = np.zeros(len(z) + gap + steps)
    if calendar is not None and calendar.slot * season == timedelta(days=1):
        weekend = np.concatenate((calendar.weekend(len(z) + late, -late), calendar.weekend(gap, steps)))
    found = blend(z, gap + steps, season, weekend)
    return Blend(
        found.centre[gap:], found.offsets[gap:], found.scale[gap:], found.features[gap:], found.leader
    )


def averaged(found: Blend, networks: tuple[quantile_model.Layers, ...] | None = None) -> Array:
    """Quantiles of the load: those of the blend's own past errors and those of the networks, averaged."""
    learned = quantile_model.offsets(found.features, networks) * found.scale[:, None]
    return (_load(found, found.offsets) + _load(found, learned)) / 2


def own(found: Blend) -> Array:
    """Quantiles of the load by the blend's own past errors alone."""
    return _load(found, found.offsets)


def _load(found: Blend, offsets: Array) -> Array:
    rows = np.maximum(found.centre[:, None] + offsets, 0.0) ** 2
    return np.asarray(np.maximum.accumulate(rows, axis=1))


def gpu_demand_quantiles(forecast: Forecast, gpus_per_replica: int = 1) -> list[list[int]]:
    """Whole GPUs, multiples of a replica's, that cover each quantile."""
    return [
        [math.ceil(value / gpus_per_replica - 1e-9) * gpus_per_replica for value in row]
        for row in forecast.quantiles
    ]


def at_levels(found: Forecast, levels: Sequence[float]) -> Array:
    """Slot × level for levels of one's own; see `between`."""
    return between(np.array(found.quantiles), levels)


def between(rows: Array, levels: Sequence[float]) -> Array:
    """Quantiles at other levels than LEVELS.

    Between them, and beyond, quantiles change with the level as those of a normal distribution do.
    """
    scores, wanted = ndtri(np.array(LEVELS)), ndtri(np.array(levels))
    left = np.clip(np.searchsorted(scores, wanted) - 1, 0, len(LEVELS) - 2)
    share = (wanted - scores[left]) / (scores[left + 1] - scores[left])
    return np.asarray(np.maximum(rows[:, left] * (1 - share) + rows[:, left + 1] * share, 0.0))


def _answer(rows: Array, method: str, reason: str) -> Forecast:
    rows = np.maximum.accumulate(np.maximum(rows, 0.0), axis=1)
    return Forecast(tuple(tuple(float(value) for value in row) for row in rows), method, reason)


def _stated(mean: float) -> Array:
    """The stated mean's quantiles at LEVELS."""
    return mean * np.interp(LEVELS, STATED_LEVELS, STATED_MULTIPLIERS)


def _without_spikes(z: Array) -> Array:
    """√y with isolated slots far above all others cut down; what stays up longer is a new level."""
    load = z[z > 0]
    if len(load) < 3:
        return z
    low, high = np.quantile(load, (0.1, 0.9))
    most = high + max(high - low, high / 2)
    above = np.nan_to_num(z) > most
    edges = np.flatnonzero(np.diff(np.concatenate(([False], above, [False])).astype(np.int8)))
    cut = z.copy()
    for start, end in edges.reshape(-1, 2):
        if end - start <= LONGEST_SPIKE:
            cut[start:end] = high
    return cut


def _level(values: Array, steps: int, season: int, stated: float) -> Array:
    """Little history: the recent mean, drawn to the stated one while slots are few, and the spread so far."""
    count = len(values)
    recent = float(np.mean(values[-max(1, season // 8) :]))
    level = (count * recent + 3 * stated) / (count + 3) if stated else recent
    spread = np.interp(LEVELS, STATED_LEVELS, STATED_MULTIPLIERS)
    if count >= 4:
        own = np.quantile(values, LEVELS)
        share = count / (count + season)
        return np.tile((1 - share) * level * spread + share * own, (steps, 1))
    return np.tile(level * spread, (steps, 1))


if __name__ == "__main__":
    from tasks.forecast_command import main

    main(sys.argv[1:])
