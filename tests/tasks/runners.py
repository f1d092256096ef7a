"""Runners in processes of their own, on nodes that are directories, and programs for them."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tasks.facts import fact_key, read_json, write_fact
from tasks.instants import now, text
from tasks.reconcile import lease_key
from tasks.storage import NotFoundError, Storage, open_storage
from tests.conftest import WAIT_S, wait_for

DRIVER = """
import dataclasses, sys, time
from pathlib import Path
from tasks.runner import read_order, run_rank
root, commit, job, rank, node_directory, person, hang = sys.argv[1:]
order = read_order(root, commit, job, int(rank))
class Hanging:
    def __init__(self, storage):
        self.storage, self.root = storage, storage.root
    def __getattr__(self, name):
        while Path(hang).exists() and Path(hang).read_text() in ("", name):
            time.sleep(0.05)
        return getattr(self.storage, name)
order = dataclasses.replace(order, storage=Hanging(order.storage))
print("READY", flush=True)
def say(line):
    print("SAID", line, flush=True)
outcome = run_rank(order, Path(node_directory), say, lambda: person == "cancels")
print("OUTCOME", outcome.state, flush=True)
"""


class Runner:
    """One rank's runner, in a process of its own."""

    def __init__(self, place: Path, commit: str, job: str, rank: int, person: str = "") -> None:
        self.out = place / f"{job}.{rank}.{len(list(place.iterdir()))}.out"
        arguments = [
            str(place / "storage"),
            commit,
            job,
            str(rank),
            str(place / f"node{rank}"),
            person,
            str(place / "hang"),
        ]
        environment = {
            **os.environ,
            "PREFECT_API_KEY": "secret",
            "PREFECT_API_URL": "http://x",
            "KEPT": "yes",
        }
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, *arguments], stdout=out, stderr=out, env=environment
            )

    def output(self) -> str:
        return self.out.read_text()

    def result(self) -> str:
        """The state it ends with."""
        try:
            self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the runner does not end; it said: {self.output()}")
        assert self.process.returncode == 0, self.output()
        return self.output().splitlines()[-1].removeprefix("OUTCOME ")


class Place:
    """Storage and nodes in a directory, and the runners that were started there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.storage: Storage = open_storage(str(path / "storage"))
        self.runners: list[Runner] = []
        self.at = now().replace(microsecond=0)

    def commit(
        self,
        command: list[str],
        job: str = "a",
        nodes: int = 1,
        gpus: tuple[int, ...] = (0,),
        gpu: str = "cpu",
        in_s: float = 0,
        timeout_s: float = 60,
        max_duration_s: float | None = None,
    ) -> str:
        """Commit one attempt of a job; the key of the commitment."""
        spec = {"kind": "training", "gpus": len(gpus) * nodes, "command": command}
        spec_key = fact_key("spec", self.at, job)
        write_fact(self.storage, spec_key, self.at, {"spec": spec, "max_duration_s": max_duration_s})
        node = {
            "gpus": gpus,
            "gpu": gpu,
            "node_gpus": 4,
            "address": "127.0.0.1",
            "price_per_gpu_hour": 3600.0,
        }
        place = {
            "job": job,
            "attempt": 1,
            "spec": spec_key,
            "start": text(self.at + timedelta(seconds=in_s)),
            "end": text(self.at + timedelta(hours=1)),
            "nodes": [{"node": f"node{rank}", **node} for rank in range(nodes)],
        }
        body = {"placements": [place], "lease_seconds": 1, "start_timeout_minutes": timeout_s / 60}
        key = fact_key("commit", self.at, job)
        write_fact(self.storage, key, self.at, body)
        return key

    def run(self, commit: str, job: str = "a", rank: int = 0, person: str = "") -> Runner:
        """Start a runner."""
        runner = Runner(self.path, commit, job, rank, person)
        self.runners.append(runner)
        return runner

    def started(self, job: str = "a", rank: int = 0) -> dict[str, Any]:
        return read_json(self.storage, fact_key("started", self.at, job, 1, rank))

    def outcome(self, job: str = "a", rank: int = 0) -> dict[str, Any]:
        return read_json(self.storage, fact_key("outcome", self.at, job, 1, rank))

    def lease(self, job: str = "a", rank: int = 0) -> dict[str, Any]:
        """What the lease says; nothing while there is none."""
        try:
            return read_json(self.storage, lease_key(job, 1, rank))
        except NotFoundError:
            return {}

    def file(self, name: str) -> Path:
        """A file that a program of the test may write."""
        return self.path / "notes" / name

    def pid(self, name: str = "pid") -> int:
        """A process id that a program wrote, once it has."""
        wait_for(
            lambda: self.file(name).exists() and self.file(name).read_text(), f"a program to write {name}"
        )
        return int(self.file(name).read_text())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "notes").mkdir()
    place = Place(tmp_path)
    yield place
    for runner in place.runners:
        if runner.process.poll() is None:
            runner.process.kill()
            runner.process.wait()


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def note(place: Place, name: str = "pid") -> str:
    """Code that writes its process's id to a file, in one step."""
    path = place.file(name)
    return f"import os; open('{path}.new', 'w').write(str(os.getpid())); os.rename('{path}.new', '{path}')\n"


def stays(place: Place, name: str = "pid") -> list[str]:
    """A program that notes its id and goes on for ten minutes."""
    return python(note(place, name) + "import time; time.sleep(600)")


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
