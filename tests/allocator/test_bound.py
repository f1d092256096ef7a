"""The upper bound: never below a plan, and close to the best where running jobs and holes cut nodes up."""

import pytest

from allocator import Problem, load_problem, solve
from allocator.bound import fluid_bound, linear_bound, rounded_down, upper_bound
from allocator.generate import generate
from allocator.relaxation import Relaxation
from allocator.roundings import roundings
from allocator.state import state_of
from tests.allocator.scenarios import BEST, SCENARIOS


def problem_of(**data: object) -> Problem:
    return Problem.from_dict({"slots": 4, "nodes": [{"name": "n", "gpus": 4}], **data})


def job(name: str, gpus: int, slots: int, priority: int = 1, **more: object) -> dict[str, object]:
    return {"id": name, "gpus": gpus, "slots": slots, "priority": priority, **more}


@pytest.mark.parametrize("name", BEST)
def test_the_linear_program_is_within_a_percent_on_the_seven_scenarios(name: str) -> None:
    relaxation = Relaxation(load_problem(SCENARIOS / f"{name}.yaml"))
    bound = rounded_down(relaxation, linear_bound(relaxation, 20).value)
    assert BEST[name] <= bound <= 1.01 * BEST[name]


def test_without_jobs_and_services_the_bound_is_nothing() -> None:
    assert upper_bound(problem_of(jobs=[]), 1) == 0


def test_a_demand_beyond_the_cluster_costs_in_the_bound() -> None:
    service = {"service": "s", "ramp": 9, "demand": [6, 0, 0, 0], "priority": 2, "shortage_penalty": 5}
    assert upper_bound(problem_of(jobs=[], realtime=[service]), 5) == -20


def test_a_job_for_which_no_run_of_gpus_is_wide_enough_counts_nothing() -> None:
    hole = {"gpus": [1], "from": 0, "to": 4}
    assert upper_bound(problem_of(jobs=[job("a", 3, 2)], unavailable=[hole]), 5) == 0


def test_two_runs_do_not_make_one_block() -> None:
    hole = {"gpus": [1], "from": 0, "to": 4}  # runs of 1 and 2: one job of two GPUs at a time
    jobs = [job("a", 2, 4), job("b", 2, 4)]
    assert upper_bound(problem_of(jobs=jobs, unavailable=[hole]), 5) == 8


def test_gpus_free_now_and_others_free_later_do_not_make_a_long_block() -> None:
    holes = [{"gpus": [0, 1], "from": 0, "to": 2}, {"gpus": [2, 3], "from": 2, "to": 4}]
    assert upper_bound(problem_of(jobs=[job("a", 1, 3)], unavailable=holes), 5) == 0


def test_a_replica_on_the_last_node_keeps_a_gang_out() -> None:
    nodes = [{"name": f"n{k}", "gpus": 2, "domain": "r"} for k in range(2)]
    service = {"service": "s", "ramp": 1, "demand": [1] * 4, "priority": 9, "shortage_penalty": 10}
    problem = problem_of(nodes=nodes, jobs=[job("a", 4, 1, 5)], realtime=[service])
    assert upper_bound(problem, 5) == 0


def test_a_time_limit_of_nothing_still_gives_a_bound() -> None:
    problem = generate(3)
    assert upper_bound(problem, 0) >= solve(problem).objective


def test_values_that_are_not_whole_are_not_rounded_down() -> None:
    problem = problem_of(jobs=[job("a", 1, 1, value=1 / 3), job("b", 1, 1, value=2 / 7)])
    assert upper_bound(problem, 5) == pytest.approx(1 / 3 + 2 / 7, abs=1e-5)


@pytest.mark.parametrize("widths", [(1, 2, 3), (2, 4, 8), (1, 5, 33)])
def test_what_fits_in_a_run_never_weighs_more_than_the_run(widths: tuple[int, ...]) -> None:
    runs = (3, 5, 8, 40)
    for rounding in roundings(widths, runs):
        for first in range(1, 20):
            for second in range(1, 20):
                assert rounding(first) + rounding(second) <= rounding(first + second)


@pytest.mark.parametrize("seed", range(40))
def test_every_row_holds_for_a_plan_of_fast_mode(seed: int) -> None:
    problem = generate(seed, gpus=24, jobs=25)
    for compact in (False, True):
        relaxation = Relaxation(problem, compact)
        values = state_of(relaxation, solve(problem)).values(relaxation)
        rows = [*relaxation.rows, *relaxation.block_rows()]
        if not compact:
            rows += linear_bound(relaxation, 5).rows
        for row in rows:
            pairs = zip(row.variables.tolist(), row.weights.tolist(), strict=True)
            assert sum(weight * values.get(variable, 0) for variable, weight in pairs) <= row.limit


@pytest.mark.parametrize("seed", range(20))
def test_the_values_of_a_plan_are_worth_its_objective_at_least(seed: int) -> None:
    # More when a job of less worth was placed instead of its like: the relaxation takes the better one.
    problem = generate(seed, gpus=24, jobs=25)
    relaxation, plan = Relaxation(problem), solve(problem)
    values = state_of(relaxation, plan).values(relaxation)
    worth = relaxation.constant + sum(float(relaxation.objective[at]) * v for at, v in values.items())
    assert worth >= plan.objective - 1e-6


@pytest.mark.long
def test_with_running_jobs_and_holes_the_bound_is_within_five_percent_on_average() -> None:
    ratios = []
    for seed in range(50):
        problem = generate(seed, gpus=32, jobs=24, features=("running", "holes"))
        plan = solve(problem, "full", time_limit=10)
        bound = upper_bound(problem, 10)
        assert bound >= plan.objective - 1e-6
        ratios.append(bound / plan.objective)
    assert sum(ratios) / len(ratios) <= 1.05


def test_without_time_for_a_linear_program_free_cells_still_limit_what_can_be_earned() -> None:
    jobs = [job("dear", 4, 2, priority=3), job("cheap", 4, 4, priority=1)]
    service = {"service": "s", "ramp": 9, "demand": [1, 1, 1, 1], "priority": 2, "shortage_penalty": 5}
    # 16 cells: 4 meet the demand, 8 earn 3 each, and what is left earns 1 each.
    relaxation = Relaxation(problem_of(jobs=jobs, realtime=[service]))
    assert linear_bound(relaxation, 0).value == pytest.approx(8 * 3 + 4 * 1)


@pytest.mark.parametrize("seed", range(30))
def test_what_could_be_poured_is_never_below_a_plan(seed: int) -> None:
    problem = generate(seed)
    assert fluid_bound(Relaxation(problem)) >= solve(problem).objective
