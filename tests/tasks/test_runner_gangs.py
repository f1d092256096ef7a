"""The ranks of a gang: they begin together, find each other, and end together."""

import os
import signal

from tasks.facts import fact_key, write_fact
from tasks.instants import now
from tests.conftest import wait_for
from tests.tasks.runners import Place, alive, python, stays
from tests.tasks.runners import place as place

RENDEZVOUS = """
import os, socket, sys, time
names = ("SLOTWISE_NODE", "SLOTWISE_NODE_RANK", "SLOTWISE_NODE_COUNT", "MASTER_ADDR", "MASTER_PORT")
node, rank, count, address, port = (os.environ[name] for name in names)
assert count == "2" and node == "node" + rank
if rank == "0":
    with socket.create_server((address, int(port))) as server:
        connection, _ = server.accept()
        assert connection.recv(5) == b"hello"
else:
    for _ in range(600):
        try:
            socket.create_connection((address, int(port))).sendall(b"hello")
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
"""


def test_a_gang_meets_and_completes(place: Place) -> None:
    commit = place.commit(python(RENDEZVOUS), nodes=2)
    runners = [place.run(commit, rank=rank) for rank in (1, 0)]
    assert [runner.result() for runner in runners] == ["completed", "completed"]


def gang(place: Place) -> str:
    """Commit a gang of two that notes each rank's id and stays."""
    code = f"""
import os, time
path = {str(place.path / "notes")!r} + "/rank" + os.environ["SLOTWISE_NODE_RANK"]
open(path + ".new", "w").write(str(os.getpid()))
os.rename(path + ".new", path)
time.sleep(600)
"""
    return place.commit(python(code), nodes=2)


def test_a_rank_waits_for_the_whole_gang(place: Place) -> None:
    commit = gang(place)
    place.run(commit, rank=0)
    wait_for(lambda: place.lease().get("detail") == "waiting for rank 1", "rank 0 to wait for rank 1")
    assert not place.file("rank0").exists()
    place.run(commit, rank=1)
    assert alive(place.pid("rank0"))
    assert alive(place.pid("rank1"))


def test_one_lost_member_ends_the_gang(place: Place) -> None:
    commit = gang(place)
    runners = [place.run(commit, rank=rank) for rank in (0, 1)]
    pids = [place.pid(f"rank{rank}") for rank in (0, 1)]
    os.kill(pids[1], signal.SIGKILL)
    assert [runner.result() for runner in runners] == ["stopped", "crashed"]
    assert place.outcome(rank=0)["error"] == "rank 1 on node1 ended: crashed"
    assert not any(map(alive, pids))


def test_a_member_whose_runner_is_killed_ends_the_gang(place: Place) -> None:
    commit = gang(place)
    runners = [place.run(commit, rank=rank) for rank in (0, 1)]
    pids = [place.pid(f"rank{rank}") for rank in (0, 1)]
    wait_for(lambda: place.lease(rank=1).get("doing") == "running", "rank 1's lease")
    runners[1].process.kill()
    assert runners[0].result() == "stopped"
    assert place.outcome(rank=0)["error"] == "rank 1 on node1 is lost"
    assert not any(map(alive, pids))


def test_a_gang_with_a_void_rank_does_not_begin(place: Place) -> None:
    commit = gang(place)
    write_fact(
        place.storage,
        fact_key("started", place.at, "a", 1, 1),
        now(),
        {"void": True, "reason": "node1 is lost"},
    )
    assert place.run(commit, rank=0).result() == "not_started"
    assert place.outcome()["error"] == "rank 1 was voided: node1 is lost"
    assert not place.file("rank0").exists()


def test_a_gang_whose_member_does_not_come_does_not_begin(place: Place) -> None:
    commit = place.commit(stays(place), nodes=2, timeout_s=2)
    assert place.run(commit, rank=0).result() == "not_started"
    assert place.outcome()["error"] == "rank 1 on node1 did not come"
    assert not place.file("pid").exists()
