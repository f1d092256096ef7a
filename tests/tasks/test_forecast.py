"""Forecast: what it promises whatever the history, and that it learns what there is to learn."""

import math
import subprocess
import sys
from datetime import datetime, timedelta

import numpy as np
import pytest

from tasks.experts import EXPERTS
from tasks.forecast import (
    LEVELS,
    Calendar,
    Forecast,
    at_levels,
    expected,
    forecast,
    gpu_demand_quantiles,
    own,
    usable,
)
from tasks.forecast_scores import pinball, seasonal_difference
from tasks.forecast_training import read_series
from tasks.quantile_model import offsets, packed, shipped, unpacked

SEASON = 24
DAY = [4 + 3 * math.sin(2 * math.pi * hour / SEASON) for hour in range(SEASON)]
MIDDLE = 5  # the level .55


def history(days: int, noise: float = 0.3, seed: int = 7) -> list[float | None]:
    """A daily curve between 1 and 7, with some noise."""
    rng = np.random.default_rng(seed)
    return [max(0.0, float(value)) for value in np.array(DAY * days) + rng.normal(0, noise, SEASON * days)]


def middle(found: Forecast) -> list[float]:
    return [row[MIDDLE] for row in found.quantiles]


PASTS: dict[str, list[float | None]] = {
    "nothing": [],
    "only gaps": [None] * 30,
    "one slot": [3.0],
    "three slots": [3.0, None, 4.0],
    "a day and a half": history(2)[:36],
    "just enough for the blend": history(2)[:30],
    "four days": history(4),
    "five weeks": history(35),
    "all zeros": [0.0] * 200,
    "constant": [5.0] * 200,
    "not numbers": [float("nan"), float("inf"), -3.0, 2.0] * 40,
    "mostly gaps": [value if index % 5 == 0 else None for index, value in enumerate(history(20))],
    "a gap of three days at the end": history(10) + [None] * 72,
    "a gap of a month at the end": history(10) + [None] * 720,
    "a spike in the last slot": [*history(6), 700.0],
    "very large": [1e12, 1e11] * 60,
    "very small": [1e-300, 0.0] * 60,
}


@pytest.mark.parametrize("past", PASTS.values(), ids=PASTS.keys())
@pytest.mark.parametrize(("steps", "season"), [(24, 24), (1, 24), (30, 7), (5, 1)])
def test_quantiles_are_finite_non_negative_and_never_fall(
    past: list[float | None], steps: int, season: int
) -> None:
    found = forecast(past, steps, season, 3.0)
    rows = np.array(found.quantiles)
    assert rows.shape == (steps, len(LEVELS))
    assert np.isfinite(rows).all()
    assert (rows >= 0).all()
    assert (np.diff(rows, axis=1) >= 0).all()
    assert found.reason


def test_without_history_the_stated_mean_gives_the_measured_multiples() -> None:
    found = forecast([], 2, SEASON, 10.0)
    assert found.method == "stated"
    assert found.quantiles[0] == found.quantiles[1]
    by_level = dict(zip(LEVELS, found.quantiles[0], strict=True))
    assert by_level[0.05] == pytest.approx(5.8)
    assert by_level[0.95] == pytest.approx(14.9)
    assert by_level[0.45] == pytest.approx(9.3)


def test_a_few_slots_outweigh_what_the_operator_stated() -> None:
    found = forecast([2.0] * 12, 24, SEASON, 20.0)
    assert found.method == "level"
    assert max(middle(found)) < 8


COLD = {0: "stated", 3: "level", 24: "level", 25: "blend and model", 100: "blend and model"}


@pytest.mark.parametrize(("hours", "method"), COLD.items())
def test_little_history_is_used_in_the_way_that_suits_it(hours: int, method: str) -> None:
    found = forecast(history(5)[:hours], SEASON, SEASON, 4.0)
    assert found.method == method
    assert f"{hours} known slots" in found.reason or hours == 0


def test_the_more_is_known_of_a_new_service_the_less_the_forecast_loses() -> None:
    """Recorded services, whose operators stated half or twice the mean."""
    lost: dict[int, list[float]] = {hours: [] for hours in COLD}
    for number, service in enumerate(read_series()):
        unit = seasonal_difference(service.load, SEASON)
        stated = float(service.load.mean()) * (0.5, 2.0)[number % 2]
        for start in range(0, 72, 18):
            for hours, losses in lost.items():
                past = service.load[start + 100 - hours : start + 100]
                truth = service.load[start + 100 : start + 100 + SEASON]
                found = np.array(forecast(past.tolist(), SEASON, SEASON, stated).quantiles)[: len(truth)]
                losses.append(pinball(truth, found, LEVELS) / unit)
    means = [float(np.mean(losses)) for losses in lost.values()]
    assert means == sorted(means, reverse=True)
    assert means[-1] < 0.6 * means[0]


@pytest.mark.parametrize("season", [24, 144])
def test_the_season_is_learned(season: int) -> None:
    curve = [4 + 3 * math.sin(2 * math.pi * slot / season) for slot in range(season)]
    rng = np.random.default_rng(1)
    past = list(np.array(curve * 10) + rng.normal(0, 0.2, 10 * season))
    found = forecast(past, season, season, 4.0)
    assert found.method == "blend and model"
    assert np.abs(np.array(middle(found)) - curve).mean() < 0.3


def test_a_new_level_is_followed() -> None:
    past = history(8) + [value * 3 for value in DAY]
    assert sum(middle(forecast(past, SEASON, SEASON, 4.0))) > 2 * sum(DAY)


def test_one_spike_of_a_hundred_times_does_not_change_the_next_day() -> None:
    past = history(10)
    for position in (len(past) - 1, len(past) - 24, len(past) - 100):
        spiked = list(past)
        spiked[position] = 100 * (past[position] or 0)
        usual, after = (np.array(forecast(p, SEASON, SEASON, 4.0).quantiles) for p in (past, spiked))
        # The first hours may follow a spike that has only just come; the day as a whole does not.
        assert after[6:].sum() < 1.25 * usual[6:].sum()
        assert after.max() < 4 * usual.max()


def test_a_lasting_jump_is_no_spike() -> None:
    past = [*history(6), 70.0, 70.0, 70.0, 70.0]
    assert middle(forecast(past, SEASON, SEASON, 4.0))[0] > 30


def test_missing_is_not_zero() -> None:
    past = history(10)
    gaps: list[float | None] = [None if index % 4 == 1 else value for index, value in enumerate(past)]
    zeros: list[float | None] = [0.0 if index % 4 == 1 else value for index, value in enumerate(past)]
    whole, with_gaps, with_zeros = (
        sum(middle(forecast(p, SEASON, SEASON, 4.0))) for p in (past, gaps, zeros)
    )
    assert with_gaps == pytest.approx(whole, rel=0.1)
    assert with_zeros < 0.9 * whole


@pytest.mark.parametrize("late", [5, 30, 24 * 9 + 5])
def test_a_late_source_keeps_the_phase_of_the_day(late: int) -> None:
    past: list[float | None] = [*history(12), *([None] * late)]
    expected = [DAY[(late + step) % SEASON] for step in range(SEASON)]
    found = forecast(past, SEASON, SEASON, 4.0)
    assert np.abs(np.array(middle(found)) - expected).mean() < 0.8
    assert f"{late} slots ago" in found.reason


def test_intervals_hold_what_they_promise_on_a_noisy_season() -> None:
    inside = []
    for seed in range(6):
        past = history(22, noise=0.5, seed=seed)
        for end in range(20 * SEASON, 21 * SEASON, 7):
            rows = np.array(forecast(past[:end], SEASON, SEASON, 4.0).quantiles)
            truth = np.array(past[end : end + SEASON], dtype=float)
            inside.append((truth >= rows[:, 0]) & (truth <= rows[:, -1]))
    assert 0.84 < np.mean(inside) < 0.96  # .05 to .95


def test_the_same_history_gives_the_same_forecast() -> None:
    assert forecast(history(9), SEASON, SEASON, 4.0) == forecast(history(9), SEASON, SEASON, 4.0)


@pytest.mark.parametrize("factor", [1e-6, 0.25, 1e9])
def test_load_in_another_unit_gives_the_same_forecast_in_it(factor: float) -> None:
    past = history(9)
    scaled = [None if value is None else value * factor for value in past]
    usual, other = (np.array(forecast(p, SEASON, SEASON, 0.0).quantiles) for p in (past, scaled))
    assert other == pytest.approx(usual * factor, rel=1e-3)


@pytest.mark.parametrize("slot_minutes", [5, 10, 15, 30])
def test_slots_finer_than_an_hour_see_the_same_day(slot_minutes: int) -> None:
    season = 24 * 60 // slot_minutes
    curve = [4 + 3 * math.sin(2 * math.pi * slot / season) for slot in range(season)]
    rng = np.random.default_rng(1)
    past = list(np.array(curve * 9) * np.exp(rng.normal(0, 0.1, 9 * season)))
    rows = np.array(forecast(past, season, season, 4.0).quantiles)
    assert np.abs(rows[:, MIDDLE] - curve).mean() < 0.4
    assert np.mean((rows[:, 0] < curve) & (np.array(curve) < rows[:, -1])) > 0.9


def test_a_history_that_is_written_twice_or_has_absurd_values_is_as_good_as_a_clean_one() -> None:
    past = history(9)
    broken = list(past)
    for position, value in ((30, -4.0), (77, math.inf), (100, math.nan), (150, -1e30)):
        broken[position] = value
    clean: list[float | None] = [None if index in (30, 77, 100, 150) else v for index, v in enumerate(past)]
    assert forecast(broken, SEASON, SEASON, 4.0) == forecast(clean, SEASON, SEASON, 4.0)


def test_zeros_are_load_and_a_night_without_any_is_expected_again() -> None:
    day = [0.0] * 8 + [6.0] * 16
    rows = np.array(forecast(day * 9, SEASON, SEASON, 4.0).quantiles)
    assert rows[:8].max() < 0.5
    assert rows[8:, MIDDLE] == pytest.approx(6.0, rel=0.1)


def test_the_clocks_going_back_shift_the_load_for_a_few_days_only() -> None:
    """Days are of 24 hours UTC; what follows local clocks comes an hour later from one day on."""
    before, after = DAY * 12, [DAY[(hour - 1) % SEASON] for hour in range(SEASON)] * 6
    late = middle(forecast([*before, *after], SEASON, SEASON, 4.0))
    assert np.abs(np.array(late) - after[:SEASON]).mean() < 0.35
    early = middle(forecast([*before, *after[: 2 * SEASON]], SEASON, SEASON, 4.0))
    assert np.abs(np.array(early) - after[:SEASON]).mean() < np.abs(np.array(DAY) - after[:SEASON]).mean()


def test_a_calendar_says_which_slots_are_at_the_weekend() -> None:
    friday = Calendar(datetime(2026, 12, 4, 22), timedelta(hours=1))
    assert friday.weekend(3, 4).tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert friday.later(50).weekend(2, 1).tolist() == [1, 1, 0]
    fine = Calendar(datetime(2026, 12, 4, 23, 50), timedelta(minutes=10))
    assert fine.weekend(1, 2).tolist() == [0, 0, 1]


def test_a_week_of_weekdays_is_no_reason_to_expect_the_same_of_saturday() -> None:
    """The networks learned that services rest at weekends: with a calendar, less is expected."""
    past = history(5)
    saturday, monday = (Calendar(datetime(2026, 12, day), timedelta(hours=1)) for day in (5, 7))
    rest, work = (sum(middle(forecast(past, SEASON, SEASON, 4.0, when))) for when in (saturday, monday))
    assert rest < work


def test_what_comes_later_changes_nothing_that_was_said_before() -> None:
    past = history(20)
    longer = [*past, *[500.0] * 24]
    again = forecast(longer[: len(past)], SEASON, SEASON, 4.0)
    assert again == forecast(past, SEASON, SEASON, 4.0)


def test_the_best_expert_of_late_leads() -> None:
    """A load that repeats last week exactly, and no day of it another."""
    rng = np.random.default_rng(5)
    week = rng.uniform(1, 9, 7 * SEASON).tolist()
    found = expected(usable(week * 4, SEASON), SEASON, SEASON, None)
    assert found.leader == "last week"
    assert found.leader in EXPERTS
    assert own(found)[:, MIDDLE] == pytest.approx(week[:SEASON], rel=0.05)


def test_the_networks_survive_being_packed_and_say_quantiles_that_rise() -> None:
    assert unpacked(packed(shipped()))[0][0][0] is shipped()[0][0][0]
    found = expected(usable(history(9), SEASON), SEASON, SEASON, None)
    said = offsets(found.features)
    assert said.shape == (SEASON, len(LEVELS))
    assert (np.diff(said, axis=1) > 0).mean() > 0.95
    assert (said[:, 0] < 0).all()
    assert (said[:, -1] > 0).all()


def test_forecasting_needs_no_torch() -> None:
    """An hour starts quickly and stays small."""
    code = (
        "import sys; from tasks.forecast import forecast; forecast([1.0, 2.0] * 60, 24, 24, 1.0); "
        "print(any(name.split('.')[0] == 'torch' for name in sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_quantiles_at_levels_of_ones_own_lie_between_and_beyond_the_ten() -> None:
    rows = np.array(forecast(history(9), SEASON, SEASON, 4.0).quantiles)
    found = at_levels(forecast(history(9), SEASON, SEASON, 4.0), (0.01, 0.05, 0.1, 0.5, 0.95, 0.99))
    assert found[:, (1, 4)] == pytest.approx(rows[:, (0, -1)])
    assert (np.diff(found, axis=1) >= 0).all()
    assert ((rows[:, 0] <= found[:, 2]) & (found[:, 2] <= rows[:, 1])).all()


@pytest.mark.parametrize(("steps", "season"), [(0, 24), (24, 0)])
def test_no_steps_or_no_season_is_refused(steps: int, season: int) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        forecast([1.0], steps, season, 1.0)


def test_gpus_are_whole_replicas_that_cover_each_quantile() -> None:
    found = Forecast(((0.0, 0.2, 1.0, 2.0000000001, 3.5, 4.0, 4.1, 7.9, 8.0, 9.0),), "given", "")
    assert gpu_demand_quantiles(found) == [[0, 1, 1, 2, 4, 4, 5, 8, 8, 9]]
    assert gpu_demand_quantiles(found, 4) == [[0, 4, 4, 4, 4, 4, 8, 8, 8, 12]]
