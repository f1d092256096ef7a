"""The flows for real, with server, workers, ledger and processes: from a spec in the inbox to its outcome."""

import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml

from flows.prefect_api import call
from flows.server import Running, up
from tasks import instants, ledger
from tasks.cluster import Site
from tasks.collect import ledger_directory
from tasks.inbox import request_cancel
from tasks.serving import held, observed, target
from tests.flows.conftest import MakeSite

pytestmark = pytest.mark.xdist_group("server")
DEADLINE_S = 240.0

# The first attempt kills itself as a crash would; the second finds that it has been there.
CRASHES_ONCE = """
import os, pathlib, signal, sys
been = pathlib.Path(sys.argv[1])
if not been.exists():
    been.touch()
    os.kill(os.getpid(), signal.SIGKILL)
print("this time it worked")
"""


# What the service says that it holds at the moment the job runs.
LOOKS_AT_THE_SERVICE = """
import os
from tasks.storage import open_storage
print(open_storage(os.environ["SLOTWISE_STORAGE"]).read("serving/chat/observed.json").decode())
"""
# A reader who opens the published copy again and again, from its first appearance to the end.
READS = """
import pathlib, sys, duckdb
file, done = map(pathlib.Path, sys.argv[1:])
reads = facts = 0
while not done.exists():
    if file.exists():
        with duckdb.connect(str(file), read_only=True) as connection:
            jobs, = connection.execute("SELECT count(*) FROM jobs").fetchone()
            now, = connection.execute("SELECT count(*) FROM facts").fetchone()
        assert now >= facts, (now, facts)
        reads, facts = reads + 1, now
print(reads)
"""
CHAT = {
    "name": "chat",
    "demand": {"file": "demand.csv", "unit": "gpus"},
    "expected_gpus": 1,
    "ramp_per_hour": 240,
    "priority": 8,
}


def submit(site: Site, job: str, command: list[str], **fields: Any) -> None:
    """Leave a spec in the inbox."""
    spec = {"id": job, "kind": "training", "gpus": 1, "priority": 5, "duration": "5m", "command": command}
    spec |= fields
    site.storage.write(f"inbox/{job}.yaml", yaml.safe_dump(spec).encode())


def start(running: Running, deployment: str, **parameters: Any) -> str:
    """Create a run of a deployment; its id."""
    found = call(running.api_url, "GET", f"/deployments/name/{deployment}")
    made = call(
        running.api_url,
        "POST",
        f"/deployments/{found['id']}/create_flow_run",
        {"parameters": {**found["parameters"], **parameters}, "state": {"type": "SCHEDULED"}},
    )
    return str(made["id"])


def published(site: Site, query: str) -> list[dict[str, Any]]:
    """Rows of the copy that people open; none while there is no copy."""
    file = ledger.published_file(ledger_directory(site))
    if not file.exists():
        return []
    with duckdb.connect(str(file), read_only=True) as connection:
        return ledger.rows(connection, query)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for the condition."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.5)


@contextlib.contextmanager
def a_reader(site: Site, done: Path) -> Iterator[None]:
    """Somebody who reads all the while, and sees no error and nothing go missing."""
    arguments = [sys.executable, "-c", READS, str(ledger.published_file(ledger_directory(site))), str(done)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reader:
        try:
            yield
        finally:
            done.touch()
            said, error = reader.communicate(timeout=60)
    assert reader.returncode == 0, error
    assert int(said) > 10


def state_of(running: Running, run: str) -> str:
    """The state of a flow run."""
    return str(call(running.api_url, "GET", f"/flow_runs/{run}")["state"]["type"])


@pytest.mark.parametrize("storage", ["directory", pytest.param("s3", marks=pytest.mark.long)])
def test_specs_become_outcomes_and_every_hour_is_planned_once(
    make_site: MakeSite, tmp_path: Path, request: pytest.FixtureRequest, storage: str
) -> None:
    # Planned once a day, so that no hour ends while the test is at it.
    site = make_site(
        storage=request.getfixturevalue("s3")().root if storage == "s3" else "file:storage",
        nodes=[{"name": "node0", "gpus": 5}],
        services=[CHAT],
        full_mode_seconds=0,
        plan_every_minutes=1440,
        plan_slots=10,
    )
    submit(site, "works", [sys.executable, "-c", "print('done')"])
    submit(site, "crashes", [sys.executable, "-c", CRASHES_ONCE, str(tmp_path / "been")])
    submit(site, "endless", [sys.executable, "-c", "import time; time.sleep(3600)"])
    site.storage.write("inbox/bad.yaml", b"kind: training\ngpus: many\n")
    running = up(site)
    with a_reader(site, tmp_path / "read"):
        go_through(site, running)


def go_through(site: Site, running: Running) -> None:
    """From the first plan to the last, with people reading all the while."""
    first = start(running, "hourly/now")

    def states() -> dict[str, str]:
        return {row["job"]: row["state"] for row in published(site, "SELECT job, state FROM jobs")}

    def attempts() -> dict[str, int]:
        return {row["job"]: row["attempts"] for row in published(site, "SELECT job, attempts FROM jobs")}

    until(lambda: states().get("works") == "completed", "the first job")
    until(lambda: states().get("crashes") == "completed", "the crashed job's second attempt")
    assert attempts() == {"works": 1, "crashes": 2, "endless": 1}
    assert state_of(running, first) == "COMPLETED"
    assert b"bad.yaml:2: gpus" in site.storage.read("rejected/bad.yaml.error.txt")
    assert b"done" in site.storage.read("logs/works/1-0.log")

    until(lambda: states().get("endless") == "running", "the endless job")
    assert request_cancel(site.storage, "endless", "a test", instants.now())
    until(lambda: states().get("endless") == "cancelled", "the cancelled job")
    (ended,) = published(site, "SELECT state, gpu_seconds FROM runs WHERE job = 'endless'")
    assert ended["state"] == "cancelled" and ended["gpu_seconds"] > 0

    # The service acts on its target; a job worth more gets its GPUs, once the service has left them.
    until(lambda: bool(held(site.storage, "chat")), "the service's first target")
    before = target(site.storage, "chat")
    assert before.gpus["node0"] and observed(site.storage, "chat").version > 0
    submit(site, "wide", [sys.executable, "-c", LOOKS_AT_THE_SERVICE], gpus=5, priority=900, duration="10m")
    start(running, "replan/replan")
    until(lambda: states().get("wide") == "completed", "the job that takes the service's GPUs")
    seen_by_job = json.loads(site.storage.read("logs/wide/1-0.log").decode().splitlines()[-1])
    assert seen_by_job["gpus"] == {} and seen_by_job["version"] > before.version

    hour = instants.floor(instants.now(), 1440)
    twins = [start(running, "hourly/hourly", instant=instants.text(hour)) for _ in range(2)]
    stale = start(running, "hourly/hourly", instant=instants.text(hour - timedelta(days=1)))
    for run in (*twins, stale):
        until(lambda run=run: state_of(running, run) == "COMPLETED", "an hour's flow run")  # type: ignore[misc]
    plans = published(site, "SELECT instant FROM plans WHERE trigger = 'hourly'")
    assert [row["instant"] for row in plans].count(hour) == 1
    assert [row["instant"] for row in published(site, "FROM missed_slots")] == [hour - timedelta(days=1)]

    seen = {
        artifact["key"]
        for artifact in call(running.api_url, "POST", "/artifacts/latest/filter", {"limit": 100})
    }
    assert {"plan", "forecast", "unplaced", "run-works", "run-crashes"} <= seen
    runs = call(running.api_url, "POST", "/flow_runs/filter", {"limit": 100})
    names = Counter(run["name"] for run in runs)
    assert all(names[f"{job}/1/node0"] == 1 for job in ("works", "crashes", "endless", "wide"))
    assert {"works/1/node0", "crashes/2/node0", f"hourly/{hour:%Y-%m-%dT%H:%MZ}"} <= names.keys()
    assert {"job:works", "node:node0", "kind:training"} <= {tag for run in runs for tag in run["tags"]}
    assert ledger.verify(ledger_directory(site), site.storage) == []
