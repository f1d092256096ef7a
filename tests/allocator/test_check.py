"""The check finds each rule that a plan breaks, and says what a good plan is worth."""

from dataclasses import replace
from typing import Any

import pytest

from allocator import Placement, Plan, Problem, ServicePlan
from allocator.check import broken_rules, check, score, slack

TWO_NODES = [{"name": "n0", "gpus": 4, "gpu": "H100"}, {"name": "n1", "gpus": 4, "gpu": "H100"}]


def problem(**fields: Any) -> Problem:
    return Problem.from_dict({"slots": 6, "nodes": TWO_NODES, **fields})


def job(name: str = "a", **fields: Any) -> dict[str, Any]:
    return {"id": name, "gpus": 2, "slots": 2, "priority": 1, **fields}


def plan(*placements: tuple[str, int, int, tuple[int, ...]], rows: tuple[ServicePlan, ...] = ()) -> Plan:
    return Plan("test", 0, 0, None, 0, 0, tuple(Placement(*p) for p in placements), rows)


JOB_RULES: dict[str, tuple[dict[str, Any], Plan, str | None]] = {
    "a block in one node": ({"jobs": [job()]}, plan(("a", 0, 2, (0, 1))), None),
    "an unknown job": ({"jobs": [job()]}, plan(("b", 0, 2, (0, 1))), "job b: no such job"),
    "a job placed twice": ({"jobs": [job()]}, plan(("a", 0, 2, (0, 1)), ("a", 2, 2, (0, 1))), "placed twice"),
    "a GPU outside": ({"jobs": [job()]}, plan(("a", 0, 2, (7, 8))), "expected distinct GPUs of 0 to 7"),
    "a GPU twice": ({"jobs": [job()]}, plan(("a", 0, 2, (1, 1))), "expected distinct GPUs"),
    "another width": ({"jobs": [job()]}, plan(("a", 0, 2, (0,))), "none of its choices"),
    "another length": ({"jobs": [job()]}, plan(("a", 0, 3, (0, 1))), "none of its choices"),
    "across two nodes": ({"jobs": [job()]}, plan(("a", 0, 2, (3, 4))), "not consecutive GPUs of one node"),
    "with a gap": ({"jobs": [job()]}, plan(("a", 0, 2, (0, 2))), "not consecutive GPUs of one node"),
    "before its release": (
        {"jobs": [job(release=1)]},
        plan(("a", 0, 2, (0, 1))),
        "starts at 0; allowed from 1",
    ),
    "before now": ({"jobs": [job()]}, plan(("a", -1, 2, (0, 1))), "starts at -1"),
    "past its deadline": ({"jobs": [job(deadline=3)]}, plan(("a", 2, 2, (0, 1))), "after its deadline"),
    "past the horizon": (
        {"jobs": [job()]},
        plan(("a", 5, 2, (0, 1))),
        "after its deadline (None) or horizon (6)",
    ),
    "past an open horizon": ({"jobs": [job()], "open_end": True}, plan(("a", 5, 2, (0, 1))), None),
    "start beyond an open horizon": (
        {"jobs": [job()], "open_end": True},
        plan(("a", 6, 2, (0, 1))),
        "starts at 6",
    ),
    "two jobs on a GPU": (
        {"jobs": [job(), job("b")]},
        plan(("a", 0, 2, (0, 1)), ("b", 1, 2, (1, 2))),
        "job b: GPU 1 is taken",
    ),
    "two jobs on a GPU past the horizon": (
        {"jobs": [job(slots=4), job("b", slots=4)], "open_end": True},
        plan(("a", 4, 4, (0, 1)), ("b", 5, 4, (1, 2))),
        "job b: GPU 1 is taken",
    ),
    "a GPU out of service": (
        {"jobs": [job()], "unavailable": [{"gpus": [1], "from": 1, "to": 2}]},
        plan(("a", 0, 2, (0, 1))),
        "GPU 1 is out of service at slot 1",
    ),
    "a hole beyond the horizon": (
        {"jobs": [job(slots=4)], "open_end": True, "unavailable": [{"gpus": [1], "from": 7, "to": 8}]},
        plan(("a", 5, 4, (0, 1))),
        "GPU 1 is out of service at slot 7",
    ),
    "a running job in a hole": (
        {
            "jobs": [job(slots=4, running={"start": -1, "gpus": [0, 1]})],
            "unavailable": [{"gpus": [1], "from": 0, "to": 6}],
        },
        plan(("a", -1, 4, (0, 1))),
        None,
    ),
    "a running job left out": (
        {"jobs": [job(running={"start": -1, "gpus": [0, 1]})]},
        plan(),
        "job a: running, but not in the plan",
    ),
    "a running job moved": (
        {"jobs": [job(running={"start": -1, "gpus": [0, 1]})]},
        plan(("a", -1, 2, (1, 2))),
        "must stay at -1 on GPUs [0, 1]",
    ),
    "a GPU of a running job": (
        {"jobs": [job(running={"start": -1, "gpus": [0, 1]}), job("b")]},
        plan(("b", 0, 2, (1, 2)), ("a", -1, 2, (0, 1))),
        "job b: GPU 1 is taken",
    ),
    "a GPU of an overrunning job": (
        {"jobs": [job(running={"start": -9, "gpus": [0, 1]}), job("b")]},
        plan(("a", -9, 2, (0, 1)), ("b", 0, 2, (1, 2))),
        "job b: GPU 1 is taken",
    ),
    "a type it does not accept": (
        {"jobs": [job(gpu_types=["A100"])]},
        plan(("a", 0, 2, (0, 1))),
        "expected A100",
    ),
    "a gang on whole nodes": ({"jobs": [job(gpus=8)]}, plan(("a", 0, 2, tuple(range(8)))), None),
    "a gang on parts of nodes": (
        {"jobs": [job(gpus=8)], "nodes": [*TWO_NODES, {"name": "n2", "gpus": 4, "gpu": "H100"}]},
        plan(("a", 0, 2, (0, 1, 2, 3, 4, 5, 8, 9))),
        "must take whole nodes",
    ),
    "a gang over two domains": (
        {
            "jobs": [job(gpus=8)],
            "nodes": [{**TWO_NODES[0], "domain": "r1"}, {**TWO_NODES[1], "domain": "r2"}],
        },
        plan(("a", 0, 2, tuple(range(8)))),
        "one type and one domain",
    ),
    "a guarantee": (
        {"jobs": [job(tenant="x")], "tenants": {"x": {"gpus": 2, "borrow_slots": 1}}},
        plan(("a", 0, 2, (0, 1))),
        None,
    ),
    "beyond a guarantee": (
        {"jobs": [job(tenant="x")], "tenants": {"x": {"gpus": 1, "borrow_slots": 1}}},
        plan(("a", 0, 2, (0, 1))),
        "tenant x would hold 2 GPUs; expected at most 1",
    ),
    "borrowed for short": (
        {"jobs": [job(tenant="x")], "tenants": {"x": {"gpus": 1, "borrow_slots": 2}}},
        plan(("a", 0, 2, (0, 1))),
        None,
    ),
    "no tenant, all guaranteed": (
        {"jobs": [job()], "tenants": {"x": {"gpus": 7}}},
        plan(("a", 0, 2, (0, 1))),
        "tenants without a guarantee would hold 2 GPUs; expected at most 1",
    ),
    "running beyond a guarantee": (
        {"jobs": [job(tenant="x", running={"start": -1, "gpus": [0, 1]})], "tenants": {"x": {"gpus": 1}}},
        plan(("a", -1, 2, (0, 1))),
        None,
    ),
    "a start beside what runs beyond a guarantee": (
        {
            "jobs": [job(tenant="x", running={"start": -1, "gpus": [0, 1]}), job("b", tenant="x")],
            "tenants": {"x": {"gpus": 3}},
        },
        plan(("a", -1, 2, (0, 1)), ("b", 0, 2, (2, 3))),
        "tenant x would hold 4 GPUs; expected at most 3",
    ),
    "into a reservation": (
        {"jobs": [job()], "reservations": [{"gpus": 7, "from": 1, "to": 2, "tenant": "x"}]},
        plan(("a", 0, 2, (0, 1))),
        "job a: at slot 1 takes GPUs that are reserved",
    ),
    "beside a reservation": (
        {"jobs": [job()], "reservations": [{"gpus": 6, "from": 1, "to": 2, "tenant": "x"}]},
        plan(("a", 0, 2, (0, 1))),
        None,
    ),
    "into one's own reservation": (
        {"jobs": [job(tenant="x")], "reservations": [{"gpus": 8, "from": 0, "to": 6, "tenant": "x"}]},
        plan(("a", 0, 2, (0, 1))),
        None,
    ),
    "beside a reservation that is in use": (
        {
            "jobs": [job(tenant="x"), job("b")],
            "reservations": [{"gpus": 2, "from": 0, "to": 6, "tenant": "x"}],
            "unavailable": [{"gpus": [4, 5, 6, 7], "from": 0, "to": 6}],
        },
        plan(("a", 0, 2, (0, 1)), ("b", 0, 2, (2, 3))),
        None,
    ),
}


@pytest.mark.parametrize(("fields", "made", "fault"), JOB_RULES.values(), ids=JOB_RULES.keys())
def test_the_rules_of_jobs(fields: dict[str, Any], made: Plan, fault: str | None) -> None:
    broken = broken_rules(problem(**fields), made)
    assert (broken == []) if fault is None else any(fault in line for line in broken), broken


def service(**fields: Any) -> dict[str, Any]:
    return {"service": "chat", "ramp": 2, "priority": 2, "shortage_penalty": 5, **fields}


SERVICE_RULES: dict[str, tuple[dict[str, Any], list[tuple[int, ...]], str | None]] = {
    "grows and shrinks": ({}, [(7,), (6, 7), (5, 6, 7), (6, 7), (7,), ()], None),
    "moves": ({}, [(7,), (6,), (6,), (6,), (6,), (6,)], "moves replicas to other GPUs at slot 1"),
    "ramps too fast": ({}, [(), (5, 6, 7), (6, 7), (), (), ()], "from 0 to 3 GPUs at slot 1, its ramp is 2"),
    "starts anywhere without a current": ({}, [(3, 4, 5, 6, 7)] + [(4, 5, 6, 7)] * 5, None),
    "starts at the ramp from its current": (
        {"current": [7]},
        [(3, 4, 5, 6, 7)] + [(4, 5, 6, 7)] * 5,
        "from 1 to 5 GPUs at slot 0",
    ),
    "starts at what is left of the ramp": (
        {"current": [4], "ramp_first": 1},
        [(4, 5, 6)] * 6,
        "from 1 to 3 GPUs at slot 0, its ramp is 1",
    ),
    "has its whole ramp again in slot 1": (
        {"current": [4], "ramp_first": 0},
        [(4,), (4, 5, 6), *[(4, 5, 6, 7)] * 4],
        None,
    ),
    "starts at the ramp from a count": ({"current": 1}, [(4, 5, 6, 7)] * 6, "from 1 to 4 GPUs at slot 0"),
    "leaves its current": ({"current": [7]}, [(6,)] * 6, "moves replicas to other GPUs at slot 0"),
    "replaces a failed GPU": ({"hole": 7}, [(7,), (6,), (6,), (6,), (6,), (6,)], None),
    "stays on a failed GPU": ({"hole": 7}, [(7,)] * 6, "GPU 7 is out of service at slot 1"),
    "holds half a replica": ({"gpus_per_replica": 2}, [(7,)] * 6, "are not whole replicas of 2"),
    "holds a replica across nodes": ({"gpus_per_replica": 2}, [(3, 4)] * 6, "are not whole replicas of 2"),
    "holds whole replicas": ({"gpus_per_replica": 2}, [(4, 5, 6, 7)] * 6, None),
    "holds a GPU twice": ({}, [(7, 7)] * 6, "expected distinct GPUs"),
}


@pytest.mark.parametrize(("fields", "rows", "fault"), SERVICE_RULES.values(), ids=SERVICE_RULES.keys())
def test_the_rules_of_services(
    fields: dict[str, Any], rows: list[tuple[int, ...]], fault: str | None
) -> None:
    fields = dict(fields)
    hole = fields.pop("hole", None)
    holes = [] if hole is None else [{"gpus": [hole], "from": 1, "to": 6}]
    found = problem(realtime=[service(demand=[0] * 6, **fields)], unavailable=holes)
    made = plan(rows=(ServicePlan("chat", tuple(rows), (0,) * 6),))
    broken = broken_rules(found, made)
    assert (broken == []) if fault is None else any(fault in line for line in broken), broken


def test_a_drop_that_a_failure_forces_may_exceed_the_ramp() -> None:
    holes = [{"gpus": [4, 5, 6], "from": 2, "to": 6}]
    found = problem(realtime=[service(demand=[4] * 6, ramp=1)], unavailable=holes)
    rows = ((4, 5, 6, 7),) * 2 + ((7,),) * 4
    assert broken_rules(found, plan(rows=(ServicePlan("chat", rows, (0, 0, 3, 3, 3, 3)),))) == []


def test_a_service_that_is_not_in_the_plan_is_a_fault() -> None:
    found = problem(realtime=[service(demand=[0] * 6)])
    assert broken_rules(found, plan()) == ["service chat: needs GPUs and a shortage for each of 6 slots"]


def test_a_job_and_a_service_never_share_a_gpu() -> None:
    found = problem(realtime=[service(demand=[1] * 6)], jobs=[job()])
    made = plan(("a", 0, 2, (6, 7)), rows=(ServicePlan("chat", ((7,),) * 6, (0,) * 6),))
    assert "service chat: GPU 7 is taken at slot 0" in broken_rules(found, made)


def test_a_shortage_that_is_told_wrongly_is_a_fault() -> None:
    found = problem(realtime=[service(demand=[3] * 6)])
    made = plan(rows=(ServicePlan("chat", ((6, 7),) * 6, (0,) * 6),))
    assert broken_rules(found, made)[0] == "service chat: slot 0: shortage 0; its GPUs leave 1"


def test_figures_that_are_told_wrongly_are_faults() -> None:
    found = problem(jobs=[job()])
    made = plan(("a", 0, 2, (0, 1)))
    assert [line.split(":")[1].strip() for line in check(found, made)] == [
        "objective",
        "value",
        "utilization",
    ]
    good = replace(made, objective=4, value=4, utilization=4 / 48)
    assert check(found, good) == []
    assert check(found, replace(good, bound=3)) == ["plan: bound: 3; the objective 4 is above it"]


def test_objective_is_worth_less_shortage_and_move_costs() -> None:
    found = problem(
        jobs=[
            job(waited=2, announced={"start": 0}),
            job("b", announced={"start": 3}),
            job("c", announced={"start": 0}),
        ],
        realtime=[service(demand=[1] * 6)],
        ageing_per_slot=0.25,
        move_cost=1,
    )
    rows = (ServicePlan("chat", ((7,),) * 4 + ((),) * 2, (0, 0, 0, 0, 1, 1)),)
    figures = score(found, plan(("a", 1, 2, (0, 1)), ("b", 1, 2, (2, 3)), rows=rows))
    assert (figures.value, figures.worth, figures.shortage_cost, figures.move_cost) == (8, 10, 20, 2)
    assert figures.objective == 10 - 20 - 2


def test_an_open_end_counts_in_proportion_to_the_slots_inside() -> None:
    found = problem(jobs=[job(slots=4, value=12)], open_end=True)
    figures = score(found, plan(("a", 5, 4, (0, 1))))
    assert (figures.value, figures.completed, figures.utilization) == (3, 0, 2 / 48)


def test_a_running_job_that_misses_its_deadline_earns_nothing() -> None:
    found = problem(jobs=[job(slots=4, deadline=2, running={"start": -1, "gpus": [0, 1]})])
    assert score(found, plan(("a", -1, 4, (0, 1)))).value == 0


def test_shortage_with_quantiles_is_the_expected_one() -> None:
    quantiles = [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4]] * 6
    found = problem(realtime=[service(demand_quantiles=quantiles)])
    rows = ServicePlan("chat", ((6, 7),) * 6, (0.6,) * 6)
    figures = score(found, plan(rows=(rows,)))
    assert figures.shortage == pytest.approx(3.6)
    assert figures.utilization == pytest.approx((2.0 - 0.6) * 6 / 48)


def test_slack_counts_jobs_that_could_start_earlier() -> None:
    found = problem(jobs=[job(), job("b", release=2)])
    assert slack(found, plan(("a", 1, 2, (0, 1)), ("b", 2, 2, (2, 3)))).postponed == 1


def test_slack_counts_gpus_that_neither_demand_nor_ramp_needs() -> None:
    found = problem(realtime=[service(demand=[0, 0, 4, 0, 0, 0])])
    tight = ((), (6, 7), (4, 5, 6, 7), (6, 7), (), ())
    loose = ((), (6, 7), (4, 5, 6, 7), (6, 7), (7,), ())
    short = (0,) * 6
    assert slack(found, plan(rows=(ServicePlan("chat", tight, short),))).held_idle == 0
    assert slack(found, plan(rows=(ServicePlan("chat", loose, short),))).held_idle == 1


def test_a_plan_survives_the_way_to_json_and_back() -> None:
    made = plan(("a", 0, 2, (0, 1)), rows=(ServicePlan("chat", ((7,), ()), (0, 0.5)),))
    assert Plan.from_json(made.to_json()) == made
