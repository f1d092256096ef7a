"""Secrets that a running site was given show nowhere: not in its files, nor in what its server tells."""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.prefect_api import call
from flows.server import Running, up
from tasks import instants
from tasks.cluster import Site
from tests.conftest import wait_for
from tests.crash.test_secrets import NOBODY, PLANTED, PLANTS, files_with_it
from tests.flows.conftest import MakeSite
from tests.flows.conftest import make_site as make_site
from tests.flows.conftest import migrated_database as migrated_database
from tests.flows.test_hourly import published, start, state_of

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("server")]
PASSWORD = f"admin:prefect-{PLANTED}"
SERVICE = {
    "name": "chat",
    "demand": {"prometheus": f"http://user:${{METRICS_TOKEN}}@{NOBODY}/?t=${{METRICS_TOKEN}}", "query": "up"},
    "expected_gpus": 1,
    "ramp_per_hour": 60,
    "priority": 8,
    "target": {"webhook": f"http://user:${{WEBHOOK_PASSWORD}}@{NOBODY}/hook?key=${{WEBHOOK_PASSWORD}}"},
}
# Says all that it was given, in every way that a program may say something, and fails.
TALKS = """
import json, os, sys
for pair in os.environ.items():
    print(*pair)
with open(os.environ["SLOTWISE_METRICS"], "w") as out:
    json.dump({"mfu": 0.5, "login": os.environ["HF_TOKEN"], "more": {"deep": [os.environ["HF_TOKEN"]]}}, out)
sys.exit("failed with " + os.environ["HF_TOKEN"] + " at http://me:" + os.environ["HF_TOKEN"] + "@host/")
"""


def told_by(server: Running) -> dict[str, Any]:
    """Everything that people see through the server's API."""
    ways = ("logs", "artifacts", "flow_runs", "task_runs", "deployments", "work_pools", "variables")
    return {way: call(server.api_url, "POST", f"/{way}/filter", {"limit": 200}) for way in ways}


def test_what_a_site_with_secrets_writes_and_tells_shows_none(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**PLANTS, "PREFECT_SERVER_API_AUTH_STRING": PASSWORD}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", PASSWORD)
    site: Site = make_site(
        services=[SERVICE], nodes=[{"name": "node0", "gpus": 4}], full_mode_seconds=0, plan_every_minutes=1440
    )
    spec = {"id": "talks", "kind": "training", "gpus": 1, "priority": 5, "duration": "5m", "max_attempts": 1}
    spec["command"] = [sys.executable, "-c", TALKS]
    site.storage.write("inbox/talks.yaml", yaml.safe_dump(spec).encode())
    server = up(site)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{server.api_url}/flow_runs/count", data=b"{}", timeout=30)
    start(server, "hourly/now")

    def jobs() -> dict[str, str]:
        return {row["job"]: row["state"] for row in published(site, "SELECT job, state FROM jobs")}

    wait_for(lambda: jobs().get("talks") == "failed", "the job that talks", 240.0)
    last = start(server, "hourly/hourly", instant=instants.text(instants.floor(instants.now(), 1440)))
    wait_for(lambda: state_of(server, last) == "COMPLETED", "the last hour", 240.0)

    said = told_by(server)
    (message,) = [run["state"]["message"] for run in said["flow_runs"] if run["name"].startswith("talks/")]
    assert "failed with *** at http://***@host/" in message
    assert {"run-talks", "plan"} <= {artifact["key"] for artifact in said["artifacts"]}
    assert said["logs"]
    assert [way for way, what in said.items() if PLANTED in json.dumps(what)] == []
    assert b"HF_TOKEN ***" in site.storage.read("logs/talks/1-0.log")
    (run,) = published(site, "SELECT error, metrics FROM runs")
    assert "***" in run["error"] and "***" in run["metrics"]
    (degraded,) = published(site, "SELECT count(*) AS n FROM degradations WHERE subject = 'chat'")
    assert degraded["n"]
    assert files_with_it(Path(site.file.parent)) == []
