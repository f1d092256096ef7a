"""Solve a planning problem: one entry for every mode, and the check that ends each solve.

A mode is a row of a table. Full mode and bounds are loaded when first used, because they bring a solver
library with them. The invariant: what is returned keeps every rule of ``check``; anything else is a
mistake of ours and raises ``RuntimeError`` with the rule.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

from allocator import baselines
from allocator.check import broken_rules, score
from allocator.fast import plan_fast
from allocator.grid import Layout, build_tasks
from allocator.plan import Plan, Unplaced
from allocator.problem import Job, Problem
from allocator.schedule import Schedule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

BASELINES: dict[str, Callable[..., Schedule]] = {
    "fifo": baselines.fifo,
    "backfill": baselines.backfill,
    "greedy": baselines.greedy,
}
MODES = ("fast", "full", *BASELINES)
FULL_SECONDS = 10.0  # time limit of full mode, and of a bound, when none is given
_CAP_SECONDS = 3600.0  # the same when iterations are the budget


def solve(
    problem: Problem,
    mode: str = "fast",
    *,
    seed: int = 0,
    iterations: int | None = None,
    time_limit: float | None = None,
    bound: bool = False,
) -> Plan:
    """Plan a problem.

    Args:
        mode: fast, full, fifo, backfill or greedy.
        seed: of the chance in fast and full mode; the same seed and iterations give the same plan.
        iterations: steps of local search in fast mode (None for a number that fits the size), of
            neighbourhood search in full mode (None for as many as the time limit allows).
        time_limit: a cap in seconds on the search (full mode: 10 when neither this nor iterations are given).
        bound: whether to prove an upper bound; full mode always does.

    Raises:
        ValueError: for an unknown mode.
        RuntimeError: when the plan breaks a rule, which is a mistake in this package.
    """
    began = perf_counter()
    if mode not in MODES:
        raise ValueError(f"mode: {mode!r}; expected one of {', '.join(MODES)}")
    if mode in BASELINES:
        layout = Layout(problem)
        schedule = BASELINES[mode](layout, build_tasks(layout))
    else:
        fast = mode == "fast"
        steps, cap = (iterations, time_limit) if fast else (None, None)
        schedule = plan_fast(problem, seed, steps, cap)
    plan = finish(schedule, mode)
    if mode == "full":
        from allocator.full import solve_full

        usual = FULL_SECONDS if iterations is None else _CAP_SECONDS
        limit = usual if time_limit is None else time_limit
        better = solve_full(problem, plan, limit, seed, iterations=iterations)
        plan = verified(problem, replace(better, mode="full"))
    elif bound:
        from allocator.bound import upper_bound

        limit = FULL_SECONDS if time_limit is None else time_limit
        plan = replace(plan, bound=max(upper_bound(problem, limit), plan.objective))
    return replace(plan, solve_ms=1000 * (perf_counter() - began))


def finish(schedule: Schedule, mode: str) -> Plan:
    """The plan of a schedule, checked, with its figures, reasons and warnings."""
    problem = schedule.layout.problem
    placements = schedule.placements()
    placed = {placement.job for placement in placements}
    unplaced = tuple(
        [Unplaced(job.id, why_out(problem, job)) for job in problem.jobs if job.id not in placed]
    )
    draft = Plan(
        mode, 0.0, 0.0, None, 0.0, 0.0, placements, schedule.realtime(), unplaced, tuple(warnings(problem))
    )
    return verified(problem, draft)


def verified(problem: Problem, plan: Plan) -> Plan:
    """The plan with its own figures, when it keeps every rule."""
    if broken := broken_rules(problem, plan):
        raise RuntimeError(f"{plan.mode} made a plan that breaks a rule: {'; '.join(broken[:3])}")
    figures = score(problem, plan)
    return replace(plan, objective=figures.objective, value=figures.value, utilization=figures.utilization)


def why_out(problem: Problem, job: Job) -> str:
    """The reason in short, from the job alone; ``explain`` looks at the plan."""
    types = [gpu for gpu in problem.gpu_types if not job.gpu_types or gpu in job.gpu_types]
    if not types:
        return f"no node of type {' or '.join(job.gpu_types)}"
    if job.release >= problem.slots:
        return f"released at slot {job.release}, after the horizon"
    lengths = [choice.slots_on(gpu) for choice in job.choices for gpu in types]
    quickest = min([slots for slots in lengths if slots is not None], default=problem.slots)
    if job.deadline is not None and job.release + quickest > job.deadline:
        return f"cannot end by its deadline, slot {job.deadline}"
    if not problem.open_end and job.release + quickest > problem.slots:
        return f"needs {quickest} slots, does not end within the horizon"
    return "no room beside work that is worth more"


def warnings(problem: Problem) -> list[str]:
    """What went wrong in the cluster and was planned around."""
    found = []
    out: dict[int, list[tuple[int, int]]] = {}
    for hole in problem.unavailable:
        for gpu in hole.gpus:
            out.setdefault(gpu, []).append((hole.start, hole.end))
    now_busy: dict[int, str] = {}
    for job in problem.jobs:
        if job.running is None:
            if job.gpu_types and not any(gpu in job.gpu_types for gpu in problem.gpu_types):
                found.append(f"job {job.id}: no node of type {' or '.join(job.gpu_types)}")
            continue
        first, last = problem.running_window(job)
        if first == 0:
            now_busy.update(dict.fromkeys(job.running.gpus, job.id))
        if job.running.start + problem.running_slots(job) <= 0:
            found.append(f"job {job.id}: running longer than its {problem.running_slots(job)} slots")
        if job.deadline is not None and job.running.start + problem.running_slots(job) > job.deadline:
            found.append(f"job {job.id}: running, will miss its deadline, slot {job.deadline}")
        drained = [g for g in job.running.gpus if any(a < last and first < b for a, b in out.get(g, ()))]
        if drained:
            found.append(f"job {job.id}: running on GPUs {drained} while they are out of service")
    for service in problem.services:
        if isinstance(service.current, tuple):
            failed = [g for g in service.current if any(a <= 0 < b for a, b in out.get(g, ()))]
            clash = [g for g in service.current if g in now_busy and g not in failed]
            if failed:
                found.append(f"service {service.service}: lost GPUs {failed}, out of service")
            if clash:
                found.append(
                    f"service {service.service}: gave up GPUs {clash}, held by job {now_busy[clash[0]]}"
                )
    return found
