"""What if: jobs added, dropped or changed, read as a file would be, and what moves."""

from typing import Any

import pytest

from allocator import Plan, Problem, ProblemError
from allocator.plan import Placement
from allocator.what_if import Setting, change, moves, parse_setting


def site() -> Problem:
    return Problem.from_dict(
        {
            "slots": 6,
            "nodes": [{"name": "n0", "gpus": 8}],
            "realtime": [{"service": "chat", "demand": [1] * 6, "ramp": 2}],
            "jobs": [
                {"id": "a", "gpus": 4, "slots": 2, "priority": 1},
                {"id": "b.1", "gpus": 2, "slots": 2, "deadline": 5},
            ],
            "tenants": {"search": {"gpus": 2}},
            "reservations": [{"gpus": 2, "from": 0, "to": 3, "tenant": "eval"}],
            "unavailable": [{"gpus": [7], "from": 0, "to": 1}],
        }
    )


SETTINGS: dict[str, Any] = {
    "a.priority=9": lambda p: p.job_by_id["a"].priority == 9,
    "b.1.deadline=3": lambda p: p.job_by_id["b.1"].deadline == 3,
    "b.1.deadline=null": lambda p: p.job_by_id["b.1"].deadline is None,
    "a.gpu_types=[H100]": lambda p: p.job_by_id["a"].gpu_types == ("H100",),
    "a.running={start: 0, gpus: [0, 1, 2, 3]}": lambda p: p.job_by_id["a"].running is not None,
    "realtime.chat.ramp=5": lambda p: p.services[0].ramp == 5,
    "tenants.search.gpus=4": lambda p: p.tenants[0].gpus == 4,
    "tenants.ads.gpus=1": lambda p: [tenant.name for tenant in p.tenants] == ["search", "ads"],
    "nodes.n0.gpu=H100": lambda p: p.nodes[0].gpu == "H100",
    "reservations.0.to=6": lambda p: p.reservations[0].end == 6,
    "unavailable.0.gpus=[6, 7]": lambda p: p.unavailable[0].gpus == (6, 7),
    "open_end=true": lambda p: p.open_end,
    "name=other": lambda p: p.name == "other",
}


@pytest.mark.parametrize("text", list(SETTINGS))
def test_a_setting_changes_what_its_path_means(text: str) -> None:
    assert not SETTINGS[text](site()) or text == "name=other"
    assert SETTINGS[text](change(site(), settings=[parse_setting(text)]))


def test_jobs_are_dropped_and_added_as_in_a_file() -> None:
    changed = change(site(), drop=["a"], add=[{"id": "c", "gpus": 1, "slots": 1}])
    assert [job.id for job in changed.jobs] == ["b.1", "c"]


def test_the_problem_itself_is_left_alone() -> None:
    before = site()
    change(before, settings=[Setting("a.priority", 5)], drop=["b.1"])
    assert before == site()


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no such job": (
        {"settings": [Setting("bb.priority", 1)]},
        "--set bb.priority: no job 'bb'; did you mean",
    ),
    "no such service": (
        {"settings": [Setting("realtime.chart.ramp", 1)]},
        "--set realtime.chart.ramp: no service 'chart'; did you mean chat?",
    ),
    "no such node": ({"settings": [Setting("nodes.zz.gpus", 1)]}, "--set nodes.zz.gpus: no node 'zz'"),
    "no such reservation": (
        {"settings": [Setting("reservations.3.gpus", 1)]},
        "--set reservations.3.gpus: 3; expected 0 to 0",
    ),
    "no such field": (
        {"settings": [Setting("a.priorty", 1)]},
        "job a: priorty: unknown key; did you mean priority?",
    ),
    "a value that makes no sense": ({"settings": [Setting("a.gpus", -1)]}, "job a: gpus: -1; expected"),
    "dropping a stranger": ({"drop": ["z"]}, "--drop: no job 'z'"),
    "adding a twin": ({"add": [{"id": "a", "gpus": 1, "slots": 1}]}, "job a: id: 'a' is used twice"),
    "adding no job": ({"add": ["a"]}, "--add: 'a'; expected a job, or a list of jobs"),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_names_what_is_wrong(name: str) -> None:
    kwargs, message = MISTAKES[name]
    with pytest.raises(ProblemError) as caught:
        change(site(), **kwargs)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["priority", "=3", "a.x=[1"])
def test_a_setting_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ProblemError, match="--set"):
        parse_setting(text)


@pytest.mark.parametrize(
    "setting", [Setting("a.priority", 9), Setting("a.gpu_types", None), Setting("a.choices", [{"gpus": 1}])]
)
def test_the_text_of_a_setting_is_read_back_as_the_setting(setting: Setting) -> None:
    assert parse_setting(str(setting)) == setting


def test_moves_are_the_jobs_that_differ_those_that_come_in_first() -> None:
    stay, old, out = (
        Placement("stay", 0, 2, (0,)),
        Placement("move", 3, 1, (1,)),
        Placement("out", 0, 1, (2,)),
    )
    new, into = Placement("move", 2, 1, (1,)), Placement("in", 4, 1, (2,))
    before = Plan("fast", 0, 0, None, 0, 0, (stay, old, out))
    after = Plan("fast", 0, 0, None, 0, 0, (stay, new, into))
    found = moves(before, after)
    assert [(move.job, move.before, move.after) for move in found] == [
        ("in", None, into),
        ("out", out, None),
        ("move", old, new),
    ]
