"""Expect: the forecast step of the hour. One service's trouble never stops the others.

Invariant: every service gets a forecast of the whole horizon: the forecaster's; failing that, the last one
made, from where it is now; failing that, what the operator stated.
"""

from datetime import datetime, timedelta
from typing import Any

from tasks import faults, ledger
from tasks.cluster import Service, Site
from tasks.collect import ledger_directory
from tasks.demand import Sample, slot_series
from tasks.facts import fact_key, write_fact
from tasks.forecast import Forecast, forecast
from tasks.hour import Degradation, Hour
from tasks.instants import text


def expect(site: Site, hour: Hour) -> tuple[dict[str, Forecast], list[Degradation]]:
    """A forecast for each service, and what had to give."""
    made: dict[str, Forecast] = {}
    problems = []
    for service in site.cluster.services:
        try:
            made[service.name] = forecast(
                _history(site, service, hour.begin), site.plan_slots, site.season_slots, service.expected_gpus
            )
        except Exception as error:  # the hour goes on with the last forecast, or the stated mean
            made[service.name] = _last(site, service, hour.begin)
            reason = f"{type(error).__name__}: {error}; using {made[service.name].method}"
            problems.append(Degradation("forecast", service.name, reason))
    return made, problems


def record_forecasts(site: Site, hour: Hour, made: dict[str, Forecast], now: datetime) -> None:
    """Leave the fact of what was expected."""
    services: dict[str, Any] = {
        name: {
            "method": found.method,
            "reason": found.reason,
            "slots": [
                [text(hour.begin + step * site.slot), [round(value, 4) for value in quantiles]]
                for step, quantiles in enumerate(found.quantiles)
            ],
        }
        for name, found in made.items()
    }
    body = {"instant": text(hour.instant), "services": services}
    write_fact(site.storage, fact_key("forecast", hour.instant, text(hour.instant)), now, body)
    faults.point("forecast.recorded")


def _history(site: Site, service: Service, begin: datetime) -> list[float | None]:
    """GPUs wanted in each slot before `begin`, as far back as is known."""
    with ledger.open_ledger(ledger_directory(site)) as connection:
        rows = ledger.rows(
            connection,
            "SELECT ts, gpus FROM demand WHERE service = ? AND ts < ? ORDER BY ts",
            [service.name, begin],
        )
    if not rows:
        return []
    slots = -(-(begin - rows[0]["ts"]) // site.slot)
    sample = timedelta(minutes=service.demand.sample_minutes)
    samples = [Sample(row["ts"], row["gpus"]) for row in rows]
    return slot_series(samples, begin - slots * site.slot, slots, site.slot, sample)


def _last(site: Site, service: Service, begin: datetime) -> Forecast:
    """The latest recorded forecast from `begin` on, its last slot held to the end; or the stated mean."""
    with ledger.open_ledger(ledger_directory(site)) as connection:
        rows = ledger.rows(
            connection,
            "SELECT ts, quantiles FROM forecasts WHERE service = ? "
            "AND instant = (SELECT max(instant) FROM forecasts WHERE service = ?) AND ts + to_minutes(?) > ? "
            "ORDER BY ts",
            [service.name, service.name, site.cluster.slot_minutes, begin],
        )
    if not rows:
        return forecast([], site.plan_slots, site.season_slots, service.expected_gpus)
    known = [tuple(row["quantiles"]) for row in rows][: site.plan_slots]
    held = known + [known[-1]] * (site.plan_slots - len(known))
    return Forecast(tuple(held), "last known", "the forecaster failed")
