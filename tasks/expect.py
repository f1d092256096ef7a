"""Expect: the forecast step of the hour. One service's trouble never stops the others.

Invariant: every service gets a forecast of the whole horizon: that of the forecaster which did best for it
lately (`tournament`); failing that, the last one made, from where it is now; failing that, what the operator
stated.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

from tasks import faults, ledger
from tasks.cluster import Service, Site
from tasks.collect import ledger_directory
from tasks.demand import Sample, slot_series
from tasks.facts import fact_key, write_fact
from tasks.forecast import Forecast, forecast
from tasks.hour import Degradation, Hour
from tasks.instants import text
from tasks.local_clock import on_wall_clock
from tasks.tournament import OURS, WINDOW_DAYS, Forecaster, Loss, choose, forecasters, sound

JUDGED_STEPS = 6


def expect(site: Site, hour: Hour) -> tuple[dict[str, Forecast], list[Degradation]]:
    """A forecast for each service, and what had to give."""
    made: dict[str, Forecast] = {}
    problems: list[Degradation] = []
    known, absent = forecasters(site.cluster.forecasters)
    problems += [Degradation("forecast", name, reason) for name, reason in absent.items()]
    for service in site.cluster.services:
        try:
            made[service.name] = _chosen(site, hour, service, known, problems)
        except Exception as error:  # the hour goes on with the last forecast, or the stated mean
            made[service.name] = _last(site, service, hour.begin)
            reason = f"{type(error).__name__}: {error}; using {made[service.name].method}"
            problems.append(Degradation("forecast", service.name, reason))
    return made, problems


def _chosen(
    site: Site,
    hour: Hour,
    service: Service,
    known: Mapping[str, Forecaster],
    problems: list[Degradation],
) -> Forecast:
    """The forecast of the forecaster that lost least lately. Raises what ours raises."""
    history, losses = _history(site, service, hour.begin), _losses(site, service, hour.begin)
    zone = ZoneInfo(site.cluster.time_zone)
    local = on_wall_clock(history, site.plan_slots, hour.begin, site.slot, zone)
    made: dict[str, Forecast] = {}
    failed: Exception | None = None
    for name, forecaster in known.items():
        try:
            found = forecaster(
                local.history, local.steps, site.season_slots, service.expected_gpus, local.calendar
            )
            made[name] = local.put_back(sound(found, local.steps))
        except Exception as error:  # somebody's function, or ours: the others go on
            failed = error
            if name != OURS:
                reason = f"{name}: {type(error).__name__}: {error}; passed over"
                problems.append(Degradation("forecast", service.name, reason))
    if OURS not in made and failed is not None:
        raise failed
    name, reason = choose(losses, list(made))
    recent = history[-7 * site.season_slots :]
    coverage = sum(value is not None for value in recent) / len(recent) if recent else 0.0
    rivals = {rival: found.quantiles for rival, found in made.items()}
    reason = f"{reason}; {made[name].reason}"
    return replace(made[name], reason=reason, forecaster=name, rivals=rivals, coverage=coverage)


def _losses(site: Site, service: Service, begin: datetime) -> dict[str, Loss]:
    """Of each forecaster, over the slots that all of them were recorded for."""
    with ledger.open_ledger(ledger_directory(site)) as connection:
        rows = ledger.rows(
            connection,
            "SELECT forecaster, count(*) AS slots, avg(loss) AS mean FROM forecaster_losses "
            "WHERE service = ? AND ts >= ? GROUP BY forecaster",
            [service.name, begin - timedelta(days=WINDOW_DAYS)],
        )
    return {row["forecaster"]: Loss(row["slots"], row["mean"]) for row in rows}


def record_forecasts(site: Site, hour: Hour, made: dict[str, Forecast], now: datetime) -> None:
    """Leave the fact of what was expected."""
    sample_minutes = {service.name: service.demand.sample_minutes for service in site.cluster.services}
    services: dict[str, Any] = {
        name: {
            "method": found.method,
            "reason": found.reason,
            "slots": [
                [text(hour.begin + step * site.slot), [round(value, 4) for value in quantiles]]
                for step, quantiles in enumerate(found.quantiles)
            ],
            "forecaster": found.forecaster,
            "coverage": found.coverage,
            "rivals": {
                rival: [
                    [
                        text(hour.begin + step * site.slot),
                        text(hour.begin + (step + 1) * site.slot),
                        [round(value, 4) for value in rows[step]],
                    ]
                    for step in _judged(site, len(rows), sample_minutes.get(name, 60))
                ]
                for rival, rows in found.rivals.items()
            },
        }
        for name, found in made.items()
    }
    body = {"instant": text(hour.instant), "services": services}
    write_fact(site.storage, fact_key("forecast", hour.instant, text(hour.instant)), now, body)
    faults.point("forecast.recorded")


def _judged(site: Site, steps: int, sample_minutes: int) -> list[int]:
    """The steps of which all forecasts are recorded: the further ahead the fewer, each its own sample."""
    apart = max(1, sample_minutes // site.cluster.slot_minutes)
    spread = np.geomspace(1, max(1, steps // apart), JUDGED_STEPS).round().astype(int)
    return sorted({(int(place) - 1) * apart for place in spread})


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
