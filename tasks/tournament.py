"""Which forecaster each service uses: the one that lately lost least against what came.

Invariant: a forecaster's word counts only where the truth is known, all are judged on the same slots, and
the first stands until another has lost clearly less on enough of them; one that fails or gives no sound
quantiles is passed over for that hour and told. A forecaster is a plain function from a history to
quantiles for each slot; a cluster file adds one as `forecasters: {name: module:function}`. The cost of the
choice: all of them run in every hour, and leave a few of their quantiles in the ledger.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tasks.experts import LEVELS
from tasks.forecast import Calendar, Forecast, forecast, forecast_by_blend, forecast_seasonal

# history (ends before slot 0; None: unknown), steps, season in slots, stated mean, calendar -> forecast
Forecaster = Callable[[Sequence[float | None], int, int, float, Calendar | None], Forecast]

OURS = "slotwise"
BUILT_IN: dict[str, Forecaster] = {
    OURS: forecast,
    "blend": forecast_by_blend,
    "seasonal naive": forecast_seasonal,
}
WINDOW_DAYS = 14  # how far back losses count
LEAST_SLOTS = 72  # judged ones, before another may take over
CLEARLY = 0.03  # as a share: how much less it has to lose


class ForecasterError(Exception):
    """A forecaster that cannot be had, or whose word is no forecast; one line."""


@dataclass(frozen=True)
class Loss:
    """Mean pinball loss in GPUs over so many slots."""

    slots: int
    mean: float


def forecasters(added: Mapping[str, str]) -> tuple[dict[str, Forecaster], dict[str, str]]:
    """The built-in ones and those added as `module:function`; and of those that cannot be had, why."""
    found, problems = dict(BUILT_IN), {}
    for name, place in added.items():
        module, _, function = place.partition(":")
        try:
            found[name] = getattr(importlib.import_module(module), function)
        except Exception as error:  # whatever somebody's module does when it is imported
            problems[name] = f"{place}: {type(error).__name__}: {error}"
    return found, problems


def choose(losses: Mapping[str, Loss], names: Sequence[str]) -> tuple[str, str]:
    """The forecaster to use among those at hand, and the reason. The first stands while nothing is clear."""
    first = names[0]
    own = losses.get(first, Loss(0, math.inf))
    rivals = {
        name: losses[name] for name in names[1:] if name in losses and losses[name].slots >= LEAST_SLOTS
    }
    if own.slots < LEAST_SLOTS or not rivals:
        return first, f"{first}: {own.slots} slots judged, under {LEAST_SLOTS}"
    best = min(rivals, key=lambda name: rivals[name].mean)
    told = f"lost {own.mean:.3g} GPUs a slot"
    if rivals[best].mean < (1 - CLEARLY) * own.mean:
        return best, f"{best}: lost {rivals[best].mean:.3g} GPUs a slot, {first} {own.mean:.3g}"
    return first, f"{first}: {told}, {best} {rivals[best].mean:.3g}, over {own.slots} slots"


def sound(found: Forecast, steps: int) -> Forecast:
    """The forecast with quantiles that never fall and are never negative. Raises ForecasterError."""
    rows = np.array(found.quantiles, dtype=np.float64)
    if rows.shape != (steps, len(LEVELS)) or not np.isfinite(rows).all():
        raise ForecasterError(
            f"gave quantiles of shape {rows.shape}; expected {steps} × {len(LEVELS)} finite numbers"
        )
    rows = np.maximum.accumulate(np.maximum(rows, 0.0), axis=1)
    return replace(found, quantiles=tuple(map(tuple, rows.tolist())))
