"""The flows for real, with server, workers, ledger and processes: from a spec in the inbox to its outcome."""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
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
from tests.flows.conftest import MakeSite

pytestmark = pytest.mark.xdist_group("server")
DEADLINE_S = 240.0

# The first attempt kills itself as a crash would; the second finds that it has been there.
CRASHES_ONCE = """
import os, pathlib, signal
been = pathlib.Path(os.environ["SLOTWISE_STORAGE"], "crashed-once")
if not been.exists():
    been.touch()
    os.kill(os.getpid(), signal.SIGKILL)
print("this time it worked")
"""


def submit(site: Site, job: str, command: list[str]) -> None:
    """Leave a spec in the inbox."""
    spec = {"id": job, "kind": "training", "gpus": 1, "priority": 5, "duration": "5m", "command": command}
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


def state_of(running: Running, run: str) -> str:
    """The state of a flow run."""
    return str(call(running.api_url, "GET", f"/flow_runs/{run}")["state"]["type"])


def test_specs_become_outcomes_and_every_hour_is_planned_once(make_site: MakeSite) -> None:
    # Planned once a day, so that no hour ends while the test is at it.
    site = make_site(nodes=[{"name": "node0", "gpus": 3}], full_mode_seconds=0, plan_every_minutes=1440)
    submit(site, "works", [sys.executable, "-c", "print('done')"])
    submit(site, "crashes", [sys.executable, "-c", CRASHES_ONCE])
    submit(site, "endless", [sys.executable, "-c", "import time; time.sleep(3600)"])
    site.storage.write("inbox/bad.yaml", b"kind: training\ngpus: many\n")
    running = up(site)

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
    names = {run["name"] for run in runs}
    assert {"works/1/node0", "crashes/2/node0", f"hourly/{hour:%Y-%m-%dT%H:%MZ}"} <= names
    assert {"job:works", "node:node0", "kind:training"} <= {tag for run in runs for tag in run["tags"]}
    assert ledger.verify(ledger_directory(site), site.storage) == []
