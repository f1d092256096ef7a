"""A load follows the clocks of its users: what a change of theirs does to a history and to a forecast."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

import pytest

from tasks.forecast import Forecast, forecast
from tasks.local_clock import on_wall_clock

BERLIN = ZoneInfo("Europe/Berlin")
SPRING = datetime(2024, 3, 31, 1, tzinfo=UTC)  # two o'clock becomes three
AUTUMN = datetime(2024, 10, 27, 1, tzinfo=UTC)  # three o'clock becomes two
HOUR = timedelta(hours=1)
QUARTER = timedelta(minutes=15)
MIDDLE = 5  # the level .55


def by_the_clock(begin: datetime, slots: int, slot: timedelta = HOUR) -> list[float]:
    """A load that is the hour (and its part) on the clock in Berlin, for the slots before an instant."""
    local = [(begin - place * slot).astimezone(BERLIN) for place in range(slots, 0, -1)]
    return [each.hour + each.minute / 60 for each in local]


def as_the_clock_shows(history: Sequence[float | None], slot: timedelta = HOUR) -> list[float | None]:
    """What the load was a day before, slot by slot; None where either is not known."""
    day = timedelta(days=1) // slot
    pairs = zip(history[day:], history, strict=False)
    return [None if None in pair else round(pair[0] - pair[1], 9) for pair in pairs]  # type: ignore[operator]


@pytest.mark.parametrize("slot", [HOUR, QUARTER, timedelta(minutes=5)], ids=str)
@pytest.mark.parametrize("change", [SPRING, AUTUMN], ids=["spring", "autumn"])
@pytest.mark.parametrize("hours", [2, 30, 200])
def test_each_slot_lies_a_day_after_the_same_time_of_the_clock(
    change: datetime, slot: timedelta, hours: int
) -> None:
    now = change + hours * HOUR
    history: Sequence[float | None] = by_the_clock(now, 20 * (timedelta(days=1) // slot), slot)
    found = on_wall_clock(history, 24, now, slot, BERLIN)
    differences = [each for each in as_the_clock_shows(found.history, slot) if each is not None]
    assert set(differences) == {0.0}
    hour = HOUR // slot
    lost = hour if change == SPRING else -hour  # places of the clock that there are more than slots
    assert len(found.history) == len(history) + lost
    assert found.history.count(None) == max(lost, 0)
    assert (found.steps, list(found.rows)) == (24, list(range(24)))


def test_of_the_hour_that_comes_twice_the_mean_is_known_and_a_gap_stays_one() -> None:
    now = AUTUMN + 3 * HOUR
    history: list[float | None] = [1.0, 2.0, 4.0, 6.0, None, 9.0]  # midnight, 1, 2, 2 again, 3, 4 o'clock
    assert on_wall_clock(history, 1, now, HOUR, BERLIN).history == [1.0, 2.0, 5.0, None, 9.0]


def test_a_change_ahead_leaves_a_row_out_or_uses_one_twice() -> None:
    before = 3 * HOUR
    past = [1.0] * 48
    spring = on_wall_clock(past, 6, SPRING - before, HOUR, BERLIN)
    assert (spring.history, spring.steps, spring.rows) == (past, 7, (0, 1, 2, 4, 5, 6))
    autumn = on_wall_clock(past, 6, AUTUMN - before, HOUR, BERLIN)
    assert (autumn.history, autumn.steps, autumn.rows) == (past, 5, (0, 1, 2, 2, 3, 4))
    answer = Forecast(tuple((float(row),) * 10 for row in range(5)), "rows", "")
    assert [row[0] for row in autumn.put_back(answer).quantiles] == [0, 1, 2, 2, 3, 4]
    assert autumn.calendar.begin == datetime(2024, 10, 27)
    nothing = on_wall_clock([], 6, AUTUMN - before, HOUR, BERLIN)
    assert (nothing.history, nothing.rows) == ([], autumn.rows)


@pytest.mark.parametrize(
    ("begin", "zone"),
    [
        (SPRING + 20 * HOUR, UTC),
        (SPRING + 20 * HOUR, timezone(timedelta(hours=5, minutes=30))),
        (SPRING + 20 * HOUR, ZoneInfo("Asia/Tokyo")),
        (SPRING - 30 * HOUR, BERLIN),
        (AUTUMN, BERLIN),  # the hour that comes again, a slot of which has passed once already
    ],
    ids=["UTC", "a fixed offset", "a zone without changes", "before the change", "while an hour comes again"],
)
def test_where_no_clock_changes_all_is_as_it_came(begin: datetime, zone: tzinfo) -> None:
    history = [1.0, None, 3.0]
    found = on_wall_clock(history, 24, begin, HOUR, zone)
    assert found.history is history
    assert (found.steps, list(found.rows)) == (24, list(range(24)))


def test_two_changes_in_five_weeks_are_both_put_right() -> None:
    """Morocco leaves its summer time for the month of fasting."""
    zone = ZoneInfo("Africa/Casablanca")
    now = datetime(2024, 4, 16, 12, tzinfo=UTC)
    local = [(now - place * HOUR).astimezone(zone) for place in range(40 * 24, 0, -1)]
    found = on_wall_clock([float(each.hour) for each in local], 24, now, HOUR, zone)
    assert {each for each in as_the_clock_shows(found.history) if each is not None} == {0.0}


@pytest.mark.parametrize("change", [SPRING, AUTUMN], ids=["spring", "autumn"])
def test_the_morning_after_a_change_is_foreseen_when_the_clock_says(change: datetime) -> None:
    """A load that is on from nine to five by the clock."""
    now = change + 5 * HOUR
    past = [10.0 if 9 <= hour < 17 else 1.0 for hour in by_the_clock(now, 28 * 24)]
    truth = [10.0 if 9 <= hour < 17 else 1.0 for hour in by_the_clock(now + 12 * HOUR, 12)]

    def missed(found: Forecast) -> float:
        return sum(abs(row[MIDDLE] - wanted) for row, wanted in zip(found.quantiles, truth, strict=True))

    local = on_wall_clock(past, 12, now, HOUR, BERLIN)
    with_clock = local.put_back(forecast(local.history, local.steps, 24, 1.0))
    assert missed(with_clock) < 1 < missed(forecast(past, 12, 24, 1.0))


def test_numbers_that_are_none_are_unknown() -> None:
    now = AUTUMN + 3 * HOUR
    history = [2.0, float("nan"), 4.0, float("inf"), 6.0]  # 1, 2, 2 again, 3, 4 o'clock
    assert on_wall_clock(history, 1, now, HOUR, BERLIN).history == [2.0, 4.0, None, 6.0]
