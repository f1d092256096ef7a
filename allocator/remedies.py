"""What would place a job that was left out: changes to the problem, each tried before it is stated.

A candidate is a few settings for ``what_if.change``. It is a remedy when the changed problem, solved as the
plan was, has the job in it. A plan of full mode with a bound is not solved again where only the job
changes: the plans without it, and the bound on them, stay what they were, so a plan with the job that is
worth more than the bound shows that the best plan has it.

The cost: a solve for each candidate; so the likeliest come first.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from allocator.blockers import Board, Place, first_place
from allocator.check import broken_rules, score
from allocator.displace import EFFORT, Displaced, Search
from allocator.earliest import earliest_start, future_board
from allocator.fields import ProblemError
from allocator.picture import plain
from allocator.plan import Placement, Plan
from allocator.problem import Job, Problem, Tenant
from allocator.what_if import Setting, change


@dataclass(frozen=True, slots=True)
class Remedy:
    """What places a job: settings for ``change``, and the same in words."""

    settings: tuple[Setting, ...]
    text: str

    @property
    def options(self) -> str:
        """As options of ``python -m allocator what-if``."""
        import shlex

        return " ".join(f"--set {shlex.quote(str(setting))}" for setting in self.settings)


class Scene:
    """A problem and its plan, and what is worked out once for all jobs."""

    def __init__(self, problem: Problem, plan: Plan, effort: int) -> None:
        self.problem = problem
        self.plan = plan
        self.board = Board(problem, plan)
        self.search = Search(self.board, effort)
        self.placed = {placement.job: placement for placement in plan.placements}
        self._future: Board | None = None

    def earliest(self, job: Job) -> int | None:
        """The earliest start, see ``earliest``; one board does for all jobs that are out."""
        if self._future is None:
            out = [entry for entry in self.problem.jobs if entry.id not in self.placed]
            self._future = future_board(self.problem, self.plan, out)
        return earliest_start(self._future, job)


def works(scene: Scene, job: Job, settings: tuple[Setting, ...]) -> bool:
    """Whether the changed problem, solved as the plan was, has the job in it."""
    from allocator import solve

    try:
        changed = change(scene.problem, settings=settings)
    except ProblemError:
        return False
    plan = scene.plan
    if plan.mode == "full" and plan.bound is not None:
        if all(setting.path.startswith(f"{job.id}.") for setting in settings):
            return _beats_all_without(scene, changed, job, plan.bound)
        again = solve(changed, "full", time_limit=2.0)
    else:
        again = solve(changed, plan.mode)
    return any(placement.job == job.id for placement in again.placements)


def _beats_all_without(scene: Scene, changed: Problem, job: Job, bound: float) -> bool:
    """Whether some plan with the job is better than the bound, which holds for all plans without it.

    Only the job itself was changed, so the plans without it and their bound are what they were.
    """
    altered = changed.job_by_id[job.id]
    board = Board(changed, scene.plan)
    place = first_place(board, altered)
    gone: frozenset[str] = frozenset()
    if place is None:
        displaced = Search(board, EFFORT).cheapest(altered)
        if displaced is None:
            return False
        place, gone = displaced.place, frozenset(blocker.name for blocker in displaced.blockers)
    placements = [p for p in scene.plan.placements if p.job not in gone]
    placements.append(Placement(job.id, place.start, place.option.slots, place.gpus))
    witness = replace(scene.plan, placements=tuple(placements), unplaced=())
    return not broken_rules(changed, witness) and score(changed, witness).objective > bound + 1e-6


def more_worth(scene: Scene, job: Job, displaced: Displaced) -> list[Remedy]:
    """Worth enough to take over the cheapest place: as priority, or as value where that is given."""
    problem, plan = scene.problem, scene.plan
    ageing = (
        problem.worth(job) / job.full_value if job.full_value else 1 + problem.ageing_per_slot * job.waited
    )
    gap = max(0.0, plan.bound - plan.objective) if plan.bound is not None else 0.0
    needed = (displaced.cost + gap - displaced.saved) / displaced.share / ageing
    needed = max(needed, job.full_value)
    cells = job.choices[0].gpus * job.choices[0].first_slots
    found = []
    for factor in (1.0, 1.25, 1.6, 2.5, 4.0):
        if job.value is not None:
            value = int(needed * factor) + 1
            text = f"raise its value from {plain(job.value)} to {value}"
            found.append(Remedy((Setting(f"{job.id}.value", value),), text))
        else:
            priority = int(needed * factor / cells) + 1
            text = f"raise its priority from {plain(job.priority)} to {priority}"
            found.append(Remedy((Setting(f"{job.id}.priority", priority),), text))
    return found


def open_end() -> list[Remedy]:
    return [Remedy((Setting("open_end", True),), "let jobs end after the horizon")]


def later_deadline(scene: Scene, job: Job) -> list[Remedy]:
    place = first_place(scene.board, replace(job, deadline=None))
    if place is None:
        return []
    return [Remedy((Setting(f"{job.id}.deadline", place.end),), f"move its deadline to slot {place.end}")]


def other_types(job: Job, types: list[str]) -> list[Remedy]:
    settings: list[Setting] = []
    if job.gpu_types:
        settings.append(Setting(f"{job.id}.gpu_types", None))
    if len(job.choices) == 1 and not isinstance(job.choices[0].slots, int):
        slots = dict(job.choices[0].slots)
        longest = max(slots.values())
        settings.append(
            Setting(f"{job.id}.slots", slots | {name: longest for name in types if name not in slots})
        )
    return [Remedy(tuple(settings), f"let it run on {' and '.join(types) or 'any GPU'}")] if settings else []


def larger_guarantee(scene: Scene, job: Job, tenant: Tenant | None, place: Place | None) -> list[Remedy]:
    if tenant is None or place is None:
        return []
    problem = scene.problem
    room = problem.total_gpus - sum(entry.gpus for entry in problem.tenants)
    larger = [
        Remedy(
            (Setting(f"tenants.{tenant.name}.gpus", gpus),),
            f"raise {tenant.name}'s guarantee from {tenant.gpus} to {gpus} GPUs",
        )
        for gpus in sorted({min(tenant.gpus + place.option.gpus, tenant.gpus + room), tenant.gpus + room})
        if gpus > tenant.gpus
    ]
    slots = place.option.slots
    longer = Remedy(
        (Setting(f"tenants.{tenant.name}.borrow_slots", slots),),
        f"let {tenant.name} borrow for {slots} slots instead of {tenant.borrow_slots}",
    )
    return [*larger, longer]


def smaller_reservation(scene: Scene, job: Job) -> list[Remedy]:
    """Each reservation of others, reduced by what the job would take, or gone."""
    problem = scene.problem
    width = min(choice.gpus for choice in job.choices)
    found = []
    entries: list[dict[str, Any]] = problem.to_dict().get("reservations", [])
    for at, kept in enumerate(problem.reservations):
        if kept.tenant == job.tenant:
            continue
        what = f"the reservation of {kept.gpus} GPUs for {kept.tenant}"
        if kept.gpus > width:
            smaller = Setting(f"reservations.{at}.gpus", kept.gpus - width)
            found.append(Remedy((smaller,), f"reduce {what} to {kept.gpus - width}"))
        rest = Setting("reservations", [entry for k, entry in enumerate(entries) if k != at])
        found.append(Remedy((rest,), f"give up {what}"))
    return found


def general(scene: Scene, job: Job, earliest: int | None) -> Iterable[Remedy]:
    """What may help whatever the cause: more worth, more time, fewer GPUs for longer."""
    displaced = scene.search.cheapest(job)
    if displaced is not None:
        yield from more_worth(scene, job, displaced)
    if job.deadline is not None:
        yield from later_deadline(scene, job)
    narrower = _narrower(scene.problem, job)
    if narrower is not None:
        yield narrower
    if job.deadline is not None and displaced is None:
        freed = replace(job, deadline=None)
        displaced = scene.search.cheapest(freed)
        if displaced is not None:
            no_deadline = Setting(f"{job.id}.deadline", None)
            for remedy in more_worth(scene, freed, displaced):
                yield Remedy((no_deadline, *remedy.settings), f"drop its deadline and {remedy.text}")


def _narrower(problem: Problem, job: Job) -> Remedy | None:
    """Also accept half the GPUs (or the widest node's) for as much longer."""
    first = job.choices[0]
    widest = max((node.gpus for node in problem.nodes if problem.accepts(job, node)), default=0)
    gpus = min(first.gpus // 2, widest)
    if gpus < 1 or any(choice.gpus == gpus for choice in job.choices):
        return None
    factor = first.gpus / gpus
    entries = next(entry for entry in problem.to_dict()["jobs"] if entry["id"] == job.id)
    choices = entries.get("choices") or [{"gpus": entries["gpus"], "slots": entries["slots"]}]
    slots: int | dict[str, int]
    if isinstance(first.slots, int):
        slots = -int(-first.slots * factor // 1)
    else:
        slots = {name: -int(-count * factor // 1) for name, count in first.slots}
    settings = [Setting(f"{job.id}.choices", [*choices, {"gpus": gpus, "slots": slots}])]
    if "choices" not in entries:
        settings += [Setting(f"{job.id}.gpus", None), Setting(f"{job.id}.slots", None)]
    longest = slots if isinstance(slots, int) else max(slots.values())
    return Remedy(tuple(settings), f"also accept {gpus} GPUs for {longest} slots")
