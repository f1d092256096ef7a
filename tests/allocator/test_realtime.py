"""How many GPUs a service holds, and which."""

from random import Random
from typing import Any

import pytest

from allocator import Problem, Service, solve
from allocator.check import slack
from allocator.grid import Layout
from allocator.realtime import choose_counts, hold

HORIZON = 7


def counts(
    demand: list[int], ramp: int, *, price: float = 0, start: int | None = None, **fields: Any
) -> list[int]:
    service = Service("chat", ramp, tuple(demand), priority=1, **fields)
    caps, lost = [99] * len(demand), [0] * len(demand)
    return choose_counts(service, price, caps, lost, start)


COUNTS: dict[str, tuple[list[int], list[int]]] = {
    "follows a flat demand": (counts([2, 2, 2], 1), [2, 2, 2]),
    "rises before and falls after a burst": (counts([0, 0, 0, 5, 0, 0, 0], 2), [0, 1, 3, 5, 3, 1, 0]),
    "follows what the ramp reaches from its start": (counts([4, 4, 4], 2, start=0), [2, 4, 4]),
    "falls no faster than the ramp from its start": (counts([0, 0, 0], 2, start=5), [3, 1, 0]),
    "rises by what is left of the ramp at first": (
        counts([4, 4, 4], 2, start=0, ramp_first=1, current=0),
        [1, 3, 4],
    ),
    "falls by what is left of the ramp at first": (
        counts([0, 0, 0], 2, start=5, ramp_first=0, current=5),
        [5, 3, 1],
    ),
    "holds whole replicas": (counts([1, 3, 4], 4, gpus_per_replica=2), [1, 2, 2]),
    "does not follow a burst that costs more than it is worth": (
        counts([0, 0, 0, 6, 0, 0, 0], 1, price=1.5),
        [0, 0, 1, 2, 1, 0, 0],
    ),
    "holds nothing when batch work is worth more": (counts([3, 3, 3], 3, price=6), [0, 0, 0]),
}


@pytest.mark.parametrize(("found", "expected"), COUNTS.values(), ids=COUNTS.keys())
def test_the_counts_of_a_service(found: list[int], expected: list[int]) -> None:
    assert found == expected


@pytest.mark.parametrize("price", [0.3, 1.0, 2.5, 4.9])
@pytest.mark.parametrize(("start", "first"), [(None, None), (0, None), (3, None), (0, 1), (3, 0)])
def test_the_counts_are_the_cheapest_of_all_that_the_ramp_allows(
    price: float, start: int | None, first: int | None
) -> None:
    demand, ramp = [0, 3, 1, 4], 2
    service = Service(
        "chat", ramp, tuple(demand), priority=1, shortage_penalty=5, current=start, ramp_first=first
    )
    near = ramp if first is None else first

    def cost(path: tuple[int, ...]) -> float:
        return sum(5 * max(0, d - n) + price * n for d, n in zip(demand, path, strict=True))

    paths: list[tuple[int, ...]] = [(n,) for n in range(5) if start is None or abs(n - start) <= near]
    for _ in demand[1:]:
        paths = [(*path, n) for path in paths for n in range(5) if abs(n - path[-1]) <= ramp]
    found = choose_counts(service, price, [9] * 4, [0] * 4, start)
    assert cost(tuple(found)) == pytest.approx(min(map(cost, paths)))


def problem(**fields: Any) -> Problem:
    nodes = [{"name": "n0", "gpus": 8}]
    return Problem.from_dict({"slots": HORIZON, "nodes": nodes, **fields})


def service(**fields: Any) -> dict[str, Any]:
    return {"service": "chat", "demand": [2] * HORIZON, "ramp": 2, "priority": 1, **fields}


def rows(**fields: Any) -> list[tuple[int, ...]]:
    found = problem(**fields)
    plan = solve(found)
    assert slack(found, plan).held_idle == 0
    return list(plan.realtime[0].gpus)


def test_a_service_keeps_the_gpus_it_has() -> None:
    assert rows(realtime=[service(current=[2, 3])]) == [(2, 3)] * HORIZON


def test_a_failed_gpu_is_replaced() -> None:
    hole = {"gpus": [3], "from": 2, "to": HORIZON}
    found = rows(realtime=[service(current=[2, 3])], unavailable=[hole])
    assert found[1] == (2, 3)
    assert all(len(gpus) == 2 and 2 in gpus and 3 not in gpus for gpus in found[2:])


def test_a_service_that_lost_its_node_grows_again_at_its_ramp() -> None:
    hole = {"gpus": [0, 1, 2, 3], "from": 0, "to": HORIZON}
    found = rows(realtime=[service(demand=[4] * HORIZON, current=[0, 1, 2, 3])], unavailable=[hole])
    assert [len(gpus) for gpus in found] == [2, 4, 4, 4, 4, 4, 4]


def test_a_service_gives_up_gpus_that_a_running_job_holds() -> None:
    running = {"id": "a", "gpus": 2, "slots": 3, "priority": 1, "running": {"start": -1, "gpus": [1, 2]}}
    found = problem(realtime=[service(current=[2, 3])], jobs=[running])
    plan = solve(found)
    assert plan.realtime[0].gpus[0] == (3,)
    assert len(plan.realtime[0].gpus[1]) == 2
    assert any("gave up GPUs [2]" in line for line in plan.warnings)


def test_a_service_leaves_gpus_before_a_committed_job_takes_them() -> None:
    committed = {"id": "a", "gpus": 2, "slots": 3, "priority": 1, "running": {"start": 2, "gpus": [2, 3]}}
    plan = solve(problem(realtime=[service(current=[2, 3])], jobs=[committed]))
    assert all(not {2, 3} & set(gpus) for gpus in plan.realtime[0].gpus[2:5])


def test_a_replica_takes_consecutive_gpus_of_one_node() -> None:
    found = Problem.from_dict(
        {
            "slots": 2,
            "nodes": [{"name": "a", "gpus": 3}, {"name": "b", "gpus": 3}],
            "realtime": [{"service": "chat", "demand": [4, 4], "ramp": 4, "gpus_per_replica": 2}],
        }
    )
    assert solve(found).realtime[0].gpus[0] in [(0, 1, 4, 5), (1, 2, 4, 5), (0, 1, 3, 4), (1, 2, 3, 4)]


def test_what_one_service_holds_is_not_taken_by_a_dearer_one() -> None:
    both = [
        service(service="cheap", current=[6, 7], priority=1),
        service(service="dear", priority=9),
    ]
    plan = solve(problem(realtime=both))
    assert plan.realtime[0].gpus == ((6, 7),) * HORIZON
    assert not {6, 7} & set(plan.realtime[1].gpus[0])


def test_quantiles_are_served_as_far_as_the_work_they_displace_is_worth_less() -> None:
    quantiles = [[1, 1, 1, 1, 1, 1, 1, 1, 1, 8]] * HORIZON
    chat = {"service": "chat", "demand_quantiles": quantiles, "ramp": 8, "priority": 1, "shortage_penalty": 5}
    work = {"id": "a", "gpus": 7, "slots": HORIZON, "priority": 2}
    plan = solve(problem(realtime=[chat], jobs=[work]))
    assert [len(gpus) for gpus in plan.realtime[0].gpus] == [1] * HORIZON
    assert plan.realtime[0].shortage[0] == pytest.approx(0.7)
    idle = solve(problem(realtime=[chat]))
    assert [len(gpus) for gpus in idle.realtime[0].gpus] == [8] * HORIZON


@pytest.mark.parametrize("seed", [None, 0, 1], ids=["as bad all day", "by chance", "by other chance"])
def test_how_slots_depend_on_each_other_does_not_change_what_a_plan_costs(seed: int | None) -> None:
    """Ten whole days with these quantiles in each slot: in the mean they lack what the plan expects, whether
    each is high or low all day or changes from slot to slot."""
    quantiles = [[slot % 3 + level // 2 for level in range(10)] for slot in range(HORIZON)]
    chat = {"service": "chat", "demand_quantiles": quantiles, "ramp": 1, "priority": 1, "shortage_penalty": 5}
    work = {"id": "a", "gpus": 5, "slots": 3, "priority": 3}
    plan = solve(problem(realtime=[chat], jobs=[work]))
    held = [len(gpus) for gpus in plan.realtime[0].gpus]
    days = [list(row) for row in quantiles]
    if seed is not None:
        rng = Random(seed)
        for row in days:
            rng.shuffle(row)
    lacked = [
        sum(max(row[day] - count, 0) for row, count in zip(days, held, strict=True)) for day in range(10)
    ]
    assert 0 < sum(lacked) / 10 == pytest.approx(sum(plan.realtime[0].shortage))
    assert plan.objective == pytest.approx(plan.value - 5 * sum(lacked) / 10)


def test_a_service_never_holds_more_than_is_free() -> None:
    found = problem(realtime=[service(demand=[12] * HORIZON, ramp=12)])
    layout = Layout(found)
    assert hold(layout, layout.free, found.services[0], 0).counts == [8] * HORIZON
