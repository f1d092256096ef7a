"""The steps of an hour without Prefect, at any instant, for tests of what comes of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import yaml

from tasks import ledger
from tasks.allocate import allocate
from tasks.cluster import Site
from tasks.collect import Collected, collect, ledger_directory
from tasks.commit import commit
from tasks.dispatch import FlowRun, dispatch
from tasks.expect import expect, record_forecasts
from tasks.facts import write_fact
from tasks.hour import Degradation, Hour, Trigger, present_hour, record_degraded, scheduled_hour
from tasks.instants import text
from tasks.nodes import renew_lease
from tasks.reconcile import outcome_key, started_key
from tasks.record import record
from tasks.replan import reasons_to_replan
from tasks.storage import Storage, exists
from tasks.upkeep import upkeep

# A real-time service whose samples are GPUs.
CHAT: dict[str, Any] = {
    "name": "chat",
    "demand": {"file": "demand.csv", "unit": "gpus"},
    "expected_gpus": 1,
    "ramp_per_hour": 24,
    "priority": 8,
}


@dataclass
class Runs:
    """Remembers the flow runs that dispatch asked for: one for each key, as Prefect gives."""

    made: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: int = 0
    dead: set[str] = field(default_factory=set)

    def __call__(self, rank: dict[str, Any]) -> FlowRun:
        self.asked += 1
        key = f"{rank['job']}/{rank['attempt']}/{rank['rank']}"
        self.made.setdefault(key, rank)
        return FlowRun(key, key in self.dead)


@dataclass(frozen=True)
class Done:
    """What an hour did."""

    hour: Hour
    collected: Collected
    planned: bool
    problems: list[Degradation]


def plan_hour(
    site: Site,
    now: datetime,
    runs: Callable[[dict[str, Any]], FlowRun],
    trigger: Trigger = "hourly",
    scheduled: datetime | None = None,
    steady: float | None = None,
    clock: Callable[[], datetime] | None = None,
) -> Done:
    """Collect, forecast, allocate, commit, dispatch and record, as the flows do.

    `scheduled` is what the run was scheduled for, if not for now; `steady` the clock that nobody sets; each
    step looks at `clock`, where it is not still `now`.
    """
    present = clock or (lambda: now)
    if trigger == "hourly":
        hour = scheduled_hour(site, scheduled or now, now)
    else:
        hour = present_hour(site, now, trigger)
    collected = collect(site, present(), steady)
    problems = list(collected.problems)
    wanted = trigger == "hourly" or bool(reasons_to_replan(site))
    planned = wanted and not exists(site.storage, hour.commit_key)
    if planned:
        made, troubles = expect(site, hour)
        record_forecasts(site, hour, made, present())
        lost = [name for name, node in collected.nodes.items() if node.state != "ready"]
        plan = allocate(site, hour, made, lost)
        problems += troubles + plan.problems
        commit(site, plan, present())
        ledger.take_in(ledger_directory(site), site.storage, hour.instant.date())
    problems += dispatch(site, runs, present()).problems
    record_degraded(site, hour, problems, present())
    record(site, present())
    upkeep(site, present())
    return Done(hour, collected, planned, problems)


def answer(site: Site, now: datetime, *nodes: str) -> None:
    """Let these nodes' workers, or all of them, have answered just now."""
    for node in nodes or tuple(node.name for node in site.cluster.nodes):
        renew_lease(site.storage, node, now)


def submit(site: Site, job: str, **fields: Any) -> None:
    """Leave a spec in the inbox: one GPU for an hour, or as `fields` say."""
    spec = {"id": job, "kind": "training", "gpus": 1, "priority": 5, "duration": "1h", "command": ["true"]}
    site.storage.write(f"inbox/{job}.yaml", yaml.safe_dump({**spec, **fields}).encode())


def begin(site: Site, rank: dict[str, Any], now: datetime) -> None:
    """Let the rank's runner have claimed its start, and be alive."""
    body = {name: rank[name] for name in ("job", "attempt", "rank", "node")}
    assert write_fact(site.storage, started_key(rank), now, {**body, "void": False, "pid": 1, "port": 1})


def end(site: Site, rank: dict[str, Any], now: datetime, state: str = "completed", **fields: Any) -> None:
    """Let the rank's runner have left its outcome."""
    leave_end(site.storage, rank, now, state, **fields)


def leave_end(
    storage: Storage, rank: dict[str, Any], now: datetime, state: str = "completed", **fields: Any
) -> None:
    """The same in a storage that is open."""
    body = {name: rank[name] for name in ("job", "attempt", "rank", "node")}
    body |= {"state": state, "started_at": text(now), "ended_at": text(now), "gpu_seconds": 1.0, "cost": 0.0}
    assert write_fact(storage, outcome_key(rank), now, {**body, "metrics": {}, **fields})


def ask(site: Site, query: str) -> list[dict[str, Any]]:
    """Rows of the ledger."""
    with ledger.open_ledger(ledger_directory(site)) as connection:
        return ledger.rows(connection, query)


def states(site: Site) -> dict[str, str]:
    """The state of every job."""
    return {row["job"]: row["state"] for row in ask(site, "SELECT job, state FROM jobs")}
