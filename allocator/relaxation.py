"""The planning problem in counts: jobs choose a start and a class of nodes, and what is active has to fit.

What is left out is which GPUs of which node a job gets. So every plan is a solution here and the best
solution here is an upper bound; its starts can nearly always be packed afterwards. The bound (as a linear
program) and full mode (as an integer one) share this one set of variables and rows.

Three things keep the counts close to what GPUs allow, where running jobs and holes cut nodes into pieces.
A class is nodes that are alike (``alike``), so an odd node has its own columns, while equal nodes, which
could be exchanged in any plan, are counted together. A start is left out when no block of free GPUs is wide
enough for its whole duration. And what is active has to fit in the runs of free GPUs, measured in several
ways (``roundings``), in each slot and in windows of slots.

Services are counted in levels ("holds at least n"), because a linear program would else let a service give
up half a replica to save half of the cost; and a level can say that it takes the last GPU that a wide job
needs. CP-SAT does better with one number for each slot: ``compact``.

The invariant: every row holds for every plan that keeps the rules of ``check``. Rows are many, so all but
the first few are added when a solution breaks them. Coefficients are whole numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from allocator.alike import classes, windows
from allocator.grid import Layout, Option, build_tasks
from allocator.packing import places
from allocator.problem import Problem, Service, Tenant
from allocator.roundings import PLAIN, Rounding, blocks_lost, roundings

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_MAX_COLUMNS = 12_000  # more, and nodes are told apart by type only
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

    Attributes:
        levels: for each slot and class, the variables that say that it holds at least 1, 2, ... replicas
            there (``compact``: one that says how many).
        total: the same for all classes together; those of the class when there is only one.
    """

    service: Service
    levels: tuple[tuple[Ints, ...], ...]
    total: tuple[Ints, ...]


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
        from allocator.levels import add_service
        from allocator.limits import add_limits

        self.problem = problem
        self.compact = compact
        self.layout = layout = Layout(problem)
        self.tasks = build_tasks(layout)
        self.free = [(layout.free >> (slot * layout.gpus)) & layout.row for slot in range(layout.rows)]
        self.out = [(layout.out >> (slot * layout.gpus)) & layout.row for slot in range(layout.rows)]
        self.constant = _fixed_worth(problem)
        self.groups = self._find_groups()
        self._runs: dict[int, dict[int, int]] = {}
        self.upper_so_far: list[int] = []
        self._objective: list[float] = []
        self.rows: list[Row] = []
        self.steps: dict[int, list[int]] = {}
        self.completions: list[tuple[int, Callable[[dict[int, int]], int]]] = []
        self.shares = self._left_of_shares()
        self.kept = self._kept_for_tenants()
        options = [option for task in self.tasks for option in task.options]
        found = self._find_spots()
        for fine in (False,) if compact else (True, False):
            self.classes = classes(problem, options, self.free, fine)
            if len(self.classes) * len(found) <= _MAX_COLUMNS:
                break
        self._make_columns(found)
        self._choose_from_groups()
        self.services = [add_service(self, service) for service in problem.services]
        self.widths = sorted({int(p) for p in self.piece} | {s.gpus_per_replica for s in problem.services})
        self.windows = [windows([mask & row for row in self.free]) for mask in self.classes]
        for slot in range(layout.rows):
            for kind in range(len(self.classes)):
                self._keep(self.fit_row(slot, slot + 1, kind, PLAIN))
        add_limits(self)
        self.upper: Ints = np.array(self.upper_so_far, dtype=np.int64)
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
                    self.new(most if spot.pieces == 1 else min(most, where.bit_count()), gain)
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
                gang = self.new(len(self.groups[spot.group].tasks), self.gain(spot))
                spot = replace(spot, gang=gang)
                terms = [(c, 1) for c in of_spot[at]] + [(gang, -spot.pieces)]
                self.add(terms, 0)
                self.add([(v, -w) for v, w in terms], 0)
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
            chosen = tuple(self.new(1, self.tasks[task].worth) for task in group.tasks)
            self.groups[at] = Group(group.tasks, chosen)
            terms = [(v, 1) for v in starts[at]] + [(v, -1) for v in chosen]
            self.add(terms, 0)
            self.add([(v, -w) for v, w in terms], 0)
            for earlier, later in pairwise(chosen):
                self.add([(later, 1), (earlier, -1)], 0)

    def new(self, upper: int, objective: float = 0.0) -> int:
        self.upper_so_far.append(upper)
        self._objective.append(objective)
        return len(self.upper_so_far) - 1

    # Rows

    def _keep(self, row: Row | None) -> None:
        if row is not None:
            self.rows.append(row)

    def add(self, terms: list[tuple[int, int]], limit: int) -> None:
        variables, weights = zip(*terms, strict=True)
        self.rows.append(Row(np.array(variables, dtype=np.int64), np.array(weights, dtype=np.int64), limit))

    def active(self, first: int, last: int) -> Ints:
        """Columns that are active in every slot from first up to last."""
        return np.flatnonzero((self.start <= first) & (self.end >= last))

    def fit_row(
        self, first: int, last: int, kind: int, rounding: Rounding, service: int | None = None
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
                    each = blocks_lost(runs, rounding, s.service.gpus_per_replica, len(levels))
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

    def _left_of_shares(self) -> dict[str, list[int]]:
        """Of each guarantee, and of what nobody is guaranteed (""), what running jobs leave in each slot."""
        problem, rows = self.problem, self.layout.rows
        if not problem.tenants:
            return {}
        tenants = {tenant.name: tenant for tenant in problem.tenants}
        shares = {name: [tenant.gpus] * rows for name, tenant in tenants.items()}
        shares[""] = [problem.total_gpus - sum(tenant.gpus for tenant in problem.tenants)] * rows
        for job in problem.jobs:
            if job.running is not None:
                share = tenants.get(job.tenant or "")
                if share is None or problem.running_slots(job) > share.borrow_slots:
                    first, last = problem.running_window(job)
                    for slot in range(first, min(last, rows)):
                        shares[share.name if share else ""][slot] -= len(job.running.gpus)
        return shares

    def _kept_for_tenants(self) -> list[dict[str, int]]:
        """Of each slot, what is reserved for each tenant beside its running jobs."""
        problem, layout = self.problem, self.layout
        kept: list[dict[str, int]] = [{} for _ in range(layout.rows if problem.reservations else 0)]
        for reservation in problem.reservations:
            for slot in range(max(reservation.start, 0), min(reservation.end, layout.rows)):
                row = kept[slot]
                row[reservation.tenant] = row.get(reservation.tenant, 0) + reservation.gpus
        for job in problem.jobs:
            if job.running is not None and kept:
                first, last = problem.running_window(job)
                for slot in range(first, min(last, layout.rows)):
                    if job.tenant in kept[slot]:
                        kept[slot][job.tenant] -= len(job.running.gpus)
        return [{tenant: gpus for tenant, gpus in row.items() if gpus > 0} for row in kept]

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

    # From plans to values

    def complete(self, values: dict[int, int]) -> None:
        """Add the values that follow from those of columns and levels."""
        for variable, rule in self.completions:
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
        for rounding in roundings(tuple(self.widths), tuple(sorted(runs))):
            room = sum([rounding.values[run] * count for run, count in runs.items()])
            over = sum([rounding.values[width] * amount for width, amount in use.items()]) - room
            plain = [rounding.values[unit] * float(levels.sum()) for unit, levels in holding]
            over += sum(plain)
            if over > worst * max(1, room):
                worst, chosen = over / max(1, room), (rounding, None)
            if rounding.q > 1 and rounding.p == 1 and not rounding.r:
                for at, (unit, levels) in enumerate(holding):
                    lost = blocks_lost(runs, rounding, unit, len(levels))
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
                        row = self.fit_row(first, last, kind, Rounding(1, width, 0), service)
                        if (
                            row is not None
                            and int((row.weights * self.upper[row.variables]).sum()) > row.limit
                        ):
                            found.append(row)
        return found


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
