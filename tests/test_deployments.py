"""What `deployments/` promises: deployments of flows that exist, and cluster files that are right."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.deploy import with_periods
from flows.server import DEPLOYMENTS
from tasks.cluster import load_site
from tasks.jobs import read_job

EXAMPLES = ("laptop", "one_node", "four_nodes")
HELLO = DEPLOYMENTS.parent / "examples" / "hello.yaml"


def deployments() -> list[dict[str, Any]]:
    found = yaml.safe_load(DEPLOYMENTS.read_text())["deployments"]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("deployment", deployments(), ids=lambda each: str(each["name"]))
def test_each_deployment_is_of_a_flow_that_takes_its_parameters(deployment: dict[str, Any]) -> None:
    module, _, name = deployment["entrypoint"].rpartition(".")
    flow = getattr(importlib.import_module(module), name)
    assert flow.name == name
    assert set(deployment.get("parameters", {})) <= set(inspect.signature(flow.fn).parameters)
    assert deployment["work_pool"]["name"] == ("gpu" if name == "run_job" else "control")


def test_the_deployments_that_dispatch_asks_for_are_there() -> None:
    from flows.orchestration import REPLAN, RUN_JOB

    names = set()
    for each in deployments():
        module, _, name = each["entrypoint"].rpartition(".")
        names.add(f"{getattr(importlib.import_module(module), name).name}/{each['name']}")
    assert {RUN_JOB, REPLAN, "hourly/hourly", "hourly/now"} == names


def test_a_job_does_not_depend_on_its_workers_pipe() -> None:
    (run_job,) = (each for each in deployments() if each["name"] == "run_job")
    assert run_job["work_pool"]["job_variables"]["stream_output"] is False


def test_schedules_are_in_utc_with_the_periods_of_the_cluster_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "name: x\nslot_minutes: 5\nplan_every_minutes: 15\nreplan_every_seconds: 7\n"
        "nodes: [{name: node0, gpus: 1}]\n"
    )
    rendered = yaml.safe_load(with_periods(DEPLOYMENTS.read_text(), load_site(file)))["deployments"]
    schedules = {each["name"]: each["schedules"] for each in rendered}
    assert [s["interval"] for s in schedules["hourly"]] == [15 * 60]
    assert [s["interval"] for s in schedules["replan"]] == [7]
    assert schedules["now"] == schedules["run_job"] == []
    for schedule in schedules["hourly"] + schedules["replan"]:
        assert (schedule["timezone"], schedule["anchor_date"]) == ("UTC", "1970-01-01T00:00:00Z")


def test_the_written_periods_are_those_of_a_cluster_file_that_states_none(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("name: x\nnodes: [{name: node0, gpus: 1}]\n")
    text = DEPLOYMENTS.read_text()
    assert yaml.safe_load(with_periods(text, load_site(file))) == yaml.safe_load(text)


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_cluster_is_right_and_takes_the_example_job(name: str) -> None:
    site = load_site(DEPLOYMENTS.parent / f"{name}.yaml")
    assert read_job(HELLO.read_bytes(), HELLO.name, site).id == "hello"


def test_the_one_node_example_explains_every_key_of_a_cluster_file() -> None:
    from pydantic import BaseModel

    from tasks.cluster import Cluster, DemandSource, Node, Service, Target

    text = (DEPLOYMENTS.parent / "one_node.yaml").read_text()
    models: tuple[type[BaseModel], ...] = (Cluster, Node, Service, DemandSource, Target)
    missing = [key for model in models for key in model.model_fields if f"{key}:" not in text]
    assert missing == []
