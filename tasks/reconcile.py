"""What really runs: settle every rank of every attempt that has no outcome yet.

Invariant: nothing is guessed from a scheduler's word. A rank runs while its lease is renewed; it can never
begin once its claim is taken by someone else, so voiding a rank *is* taking its claim; and an outcome is
written once, by the runner or here, whoever is first. GPUs of a rank without an outcome are never given away.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from tasks.cluster import Site
from tasks.facts import FactError, fact_key, read_json, write_fact
from tasks.instants import parse, text
from tasks.nodes import NodeState
from tasks.storage import NotFoundError, Storage

# A row of the view `ranks` with `price`, `cancel` (requested?), `peer_ended` (has another rank an outcome?).
Rank = dict[str, Any]


def settle(
    site: Site, ranks: Iterable[Rank], nodes: dict[str, NodeState], now: datetime
) -> list[tuple[Rank, str]]:
    """Write outcomes for ranks that are known to be over. Returns them with their state.

    A rank that began is over when its lease is old: crashed, or lost with its node. One that did not begin is
    voided when it can not or need not: its node is lost, its job cancelled, its gang ended, or its start long
    past.
    """
    storage = site.storage
    settled = []
    for rank in ranks:
        if rank["started_at"] is not None and not rank["void"]:
            verdict = _running(storage, site, rank, nodes, now)
        else:
            verdict = _waiting(storage, site, rank, nodes, now)
        if verdict is not None:
            state, reason = verdict
            if write_outcome(storage, rank, state, reason, now):  # else it spoke for itself meanwhile
                settled.append((rank, state))
    return settled


def void_start(storage: Storage, rank: Rank, reason: str, now: datetime) -> bool:
    """Take a rank's claim so that it can never begin; False when it has begun."""
    body = {
        **{name: rank[name] for name in ("job", "attempt", "rank", "node")},
        "void": True,
        "reason": reason,
    }
    key = started_key(rank)
    return write_fact(storage, key, now, body) or bool(read_json(storage, key).get("void"))


def write_outcome(storage: Storage, rank: Rank, state: str, error: str, now: datetime) -> bool:
    """The outcome of a rank that cannot speak for itself any more."""
    started = None if rank["void"] else rank["started_at"]
    seconds = max((now - started).total_seconds(), 0.0) if started else 0.0
    gpu_seconds = seconds * len(rank["gpus"])
    body = {
        **{name: rank[name] for name in ("job", "attempt", "rank", "node")},
        "state": state,
        "started_at": text(started) if started else None,
        "ended_at": text(now),
        "gpu_seconds": gpu_seconds,
        "cost": gpu_seconds / 3600 * rank["price"],
        "error": error,
        "metrics": {},
    }
    return write_fact(storage, outcome_key(rank), now, body)


def started_key(rank: Rank) -> str:
    """Key of the claim to begin."""
    return fact_key("started", rank["instant"], rank["job"], rank["attempt"], rank["rank"])


def outcome_key(rank: Rank) -> str:
    """Key of the outcome."""
    return fact_key("outcome", rank["instant"], rank["job"], rank["attempt"], rank["rank"])


def lease_key(job: str, attempt: int, rank: int) -> str:
    """Key of the lease that a rank's runner renews."""
    return f"leases/runs/{job}.{attempt}.{rank}.json"


def lease_age(storage: Storage, job: str, attempt: int, rank: int, now: datetime) -> timedelta | None:
    """Age of a rank's lease; None when there is none."""
    try:
        return now - parse(read_json(storage, lease_key(job, attempt, rank))["at"])
    except (NotFoundError, FactError, KeyError, ValueError, TypeError):
        return None


def _running(
    storage: Storage, site: Site, rank: Rank, nodes: dict[str, NodeState], now: datetime
) -> tuple[str, str] | None:
    age = lease_age(storage, rank["job"], rank["attempt"], rank["rank"], now)
    if age is None:
        age = now - rank["started_at"]
    if age < site.lost_after:
        return None
    seconds = round(age.total_seconds())
    node = nodes.get(rank["node"])
    if node is not None and node.state == "ready":
        return "crashed", f"its runner on {rank['node']} has not answered for {seconds} s"
    return "lost", f"node {rank['node']} is lost; its runner has not answered for {seconds} s"


def _waiting(
    storage: Storage, site: Site, rank: Rank, nodes: dict[str, NodeState], now: datetime
) -> tuple[str, str] | None:
    overdue = now - rank["start_at"] - timedelta(minutes=site.cluster.start_timeout_minutes)
    node = nodes.get(rank["node"])
    if rank["cancel"]:
        state, reason = "cancelled", "cancelled before it began"
    elif node is None or node.state != "ready":
        state, reason = "not_started", f"node {rank['node']} is lost"
    elif rank["peer_ended"]:
        state, reason = "not_started", "another node of its gang ended"
    elif overdue > timedelta(0):
        minutes = round(overdue.total_seconds() / 60)
        state, reason = "not_started", f"not begun {minutes} min after its time limit"
    elif rank["void"]:
        state, reason = "not_started", "voided"
    else:
        return None
    return (state, reason) if void_start(storage, rank, reason, now) else None
