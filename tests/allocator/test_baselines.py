"""The baselines are what the design says, to the last unit of worth."""

from typing import Any

import pytest

from allocator import Plan, Problem, load_problem, solve
from tests.allocator.scenarios import SCENARIOS

# Worked out by hand-checked independent code; fifo's are published with the scenarios.
FIGURES = {
    "contention": (477, 967, 967),
    "deadlines": (492, 647, 647),
    "fragmentation": (878, 1326, 1326),
    "light_load": (100, 100, 100),
    "realtime_burst": (571, 960, 1286),
    "realtime_peak": (386, 618, 1124),
    "scale": (1608, 1476, 1476),
}


@pytest.mark.parametrize("name", FIGURES)
def test_baselines_reach_their_known_objectives(name: str) -> None:
    problem = load_problem(SCENARIOS / f"{name}.yaml")
    found = tuple(solve(problem, mode).objective for mode in ("fifo", "backfill", "greedy"))
    assert found == FIGURES[name]


def problem(**fields: Any) -> Problem:
    return Problem.from_dict({"slots": 6, "nodes": [{"name": "n0", "gpus": 4}], **fields})


def job(name: str, gpus: int, slots: int, **fields: Any) -> dict[str, Any]:
    return {"id": name, "gpus": gpus, "slots": slots, "priority": 1, **fields}


def starts(plan: Plan) -> dict[str, int]:
    return {placement.job: placement.start for placement in plan.placements}


def test_fifo_starts_no_job_before_one_that_came_earlier() -> None:
    queue = [job("a", 4, 1), job("b", 2, 3, release=2), job("c", 1, 1)]
    assert starts(solve(problem(jobs=queue), "fifo")) == {"a": 0, "b": 2, "c": 2}


def test_fifo_passes_over_a_job_that_can_no_longer_be_placed() -> None:
    queue = [job("a", 4, 3), job("b", 4, 1, deadline=2), job("c", 1, 1)]
    assert starts(solve(problem(jobs=queue), "fifo")) == {"a": 0, "c": 3}


def test_fifo_takes_the_lowest_block_that_fits() -> None:
    plan = solve(problem(jobs=[job("a", 1, 1), job("b", 2, 1)]), "fifo")
    assert [placement.gpus for placement in plan.placements] == [(0,), (1, 2)]


def test_backfill_lets_a_lower_job_ahead_where_it_delays_no_higher_one() -> None:
    queue = [job("low", 2, 2), job("long", 2, 6), job("top", 2, 3, priority=5), job("wide", 4, 2, priority=4)]
    plan = solve(problem(jobs=queue), "backfill")
    assert starts(plan) == {"top": 0, "low": 0, "wide": 3}


def service(**fields: Any) -> dict[str, Any]:
    return {"service": "chat", "demand": [0, 0, 0, 3, 0, 0], "ramp": 2, "priority": 9, **fields}


LEVELS: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "fifo holds the peak in every slot": ("fifo", {}, [3, 3, 3, 3, 3, 3]),
    "backfill holds it too": ("backfill", {}, [3, 3, 3, 3, 3, 3]),
    "from what it has it climbs at the ramp": ("fifo", {"current": []}, [2, 3, 3, 3, 3, 3]),
    "greedy holds the envelope of the demand": ("greedy", {}, [0, 0, 1, 3, 1, 0]),
}


@pytest.mark.parametrize(("mode", "fields", "counts"), LEVELS.values(), ids=LEVELS.keys())
def test_what_the_services_of_a_baseline_hold(mode: str, fields: dict[str, Any], counts: list[int]) -> None:
    plan = solve(problem(realtime=[service(**fields)]), mode)
    assert [len(gpus) for gpus in plan.realtime[0].gpus] == counts


def test_services_of_a_baseline_hold_the_highest_numbered_gpus() -> None:
    assert solve(problem(realtime=[service()]), "greedy").realtime[0].gpus[3] == (1, 2, 3)
