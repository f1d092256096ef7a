"""Why a job is out, who has its GPUs, when it could start; and what is said to help does."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from allocator import Plan, Problem, ProblemError, solve
from allocator.check import broken_rules, check
from allocator.earliest import forced
from allocator.explain import CAUSES, Explanation, explain, with_reasons
from allocator.generate import generate
from allocator.plan import Placement
from allocator.what_if import change

NODE = {"name": "n0", "gpus": 4}
FULL_DAY = {"gpus": 4, "slots": 6, "priority": 5}


def problem(**fields: Any) -> Problem:
    return Problem.from_dict({"slots": 6, "nodes": [NODE], **fields})


def job(name: str, gpus: int, slots: Any, **fields: Any) -> dict[str, Any]:
    return {"id": name, "gpus": gpus, "slots": slots, "priority": 1, **fields}


def why(problem: Problem, name: str, mode: str = "fast") -> Explanation:
    return explain(problem, solve(problem, mode), jobs=[name])[0]


def helps(problem: Problem, found: Explanation, mode: str = "fast") -> bool:
    """Whether the stated remedy, applied, places the job."""
    assert found.remedy is not None, f"{found.job}: no remedy for: {found.reason}"
    changed = change(problem, settings=found.remedy.settings)
    return any(placement.job == found.job for placement in solve(changed, mode).placements)


TYPES = [{"name": "n0", "gpus": 4, "gpu": "H100"}, {"name": "n1", "gpus": 4, "gpu": "A100"}]

# cause, problem, what the reason says, who blocks, whether there is a remedy
CASES: dict[str, tuple[str, dict[str, Any], str, set[str], bool]] = {
    "a type that the cluster does not have": (
        "type",
        {"nodes": TYPES, "jobs": [job("j", 2, 2, gpu_types=["B200"])]},
        "needs a GPU of type B200; the cluster has A100 and H100",
        set(),
        True,
    ),
    "durations on types that the cluster does not have": (
        "type",
        {"nodes": TYPES, "jobs": [job("j", 2, {"B200": 2})]},
        "needs a GPU of type B200; the cluster has A100 and H100",
        set(),
        True,
    ),
    "a type that others took while another is free": (
        "type",
        {
            "nodes": TYPES,
            "jobs": [job("big", 4, 6, gpu_types=["H100"], priority=9), job("j", 2, 2, gpu_types=["H100"])],
        },
        "GPUs 4–5 of type A100 are free from slot 0, and it accepts only H100",
        set(),
        True,
    ),
    "no whole nodes": (
        "shape",
        {"nodes": [NODE, {"name": "n1", "gpus": 4}], "jobs": [job("j", 6, 2)]},
        "6 GPUs fit no node that it accepts (4 GPUs each), nor whole nodes",
        set(),
        True,
    ),
    "nodes in different domains": (
        "shape",
        {
            "nodes": [NODE | {"domain": "a"}, {"name": "n1", "gpus": 4, "domain": "b"}],
            "jobs": [job("j", 8, 2)],
        },
        "nor whole nodes of one type and domain",
        set(),
        True,
    ),
    "longer than the horizon": (
        "window",
        {"jobs": [job("j", 2, 9)]},
        "needs 9 slots, and the plan ends at slot 6",
        set(),
        True,
    ),
    "released too late for the horizon": (
        "window",
        {"jobs": [job("j", 2, 3, release=4)]},
        "needs 3 slots from slot 4 on, and the plan ends at slot 6",
        set(),
        True,
    ),
    "released after the horizon": (
        "window",
        {"jobs": [job("j", 2, 3, release=8)]},
        "released at slot 8, and the plan ends at slot 6",
        set(),
        False,
    ),
    "a deadline that nobody could meet": (
        "window",
        {"jobs": [job("j", 2, 3, release=1, deadline=3)]},
        "needs 3 slots from slot 1 on, and its deadline is slot 3",
        set(),
        True,
    ),
    "maintenance all day": (
        "maintenance",
        {"jobs": [job("j", 4, 2)], "unavailable": [{"gpus": [2], "from": 0, "to": 9}]},
        "too few GPUs are in service for long enough: GPU 2 is out of service in slots 0 to 9",
        {""},
        True,
    ),
    "maintenance where there would be room": (
        "maintenance",
        {
            "jobs": [job("big", 3, 6, priority=9), job("j", 1, 6)],
            "nodes": [NODE, {"name": "n1", "gpus": 1}],
            "unavailable": [{"gpus": [4], "from": 2, "to": 3}, {"gpus": [3], "from": 3, "to": 4}],
        },
        "would fit, but GPU 3 is out of service in slots 3 to 4",
        {""},
        True,
    ),
    "running work": (
        "held",
        {"jobs": [job("old", 2, 9, running={"start": -1, "gpus": [1, 2]}), job("j", 2, 2)]},
        "left for long enough by running work: old has GPUs 1–2 until slot 8",
        {"old"},
        True,
    ),
    "a service": (
        "realtime",
        {
            "jobs": [job("j", 4, 2)],
            "realtime": [{"service": "chat", "demand": [1] * 6, "ramp": 1, "priority": 9}],
        },
        "left for long enough by real-time services: chat holds GPU 3 in slots 0 to 2",
        {"chat"},
        True,
    ),
    "a guarantee that is too small": (
        "guarantee",
        {
            "jobs": [job("j", 3, 4, tenant="search")],
            "tenants": {"search": {"gpus": 2, "borrow_slots": 1}},
        },
        "needs 3 GPUs for 4 slots; tenant search is guaranteed 2 GPUs, and it may borrow for 1 slot",
        set(),
        True,
    ),
    "a guarantee that others of the tenant use": (
        "guarantee",
        {
            "jobs": [job("big", 2, 6, tenant="search", priority=9), job("j", 2, 6, tenant="search")],
            "tenants": {"search": {"gpus": 2}},
        },
        "tenant search is guaranteed 2 GPUs, which would be exceeded beside big (worth 108)",
        {"big"},
        True,
    ),
    "what is guaranteed to others": (
        "guarantee",
        {"jobs": [job("j", 3, 2)], "tenants": {"search": {"gpus": 2}}},
        "2 GPUs are guaranteed to no tenant, which would be exceeded",
        set(),
        True,
    ),
    "a reservation": (
        "reservation",
        {
            "jobs": [job("j", 4, 4)],
            "reservations": [{"gpus": 2, "from": 2, "to": 4, "tenant": "eval"}],
        },
        "free GPUs are reserved: 2 GPUs in slots 2 to 4 for eval",
        set(),
        True,
    ),
    "room only after the deadline": (
        "deadline",
        {"jobs": [job("big", 4, 4, priority=9, deadline=4), job("j", 2, 2, deadline=4)]},
        "the first free for long enough: GPUs 0–1, slots 4 to 6, after its deadline, slot 4; "
        "its best place, GPUs 0–1 in slots 0 to 2, goes to big (worth 144)",
        {"big"},
        True,
    ),
    "work that is worth more": (
        "outbid",
        {"jobs": [job("big", 4, 6, priority=5), job("j", 2, 3)]},
        "its best place, GPUs 0–1 in slots 0 to 3, goes to big (worth 120); it is worth 6",
        {"big"},
        True,
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_the_cause_is_named_with_who_has_the_gpus_and_the_remedy_places_the_job(name: str) -> None:
    cause, fields, words, blockers, remedied = CASES[name]
    posed = problem(**fields)
    found = why(posed, "j")
    assert (found.cause, {blocker.name for blocker in found.blockers}) == (cause, blockers), found.reason
    assert words in found.reason
    if remedied:
        assert helps(posed, found)
    else:
        assert found.remedy is None


@pytest.mark.parametrize("name", ["work that is worth more", "room only after the deadline", "a reservation"])
def test_remedies_of_full_mode_place_the_job_in_full_mode(name: str) -> None:
    posed = problem(**CASES[name][1])
    found = why(posed, "j", "full")
    assert helps(posed, found, "full")


def test_the_earliest_start_holds_in_full_mode_too() -> None:
    posed = generate(1, gpus=16, jobs=14, features=("holes",))
    made = solve(posed)
    placed = {placement.job for placement in made.placements}
    left = [entry.id for entry in posed.jobs if entry.id not in placed]
    found = explain(posed, made, jobs=left, remedies=False)[0]
    again = solve(forced(posed, made, posed.job_by_id[found.job]), "full", time_limit=5)
    assert [p.start for p in again.placements if p.job == found.job] == [found.earliest_start]


@pytest.mark.parametrize(
    ("release", "deadline", "start"),
    [
        (500, None, 500),
        (9_000_000, None, 9_000_000),
        (9_000_000, 9_000_002, None),
        (9_000_000, 9_000_006, 9_000_000),
    ],
)
def test_a_job_released_in_years_is_told_its_release_and_costs_no_memory(
    release: int, deadline: int | None, start: int | None
) -> None:
    ends = {} if deadline is None else {"deadline": deadline}
    posed = problem(
        nodes=[{"name": f"n{number}", "gpus": 8} for number in range(8)],
        jobs=[job("a", 8, 3), job("j", 2, 5, release=release, **ends)],
    )
    (found,) = explain(posed, solve(posed), jobs=["j"], remedies=False)
    assert found.earliest_start == start


def test_enough_free_gpus_that_are_not_side_by_side_are_called_too_wide() -> None:
    posed = problem(
        nodes=[{"name": "n0", "gpus": 5}],
        jobs=[
            job("l", 2, 6, running={"start": 0, "gpus": [1, 2]}),
            job("m", 1, 4, priority=9),
            job("j", 2, 5),
        ],
    )
    made = Plan("fast", 0, 0, None, 0, 0, (Placement("l", 0, 6, (1, 2)), Placement("m", 0, 4, (3,))))
    (found,) = explain(posed, made, jobs=["j"], remedies=False)
    assert found.cause == "too wide"
    assert (
        "2 GPUs are free in slots 0 to 5, but at most 1 side by side for that long, and it needs 2"
        in found.reason
    )
    assert [blocker.name for blocker in found.blockers] == ["m"]


def test_enough_free_gpus_that_are_never_the_same_for_long_are_called_too_long() -> None:
    posed = problem(
        nodes=[{"name": "n0", "gpus": 2}],
        jobs=[job("a", 1, 3, priority=9), job("b", 1, 3, priority=9), job("j", 1, 5)],
    )
    made = Plan("fast", 0, 0, None, 0, 0, (Placement("a", 0, 3, (0,)), Placement("b", 3, 3, (1,))))
    (found,) = explain(posed, made, jobs=["j"], remedies=False)
    assert found.cause == "too long"
    assert "1 GPU is free in slots 0 to 5, but none of them throughout" in found.reason


def test_room_that_the_plan_leaves_idle_is_said_to_be_missed() -> None:
    posed = problem(jobs=[job("j", 2, 2)])
    made = Plan("fast", 0, 0, None, 0, 0, ())
    (found,) = explain(posed, made)
    assert found.cause == "missed"
    assert found.reason == "GPUs 0–1 from slot 0 are free for it, and fast mode leaves them idle"


def test_a_place_that_goes_to_work_worth_less_is_said_to_be_missed() -> None:
    posed = problem(jobs=[job("small", 4, 6), job("j", 4, 6, priority=3)])
    made = Plan("fast", 0, 0, None, 0, 0, (Placement("small", 0, 6, (0, 1, 2, 3)),))
    (found,) = explain(posed, made, jobs=["j"], remedies=False)
    assert found.cause == "missed"
    assert "goes to small (worth 24); it is worth more, 72" in found.reason


def test_a_gang_is_told_which_jobs_hold_its_nodes() -> None:
    nodes = [{"name": f"n{k}", "gpus": 2} for k in range(3)]
    posed = problem(
        nodes=nodes,
        jobs=[
            job("a", 2, 6, priority=5),
            job("b", 2, 6, priority=9),
            job("c", 2, 6, priority=4),
            job("j", 4, 3),
        ],
    )
    found = why(posed, "j")
    assert found.cause == "outbid"
    assert {blocker.name for blocker in found.blockers} == {"a", "c"}  # the two that are worth least
    assert helps(posed, found)


def test_a_job_with_a_value_of_its_own_is_told_a_value_and_not_a_priority() -> None:
    posed = problem(jobs=[job("big", 4, 6, priority=5), job("j", 2, 3, value=7)])
    found = why(posed, "j")
    assert found.remedy is not None
    assert [setting.path for setting in found.remedy.settings] == ["j.value"]
    assert helps(posed, found)


def test_a_priority_one_lower_than_the_remedy_does_not_place_the_job() -> None:
    posed = problem(jobs=[job("big", 4, 6, priority=5), job("j", 4, 6, priority=1)])
    found = why(posed, "j")
    assert found.remedy is not None
    (setting,) = found.remedy.settings
    assert setting.value == 6
    lower = change(posed, settings=[replace(setting, value=setting.value - 1)])
    assert [placement.job for placement in solve(lower).placements] == ["big"]


def test_waiting_counts_in_what_the_remedy_asks_for() -> None:
    fields = {"jobs": [job("big", 4, 6, priority=5), job("j", 4, 6, priority=1, waited=10)]}
    posed = problem(ageing_per_slot=0.1, **fields)  # it is worth twice its value
    found = why(posed, "j")
    assert found.remedy is not None
    assert found.remedy.settings[0].value == 3
    assert helps(posed, found)


# Placed jobs


def test_a_placed_job_is_told_what_it_waits_for() -> None:
    posed = problem(
        jobs=[
            job("first", 4, 2, priority=9),
            job("second", 4, 2, priority=2),
            job("old", 1, 1, running={"start": 0, "gpus": [0]}),
            job("later", 1, 1, release=5),
        ]
    )
    found = {entry.job: entry for entry in explain(posed, solve(posed))}
    assert (found["old"].cause, found["old"].reason) == ("running", "at work since slot 0 on GPU 0")
    assert found["second"].cause == "started"
    assert "before slot 3 first has GPUs 0–3 until slot 3" in found["second"].reason
    assert [blocker.name for blocker in found["second"].blockers] == ["first"]
    assert found["later"].reason == "starts when it is released, at slot 5"
    assert [found[name].earliest_start for name in ("first", "second", "later")] == [1, 3, 5]


def test_a_placed_job_that_could_move_up_is_told_so() -> None:
    posed = problem(jobs=[job("j", 2, 2)])
    made = Plan("fast", 0, 0, None, 0, 0, (Placement("j", 3, 2, (0, 1)),))
    (found,) = explain(posed, made)
    assert found.reason == "could start earlier, on GPUs 0–1 from slot 0, if nothing else moved"


# The earliest start


def outs(seed: int, **fields: Any) -> tuple[Problem, Plan, list[Explanation]]:
    """A random problem, its fast plan, and what is said of the jobs that are out."""
    posed = generate(seed, **fields)
    made = solve(posed)
    placed = {placement.job for placement in made.placements}
    left = [entry.id for entry in posed.jobs if entry.id not in placed]
    return posed, made, list(explain(posed, made, jobs=left, remedies=False))


@pytest.mark.parametrize("seed", range(12))
def test_the_earliest_start_is_that_of_the_solve_with_the_job_forced_in(seed: int) -> None:
    posed, made, found = outs(seed, gpus=24, jobs=24, features=("running", "holes", "services", "open_end"))
    for entry in found[:8]:
        target = posed.job_by_id[entry.job]
        again = solve(forced(posed, made, target))
        starts = [placement.start for placement in again.placements if placement.job == entry.job]
        assert starts == ([] if entry.earliest_start is None else [entry.earliest_start])


@pytest.mark.parametrize("seed", range(8))
def test_no_start_before_the_earliest_keeps_the_rules(seed: int) -> None:
    """Every start and set of GPUs is tried on a small cluster with tenants, types and elastic widths."""
    posed, made, found = outs(
        seed,
        gpus=6,
        node_gpus=3,
        jobs=9,
        slots=8,
        features=("tenants", "types", "elastic", "reservations", "gangs"),
    )
    for entry in found[:3]:
        future = forced(posed, made, posed.job_by_id[entry.job])
        last = future.slots if entry.earliest_start is None else entry.earliest_start
        base = Plan("forced", 0, 0, None, 0, 0, placements=_at_work(future))
        legal = [
            start
            for start in range(last + (entry.earliest_start is not None))
            if any(
                not broken_rules(future, replace(base, placements=(*base.placements, place)))
                for place in _ways(future, entry.job, start)
            )
        ]
        assert legal == ([] if entry.earliest_start is None else [entry.earliest_start])


def _at_work(future: Problem) -> tuple[Placement, ...]:
    return tuple(
        Placement(entry.id, entry.running.start, future.running_slots(entry), entry.running.gpus)
        for entry in future.jobs
        if entry.running is not None
    )


def _ways(future: Problem, name: str, start: int) -> list[Placement]:
    target = future.job_by_id[name]
    lengths = {
        (choice.gpus, slots)
        for choice in target.choices
        for node in future.nodes
        if (slots := choice.slots_on(node.gpu)) is not None
    }
    return [
        Placement(name, start, slots, gpus)
        for width, slots in lengths
        for gpus in combinations(range(future.total_gpus), width)
    ]


def test_a_job_that_cannot_meet_its_deadline_has_no_earliest_start() -> None:
    posed = problem(jobs=[job("big", 4, 6, priority=9), job("j", 2, 2, deadline=5)])
    assert why(posed, "j").earliest_start is None


def test_the_earliest_start_lies_behind_the_horizon_where_the_day_is_full() -> None:
    posed = problem(jobs=[job("big", 4, 6, priority=9), job("j", 2, 2)])
    assert why(posed, "j").earliest_start == 6


# Whole plans


@pytest.mark.parametrize("seed", range(20))
def test_every_unplaced_job_has_a_reason_and_a_known_cause_and_the_plan_passes_the_check(seed: int) -> None:
    posed = generate(seed)
    made = solve(posed)
    told = with_reasons(posed, made)
    assert {entry.job for entry in told.unplaced} == {entry.job for entry in made.unplaced}
    assert all(len(entry.reason) > 10 for entry in told.unplaced)
    assert replace(told, unplaced=()) == replace(made, unplaced=())
    assert check(posed, told) == []
    assert {entry.cause for entry in explain(posed, made, remedies=False)} <= set(CAUSES)


@pytest.mark.parametrize("seed", [1, 2, 5, 12, 14, 18])
def test_every_remedy_that_is_stated_places_its_job(seed: int) -> None:
    posed = generate(seed, gpus=24, jobs=24)
    made = solve(posed)
    placed = {placement.job for placement in made.placements}
    found = [entry for entry in explain(posed, made) if entry.job not in placed]
    stated = [entry for entry in found if entry.remedy is not None]
    assert stated
    assert all(helps(posed, entry) for entry in stated)


def test_without_effort_there_are_still_reasons() -> None:
    posed = generate(1)
    told = with_reasons(posed, solve(posed), effort=0)
    assert told.unplaced
    assert all(entry.reason for entry in told.unplaced)


def test_who_blocks_is_in_the_plan_and_really_holds_gpus_of_the_best_place() -> None:
    posed = generate(2)
    made = solve(posed)
    placed = {placement.job: placement for placement in made.placements}
    for entry in explain(posed, made, remedies=False):
        for blocker in entry.blockers:
            if blocker.sort == "job":
                assert blocker.gpus == placed[blocker.name].gpus


@pytest.mark.parametrize("mode", ["fifo", "backfill", "greedy"])
def test_the_plans_of_the_baselines_are_explained_too(mode: str) -> None:
    posed = problem(jobs=[job("low", 4, 6), job("high", 4, 6, priority=9)])
    made = solve(posed, mode)
    (left,) = made.unplaced
    (found,) = explain(posed, made, jobs=[left.job])
    assert found.cause == ("missed" if mode == "fifo" else "outbid")
    if found.remedy is not None:
        assert helps(posed, found, mode)


def test_an_unknown_job_is_an_error() -> None:
    posed = problem(jobs=[job("j", 1, 1)])
    with pytest.raises(ProblemError, match="job k: no such job"):
        explain(posed, solve(posed), jobs=["k"])
