"""Where jobs and services are while full mode searches, and the ways to plans, schedules and counts.

A state names no jobs: of jobs that differ only in worth, the most valuable are in and start first, so a
search need not try them one by one. The invariant: of each group no more jobs are in than it has.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from allocator.check import broken_rules
from allocator.levels import set_count
from allocator.plan import Placement, Plan, ServicePlan
from allocator.realtime import Held
from allocator.relaxation import Relaxation
from allocator.schedule import Schedule

Block = tuple[int, tuple[int, ...]]  # a spot, and the first GPUs of the blocks there


@dataclass(slots=True)
class State:
    """Where jobs are, by group and not by name, and the GPUs that services hold in each slot, as masks."""

    jobs: list[Block] = field(default_factory=list)
    held: dict[str, list[int]] = field(default_factory=dict)

    def worth(self, relaxation: Relaxation) -> float:
        """The objective, with the most valuable jobs of each group in."""
        total = relaxation.constant
        counts = [0] * len(relaxation.groups)
        for at, _ in self.jobs:
            spot = relaxation.spots[at]
            counts[spot.group] += 1
            total += relaxation.gain(spot)
        for group, count in zip(relaxation.groups, counts, strict=True):
            total += sum([relaxation.tasks[task].worth for task in group.tasks[:count]])
        for s in relaxation.services:
            unit = s.service.gpus_per_replica
            for slot, mask in enumerate(self.held[s.service.service]):
                total += float(relaxation.objective[s.total[slot][: mask.bit_count() // unit]].sum())
        return total

    def free(self, relaxation: Relaxation, without: Iterable[int] = ()) -> int:
        """The cells that nobody takes when the jobs at some positions of the list are out."""
        layout, free = relaxation.layout, relaxation.layout.free
        for masks in self.held.values():
            for slot, mask in enumerate(masks):
                free &= ~(mask << (slot * layout.gpus))
        out = set(without)
        for position, block in enumerate(self.jobs):
            if position not in out:
                free &= ~job_cells(relaxation, block)
        return free

    def values(self, relaxation: Relaxation) -> dict[int, int]:
        """The state as values of the relaxation's variables, those that are not 0."""
        values: dict[int, int] = {}
        counts = [0] * len(relaxation.groups)
        for at, firsts in self.jobs:
            spot = relaxation.spots[at]
            for first in firsts:
                column = relaxation.column_at(at, first)
                values[column] = values.get(column, 0) + 1
            if spot.gang >= 0:
                values[spot.gang] = values.get(spot.gang, 0) + 1
            counts[spot.group] += 1
        for group, count in zip(relaxation.groups, counts, strict=True):
            values.update(dict.fromkeys(group.chosen[:count], 1))
        for s in relaxation.services:
            unit = s.service.gpus_per_replica
            for slot, mask in enumerate(self.held[s.service.service]):
                set_count(relaxation, values, s.total[slot], mask.bit_count() // unit)
                if len(relaxation.classes) > 1:
                    for stack, inside in zip(s.levels[slot], relaxation.classes, strict=True):
                        set_count(relaxation, values, stack, (mask & inside).bit_count() // unit)
        relaxation.complete(values)
        return values


def state_of(relaxation: Relaxation, plan: Plan) -> State:
    """The state that a plan is in."""
    group_of = {
        relaxation.tasks[task].job.id: at for at, g in enumerate(relaxation.groups) for task in g.tasks
    }
    jobs: list[Block] = []
    for p in plan.placements:
        if p.job in group_of:
            at = next(
                at
                for at in relaxation.spots_at(group_of[p.job], p.start)
                if (spot := relaxation.spots[at]).end == p.end
                and spot.piece * spot.pieces == len(p.gpus)
                and spot.where >> p.gpus[0] & 1
            )
            jobs.append((at, p.gpus[:: relaxation.spots[at].piece]))
    rows = {row.service: row for row in plan.realtime}
    held = {
        s.service: [sum(1 << gpu for gpu in gpus) for gpus in rows[s.service].gpus]
        for s in relaxation.problem.services
    }
    return State(jobs, held)


def plan_of(relaxation: Relaxation, state: State) -> tuple[tuple[Placement, ...], tuple[ServicePlan, ...]]:
    """Placements, running jobs included, and services; of each group the most valuable jobs start first."""
    problem = relaxation.problem
    found = [
        Placement(job.id, job.running.start, problem.running_slots(job), tuple(sorted(job.running.gpus)))
        for job in problem.jobs
        if job.running is not None
    ]
    starts: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}
    for at, firsts in state.jobs:
        spot = relaxation.spots[at]
        gpus = tuple([gpu for first in sorted(firsts) for gpu in range(first, first + spot.piece)])
        starts.setdefault(spot.group, []).append((spot.start, spot.end - spot.start, gpus))
    for group, places_taken in starts.items():
        tasks = relaxation.groups[group].tasks[: len(places_taken)]
        for task, (start, slots, gpus) in zip(tasks, sorted(places_taken), strict=True):
            found.append(Placement(relaxation.tasks[task].job.id, start, slots, gpus))
    found.sort(key=lambda placement: (placement.start, placement.gpus))
    services = []
    for service in problem.services:
        masks = state.held[service.service]
        services.append(
            ServicePlan(
                service.service,
                tuple(tuple(bits(mask)) for mask in masks),
                tuple(service.shortage(slot, mask.bit_count()) for slot, mask in enumerate(masks)),
            )
        )
    return tuple(found), tuple(services)


def schedule_of(relaxation: Relaxation, state: State) -> Schedule:
    """The state as a schedule, which fast mode's searches work on; of each group the most valuable start
    first."""
    layout = relaxation.layout
    held = [
        Held(service, state.held[service.service], layout, True) for service in relaxation.problem.services
    ]
    schedule = Schedule(layout, relaxation.tasks, held)
    count = [0] * len(relaxation.groups)
    for block in sorted(state.jobs, key=lambda block: relaxation.spots[block[0]].start):
        spot = relaxation.spots[block[0]]
        task = relaxation.tasks[relaxation.groups[spot.group].tasks[count[spot.group]]]
        count[spot.group] += 1
        schedule.packing.put(task, spot.option, spot.start, job_cells(relaxation, block))
    return schedule


def state_of_schedule(relaxation: Relaxation, schedule: Schedule) -> State:
    """The state that a schedule is in."""
    layout, packing = relaxation.layout, schedule.packing
    jobs: list[Block] = []
    for task in relaxation.tasks:
        block = packing.cells[task.index]
        if block:
            start, option = packing.start[task.index], packing.option[task.index]
            row = (block >> (start * layout.gpus)) & layout.row
            first = (row & -row).bit_length() - 1
            at = next(
                at
                for at in relaxation.spots_at(relaxation.group_of[task.index], start)
                if (spot := relaxation.spots[at]).option is option and spot.where >> first & 1
            )
            firsts = tuple(bits(row)[:: spot.piece]) if spot.pieces > 1 else (first,)
            jobs.append((at, firsts))
    return State(jobs, {held.service.service: list(held.rows) for held in schedule.held})


def keeps_rules(relaxation: Relaxation, state: State) -> bool:
    """Whether the plan of a state keeps every rule, as ``check`` sees it."""
    placements, services = plan_of(relaxation, state)
    draft = Plan("full", 0.0, 0.0, None, 0.0, 0.0, placements, services)
    return not broken_rules(relaxation.problem, draft)


def job_cells(relaxation: Relaxation, block: Block) -> int:
    at, firsts = block
    spot = relaxation.spots[at]
    base, cells = spot.start * relaxation.layout.gpus, 0
    for first in firsts:
        cells |= spot.option.shape << (base + first)
    return cells


def bits(mask: int) -> list[int]:
    """The positions of the bits that are set, in rising order."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
