"""A node's worker: it lives and dies with the Prefect worker beside it, and its lease says so."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.prefect_api import call
from flows.processes import MARK, alive, end, marked, wait
from flows.worker import WorkerError, main, work
from tasks.cluster import Site, load_site
from tasks.nodes import lease_key
from tasks.storage import exists
from tests.flows.conftest import RunningSite

NO_SERVER = "http://127.0.0.1:1/api"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    file = tmp_path / "cluster.yaml"
    file.write_text("name: w\nlease_seconds: 1\nnodes: [{name: node0, gpus: 1}, {name: node1, gpus: 1}]\n")
    return load_site(file)


@pytest.fixture
def far_worker(running_site: RunningSite) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The worker of the node elsewhere, as its machine would start it; and the mark of its processes."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "PREFECT_API_URL": running_site.running.api_url}
    file = str(running_site.site.file)
    command = [sys.executable, "-m", "flows.cli", "worker", "node1", "--cluster", file]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process, mark
    finally:
        end(marked(mark), grace_s=5)
        process.wait(timeout=30)


def eventually(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Whether the condition comes to hold. The time is for a busy machine; nothing is measured by it."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def polls(running_site: RunningSite) -> bool:
    """Whether the server has heard of the worker of node1."""
    workers = call(running_site.running.api_url, "POST", "/work_pools/gpu/workers/filter", {})
    return "worker-node1" in {worker["name"] for worker in workers}


def test_a_node_that_the_cluster_lacks_is_named_with_those_it_has(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WorkerError, match="there is no node 'node7'; expected one of node0, node1"):
        work(site, "node7", NO_SERVER)
    assert main(["node7", "--cluster", str(site.file)]) == 2
    assert "there is no node 'node7'" in capsys.readouterr().err
    assert main(["node0", "--cluster", str(site.file)]) == 2
    assert capsys.readouterr().err.startswith("no server runs for ")


def test_a_second_worker_of_a_node_on_the_same_machine_is_refused(site: Site, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from flows.worker import _only_one\n"
        "with _only_one(Path(sys.argv[1]), 'node0'): print('held', flush=True); time.sleep(60)"
    )
    directory = site.state / "nodes" / "node0"
    directory.mkdir(parents=True)
    command = [sys.executable, "-c", code, str(directory / "worker.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        with pytest.raises(
            WorkerError, match=rf"a worker of node0 runs here already \(process {first.pid}\)"
        ):
            work(site, "node0", NO_SERVER)
        first.kill()


@pytest.mark.xdist_group("server")
def test_a_worker_elsewhere_renews_its_lease_and_ends_with_its_child_when_told(
    running_site: RunningSite, far_worker: tuple[subprocess.Popen[bytes], str]
) -> None:
    process, mark = far_worker
    storage = running_site.site.storage
    assert eventually(lambda: polls(running_site))
    assert json.loads(storage.read(lease_key("node1")))["pid"] == process.pid
    assert len(marked(mark)) >= 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    assert eventually(lambda: marked(mark) == [])
    assert not exists(storage, lease_key("node1"))


@pytest.mark.xdist_group("server")
def test_a_prefect_worker_does_not_outlive_a_worker_that_was_killed(
    running_site: RunningSite, far_worker: tuple[subprocess.Popen[bytes], str]
) -> None:
    process, mark = far_worker
    assert eventually(
        lambda: len(marked(mark)) >= 2 and exists(running_site.site.storage, lease_key("node1"))
    )
    child = next(each for each in marked(mark) if each.pid != process.pid)
    process.kill()
    process.wait(timeout=30)
    assert not wait([child], lambda each: not alive(each), 30)


@pytest.mark.xdist_group("server")
def test_a_worker_ends_with_a_failure_and_without_a_lease_when_its_prefect_worker_ends(
    running_site: RunningSite, far_worker: tuple[subprocess.Popen[bytes], str]
) -> None:
    process, mark = far_worker
    storage = running_site.site.storage
    assert eventually(lambda: len(marked(mark)) >= 2 and exists(storage, lease_key("node1")))
    end([each for each in marked(mark) if each.pid != process.pid], grace_s=0)
    assert process.wait(timeout=60) > 0
    assert not exists(storage, lease_key("node1"))
