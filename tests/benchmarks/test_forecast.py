"""How good the forecast is on recorded load, against the seasonal naive one, and what it costs.

MASE is the mean absolute error in units of the mean |y[t] - y[t - season]| before the origin; sPL the mean
of twice the pinball loss at .1, .5 and .9 in the same unit; coverage the share of truth between the .1 and
.9 quantiles. The seasonal naive's quantiles are the last week's seasonal differences around the value a
season before.
"""

import csv
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tasks.forecast import LEVELS, forecast

Array = NDArray[np.float64]
Method = Callable[[Array, int, int], Array]
ROOT = Path(__file__).parents[2]
RECORDED = ROOT.parent / "shared" / "data" / "demand"
SHIPPED = ROOT / "deployments" / "demo" / "azure_code_2024.csv"
SCORED = (0.1, 0.5, 0.9)
HOURS_BEFORE = 14 * 24  # history before the first origin, or half of a shorter series


@dataclass(frozen=True)
class Score:
    """Means over the origins of a series."""

    mase: float
    next_hour: float
    pinball: float
    coverage: float
    cpu_ms: float


def blend(past: Array, steps: int, season: int) -> Array:
    """Ours, at the scored levels."""
    found = forecast(list(past), steps, season, float(past.mean()))
    return np.stack([np.interp(SCORED, LEVELS, row) for row in found.quantiles])


def seasonal_naive(past: Array, steps: int, season: int) -> Array:
    """The value a season before, and the seasonal differences of the last seven seasons around it."""
    last = np.resize(past[-season:], steps)
    offsets = np.quantile((past[season:] - past[:-season])[-7 * season :], SCORED)
    offsets[1] = 0.0
    return np.maximum(last[:, None] + offsets, 0.0)


def score(load: Array, method: Method, season: int, every: int) -> Score:
    """The method's score over rolling origins, a season ahead each."""
    rows = []
    for origin in range(min(HOURS_BEFORE * season // 24, len(load) // 2), len(load) - season + 1, every):
        past, truth = load[:origin], load[origin : origin + season]
        unit = float(np.mean(np.abs(past[season:] - past[:-season])))
        begin = time.process_time()
        found = method(past, season, season)
        cpu_ms = 1000 * (time.process_time() - begin)
        error = truth[:, None] - found
        pinball = np.mean(2 * np.maximum(np.array(SCORED) * error, (np.array(SCORED) - 1) * error))
        inside = np.mean((error[:, 0] >= 0) & (error[:, 2] <= 0))
        middle = np.abs(error[:, 1])
        rows.append((middle.mean() / unit, middle[0] / unit, pinball / unit, inside, cpu_ms))
    return Score(*(float(mean) for mean in np.array(rows, dtype=np.float64).mean(axis=0)))


def series() -> dict[str, tuple[Array, int, int]]:
    """Name: load, season, slots between origins."""
    files = sorted(RECORDED.glob("*.csv")) or [SHIPPED]
    found = {}
    for file in files:
        with file.open() as lines:
            load = np.array([float(row["y"]) for row in csv.DictReader(lines)])
        fine = file.stem.endswith("10min")
        found[file.stem] = (load, 144 if fine else 24, 30 if fine else max(2, len(load) // 100))
    return found


@pytest.mark.benchmark
def test_the_forecast_beats_the_seasonal_naive_on_recorded_load(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = {}
    for name, (load, season, every) in series().items():
        pairs[name] = (score(load, blend, season, every), score(load, seasonal_naive, season, every))
    with capsys.disabled():
        print("\nseries                       MASE        next slot   sPL         80 % covers  CPU ms")
        for name, (ours, naive) in pairs.items():
            print(
                f"{name:27}  {ours.mase:.2f} ({naive.mase:.2f}) {ours.next_hour:.2f} ({naive.next_hour:.2f}) "
                f"{ours.pinball:.2f} ({naive.pinball:.2f}) {ours.coverage:.2f} ({naive.coverage:.2f})  "
                f"{ours.cpu_ms:.0f}"
            )
        print("in brackets: seasonal naive")
    if len(pairs) > 1:  # the one shipped series is the one whose days repeat best
        ours_mean, naive_mean = (
            np.mean([pair[which].pinball for pair in pairs.values()]) for which in (0, 1)
        )
        assert ours_mean < 0.9 * naive_mean
    assert np.mean([o.next_hour for o, _ in pairs.values()]) < np.mean(
        [n.next_hour for _, n in pairs.values()]
    )
    assert np.mean([ours.coverage for ours, _ in pairs.values()]) > 0.7
