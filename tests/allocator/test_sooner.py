"""Of plans that are worth the same, the one in which valuable work starts earlier."""

from functools import partial
from typing import Any

import pytest

from allocator import Problem, solve
from allocator.check import check, slack
from allocator.grid import Layout, Task, build_tasks
from allocator.realtime import Held, choose_counts, hold, hold_counts
from allocator.schedule import Schedule
from allocator.solver import finish
from allocator.sooner import sooner


def problem(gpus: int, slots: int, **fields: Any) -> Problem:
    return Problem.from_dict({"slots": slots, "nodes": [{"name": "n0", "gpus": gpus}], **fields})


def schedule(found: Problem, held: list[Held], starts: dict[str, int]) -> Schedule:
    """Jobs at these starts, on the first GPUs that fit."""
    layout = Layout(found)
    made = Schedule(layout, build_tasks(layout), held)
    for task in made.tasks:
        if task.job.id in starts:
            option, start = task.options[0], starts[task.job.id]
            made.packing.put(task, option, start, option.shape << (start * layout.gpus))
    return made


def starts_of(made: Schedule) -> dict[str, int]:
    def start(task: Task) -> int:
        return made.packing.start[task.index]

    return {task.job.id: start(task) for task in made.tasks if made.packing.cells[task.index]}


def test_a_job_that_takes_a_services_gpus_takes_them_as_soon_as_it_may() -> None:
    chat = {"service": "chat", "demand": [2] * 12, "ramp": 2, "priority": 1, "current": [0, 1]}
    found = problem(5, 12, realtime=[chat], jobs=[{"id": "wide", "gpus": 5, "slots": 3, "priority": 9}])
    layout = Layout(found)
    block = layout.cells(range(5), 8, 11)
    late = schedule(found, [hold(layout, layout.free & ~block, found.services[0], 0)], {"wide": 8})
    early = sooner(late)
    assert starts_of(early) == {"wide": 0}
    assert early.objective == late.objective
    assert check(found, finish(early, "fast")) == []


@pytest.mark.parametrize("mode", ["fast", "full"])
def test_a_plan_made_anew_every_hour_does_not_put_it_off_for_ever(mode: str) -> None:
    chat = {"service": "chat", "demand": [2] * 12, "ramp": 2, "priority": 1, "current": [0, 1]}
    jobs = [{"id": "wide", "gpus": 5, "slots": 3, "priority": 9}]
    jobs += [{"id": f"small{n}", "gpus": 1, "slots": 4, "priority": 1} for n in range(3)]
    found = problem(5, 12, realtime=[chat], jobs=jobs, open_end=True)
    plan = solve(found, mode, time_limit=2 if mode == "full" else None)
    assert [p.start for p in plan.placements if p.job == "wide"] == [0]
    assert check(found, plan) == [] and slack(found, plan).postponed == 0


def test_it_waits_where_its_ramp_lets_a_service_leave_only_slowly() -> None:
    chat = {"service": "chat", "demand": [3] * 12, "ramp": 1, "priority": 1, "current": [0, 1, 2]}
    found = problem(5, 12, realtime=[chat], jobs=[{"id": "wide", "gpus": 5, "slots": 3, "priority": 9}])
    plan = solve(found)
    assert [p.start for p in plan.placements] == [2]
    assert [len(gpus) for gpus in plan.realtime[0].gpus] == [2, 1, 0, 0, 0, 1, 2, 3, 3, 3, 3, 3]


def test_a_service_in_the_middle_makes_room_when_it_lacks_nothing_for_it() -> None:
    chat = {"service": "chat", "demand": [1, 1, 1, 1, 0, 0], "ramp": 1}
    found = problem(3, 6, realtime=[chat], jobs=[{"id": "a", "gpus": 2, "slots": 2}])
    layout = Layout(found)
    service = found.services[0]
    chooser = partial(choose_counts, service, 0)
    held = hold_counts(layout, layout.free, service, chooser, prefer=[0b010])
    assert held.rows[0] == 0b010
    early = sooner(schedule(found, [held], {"a": 4}))
    assert starts_of(early) == {"a": 0} and early.held[0].counts == held.counts


def test_of_two_that_could_change_places_the_more_valuable_is_first() -> None:
    jobs = [{"id": "low", "gpus": 4, "slots": 2, "priority": 1}]
    jobs += [{"id": "high", "gpus": 4, "slots": 2, "priority": 5}]
    found = problem(4, 4, jobs=jobs)
    assert starts_of(sooner(schedule(found, [], {"low": 0, "high": 2}))) == {"high": 0, "low": 2}


def test_nothing_is_moved_that_loses_worth() -> None:
    jobs = [{"id": "urgent", "gpus": 4, "slots": 2, "priority": 1, "deadline": 2}]
    jobs += [{"id": "high", "gpus": 4, "slots": 2, "priority": 5}]
    found = problem(4, 4, jobs=jobs)
    kept = schedule(found, [], {"urgent": 0, "high": 2})
    assert starts_of(sooner(kept)) == {"urgent": 0, "high": 2}


def test_a_start_that_was_told_is_not_lost_by_moving_past_it() -> None:
    chat = {"service": "chat", "demand": [1] * 8, "ramp": 1, "priority": 1, "current": [3]}
    told = {"id": "a", "gpus": 3, "slots": 2, "priority": 2, "announced": {"start": 5}}
    found = problem(4, 8, realtime=[chat], jobs=[told], move_cost=3)
    layout = Layout(found)
    late = schedule(found, [hold(layout, layout.free, found.services[0], 0)], {"a": 5})
    early = sooner(late)
    assert starts_of(early) == {"a": 0} and early.objective == late.objective
