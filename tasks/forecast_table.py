"""The forecasts of a replay: one for each hour and service, made once from what had passed by then, for all
policies.

Invariant: the forecast of an hour is made from samples that had ended when it began. The rows lie in files
that policies map, not in memory. Where a sample is a whole number of slots, the forecast is made in
samples and holds for each of their slots: finer steps would say nothing more.
"""

import math
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
from numpy.typing import NDArray

from tasks.cluster import Service, Site
from tasks.demand import Sample, slot_series
from tasks.forecast import LEVELS, MOST_SEASONS, forecast
from tasks.instants import text
from tasks.journal import Journal
from tasks.local_clock import on_wall_clock
from tasks.policies import WEEK_S, Rows, View
from tasks.trace import Demand, Trace


@dataclass(frozen=True)
class ForecastTable:
    """Rows of hours × slots × LEVELS by service, as files; see `view`."""

    site: Site
    trace: Trace
    files: dict[str, Path]

    def view(self, service: Service, hour: int) -> View:
        """What can be known of a service when the hour (counted from the begin) is planned."""
        demand = self.trace.demand[service.name]
        now = hour * self.site.plan_every.total_seconds()
        known = range(
            max(self._sample(demand, now - WEEK_S), 0), min(self._sample(demand, now), len(demand.gpus))
        )
        rows: Rows = np.load(self.files[service.name], mmap_mode="r")[hour]
        slot_s = self.site.slot.total_seconds()
        return View(
            service,
            np.array(rows),
            np.array([demand.gpus[index] for index in known]),
            max(min(now, demand.end_s) - demand.first_s, 0.0),
            np.array(
                [_highest(demand, now + at * slot_s, now + (at + 1) * slot_s) for at in range(len(rows))]
            ),
        )

    @staticmethod
    def _sample(demand: Demand, seconds: float) -> int:
        """Samples that ended by then."""
        return math.floor((seconds - demand.first_s) / demand.sample_s + 1e-9)


def make_forecasts(site: Site, trace: Trace, folder: Path, journal: Journal) -> ForecastTable:
    """Forecast every service at every hour of the window, and leave the facts of it in the journal."""
    hours = math.ceil(trace.seconds / site.plan_every.total_seconds())
    files = {}
    for service in site.cluster.services:
        file = folder / f"{service.name}.npy"
        shape = (hours, _slots(site), len(LEVELS))
        table = np.lib.format.open_memmap(file, mode="w+", dtype=np.float64, shape=shape)
        for hour in range(hours):
            table[hour] = _forecast(site, trace, service, hour, journal)
        table.flush()
        files[service.name] = file
    _demand_facts(site, trace, journal)
    return ForecastTable(site, trace, files)


def _slots(site: Site) -> int:
    """Slots of an hour's rows: the horizon, and as much again as a re-plan at its end looks further."""
    return site.plan_slots + math.ceil(site.plan_every / site.slot) + 1


def _forecast(site: Site, trace: Trace, service: Service, hour: int, journal: Journal) -> NDArray[np.float64]:
    demand = trace.demand[service.name]
    slot_s, every_s = site.slot.total_seconds(), site.plan_every.total_seconds()
    now = hour * every_s
    aligned = (now - demand.first_s) % demand.sample_s == 0
    whole = int(demand.sample_s // slot_s) if aligned and demand.sample_s % slot_s == 0 else 1
    step_s, slots = slot_s * whole, _slots(site)
    season = max(site.season_slots // whole, 1)
    past = max(math.ceil((now - demand.first_s) / step_s), 0)
    past = min(past, MOST_SEASONS * season + season)
    first = trace.at(now - past * step_s)
    ended = min(math.floor((now - demand.first_s) / demand.sample_s + 1e-9), len(demand.gpus))
    begin = max(math.floor((now - past * step_s - demand.first_s) / demand.sample_s), 0)
    samples = [
        Sample(trace.at(demand.first_s + index * demand.sample_s), demand.gpus[index])
        for index in range(begin, ended)
        if not math.isnan(demand.gpus[index])
    ]
    step, sample = timedelta(seconds=step_s), timedelta(seconds=demand.sample_s)
    history = slot_series(samples, first, past, step, sample)
    instant = trace.at(now)
    local = on_wall_clock(history, math.ceil(slots / whole), instant, step, ZoneInfo(site.cluster.time_zone))
    found = local.put_back(
        forecast(local.history, local.steps, season, service.expected_gpus, local.calendar)
    )
    rows = np.repeat(np.array(found.quantiles), whole, axis=0)[:slots]
    told: dict[str, Any] = {
        "method": found.method,
        "reason": found.reason,
        "slots": [
            [text(instant + at * site.slot), [round(value, 4) for value in row]]
            for at, row in enumerate(rows[: site.plan_slots].tolist())
        ],
    }
    body = {"instant": text(instant), "services": {service.name: told}}
    journal.fact("forecast", instant, body, text(instant), service.name)
    return rows


def _demand_facts(site: Site, trace: Trace, journal: Journal) -> None:
    """The demand of the window and of what came before it, a fact for each day."""
    for service in site.cluster.services:
        demand = trace.demand[service.name]
        per_day = max(int(86400 // demand.sample_s), 1)
        for first in range(0, len(demand.gpus), per_day):
            begins = [demand.first_s + at * demand.sample_s for at in range(first, first + per_day)]
            found = zip(begins, demand.gpus[first : first + per_day], strict=False)
            samples = [
                [text(trace.at(begin)), gpus, gpus]
                for begin, gpus in found
                if not math.isnan(gpus) and begin < trace.seconds
            ]
            if samples:
                at = trace.at(begins[0])
                body = {"service": service.name, "origin": "trace", "samples": samples}
                journal.fact("demand", at, body, service.name, text(at))


def _highest(demand: Demand, begin: float, end: float) -> float:
    """The highest demand between two instants; nan when none of it is known."""
    low = math.floor((begin - demand.first_s) / demand.sample_s + 1e-9)
    high = math.ceil((end - demand.first_s) / demand.sample_s - 1e-9)
    known = [gpus for gpus in demand.gpus[max(low, 0) : max(high, 0)] if not math.isnan(gpus)]
    return max(known, default=math.nan)
