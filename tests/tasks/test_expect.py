"""What the forecast step hands on: how much of the past it knew, and a floor that a forecast cannot lower."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from tasks import ledger
from tasks.allocate import build_problem, read_state
from tasks.cluster import Site
from tasks.collect import ledger_directory, record_demand
from tasks.demand import Sample
from tasks.expect import expect
from tasks.forecast import LEVELS, Forecast
from tasks.hour import scheduled_hour
from tests.conftest import make_site

SIX = datetime(2026, 12, 1, 6, tzinfo=UTC)
HOUR = timedelta(hours=1)
SERVICE = {
    "name": "chat",
    "demand": {"file": "load.csv", "unit": "gpus"},
    "expected_gpus": 2,
    "ramp_per_hour": 4,
    "priority": 8,
}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A service whose load is known in GPUs, hour by hour, and slots of ten minutes."""
    return make_site(tmp_path, services=[SERVICE])


def observe(site: Site, samples: list[Sample], now: datetime = SIX) -> None:
    record_demand(site, site.cluster.services[0], samples, "observed", now)
    ledger.take_in(ledger_directory(site), site.storage)


def wanted(site: Site) -> list[tuple[int, ...]]:
    """Demand of the service by slot in the problem, when the forecast is one GPU for the whole day."""
    hour = scheduled_hour(site, SIX, SIX)
    one = Forecast(((1.0,) * len(LEVELS),) * site.plan_slots, "one", "")
    (service,) = build_problem(site, hour, read_state(site, SIX), {"chat": one}, set(), []).services
    assert service.demand_quantiles is not None
    return list(service.demand_quantiles)


def test_what_is_committed_never_goes_below_what_was_last_observed_and_the_rest_of_the_day_may(
    site: Site,
) -> None:
    observe(site, [Sample(SIX - 2 * HOUR, 4.0), Sample(SIX - HOUR, 2.5)])
    assert wanted(site) == [(3,) * 10] * 6 + [(1,) * 10] * (site.plan_slots - 6)


def test_a_source_that_has_been_silent_for_a_day_holds_nothing_up(site: Site) -> None:
    observe(site, [Sample(SIX - 26 * HOUR, 7.0)])
    assert wanted(site) == [(1,) * 10] * site.plan_slots


def test_the_share_of_the_past_that_was_known_is_told_and_missing_is_not_zero(site: Site) -> None:
    known = [back for back in range(1, 121) if back % 4]
    observe(site, [Sample(SIX - back * HOUR, 5.0) for back in known])
    made, problems = expect(site, scheduled_hour(site, SIX, SIX))
    assert problems == []
    assert made["chat"].coverage == pytest.approx(0.75, abs=0.02)
    assert made["chat"].quantiles[0][4] == pytest.approx(5.0, rel=0.1)


def test_a_sample_that_is_written_again_replaces_the_one_before_and_order_does_not_matter(site: Site) -> None:
    samples = [Sample(SIX - back * HOUR, 5.0) for back in range(1, 121)]
    observe(site, [Sample(one.ts, 50.0) for one in samples[30:60]], SIX - HOUR / 2)
    observe(site, samples[::-1])
    made, _ = expect(site, scheduled_hour(site, SIX, SIX))
    assert made["chat"].coverage == 1.0
    assert made["chat"].quantiles[0][4] == pytest.approx(5.0, rel=0.1)


def test_the_season_goes_by_the_clock_of_the_clusters_time_zone(tmp_path: Path) -> None:
    """A load from nine to five on the clock in Berlin, on the morning after that clock was put forward."""
    zone, now = ZoneInfo("Europe/Berlin"), datetime(2024, 3, 31, 4, tzinfo=UTC)
    site = make_site(tmp_path, services=[SERVICE], time_zone=str(zone))
    hours = [now - back * HOUR for back in range(1, 14 * 24)]
    busy = {hour: 9 <= hour.astimezone(zone).hour < 17 for hour in hours}
    observe(site, [Sample(hour, 9.0 if busy[hour] else 1.0) for hour in hours], now)
    made, problems = expect(site, scheduled_hour(site, now, now))
    assert problems == []
    middle = [row[5] for row in made["chat"].quantiles]
    assert middle[17] == pytest.approx(1, abs=0.5), "ten to nine"
    assert middle[18] == pytest.approx(9, abs=1), "nine o'clock, seven in UTC"
    assert len(middle) == site.plan_slots
    assert {len(rows) for rows in made["chat"].rivals.values()} == {site.plan_slots}
