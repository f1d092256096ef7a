"""The tournament of forecasters: who is chosen, on what grounds, and what a bad one may not do."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tasks import ledger
from tasks.cluster import Site
from tasks.collect import ledger_directory, record_demand
from tasks.demand import Sample
from tasks.expect import expect, record_forecasts
from tasks.forecast import LEVELS, Calendar, Forecast
from tasks.hour import scheduled_hour
from tasks.tournament import LEAST_SLOTS, Loss, choose, forecasters, sound
from tests.conftest import make_site

SIX = datetime(2026, 12, 1, 6, tzinfo=UTC)
HOUR = timedelta(hours=1)
FIVE = (5.0,) * len(LEVELS)


def always_five(
    history: Sequence[float | None], steps: int, season: int, stated: float, calendar: Calendar | None
) -> Forecast:
    """Right about the service of these tests, whose load is 5 from now on."""
    return Forecast((FIVE,) * steps, "five", "it is always five")


def too_short(
    history: Sequence[float | None], steps: int, season: int, stated: float, calendar: Calendar | None
) -> Forecast:
    """One slot too few."""
    return Forecast((FIVE,) * (steps - 1), "short", "")


MANY = LEAST_SLOTS
CHOICES = {
    "nothing known": ({}, "a", "a: 0 slots judged"),
    "too little known": ({"a": Loss(9, 3.0), "b": Loss(9, 1.0)}, "a", "a: 9 slots judged"),
    "the rival is new": ({"a": Loss(MANY, 3.0), "b": Loss(9, 1.0)}, "a", "judged"),
    "the rival is clearly better": ({"a": Loss(MANY, 3.0), "b": Loss(MANY, 2.0)}, "b", "b: lost 2 GPUs"),
    "the rival is hardly better": ({"a": Loss(MANY, 3.0), "b": Loss(MANY, 2.95)}, "a", "a: lost 3 GPUs"),
    "the best of two rivals": (
        {"a": Loss(MANY, 3.0), "b": Loss(MANY, 2.0), "c": Loss(MANY, 1.0)},
        "c",
        "c: lost 1 GPUs a slot, a 3",
    ),
    "the best is not at hand": ({"a": Loss(MANY, 3.0), "gone": Loss(MANY, 1.0)}, "a", "judged"),
}


@pytest.mark.parametrize(("losses", "chosen", "reason"), CHOICES.values(), ids=CHOICES)
def test_the_first_stands_until_another_has_lost_clearly_less(
    losses: dict[str, Loss], chosen: str, reason: str
) -> None:
    name, told = choose(losses, ["a", "b", "c"])
    assert name == chosen
    assert reason in told


def test_a_forecaster_that_cannot_be_imported_is_told_and_left_out() -> None:
    found, problems = forecasters({"mine": "tests.tasks.test_tournament:always_five", "gone": "no.such:one"})
    assert found["mine"] is always_five
    assert "gone" not in found
    assert "no.such:one: ModuleNotFoundError" in problems["gone"]


def test_quantiles_that_fall_or_are_negative_are_put_right_and_others_refused() -> None:
    crossed = Forecast(((-1.0, 3.0, 2.0, *(4.0,) * 7),), "x", "")
    assert sound(crossed, 1).quantiles[0][:3] == (0.0, 3.0, 3.0)
    with pytest.raises(ValueError, match="inhomogeneous"):
        sound(Forecast(((1.0,), (1.0, 2.0)), "x", ""), 2)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A service of hourly samples, and two forecasters of somebody's."""
    service = {
        "name": "chat",
        "demand": {"file": "load.csv", "unit": "gpus"},
        "expected_gpus": 2,
        "ramp_per_hour": 4,
        "priority": 8,
    }
    mine = {name: f"tests.tasks.test_tournament:{name}" for name in ("always_five", "too_short")}
    return make_site(tmp_path, slot_minutes=60, services=[service], forecasters=mine)


def test_the_ledger_judges_every_forecaster_and_the_best_is_used_with_its_reason(site: Site) -> None:
    (service,) = site.cluster.services
    past = [Sample(SIX - back * HOUR, 9.0 if back % 2 else 1.0) for back in range(1, 97)]
    record_demand(site, service, past, "observed", SIX - HOUR)
    chosen = []
    for hour in range(40):
        now = SIX + hour * HOUR
        ledger.take_in(ledger_directory(site), site.storage)
        made, problems = expect(site, scheduled_hour(site, now, now))
        chosen.append(made["chat"])
        assert [(one.subject, one.reason.split(":")[0]) for one in problems] == [("chat", "too_short")]
        record_forecasts(site, scheduled_hour(site, now, now), made, now)
        record_demand(site, service, [Sample(now, 5.0)], "observed", now + HOUR)
    assert chosen[0].forecaster == "slotwise"
    assert chosen[0].coverage == 1.0
    assert chosen[-1].forecaster == "always_five"
    assert "always_five: lost 0 GPUs a slot, slotwise" in chosen[-1].reason
    assert chosen[-1].quantiles[0] == FIVE
    with ledger.open_ledger(ledger_directory(site)) as connection:
        query = "SELECT forecaster, avg(loss) AS loss FROM forecaster_losses GROUP BY ALL ORDER BY ALL"
        losses = {row["forecaster"]: row["loss"] for row in ledger.rows(connection, query)}
        used = ledger.rows(connection, "SELECT DISTINCT forecaster FROM forecasts ORDER BY ALL")
    assert losses.keys() == {"always_five", "blend", "seasonal naive", "slotwise"}
    assert losses["always_five"] == 0
    assert [row["forecaster"] for row in used] == ["always_five", "slotwise"]
