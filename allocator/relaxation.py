"""The planning problem in counts: jobs choose a start and a class of nodes, and what is active has to fit.

What is left out is which GPUs of which node a job gets. So every plan is a solution here and the best
solution here is an upper bound; its starts can nearly always be packed afterwards. The bound (as a linear
program) and full mode (as an integer one) share this one set of variables and rows.

Three things keep the counts close to what GPUs allow, where running jobs and holes cut nodes into pieces:

* a class is nodes that are alike: of one size and type, free in the same slots. So an odd node has its own
columns, while equal nodes, which could be exchanged in any plan, are counted together; * a start is left
out when no block of free GPUs is wide enough for its whole duration; * rows in which a job weighs
``f(width)`` and a run of free GPUs holds ``f(run)``, for functions f with f(a) + f(b) ≤ f(a + b): what fits
in a run then never weighs more than the run. f = 1 per GPU is plain capacity, f = ⌊width/k⌋ says that no
two runs make one block. The functions tried are roundings of width·p/q. The same rows for windows of
several slots, in which jobs active throughout share the GPUs free throughout.

Services are counted in levels ("holds at least n"), because a linear program would else let a service give
up half a replica to save half of the cost; and a level can say that it takes the last GPU that a wide job
needs.

The invariant: every row holds for every plan that keeps the rules of ``check``. Rows are many, so all but
the first few are added when a solution breaks them. Coefficients are whole numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from math import gcd

import numpy as np
from numpy.typing import NDArray

from allocator.grid import Layout, Option, build_tasks
from allocator.packing import places
from allocator.problem import Problem, Service, Tenant

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_MAX_WINDOWS = 500  # windows of several slots that are looked at in a class, the shortest first
_MAX_COLUMNS = 12_000  # more, and nodes are told apart by type only
_MAX_MULTIPLE = 3  # p in the roundings of width·p/q
_VIOLATION = 1e-4


@dataclass(frozen=True, slots=True)
class Row:
    """``sum(weights × variables) ≤ limit``."""

    variables: Ints
    weights: Ints
    limit: int


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs that differ in nothing but their worth: the most valuable of them run first.

    Attributes:
        tasks: numbers of the tasks, the most valuable first.
        chosen: for each of them the variable that says that so many run.
    """

    tasks: tuple[int, ...]
    chosen: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServiceVariables:
    """The variables of a service.

    Attributes: levels: for each slot and class, the variables that say that it holds at least 1, 2, ...
    replicas there. total: the same for all classes together; those of the class when there is only one.
    """

    service: Service
    levels: tuple[tuple[Ints, ...], ...]
    total: tuple[Ints, ...]

    def count(self, values: Floats, slot: int) -> float:
        return float(values[self.total[slot]].sum())


@dataclass(frozen=True, slots=True)
class Spot:
    """A start of a group's jobs: an option in a slot (for gangs also in a domain), wherever there is room.

    Attributes:
        piece, pieces: GPUs of a block, and how many blocks (1; for a gang, its nodes).
        where: mask of the GPUs at which a block may begin.
        gang: of gangs, the variable that says how many start so; -1 for others.
    """

    group: int
    option: Option
    start: int
    end: int
    piece: int
    pieces: int
    where: int
    gang: int


class Relaxation:
    """Variables, rows and objective.

    The first variables are columns: how many blocks start at a spot in a class of nodes. All variables are
    whole numbers from 0 to ``upper``.

    Attributes:
        spot, kind, start, end, piece: of each column, its spot and class, and what the spot says.
        where: of each column, the mask of GPUs at which a block may begin.
        objective: worth of each variable; ``constant`` is what no choice changes.
        rows: those that are always there.
    """

    def __init__(self, problem: Problem, compact: bool = False) -> None:
        self.problem = problem
        self.compact = compact
        self.layout = layout = Layout(problem)
        self.tasks = build_tasks(layout)
        self.free = [(layout.free >> (slot * layout.gpus)) & layout.row for slot in range(layout.rows)]
        self.out = [(layout.out >> (slot * layout.gpus)) & layout.row for slot in range(layout.rows)]
        self.constant = _fixed_worth(problem)
        self.groups = self._find_groups()
        self._runs: dict[int, dict[int, int]] = {}
        self._upper: list[int] = []
        self._objective: list[float] = []
        self.rows: list[Row] = []
        self._steps: dict[int, list[int]] = {}
        self._completions: list[tuple[int, Callable[[dict[int, int]], int]]] = []
        found = self._find_spots()
        for fine in (False,) if compact else (True, False):
            self.classes = _classes(self, fine)
            if len(self.classes) * len(found) <= _MAX_COLUMNS:
                break
        self._make_columns(found)
        self._choose_from_groups()
        self.services = [self._add_service(service) for service in problem.services]
        self.widths = sorted({int(p) for p in self.piece} | {s.gpus_per_replica for s in problem.services})
        self.windows = [_windows([mask & row for row in self.free]) for mask in self.classes]
        for slot in range(layout.rows):
            for kind in range(len(self.classes)):
                self._keep(self.fit_row(slot, slot + 1, kind, _Rounding(1, 1, 0)))
        self._add_tenant_rows()
        self._add_reservation_rows()
        self._add_start_rows()
        self.upper: Ints = np.array(self._upper, dtype=np.int64)
        self.objective: Floats = np.array(self._objective, dtype=float)

    # Variables

    def _find_groups(self) -> list[Group]:
        problem, horizon = self.problem, self.layout.horizon
        members: dict[tuple[object, ...], list[int]] = {}
        for task in self.tasks:
            tenant = task.job.tenant if problem.tenants or problem.reservations else None
            key: tuple[object, ...] = (*(id(option) for option in task.options), tenant)
            if task.move_cost:
                key += (task.worth, task.move_cost, task.told)
            elif any(option.last + option.slots > horizon for option in task.options):
                key += (task.worth,)  # what lies behind the horizon costs a share of the worth
            members.setdefault(key, []).append(task.index)
        for tasks in members.values():
            tasks.sort(key=lambda at: (-self.tasks[at].worth, at))
        return [Group(tuple(tasks), ()) for tasks in members.values()]

    def _find_spots(self) -> list[Spot]:
        found = []
        fitting: dict[int, list[tuple[int, int]]] = {}
        for at, group in enumerate(self.groups):
            for option in self.tasks[group.tasks[0]].options:
                starts = fitting.get(id(option))
                if starts is None:
                    starts = fitting[id(option)] = list(self._starts(option))
                pieces = option.gang or 1
                for slot, where in starts:
                    end = slot + option.slots
                    found.append(Spot(at, option, slot, end, option.gpus // pieces, pieces, where, -1))
        return found

    def _starts(self, option: Option) -> Iterator[tuple[int, int]]:
        """Slots in which the option could start in an empty cluster, and where."""
        stride, row_mask = self.layout.gpus, self.layout.row
        rest = places(option, self.layout.free)
        slot = 0
        while rest:
            row = rest & row_mask
            if row and option.gang:
                for group in option.groups:
                    if (row & group).bit_count() >= option.gang:
                        yield slot, row & group
            elif row:
                yield slot, row
            rest >>= stride
            slot += 1

    def _make_columns(self, spots: list[Spot]) -> None:
        found: list[tuple[int, int, int, int, int]] = []
        self.where: list[int] = []
        for at, spot in enumerate(spots):
            group = self.groups[spot.group]
            gain = self.gain(spot) if spot.pieces == 1 else 0.0
            for kind, mask in enumerate(self.classes):
                where = spot.where & mask
                if where:
                    most = len(group.tasks) * spot.pieces
                    self._new(most if spot.pieces == 1 else min(most, where.bit_count()), gain)
                    found.append((at, kind, spot.start, spot.end, spot.piece))
                    self.where.append(where)
        table = np.array(found, dtype=np.int64).reshape(-1, 5)
        self.spot, self.kind, self.start, self.end, self.piece = table.T
        self.columns = len(found)
        self.group = np.array([spots[at].group for at in self.spot], dtype=np.int64)
        self.spots = []
        of_spot = self.columns_of_spots(len(spots))
        for at, spot in enumerate(spots):
            if spot.pieces > 1:
                gang = self._new(len(self.groups[spot.group].tasks), self.gain(spot))
                spot = replace(spot, gang=gang)
                terms = [(c, 1) for c in of_spot[at]] + [(gang, -spot.pieces)]
                self._add(terms, 0)
                self._add([(v, -w) for v, w in terms], 0)
            self.spots.append(spot)

    def columns_of_spots(self, count: int) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(count)]
        for column, at in enumerate(self.spot.tolist()):
            found[at].append(column)
        return found

    def gain(self, spot: Spot) -> float:
        """What this start adds to the worth of the jobs: a saved move, less what lies behind the horizon."""
        task = self.tasks[self.groups[spot.group].tasks[0]]
        lost = task.worth * max(0, spot.end - self.layout.horizon) / (spot.end - spot.start)
        return (task.move_cost if spot.start <= task.told else 0.0) - lost

    def _choose_from_groups(self) -> None:
        starts: list[list[int]] = [[] for _ in self.groups]
        for column, at in enumerate(self.spot.tolist()):
            if self.spots[at].gang < 0:
                starts[self.spots[at].group].append(column)
        for spot in self.spots:
            if spot.gang >= 0:
                starts[spot.group].append(spot.gang)
        for at, group in enumerate(self.groups):
            if not starts[at]:
                continue
            chosen = tuple(self._new(1, self.tasks[task].worth) for task in group.tasks)
            self.groups[at] = Group(group.tasks, chosen)
            terms = [(v, 1) for v in starts[at]] + [(v, -1) for v in chosen]
            self._add(terms, 0)
            self._add([(v, -w) for v, w in terms], 0)
            for earlier, later in pairwise(chosen):
                self._add([(later, 1), (earlier, -1)], 0)

    def _new(self, upper: int, objective: float = 0.0) -> int:
        self._upper.append(upper)
        self._objective.append(objective)
        return len(self._upper) - 1

    def _add_service(self, service: Service) -> ServiceVariables:
        unit, slots = service.gpus_per_replica, self.layout.horizon
        # More than the highest demand, or than it holds now, is never of use: the ramps allow less as well.
        most = -(-max(max(service.wanted(slot)) for slot in range(slots)) // unit)
        if service.current is not None:
            now = service.current if isinstance(service.current, int) else len(service.current)
            most = max(most, -(-now // unit))
        levels, total = [], []
        for slot in range(slots):
            wanted = service.wanted(slot)
            self.constant -= service.penalty * sum(wanted) / len(wanted)
            room = [
                min(most, len(self.layout.replicas(self.free[slot] & mask, unit))) for mask in self.classes
            ]
            worth = [
                service.penalty * sum(min(max(want - level * unit, 0), unit) for want in wanted) / len(wanted)
                for level in range(min(most, sum(room)))
            ]
            make = self._one_number if self.compact else self._levels
            together = make(len(worth), worth)
            by_class = [together]
            if len(room) > 1:
                by_class = [make(n, []) for n in room]
                held = [(int(v), 1) for stack in by_class for v in stack]
                if held:
                    self._add([*((int(v), 1) for v in together), *((v, -1) for v, _ in held)], 0)
                    self._add([*((int(v), -1) for v in together), *held], 0)
            levels.append(tuple(by_class))
            total.append(together)
        self._add_ramp(service, total)
        if len(self.classes) > 1 and not self.compact:
            self._stay_in_classes(service, levels, total)
        return ServiceVariables(service, tuple(levels), tuple(total))

    def _levels(self, count: int, worth: list[float]) -> Ints:
        """A variable for each level, of which the lower come first."""
        levels = [self._new(1, worth[level] if worth else 0.0) for level in range(count)]
        for lower, higher in pairwise(levels):
            self._add([(higher, 1), (lower, -1)], 0)
        return np.array(levels, dtype=np.int64)

    def _one_number(self, count: int, worth: list[float]) -> Ints:
        """One variable for all levels, and one for the levels of each worth, of which the dearer come
        first."""
        if not count:
            return np.zeros(0, dtype=np.int64)
        number = self._new(count)
        steps = [(self._new(worth.count(gain), gain), 1) for gain in sorted(set(worth), reverse=True) if gain]
        if steps:
            self._add([*steps, (number, -1)], 0)
            self._steps[number] = [step for step, _ in steps]
        return np.array([number], dtype=np.int64)

    def _add_ramp(self, service: Service, total: list[Ints]) -> None:
        unit = service.gpus_per_replica
        ramp = service.ramp // unit
        for slot in range(1, self.layout.horizon):
            before, now = total[slot - 1].tolist(), total[slot].tolist()
            # A failure, or a committed job, may take replicas: as many as GPUs that are free no more.
            lost = (self.free[slot - 1] & ~self.free[slot]).bit_count()
            self._never_above(now, before, ramp)
            if not lost:
                self._never_above(before, now, ramp)
            elif before:
                self._add(
                    [*((v, unit) for v in before), *((v, -unit) for v in now)], service.ramp + unit * lost
                )
        first = [(v, unit) for v in total[0].tolist()]
        if isinstance(service.current, tuple):
            mask = sum(1 << gpu for gpu in service.current)
            alive = [r for r in self.layout.replicas(mask, unit) if not r & self.out[0]]
            kept = [r for r in alive if not r & ~self.free[0]]
            most = unit * len(kept) + (service.ramp if len(kept) == len(alive) else 0)
            # What a running job took counts GPU by GPU, as the check does.
            least = sum(r & self.free[0] for r in alive).bit_count() - service.ramp
            if first:
                self._add(first, most)
                self._add([(v, -weight) for v, weight in first], -max(0, least))
        elif service.current is not None and first:
            self._add(first, service.current + service.ramp)

    def _stay_in_classes(self, service: Service, levels: list[tuple[Ints, ...]], total: list[Ints]) -> None:
        """Replicas do not move from class to class: in a slot all classes rise, or all fall."""
        unit, layout = service.gpus_per_replica, self.layout
        ramp = service.ramp // unit
        if isinstance(service.current, tuple):
            mask = sum(1 << gpu for gpu in service.current)
            kept = [r for r in layout.replicas(mask, unit) if not r & ~self.free[0]]
            # Of the first so many replicas, those that a class has now stay there, or all that fall are of
            # these.
            first = [(v, 1) for v in total[0][: len(kept)].tolist()]
            for kind, inside in enumerate(self.classes):
                here = sum(1 for r in kept if r & inside)
                if here and first:
                    self._add([*first, *((v, -1) for v in levels[0][kind].tolist())], len(kept) - here)
        for slot in range(1, layout.horizon):
            if self.free[slot - 1] & ~self.free[slot]:
                continue
            rises = self._new(1)
            self._completions.append((rises, partial(_more, total[slot].tolist(), total[slot - 1].tolist())))
            for before, now in zip(levels[slot - 1], levels[slot], strict=True):
                difference = [*((v, 1) for v in now.tolist()), *((v, -1) for v in before.tolist())]
                if difference:
                    self._add([*difference, (rises, -ramp)], 0)
                    self._add([*((v, -w) for v, w in difference), (rises, ramp)], ramp)

    def _never_above(self, this: list[int], that: list[int], by: int) -> None:
        """One stack of levels is no more than ``by`` higher than another."""
        if self.compact:
            terms = [*((v, 1) for v in this), *((v, -1) for v in that)]
            if terms:
                self._add(terms, by)
            return
        for level in range(by, len(this)):
            if level - by < len(that):
                self._add([(this[level], 1), (that[level - by], -1)], 0)
            else:
                self._add([(this[level], 1)], 0)

    # Rows

    def _keep(self, row: Row | None) -> None:
        if row is not None:
            self.rows.append(row)

    def _add(self, terms: list[tuple[int, int]], limit: int) -> None:
        variables, weights = zip(*terms, strict=True)
        self.rows.append(Row(np.array(variables, dtype=np.int64), np.array(weights, dtype=np.int64), limit))

    def active(self, first: int, last: int) -> Ints:
        """Columns that are active in every slot from first up to last."""
        return np.flatnonzero((self.start <= first) & (self.end >= last))

    def fit_row(
        self, first: int, last: int, kind: int, rounding: "_Rounding", service: int | None = None
    ) -> Row | None:
        """What is active in each slot from first up to last fits in the runs of GPUs that are free
        throughout.

        With ``service``, and a rounding down to blocks, the row knows how many blocks are lost as this
        service holds more.
        """
        columns = self.active(first, last)
        columns = columns[self.kind[columns] == kind]
        weights = rounding.of(self.piece[columns])
        variables, weights = [columns[weights > 0]], [weights[weights > 0]]  # type: ignore[assignment]
        runs = self.runs(first, last, kind)
        if last == first + 1 and first < self.layout.horizon:
            for at, s in enumerate(self.services):
                levels = s.levels[first][kind]
                weight = rounding(s.service.gpus_per_replica)
                each = np.full(len(levels), weight, dtype=np.int64)
                if at == service:
                    each = _blocks_lost(runs, rounding, s.service.gpus_per_replica, len(levels))
                variables.append(levels[each > 0])
                weights.append(each[each > 0])  # type: ignore[attr-defined]
        together = np.concatenate(variables)
        if not len(together):
            return None
        room = sum(rounding(run) * count for run, count in runs.items())
        return Row(together, np.concatenate(weights), room)

    def throughout(self, first: int, last: int) -> int:
        mask = self.free[first]
        for slot in range(first + 1, last):
            mask &= self.free[slot]
        return mask

    def runs(self, first: int, last: int, kind: int) -> dict[int, int]:
        """Lengths of the runs of GPUs of a class, free from first up to last, and how many of each."""
        mask = self.throughout(first, last) & self.classes[kind]
        found = self._runs.get(mask)
        if found is None:
            found = self._runs[mask] = {}
            for first, node in zip(self.problem.first_gpu, self.problem.nodes, strict=True):
                part = (mask >> first) & ((1 << node.gpus) - 1)
                while part:
                    part >>= (part & -part).bit_length() - 1
                    length = (~part & (part + 1)).bit_length() - 1
                    found[length] = found.get(length, 0) + 1
                    part >>= length
        return found

    def _add_tenant_rows(self) -> None:
        problem, rows = self.problem, self.layout.rows
        # Of each guarantee, and of what nobody is guaranteed (""), what running jobs leave in each slot.
        self.shares: dict[str, list[int]] = {}
        if not problem.tenants:
            return
        tenants = {tenant.name: tenant for tenant in problem.tenants}
        self.shares = {name: [tenant.gpus] * rows for name, tenant in tenants.items()}
        self.shares[""] = [problem.total_gpus - sum(tenant.gpus for tenant in problem.tenants)] * rows
        for job in problem.jobs:
            if job.running is not None:
                share = tenants.get(job.tenant or "")
                if share is None or problem.running_slots(job) > share.borrow_slots:
                    first, last = problem.running_window(job)
                    for slot in range(first, min(last, rows)):
                        self.shares[share.name if share else ""][slot] -= len(job.running.gpus)
        whose = np.array([self.share_of(at) for at in self.spot.tolist()], dtype=object)
        most = np.array(self._upper[: self.columns], dtype=np.int64)
        for name, room in self.shares.items():
            counted = whose == name
            for slot in range(rows):
                active = np.flatnonzero(counted & (self.start <= slot) & (self.end > slot))
                if len(active) and int((self.piece[active] * most[active]).sum()) > room[slot]:
                    self.rows.append(Row(active, self.piece[active], max(0, room[slot])))

    def share_of(self, spot: int) -> str | None:
        """The guarantee that a start at the spot counts against; None when it borrows, or there are no
        tenants."""
        if not self.problem.tenants:
            return None
        found = self.spots[spot]
        share = self._tenants.get(self.tenant_of(spot))
        if share is None:
            return ""
        return None if found.end - found.start <= share.borrow_slots else share.name

    def tenant_of(self, spot: int) -> str:
        return self.tasks[self.groups[self.spots[spot].group].tasks[0]].job.tenant or ""

    @cached_property
    def _tenants(self) -> dict[str, Tenant]:
        return {tenant.name: tenant for tenant in self.problem.tenants}

    def _add_reservation_rows(self) -> None:
        problem, layout = self.problem, self.layout
        # Of each slot, what is kept for each tenant beside its running jobs.
        self.kept: list[dict[str, int]] = [{} for _ in range(layout.rows if problem.reservations else 0)]
        for reservation in problem.reservations:
            for slot in range(max(reservation.start, 0), min(reservation.end, layout.rows)):
                row = self.kept[slot]
                row[reservation.tenant] = row.get(reservation.tenant, 0) + reservation.gpus
        for job in problem.jobs:
            if job.running is not None and self.kept:
                first, last = problem.running_window(job)
                for slot in range(first, min(last, layout.rows)):
                    if job.tenant in self.kept[slot]:
                        self.kept[slot][job.tenant] -= len(job.running.gpus)
        self.kept = [{tenant: gpus for tenant, gpus in row.items() if gpus > 0} for row in self.kept]
        for slot, row in enumerate(self.kept):
            self._reserve(slot, row)

    def _reserve(self, slot: int, kept: dict[str, int]) -> None:
        """Where a job of another tenant runs, all that is used and all that is kept has to fit."""
        layout, active = self.layout, self.active(slot, slot + 1)
        if not kept or not len(active):
            return
        gpus = self.piece[active]
        whose = np.array([self.tenant_of(at) for at in self.spot[active].tolist()], dtype=object)
        unused: dict[str, int] = {}
        for tenant, held in kept.items():
            unused[tenant] = self._new(held)
            mine = whose == tenant
            own = [(int(c), -int(g)) for c, g in zip(active[mine], gpus[mine], strict=True)]
            self._completions.append((unused[tenant], partial(_short_of, held, own)))
            self._add([(unused[tenant], -1), *own], -held)
        used = [(int(c), int(g)) for c, g in zip(active, gpus, strict=True)]
        if slot < layout.horizon:
            for s in self.services:
                used += [(v, s.service.gpus_per_replica) for v in s.total[slot].tolist()]
        room = self.free[slot].bit_count()
        for user in sorted({tenant if tenant in kept else "" for tenant in whose}):
            others = {tenant: held for tenant, held in kept.items() if tenant != user}
            if not others:
                continue
            at_work = self._new(1)
            busy = [int(c) for c, t in zip(active, whose, strict=True) if (t if t in kept else "") == user]
            self._completions.append((at_work, partial(_any, busy)))
            slack = sum(others.values())
            self._add([*used, *((unused[t], 1) for t in others), (at_work, slack)], room + slack)
            mine = np.flatnonzero([(tenant if tenant in kept else "") == user for tenant in whose])
            for group in np.unique(self.group[active[mine]]).tolist():
                columns = active[mine][self.group[active[mine]] == group].tolist()
                starts = {c if (gang := self.spots[self.spot[c]].gang) < 0 else gang for c in columns}
                size = len(self.groups[group].tasks)
                self._add([*((v, 1) for v in sorted(starts)), (at_work, -size)], 0)

    def _add_start_rows(self) -> None:
        """A service of which only the count is known falls faster than its ramp only for lack of GPUs."""
        room = self.free[0].bit_count()
        for s in self.services:
            lowest = s.service.current - s.service.ramp if isinstance(s.service.current, int) else 0
            if lowest <= 0:
                continue
            unit = s.service.gpus_per_replica
            lack = self._new(1)
            self._completions.append((lack, partial(_below, lowest, unit, s.total[0].tolist())))
            self._add([*((v, -unit) for v in s.total[0].tolist()), (lack, -lowest)], -lowest)
            if unit == 1:
                active = self.active(0, 1)
                used = [(int(c), -int(self.piece[c])) for c in active]
                for other in self.services:
                    used += [(v, -other.service.gpus_per_replica) for v in other.total[0].tolist()]
                self._add([*used, (lack, room)], 0)

    # From plans to values

    def hold(self, values: dict[int, int], levels: Ints, count: int) -> None:
        """Set the variables of a stack of levels to so many."""
        if not self.compact:
            values.update(dict.fromkeys(levels[:count].tolist(), 1))
            return
        for number in levels.tolist():
            values[number] = count
            for step in self._steps.get(number, ()):
                values[step] = min(count, self._upper[step])
                count -= values[step]

    def complete(self, values: dict[int, int]) -> None:
        """Add the values that follow from those of columns and levels."""
        for variable, rule in self._completions:
            if value := rule(values):
                values[variable] = value

    def spots_at(self, group: int, start: int) -> list[int]:
        """Numbers of the spots of a group in a slot."""
        return self._spots_at.get((group, start), [])

    @cached_property
    def group_of(self) -> list[int]:
        """The group of each task."""
        found = [0] * len(self.tasks)
        for at, group in enumerate(self.groups):
            for task in group.tasks:
                found[task] = at
        return found

    def spots_of(self, group: int) -> list[int]:
        """Numbers of all spots of a group."""
        return self._spots_of[group]

    @cached_property
    def _spots_of(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.groups]
        for at, spot in enumerate(self.spots):
            found[spot.group].append(at)
        return found

    @cached_property
    def _spots_at(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for at, spot in enumerate(self.spots):
            found.setdefault((spot.group, spot.start), []).append(at)
        return found

    def column_at(self, spot: int, gpu: int) -> int:
        """The column of a spot whose class has a GPU."""
        kind = next(k for k, mask in enumerate(self.classes) if mask >> gpu & 1)
        return self._column_of[spot, kind]

    @cached_property
    def _column_of(self) -> dict[tuple[int, int], int]:
        pairs = zip(self.spot.tolist(), self.kind.tolist(), strict=True)
        return {pair: column for column, pair in enumerate(pairs)}

    # Rows that are added when needed

    def broken_rows(self, values: Floats, most: int = 400) -> list[Row]:
        """Rows that a solution breaks, the worst of each window and class."""
        if not self.columns:
            return []
        found: list[tuple[float, Row]] = []
        positive = np.flatnonzero(values[: self.columns] > 1e-9)
        for kind in range(len(self.classes)):
            inside = positive[self.kind[positive] == kind]
            for first, last in self.windows[kind]:
                columns = inside[(self.start[inside] <= first) & (self.end[inside] >= last)]
                if len(columns):
                    worst, row = self._worst_row(values, first, last, kind, columns)
                    if row is not None:
                        found.append((worst, row))
        found.sort(key=lambda pair: -pair[0])
        return [row for _, row in found[:most]]

    def _worst_row(
        self, values: Floats, first: int, last: int, kind: int, columns: Ints
    ) -> tuple[float, Row | None]:
        use = dict.fromkeys(self.widths, 0.0)
        for width, amount in zip(self.piece[columns].tolist(), values[columns].tolist(), strict=True):
            use[width] += amount
        runs = self.runs(first, last, kind)
        holding = []
        if last == first + 1 and first < self.layout.horizon:
            holding = [(s.service.gpus_per_replica, values[s.levels[first][kind]]) for s in self.services]
        worst, chosen = _VIOLATION, None
        for rounding in _roundings(tuple(self.widths), tuple(sorted(runs))):
            room = sum([rounding.values[run] * count for run, count in runs.items()])
            over = sum([rounding.values[width] * amount for width, amount in use.items()]) - room
            plain = [rounding.values[unit] * float(levels.sum()) for unit, levels in holding]
            over += sum(plain)
            if over > worst * max(1, room):
                worst, chosen = over / max(1, room), (rounding, None)
            if rounding.q > 1 and rounding.p == 1 and not rounding.r:
                for at, (unit, levels) in enumerate(holding):
                    lost = _blocks_lost(runs, rounding, unit, len(levels))
                    more = over - plain[at] + float(lost @ levels)
                    if more > worst * max(1, room):
                        worst, chosen = more / max(1, room), (rounding, at)  # type: ignore[assignment]
        return worst, None if chosen is None else self.fit_row(first, last, kind, *chosen)

    def block_rows(self) -> list[Row]:
        """For each window and width, that no two runs make one block: for an integer model, from the
        start."""
        found = []
        ways = range(len(self.services)) if self.services and not self.compact else (None,)
        for kind in range(len(self.classes)):
            for first, last in self.windows[kind]:
                for width in self.widths:
                    if width == 1:
                        continue
                    for service in ways:
                        row = self.fit_row(first, last, kind, _Rounding(1, width, 0), service)
                        if (
                            row is not None
                            and int((row.weights * self.upper[row.variables]).sum()) > row.limit
                        ):
                            found.append(row)
        return found


def _more(these: list[int], those: list[int], values: dict[int, int]) -> int:
    return int(sum(values.get(v, 0) for v in these) > sum(values.get(v, 0) for v in those))


def _short_of(held: int, own: list[tuple[int, int]], values: dict[int, int]) -> int:
    return max(0, held + sum(weight * values.get(column, 0) for column, weight in own))


def _any(columns: list[int], values: dict[int, int]) -> int:
    return int(any(values.get(column, 0) for column in columns))


def _below(lowest: int, unit: int, levels: list[int], values: dict[int, int]) -> int:
    return int(unit * sum(values.get(v, 0) for v in levels) < lowest)


def _blocks_lost(runs: dict[int, int], rounding: "_Rounding", unit: int, most: int) -> Ints:
    """How many more blocks of ``q`` GPUs are lost with each replica that a service holds.

    What is left over beside the blocks of all runs can be held without loss; then every q GPUs cost a block.
    """
    q = rounding.q
    left_over = sum(run % q * count for run, count in runs.items())
    counts = np.arange(most + 1)
    lost = np.maximum(counts * (unit // q), -(-np.maximum(0, counts * unit - left_over) // q))
    return np.diff(lost)  # type: ignore[no-any-return]


class _Rounding:
    """f(width) = ⌊p·width/q⌋, plus the part of the rest that exceeds r/q, scaled to whole numbers.

    This is the mixed-integer rounding of a row: f(a) + f(b) ≤ f(a + b) for all widths.
    """

    __slots__ = ("p", "q", "r", "values")

    def __init__(self, p: int, q: int, r: int, largest: int = 0) -> None:
        self.p, self.q, self.r = p, q, r
        self.values = [self(width) for width in range(largest + 1)]

    def __call__(self, width: int) -> int:
        whole, rest = divmod(self.p * width, self.q)
        if not self.r:
            return whole
        return whole * (self.q - self.r) + max(0, rest - self.r)

    def of(self, widths: Ints) -> Ints:
        whole, rest = np.divmod(self.p * widths, self.q)
        return whole * (self.q - self.r) + np.maximum(0, rest - self.r) if self.r else whole


_known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Rounding]] = {}


def _roundings(widths: tuple[int, ...], runs: tuple[int, ...]) -> list[_Rounding]:
    """Functions worth trying for these widths and runs, each different on them."""
    key = (widths, runs)
    found = _known.get(key)
    if found is not None:
        return found
    found, seen = [], set()
    largest = max([*widths, *runs], default=1)
    divisors = sorted(
        {w for w in widths if w > 1} | {w + 1 for w in widths} | {run for run in runs if run > 1}
    )
    for q in [1, *divisors]:
        for p in range(1, min(q, _MAX_MULTIPLE + 1) if q > 1 else 2):
            if gcd(p, q) > 1:
                continue
            for r in sorted({0} | {p * run % q for run in runs}):
                rounding = _Rounding(p, q, r, largest)
                values = [rounding.values[w] for w in (*widths, *runs)]
                scale = gcd(*values)
                if not scale or not any(rounding.values[w] for w in widths):
                    continue
                shape = tuple(v // scale for v in values)
                if shape not in seen:
                    seen.add(shape)
                    found.append(rounding)
    if len(_known) > 5000:
        _known.clear()
    _known[key] = found
    return found


def _windows(free: list[int]) -> list[tuple[int, int]]:
    """Each slot, and the shortest windows in which fewer GPUs are free throughout than in any part of
    them."""
    rows = len(free)
    found = [(slot, slot + 1) for slot in range(rows)]
    before = free  # free throughout the window of one slot less that begins there
    for length in range(2, rows + 1):
        now = [before[first] & free[first + length - 1] for first in range(rows - length + 1)]
        found += [
            (first, first + length)
            for first, mask in enumerate(now)
            if mask != before[first] and mask != before[first + 1]
        ]
        before = now
        if len(found) > rows + _MAX_WINDOWS:
            break
    return found


def _classes(relaxation: Relaxation, fine: bool) -> list[int]:
    """Masks of the GPUs of each class of nodes.

    Nodes are alike when no job tells them apart: by their type or domain, where that matters to some job, and
    (``fine``) by their size, the slots in which their GPUs are free and the services that hold them now.
    """
    problem = relaxation.problem
    options = [option for task in relaxation.tasks for option in task.options]
    by_type = any(
        job.gpu_types or any(not isinstance(choice.slots, int) for choice in job.choices)
        for job in problem.jobs
        if job.running is None
    )
    by_domain = any(option.gang for option in options)
    holder = {
        gpu: at
        for at, service in enumerate(problem.services)
        if isinstance(service.current, tuple)
        for gpu in service.current
    }
    masks: dict[tuple[object, ...], int] = {}
    for first, node in zip(problem.first_gpu, problem.nodes, strict=True):
        inside = (1 << node.gpus) - 1
        key: tuple[object, ...] = (
            node.gpu if by_type or by_domain else None,
            node.domain if by_domain else None,
        )
        if fine:
            key += (node.gpus, *((row >> first) & inside for row in relaxation.free))
            key += tuple(holder.get(gpu) for gpu in range(first, first + node.gpus))
        masks[key] = masks.get(key, 0) | inside << first
    return list(masks.values())


def _fixed_worth(problem: Problem) -> float:
    """What running jobs earn, less the move costs of all jobs: a column gives back what its start saves."""
    total = 0.0
    for job in problem.jobs:
        if job.running is None:
            total -= problem.move_cost_of(job, None)
            continue
        start, slots = job.running.start, problem.running_slots(job)
        end = start + slots
        if job.deadline is not None and end > job.deadline:
            continue
        share = (
            max(0, min(end, problem.slots) - start) / slots if problem.open_end and end > problem.slots else 1
        )
        total += problem.worth(job) * share
    return total
