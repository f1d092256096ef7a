"""Batch inference that dies or works beside others: no finished shard is done again, no row is lost."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tasks.batch_output import Output, shard_key
from tasks.generating import Work
from tasks.inference import infer
from tasks.program import publish_directory
from tasks.s3 import S3Storage
from tasks.storage import Storage, open_storage
from tests.conftest import MakeStorage, wait_for
from tests.tasks.kind_programs import ROWS as SECTION
from tests.tasks.kind_programs import Job, program, put, rows, small_model, stocked
from training.processes import World

SHARDS = 4
pytestmark = pytest.mark.xdist_group("inference-killed")  # they share a model and a process that forks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture
def root(tmp_path: Path, model: Path) -> Path:
    """A storage directory with the model in it."""
    return stocked(tmp_path, model)


class Attempts:
    """Attempts at a job of four shards, each killed at a step that it is told or left to end."""

    def __init__(self, root: str, process: "subprocess.Popen[str]", **surroundings: str) -> None:
        self.root = root
        self.process = process
        self.surroundings = surroundings
        self.made = 0
        self.shards: dict[str, dict[str, str]] = {}  # of each job, with what tells one writing from another

    def make(self, name: str, step: int | None, rank: int = 0, nodes: int = 1) -> int:
        """Make one; how it ended. Fails when it wrote a shard that was there."""
        self.made += 1
        asked: dict[str, Any] = {
            "root": self.root,
            "surroundings": self.surroundings,
            "section": {**SECTION, "shard_rows": 3, "max_new_tokens": 2},
        }
        asked |= {"name": name, "step": step, "rank": rank, "nodes": nodes, "attempt": self.made}
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert self.shards.get(name, {}).items() <= answer["shards"].items()
        self.shards[name] = answer["shards"]
        return int(answer["code"])

    def check(self, name: str) -> None:
        """Everything is there once, and nothing else where others look."""
        storage = open_storage(self.root)
        assert [row.get("id") for row in rows(storage, name)] == [0, 1, 2, None, 4, 5, 6, 7, 8, 9, 10, 11]
        report = json.loads(storage.read(f"outputs/{name}/report.json"))
        assert (report["rows"], report["failed"]) == (12, 1)
        left = {key.rpartition("/")[2] for key in storage.keys(f"outputs/{name}/")}
        assert left == {"manifest.json", "report.json", "run.json", *self.shards[name]}


@pytest.fixture(scope="module")
def forking() -> Iterator["subprocess.Popen[str]"]:
    """The process that makes all attempts."""
    command = [sys.executable, "-m", "tests.tasks.killed_inference"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def attempts(
    model: Path, forking: "subprocess.Popen[str]", tmp_path_factory: pytest.TempPathFactory
) -> Attempts:
    root = str(stocked(tmp_path_factory.mktemp("attempts"), model))
    put_rows(open_storage(root))
    return Attempts(root, forking)


@pytest.fixture
def attempts_on_s3(
    model: Path, forking: "subprocess.Popen[str]", s3: MakeStorage, tmp_path: Path
) -> Attempts:
    """The same in a bucket that keeps every version of its objects, to tell what was written twice."""
    storage = s3()
    assert isinstance(storage, S3Storage)
    storage.client.put_bucket_versioning(Bucket=storage.bucket, VersioningConfiguration={"Status": "Enabled"})
    publish_directory(storage, "models/small", model)
    put_rows(storage)
    surroundings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    return Attempts(storage.root, forking, **surroundings, XDG_CACHE_HOME=str(tmp_path / "cache"))


def put_rows(storage: Storage) -> None:
    """Twelve rows, of which one is none."""
    lines: list[object] = [{"id": n, "prompt": f"{n} What"} for n in range(12)]
    lines[3] = b"?"
    put(storage, *lines)


def test_a_job_that_is_killed_at_every_object_it_writes_ends_all_the_same(attempts: Attempts) -> None:
    began, step, code = attempts.made, 2, -9  # 1: the first object that it writes has no name yet, 2: it has
    while code == -9:
        before = attempts.shards.get("again")
        code = attempts.make("again", step)
        step += attempts.shards["again"] == before  # it died of what it writes anew each time
        assert step < 20
    assert code == 0
    assert attempts.made - began > 2 * SHARDS
    attempts.check("again")


def test_two_nodes_killed_at_any_step_take_each_others_shards_once_all_the_same(attempts: Attempts) -> None:
    draw = random.Random(6)
    for turn in range(5):
        assert attempts.make("two", draw.randint(3, 12), rank=turn % 2, nodes=2) in (-9, 0)
    for rank in (1, 0):
        assert attempts.make("two", None, rank, nodes=2) == 0
    attempts.check("two")


def test_two_nodes_killed_at_any_request_to_s3_write_each_shard_once_all_the_same(
    attempts_on_s3: Attempts,
) -> None:
    draw = random.Random(6)
    codes = [attempts_on_s3.make("two", draw.randint(2, 14), turn % 2, nodes=2) for turn in range(4)]
    assert -9 in codes and set(codes) <= {-9, 0}
    for rank in (1, 0):
        assert attempts_on_s3.make("two", None, rank, nodes=2) == 0
    attempts_on_s3.check("two")


@pytest.mark.long
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_killed_at_each_of_its_requests_to_s3_in_turn(attempts_on_s3: Attempts, nodes: int) -> None:
    killed_at_each_in_turn(attempts_on_s3, nodes)


@pytest.mark.long
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_killed_at_each_of_its_steps_in_turn(attempts: Attempts, nodes: int) -> None:
    killed_at_each_in_turn(attempts, nodes)


def killed_at_each_in_turn(attempts: Attempts, nodes: int) -> None:
    """A job for each step, killed there and finished by other attempts, until one is not killed any more."""
    step, code = 0, -9
    while code == -9:
        step += 1
        name = f"at{step}-of-{nodes}"
        code = attempts.make(name, step, 0, nodes)
        for rank in range(nodes):
            assert attempts.make(name, None, rank, nodes) == 0
        attempts.check(name)
    assert code == 0
    assert step > 4 * SHARDS


@pytest.mark.long
def test_a_killed_job_redoes_no_finished_shard_and_loses_no_row(root: Path) -> None:
    storage = open_storage(str(root))
    put(storage, *[{"id": n, "prompt": f"{n} What"} for n in range(40)])
    section = {**SECTION, "max_new_tokens": 30, "batch": 2, "shard_rows": 4}
    job = Job("tasks.inference", root, "killed", section)
    process = job.start()
    try:
        wait_for(lambda: len(storage.keys("outputs/killed/rows-")) >= 2, "two shards")
    finally:
        process.kill()
        process.wait()
    before = {path.name: path.stat().st_mtime_ns for path in job.output.glob("rows-*")}
    assert 2 <= len(before) < 10
    assert job.run() == 0, job.said
    after = {path.name: path.stat().st_mtime_ns for path in job.output.glob("rows-*")}
    assert before.items() <= after.items()
    assert [row["id"] for row in rows(storage, "killed")] == list(range(40))


def test_a_shard_whose_writer_was_killed_before_it_noted_its_counts_is_counted_not_redone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(root))
    put(storage, *[{"prompt": "What"}] * 4, b"?", *[{"prompt": "Who"}] * 3)
    monkeypatch.setattr(Output, "note", dying)
    with pytest.raises(RuntimeError, match="killed here"):
        infer(program(storage, tmp_path, SECTION))
    monkeypatch.undo()
    first = storage.read(shard_key("outputs/job", 0))
    storage.write(shard_key("outputs/job", 0), first.replace(b'"What"', b'"kept"'))
    job = program(storage, tmp_path, SECTION)
    infer(job)
    assert [row.get("prompt") for row in rows(storage)] == ["kept"] * 4 + [None] + ["Who"] * 3
    assert (job.metrics.known["rows_done"], job.metrics.known["rows_failed"]) == (8, 1)
    assert not storage.keys("outputs/job/records/")


def dying(*_: Any) -> Any:
    """Stands where the process is killed."""
    raise RuntimeError("killed here")


def test_a_process_that_is_ahead_takes_what_is_left_of_the_others(root: Path, tmp_path: Path) -> None:
    storage = open_storage(str(root))
    put(storage, *[{"id": n, "prompt": f"{n} What"} for n in range(24)])
    section = {**SECTION, "shard_rows": 4}
    jobs = [replace(program(storage, tmp_path, section), node_rank=rank, nodes=2) for rank in (0, 1)]
    infer(jobs[0])
    assert [row["id"] for row in rows(storage)] == list(range(24))
    assert not storage.keys("outputs/job/claims/")
    infer(jobs[1])
    assert [job.metrics.known["rows_done"] for job in jobs] == [24, 24]


def test_what_a_job_makes_of_its_devices_is_that_of_all_its_nodes(root: Path, tmp_path: Path) -> None:
    storage = open_storage(str(root))
    put(storage, *[{"id": n, "prompt": f"{n} What"} for n in range(4)])
    jobs = [replace(program(storage, tmp_path, SECTION), node_rank=rank, nodes=2) for rank in (0, 1)]
    known = Output(storage, "outputs/job", "jsonl", ())
    slow = Work(seconds=1.0, rows=1, decode_seconds=1e6, decode_bytes=1.0, peak_bytes_per_s=1e9)
    known.share(World(1, 2), slow)  # as if the other node had decoded for days
    infer(jobs[0])
    metrics = jobs[0].metrics.known
    assert 0 < metrics["decode_bandwidth_utilization"] < 1e-3
    assert metrics["rows_per_s"] > 1e-3  # its own: people add them up
    infer(jobs[1])  # finds all done, and the figures
    report = json.loads(storage.read("outputs/job/report.json"))
    figures = report["last_attempt"]
    assert figures["decode_bandwidth_utilization"] == metrics["decode_bandwidth_utilization"]
    assert known.whole_work(1) == figures
    assert not storage.keys("outputs/job/shares/")


@pytest.mark.long
def test_processes_at_work_together_do_each_shard_once(root: Path) -> None:
    storage = open_storage(str(root))
    put(storage, *[{"id": n, "prompt": f"{n} What"} for n in range(60)])
    section = {**SECTION, "shard_rows": 3}
    jobs = [Job("tasks.inference", root, "gang", section, rank, SLOTWISE_NODE_COUNT="2") for rank in (0, 1)]
    processes = [job.start() for job in jobs]
    try:
        assert [process.wait(300) for process in processes] == [0, 0], [job.said for job in jobs]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    written = [line for job in jobs for line in job.said.splitlines() if line.endswith(" rows")]
    assert len(written) == len(set(written)) == 20
    assert [row["id"] for row in rows(storage, "gang")] == list(range(60))
    assert json.loads(storage.read("outputs/gang/report.json"))["rows"] == 60


def there_are(storage: Storage, shards: int) -> bool:
    return len(storage.keys("outputs/gang/rows-")) >= shards


@pytest.mark.long
def test_two_processes_at_work_of_which_one_is_killed_take_no_shard_twice_and_lose_none(root: Path) -> None:
    storage, draw = open_storage(str(root)), random.Random(6)
    put(storage, *[{"id": n, "prompt": f"{n} What"} for n in range(90)])
    section = {**SECTION, "shard_rows": 3, "max_new_tokens": 20}
    written: dict[str, int] = {}
    for attempt in range(1, 5):
        own = {"SLOTWISE_NODE_COUNT": "2", "SLOTWISE_ATTEMPT": str(attempt)}
        jobs = [Job("tasks.inference", root, "gang", section, rank, **own) for rank in (0, 1)]
        processes = [job.start() for job in jobs]
        try:
            for victim in draw.sample(
                processes, 2 if attempt < 4 else 0
            ):  # the runner ends the other one soon
                wanted = len(storage.keys("outputs/gang/rows-")) + 2
                wait_for(partial(there_are, storage, wanted), "two shards")
                victim.kill()
            assert attempt < 4 or [process.wait(200) for process in processes] == [0, 0]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        now = {path.name: path.stat().st_mtime_ns for path in (root / "outputs/gang").glob("rows-*")}
        assert written.items() <= now.items()
        written = now
    assert len(written) == 30
    assert [row["id"] for row in rows(storage, "gang")] == list(range(90))
    report = json.loads(storage.read("outputs/gang/report.json"))
    assert (report["rows"], report["failed"]) == (90, 0)
    assert 0 < report["last_attempt"]["decode_bandwidth_utilization"] <= 1
    assert {key.rpartition("/")[2] for key in storage.keys("outputs/gang/")} == {
        "manifest.json",
        "report.json",
        "run.json",
        *written,
    }


def test_every_gpu_of_a_node_has_a_process_of_its_own_and_people_see_their_sum(root: Path) -> None:
    storage = open_storage(str(root))
    put(storage, *[{"id": n, "prompt": f"{n} What"} for n in range(40)])
    section = {**SECTION, "shard_rows": 4, "max_new_tokens": 3}
    job = Job("tasks.inference", root, "node", section, SLOTWISE_GPUS="2", SLOTWISE_GPU_TYPE="H100")
    assert job.run() == 0, job.said
    assert [row["id"] for row in rows(storage, "node")] == list(range(40))
    assert len([line for line in job.said.splitlines() if line.endswith(" rows")]) == 10
    known = job.metrics
    assert (known["rows_done"], known["rows_failed"], known["progress"]) == (40, 0, 1.0)
    assert known["completion_tokens"] == sum(row["completion_tokens"] for row in rows(storage, "node"))
    assert known["gpu_seconds"] > 0
