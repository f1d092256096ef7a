"""Local search on a schedule: make room for a job that is out by taking others out, and put back what fits.

A step picks a job that is out and, of a few chance places for it, the one where the least worth stands in
the way. What stands there is taken out and finds new places where it can; then all others that are out try
the gaps. The step stands when the plan is worth no less than before: equal ones are kept because they walk
off plateaus. Now and then the place may be one that a service holds: then the service is given other GPUs,
or fewer when the job is worth more than what the service lacks, as with a narrow burst in the way of a
long wide job.

The invariant: the schedule is never worth less than when it came in. The cost of the choice: chance; the
same seed gives the same plan. The budget grows while steps succeed, so an easy problem costs little.
"""

from __future__ import annotations

from random import Random
from time import perf_counter

from allocator.grid import Option, Task
from allocator.packing import HIGH, LOW, places
from allocator.realtime import Held, hold
from allocator.schedule import Schedule

_CANDIDATES = 5  # places looked at in a step
_PATIENCE = 4  # a step that succeeds earns this many more, up to ...
_MOST = 8  # ... so many times the steps asked for
_SERVICE_SHARE = 0.35  # how often the place may be one that a service holds
_HOPE = 1.5  # what stands in a service's place may be worth so much more than the job: it may find others


def improve(
    schedule: Schedule, steps: int, rng: Random, until: float | None = None, *, adaptive: bool = True
) -> Schedule:
    """Take steps until the budget or the time is spent, or all jobs are in.

    Args:
        steps: budget; with ``adaptive``, success earns more.
        until: moment (of ``perf_counter``) after which no step is begun.
    """
    search = _Search(schedule, rng)
    left, cap = steps, _MOST * steps if adaptive else steps
    while left > 0 and cap > 0 and search.out and (until is None or perf_counter() < until):
        left -= 1
        cap -= 1
        if search.step() and adaptive:
            left += _PATIENCE
    return search.schedule


class _Search:
    """The schedule, which jobs are out, and where each could stand were it alone."""

    def __init__(self, schedule: Schedule, rng: Random) -> None:
        self.schedule = schedule
        self.random = rng.random
        self._sort_jobs()
        base = schedule.packing.free
        for task in self.inside:
            base |= schedule.packing.cells[task.index]
        self.base = base
        self.spots: dict[Option, int] = {}  # where no service stands
        self.all_spots: dict[Option, int] = {}
        penalties = [held.service.penalty for held in schedule.held if held.cells]
        self.least_penalty = min(penalties, default=0.0)

    def _sort_jobs(self) -> None:
        cells = self.schedule.packing.cells
        self.out = [task for task in self.schedule.tasks if not cells[task.index]]
        self.inside = [task for task in self.schedule.tasks if cells[task.index]]

    def step(self) -> bool:
        """One step; whether the schedule is worth more than before."""
        random, out = self.random, self.out
        task, other = out[int(random() * len(out))], out[int(random() * len(out))]
        if other.density > task.density:
            task = other
        option = task.options[0]
        if len(task.options) > 1:
            option = task.options[int(random() * len(task.options))]
        move_service = self.least_penalty > 0 and random() < _SERVICE_SHARE
        if option.gang:
            return self._step_gang(task, option, move_service)
        where = self._where(option, move_service)
        if not where and self.least_penalty > 0 and not move_service:
            move_service = True  # only services keep it out everywhere
            where = self._where(option, True)
        if not where:
            return False
        victims, at, loss = self._best_place(option, where, move_service)
        block = option.shape << at
        if not move_service or not block & self._service_cells():
            return self._try(task, option, at // self.schedule.layout.gpus, block, victims)
        if loss >= _HOPE * task.worth:
            return False
        return self._try_past_services(task, option, at // self.schedule.layout.gpus, block, victims)

    def _where(self, option: Option, move_service: bool) -> int:
        known = self.all_spots if move_service else self.spots
        where = known.get(option)
        if where is None:
            base = self.base
            if move_service:
                base |= self._service_cells()
            where = known[option] = places(option, base)
        return where

    def _service_cells(self) -> int:
        cells = 0
        for held in self.schedule.held:
            cells |= held.cells
        return cells

    def _best_place(self, option: Option, where: int, move_service: bool) -> tuple[list[Task], int, float]:
        """Of some chance places the one with least worth in the way: those jobs, the first cell, the loss."""
        random, cells, inside = self.random, self.schedule.packing.cells, self.inside
        size, least = where.bit_length(), -1.0
        for _ in range(_CANDIDATES):
            at = int(random() * size)
            rest = where >> at
            at += (rest & -rest).bit_length() - 1
            block = option.shape << at
            standing = [task for task in inside if cells[task.index] & block]
            loss = 0.0
            for task in standing:
                loss += task.worth
            if move_service:
                loss += self._shortage_for(block, standing)
            if least < 0 or loss < least:
                least, victims, chosen = loss, standing, at
                if not loss:
                    break
        return victims, chosen, least

    def _shortage_for(self, block: int, standing: list[Task]) -> float:
        """Cost of what services would lack, at least, with a job here and the cells of its victims idle."""
        schedule = self.schedule
        stride, row = schedule.layout.gpus, schedule.layout.row
        idle = schedule.packing.free
        for task in standing:
            idle |= schedule.packing.cells[task.index]
        idle &= ~block
        cost = 0.0
        for held in schedule.held:
            taken = held.cells & block
            while taken:
                slot = ((taken & -taken).bit_length() - 1) // stride
                shift = slot * stride
                lost = ((taken >> shift) & row).bit_count()
                left = held.counts[slot] - max(0, lost - ((idle >> shift) & row).bit_count())
                cost += held.service.penalty * (held.service.shortage(slot, left) - held.missing[slot])
                taken = taken >> (shift + stride) << (shift + stride)
        return cost

    def _step_gang(self, task: Task, option: Option, move_service: bool) -> bool:
        """A gang: clear the first slots of a chance group, as many nodes as it takes."""
        layout, cells = self.schedule.layout, self.schedule.packing.cells
        where = self._where(option, move_service)
        if not where:
            return False
        at = int(self.random() * where.bit_length())
        rest = where >> at
        start = (at + (rest & -rest).bit_length() - 1) // layout.gpus
        base = start * layout.gpus
        row = (where >> base) & layout.row
        for group in option.groups:
            nodes = row & group
            if nodes.bit_count() >= option.gang:
                block = 0
                for _ in range(option.gang):
                    first = nodes & -nodes
                    block |= option.shape << (base + first.bit_length() - 1)
                    nodes ^= first
                victims = [other for other in self.inside if cells[other.index] & block]
                if not move_service or not block & self._service_cells():
                    return self._try(task, option, start, block, victims)
                if self._shortage_for(block, victims) >= task.worth:
                    return False
                return self._try_past_services(task, option, start, block, victims)
        return False

    def _try(self, task: Task, option: Option, start: int, block: int, victims: list[Task]) -> bool:
        """Place the job, find others for its victims and the rest; undo when that is worth less."""
        packing, before = self.schedule.packing, self.schedule.packing.gain
        saved, free_before = packing.save(), packing.free
        for victim in victims:
            packing.remove(victim)
        if packing.quota is not None and block & ~packing.quota.open(task, option.gpus, option.slots):
            packing.restore(saved)
            return False
        packing.put(task, option, start, block)
        side = HIGH if self.random() < 0.5 else LOW
        packing.fill(self._shuffled(victims), side)
        # What was out fits nowhere unless cells became free.
        if packing.free & ~free_before:
            packing.fill(self._shuffled([other for other in self.out if other is not task]), side)
        if packing.gain < before:
            packing.restore(saved)
            return False
        self._sort_jobs()
        return packing.gain > before

    def _shuffled(self, tasks: list[Task]) -> list[Task]:
        """Mostly by worth, with chance."""
        random = self.random
        return sorted(tasks, key=lambda task: -task.worth * (0.5 + random()))

    def _try_past_services(
        self, task: Task, option: Option, start: int, block: int, victims: list[Task]
    ) -> bool:
        """Place the job where services stand, and give these what is left."""
        old, layout = self.schedule, self.schedule.layout
        gone = {victim.index for victim in victims}
        kept = [other for other in self.inside if other.index not in gone]
        free = layout.free & ~block
        for other in kept:
            free &= ~old.packing.cells[other.index]
        held: list[Held] = []
        for service in old.held:
            if not service.cells & block:
                free &= ~service.cells
        for service in old.held:
            if service.cells & block:
                moved = hold(layout, free, service.service, 0)
                if not moved.allowed:
                    return False
                free &= ~moved.cells
                held.append(moved)
            else:
                held.append(service)
        again = self._repacked(task, option, start, block, held)
        if again is not None and again.objective > old.objective:
            self._adopt(again)
            return True
        new = Schedule(layout, old.tasks, held)
        packing = new.packing
        if not packing.copy(old.packing, kept):
            return False
        if packing.quota is not None and block & ~packing.quota.open(task, option.gpus, option.slots):
            return False
        packing.put(task, option, start, block)
        packing.fill(self._shuffled(victims + [other for other in self.out if other is not task]), LOW)
        if new.objective < old.objective:
            return False
        better = new.objective > old.objective
        self._adopt(new)
        return better

    def _repacked(
        self, task: Task, option: Option, start: int, block: int, held: list[Held]
    ) -> Schedule | None:
        """The job first, services around it, and all others packed anew, mostly those worth most per side."""
        random, layout, tasks = self.random, self.schedule.layout, self.schedule.tasks
        new = Schedule(layout, tasks, held)
        quota = new.packing.quota
        if quota is not None and block & ~quota.open(task, option.gpus, option.slots):
            return None
        new.packing.put(task, option, start, block)
        order = sorted(tasks, key=lambda other: -other.worth / other.cells**0.5 * (0.8 + 0.4 * random()))
        new.packing.fill(order, LOW)
        return new

    def _adopt(self, new: Schedule) -> None:
        """Go on from a schedule in which services hold other GPUs."""
        self.schedule = new
        self.spots.clear()
        self.base = new.layout.free & ~self._service_cells()
        self._sort_jobs()
