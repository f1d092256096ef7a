"""Full mode: never worse than what came in, within the rules, and proven on the seven scenarios."""

from dataclasses import replace

import pytest

from allocator import Placement, Plan, Problem, ServicePlan, full, load_problem, solve
from allocator.check import check, score, slack
from allocator.full import solve_full
from allocator.generate import FEATURES, generate
from tests.allocator.scenarios import BEST, SCENARIOS
from tests.allocator.test_bound import job, problem_of


def nothing_new(problem: Problem) -> Plan:
    """The plan that starts no job and holds nothing, where no service has to hold anything."""
    running = tuple(
        Placement(j.id, j.running.start, problem.running_slots(j), tuple(sorted(j.running.gpus)))
        for j in problem.jobs
        if j.running is not None
    )
    rows = tuple(
        ServicePlan(
            s.service, ((),) * problem.slots, tuple(s.shortage(slot, 0) for slot in range(problem.slots))
        )
        for s in problem.services
    )
    draft = Plan("none", 0, 0, None, 0, 0, running, rows)
    figures = score(problem, draft)
    return replace(draft, objective=figures.objective, value=figures.value, utilization=figures.utilization)


@pytest.mark.parametrize("name", BEST)
def test_the_optimum_of_the_seven_scenarios_is_found_and_proven(name: str) -> None:
    problem = load_problem(SCENARIOS / f"{name}.yaml")
    plan = solve(problem, "full", time_limit=60)
    assert (plan.objective, plan.bound) == (BEST[name], BEST[name])
    assert check(problem, plan) == []


def test_it_begins_from_any_plan_that_keeps_the_rules() -> None:
    problem = load_problem(SCENARIOS / "fragmentation.yaml")
    assert solve_full(problem, nothing_new(problem), 60, 0).objective == BEST["fragmentation"]


def test_no_jobs_and_no_services_are_a_plan() -> None:
    plan = solve(problem_of(jobs=[]), "full", time_limit=5)
    assert (plan.objective, plan.bound, plan.placements) == (0, 0, ())


def test_without_time_the_plan_that_came_in_stands() -> None:
    problem = generate(4)
    fast = solve(problem)
    assert solve_full(problem, fast, 0, 0).objective >= fast.objective


def test_the_same_seed_and_iterations_give_the_same_plan() -> None:
    problem = generate(6, gpus=16, jobs=14)
    one, other = (solve(problem, "full", iterations=6, seed=3) for _ in range(2))
    assert (one.placements, one.realtime, one.bound) == (other.placements, other.realtime, other.bound)
    assert check(problem, one) == [] and one.objective >= solve(problem).objective


def test_a_solver_that_finds_only_forbidden_plans_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Plan:
        raise RuntimeError("full made a plan that breaks a rule")

    problem = generate(4)
    fast = solve(problem)
    monkeypatch.setattr(full, "polished", broken)
    plan = solve_full(problem, fast, 2, 0)
    assert plan.placements == fast.placements
    assert plan.bound is not None and plan.bound >= plan.objective


def test_one_worker_is_enough() -> None:
    problem = load_problem(SCENARIOS / "scale.yaml")
    assert solve_full(problem, solve(problem), 60, 0, workers=1).objective == BEST["scale"]


def test_the_most_valuable_of_like_jobs_run_and_start_first() -> None:
    jobs = [job("a", 4, 2, 1), job("b", 4, 2, 3), job("c", 4, 2, 2)]
    problem = problem_of(jobs=jobs)
    starts = {p.job: p.start for p in solve(problem, "full", time_limit=10).placements}
    assert starts == {"b": 0, "c": 2}


def test_valuable_work_starts_earlier_among_equal_plans() -> None:
    problem = problem_of(jobs=[job("low", 4, 2, 1), job("high", 4, 2, 9)])
    starts = {p.job: p.start for p in solve(problem, "full", time_limit=10).placements}
    assert starts == {"high": 0, "low": 2}


def test_a_narrow_burst_is_not_followed_where_the_work_is_worth_more() -> None:
    service = {"service": "s", "ramp": 4, "demand": [0, 0, 1, 0], "priority": 1, "shortage_penalty": 5}
    problem = problem_of(jobs=[job("wide", 4, 4, 5)], realtime=[service])
    plan = solve(problem, "full", time_limit=10)
    assert (plan.objective, plan.realtime[0].shortage) == (75, (0, 0, 1, 0))


def test_an_elastic_job_takes_the_width_that_lets_others_in() -> None:
    elastic = {"id": "e", "choices": [{"gpus": 4, "slots": 2}, {"gpus": 2, "slots": 4}], "priority": 1}
    problem = problem_of(jobs=[elastic, job("long", 2, 4, 1)])
    assert solve(problem, "full", time_limit=10).objective == 16


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_gives_a_plan_that_keeps_the_rules(feature: str) -> None:
    problem = generate(11, gpus=16, jobs=16, features=(feature,))
    fast, plan = solve(problem), solve(problem, "full", time_limit=3)
    assert check(problem, plan) == []
    assert plan.objective >= fast.objective
    found = slack(problem, plan)
    assert (found.postponed, found.held_idle) == (0, 0)


@pytest.mark.long
def test_two_runs_that_end_by_themselves_give_the_same_objective() -> None:
    problem = generate(0)
    one, other = (solve(problem, "full", time_limit=120, seed=7) for _ in range(2))
    assert (one.objective, one.gap_percent) == (other.objective, other.gap_percent) == (one.objective, 0)


@pytest.mark.long
def test_a_large_cluster_is_within_a_few_percent_of_the_bound_in_a_minute() -> None:
    problem = generate(0, gpus=1024, jobs=1000, family="deadlines", node_gpus=8, load=1.6, features=())
    plan = solve(problem, "full", time_limit=60)
    assert check(problem, plan) == []
    assert plan.gap_percent is not None and plan.gap_percent <= 3
