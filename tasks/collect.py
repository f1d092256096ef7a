"""Collect: bring into the ledger what people asked, what services saw, how nodes are and what became of runs.

Invariant: each source stands alone. One that fails leaves a degradation, and the hour goes on with what was
known.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tasks import faults, ledger
from tasks.cluster import Service, Site
from tasks.demand import DemandError, Sample, gpus_needed, read_demand
from tasks.facts import FactError, fact_key, write_fact
from tasks.hour import Degradation, record_missed
from tasks.inbox import Received, take_cancels, take_recurring, take_specs
from tasks.instants import text
from tasks.nodes import NodeState, node_states
from tasks.reconcile import outcome_key, settle
from tasks.sightings import Sightings
from tasks.storage import StorageError

EXPECTED = (StorageError, FactError, DemandError)
LATE = timedelta(days=1)  # how far back a sample may still appear, or be corrected
HISTORY = timedelta(days=35)  # demand asked for when nothing is known of a service


@dataclass(frozen=True)
class Collected:
    """What was new."""

    received: Received
    occurrences: tuple[str, ...]
    cancels: tuple[str, ...]
    samples: dict[str, int]
    nodes: dict[str, NodeState]
    settled: dict[str, str]  # job.attempt.rank -> state that was found out here
    facts: int
    problems: list[Degradation] = field(default_factory=list)


def ledger_directory(site: Site) -> Path:
    """Where the control machine keeps the database."""
    return site.state / "ledger"


def collect(site: Site, now: datetime, steady: float | None = None) -> Collected:
    """Take in everything that is new. Raises only when storage or ledger cannot be used at all.

    `steady` is the present by a clock that nobody sets, for the ages of leases; without it, `now` is taken
    for one.
    """
    sightings = Sightings(
        site.state / "leases-seen.json",
        now.timestamp() if steady is None else steady,
        site.lost_after.total_seconds(),
    )
    directory, storage = ledger_directory(site), site.storage
    problems: list[Degradation] = []
    if damage := ledger.mend(directory, storage):
        problems.append(Degradation("collect", "ledger", damage))
    before = ledger.take_in(directory, storage, now.date())
    known = _known(directory)

    received = Received()
    occurrences: tuple[str, ...] = ()
    cancels: tuple[str, ...] = ()
    with _degrading(problems, "inbox"):
        digests = _digests(directory) if storage.keys("inbox/") else {}
        received = take_specs(site, digests, now)
        problems += [Degradation("collect", name, reason) for name, reason in received.unread]
    faults.point("collect.inbox")
    with _degrading(problems, "recurring jobs"):
        occurrences = take_recurring(site, known.templates, now)
    faults.point("collect.recurring")
    with _degrading(problems, "cancel requests"):
        new = dict.fromkeys((*received.jobs, *occurrences), "queued")
        asked = [key.removeprefix("cancel/").removesuffix(".json") for key in storage.keys("cancel/")]
        cancels = take_cancels(site, {**new, **_states(directory, asked)}, known.requested, now)
    faults.point("collect.cancels")
    samples = {}
    for service in site.cluster.services:
        with _degrading(problems, service.name):
            samples[service.name] = _take_demand(site, service, known.demand_until.get(service.name), now)
        faults.point("collect.demand")
    nodes = known.unseen_nodes(site)
    with _degrading(problems, "nodes"):
        nodes = _take_nodes(site, known.nodes, now, sightings)
    faults.point("collect.nodes")
    settled = []
    with _degrading(problems, "runs"):
        prices = {node.name: node.price_per_gpu_hour for node in site.cluster.nodes}
        live = [
            {
                **rank,
                "price": prices.get(rank["node"], 0.0),
                "cancel": rank["cancel"] or rank["job"] in cancels,
                "bad": outcome_key(rank) in known.bad,
            }
            for rank in known.live
        ]
        settled = settle(site, live, nodes, now, sightings)
    sightings.keep()
    faults.point("collect.settled")

    after = ledger.take_in(directory, storage, now.date())
    problems += [Degradation("collect", "ledger", f"set aside: {bad}") for bad in (*before.bad, *after.bad)]
    return Collected(
        received,
        occurrences,
        cancels,
        samples,
        nodes,
        {f"{rank['job']}.{rank['attempt']}.{rank['rank']}": state for rank, state in settled},
        before.new + after.new,
        problems,
    )


def collect_missed(site: Site, scheduled: datetime, reason: str, now: datetime) -> None:
    """Record that an hour was not planned, in the facts and in the ledger, however long ago it was."""
    record_missed(site, scheduled, reason, now)
    ledger.take_in(ledger_directory(site), site.storage, now.date(), also=[scheduled.date()])


@dataclass(frozen=True)
class _Known:
    templates: list[dict[str, Any]]
    requested: set[str]
    demand_until: dict[str, datetime]
    nodes: dict[str, str]
    live: list[dict[str, Any]]
    bad: set[str]  # keys of facts that could not be read

    def unseen_nodes(self, site: Site) -> dict[str, NodeState]:
        """The last known state of each node, for when leases cannot be read."""
        return {
            node.name: NodeState(
                "ready" if self.nodes.get(node.name) == "ready" else "lost",
                "its lease could not be read",
                None,
            )
            for node in site.cluster.nodes
        }


def _known(directory: Path) -> _Known:
    with ledger.open_ledger(directory) as connection:

        def rows(query: str) -> list[dict[str, Any]]:
            return ledger.rows(connection, query)

        return _Known(
            templates=rows("FROM recurring"),
            requested={row["job"] for row in rows("SELECT job FROM cancels")},
            demand_until={
                row["service"]: row["until"]
                for row in rows("SELECT service, max(ts) AS until FROM demand_samples GROUP BY service")
            },
            nodes={row["node"]: row["state"] for row in rows("SELECT node, state FROM nodes")},
            live=rows("FROM live_ranks"),
            bad={row["key"] for row in rows("SELECT key FROM bad_facts")},
        )


def _digests(directory: Path) -> dict[str, str]:
    """The ids that are taken, each with the hash of the file it came from."""
    with ledger.open_ledger(directory) as connection:
        return dict(connection.execute("SELECT job, sha256 FROM specs").fetchall())


def _states(directory: Path, jobs: list[str]) -> dict[str, str]:
    """The states of those of the jobs that there are, recurring ones too."""
    if not jobs:
        return {}
    with ledger.open_ledger(directory) as connection:
        asked = "WHERE job IN (SELECT unnest(?))"
        states = connection.execute(f"SELECT job, state FROM jobs {asked}", [jobs]).fetchall()
        recurring = connection.execute(
            f"SELECT job, 'recurring' FROM specs {asked} AND schedule IS NOT NULL", [jobs]
        ).fetchall()
        return dict(states + recurring)


def _take_demand(site: Site, service: Service, known_until: datetime | None, now: datetime) -> int:
    """Record the samples that are new or were corrected lately; how many."""
    since = now - HISTORY if known_until is None else known_until - LATE
    read = read_demand(service.demand, site, since, now)
    with ledger.open_ledger(ledger_directory(site)) as connection:
        query = "SELECT ts, value FROM demand WHERE service = ? AND ts >= ?"
        known = {row["ts"]: row["value"] for row in ledger.rows(connection, query, [service.name, since])}
    new = [found for found in read if known.get(found.ts) != found.value]
    if new:
        record_demand(site, service, new, "observed", now)
    return len(new)


def record_demand(site: Site, service: Service, samples: list[Sample], origin: str, now: datetime) -> None:
    """Leave a fact with these samples."""
    body = {
        "service": service.name,
        "origin": origin,
        "samples": [[text(s.ts), s.value, gpus_needed(service, s.value)] for s in samples],
    }
    write_fact(site.storage, fact_key("demand", now, f"{service.name}.{text(now)}"), now, body)


def _take_nodes(
    site: Site, known: dict[str, str], now: datetime, sightings: Sightings
) -> dict[str, NodeState]:
    """The state of every node, with a fact for each that changed."""
    names = [node.name for node in site.cluster.nodes]
    states = node_states(site.storage, names, now, site.lost_after, sightings)
    for name, state in states.items():
        if known.get(name) != state.state:
            key = fact_key("node", now, f"{name}.{text(now)}")
            write_fact(site.storage, key, now, {"node": name, "state": state.state, "reason": state.reason})
    return states


@contextmanager
def _degrading(problems: list[Degradation], subject: str) -> Iterator[None]:
    """Turn what can go wrong with one source into a line that people see."""
    try:
        yield
    except Exception as error:  # whatever one source does, the hour goes on
        said = str(error) if isinstance(error, EXPECTED) else f"{type(error).__name__}: {error}"
        problems.append(Degradation("collect", subject, f"{said}; going on with what was known"))
