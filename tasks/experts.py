"""Cheap experts on a service's load, and the blend of them that its own past recommends.

Invariant: everything said of a slot is made of slots before its origin, and of ratios and differences only:
scaled load gives scaled answers. Loads come as √y, in which errors are about as wide at night as at noon and
nothing can fall below zero. An expert's weight for a distance is its recent mean absolute error there to the
power -6. The cost of the choice: errors at all past origins are looked at for at most `MOST_DISTANCES`
distances, between which weights and errors are taken to change smoothly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Index = NDArray[np.int64]

LEVELS = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)
ERROR_SEASONS = 28  # how far back errors are looked at
MOST_SEASONS = ERROR_SEASONS + 7  # what the weekly lag needs besides
MOST_DISTANCES = 24
RECENT_SEASONS, THINNED = 2, 3  # errors are looked at every 24th of a season; before, at every third of these
WEIGHT_POWER = 6
WEIGHT_HALF_LIFE = 4.0  # seasons: 96 hours of a daily season
ERROR_HALF_LIFE = 10.0  # seasons
PROFILE_DECAY = 0.8  # what a season counts of the season after it
POOL = 1.5  # distances within this ratio of each other are taken together
SCALE_PRIOR = 2.0  # the seasonal difference counts as so many errors
# Errors seen over few seasons are few and alike: their centre is chance and their spread too narrow. Over S
# seasons the centre counts 1 - 2/S and the spread 1 + 0.4/(S - 1).
CENTRE_SEASONS, SPREAD_GROWTH = 2.0, 0.4


@dataclass(frozen=True)
class Blend:
    """The next `steps` slots in √y, and what is known of the errors to expect."""

    centre: Array  # per step
    offsets: Array  # step × LEVELS: quantiles of past errors, to be added to the centre
    scale: (
        Array  # per step: mean absolute error so far, drawn to the seasonal difference while errors are few
    )
    features: Array  # step × feature, see quantile_model; scale-free
    leader: str  # the expert that counts most in the first step


@dataclass(frozen=True)
class _Past:
    """What the experts know of each slot: arrays as long as the history."""

    z: Array
    season: int
    short: Array  # mean of the last eighth of a season
    long: Array  # mean of the last season
    profile: Array  # decayed mean of the slots at this phase up to this one
    surprise: Array  # z above the profile of the season before, mean of an eighth of a season
    day_surprise: Array  # the same, mean of a season
    change: Array  # z less z a season before


# What an expert says from origins `o`, `i` being the latest known slot of the target's phase in the season,
# `j` that in the week. Profile at a ratio of levels is a difference here: √y already makes it one.
Expert = Callable[[_Past, Index, Index, Index], Array]
EXPERTS: dict[str, Expert] = {
    "last value": lambda past, o, i, j: past.z[o],
    "short mean": lambda past, o, i, j: past.short[o],
    "season's mean": lambda past, o, i, j: past.long[o],
    "last season": lambda past, o, i, j: past.z[i],
    "last week": lambda past, o, i, j: past.z[j],
    "profile": lambda past, o, i, j: past.profile[i],
    "profile at this hour's level": lambda past, o, i, j: past.profile[i] + past.surprise[o],
    "profile at today's level": lambda past, o, i, j: past.profile[i] + past.day_surprise[o],
    "last season and the change since": lambda past, o, i, j: past.z[i] + past.change[o],
}


def blend(z: Array, steps: int, season: int, weekend: Array) -> Blend:
    """What the experts together expect of the `steps` slots after the last one of z.

    `z` is √load, NaN where unknown but for its first and last slot, longer than a season. `weekend` holds a
    share from 0 to 1 for each slot of z and each step after it.
    """
    known = ~np.isnan(z)
    unit = float(np.nanmean(z)) or 1.0
    past = _past(_filled(z, season) / unit, season)
    size = len(z)
    ahead = np.arange(1, steps + 1)
    near = _distances(steps)
    first = max(season, size - ERROR_SEASONS * season)
    targets, share = _targets(first, size, season)

    origins = targets - near[:, None]  # distance × target
    valid = (origins >= season - 1) & known[targets]
    guesses = _guesses(past, np.maximum(origins, season - 1), near[:, None])  # expert × distance × target
    truth = past.z[targets]
    growth = (share * 0.5 ** ((size - 1 - targets) / (WEIGHT_HALF_LIFE * season))).astype(np.float32)
    pools = _pools(near)
    counted = np.where(valid, growth, np.float32(0))
    errors = np.abs(guesses - truth)
    errors *= counted
    shares = _shares(np.cumsum(pools @ errors, axis=-1), np.cumsum(pools @ counted, axis=-1))
    blended = _at_origins(guesses, shares, near, targets)
    residuals = np.where(valid, truth - blended, np.float32(0))

    nearest = np.abs(near[:, None] - ahead).argmin(axis=0)
    weights = shares[:, nearest, -1]  # expert × step
    said = _guesses(past, np.full(steps, size - 1), ahead)
    centre = (said * weights).sum(axis=0)
    seen = _Seen(past, near, pools, residuals, valid, targets, share, size)
    offsets = _over_steps(seen.quantiles(), near, ahead)
    scale = _over_steps(seen.scale()[:, None], near, ahead)[:, 0]
    features = _features(seen, centre, scale, said, weights, ahead, weekend)
    names = list(EXPERTS)
    return Blend(centre * unit, offsets * unit, scale * unit, features, names[int(weights[:, 0].argmax())])


def _filled(z: Array, season: int) -> Array:
    """z without gaps, each filled from the past alone: the season before, else the slot before."""
    filled = z.copy()
    for index in np.flatnonzero(np.isnan(z)):
        filled[index] = filled[index - season] if index >= season else filled[index - 1]
    return filled


def _past(z: Array, season: int) -> _Past:
    size, short = len(z), max(1, season // 8)
    profile, weight = z.copy(), np.ones(size)
    for begin in range(season, size, season):
        now = slice(begin, min(begin + season, size))
        before = slice(begin - season, now.stop - season)
        weight[now] = 1 + PROFILE_DECAY * weight[before]
        profile[now] += (profile[before] - profile[now]) * (PROFILE_DECAY * weight[before] / weight[now])
    above = z - np.concatenate((z[:season], profile[:-season]))
    change = z - np.concatenate((z[:season], z[:-season]))
    means = [
        _trailing(z, short), _trailing(z, season), profile, _trailing(above, short), _trailing(above, season),
        change,
    ]  # fmt: skip
    return _Past(z.astype(np.float32), season, *(mean.astype(np.float32) for mean in means))


def _trailing(values: Array, length: int) -> Array:
    """Mean of the last `length` values up to each one."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(stop - length, 0)
    return np.asarray((sums[stop] - sums[start]) / (stop - start))


def _targets(first: int, size: int, season: int) -> tuple[Index, Array]:
    """Past slots at which errors are looked at, from `first` on, and how many slots each stands for."""
    hour = max(1, season // 24)
    middle = max(first, size - RECENT_SEASONS * season)
    recent = np.arange(size - 1, middle - 1, -hour)
    before = np.arange(int(recent[-1]) - hour, first - 1, -THINNED * hour)
    targets = np.concatenate((recent, before))[::-1]
    share = np.concatenate((np.ones(len(recent)), np.full(len(before), THINNED)))[::-1]
    return targets, share.astype(np.float32)


def _distances(steps: int) -> Index:
    """Steps ahead at which errors are looked at: all, or ever fewer the further they are."""
    spread = np.geomspace(1, steps, MOST_DISTANCES) if steps > MOST_DISTANCES else np.arange(1, steps + 1)
    return np.unique(np.round(spread).astype(np.int64))


def _pools(near: Index) -> Array:
    """For each distance 1 for those about as far, so that a product with it adds them up."""
    ratio = near / near[:, None]
    return ((ratio < POOL) & (ratio > 1 / POOL)).astype(np.float32)


def _guesses(past: _Past, origins: Index, ahead: Index) -> Array:
    """What each expert says at the origins for so many steps ahead; the first axis is the expert."""
    season = past.season
    target = origins + ahead
    phase = target - season * -(-ahead // season)
    week = target - 7 * season * -(-ahead // (7 * season))
    week = np.where(week >= 0, week, phase)
    found = np.empty((len(EXPERTS), *target.shape), dtype=np.float32)
    for row, expert in zip(found, EXPERTS.values(), strict=True):
        row[...] = expert(past, origins, phase, week)
    return found


def _shares(errors: Array, mass: Array) -> Array:
    """Weights of the experts by what was known of their errors at each target's slot."""
    mean = errors
    mean /= np.maximum(mass, np.float32(1e-12))
    mean += np.float32(1e-6) + np.float32(1e-3) * mean.mean(axis=0)
    score = mean.min(axis=0) / mean
    score *= score
    score *= score * score
    return np.asarray(score / score.sum(axis=0))


def _at_origins(guesses: Array, shares: Array, near: Index, targets: Index) -> Array:
    """The blend for each target, with the latest weights that its own origin knows; the mean at first."""
    found = guesses.mean(axis=0)
    for row, distance in enumerate(near):
        known = np.searchsorted(targets, targets - distance, "right") - 1
        late = int(np.searchsorted(known, 0))
        found[row, late:] = (guesses[:, row, late:] * shares[:, row, known[late:]]).sum(axis=0)
    return np.asarray(found)


def _over_steps(table: Array, near: Index, ahead: Index) -> Array:
    """A column for each distance, made one for each step."""
    return np.stack([np.interp(ahead, near, column) for column in table.T], axis=1)


@dataclass(frozen=True)
class _Seen:
    """Errors of the blend at past targets: distance × target, 0 where not valid."""

    past: _Past
    near: Index
    pools: Array
    residuals: Array
    valid: NDArray[np.bool_]
    targets: Index
    share: Array
    size: int

    def decay(self, seasons: float) -> Array:
        age = (self.size - 1 - self.targets) / self.past.season
        return np.asarray((self.share * 0.5 ** (age / seasons)).astype(np.float32))

    def pooled_mean(self, values: Array, seasons: float) -> tuple[Array, Array]:
        """Decayed mean and mass of values (distance × target) for each pool of distances."""
        decay = self.decay(seasons)
        mass = self.pools @ (self.valid @ decay)
        total = self.pools @ (values @ decay)
        return total / np.maximum(mass, 1e-9), mass

    def scale(self) -> Array:
        mean, mass = self.pooled_mean(np.abs(self.residuals), ERROR_HALF_LIFE)
        return np.asarray((mean * mass + SCALE_PRIOR * self.seasonal()) / (mass + SCALE_PRIOR) + 1e-6)

    def seasonal(self) -> float:
        """Mean absolute difference to the season before, at least a thousandth of the load."""
        z = self.past.z
        return max(float(np.abs(self.past.change[self.past.season :]).mean()), 1e-3 * float(z.mean()), 1e-6)

    def quantiles(self) -> Array:
        """Quantiles of the errors at each distance; recent ones count more, those of a pool are averaged."""
        decay = self.decay(ERROR_HALF_LIFE)
        shares = np.where(self.valid, decay, np.float32(0))
        order = np.argsort(np.where(self.valid, self.residuals, np.float32(np.inf)), axis=1)
        values = np.take_along_axis(self.residuals, order, axis=1)
        shares = np.take_along_axis(shares, order, axis=1)
        total = np.cumsum(shares, axis=1)
        mass = total[:, -1:]
        place = (total - shares / 2) / np.maximum(mass, 1e-9)
        own = np.zeros((len(self.near), len(LEVELS)))
        for row in np.flatnonzero(mass[:, 0] > 0):
            count = int(self.valid[row].sum())
            own[row] = np.interp(LEVELS, place[row, :count], values[row, :count])
        sums, masses = self.pools @ (own * mass), self.pools @ mass
        table = sums / np.maximum(masses, 1e-9)
        for row in np.flatnonzero(masses[:, 0] <= 0):
            table[row] = table[row - 1]
        seasons = max(2.0, self.size / self.past.season)
        centre = table.mean(axis=1, keepdims=True)
        spread = 1 + SPREAD_GROWTH / (seasons - 1)
        return np.asarray(centre * (1 - CENTRE_SEASONS / seasons) + (table - centre) * spread)


def _features(
    seen: _Seen, centre: Array, scale: Array, said: Array, weights: Array, ahead: Index, weekend: Array
) -> Array:
    """What the quantile model sees of each step: see `quantile_model` for what it makes of it."""
    past, size, near = seen.past, seen.size, seen.near
    season, z = past.season, past.z
    here = float(z[-1])
    own = z[-season:]
    mean, deviation = float(own.mean()), float(own.std()) + 1e-6
    bias = [seen.pooled_mean(seen.residuals, seasons)[0] for seasons in (0.25, 1.0)]
    swing, mass = seen.pooled_mean(np.abs(seen.residuals), 1.0)
    swing = np.where(mass > 0, swing, seen.scale())
    _, mass = seen.pooled_mean(np.abs(seen.residuals), ERROR_HALF_LIFE)
    table = np.stack((seen.residuals[:, -1], *bias, swing, mass / season), axis=1)
    latest, bias6, bias24, swing, mass = _over_steps(table, near, ahead).T
    last = np.full(len(ahead), seen.residuals[0, -1] / scale[0])
    profile = past.profile[size - 1 + ahead - season * -(-ahead // season)]
    seasons = math.log(size / season)
    there, before, now = weekend[size:], weekend[size - season :][: len(ahead)], weekend[size - 1]
    before = np.resize(before, len(ahead))
    columns = [
        *(_squashed((said - centre) / scale)),
        _squashed(last),
        _squashed(latest / scale),
        _squashed(bias6 / scale),
        _squashed(bias24 / scale),
        np.log(swing / scale + 0.05),
        np.log(scale / scale[0] + 1e-3),
        np.log(scale / (mean + 1e-6) + 1e-3),
        np.log(seen.seasonal() / scale),
        _squashed((centre - here) / scale, 8.0),
        _squashed((centre - mean) / scale, 8.0),
        _squashed((profile - mean) / deviation),
        np.full(len(ahead), _squashed(np.array((here - mean) / deviation))),
        ahead / season,
        np.log(ahead * (24 / season)) / 3,
        np.full(len(ahead), min(seasons, 3.4)),
        1 / (1 + mass),
        there,
        before,
        np.full(len(ahead), now),
        there * (seasons < math.log(7)),
        weights.max(axis=0),
    ]
    return np.stack(columns, axis=1).astype(np.float32)


def _squashed(values: Array, most: float = 4.0) -> Array:
    return np.asarray(most * np.tanh(values / most))
