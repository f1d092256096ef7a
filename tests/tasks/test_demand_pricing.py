"""Ten quantiles of a service's demand, as the hour hands them to the allocator, are priced by every mode."""

import math

import pytest

import allocator
from tasks.forecast import LEVELS

SLOTS = 6
WORTH = 1.0  # of a GPU-slot of batch work


def problem(penalty: float, quantiles: tuple[int, ...] = tuple(range(1, 11))) -> allocator.Problem:
    """Ten GPUs, batch work for all of them, and a service whose demand is uncertain in every slot."""
    service = allocator.Service(
        service="chat",
        demand_quantiles=(quantiles,) * SLOTS,
        ramp=10,
        priority=WORTH,
        shortage_penalty=penalty,
        current=tuple(range(10)),
    )
    jobs = tuple(
        allocator.Job(id=f"j{number}", kind="training", choices=(allocator.Choice(1, SLOTS),), priority=WORTH)
        for number in range(10)
    )
    nodes = (allocator.Node("node0", 10),)
    return allocator.Problem(
        name="uncertain", slots=SLOTS, slot_minutes=60, nodes=nodes, jobs=jobs, services=(service,)
    )


def held(plan: allocator.Plan) -> int:
    """GPUs that the service has in the middle of the horizon."""
    return len(plan.realtime[0].gpus[SLOTS // 2])


def best_count(penalty: float) -> set[int]:
    """Counts at which the expected shortage at its price and the batch work given up are least."""
    costs = {
        count: penalty * sum(max(wanted - count, 0) for wanted in range(1, 11)) / 10 + count
        for count in range(11)
    }
    least = min(costs.values())
    return {count for count, cost in costs.items() if math.isclose(cost, least)}


@pytest.mark.parametrize("mode", ["fast", "full"])
@pytest.mark.parametrize("penalty", [1.5, 5.0, 8.0])
def test_a_plan_reserves_the_quantile_at_which_shortage_and_batch_work_cost_the_same(
    mode: str, penalty: float
) -> None:
    plan = allocator.solve(problem(penalty), mode=mode, time_limit=5.0)
    assert held(plan) in best_count(penalty)
    # A GPU-slot held costs 1 whether it is needed or not, one that is missing c: the quantile 1 - 1/c.
    assert abs(held(plan) / 10 - (1 - 1 / penalty)) <= 0.1 + 1e-9


@pytest.mark.parametrize("penalty", [1.5, 5.0, 8.0])
def test_the_bound_prices_the_expected_shortage_as_the_plans_do(penalty: float) -> None:
    plan = allocator.solve(problem(penalty), mode="full", time_limit=5.0, bound=True)
    assert plan.bound is not None
    assert plan.objective <= plan.bound + 1e-6
    assert plan.bound == pytest.approx(plan.objective, rel=0.02)


def test_a_sure_demand_is_met_and_a_wide_one_of_the_same_middle_costs_worth() -> None:
    sure, wide = (
        allocator.solve(problem(8.0, quantiles), mode="fast")
        for quantiles in ((5,) * len(LEVELS), (1, 2, 3, 4, 5, 5, 6, 7, 8, 9))
    )
    assert held(sure) == 5
    assert held(wide) > 5
    assert wide.objective < sure.objective
