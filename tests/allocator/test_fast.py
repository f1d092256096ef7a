"""Fast mode: near the best on the scenarios, tidy, repeatable, and at ease with what goes wrong every day."""

from dataclasses import replace
from typing import Any

import pytest

from allocator import Problem, baselines, load_problem, solve
from allocator.check import check, slack
from allocator.generate import generate
from allocator.grid import Layout, build_tasks
from allocator.orders import ceiling
from allocator.schedule import least_per_gpu, serve, swing
from allocator.stands import stands
from tests.allocator.scenarios import BEST, SCENARIOS


@pytest.mark.parametrize("name", BEST)
def test_fast_reaches_99_percent_of_the_best_plan(name: str) -> None:
    plan = solve(load_problem(SCENARIOS / f"{name}.yaml"))
    assert 0.99 * BEST[name] <= plan.objective <= BEST[name]


@pytest.mark.parametrize("name", BEST)
def test_no_job_could_start_earlier_and_no_service_holds_more_than_it_needs(name: str) -> None:
    problem = load_problem(SCENARIOS / f"{name}.yaml")
    found = slack(problem, solve(problem))
    assert (found.postponed, found.held_idle) == (0, 0)


def problem(**fields: Any) -> Problem:
    return Problem.from_dict({"slots": 6, "nodes": [{"name": "n0", "gpus": 4}], **fields})


def job(name: str = "a", gpus: int = 2, slots: int = 2, **fields: Any) -> dict[str, Any]:
    return {"id": name, "gpus": gpus, "slots": slots, "priority": 1, **fields}


def running(name: str, start: int, gpus: list[int], slots: int, **fields: Any) -> dict[str, Any]:
    return job(name, len(gpus), slots, running={"start": start, "gpus": gpus}, **fields)


def starts(found: Problem, **options: Any) -> dict[str, int]:
    plan = solve(found, **options)
    assert check(found, plan) == []
    return {placement.job: placement.start for placement in plan.placements}


def test_the_same_seed_and_iterations_give_the_same_plan() -> None:
    found = generate(11)
    first, second = (replace(solve(found, seed=3, iterations=40), solve_ms=0) for _ in range(2))
    assert first == second


def test_more_iterations_never_make_a_plan_worse() -> None:
    found = generate(6, features=())
    objectives = [solve(found, iterations=steps).objective for steps in (0, 20, 80)]
    assert objectives == sorted(objectives)


def test_time_is_only_a_cap() -> None:
    found = generate(6)
    assert check(found, solve(found, time_limit=0.0)) == []


def test_an_unknown_mode_is_told() -> None:
    with pytest.raises(ValueError, match="mode: 'fats'; expected one of fast, full, fifo, backfill, greedy"):
        solve(problem(), "fats")


def test_nothing_to_do_is_a_plan() -> None:
    plan = solve(problem())
    assert (plan.objective, plan.placements, plan.realtime) == (0, (), ())


def test_a_full_cluster_starts_nothing_until_it_is_free() -> None:
    found = problem(jobs=[running("r", -1, [0, 1, 2, 3], 4), job()])
    assert starts(found) == {"r": -1, "a": 3}


def test_a_wide_job_is_not_kept_out_by_small_ones_of_less_worth() -> None:
    jobs = [job("wide", 4, 6, priority=2), *[job(f"s{k}", 1, 6, priority=3) for k in range(2)]]
    assert starts(problem(jobs=jobs)) == {"wide": 0}


def test_a_late_deadline_gives_way_to_an_early_one() -> None:
    jobs = [job("late", 4, 3, deadline=6, priority=2), job("early", 4, 3, deadline=3)]
    assert starts(problem(jobs=jobs)) == {"early": 0, "late": 3}


def test_of_equal_plans_the_one_with_valuable_work_first() -> None:
    jobs = [job("low", 4, 3, priority=1), job("high", 4, 3, priority=5)]
    assert starts(problem(jobs=jobs)) == {"high": 0, "low": 3}


def test_a_job_runs_in_the_choice_that_fits() -> None:
    elastic = {"id": "a", "choices": [{"gpus": 4, "slots": 2}, {"gpus": 2, "slots": 5}], "priority": 1}
    plan = solve(problem(jobs=[elastic, running("r", -1, [0, 1], 9)], open_end=False))
    assert {(p.job, p.slots, p.gpus) for p in plan.placements if p.job == "a"} == {("a", 5, (2, 3))}


def test_a_job_takes_the_time_of_the_type_it_lands_on() -> None:
    nodes = [{"name": "n0", "gpus": 2, "gpu": "A100"}, {"name": "n1", "gpus": 2, "gpu": "H100"}]
    typed = {
        "id": "a",
        "gpus": 2,
        "slots": {"H100": 2, "A100": 4},
        "gpu_types": ["H100", "A100"],
        "priority": 1,
    }
    plan = solve(problem(nodes=nodes, jobs=[typed, {**typed, "id": "b"}]))
    assert {(p.slots, p.gpus) for p in plan.placements} in (
        {(2, (2, 3)), (4, (0, 1))},
        {(2, (2, 3))} | {(2, (2, 3))},
    )
    assert plan.value == 8


def test_a_gang_takes_whole_nodes_of_one_domain_together() -> None:
    nodes = [{"name": f"n{k}", "gpus": 2, "domain": f"rack{k % 2}"} for k in range(4)]
    plan = solve(problem(nodes=nodes, jobs=[job("gang", 4, 3)]))
    assert plan.placements[0].gpus in [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_a_width_that_no_number_of_nodes_gives_is_left_out_with_a_reason() -> None:
    nodes = [{"name": f"n{k}", "gpus": 2} for k in range(3)]
    plan = solve(problem(nodes=nodes, jobs=[job("odd", 3, 1)]))
    assert [entry.job for entry in plan.unplaced] == ["odd"]


def test_with_an_open_end_a_job_may_run_past_the_horizon() -> None:
    found = problem(jobs=[job("a", 4, 9)], open_end=True)
    plan = solve(found)
    assert plan.value == pytest.approx(36 * 6 / 9)


def test_a_hole_beyond_the_horizon_still_binds() -> None:
    hole = {"gpus": [0], "from": 7, "to": 8}
    plan = solve(problem(jobs=[job("a", 2, 9)], open_end=True, unavailable=[hole]))
    assert 0 not in plan.placements[0].gpus


def test_a_job_goes_around_maintenance() -> None:
    hole = {"gpus": [0, 1, 2, 3], "from": 1, "to": 3}
    assert starts(problem(jobs=[job("a", 4, 2)], unavailable=[hole])) == {"a": 3}


def test_a_long_job_of_a_tenant_stays_within_its_guarantee() -> None:
    tenants = {"x": {"gpus": 2, "borrow_slots": 1}}
    jobs = [job("a", 2, 3, tenant="x"), job("b", 2, 3, tenant="x")]
    assert sorted(starts(problem(jobs=jobs, tenants=tenants)).values()) == [0, 3]


def test_a_short_job_of_a_tenant_borrows_what_is_idle() -> None:
    tenants = {"x": {"gpus": 0, "borrow_slots": 2}, "y": {"gpus": 4, "borrow_slots": 0}}
    jobs = [job("short", 2, 2, tenant="x"), job("long", 2, 3, tenant="x")]
    assert starts(problem(jobs=jobs, tenants=tenants)) == {"short": 0}


def test_a_reservation_is_kept_for_its_tenant() -> None:
    reservation = {"gpus": 3, "from": 0, "to": 4, "tenant": "eval"}
    jobs = [job("other", 2, 2, priority=9), job("own", 2, 2, tenant="eval")]
    assert starts(problem(jobs=jobs, reservations=[reservation])) == {"own": 0, "other": 4}


def test_ageing_lets_a_job_that_waited_long_go_first() -> None:
    jobs = [job("new", 4, 4, priority=2), job("old", 4, 4, priority=1, waited=30)]
    assert starts(problem(jobs=jobs)) == {"new": 0}
    assert starts(problem(jobs=jobs, ageing_per_slot=0.1)) == {"old": 0}


def test_an_announced_start_is_kept_unless_moving_it_gains_more() -> None:
    jobs = [job("told", 4, 3, announced={"start": 0}), job("new", 4, 3)]
    assert starts(problem(jobs=jobs, move_cost=5)) == {"told": 0, "new": 3}
    rush = [jobs[0], job("new", 4, 3, deadline=3)]
    assert starts(problem(jobs=rush, move_cost=5)) == {"new": 0, "told": 3}


def test_idle_gpus_go_to_a_service_that_would_lack_them() -> None:
    chat = {"service": "chat", "demand": [4] * 6, "ramp": 4, "priority": 1, "shortage_penalty": 1}
    plan = solve(problem(realtime=[chat], jobs=[job("a", 2, 2, priority=9)]))
    assert [len(gpus) for gpus in plan.realtime[0].gpus] == [2, 2, 4, 4, 4, 4]


def test_a_narrow_burst_is_not_followed_when_work_in_its_way_is_worth_more() -> None:
    chat = {"service": "chat", "demand": [0, 0, 0, 1, 0, 0], "ramp": 1, "priority": 1, "shortage_penalty": 5}
    plan = solve(problem(realtime=[chat], jobs=[job("a", 4, 6, priority=2)]), iterations=50)
    assert (plan.objective, plan.realtime[0].shortage) == (48 - 5, (0, 0, 0, 1, 0, 0))


def test_keeping_services_off_blocks_of_gpus_finds_room_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [generate(seed) for seed in (61, 70, 85)]
    tried = [solve(one, iterations=0).objective for one in found]
    monkeypatch.setattr("allocator.fast.stands", lambda *_: ())
    monkeypatch.setattr("allocator.fast.ways", lambda *_: ())
    plain = [solve(one, iterations=0).objective for one in found]
    assert all(more > less + 1 for more, less in zip(tried, plain, strict=True))


def test_a_stand_leaves_a_service_what_it_holds_now() -> None:
    chat = {"service": "chat", "demand": [1] * 6, "ramp": 1, "current": [3]}
    found = problem(realtime=[chat], jobs=[job("a", 3, 6), job("b", 2, 6)])
    layout = Layout(found)
    held = baselines.greedy(layout, build_tasks(layout)).held
    tried = list(stands(layout, build_tasks(layout), held))
    assert tried and not any(stand.clear & held[0].cells for stand in tried)


def test_services_that_are_steady_stand_beside_each_other_and_not_below_a_burst() -> None:
    burst = {"service": "chat", "ramp": 4, "demand": [0, 0, 0, 4, 0, 0], "priority": 9}
    steady = {"service": "code", "ramp": 4, "demand": [1] * 6, "priority": 1}
    layout = Layout(problem(nodes=[{"name": "n0", "gpus": 8}], realtime=[burst, steady]))
    dearest, calmest = (serve(layout, baselines.follow_demand, order=order) for order in (None, swing))
    assert {one.service.service: one.rows[0] for one in dearest}["code"] == 1 << 3
    assert {one.service.service: one.rows[0] for one in calmest}["code"] == 1 << 7


def test_a_replica_that_is_mostly_spare_waits_for_the_service_that_needs_every_gpu() -> None:
    large = {"service": "large", "ramp": 4, "demand": [1] * 6, "priority": 3, "gpus_per_replica": 4}
    small = {"service": "small", "ramp": 4, "demand": [4] * 6, "priority": 2}
    found = problem(realtime=[large, small])
    layout = Layout(found)
    first = [serve(layout, baselines.follow_demand, order=order)[0] for order in (None, least_per_gpu)]
    assert [one.service.service for one in first] == ["large", "small"]
    assert solve(found).objective == -6 * 3 * 5


def test_services_leave_a_whole_node_for_jobs_that_need_it() -> None:
    """A slot's shortage buys the only whole node: the other one has holes beside which services fit."""
    nodes = [{"name": "n0", "gpus": 4}, {"name": "n1", "gpus": 4}]
    hole = {"gpus": [0, 1], "from": 0, "to": 6}
    here = {"service": "chat", "ramp": 1, "demand": [1] * 6, "priority": 1, "current": [7]}
    wide = [job(f"wide{at}", 4, 2, priority=5) for at in range(2)]
    narrow = [job(f"narrow{at}", 1, 5, priority=2) for at in range(3)]
    found = problem(nodes=nodes, unavailable=[hole], realtime=[here], jobs=wide + narrow)
    assert {"wide0", "wide1"} <= set(starts(found))


def test_of_jobs_wider_than_half_of_a_node_one_runs_at_a_time() -> None:
    found = problem(nodes=[{"name": "n", "gpus": 8}], jobs=[job(str(n), 5, 2) for n in range(5)])
    layout = Layout(found)
    most = ceiling(layout, build_tasks(layout), layout.free.bit_count())
    assert most == solve(found).objective == 3 * 10


EVERYDAY: dict[str, tuple[dict[str, Any], str]] = {
    "a running job that overruns": (
        {"jobs": [running("r", -9, [0, 1], 3)]},
        "running longer than its 3 slots",
    ),
    "a drain under a running job": (
        {"jobs": [running("r", -1, [0, 1], 3)], "unavailable": [{"gpus": [1], "from": 0, "to": 4}]},
        "running on GPUs [1] while they are out of service",
    ),
    "a running job that misses its deadline": (
        {"jobs": [running("r", -1, [0, 1], 3, deadline=1)]},
        "running, will miss its deadline, slot 1",
    ),
    "a type that no node has": ({"jobs": [job(gpu_types=["H100"])]}, "no node of type H100"),
    "a service that lost its GPUs": (
        {
            "realtime": [{"service": "chat", "demand": [2] * 6, "ramp": 2, "current": [0, 1]}],
            "unavailable": [{"gpus": [0, 1, 2, 3], "from": 0, "to": 6}],
        },
        "lost GPUs [0, 1], out of service",
    ),
    "a service whose GPUs are all taken": (
        {
            "realtime": [{"service": "chat", "demand": [2] * 6, "ramp": 1, "current": [0, 1]}],
            "jobs": [running("r", -1, [0, 1, 2, 3], 9)],
        },
        "gave up GPUs [0, 1], held by job r",
    ),
}


@pytest.mark.parametrize("mode", ["fast", "fifo", "backfill", "greedy"])
@pytest.mark.parametrize(("fields", "warning"), EVERYDAY.values(), ids=EVERYDAY.keys())
def test_what_goes_wrong_every_day_is_planned_around_with_a_warning(
    fields: dict[str, Any], warning: str, mode: str
) -> None:
    found = problem(**fields)
    plan = solve(found, mode)
    assert check(found, plan) == []
    assert any(warning in line for line in plan.warnings), plan.warnings


def test_a_service_of_known_count_but_unknown_gpus_shrinks_when_they_are_not_there() -> None:
    chat = {"service": "chat", "demand": [3] * 6, "ramp": 1, "current": 3}
    found = problem(realtime=[chat], jobs=[running("r", -1, [0, 1, 2], 9)])
    assert check(found, solve(found)) == []


LARGE: dict[str, Any] = {"gpus": 512, "jobs": 300, "node_gpus": 8}


def test_a_large_cluster_is_planned_by_the_same_rules() -> None:
    found = generate(3, **LARGE)
    plan = solve(found)
    assert check(found, plan) == []
    assert all(plan.objective >= solve(found, mode).objective for mode in ("fifo", "backfill", "greedy"))


def test_looking_near_the_frontier_finds_the_same_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = generate(4, **LARGE, features=("holes", "running", "deadlines"))
    near = solve(found, "greedy")
    monkeypatch.setattr("allocator.packing.LARGE", 10**9)
    assert solve(found, "greedy").placements == near.placements


@pytest.mark.parametrize("longest", [4, 48])
def test_what_outlasts_an_open_end_changes_no_price_and_no_order(longest: int) -> None:
    many = [job(f"j{number}", 1, 4, priority=3) for number in range(12)]
    service = {
        "service": "chat",
        "demand_quantiles": [[1] * 8 + [3, 6]] * 4,  # six GPUs are wanted once in ten times
        "ramp": 8,
        "priority": 1,
        "shortage_penalty": 8,
        "current": [7],
    }
    fields = {"slots": 4, "open_end": True, "nodes": [{"name": "n0", "gpus": 8}], "realtime": [service]}
    plan = solve(problem(**fields, jobs=[*many, job("long", 1, longest)]))
    assert [len(gpus) for gpus in plan.realtime[0].gpus] == [1] * 4
    assert plan.value == 7 * 4 * 3  # seven of the many, and not the one that looks dear for its whole length
