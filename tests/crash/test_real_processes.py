"""Kill -9 of real processes: the hour's, a worker's, a job's, the server's, all; then the work is finished.

The jobs are programs that note which GPUs they had, and lock them for themselves, so that the operating
system says whether any GPU was ever held twice.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.prefect_api import ApiError, call
from flows.processes import alive, marked, recorded, wait
from flows.server import Running, client_environment, down, running, up
from tasks import instants, ledger
from tasks.cluster import Site
from tasks.collect import ledger_directory
from tasks.program import is_published, publish_directory
from tests.conftest import wait_for
from tests.flows.conftest import MakeSite
from tests.flows.conftest import make_site as make_site
from tests.flows.conftest import migrated_database as migrated_database
from tests.flows.test_hourly import start
from tests.invariants import Asked, Facts, read_witness, unfinished, violations
from tests.tasks.kind_programs import ROWS, put, rows, small_model

pytestmark = pytest.mark.xdist_group("server")
PATIENCE_S = 300.0
PROGRAM = Path(__file__).with_name("witness_program.py")


class Place:
    """A site of two nodes here, jobs that bear witness, and what was asked for."""

    def __init__(self, make: MakeSite) -> None:
        nodes = [{"name": f"node{number}", "gpus": 2} for number in range(2)]
        self.site = make(
            nodes=nodes,
            full_mode_seconds=0,
            plan_every_minutes=1440,
            replan_every_seconds=20,
            lease_seconds=3,
            start_timeout_minutes=2,
        )
        self.locks = self.site.state / "witness"
        self.locks.mkdir(parents=True)
        self.witness = self.locks / "witness.jsonl"
        self.asked = Asked()
        self.running: Running | None = None

    def submit(self, job: str, seconds: float, **fields: Any) -> None:
        command = [sys.executable, str(PROGRAM), str(self.witness), str(self.locks), str(seconds)]
        self.leave(job, **{"kind": "training", "command": command, **fields})

    def leave(self, job: str, **fields: Any) -> None:
        spec = {"id": job, "gpus": 1, "priority": 5, "duration": "1m", "max_attempts": 10}
        content = yaml.safe_dump({**spec, **fields}).encode()
        self.site.storage.write(f"inbox/{job}.yaml", content)
        self.asked.specs[f"{job}.yaml"] = content
        self.asked.jobs.add(job)

    def up(self) -> Running:
        self.running = up(self.site)
        return self.running

    def hour_that_dies(self, place: str) -> int:
        """Run the hour's flow in a process that dies there; its exit code."""
        assert self.running is not None
        hour = instants.text(instants.floor(instants.now(), self.site.cluster.plan_every_minutes))
        code = f"from flows.hourly import hourly; hourly({str(self.site.file)!r}, {hour!r})"
        environment = client_environment(self.running.api_url) | {"SLOTWISE_FAULT": place}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL, timeout=PATIENCE_S
        ).returncode

    def begun(self, job: str, attempt: int = 1) -> dict[str, Any] | None:
        """The event of an attempt's first instruction."""
        for event in read_witness(self.witness):
            if event["what"] == "begin" and (event["job"], event["attempt"]) == (job, attempt):
                return event
        return None

    def runner(self, job: str) -> int | None:
        """Process id of the runner that has claimed the job's first attempt."""
        for key in self.site.storage.keys("facts/"):
            if key.endswith(f"/started/{job}/1/0.json"):
                return int(json.loads(self.site.storage.read(key))["pid"])
        return None

    def attempts(self, job: str) -> int:
        return sum(e["what"] == "begin" and e["job"] == job for e in read_witness(self.witness))

    def done(self) -> bool:
        return not unfinished(self.site.storage, self.asked)

    def judge(self) -> None:
        """All is done, the invariants hold, and the ledger is what the facts say."""
        wait_for(self.done, "all jobs to be done", PATIENCE_S)
        found = violations(self.site.storage, self.witness, self.asked)
        assert not found, "\n".join(found)
        assert ledger.verify(ledger_directory(self.site), self.site.storage) == []


@pytest.fixture
def place(make_site: MakeSite) -> Any:
    found = Place(make_site)
    yield found
    down(found.site)


def gone(pid: int) -> bool:
    return (
        not Path(f"/proc/{pid}").exists()
        or "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    )


def mark(site: Site) -> str:
    return str(json.loads((site.state / "run" / "instance.json").read_text())["mark"])


def test_an_hour_a_worker_and_a_job_that_are_killed_cost_one_attempt_at_most(place: Place) -> None:
    place.submit("first", 3)
    place.up()
    assert place.hour_that_dies("commit.committed") == -signal.SIGKILL
    assert place.hour_that_dies("dispatch.told") == -signal.SIGKILL
    place.submit("killed", 20)
    place.submit("orphan", 15)
    wait_for(lambda: place.begun("killed") and place.begun("orphan"), "the jobs to begin", PATIENCE_S)

    killed = place.begun("killed")
    assert killed is not None
    os.kill(killed["pid"], signal.SIGKILL)

    orphan = place.begun("orphan")
    assert orphan is not None
    worker = recorded(place.site.state / "run")[f"worker-{orphan['node']}"]
    os.kill(worker.pid, signal.SIGKILL)
    wait([worker], lambda each: not alive(each), 30)
    assert not gone(orphan["pid"])  # what runs goes on without its worker
    place.up()
    place.judge()
    assert place.attempts("first") == place.attempts("orphan") == 1
    assert place.attempts("killed") == 2


@pytest.mark.long
def test_a_server_that_is_gone_for_half_a_minute_costs_nothing(place: Place) -> None:
    place.submit("during", 40)
    first = place.up()
    start(first, "hourly/now")
    wait_for(lambda: place.begun("during"), "the job to begin", PATIENCE_S)
    os.kill(first.pids["server"], signal.SIGKILL)
    place.submit("meanwhile", 2)
    time.sleep(30)
    second = place.up()
    assert second.pids["server"] != first.pids["server"]
    place.judge()
    assert place.attempts("during") == place.attempts("meanwhile") == 1


@pytest.mark.long
def test_a_server_and_a_worker_that_are_killed_together_are_made_up_for(place: Place) -> None:
    place.submit("during", 30)
    place.submit("other", 30)
    first = place.up()
    start(first, "hourly/now")
    wait_for(lambda: place.begun("during") and place.begun("other"), "the jobs to begin", PATIENCE_S)
    for name in ("server", "worker-node0", "worker-control"):
        os.kill(first.pids[name], signal.SIGKILL)
    time.sleep(5)
    place.up()
    place.judge()


@pytest.mark.long
@pytest.mark.parametrize("victim", ["runner", "program"])
def test_a_runner_and_a_program_die_together_and_the_job_is_tried_again(place: Place, victim: str) -> None:
    place.submit("a", 25)
    place.submit("b", 5)
    first = place.up()
    start(first, "hourly/now")
    wait_for(lambda: place.begun("a"), "the job to begin", PATIENCE_S)
    begun = place.begun("a")
    assert begun is not None
    pid = begun["pid"] if victim == "program" else place.runner("a")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: gone(begun["pid"]), "the program to be gone", 30)
    place.judge()
    assert place.attempts("a") == 2


def leave_one_of_each_kind(place: Place, tmp_path: Path, **training: int) -> None:
    """Jobs `trains`, `infers` (20 rows) and `quantizes`, of a small model."""
    storage = place.site.storage
    publish_directory(storage, "models/small", small_model(tmp_path))
    put(storage, *[{"id": n, "prompt": f"{n} What"} for n in range(20)])
    config = {"model": "llama-micro", "seq_len": 32, "micro_batch": 2, "global_batch": 2, "warmup": 2}
    config |= {"lr": 4e-3, "held_out_windows": 1, **training}
    quantization = {"model": "models/small", "seq_len": 64, "windows": 4, "measure_speed": False}
    place.leave("trains", kind="training", training={"config": config})
    place.leave("infers", kind="batch_inference", batch_inference=ROWS)
    place.leave("quantizes", kind="quantization", quantization=quantization)


@pytest.mark.long
def test_a_running_job_of_each_kind_is_killed_and_its_next_attempt_finishes_the_work(
    place: Place, tmp_path: Path
) -> None:
    storage = place.site.storage
    leave_one_of_each_kind(place, tmp_path, steps=60, checkpoint_every=2)
    place.submit("commands", 60)
    at_work: dict[str, Callable[[], object]] = {
        "trains": lambda: is_published(storage, "outputs/trains/checkpoints/step-2"),
        "infers": lambda: storage.keys("outputs/infers/rows-"),
        "quantizes": lambda: place.runner("quantizes"),
        "commands": lambda: place.begun("commands"),
    }
    first = place.up()
    start(first, "hourly/now")
    waiting = dict(at_work)
    deadline = time.monotonic() + PATIENCE_S
    while waiting and time.monotonic() < deadline:
        for job in [job for job, ready in waiting.items() if ready()]:
            runner = place.runner(job)
            assert runner is not None
            os.kill(runner, signal.SIGKILL)
            del waiting[job]
        time.sleep(0.2)
    assert not waiting
    place.judge()
    outcomes = Facts(storage).ranks("outcome")
    states = {job: [outcomes[job, attempt, 0]["state"] for attempt in (1, 2)] for job in at_work}
    assert set(map(tuple, states.values())) == {("crashed", "completed")}
    assert is_published(storage, "outputs/trains/model") and is_published(storage, "outputs/quantizes/model")
    assert b"resumed after step" in storage.read("logs/trains/2-0.log")
    assert [row["id"] for row in rows(storage, "infers")] == list(range(20))


@pytest.mark.long
def test_a_power_cut_and_a_cold_start_finish_the_work(place: Place) -> None:
    for job in range(4):
        place.submit(f"job{job}", 15)
    first = place.up()
    start(first, "hourly/now")
    wait_for(lambda: place.begun("job0"), "a job to begin", PATIENCE_S)
    everything = marked(mark(place.site))
    for process in everything:
        os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not marked(mark(place.site)), "everything to be gone", 30)
    second = place.up()
    assert second.api_url
    start(second, "hourly/now")
    place.judge()


@pytest.mark.long
def test_down_ends_a_job_that_ignores_it_within_half_a_minute_and_leaves_no_trace(
    place: Place, tmp_path: Path
) -> None:
    deaf = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "open(sys.argv[1], 'w').write('deaf'); time.sleep(600)"
    )
    saves = (
        "import signal, sys, time; from pathlib import Path\n"
        "def save(*_): time.sleep(5); Path(sys.argv[1]).write_text('saved'); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, save); Path(sys.argv[1]).write_text('runs'); time.sleep(600)"
    )
    files = {name: tmp_path / name for name in ("deaf", "saves")}
    place.submit("deaf", 0, command=[sys.executable, "-c", deaf, str(files["deaf"])])
    place.submit("saves", 0, command=[sys.executable, "-c", saves, str(files["saves"])])
    first = place.up()
    start(first, "hourly/now")
    wait_for(lambda: all(file.exists() for file in files.values()), "both to run", PATIENCE_S)
    second = place.up()
    assert (second.started, second.pids) == ((), first.pids)  # says where it runs, changes nothing

    ours = mark(place.site)
    began = time.monotonic()
    stopped = down(place.site)
    took = time.monotonic() - began
    assert set(stopped) == set(first.pids)
    assert marked(ours) == []
    assert running(place.site) is None
    assert files["saves"].read_text() == "saved"
    print(f"\ndown with a deaf job took {took:.1f} s")
    with pytest.raises(ApiError):
        call(first.api_url, "GET", "/health", timeout_s=2)
    outcomes = [
        json.loads(place.site.storage.read(key))
        for key in place.site.storage.keys("facts/")
        if "/outcome/" in key
    ]
    assert {outcome["job"] for outcome in outcomes} == {"deaf", "saves"}
    assert {outcome["state"] for outcome in outcomes} == {"crashed"}
    for lock in [*place.site.state.rglob("*.lock")]:
        assert subprocess.run(["flock", "-n", str(lock), "true"]).returncode == 0, lock
    assert down(place.site) == []
