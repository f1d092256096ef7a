"""Whatever the problem, every mode keeps every rule and fast is never below a baseline."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allocator import Plan, Problem, solve
from allocator.check import broken_rules, check, slack
from allocator.generate import generate

MODES = ("fast", "fifo", "backfill", "greedy")
JUDGE = Path(__file__).parents[3] / "shared" / "judge.py"
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small problems with every part of the format, odd ones included."""
    slots = draw(st.integers(1, 8))
    nodes: list[dict[str, Any]] = [
        {
            "name": f"n{k}",
            "gpus": draw(st.integers(1, 5)),
            "gpu": draw(st.sampled_from(["A", "B"])),
            "domain": "d",
        }
        for k in range(draw(st.integers(1, 3)))
    ]
    total = sum(int(node["gpus"]) for node in nodes)
    jobs: list[dict[str, Any]] = []
    busy: set[int] = set()
    for k in range(draw(st.integers(0, 8))):
        width = draw(st.integers(1, total))
        entry: dict[str, Any] = {"id": f"j{k}", "priority": draw(st.integers(0, 5))}
        if draw(st.booleans()):
            entry |= {"gpus": width, "slots": draw(st.integers(1, 6))}
        else:
            other = draw(st.integers(1, total))
            lengths = {"A": draw(st.integers(1, 6)), "B": draw(st.integers(1, 6))}
            entry["choices"] = [
                {"gpus": width, "slots": lengths},
                {"gpus": other, "slots": draw(st.integers(1, 6))},
            ]
        entry["release"] = draw(st.sampled_from([0, 0, 0, 1, 3, 9]))
        entry |= draw(st.sampled_from([{}, {}, {"deadline": 4}, {"deadline": -1}, {"gpu_types": ["A"]}]))
        entry |= draw(st.sampled_from([{}, {"tenant": "x"}, {"tenant": "y"}, {"waited": 3}]))
        entry |= draw(st.sampled_from([{}, {}, {"announced": {"start": 2}}]))
        first = draw(st.integers(0, total - 1))
        gpus = set(range(first, min(first + width, total)))
        types = {nodes_type(nodes, gpu) for gpu in gpus}
        if draw(st.integers(0, 3)) == 0 and len(gpus) == width and len(types) == 1 and not gpus & busy:
            busy |= gpus
            entry["running"] = {"start": draw(st.integers(-4, 2)), "gpus": sorted(gpus)}
        jobs.append(entry)
    services: list[dict[str, Any]] = []
    held: set[int] = set()
    for name in draw(st.sampled_from([[], ["chat"], ["chat", "code"]])):
        replica = draw(st.sampled_from([1, 1, 2]))
        service: dict[str, Any] = {"service": name, "ramp": replica * draw(st.integers(1, 3))}
        service |= {"gpus_per_replica": replica, "priority": draw(st.integers(0, 3))}
        if draw(st.booleans()):
            service["demand"] = draw(st.lists(st.integers(0, 6), min_size=slots, max_size=slots))
        else:
            row = st.lists(st.integers(0, 6), min_size=10, max_size=10).map(sorted)
            service["demand_quantiles"] = draw(st.lists(row, min_size=slots, max_size=slots))
        now = draw(st.sets(st.integers(0, total - 1), max_size=4)) - held
        held |= now
        service["current"] = draw(st.sampled_from([None, sorted(now), len(now)]))
        if service["current"] is not None:
            service["ramp_first"] = draw(st.sampled_from([None, None, 0, 1, 4]))
        services.append(service)
    holes = [
        {"gpus": sorted(draw(st.sets(st.integers(0, total - 1), min_size=1))), "from": start, "to": start + 3}
        for start in draw(st.lists(st.integers(-2, 8), max_size=2))
    ]
    guaranteed = draw(st.integers(0, total))
    return Problem.from_dict(
        {
            "slots": slots,
            "nodes": nodes,
            "jobs": jobs,
            "realtime": services,
            "unavailable": holes,
            "tenants": draw(st.sampled_from([{}, {"x": {"gpus": guaranteed, "borrow_slots": 2}}])),
            "reservations": draw(
                st.sampled_from(
                    [[], [{"gpus": draw(st.integers(1, total)), "from": 1, "to": 4, "tenant": "y"}]]
                )
            ),
            "open_end": draw(st.booleans()),
            "ageing_per_slot": draw(st.sampled_from([0, 0.25])),
            "move_cost": draw(st.sampled_from([0, 3])),
        }
    )


def nodes_type(nodes: list[dict[str, Any]], gpu: int) -> str:
    for node in nodes:
        if gpu < node["gpus"]:
            return str(node["gpu"])
        gpu -= node["gpus"]
    raise AssertionError("no such GPU")


@quick
@given(problems())
def test_every_mode_keeps_every_rule_and_fast_is_never_below_a_baseline(problem: Problem) -> None:
    plans = {mode: solve(problem, mode) for mode in MODES}
    for plan in plans.values():
        assert check(problem, plan) == []
        assert Plan.from_json(plan.to_json()).placements == plan.placements
    best = max(plans[mode].objective for mode in MODES[1:])
    assert plans["fast"].objective >= best - 1e-6


@quick
@given(problems())
def test_in_a_fast_plan_no_job_could_start_earlier_and_no_service_holds_idle_gpus(problem: Problem) -> None:
    found = slack(problem, solve(problem))
    assert (found.postponed, found.held_idle) == (0, 0)


def full_mode_keeps_its_promises(problem: Problem) -> None:
    fast, plan = solve(problem), solve(problem, "full", time_limit=2)
    assert check(problem, plan) == []
    assert plan.bound is not None and plan.bound >= plan.objective >= fast.objective - 1e-6
    found = slack(problem, plan)
    assert (found.postponed, found.held_idle) == (0, 0)


@settings(quick, max_examples=20)
@given(problems())
def test_full_mode_keeps_every_rule_and_is_never_below_fast_mode_nor_above_its_bound(
    problem: Problem,
) -> None:
    full_mode_keeps_its_promises(problem)


@pytest.mark.long
@settings(quick, max_examples=400)
@given(problems())
def test_full_mode_keeps_every_rule_on_many_problems(problem: Problem) -> None:
    full_mode_keeps_its_promises(problem)


@quick
@given(problems())
def test_a_problem_survives_the_way_to_a_dictionary_and_back(problem: Problem) -> None:
    assert Problem.from_dict(problem.to_dict()) == problem


@pytest.mark.parametrize("seed", range(24))
def test_generated_problems_are_planned_by_the_rules(seed: int) -> None:
    problem = generate(seed)
    plans = {mode: solve(problem, mode) for mode in MODES}
    assert all(check(problem, plan) == [] for plan in plans.values())
    assert plans["fast"].objective >= max(plans[mode].objective for mode in MODES[1:]) - 1e-6
    assert slack(problem, plans["fast"]) == slack(problem, plans["fast"]).__class__(0, 0)


@pytest.fixture(scope="module")
def judge() -> ModuleType:
    if not JUDGE.exists():
        pytest.skip("the independent judge is not here")
    spec = importlib.util.spec_from_file_location("judge", JUDGE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["judge"] = module
    spec.loader.exec_module(module)
    return module


SHARED = ("running", "holes", "deadlines", "types", "elastic", "gangs", "open_end")


@pytest.mark.parametrize("seed", range(20))
def test_an_independent_judge_finds_the_same_figures(judge: ModuleType, seed: int) -> None:
    problem = generate(seed, features=SHARED)
    for mode in MODES:
        plan = solve(problem, mode)
        figures, broken = judge.judge(problem.to_dict(), plan.to_dict())
        assert broken == []
        assert figures["objective"] == pytest.approx(plan.objective)
        assert figures["utilization"] == pytest.approx(plan.utilization, abs=1e-4)
        if mode == "fast":
            assert (figures["postponed"], figures["held_idle"]) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_an_independent_judge_refuses_what_the_check_refuses(judge: ModuleType, seed: int) -> None:
    problem = generate(seed, features=SHARED)
    plan = solve(problem)
    for at, placement in enumerate(plan.placements):
        for start, shift in (
            (placement.start + 1, 0),
            (placement.start - 1, 0),
            (placement.start, 1),
            (placement.start, -1),
        ):
            moved = type(placement)(
                placement.job, start, placement.slots, tuple(g + shift for g in placement.gpus)
            )
            changed = Plan(
                plan.mode,
                0,
                0,
                None,
                0,
                0,
                (*plan.placements[:at], moved, *plan.placements[at + 1 :]),
                plan.realtime,
            )
            told = {k: v for k, v in changed.to_dict().items() if k in ("placements", "realtime")}
            _, broken = judge.judge(problem.to_dict(), told)
            assert bool(broken) == bool(broken_rules(problem, changed)), (placement, moved, broken)
