"""The earliest start that a job left out would get if nothing planned moved and nothing else came.

``forced`` says what that means: the problem in which everything planned is committed, services go on with
what they hold last, and one job is left to place, as far beyond the horizon as it takes. Solving it in any
mode starts the job at its earliest start. The cost of the choice: a job that could come in earlier by
moving others without loss is told a later slot.
"""

from collections.abc import Iterable
from dataclasses import replace

from allocator.blockers import Board, first_place, slots_of
from allocator.plan import Placement, Plan
from allocator.problem import Choice, Hole, Job, Problem, Running

MOST_CELLS = 1 << 24  # of the time until a release that has rows of its own: half a year of 512 GPUs


def forced(problem: Problem, plan: Plan, job: Job) -> Problem:
    """The problem in which everything that is planned is committed and this job alone is left to place."""
    future = _future(problem, plan, (job,), job.release + 1)
    return replace(future, jobs=(*future.jobs, replace(job, announced=None)))


def _future(problem: Problem, plan: Plan, jobs: tuple[Job, ...], most: int) -> Problem:
    """What is planned, committed, services as they are last held, and time enough for any of the jobs.

    Releases later than `most` slots add no time.
    """
    spans = [problem.slots, *[job.release + 1 for job in jobs if job.release < most]]
    committed = []
    for placement in plan.placements:
        told = problem.job_by_id[placement.job]
        if told.running is None:
            told = Job(
                id=told.id,
                choices=(Choice(len(placement.gpus), placement.slots),),
                kind=told.kind,
                priority=told.priority,
                tenant=told.tenant,
                running=Running(placement.start, placement.gpus),
            )
        committed.append(told)
        spans.append(placement.end)
    far = 4 * problem.slots  # what ends later than that is taken to last
    spans += [hole.end for hole in problem.unavailable if hole.end <= far]
    spans += [kept.end for kept in problem.reservations if kept.end <= far]
    longest = max((slots for job in jobs for choice in job.choices for slots in slots_of(choice)), default=1)
    horizon = max(spans) + longest
    return replace(
        problem,
        slots=horizon,
        jobs=tuple(committed),
        services=(),
        unavailable=(*problem.unavailable, *_serving(problem, plan, horizon)),
        open_end=False,
        move_cost=0,
    )


def _serving(problem: Problem, plan: Plan, horizon: int) -> Iterable[Hole]:
    """What services hold, as GPUs that nobody else can have."""
    for service in plan.realtime:
        begin = 0
        for slot in range(1, problem.slots + 1):
            if slot == problem.slots or service.gpus[slot] != service.gpus[begin]:
                if service.gpus[begin]:
                    yield Hole(service.gpus[begin], begin, horizon if slot == problem.slots else slot)
                begin = slot


def future_board(problem: Problem, plan: Plan, jobs: Iterable[Job]) -> Board:
    """The board of ``forced`` without its last job, good for all of these jobs."""
    future = _future(problem, plan, tuple(jobs), MOST_CELLS // problem.total_gpus)
    return Board(future, _nothing(future))


def earliest_start(board: Board, job: Job) -> int | None:
    """The earliest start on a board of ``future_board``; None when its deadline or shape allows none.

    A job may be released years from now: then it is placed at the end of a board that has no row for every
    slot until then, and told so much later.
    """
    settled = board.layout.horizon - max((s for c in job.choices for s in slots_of(c)), default=1)
    late = max(job.release - settled, 0)
    if late:
        deadline = None if job.deadline is None else job.deadline - late
        job = replace(job, release=job.release - late, deadline=deadline)
    place = first_place(board, job, planned=False)
    return None if place is None else place.start + late


def _nothing(problem: Problem) -> Plan:
    """The plan of a forced problem before its last job is placed."""
    at_work = tuple(
        Placement(job.id, job.running.start, problem.running_slots(job), job.running.gpus)
        for job in problem.jobs
        if job.running is not None
    )
    return Plan("forced", 0, 0, None, 0, 0, at_work)
