"""The stand-in for a serving deployment: a real process that follows its target."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasks.cluster import Service
from tasks.serving import Observed, Target, blockers, observed, publish_target, target_key
from tasks.storage import Storage, open_storage
from tasks.virtual_service import Deployment, main

NOW = datetime(2026, 12, 1, 6, tzinfo=UTC)
ROOT = Path(__file__).parents[2]
CHAT = Service.model_validate(
    {"name": "chat", "demand": {"file": "x"}, "expected_gpus": 1, "ramp_per_hour": 1, "priority": 1}
)


def gpus(*indices: int) -> dict[str, frozenset[int]]:
    return {"node0": frozenset(indices)} if indices else {}


def test_new_gpus_are_taken_at_once_and_old_ones_left_after_the_drain() -> None:
    deployment = Deployment(drain_s=10)
    assert deployment.step(Target(1, gpus(0, 1), {}), 0.0) == Observed(1, gpus(0, 1))
    assert deployment.step(Target(2, gpus(1, 2), gpus(0)), 5.0) == Observed(2, gpus(0, 1, 2))
    assert deployment.step(Target(2, gpus(1, 2), gpus(0)), 14.9) == Observed(2, gpus(0, 1, 2))
    assert deployment.step(Target(2, gpus(1, 2), gpus(0)), 15.0) == Observed(2, gpus(1, 2))


def test_a_gpu_given_back_while_it_drains_stays() -> None:
    deployment = Deployment(drain_s=10)
    deployment.step(Target(1, gpus(0), {}), 0.0)
    deployment.step(Target(2, {}, gpus(0)), 1.0)
    deployment.step(Target(3, gpus(0), {}), 5.0)
    assert deployment.step(Target(3, gpus(0), {}), 50.0) == Observed(3, gpus(0))


def test_without_a_readable_target_it_goes_on_as_before() -> None:
    deployment = Deployment(drain_s=0)
    deployment.step(Target(4, gpus(0), {}), 0.0)
    assert deployment.step(Target(0, {}, {}), 1.0) == Observed(4, gpus(0))


def eventually(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for it, as long as the process lives and a minute at most."""
    end = time.monotonic() + 60
    while not holds():
        assert process.poll() is None, "the service ended"
        assert time.monotonic() < end, "waited for a minute"
        time.sleep(0.02)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "storage"))


@pytest.fixture
def process(storage: Storage) -> Iterator[subprocess.Popen[str]]:
    """The service as it is started on a laptop."""
    command = [sys.executable, "-m", "tasks.virtual_service", "--storage", storage.root, "--service", "chat"]
    with subprocess.Popen(
        [*command, "--drain-seconds", "0.3", "--poll-seconds", "0.02"],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as started:
        yield started
        if started.poll() is None:
            started.kill()


def test_a_process_follows_its_target_and_lets_go_of_everything_at_its_end(
    storage: Storage, process: subprocess.Popen[str]
) -> None:
    publish_target(storage, CHAT.name, {"node0": [0, 1]}, NOW)
    eventually(lambda: observed(storage, "chat") == Observed(1, gpus(0, 1)), process)
    publish_target(storage, CHAT.name, {"node0": [1, 2]}, NOW)
    eventually(lambda: observed(storage, "chat") == Observed(2, gpus(1, 2)), process)
    assert blockers(storage, "node0", [0]) == []
    publish_target(storage, CHAT.name, {}, NOW)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert observed(storage, "chat").gpus == {}
    assert "chat: target 1: holds node0 [0, 1]\n" in said


def test_a_process_survives_a_target_that_is_torn_or_gone(
    storage: Storage, process: subprocess.Popen[str]
) -> None:
    publish_target(storage, CHAT.name, {"node0": [0]}, NOW)
    eventually(lambda: observed(storage, "chat") == Observed(1, gpus(0)), process)
    storage.write(target_key("chat"), b'{"version": 2, "gp')
    version = publish_target(storage, CHAT.name, {"node0": [3]}, NOW)
    eventually(lambda: observed(storage, "chat") == Observed(version, gpus(3)), process)
    storage.delete(target_key("chat"))
    assert publish_target(storage, CHAT.name, {"node0": [4]}, NOW) == version + 1
    eventually(lambda: observed(storage, "chat") == Observed(version + 1, gpus(4)), process)


MISTAKES = {
    "no name": (["--storage", "x"], "expected a name"),
    "no storage": (["chat"], "--storage"),
    "a strange scheme": (["chat", "--storage", "ftp://x"], "is neither a directory"),
    "no such file": (["chat", "--cluster", "gone.yaml"], "gone.yaml: cannot be read"),
    "a negative drain": (["chat", "--storage", "x", "--drain-seconds", "-1"], "--drain-seconds from 0 up"),
    "nan": (["chat", "--storage", "x", "--poll-seconds", "nan"], "--poll-seconds above 0"),
}


@pytest.mark.parametrize(("arguments", "said"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_on_the_command_line_is_said_and_ends_with_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err


def test_the_storage_of_a_cluster_file_is_found(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("name: lab\nstorage: file:here\nnodes: [{name: node0, gpus: 1}]\n")
    storage = open_storage(str(tmp_path / "here"))
    publish_target(storage, CHAT.name, {"node0": [0]}, NOW)
    command = [sys.executable, "-m", "tasks.virtual_service", "chat", "--cluster", str(file)]
    with subprocess.Popen([*command, "--poll-seconds", "0.02"], cwd=ROOT, text=True) as started:
        try:
            eventually(lambda: observed(storage, "chat") == Observed(1, gpus(0)), started)
        finally:
            started.terminate()
