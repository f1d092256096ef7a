"""Several processes of one run on one machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import wait_for
from training.processes import World, launch, world_from_environment

# A worker that leaves its place as a file, then waits, ends, or fails as it is told.
WORKER = """
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(f"{rank}.ended").touch(), sys.exit(143)))
names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
pathlib.Path(rank).write_text(" ".join(os.environ[name] for name in names))
how = dict(part.split("=") for part in sys.argv[1:])[rank]
if how == "wait":
    time.sleep(60)
while how != "0" and len(list(pathlib.Path().glob("?"))) < int(os.environ["LOCAL_WORLD_SIZE"]):
    time.sleep(0.01)
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(how))
"""
LAUNCHER = """
import os, sys
from training.processes import launch
sys.exit(launch([sys.executable, "-c", sys.argv[1], "0=wait", "1=wait"], 2, os.environ, 0, 1))
"""


def launched(how: list[str], node_rank: int = 0, nodes: int = 1) -> int:
    """Launch two workers in the current directory."""
    return launch([sys.executable, "-c", WORKER, *how], 2, os.environ, node_rank, nodes)


def test_workers_know_their_place_in_the_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert launched(["2=0", "3=0"], node_rank=1, nodes=2) == 0
    assert (tmp_path / "2").read_text() == "0 4 2"
    assert (tmp_path / "3").read_text() == "1 4 2"


def test_the_first_failure_ends_the_others_and_is_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launched(["0=wait", "1=7"]) == 7
    assert (tmp_path / "0.ended").exists()


def test_a_killed_worker_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert launched(["0=wait", "1=kill"]) == 128 + signal.SIGKILL


def test_sigterm_reaches_every_worker(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, WORKER], cwd=tmp_path)
    try:
        wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), "both workers")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 143
        assert (tmp_path / "0.ended").exists() and (tmp_path / "1.ended").exists()
    finally:
        launcher.kill()
        launcher.wait()


def test_a_process_alone_is_a_world_of_one() -> None:
    assert world_from_environment({}) == World(0, 1, 0)
    assert world_from_environment({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == World(3, 8, 1)
