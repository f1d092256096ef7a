"""Services leave GPUs, or take others, for a job that is worth more than what they lack meanwhile."""

from typing import Any

import pytest

from allocator import Problem, solve
from allocator.check import check, slack
from allocator.give_way import cheapest_block, given_way, lacks, over
from allocator.grid import Layout, build_tasks
from allocator.packing import places
from allocator.realtime import hold, hold_same
from allocator.schedule import Schedule


def problem(nodes: int = 2, gpus: int = 4, slots: int = 12, **fields: Any) -> Problem:
    listed = [{"name": f"n{k}", "gpus": gpus, "domain": "rack"} for k in range(nodes)]
    return Problem.from_dict({"slots": slots, "nodes": listed, **fields})


def chat(current: list[int], slots: int = 12, **fields: Any) -> dict[str, Any]:
    demand = [len(current)] * slots
    return {"service": "chat", "demand": demand, "ramp": 2, "priority": 1, "current": current, **fields}


def wide(gpus: int, priority: float = 5, **fields: Any) -> dict[str, Any]:
    return {"id": "wide", "gpus": gpus, "slots": 6, "priority": priority, **fields}


def solved(found: Problem, mode: str) -> tuple[dict[str, tuple[int, tuple[int, ...]]], list[int], float]:
    """Starts and GPUs of jobs, what the service holds in each slot, and the objective; all rules kept."""
    plan = solve(found, mode, time_limit=1 if mode == "full" else None)
    assert check(found, plan) == []
    idle = slack(found, plan)
    assert (idle.postponed, idle.held_idle) == (0, 0)
    places_taken = {p.job: (p.start, p.gpus) for p in plan.placements}
    return places_taken, [len(gpus) for gpus in plan.realtime[0].gpus], plan.objective


@pytest.mark.parametrize("mode", ["fast", "full"])
def test_a_service_on_two_nodes_moves_to_one_for_a_job_that_needs_a_node(mode: str) -> None:
    found = problem(realtime=[chat([3, 4, 5, 6])], jobs=[wide(4)])
    jobs, held, objective = solved(found, mode)
    # It leaves GPU 3 in slot 0 and takes another in slot 1.
    assert (jobs, held, objective) == ({"wide": (0, (0, 1, 2, 3))}, [3, *[4] * 11], 120 - 5)


@pytest.mark.parametrize("mode", ["fast", "full"])
def test_a_service_on_three_nodes_moves_for_a_gang(mode: str) -> None:
    found = problem(nodes=3, realtime=[chat([3, 4, 5, 6])], jobs=[wide(8)])
    jobs, held, objective = solved(found, mode)
    assert (jobs["wide"][0], held, objective) == (0, [3, *[4] * 11], 240 - 5)


@pytest.mark.parametrize("mode", ["fast", "full"])
def test_a_job_that_is_worth_less_than_the_move_leaves_a_service_where_it_is(mode: str) -> None:
    found = problem(realtime=[chat([3, 4, 5, 6])], jobs=[wide(4, 0.2)])  # worth 4.8; the move costs 5
    assert solved(found, mode) == ({}, [4] * 12, 0)


def test_a_service_moves_no_faster_than_its_ramp() -> None:
    service = chat([1, 2, 3, 4], ramp=1)
    jobs, held, objective = solved(problem(realtime=[service], jobs=[wide(4)]), "fast")
    # The least to leave is one GPU of the second node.
    assert (jobs["wide"], held[:3], objective) == ((0, (4, 5, 6, 7)), [3, 4, 4], 120 - 5)
    three = chat([1, 2, 3, 4, 5, 6], ramp=1)
    jobs, held, _ = solved(problem(nodes=3, realtime=[three], jobs=[wide(8)]), "fast")
    assert jobs["wide"][0] == 2 and held[:3] == [5, 4, 3]


def test_a_move_is_found_in_a_large_cluster_too() -> None:
    service = chat([0, 8, 16, 24], slots=144)
    small = [{"id": f"s{n}", "gpus": 1, "slots": 3, "priority": 1} for n in range(40)]
    found = problem(16, 8, 144, realtime=[service], jobs=[wide(15 * 8), *small])
    jobs, held, objective = solved(found, "fast")
    assert jobs["wide"][0] == 1 and held[:2] == [3, 1] and held[4:] == [4] * 140
    assert objective == 120 * 6 * 5 + 40 * 3 - 5 * sum(4 - count for count in held)


def test_without_a_service_in_the_way_nothing_is_lacked() -> None:
    layout = Layout(problem(realtime=[chat([4, 5])]))
    held = hold(layout, layout.free, layout.problem.services[0], 0)
    assert lacks(layout, [held], [6] * 12, 6) == [0.0] * 12


def test_the_cheapest_service_yields_first_and_none_more_than_its_ramp_allows() -> None:
    dear = chat([6, 7], service="dear", priority=3, ramp=1)
    found = problem(realtime=[dear, chat([4, 5], ramp=1)])
    layout = Layout(found)
    held = [
        hold(layout, layout.free & layout.cells(service.current, 0, 12), service, 0)  # type: ignore[arg-type]
        for service in found.services
    ]
    assert lacks(layout, held, [4] * 12, 5)[0] == 5
    assert lacks(layout, held, [4] * 12, 6)[:2] == [5 + 15, 10]
    assert lacks(layout, held, [4] * 12, 7)[:2] == [float("inf"), 10 + 15]
    assert over([1.0, 2.0, float("inf"), 4.0], 2) == [3.0, float("inf"), float("inf"), 4.0]


def test_of_many_places_the_one_with_least_in_it_is_taken() -> None:
    small = [{"id": f"s{n}", "gpus": 1, "slots": 6, "priority": 9 if n != 70 else 1} for n in range(80)]
    found = problem(10, 8, 6, jobs=[*small, {"id": "a", "gpus": 1, "slots": 6, "priority": 5}])
    layout = Layout(found)
    made = Schedule(layout, build_tasks(layout), [])
    for number, task in enumerate(made.tasks[:80]):
        made.packing.put(task, task.options[0], 0, task.options[0].shape << number)
    option = made.tasks[80].options[0]
    block = cheapest_block(made, option, 0, places(option, layout.free) & layout.row)
    assert block == option.shape << 70
    swapped = given_way(made, made.tasks[80], option, 0, block)
    assert swapped is not None and swapped.packing.gain == made.packing.gain + 4 * 6


def test_a_service_holds_as_many_elsewhere_or_is_left_alone() -> None:
    layout = Layout(problem(realtime=[chat([0, 1])]))
    held = hold(layout, layout.free, layout.problem.services[0], 0)
    assert (
        hold_same(layout, layout.free & ~layout.cells([0], 4, 12), held) is None
    )  # two are needed throughout
    free_choice = Layout(problem(realtime=[{**chat([0, 1]), "current": None}]))
    held = hold(free_choice, free_choice.free, free_choice.problem.services[0], 0)
    moved = hold_same(free_choice, free_choice.free & ~held.cells, held)
    assert moved is not None and moved.counts == held.counts and not moved.cells & held.cells
