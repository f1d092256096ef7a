"""Why a job is not in the plan, who has the GPUs it needs, what would help, and when it could start.

A reason is found by taking constraints away one after another until the job fits: first those that nobody
can help today (GPU types, shape, maintenance, running work, real-time), then one at a time those that
someone could (deadline, type, guarantee, reservation); what is left is room: too narrow, or given to work
that is worth more. So a reason is a fact about this problem and this plan, whichever solver made it. A
remedy is only stated when it was tried (see ``remedies``), and the earliest start has one meaning (see
``earliest``).

The cost: about a millisecond a job at 64 GPUs and more for each remedy, so solvers leave it out. On large
problems the search for places to take over has a budget, and the jobs worth most come first.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from allocator.blockers import Blocker, Board, among, first_place, gpu_names, names
from allocator.displace import EFFORT, Displaced
from allocator.fields import ProblemError
from allocator.picture import plain
from allocator.plan import Placement, Plan, Unplaced
from allocator.problem import Job, Problem
from allocator.remedies import (
    Remedy,
    Scene,
    general,
    larger_guarantee,
    later_deadline,
    open_end,
    other_types,
    smaller_reservation,
    works,
)

CAUSES = {
    "running": "it is at work",
    "started": "it could not start earlier",
    "type": "no GPU type that it accepts is there or free",
    "shape": "wider than any node or group of nodes it accepts",
    "window": "its release, deadline or the horizon leaves too few slots",
    "maintenance": "GPUs it needs are out of service",
    "held": "GPUs it needs are held by running work",
    "realtime": "GPUs it needs are held by services",
    "guarantee": "its tenant's guarantee is used up",
    "reservation": "GPUs it needs are reserved for another tenant",
    "deadline": "there is room, but only after its deadline",
    "too wide": "enough GPUs are free, but not side by side",
    "too long": "enough GPUs are free, but not the same ones for long enough",
    "outbid": "its GPUs go to work that is worth more, or that came first",
    "missed": "there is room, or a better plan with it, and the plan leaves it out",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job is where it is, or nowhere.

    Attributes:
        cause: a key of ``CAUSES``.
        reason: a sentence.
        blockers: who has the GPUs that it needs.
        remedy: a change after which it is placed; None when none was found or sought.
        earliest_start: of an unplaced job, see ``earliest``; of a placed one, its start. None for none.
    """

    job: str
    cause: str
    reason: str
    blockers: tuple[Blocker, ...] = ()
    remedy: Remedy | None = None
    earliest_start: int | None = None


def explain(
    problem: Problem,
    plan: Plan,
    *,
    jobs: Iterable[str] | None = None,
    remedies: bool = True,
    effort: int = EFFORT,
) -> tuple[Explanation, ...]:
    """Explain jobs, in the order of the problem.

    Args:
        jobs: their ids; all when absent.
        remedies: whether to look for remedies of unplaced jobs, each a solve or more.
        effort: cells to look at in search of places that jobs could take over.

    Raises:
        ProblemError: for an id that is not in the problem.
    """
    chosen = None if jobs is None else set(jobs)
    for name in chosen or ():
        if name not in problem.job_by_id:
            raise ProblemError(
                f"job {name}: no such job; expected one of the {len(problem.jobs)} in the problem"
            )
    scene = Scene(problem, plan, effort)
    wanted = [job for job in problem.jobs if chosen is None or job.id in chosen]
    out = sorted((job for job in wanted if job.id not in scene.placed), key=lambda job: -problem.worth(job))
    found: dict[str, Explanation] = {}
    for job in out:  # those worth most first: the effort is theirs
        found[job.id] = _unplaced(scene, job, remedies)
    for job in wanted:
        if job.id in scene.placed:
            found[job.id] = _placed(scene, job, scene.placed[job.id])
    return tuple(found[job.id] for job in wanted)


def with_reasons(problem: Problem, plan: Plan, *, effort: int = EFFORT) -> Plan:
    """The plan, with the reason and the earliest start of each unplaced job filled in."""
    placed = {placement.job for placement in plan.placements}
    out = [job.id for job in problem.jobs if job.id not in placed]
    found = explain(problem, plan, jobs=out, remedies=False, effort=effort)
    return replace(
        plan, unplaced=tuple(Unplaced(entry.job, entry.reason, entry.earliest_start) for entry in found)
    )


# Jobs in the plan


def _placed(scene: Scene, job: Job, placement: Placement) -> Explanation:
    start = placement.start

    def because(cause: str, reason: str, blockers: tuple[Blocker, ...] = ()) -> Explanation:
        return Explanation(job.id, cause, reason, blockers, None, start)

    if job.running is not None:
        when = f"since slot {start}" if start <= 0 else f"committed to slot {start}"
        return because("running", f"at work {when} on {gpu_names(placement.gpus)}")
    if start <= max(job.release, 0):
        return because(
            "started", "starts now" if start == 0 else f"starts when it is released, at slot {start}"
        )
    board = scene.board
    own = board.layout.cells(placement.gpus, start, placement.end)
    place = first_place(board, job, also_free=own, without=job)
    if place is not None and place.start < start:
        where = f"{gpu_names(place.gpus)} from slot {place.start}"
        return because("missed", f"could start earlier, on {where}, if nothing else moved")
    before = board.layout.cells(placement.gpus, start - 1, start)
    blockers = board.blockers(before)
    if blockers:
        width = len(placement.gpus)
        return because(
            "started",
            f"before slot {start} {among(blockers)}, and no other {width} GPUs are free together",
            blockers,
        )
    return because(
        "started", f"before slot {start} no {len(placement.gpus)} GPUs are open to it for long enough"
    )


# Jobs that are out


def _unplaced(scene: Scene, job: Job, remedies: bool) -> Explanation:
    finding = _impossible(scene, job) or _avoidable(scene, job) or _crowded(scene, job)
    earliest = scene.earliest(job)
    remedy = None
    if remedies:
        for candidate in (*finding.remedies(), *general(scene, job, earliest)):
            if works(scene, job, candidate.settings):
                remedy = candidate
                break
    return Explanation(job.id, finding.cause, finding.reason, finding.blockers, remedy, earliest)


@dataclass(frozen=True, slots=True)
class _Finding:
    cause: str
    reason: str
    blockers: tuple[Blocker, ...] = ()
    remedies: Callable[[], list[Remedy]] = list


def _impossible(scene: Scene, job: Job) -> _Finding | None:
    """What keeps the job out even of a cluster without other new work."""
    board = scene.board
    if not board.options(job):
        return _no_option(scene, job)
    gpus = " or ".join(str(choice.gpus) for choice in job.choices)
    layers = (
        ("maintenance", board.out, "out of service"),
        ("held", board.out | board.running, "running work"),
        ("realtime", board.out | board.running | board.services, "real-time services"),
    )
    last = first_place(board, job, free=board.layout.all, quota=False)
    for cause, taken, what in layers:
        place = first_place(board, job, free=board.layout.all & ~taken, quota=False)
        if place is None:
            assert last is not None
            blockers = board.blockers(last.block & taken)
            return _Finding(
                cause,
                f"no {gpus} GPUs together are left for long enough by {what}: {among(blockers)}"
                if cause != "maintenance"
                else f"too few GPUs are in service for long enough: {among(blockers)}",
                blockers,
            )
        last = place
    if board.quota and first_place(board, job, free=board.hard_free, planned=False) is None:
        return _by_quota(scene, job, planned=False)
    return None


def _no_option(scene: Scene, job: Job) -> _Finding:
    problem, board = scene.problem, scene.board
    types = sorted({node.gpu for node in problem.nodes if node.gpu})
    if not any(
        problem.accepts(job, node) and choice.slots_on(node.gpu) is not None
        for node in problem.nodes
        for choice in job.choices
    ):
        asked = job.gpu_types or tuple(
            name for c in job.choices if not isinstance(c.slots, int) for name, _ in c.slots
        )
        return _Finding(
            "type",
            f"needs a GPU of type {' or '.join(dict.fromkeys(asked))}; the cluster has "
            f"{' and '.join(types) or 'no types'}",
            remedies=lambda: other_types(job, types),
        )
    lasting = replace(job, deadline=None, release=0)
    if not board.options(lasting):
        if board.options(lasting, shape_only=True):
            return _Finding(
                "window",
                f"needs {_shortest(problem, job)} slots, and the plan ends at slot {problem.slots}",
                remedies=open_end,
            )
        widths = " or ".join(str(choice.gpus) for choice in job.choices)
        nodes = [node for node in problem.nodes if problem.accepts(job, node)]
        sizes = " or ".join(str(size) for size in sorted({node.gpus for node in nodes}))
        return _Finding(
            "shape",
            f"{widths} GPUs fit no node that it accepts ({sizes} GPUs each), "
            "nor whole nodes of one type and domain",
        )
    if job.release >= problem.slots:
        return _Finding(
            "window", f"released at slot {job.release}, and the plan ends at slot {problem.slots}"
        )
    if job.deadline is not None and board.options(replace(job, deadline=None)):
        return _Finding(
            "window",
            f"needs {_shortest(problem, job)} slots from slot {job.release} on, "
            f"and its deadline is slot {job.deadline}",
            remedies=lambda: later_deadline(scene, job),
        )
    return _Finding(
        "window",
        f"needs {_shortest(problem, job)} slots from slot {job.release} on, "
        f"and the plan ends at slot {problem.slots}",
        remedies=open_end,
    )


def _avoidable(scene: Scene, job: Job) -> _Finding | None:
    """A constraint that somebody could lift: without it the job fits beside the plan as it is."""
    problem, board = scene.problem, scene.board
    place = first_place(board, job)
    if place is not None:
        where = f"{gpu_names(place.gpus)} from slot {place.start}"
        return _Finding("missed", f"{where} are free for it, and {scene.plan.mode} mode leaves them idle")
    if board.quota and first_place(board, job, quota=False) is not None:
        return _by_quota(scene, job, planned=True)
    if job.deadline is not None and (place := first_place(board, replace(job, deadline=None))):
        text = (
            f"the first free for long enough: {gpu_names(place.gpus)}, slots {place.start} to {place.end}, "
            f"after its deadline, slot {job.deadline}"
        )
        displaced = scene.search.cheapest(job)
        if displaced is not None:
            text += f"; {_best(displaced)} goes to {names(displaced.blockers)}"
        return _Finding(
            "deadline",
            text,
            displaced.blockers if displaced is not None else (),
            remedies=lambda: later_deadline(scene, job),
        )
    if job.gpu_types and (place := first_place(board, replace(job, gpu_types=()))):
        gpu = problem.nodes[problem.node_of[place.gpus[0]]].gpu
        return _Finding(
            "type",
            f"{gpu_names(place.gpus)} of type {gpu} are free from slot {place.start}, "
            f"and it accepts only {' or '.join(job.gpu_types)}",
            remedies=lambda: other_types(job, sorted({n.gpu for n in problem.nodes if n.gpu})),
        )
    unused = board.out & ~(board.running | board.services | board.planned)
    if unused and (place := first_place(board, job, also_free=unused)):
        blockers = board.blockers(place.block & board.out)
        return _Finding("maintenance", f"would fit, but {among(blockers)}", blockers)
    return None


def _by_quota(scene: Scene, job: Job, planned: bool) -> _Finding:
    """Which rule of tenants or reservations keeps it out, and who uses what it would need."""
    problem, board = scene.problem, scene.board
    tenant = next((entry for entry in problem.tenants if entry.name == job.tenant), None)
    without = Board(replace(problem, tenants=()), scene.plan) if problem.tenants else board
    free = board.free if planned else board.hard_free
    place = first_place(without, job, free=free, planned=planned)
    if problem.tenants and place is not None:
        users = tuple(
            blocker
            for blocker in board.holders(place.start, place.end)
            if (planned or problem.job_by_id[blocker.name].running is not None)
            and _same_share(problem, problem.job_by_id[blocker.name], job)
        )
        if tenant is None:
            limit = problem.total_gpus - sum(entry.gpus for entry in problem.tenants)
            whose = f"{limit} GPUs are guaranteed to no tenant"
        else:
            whose = f"tenant {tenant.name} is guaranteed {tenant.gpus} GPUs"
        text = f"{whose}, which would be exceeded"
        if users:
            text += f" beside {names(users)}"
        elif tenant is not None and place.option.gpus > tenant.gpus:
            text = f"needs {place.option.gpus} GPUs for {place.option.slots} slots; {whose}, and it may "
            text += f"borrow for {tenant.borrow_slots} slots" if tenant.borrow_slots else "not borrow"
        share = tenant
        return _Finding("guarantee", text, users, remedies=lambda: larger_guarantee(scene, job, share, place))
    held = [kept for kept in problem.reservations if kept.tenant != job.tenant]
    told = " and ".join(
        f"{kept.gpus} GPUs in slots {kept.start} to {kept.end} for {kept.tenant}" for kept in held
    )
    return _Finding(
        "reservation",
        f"free GPUs are reserved: {told}",
        remedies=lambda: smaller_reservation(scene, job),
    )


def _same_share(problem: Problem, user: Job, job: Job) -> bool:
    guaranteed = {entry.name for entry in problem.tenants}
    if job.tenant in guaranteed:
        return user.tenant == job.tenant
    return user.tenant not in guaranteed


def _crowded(scene: Scene, job: Job) -> _Finding:
    """There is no room: too narrow, or taken by others."""
    problem, board = scene.problem, scene.board
    displaced = scene.search.cheapest(job)
    lots = board.lots_of_room(job)
    if displaced is None:
        if lots is not None:
            return _Finding(*lots)
        return _Finding("outbid", f"no room for it beside the {len(scene.placed)} jobs of the plan")
    mine = problem.worth(job) * displaced.share + displaced.saved
    best, taken = _best(displaced), names(displaced.blockers)
    if lots is not None:
        return _Finding(lots[0], f"{lots[1]}; {best} goes to {taken}", displaced.blockers)
    if mine > displaced.cost + 1e-9:
        return _Finding(
            "missed",
            f"{best} goes to {taken}; it is worth more, {plain(mine)}, but {scene.plan.mode} mode kept them",
            displaced.blockers,
        )
    return _Finding("outbid", f"{best} goes to {taken}; it is worth {plain(mine)}", displaced.blockers)


def _best(displaced: Displaced) -> str:
    place = displaced.place
    return f"its best place, {gpu_names(place.gpus)} in slots {place.start} to {place.end},"


def _shortest(problem: Problem, job: Job) -> int:
    return min(
        slots
        for choice in job.choices
        for node in problem.nodes
        if problem.accepts(job, node) and (slots := choice.slots_on(node.gpu)) is not None
    )
