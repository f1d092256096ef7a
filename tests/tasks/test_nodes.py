"""Node leases: who counts as ready."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tasks.nodes import lease_key, node_states, renew_lease
from tasks.storage import Storage, open_storage

NOW = datetime(2026, 12, 1, 6, tzinfo=UTC)
LOST_AFTER = timedelta(seconds=40)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


AGES = [(-41, "lost"), (-40, "ready"), (0, "ready"), (40, "ready"), (41, "lost"), (86_400, "lost")]


@pytest.mark.parametrize(("age", "state"), AGES)
def test_a_node_is_ready_while_its_lease_is_young(storage: Storage, age: int, state: str) -> None:
    renew_lease(storage, "node0", NOW - timedelta(seconds=age), 7)
    found = node_states(storage, ["node0"], NOW, LOST_AFTER)["node0"]
    assert found.state == state
    assert found.last_seen == NOW - timedelta(seconds=age)
    assert str(abs(age)) in found.reason or age == -40


def test_a_node_never_seen_is_lost(storage: Storage) -> None:
    found = node_states(storage, ["node0"], NOW, LOST_AFTER)["node0"]
    assert (found.state, found.last_seen) == ("lost", None)
    assert "never seen" in found.reason


def test_a_renewal_replaces_the_lease_and_says_who_made_it(storage: Storage) -> None:
    renew_lease(storage, "node0", NOW - timedelta(hours=1), 7)
    renew_lease(storage, "node0")
    lease = json.loads(storage.read(lease_key("node0")))
    assert (lease["node"], lease["pid"]) == ("node0", os.getpid())
    assert lease["host"]
    assert storage.keys("leases/") == ["leases/nodes/node0.json"]


TORN = {
    "half of it": b'{"node": "node0", "at": "2026-1',
    "empty": b"",
    "not text": b"\xff\xfe\x00",
    "a list": b"[]",
    "nothing": b"null",
    "no instant": b'{"node": "node0", "at": 12}',
    "no date": b'{"node": "node0", "at": "yesterday"}',
    "no node": b'{"at": "2026-12-01T06:00:00Z"}',
    "deep": b"[" * 100_000,
    "another node's": b'{"node": "node1", "at": "2026-12-01T06:00:00Z"}',
}


@pytest.mark.parametrize("content", TORN.values(), ids=TORN.keys())
def test_a_lease_that_cannot_be_read_counts_as_lost_and_harms_no_other_node(
    storage: Storage, content: bytes
) -> None:
    storage.write(lease_key("node0"), content)
    renew_lease(storage, "node1", NOW)
    states = node_states(storage, ["node0", "node1"], NOW, LOST_AFTER)
    assert {name: found.state for name, found in states.items()} == {"node0": "lost", "node1": "ready"}
    assert states["node0"].last_seen is None
