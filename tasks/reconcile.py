"""What really runs: settle every rank of every attempt that has no outcome yet.

Invariant: nothing is guessed from a scheduler's word. A rank runs while its lease is renewed; it can never
begin once its claim is taken by someone else, so voiding a rank *is* taking its claim; and an outcome is
written once, by the runner or here, whoever is first. GPUs of a rank without an outcome are never given away.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from tasks import faults
from tasks.cluster import Site
from tasks.facts import FactError, fact_key, read_json, write_fact
from tasks.instants import parse, text
from tasks.nodes import NodeState
from tasks.projections import project
from tasks.sightings import Sightings
from tasks.storage import UNUSABLE, NotFoundError, Storage

GRACE_S = 15.0  # that a program gets from SIGTERM to SIGKILL
AGAIN = "-again"  # of the key of an outcome beside one that cannot be read
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)

# A row of the view `ranks` with `price`, `cancel` (requested?), `peer_ended` (has another rank an outcome?),
# and perhaps `bad` (the ledger could not read its outcome).
Rank = dict[str, Any]


def settle(
    site: Site,
    ranks: Iterable[Rank],
    nodes: dict[str, NodeState],
    now: datetime,
    sightings: Sightings | None = None,
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
            verdict = _running(storage, site, rank, nodes, now, sightings)
        else:
            verdict = _waiting(storage, site, rank, nodes, now, sightings)
        if verdict is not None:
            state, reason = verdict
            faults.point("collect.voided")
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
    return leave_outcome(storage, outcome_key(rank), now, body, bad=bool(rank.get("bad")))


def leave_outcome(storage: Storage, key: str, at: datetime, body: dict[str, Any], bad: bool = False) -> bool:
    """Create the outcome of a rank; False when it has one.

    What lies there and is none, by the ledger's word (`bad`) or ours, would hold the GPUs for ever: then the
    outcome lies beside it, under a key that is created only once as well.
    """
    try:
        if write_fact(storage, key, at, body):
            return True
        if not bad:
            project("outcome", key, read_json(storage, key))
            return False
    except (NotFoundError, FactError, *UNUSABLE, *UNREADABLE):  # a folder has the name, or a link, or rubbish
        pass
    return write_fact(storage, f"{key.removesuffix('.json')}{AGAIN}.json", at, body)


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
    except (NotFoundError, FactError, KeyError, ValueError, TypeError, *UNUSABLE):
        return None


def _running(
    storage: Storage,
    site: Site,
    rank: Rank,
    nodes: dict[str, NodeState],
    now: datetime,
    sightings: Sightings | None,
) -> tuple[str, str] | None:
    age = _age(storage, rank, nodes, now, sightings)
    if age < site.lost_after:
        return None
    seconds = round(age.total_seconds())
    node = nodes.get(rank["node"])
    if node is not None and node.state == "ready":
        return "crashed", f"its runner on {rank['node']} has not answered for {seconds} s"
    return "lost", f"node {rank['node']} is lost; its runner has not answered for {seconds} s"


def _waiting(
    storage: Storage,
    site: Site,
    rank: Rank,
    nodes: dict[str, NodeState],
    now: datetime,
    sightings: Sightings | None,
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
    try:
        return (state, reason) if void_start(storage, rank, reason, now) else None
    except (NotFoundError, FactError, *UNUSABLE):
        # A claim that nobody can read: no one can begin any more, but someone may have begun.
        if overdue <= timedelta(0) or _age(storage, rank, nodes, now, sightings) < site.lost_after:
            return None
        return "crashed", f"{reason}; its claim cannot be read, and no runner answers"


def _age(
    storage: Storage, rank: Rank, nodes: dict[str, NodeState], now: datetime, sightings: Sightings | None
) -> timedelta:
    """Since when the rank's runner has been silent: by its lease, or else since it began or was to begin."""
    age = lease_age(storage, rank["job"], rank["attempt"], rank["rank"], now)
    token = "" if age is None else text(now - age)
    if age is None:
        age = now - (rank["started_at"] or rank["start_at"])
    if sightings is None:
        return age
    node, key = nodes.get(rank["node"]), lease_key(rank["job"], rank["attempt"], rank["rank"])
    trusted = node is None or node.clock_agrees
    return timedelta(seconds=sightings.age_s(key, token, age.total_seconds(), trusted))
