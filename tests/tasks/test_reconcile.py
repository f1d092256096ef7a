"""What really runs: the outcome of every rank that cannot speak for itself, written once."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from tasks.cluster import Site
from tasks.facts import fact_keys, read_json, write_fact, write_json
from tasks.instants import text
from tasks.nodes import NodeState
from tasks.reconcile import lease_key, outcome_key, settle, started_key, void_start, write_outcome
from tests.tasks.worked_hours import HOUR, minutes

READY, LOST = NodeState("ready", "seen", HOUR), NodeState("lost", "not seen", HOUR)


@dataclass(frozen=True)
class Case:
    """A rank as the ledger knows it, ten minutes into its hour, and what must come of it.

    Times are seconds before now; the site's leases are lost after four, starts after five minutes.
    """

    expected: str | None
    reason: str = ""
    started: float | None = None  # its claim, in the ledger
    void: bool = False
    lease: float | None = None
    due: float = 60
    node: NodeState | None = READY
    cancel: bool = False
    peer_ended: bool = False
    claimed_since: bool = False  # a claim that the ledger does not know yet


CASES = {
    "runs": Case(None, started=60, lease=1),
    "runs, lease a little old": Case(None, started=60, lease=3.9),
    "runs, lease old": Case("crashed", "has not answered for 4 s", started=60, lease=4),
    "runs on a lost node, lease good": Case(None, started=60, lease=1, node=LOST),
    "runs on a lost node, lease old": Case("lost", "node node0 is lost", started=60, lease=60, node=LOST),
    "runs on a node that is gone from the cluster": Case("lost", started=60, lease=60, node=None),
    "has just begun, no lease yet": Case(None, started=3),
    "began, and there is no lease": Case("crashed", started=60),
    "runs and is cancelled: its runner's part": Case(None, started=60, lease=1, cancel=True),
    "runs and a peer ended: its runner's part": Case(None, started=60, lease=1, peer_ended=True),
    "waits": Case(None),
    "waits for its start": Case(None, due=-600),
    "waits on a lost node": Case("not_started", "node node0 is lost", node=LOST),
    "waits on a node that is gone": Case("not_started", node=None),
    "waits and is cancelled": Case("cancelled", "cancelled before it began", cancel=True),
    "waits and is cancelled on a lost node": Case("cancelled", cancel=True, node=LOST),
    "waits and its gang has ended": Case("not_started", "another node of its gang ended", peer_ended=True),
    "waits just within its time": Case(None, due=299),
    "waits beyond its time": Case("not_started", "not begun 5 min after its time limit", due=600),
    "was voided": Case("not_started", "voided", started=30, void=True),
    "was voided, its runner still has a lease": Case("not_started", started=30, void=True, lease=0),
    "began meanwhile, cancelled": Case(None, cancel=True, claimed_since=True),
    "began meanwhile, node thought lost": Case(None, node=LOST, claimed_since=True),
    "began meanwhile, late": Case(None, due=600, claimed_since=True),
}
NOW = minutes(10)


def rank_of(case: Case) -> dict[str, Any]:
    return {
        "instant": HOUR,
        "job": "a",
        "attempt": 2,
        "rank": 1,
        "ranks": 2,
        "node": "node0",
        "gpus": [0, 3],
        "start_at": NOW - timedelta(seconds=case.due),
        "started_at": None if case.started is None else NOW - timedelta(seconds=case.started),
        "void": case.void,
        "price": 3.0,
        "cancel": case.cancel,
        "peer_ended": case.peer_ended,
    }


def prepare(site: Site, case: Case) -> dict[str, Any]:
    """The rank, and storage as its runner left it."""
    rank = rank_of(case)
    if case.started is not None or case.claimed_since:
        write_fact(site.storage, started_key(rank), NOW, {"void": case.void, "node": "node0"})
    if case.lease is not None:
        at = text(NOW - timedelta(seconds=case.lease))
        write_json(site.storage, lease_key("a", 2, 1), {"at": at})
    return rank


def nodes(case: Case) -> dict[str, NodeState]:
    return {} if case.node is None else {"node0": case.node}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_is_settled_by_what_is_known_of_it(site: Site, name: str) -> None:
    case = CASES[name]
    rank = prepare(site, case)
    settled = settle(site, [rank], nodes(case), NOW)
    assert settled == ([] if case.expected is None else [(rank, case.expected)])
    outcomes = [key for key in fact_keys(site.storage) if "/outcome/" in key]
    if case.expected is None:
        assert outcomes == []
        return
    assert outcomes == [outcome_key(rank)] == ["facts/2026-12-01/outcome/a/2/1.json"]
    fact = read_json(site.storage, outcome_key(rank))
    assert fact["state"] == case.expected
    assert case.reason in fact["error"]
    assert (fact["job"], fact["attempt"], fact["rank"], fact["node"]) == ("a", 2, 1, "node0")
    held = case.started if case.started is not None and not case.void else 0
    assert fact["gpu_seconds"] == 2 * held
    assert fact["cost"] == pytest.approx(2 * held / 3600 * 3.0)


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.started is None and case.expected]
)
def test_a_rank_that_is_over_can_never_begin(site: Site, name: str) -> None:
    rank = prepare(site, CASES[name])
    settle(site, [rank], nodes(CASES[name]), NOW)
    assert read_json(site.storage, started_key(rank))["void"] is True
    assert not write_fact(site.storage, started_key(rank), NOW, {"void": False})


def test_settling_again_changes_nothing(site: Site) -> None:
    case = CASES["waits beyond its time"]
    rank = prepare(site, case)
    settle(site, [rank], nodes(case), NOW)
    before = {key: site.storage.read(key) for key in site.storage.keys("")}
    assert settle(site, [rank], nodes(case), NOW + timedelta(minutes=1)) == []
    assert {key: site.storage.read(key) for key in site.storage.keys("")} == before


def test_a_runner_that_spoke_first_is_believed(site: Site) -> None:
    case = CASES["began, and there is no lease"]  # it dropped its lease, and the ledger is behind
    rank = prepare(site, case)
    body = {name: rank[name] for name in ("job", "attempt", "rank", "node")}
    body |= {"state": "completed", "ended_at": text(NOW), "gpu_seconds": 1.0, "cost": 0.0}
    write_fact(site.storage, outcome_key(rank), NOW, body)
    assert settle(site, [rank], nodes(case), NOW) == []
    assert read_json(site.storage, outcome_key(rank))["state"] == "completed"


def test_a_voided_rank_whose_voider_died_gets_its_outcome(site: Site) -> None:
    rank = rank_of(Case("cancelled", cancel=True))
    assert void_start(site.storage, rank, "cancelled", NOW)
    assert void_start(site.storage, rank, "again", NOW)
    assert settle(site, [rank], {"node0": READY}, NOW) == [(rank, "cancelled")]


def test_a_start_that_is_claimed_cannot_be_voided(site: Site) -> None:
    rank = prepare(site, CASES["runs"])
    assert not void_start(site.storage, rank, "too late", NOW)
    assert read_json(site.storage, started_key(rank))["void"] is False


def test_an_outcome_is_written_once(site: Site) -> None:
    rank = rank_of(CASES["runs"])
    assert write_outcome(site.storage, rank, "crashed", "first", NOW)
    assert not write_outcome(site.storage, rank, "lost", "second", NOW)
    assert read_json(site.storage, outcome_key(rank))["error"] == "first"


@pytest.mark.parametrize("lease", [b"", b"[]", b"{}", b'{"at": "soon"}', b'{"at": 5}'])
def test_a_lease_that_says_nothing_counts_from_the_start(site: Site, lease: bytes) -> None:
    rank = prepare(site, CASES["has just begun, no lease yet"])
    site.storage.write(lease_key("a", 2, 1), lease)
    assert settle(site, [rank], {"node0": READY}, NOW) == []
    assert settle(site, [rank], {"node0": READY}, NOW + timedelta(seconds=60)) == [(rank, "crashed")]
