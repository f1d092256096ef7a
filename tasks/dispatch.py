"""Dispatch: make the world match what is committed. Running it twice changes nothing.

Invariant: one flow run for each rank of each attempt (its idempotency key says so), and a service is only
ever told of GPUs that no attempt holds. The rank itself waits until its GPUs are clear; nothing is started
from here.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tasks import faults, ledger
from tasks.cluster import Site
from tasks.collect import ledger_directory
from tasks.commit import mend_plans
from tasks.facts import FactError, fact_key, write_fact
from tasks.hour import Degradation
from tasks.reconcile import void_start, write_outcome
from tasks.serving import ServingError, publish_target, service_names, slow_to_leave
from tasks.storage import UNUSABLE, NotFoundError, StorageError

Rank = dict[str, Any]


@dataclass(frozen=True)
class FlowRun:
    """A flow run as the orchestrator knows it: its id, and whether it is over."""

    id: str
    over: bool


@dataclass(frozen=True)
class Dispatched:
    """Ranks that got a flow run, ranks whose flow run died before it began, GPUs published per service."""

    created: tuple[str, ...]
    dead: tuple[str, ...]
    targets: dict[str, int]
    problems: list[Degradation]


def dispatch(site: Site, ensure_run: Callable[[Rank], FlowRun], now: datetime) -> Dispatched:
    """Create what is missing.

    `ensure_run` creates the flow run of a rank, or finds the one with the same idempotency key; it may raise
    anything, which degrades that rank only.
    """
    with ledger.open_ledger(ledger_directory(site)) as connection:
        waiting = ledger.rows(
            connection,
            "SELECT r.*, s.kind, d.flow_run FROM ranks r JOIN specs s USING (job) "
            "LEFT JOIN dispatches d USING (job, attempt, rank) "
            "WHERE r.outcome IS NULL AND r.started_at IS NULL ORDER BY r.start_at, r.job, r.rank",
        )
        holders = ledger.rows(
            connection,
            "SELECT node, gpus FROM ranks "
            "WHERE outcome IS NULL AND (started_at IS NOT NULL OR start_at <= ?)",
            [now],
        )
        due = ledger.rows(
            connection,
            "FROM serving WHERE from_at <= ? "
            "QUALIFY rank() OVER (PARTITION BY service ORDER BY instant DESC, from_at DESC) = 1",
            [now],
        )
    problems: list[Degradation] = []
    try:
        mend_plans(site, now)
    except (FactError, StorageError, KeyError) as error:
        problems.append(Degradation("dispatch", "plans", f"{error}; a commitment has no plan recorded"))
    # First of all: a service that is to leave a GPU needs time, and nothing starts there before it has left.
    taken = {(rank["node"], gpu) for rank in holders for gpu in rank["gpus"]}
    targets = _publish(site, due, taken, problems, now)
    faults.point("dispatch.told")
    created, dead = [], []
    for rank in waiting:
        name = f"{rank['job']}.{rank['attempt']}.{rank['rank']}"
        try:
            run = ensure_run(rank)
        except Exception as error:  # the server's trouble: the next hour, or the next replan, tries again
            problems.append(Degradation("dispatch", name, f"no flow run: {error}; tried again later"))
            continue
        faults.point("dispatch.created")
        try:
            if rank["flow_run"] is None:
                key = fact_key("dispatch", rank["instant"], rank["job"], rank["attempt"], rank["rank"])
                parts = {part: rank[part] for part in ("job", "attempt", "rank", "node")}
                write_fact(site.storage, key, now, {**parts, "flow_run": run.id})
                created.append(name)
                faults.point("dispatch.recorded")
            if run.over and void_start(site.storage, rank, "its flow run died before it began", now):
                write_outcome(site.storage, {**rank, "price": 0.0}, "not_started", "its flow run died", now)
                dead.append(name)
        except (NotFoundError, FactError, *UNUSABLE) as error:  # something else lies where its facts belong
            problems.append(Degradation("dispatch", name, str(error)))
    return Dispatched(tuple(created), tuple(dead), targets, problems)


def _publish(
    site: Site,
    due: list[dict[str, Any]],
    taken: set[tuple[str, int]],
    problems: list[Degradation],
    now: datetime,
) -> dict[str, int]:
    """Tell each service its GPUs, without those that an overrunning job still holds; how many it got."""
    published = {}
    configured = {service.name: service for service in site.cluster.services}
    # A service that is no longer in the cluster file still holds what it was given: it has to leave.
    for name in sorted({*configured, *service_names(site.storage)}):
        rows = [row for row in due if row["service"] == name]
        if name in configured and not rows:  # no plan has spoken of it yet
            continue
        gpus = {
            row["node"]: [gpu for gpu in row["gpus"] if (row["node"], gpu) not in taken]
            for row in rows
            if name in configured
        }
        published[name] = sum(map(len, gpus.values()))
        webhook = configured[name].target.webhook if name in configured else None
        try:
            publish_target(site.storage, name, gpus, now, webhook)
        except (ServingError, StorageError) as error:
            problems.append(Degradation("dispatch", name, f"{error}; its last target stands"))
        with contextlib.suppress(StorageError):
            if slow := slow_to_leave(site.storage, name, now):
                problems.append(Degradation("dispatch", name, slow))
    return published
