"""Full mode and the bound against everything that could be tried, on tiny problems with every feature."""

from functools import cache

import pytest

from allocator import Plan, Problem, solve
from allocator.bound import upper_bound
from allocator.check import check, slack
from tests.allocator.brute_force import best_objective, tiny_problem

SEEDS = range(60)


@cache
def optimum(seed: int) -> float:
    return best_objective(tiny_problem(seed))


@cache
def full_plan(seed: int) -> Plan:
    return solve(tiny_problem(seed), "full", time_limit=20)


def problem_of(**data: object) -> Problem:
    return Problem.from_dict({"slots": 3, "nodes": [{"name": "n", "gpus": 2}], **data})


def test_trying_everything_finds_that_two_jobs_fit_side_by_side() -> None:
    jobs = [
        {"id": "a", "gpus": 1, "slots": 3, "priority": 2},
        {"id": "b", "gpus": 1, "slots": 2, "priority": 5},
    ]
    assert best_objective(problem_of(jobs=jobs)) == 16


def test_trying_everything_counts_a_shortage() -> None:
    service = {"service": "s", "ramp": 2, "demand": [3, 0, 0], "priority": 1, "shortage_penalty": 4}
    assert best_objective(problem_of(jobs=[], realtime=[service])) == -4


def test_trying_everything_keeps_a_service_on_its_gpus() -> None:
    service = {"service": "s", "ramp": 1, "demand": [1, 1, 1], "shortage_penalty": 9, "current": [0]}
    hole = {"gpus": [1], "from": 0, "to": 3}
    job = {"id": "a", "gpus": 1, "slots": 1, "priority": 5}
    assert best_objective(problem_of(jobs=[job], realtime=[service], unavailable=[hole])) == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_full_mode_finds_the_best_plan_of_a_tiny_problem(seed: int) -> None:
    plan = full_plan(seed)
    assert check(tiny_problem(seed), plan) == []
    assert plan.objective == pytest.approx(optimum(seed), abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_bound_is_never_below_the_best_plan(seed: int) -> None:
    assert upper_bound(tiny_problem(seed), 5) >= optimum(seed) - 1e-6


@pytest.mark.parametrize("seed", SEEDS)
def test_full_mode_proves_what_it_finds_on_tiny_problems(seed: int) -> None:
    assert full_plan(seed).gap_percent == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_in_a_full_plan_could_start_earlier_or_be_given_back(seed: int) -> None:
    found = slack(tiny_problem(seed), full_plan(seed))
    assert (found.postponed, found.held_idle) == (0, 0)
