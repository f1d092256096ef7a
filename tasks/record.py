"""Record: close the slots that have passed: what was planned, what happened, what the baselines planned.

Invariant: each planned slot is closed once (its fact is created only if absent), from the ledger as it is
then: when all demand of the slot is known, and at the latest when one more has passed.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from tasks import faults, ledger
from tasks.cluster import Site
from tasks.collect import ledger_directory
from tasks.facts import fact_key, write_fact
from tasks.hour import record_missed
from tasks.instants import floor, text
from tasks.projections import FIGURES, POLICIES

GAP_KEPT = timedelta(days=2)  # older days take in no more facts


@dataclass(frozen=True)
class Closed:
    """A slot that was closed: its instant and the figures recorded."""

    instant: datetime
    figures: dict[str, Any]


def record(site: Site, now: datetime) -> list[Closed]:
    """Close every planned slot that has ended, then publish the ledger's copy and its snapshots."""
    directory = ledger_directory(site)
    with ledger.open_ledger(directory) as connection:
        passed = ledger.rows(
            connection,
            "SELECT p.*, coalesce(lead(p.instant) OVER (ORDER BY p.instant), ?) AS next "
            "FROM plans p WHERE p.trigger = 'hourly' "
            "QUALIFY p.instant + to_minutes(?) <= ? AND p.instant NOT IN (SELECT instant FROM slots) "
            "ORDER BY p.instant",
            [now, site.cluster.plan_every_minutes, now],
        )
        figures = []
        known = _demand_known_until(connection, site)
        for plan in passed:
            until = min(plan["instant"] + site.plan_every, plan["next"])
            if known < until and now < until + site.plan_every:
                continue  # the next hour may know what the services wanted
            figures.append((plan, until, _happened(connection, site, plan["instant"], until)))
    _record_gap(site, directory, now)
    closed = []
    for plan, until, happened in figures:
        body = {
            "instant": text(plan["instant"]),
            "until": text(until),
            **{
                f"{name}_{figure}": plan[prefix + figure]
                for name, prefix in POLICIES.items()
                for figure in FIGURES
            },
            **happened,
        }
        write_fact(site.storage, fact_key("slot", plan["instant"], text(plan["instant"])), now, body)
        faults.point("record.closed")
        closed.append(Closed(plan["instant"], body))
    ledger.take_in(directory, site.storage, now.date())
    faults.point("record.taken")
    ledger.publish(directory)
    faults.point("record.published")
    if closed:
        ledger.snapshot(directory, site.storage)
    return closed


def _record_gap(site: Site, directory: Path, now: datetime) -> None:
    """Leave a fact for each hour between the last two planned ones: nobody was there to plan it."""
    with ledger.open_ledger(directory) as connection:
        query = "SELECT instant FROM plans WHERE trigger = 'hourly' ORDER BY instant DESC LIMIT 2"
        latest = [row["instant"] for row in ledger.rows(connection, query)]
    if len(latest) == 2:
        missed = floor(latest[1], site.cluster.plan_every_minutes) + site.plan_every
        missed = max(missed, floor(now - GAP_KEPT, site.cluster.plan_every_minutes))
        while missed < floor(latest[0], site.cluster.plan_every_minutes):
            record_missed(site, missed, "no planner ran", now)
            missed += site.plan_every


def _demand_known_until(connection: Any, site: Site) -> datetime:
    """Until when the demand of every service is known."""
    rows = ledger.rows(connection, "SELECT service, max(ts) AS ts FROM demand GROUP BY service")
    last = {row["service"]: row["ts"] for row in rows}
    known = [
        last[service.name] + timedelta(minutes=service.demand.sample_minutes)
        if service.name in last
        else datetime.min.replace(tzinfo=UTC)
        for service in site.cluster.services
    ]
    return min(known, default=datetime.max.replace(tzinfo=UTC))


def _happened(connection: Any, site: Site, begin: datetime, end: datetime) -> dict[str, Any]:
    """Figures of [begin, end): GPU-seconds held and served, shortage, value earned, jobs done."""
    total = sum(node.gpus for node in site.cluster.nodes)
    held = ledger.rows(
        connection,
        "FROM ranks WHERE started_at < ? AND NOT void AND (ended_at IS NULL OR ended_at > ?)",
        [end, begin],
    )
    busy = sum(
        len(rank["gpus"]) * _overlap(rank["started_at"], rank["ended_at"] or end, begin, end) for rank in held
    )
    ended = ledger.rows(
        connection,
        "SELECT job, state FROM attempts WHERE ended = ranks AND ended_at >= ? AND ended_at < ?",
        [begin, end],
    )
    worked = ledger.rows(
        connection,
        "SELECT a.job, s.value, a.started_at, coalesce(a.ended_at, a.end_at) AS ends "
        "FROM attempts a JOIN specs s USING (job) WHERE a.started_at < $2 AND "
        "coalesce(a.ended_at, $2) > $1 AND a.state IN ('running', 'ending', 'completed')",
        [begin, end],
    )
    earned = ledger.rows(
        connection, "SELECT sum(earned) AS value FROM jobs WHERE ended_at >= ? AND ended_at < ?", [begin, end]
    )
    wanted = served = 0.0
    for service in site.cluster.services:
        demanded, met = _service(connection, site, service.name, service.demand.sample_minutes, begin, end)
        wanted, served = wanted + demanded, served + met
    states = [row["state"] for row in ended]
    return {
        "gpus": total,
        "busy_gpu_s": busy,
        "serving_gpu_s": served,
        "utilization": (busy + served) / (total * (end - begin).total_seconds()),
        "demand_gpu_s": wanted,
        "shortage_gpu_s": wanted - served,
        "value": earned[0]["value"] or 0.0,
        "worked_value": sum(
            row["value"]
            * _overlap(row["started_at"], row["ends"], begin, end)
            / max((row["ends"] - row["started_at"]).total_seconds(), 1.0)
            for row in worked
        ),
        "completed": states.count("completed"),
        "failed": len(states) - states.count("completed"),
    }


def _service(
    connection: Any, site: Site, service: str, sample_minutes: int, begin: datetime, end: datetime
) -> tuple[float, float]:
    """GPU-seconds that a service wanted and got: committed sets against samples, piece by piece."""
    sample = timedelta(minutes=sample_minutes)
    samples = ledger.rows(
        connection,
        "SELECT ts, gpus FROM demand WHERE service = ? AND ts > ? AND ts < ? ORDER BY ts",
        [service, begin - sample, end],
    )
    sets = ledger.rows(
        connection,
        "SELECT from_at, gpus FROM serving_counts WHERE service = ? AND from_at < ? ORDER BY from_at",
        [service, end],
    )
    wanted = met = 0.0
    edges = {begin, end, *(row["from_at"] for row in sets)}
    edges |= {row["ts"] for row in samples} | {row["ts"] + sample for row in samples}
    for left, right in pairwise(sorted(edge for edge in edges if begin <= edge <= end)):
        seconds = (right - left).total_seconds()
        demand = next(
            (row["gpus"] for row in reversed(samples) if row["ts"] <= left < row["ts"] + sample), 0.0
        )
        held = next((float(row["gpus"]) for row in reversed(sets) if row["from_at"] <= left), 0.0)
        wanted += demand * seconds
        met += min(demand, held) * seconds
    return wanted, met


def _overlap(start: datetime, stop: datetime, begin: datetime, end: datetime) -> float:
    return max((min(stop, end) - max(start, begin)).total_seconds(), 0.0)
