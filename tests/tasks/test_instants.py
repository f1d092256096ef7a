"""Instants and durations: what is read, and what is refused with a ValueError."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from tasks.instants import floor, parse, parse_duration, text

SIX = datetime(2026, 12, 1, 6, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "hours"),
    [("90s", 1 / 40), ("45m", 0.75), ("3h", 3), ("1d12h", 36), ("1h30m", 1.5), ("0.5h", 0.5), (" 2h ", 2)],
)
def test_a_duration_is_read(value: str, hours: float) -> None:
    assert parse_duration(value) == timedelta(hours=hours)


@pytest.mark.parametrize(
    "value", ["", " ", "3", "3 h", "h", "-3h", "30m1h", "3H", "1w", "1e3s", "inf", "9" * 30 + "d"]
)
def test_anything_else_is_no_duration(value: str) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        parse_duration(value)


def test_an_instant_is_written_in_utc_and_read_back() -> None:
    summer = datetime(2026, 7, 1, 8, 0, 0, 250_000, tzinfo=timezone(timedelta(hours=2)))
    assert text(summer) == "2026-07-01T06:00:00.250000Z"
    assert parse(text(summer)) == summer
    assert text(SIX) == "2026-12-01T06:00:00Z"


@pytest.mark.parametrize("value", ["2026-12-01T06:00Z", "2026-12-01 06:00:00", "2026-12-01T08:00+02:00"])
def test_an_instant_is_read_as_utc_when_it_names_no_zone(value: str) -> None:
    assert parse(value) == SIX


@pytest.mark.parametrize(
    ("minute", "step", "floored"), [(59, 60, 0), (60, 60, 60), (7, 5, 5), (61, 1440, -360), (44, 45, 0)]
)
def test_an_instant_is_floored_to_steps_since_the_epoch(minute: int, step: int, floored: int) -> None:
    assert floor(SIX + timedelta(minutes=minute), step) == SIX + timedelta(minutes=floored)
