"""How forecasts are scored, and the forecast that any other has to beat.

Invariant: a score is in units of the mean absolute seasonal difference of the history before its origin, so
that services of any size can be averaged.
"""

from collections.abc import Sequence

import numpy as np

from tasks.experts import Array


def pinball(truth: Array, quantiles: Array, levels: Sequence[float]) -> float:
    """Twice the mean pinball loss, which at the median is the absolute error."""
    error = truth[:, None] - quantiles
    return float(np.mean(2 * np.maximum(np.array(levels) * error, (np.array(levels) - 1) * error)))


def seasonal_naive(past: Array, steps: int, season: int, levels: Sequence[float]) -> Array:
    """Step × level: the value a season before (the mean where it is missing), at .5 as it is."""
    last = np.resize(past[-season:], steps)
    last = np.where(np.isnan(last), np.nanmean(past), last)
    differences = (past[season:] - past[:-season])[-7 * season :]
    differences = differences[~np.isnan(differences)]
    offsets = np.quantile(differences, levels) if len(differences) else np.zeros(len(levels))
    offsets = np.where(np.array(levels) == 0.5, 0.0, offsets)
    return np.asarray(np.maximum(last[:, None] + offsets, 0.0))


def seasonal_difference(past: Array, season: int) -> float:
    """Mean absolute difference to the season before; 0 when no two slots are a season apart."""
    differences = past[season:] - past[:-season]
    known = np.abs(differences[~np.isnan(differences)])
    return float(known.mean()) if len(known) else 0.0
