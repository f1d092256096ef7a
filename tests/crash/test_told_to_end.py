"""SIGTERM at any moment, of every process: it ends in time with its state saved, and the work goes on.

The moments are drawn by a seed. Planners that are told to end at a step are in the kill matrix.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flows.processes import Process, alive, command, marked, wait
from flows.server import client_environment, down, running
from tasks.program import is_published
from tests.conftest import wait_for
from tests.crash.test_real_processes import PATIENCE_S, Place, leave_one_of_each_kind, mark
from tests.crash.test_real_processes import place as place
from tests.flows.conftest import make_site as make_site
from tests.flows.conftest import migrated_database as migrated_database
from tests.flows.test_hourly import start
from tests.invariants import Facts, violations
from tests.tasks.kind_programs import rows
from tests.tasks.runners import Place as Node
from tests.tasks.runners import alive as runs
from tests.tasks.runners import place as node
from tests.tasks.runners import python, stays

ENDS_S = 30.0
__all__ = ["make_site", "migrated_database", "node", "place"]


def short(*seeds: int, of: int) -> list[Any]:
    """Seeds, those named for every day, the others for long runs."""
    return [seed if seed in seeds else pytest.param(seed, marks=pytest.mark.long) for seed in range(of)]


# What a process is, by words of its command line; the first that fits.
ROLES = {
    "run or hour": "prefect.engine",
    "worker": "flows.worker",
    "virtual service": "tasks.virtual_service",
    "Prefect worker": "worker start",
    "server": "server",
    "program": "witness_program",
}


def role(process: Process) -> str:
    """What a process of a site is."""
    words = " ".join(command(process))
    return next((name for name, part in ROLES.items() if part in words), "another")


def told(process: Process) -> float:
    """Tell it to end, and wait until it has; the seconds that took."""
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    assert not wait([process], lambda each: not alive(each), ENDS_S), f"{role(process)} does not end"
    return time.monotonic() - began


def leaving(node: Node) -> bool:
    """Whether the runner of the first GPU has let go of it, and has its outcome still to leave."""
    lock = node.path / "node0" / "gpus" / "0.lock"
    if not node.storage.keys("logs/"):
        return False
    return subprocess.run(["flock", "-n", str(lock), "true"], check=False).returncode == 0


def nothing_is_left(place: Place) -> None:
    """`down` left no process, no lock and no port."""
    assert place.running is not None
    ours = mark(place.site)
    down(place.site)
    assert marked(ours) == []
    assert running(place.site) is None
    for lock in place.site.state.rglob("*.lock"):
        assert subprocess.run(["flock", "-n", str(lock), "true"]).returncode == 0, lock
    with socket.socket() as probe:
        port = int(place.running.api_url.rsplit(":", 1)[1].split("/")[0])
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert down(place.site) == []


@pytest.mark.parametrize("seed", short(0, of=40))
def test_a_runner_told_to_end_at_any_moment_leaves_one_outcome_and_no_program(node: Node, seed: int) -> None:
    after_s = random.Random(seed).uniform(0.0, 2.0)
    key = node.commit(python("import time; time.sleep(0.6)"))
    runner = node.run(key)
    wait_for(lambda: "READY" in runner.output(), "the runner")
    time.sleep(after_s)
    runner.process.terminate()
    runner.process.wait(ENDS_S)
    states = Facts(node.storage).ranks("outcome").values()
    claims = Facts(node.storage).ranks("started").values()
    assert [state["state"] for state in states] in ([], ["not_started"], ["crashed"], ["completed"])
    assert len(states) == len(claims)  # whoever claims a start says how it ended
    assert [claim["void"] for claim in claims] == [state["state"] == "not_started" for state in states]
    assert node.run(key).result() in ("None", "completed")  # the next one starts what was not begun


def test_a_runner_told_to_end_as_it_leaves_its_outcome_leaves_it(node: Node) -> None:
    hang = node.path / "hang"
    runner = node.run(node.commit(python(f"open({str(hang)!r}, 'w').write('create')")))
    wait_for(lambda: leaving(node), "the program's end")
    runner.process.terminate()
    time.sleep(0.5)
    assert runner.process.poll() is None
    hang.unlink()
    assert runner.result() == "completed"
    assert node.outcome()["state"] == "completed"


@pytest.mark.long
@pytest.mark.parametrize("moment", ["waiting", "running", "leaving"])
def test_a_runner_told_to_end_while_storage_does_not_answer_is_gone_in_time(node: Node, moment: str) -> None:
    hang = node.path / "hang"
    leaves = python(f"open({str(hang)!r}, 'w').write('create')")
    program = leaves if moment == "leaving" else stays(node)
    runner = node.run(node.commit(program, in_s=60 if moment == "waiting" else 0))
    program_ids: list[int] = []
    if moment == "leaving":
        wait_for(lambda: leaving(node), "the program's end")
    else:
        wait_for(lambda: node.lease().get("doing") == moment, "the lease")
        program_ids = [node.pid()] if moment == "running" else []
        hang.touch()
    runner.process.terminate()
    began = time.monotonic()
    runner.process.wait(60)
    assert time.monotonic() - began < ENDS_S
    assert not any(map(runs, program_ids))
    hang.unlink()


@pytest.mark.long
@pytest.mark.xdist_group("server")
@pytest.mark.parametrize("seed", range(3))
def test_any_process_of_a_site_told_to_end_at_any_moment_ends_and_the_work_is_finished(
    place: Place, seed: int
) -> None:
    chance, counts = random.Random(seed), Counter[str]()
    slowest: dict[str, float] = {}
    start(place.up(), "hourly/now")
    for number in range(10):
        place.submit(f"job{number}", chance.uniform(2, 15))
        time.sleep(chance.uniform(0.0, 6.0))
        by_role: dict[str, list[Process]] = {}
        for process in marked(mark(place.site)):
            by_role.setdefault(role(process), []).append(process)
        victim = chance.choice(by_role[chance.choice(sorted(by_role))])
        what = role(victim)
        took = told(victim) if alive(victim) else 0.0
        counts[what] += 1
        slowest[what] = max(slowest.get(what, 0.0), round(took, 1))
        assert not violations(place.site.storage, place.witness, place.asked, settled=False)
        start(place.up(), "hourly/now")
    place.judge()
    print(f"\ntold to end, seed {seed}: {dict(counts)}; at most, seconds: {slowest}")
    nothing_is_left(place)


@pytest.mark.long
@pytest.mark.xdist_group("server")
@pytest.mark.parametrize("seed", range(2))
def test_an_hour_told_to_end_at_any_moment_ends_and_the_next_one_takes_over(place: Place, seed: int) -> None:
    chance = random.Random(seed)
    place.up()
    assert place.running is not None
    code = f"from flows.hourly import hourly; hourly({str(place.site.file)!r})"

    def hour(environment: dict[str, str], after_s: float | None) -> tuple[int, float]:
        """Plan, told to end after so long or at a fault's place; the exit code, the seconds to the end."""
        assert place.running is not None
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=client_environment(place.running.api_url) | environment,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        began = time.monotonic()
        if after_s is not None:
            time.sleep(after_s)
            process.terminate()
            began = time.monotonic()
        process.wait(PATIENCE_S if after_s is None else ENDS_S)
        return process.returncode, time.monotonic() - began

    place.submit("first", 2)
    code_of_whole, whole_s = hour({}, None)
    assert code_of_whole == 0
    for number in range(8):
        place.submit(f"job{number}", 2)
        if number % 2:
            step = f"*#{chance.randint(1, 30)}"
            hour({"SLOTWISE_FAULT": step, "SLOTWISE_FAULT_SIGNAL": "SIGTERM"}, None)
        else:
            hour({}, chance.uniform(0.0, whole_s))
        assert not violations(place.site.storage, place.witness, place.asked, settled=False)
    assert hour({}, None)[0] == 0
    place.judge()
    assert all(place.attempts(job) == 1 for job in place.asked.jobs)
    nothing_is_left(place)


@pytest.mark.long
@pytest.mark.xdist_group("server")
@pytest.mark.parametrize("seed", range(2))
def test_a_running_job_of_each_kind_told_to_end_saves_and_its_next_attempt_goes_on(
    place: Place, tmp_path: Path, seed: int
) -> None:
    chance, storage = random.Random(seed), place.site.storage
    leave_one_of_each_kind(place, tmp_path, steps=20, checkpoint_every=5)
    place.submit("commands", 20)
    start(place.up(), "hourly/now")
    due: dict[str, float] = {}
    ended: dict[str, str] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(ended) < len(place.asked.jobs) and time.monotonic() < deadline:
        for job in sorted(place.asked.jobs - ended.keys()):
            pid = place.runner(job)
            if pid is None:
                continue
            due.setdefault(job, time.monotonic() + chance.uniform(0.0, 20.0))
            runner = next((each for each in marked(mark(place.site)) if each.pid == pid), None)
            if runner is not None and time.monotonic() < due[job]:
                continue
            if runner is not None:
                told(runner)
            outcome = Facts(storage).ranks("outcome")[job, 1, 0]  # it stands when the runner is gone
            ended[job] = outcome["state"]
        time.sleep(0.1)
    assert ended.keys() == place.asked.jobs and set(ended.values()) <= {"crashed", "completed"}
    place.judge()
    print(f"\ntold to end, seed {seed}: {ended}")
    assert is_published(storage, "outputs/trains/model") and is_published(storage, "outputs/quantizes/model")
    assert [row["id"] for row in rows(storage, "infers")] == list(range(20))
    nothing_is_left(place)


def slotwise(place: Place, *words: str) -> "subprocess.Popen[bytes]":
    """The command line at work on the site."""
    command = [sys.executable, "-m", "flows.cli", *words, "--cluster", str(place.site.file)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.long
@pytest.mark.xdist_group("server")
def test_an_up_told_to_end_leaves_nothing_or_a_site_that_runs(place: Place) -> None:
    chance, found = random.Random(5), []
    for _ in range(5):
        starts = slotwise(place, "up", "--no-plan-now")
        time.sleep(chance.uniform(1.0, 12.0))
        starts.terminate()
        starts.wait(ENDS_S)
        place.running = running(place.site)
        found.append(place.running is not None)
        if place.running is None and (place.site.state / "run" / "instance.json").exists():
            assert marked(mark(place.site)) == []
        elif place.running is not None:
            nothing_is_left(place)
    print(f"\nup told to end; it runs afterwards: {found}")


@pytest.mark.long
@pytest.mark.xdist_group("server")
@pytest.mark.parametrize("seed", range(2))
def test_a_down_that_is_killed_is_made_up_for(place: Place, seed: int) -> None:
    chance = random.Random(seed)
    place.submit("before", 25)
    start(place.up(), "hourly/now")
    wait_for(lambda: place.begun("before"), "the job to begin", PATIENCE_S)
    stops = slotwise(place, "down")
    time.sleep(chance.uniform(1.0, 3.0))
    stops.kill()
    stops.wait()
    place.submit("after", 2)
    start(place.up(), "hourly/now")  # workers that it had paused go on
    place.judge()
    stops = slotwise(place, "down")
    time.sleep(chance.uniform(1.0, 3.0))
    stops.kill()
    stops.wait()
    nothing_is_left(place)
