"""What a service will need: quantiles of its load for each slot of the horizon, from its own past.

Invariant: whatever the history holds (gaps, zeros, one absurd spike, nothing at all), the answer has `steps`
rows of ten finite numbers, none negative, none falling as the level rises. A blend of cheap experts in √y,
weighted for each step ahead by how well each did lately; the quantiles are the blend's own past errors at
that distance. The cost of the choice: it knows the season and seven of them, not holidays or launches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEVELS = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)
# Quantiles of real load as multiples of the mean that its operator stated, measured across recorded services.
STATED_LEVELS, STATED_MULTIPLIERS = (0.1, 0.5, 0.83, 0.9, 0.95), (0.58, 0.98, 1.38, 1.48, 1.49)

ENOUGH_SEASONS = 1.75  # below it the blend's intervals are far too narrow
MOST_SEASONS = 35  # four weeks of days, and the week before that the weekly lag looks at
MOST_CELLS = 60_000  # past origins × steps that are looked at; bounds time and memory when slots are fine
WEIGHT_POWER = 6  # how sharply the blend prefers experts with small errors
WEIGHT_HALF_LIFE = 4.0  # seasons
ERROR_HALF_LIFE = 10.0  # seasons
# Errors seen over few seasons are few and alike: their centre is chance and their spread too narrow. Over S
# seasons the centre counts 1 - 2/S and the spread 1 + 0.4/(S - 1): measured, 80 % intervals cover 76 to 81 %.
CENTRE_SEASONS, SPREAD_GROWTH = 2.0, 0.4
LONGEST_SPIKE = 2  # slots; what stays high for longer is load
DISTANCES = 16  # steps ahead at which error quantiles are taken; between them they are interpolated
EXPERTS = (
    "last value", "short mean", "season's mean", "last season", "last week", "profile",
    "profile at today's level", "last season and today's change",
)  # fmt: skip


@dataclass(frozen=True)
class Forecast:
    """Quantiles at LEVELS, one row for each slot from slot 0 on; how they were made, and why so."""

    quantiles: tuple[tuple[float, ...], ...]
    method: str
    reason: str


def forecast(history: Sequence[float | None], steps: int, season: int, stated: float) -> Forecast:
    """The load of the next `steps` slots.

    `history` ends with the slot before slot 0; None (and anything that is not a finite number from 0 up) is
    unknown. `season` is in slots. `stated` is the mean that the operator expects, used while little is known.
    """
    if steps < 1 or season < 1:
        raise ValueError(f"forecast: steps {steps} and season {season}; expected at least 1 of each")
    known = np.array([math.nan if value is None else value for value in history], dtype=np.float64)
    known[~(np.isfinite(known) & (known >= 0))] = np.nan
    known = known[-MOST_SEASONS * season :]
    seen = np.flatnonzero(~np.isnan(known))
    stated = stated if math.isfinite(stated) and stated > 0 else 0.0
    if not len(seen):
        return _answer(np.tile(_stated(stated), (steps, 1)), "stated", "no history; the stated mean is used")
    late = len(known) - 1 - int(seen[-1])
    # A source that is late: forecast from its last known slot on; a long gap is cut, its phase kept.
    gap = late if late <= 2 * season else 2 * season + late % season
    z = _without_spikes(np.sqrt(known[seen[0] : seen[-1] + 1]))
    told = f"{len(seen)} known slots" + (f", the last one {late} slots ago" if late else "")
    if len(z) < ENOUGH_SEASONS * season or len(seen) < season:
        rows = _level(z, steps, season, stated)
        return _answer(
            rows, "level", f"{told}, under {ENOUGH_SEASONS} seasons of {season}; the recent level is used"
        )
    rows, leader = _blend(z, steps + gap, season)
    return _answer(rows[gap:], "blend", f"{told} in seasons of {season}; {leader} did best lately")


def gpu_demand_quantiles(forecast: Forecast, gpus_per_replica: int = 1) -> list[list[int]]:
    """Whole GPUs, multiples of a replica's, that cover each quantile."""
    return [
        [math.ceil(value / gpus_per_replica - 1e-9) * gpus_per_replica for value in row]
        for row in forecast.quantiles
    ]


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


def _level(z: Array, steps: int, season: int, stated: float) -> Array:
    """Little history: the recent mean, drawn to the stated one while slots are few, and the spread so far."""
    values = z[~np.isnan(z)]
    count = len(values)
    recent = float(np.mean(values[-max(1, season // 8) :] ** 2))
    level = (count * recent + 3 * stated) / (count + 3) if stated else recent
    spread = np.interp(LEVELS, STATED_LEVELS, STATED_MULTIPLIERS)
    if count >= 4:
        own = np.quantile(values**2, LEVELS)
        share = count / (count + season)
        return np.tile((1 - share) * level * spread + share * own, (steps, 1))
    return np.tile(level * spread, (steps, 1))


def _blend(z: Array, steps: int, season: int) -> tuple[Array, str]:
    """Quantile rows for the steps after the last slot of z, and the expert that leads in the first."""
    filled = _filled(z, season)
    size = len(z)
    first = season - 1 if size < 4 * season else 2 * season - 1
    stride = max(1, -(-(size - first) * steps // MOST_CELLS), season // 48)
    origins = np.arange(size - 1, first - 1, -stride)[::-1]
    ahead = np.arange(1, steps + 1)
    guesses = _experts(filled, origins, ahead, season)  # origin × step × expert
    targets = origins[:, None] + ahead
    truth = np.where(targets < size, z[np.minimum(targets, size - 1)], np.nan)
    errors = np.abs(guesses - truth[:, :, None])
    weights = _weights(errors, origins, ahead, season)
    blended = np.einsum("ohk,ohk->oh", guesses, weights)
    residuals = truth - blended
    age = (size - 1 - origins) / season
    offsets = _error_quantiles(residuals, 0.5 ** (age / ERROR_HALF_LIFE), ahead)
    centre = offsets.mean(axis=1, keepdims=True)
    seasons = max(2.0, size / season)
    spread = 1 + SPREAD_GROWTH / (seasons - 1)
    offsets = centre * (1 - CENTRE_SEASONS / seasons) + (offsets - centre) * spread
    rows = np.maximum(blended[-1][:, None] + offsets, 0.0) ** 2
    return rows, EXPERTS[int(np.argmax(weights[-1, 0]))]


def _filled(z: Array, season: int) -> Array:
    """z without gaps, each filled from the past alone: the season before, else the slot before."""
    filled = z.copy()
    for index in np.flatnonzero(np.isnan(z)):
        filled[index] = filled[index - season] if index >= season else filled[index - 1]
    return filled


def _experts(z: Array, origins: NDArray[np.int64], ahead: NDArray[np.int64], season: int) -> Array:
    """What each expert says at each origin for each step ahead, from slots up to the origin only."""
    size = len(z)
    sums = np.concatenate(([0.0], np.cumsum(z)))

    def mean_before(length: int) -> Array:
        begin = np.maximum(origins + 1 - length, 0)
        return np.asarray((sums[origins + 1] - sums[begin]) / (origins + 1 - begin))

    profile = z.copy()  # at a slot: the decayed mean of the slots at its phase up to it
    weight = np.ones(size)
    for first in range(season, size, season):
        now = slice(first, min(first + season, size))
        before = slice(now.start - season, now.stop - season)
        weight[now] = 1 + 0.8 * weight[before]
        profile[now] += (profile[before] - profile[now]) * (0.8 * weight[before] / weight[now])

    phase = origins[:, None] + ahead - season * -(-ahead // season)  # latest known slot of the target's phase
    week = origins[:, None] + ahead - 7 * season * -(-ahead // (7 * season))
    last_season = z[phase]
    last_week = np.where(week >= 0, z[np.maximum(week, 0)], last_season)

    short = max(1, season // 8)
    expected = np.concatenate((z[:season], profile[:-season]))  # the profile as it stood a season before
    drift = np.concatenate(([0.0], np.cumsum(z - expected)))
    start = np.maximum(origins + 1 - short, 0)
    surprise = (drift[origins + 1] - drift[start]) / (origins + 1 - start)
    lag = np.maximum(origins - season, 0)
    shape = last_season.shape
    return np.stack(
        (
            np.broadcast_to(z[origins][:, None], shape),
            np.broadcast_to(mean_before(short)[:, None], shape),
            np.broadcast_to(mean_before(season)[:, None], shape),
            last_season,
            last_week,
            profile[phase],
            profile[phase] + surprise[:, None],
            last_season + (z[origins] - z[lag])[:, None],
        ),
        axis=2,
    )


def _weights(errors: Array, origins: NDArray[np.int64], ahead: NDArray[np.int64], season: int) -> Array:
    """Weights of the experts at each origin and step, from the errors that were known at that origin."""
    count, steps, experts = errors.shape
    stride = int(origins[1] - origins[0]) if count > 1 else 1
    decay = 0.5 ** (stride / (WEIGHT_HALF_LIFE * season))
    known = ~np.isnan(errors[:, :, 0])
    errors = np.where(known[:, :, None], errors, 0.0)
    total, mass = np.zeros((count + 1, steps, experts)), np.zeros((count + 1, steps))
    for index in range(count):
        total[index + 1] = decay * total[index] + errors[index]
        mass[index + 1] = decay * mass[index] + known[index]
    seen = np.maximum(np.arange(count)[:, None] + 1 - -(-ahead // stride), 0)  # origins whose target passed
    step = np.arange(steps)
    total, mass = total[seen, step], mass[seen, step]
    low, high = _window(ahead)
    total = _range_sums(total, low, high)
    mass = _range_sums(mass, low, high)
    mean = total / np.maximum(mass, 1e-12)[:, :, None]
    mean += 1e-9 + 1e-3 * mean.mean(axis=2, keepdims=True)
    score = (mean / mean.min(axis=2, keepdims=True)) ** -float(WEIGHT_POWER)
    return np.asarray(score / score.sum(axis=2, keepdims=True))


def _window(ahead: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Steps that count as equally far ahead: index ranges [low, high) for each step."""
    low = np.floor(ahead / 1.5).astype(np.int64)
    high = np.minimum(np.ceil(ahead * 1.5).astype(np.int64), len(ahead))
    return np.minimum(low, ahead - 1), np.maximum(high, ahead)


def _range_sums(values: Array, low: NDArray[np.int64], high: NDArray[np.int64]) -> Array:
    """Sums over [low, high) of the second axis."""
    sums = np.concatenate((np.zeros_like(values[:, :1]), np.cumsum(values, axis=1)), axis=1)
    return np.asarray(sums[:, high] - sums[:, low])


def _error_quantiles(residuals: Array, weight: Array, ahead: NDArray[np.int64]) -> Array:
    """Quantiles of the errors at LEVELS for each step ahead; recent errors count more."""
    low, high = _window(ahead)
    grid = np.unique(np.geomspace(1, len(ahead), min(DISTANCES, len(ahead))).round().astype(np.int64))
    table = np.zeros((len(grid), len(LEVELS)))
    for row, step in enumerate(grid):
        pool = residuals[:, low[step - 1] : high[step - 1]]
        known = ~np.isnan(pool)
        if known.any():
            shares = np.broadcast_to(weight[:, None], pool.shape)[known]
            table[row] = _weighted_quantiles(pool[known], shares)
        elif row:
            table[row] = table[row - 1]
    return np.stack([np.interp(ahead, grid, column) for column in table.T], axis=1)


def _weighted_quantiles(values: Array, weights: Array) -> Array:
    order = np.argsort(values)
    cumulated = np.cumsum(weights[order])
    positions = (cumulated - weights[order] / 2) / cumulated[-1]
    return np.interp(LEVELS, positions, values[order])
