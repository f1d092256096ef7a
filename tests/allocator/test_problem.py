"""A problem that exists makes sense; a mistake names the part, the field, the value and what was expected."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from allocator import Choice, Job, Node, Problem, ProblemError, load_problem

SCENARIOS = sorted((Path(__file__).parents[2] / "allocator" / "scenarios").glob("*.yaml"))
NODES = [{"name": "n0", "gpus": 8}]


def problem(**fields: Any) -> Problem:
    return Problem.from_dict({"slots": 4, "nodes": NODES, **fields})


def job(**fields: Any) -> dict[str, Any]:
    return {"id": "a", "gpus": 2, "slots": 2, "priority": 1, **fields}


def service(**fields: Any) -> dict[str, Any]:
    return {"service": "chat", "demand": [1, 1, 1, 1], "ramp": 2, **fields}


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key of a job": (
        {"jobs": [job(deadlin=3)]},
        "job a: deadlin: unknown key; did you mean deadline?",
    ),
    "unknown key of the problem": ({"job": []}, "problem: job: unknown key; did you mean jobs?"),
    "duplicate job": ({"jobs": [job(), job()]}, "job a: id: 'a' is used twice"),
    "duplicate node": ({"nodes": NODES * 2}, "node n0: name: 'n0' is used twice"),
    "duplicate service": ({"realtime": [service(), service()]}, "'chat' is used twice"),
    "no nodes": ({"nodes": []}, "problem: nodes: [] is empty"),
    "wider than the cluster": ({"jobs": [job(gpus=9)]}, "job a: gpus: 9; expected at most the 8"),
    "no gpus": ({"jobs": [job(gpus=0)]}, "job a: gpus: 0; expected a whole number of 1 or more"),
    "negative slots": ({"jobs": [job(slots=-1)]}, "job a: slots: -1; expected a whole number of 1 or more"),
    "a truth value for a number": ({"jobs": [job(gpus=True)]}, "job a: gpus: True"),
    "fraction of a GPU": ({"jobs": [job(gpus=1.5)]}, "job a: gpus: 1.5"),
    "no width": ({"jobs": [{"id": "a", "slots": 2}]}, "job a: expected gpus and slots, or choices"),
    "width and choices": ({"jobs": [job(choices=[])]}, "job a: expected either choices or gpus and slots"),
    "no choices": ({"jobs": [{"id": "a", "choices": []}]}, "job a: choices: [] is empty"),
    "negative priority": ({"jobs": [job(priority=-1)]}, "job a: priority: -1; expected a finite number"),
    "infinite value": ({"jobs": [job(value=float("inf"))]}, "job a: value: inf; expected a finite number"),
    "value that is no number": ({"jobs": [job(value=float("nan"))]}, "job a: value: nan"),
    "negative release": ({"jobs": [job(release=-1)]}, "job a: release: -1"),
    "running elsewhere": (
        {"jobs": [job(running={"start": 0, "gpus": [7, 8]})]},
        "job a: running gpus: GPU 8; expected 0 to 7",
    ),
    "running as wide as no choice": (
        {"jobs": [job(running={"start": 0, "gpus": [1, 2, 3]})]},
        "job a: running: holds 3 GPUs; expected 2",
    ),
    "running twice on a GPU": (
        {"jobs": [job(running={"start": 0, "gpus": [1, 1]})]},
        "job a: running: gpus: [1, 1] lists a GPU twice",
    ),
    "two running jobs on a GPU": (
        {
            "jobs": [
                job(running={"start": 0, "gpus": [1, 2]}),
                job(id="b", running={"start": -1, "gpus": [2, 3]}),
            ]
        },
        "job b: running: GPU 2 is held by running job a too",
    ),
    "short demand": (
        {"realtime": [service(demand=[1])]},
        "service chat: demand: has 1 entries; expected one for",
    ),
    "negative demand": ({"realtime": [service(demand=[1, -1, 1, 1])]}, "service chat: demand of slot 1: -1"),
    "two kinds of demand": (
        {"realtime": [service(demand_quantiles=[[1] * 10] * 4)]},
        "service chat: expected either demand or demand_quantiles",
    ),
    "nine quantiles": (
        {"realtime": [{"service": "chat", "ramp": 1, "demand_quantiles": [[1] * 9] * 4}]},
        "demand_quantiles of slot 0: has 9 entries; expected 10",
    ),
    "quantiles that fall": (
        {"realtime": [{"service": "chat", "ramp": 1, "demand_quantiles": [[2] + [1] * 9] * 4}]},
        "expected counts that do not fall",
    ),
    "negative ramp of the first slot": (
        {"realtime": [service(current=[1], ramp_first=-1)]},
        "service chat: ramp_first: -1; expected a whole number of 0 or more",
    ),
    "a ramp of the first slot from nothing known": (
        {"realtime": [service(ramp_first=1)]},
        "service chat: ramp_first: 1 counts from current; expected current as well",
    ),
    "ramp below a replica": (
        {"realtime": [service(ramp=1, gpus_per_replica=2)]},
        "service chat: ramp: 1 is less",
    ),
    "current of two services": (
        {"realtime": [service(current=[1]), service(service="code", current=[1])]},
        "service code: current: GPU 1 is current in service chat too",
    ),
    "hole that ends before it begins": (
        {"unavailable": [{"gpus": [1], "from": 2, "to": 2}]},
        "unavailable: to: 2; expected more than from, which is 2",
    ),
    "hole outside the cluster": (
        {"unavailable": [{"gpus": [8], "from": 0, "to": 2}]},
        "unavailable: gpus: GPU 8",
    ),
    "reservation wider than the cluster": (
        {"reservations": [{"gpus": 9, "from": 0, "to": 2, "tenant": "eval"}]},
        "reservation for eval: gpus: 9",
    ),
    "more guaranteed than there is": (
        {"tenants": {"x": {"gpus": 5}, "y": {"gpus": 4}}},
        "tenants: 9 GPUs are guaranteed; expected at most the 8",
    ),
    "slots of an hour and a half": (
        {"slot_minutes": 90},
        "problem: slot_minutes: 90; expected a whole number from 1 to 60",
    ),
    "open_end as a word": ({"open_end": "yes"}, "problem: open_end: 'yes'; expected true or false"),
    "negative move cost": ({"move_cost": -1}, "problem: move_cost: -1"),
    "jobs that are no list": ({"jobs": 3}, "problem: jobs: 3; expected a list"),
}


@pytest.mark.parametrize(("fields", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_told_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError) as caught:
        problem(**fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


EVERYDAY: dict[str, dict[str, Any]] = {
    "a running job that overruns": {"jobs": [job(running={"start": -9, "gpus": [0, 1]})]},
    "a running job on a failed GPU": {
        "jobs": [job(running={"start": -1, "gpus": [0, 1]})],
        "unavailable": [{"gpus": [0], "from": 0, "to": 4}],
    },
    "a deadline that has passed": {"jobs": [job(deadline=-3)]},
    "a release beyond the horizon": {"jobs": [job(release=40)]},
    "a type that no node has": {"jobs": [job(gpu_types=["H100"])]},
    "a service on a running job's GPU": {
        "jobs": [job(running={"start": -1, "gpus": [0, 1]})],
        "realtime": [service(current=[1, 2], ramp_first=1)],
    },
    "a start committed for later": {"jobs": [job(running={"start": 2, "gpus": [0, 1]})]},
    "nothing to do": {},
}


@pytest.mark.parametrize("fields", EVERYDAY.values(), ids=EVERYDAY.keys())
def test_what_happens_every_day_is_no_mistake(fields: dict[str, Any]) -> None:
    assert problem(**fields).slots == 4


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_problem_survives_the_way_to_a_file_and_back(path: Path) -> None:
    found = load_problem(path)
    assert Problem.from_dict(yaml.safe_load(yaml.safe_dump(found.to_dict()))) == found


def test_a_mistake_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "day.yaml"
    path.write_text("slots: 4\nnodes: [{name: n0, gpu: 8}]\n")
    with pytest.raises(ProblemError, match=r"day\.yaml: node: gpus: missing"):
        load_problem(path)


def test_a_file_that_is_no_yaml_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "day.yaml"
    path.write_text("slots: [4\n")
    with pytest.raises(ProblemError, match=r"day\.yaml: not YAML"):
        load_problem(path)


def test_lists_become_tuples_so_that_a_problem_can_be_hashed() -> None:
    found = Problem(slots=4, nodes=[Node("n0", 8)], jobs=[Job("a", [Choice(2, 2)])])  # type: ignore[arg-type]
    assert isinstance(hash(found), int)


def test_value_is_priority_times_gpus_times_slots_of_the_first_choice_on_its_first_type() -> None:
    elastic = Job("a", (Choice(2, (("H100", 3), ("A100", 5))), Choice(4, 2)), priority=7)
    assert elastic.full_value == 7 * 2 * 3


def test_ageing_raises_the_worth_and_not_the_value() -> None:
    found = problem(jobs=[job(waited=10)], ageing_per_slot=0.05)
    assert (found.worth(found.jobs[0]), found.jobs[0].full_value) == (6, 4)


@pytest.mark.parametrize(("start", "cost"), [(1, 0), (2, 0), (3, 5), (None, 5)])
def test_a_later_start_than_announced_costs_once(start: int | None, cost: float) -> None:
    found = problem(jobs=[job(announced={"start": 2})], move_cost=5)
    assert found.move_cost_of(found.jobs[0], start) == cost


def test_importing_the_package_loads_no_solver_and_no_reader() -> None:
    code = (
        "import sys, allocator; "
        "print([m for m in ('numpy', 'scipy', 'ortools', 'yaml', 'pydantic', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
