"""A site is started as a whole, repaired in part, and stopped without a trace. All with the real server."""

import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.prefect_api import call
from flows.processes import Process, alive, marked, recorded, wait
from flows.server import Running, ServerError, down, running, up
from tasks.cluster import Site, load_site
from tests.flows.conftest import MakeSite, RunningSite

pytestmark = pytest.mark.xdist_group("server")
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@pytest.fixture
def site(running_site: RunningSite) -> Site:
    return running_site.site


@pytest.fixture
def site_up(running_site: RunningSite) -> Running:
    return running_site.running


def start_run(url: str, deployment: str, **body: Any) -> str:
    """Create a flow run of a deployment, to start now; its id."""
    found = call(url, "GET", f"/deployments/name/{deployment}")
    run = call(
        url, "POST", f"/deployments/{found['id']}/create_flow_run", {"state": {"type": "SCHEDULED"}, **body}
    )
    return str(run["id"])


def eventually(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Whether the condition comes to hold. The time is for a busy machine; nothing is measured by it."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def ended(url: str, run: str) -> str | None:
    """The last state of a flow run, once it has one."""
    state = call(url, "GET", f"/flow_runs/{run}")["state"]["type"]
    return state if state in ENDED else None


def port_is_free(url: str) -> bool:
    port = int(url.rsplit(":", 1)[1].split("/")[0])
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_up_starts_server_and_workers_on_this_machine(site: Site, site_up: Running) -> None:
    assert set(site_up.started) == {"server", "worker-control", "worker-node0"} == set(site_up.pids)
    assert running(site) == Running(site_up.api_url, site_up.ui_url, site_up.pids)
    assert call(site_up.api_url, "GET", "/health") is True


def test_up_makes_a_pool_for_planning_and_one_with_a_queue_for_each_node(site_up: Running) -> None:
    pools = call(site_up.api_url, "POST", "/work_pools/filter", {})
    assert {(pool["name"], pool["type"]) for pool in pools} >= {("control", "process"), ("gpu", "process")}
    queues = call(site_up.api_url, "POST", "/work_pools/gpu/queues/filter", {})
    assert {"node0", "node1"} <= {queue["name"] for queue in queues}


def test_schedules_have_the_periods_of_the_cluster_file_counted_from_the_epoch(
    site: Site, site_up: Running
) -> None:
    found = call(site_up.api_url, "POST", "/deployments/filter", {})
    schedules = {each["name"]: [s["schedule"] for s in each["schedules"]] for each in found}
    assert {name: [s["interval"] for s in each] for name, each in schedules.items()} == {
        "hourly": [90 * 60.0],
        "now": [],
        "replan": [1234.0],
        "run_job": [],
    }
    for schedule in schedules["hourly"] + schedules["replan"]:
        assert schedule["timezone"] == "UTC"
        assert schedule["anchor_date"].startswith("1970-01-01T00:00:00")
    assert {each["parameters"].get("cluster") for each in found} == {str(site.file), None}


def test_a_run_on_the_control_pool_gets_the_cluster_file(site: Site, site_up: Running) -> None:
    run = start_run(site_up.api_url, "hourly/now")
    assert eventually(lambda: ended(site_up.api_url, run) is not None)
    assert ended(site_up.api_url, run) == "COMPLETED"
    assert json.loads((site.file.parent / "hourly.json").read_text())["cluster"] == str(site.file)


def test_a_run_on_a_nodes_queue_knows_its_node_and_logs_without_its_worker(
    site: Site, site_up: Running, tmp_path: Path
) -> None:
    parameters = {"storage": str(tmp_path), "commit": "c", "job": "j", "rank": 0}
    run = start_run(site_up.api_url, "run_job/run_job", parameters=parameters, work_queue_name="node0")
    assert eventually(lambda: ended(site_up.api_url, run) is not None)
    assert ended(site_up.api_url, run) == "COMPLETED"
    environment = json.loads((tmp_path / "j.json").read_text())["environment"]
    assert environment["SLOTWISE_NODE"] == "node0"
    assert environment["SLOTWISE_NODE_DIR"] == str(site.state / "nodes" / "node0")
    deployment = call(site_up.api_url, "GET", "/deployments/name/run_job/run_job")
    assert deployment["job_variables"]["stream_output"] is False


def test_the_nodes_lease_is_renewed_while_its_worker_lives(site: Site, site_up: Running) -> None:
    def renewed() -> str:
        return str(json.loads(site.storage.read("leases/nodes/node0.json"))["at"])

    first = renewed()
    assert eventually(lambda: renewed() > first)


def test_a_second_up_says_where_it_runs_and_starts_nothing(
    site: Site, site_up: Running, standin_deployments: Path
) -> None:
    assert up(site, deployments=standin_deployments) == Running(site_up.api_url, site_up.ui_url, site_up.pids)


def test_a_running_server_does_not_change_its_port(site: Site, site_up: Running) -> None:
    port = int(site_up.ui_url.rsplit(":", 1)[1])
    with pytest.raises(ServerError, match=f"the server runs on port {port} already"):
        up(site, port=port + 1)


def test_the_ui_is_served_and_asks_the_same_server(site_up: Running) -> None:
    with urllib.request.urlopen(site_up.ui_url, timeout=30) as page:
        assert b"<html" in page.read().lower()
    with urllib.request.urlopen(f"{site_up.ui_url}/ui-settings", timeout=30) as settings:
        assert json.loads(settings.read())["api_url"] == "/api"


def test_a_state_directory_serves_one_cluster_file_at_a_time(site: Site, site_up: Running) -> None:
    other = site.file.with_name("other.yaml")
    other.write_text(site.file.read_text())
    with pytest.raises(ServerError, match=rf"is in use by {site.file}, which runs; give {other} a state"):
        up(load_site(other))
    assert running(site) is not None


def test_up_mends_what_died_or_changed_and_down_leaves_no_process_and_no_port_after_a_crash(
    make_site: MakeSite, standin_deployments: Path, tmp_path: Path
) -> None:
    site = make_site()
    first = up(site, deployments=standin_deployments)
    assert first.deployed
    records = site.state / "run"
    mark = json.loads((records / "instance.json").read_text())["mark"]

    os.kill(first.pids["worker-control"], signal.SIGKILL)
    assert not wait([recorded(records)["worker-control"]], lambda each: not alive(each), 30)
    second = up(site, deployments=standin_deployments)
    assert (second.started, second.deployed) == (("worker-control",), False)
    assert second.pids["server"] == first.pids["server"]
    assert second.api_url == first.api_url

    site.file.write_text(
        site.file.read_text().replace("replan_every_seconds: 3600", "replan_every_seconds: 77")
    )
    third = up(load_site(site.file), deployments=standin_deployments)
    assert (third.started, third.deployed) == ((), True)
    replan = call(third.api_url, "GET", "/deployments/name/replan/replan")
    assert [schedule["schedule"]["interval"] for schedule in replan["schedules"]] == [77.0]

    parameters = {"storage": str(tmp_path), "commit": "c", "job": "long", "rank": 600}
    start_run(second.api_url, "run_job/run_job", parameters=parameters, work_queue_name="node0")
    assert eventually((tmp_path / "long.json").exists)
    job = json.loads((tmp_path / "long.json").read_text())["pid"]
    for process in recorded(records).values():
        if alive(process):
            os.kill(process.pid, signal.SIGKILL)
    assert job in {process.pid for process in marked(mark)}

    down(site)
    assert marked(mark) == []
    assert port_is_free(first.api_url)
    assert running(site) is None
    assert down(site) == []


def test_a_server_that_cannot_start_is_one_line_with_its_last_words_and_leaves_nothing(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site()
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "sqlite+aiosqlite:////nowhere/at/all.db")
    with pytest.raises(
        ServerError, match=r"server ended; .*server\.log ends: .*unable to open database"
    ) as failure:
        up(site)
    assert "\n" not in str(failure.value)
    mark = json.loads((site.state / "run" / "instance.json").read_text())["mark"]
    assert marked(mark) == []
    assert running(site) is None


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("name: taken\nnodes: [{name: node0, gpus: 1}]\n")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} on 127.0.0.1 is in use"):
            up(load_site(file), port=port)


def test_a_record_of_a_process_whose_id_was_reused_does_not_count_as_running(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("name: reused\nnodes: [{name: node0, gpus: 1}]\n")
    site = load_site(file)
    records = site.state / "run"
    records.mkdir(parents=True)
    instance = {"mark": "m", "file": str(file), "host": "127.0.0.1", "port": 1}
    (records / "instance.json").write_text(json.dumps(instance))
    stranger = Process("server", os.getpid(), "another boot:1")
    (records / "server.json").write_text(json.dumps(vars(stranger)))
    assert running(site) is None
    assert down(site) == []


def test_down_where_nothing_was_ever_started_makes_no_files(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("name: new\nnodes: [{name: node0, gpus: 1}]\n")
    assert down(load_site(file)) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.yaml"]
