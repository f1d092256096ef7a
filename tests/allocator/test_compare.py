"""Policies side by side: the figures of each, and what is gained over fifo and greedy."""

import io

import pytest
from rich.console import Console

from allocator import Problem, load_problem, solve
from allocator.check import score
from allocator.compare import POLICIES, Comparison, compare, table
from tests.allocator.scenarios import SCENARIOS

QUICK = ("fifo", "backfill", "greedy", "fast")


@pytest.fixture(scope="module")
def contention() -> Comparison:
    return compare(load_problem(SCENARIOS / "contention.yaml"), full_seconds=0)


def test_rows_come_in_the_order_of_the_policies(contention: Comparison) -> None:
    assert tuple(row.policy for row in contention.rows) == QUICK


@pytest.mark.parametrize("policy", QUICK)
def test_figures_are_those_of_the_plan(contention: Comparison, policy: str) -> None:
    problem = load_problem(SCENARIOS / "contention.yaml")
    plan = solve(problem, policy)
    found, row = score(problem, plan), contention.row(policy)
    assert (row.value, row.objective, row.utilization) == (plan.value, plan.objective, plan.utilization)
    assert (row.done, row.shortage) == (found.completed, found.shortage)
    assert row.ms > 0


def test_gains_are_over_the_objectives_of_fifo_and_greedy(contention: Comparison) -> None:
    fifo, greedy, fast = (contention.row(policy) for policy in ("fifo", "greedy", "fast"))
    assert (fifo.points_over_fifo, fifo.percent_over_fifo, greedy.percent_over_greedy) == (0, 0, 0)
    assert fast.percent_over_fifo == pytest.approx(100 * (fast.objective / fifo.objective - 1))
    assert fast.percent_over_greedy == pytest.approx(100 * (fast.objective / greedy.objective - 1))
    assert fast.points_over_fifo == pytest.approx(100 * (fast.utilization - fifo.utilization))


def test_a_gain_over_nothing_is_left_open() -> None:
    problem = Problem.from_dict(
        {
            "slots": 2,
            "nodes": [{"name": "n0", "gpus": 1}],
            "realtime": [{"service": "chat", "demand": [3, 3], "ramp": 3}],
        }
    )
    row = compare(problem, full_seconds=0).row("fast")
    assert row.percent_over_fifo is None
    assert row.objective < 0


def test_fifo_and_greedy_are_always_there() -> None:
    problem = load_problem(SCENARIOS / "light_load.yaml")
    found = compare(problem, policies=("fast",), full_seconds=0)
    assert [row.policy for row in found.rows] == ["fifo", "greedy", "fast"]


def test_without_full_mode_there_is_no_bound(contention: Comparison) -> None:
    assert contention.bound is None
    assert all(row.percent_below_bound is None for row in contention.rows)


def test_full_mode_brings_the_bound_and_no_policy_is_above_it() -> None:
    found = compare(load_problem(SCENARIOS / "fragmentation.yaml"), full_seconds=10)
    assert tuple(row.policy for row in found.rows) == POLICIES
    assert found.bound is not None
    assert all(row.objective <= found.bound + 1e-6 for row in found.rows)
    assert found.row("full").objective == 1326  # proven elsewhere
    assert found.row("full").percent_below_bound == pytest.approx(0, abs=1e-6)


def test_the_table_shows_every_policy_of_every_problem(contention: Comparison) -> None:
    out = io.StringIO()
    light = compare(load_problem(SCENARIOS / "light_load.yaml"), full_seconds=0)
    Console(file=out, width=140).print(table([contention, light]))
    text = out.getvalue()
    assert text.count("contention (16 GPUs, 24 jobs)") == 1
    assert text.count("light_load (16 GPUs, 10 jobs)") == 1
    for policy in QUICK:
        assert text.count(policy) >= 2
    fifo = next(line for line in text.splitlines() if " fifo " in line and "contention" in line)
    assert "477" in fifo
