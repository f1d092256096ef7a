"""The grid of GPUs × slots as one integer, and the shapes that jobs cut out of it.

Bit ``slot × G + gpu`` of an integer stands for one GPU in one slot, G being the GPUs of the cluster. With the
free cells of the whole grid in one integer, every place where a block of w GPUs fits for d slots is found
by log2(w) + log2(d) shifts and ANDs, whatever the size of the cluster: ``x & x >> 1`` leaves the
cells whose right neighbour is free too, ``x & x >> G`` those that stay free in the next slot.

The invariant: a ``Layout`` and its ``Task`` list hold what follows from the problem alone and never change
during a search. The cost of the choice: a search step touches all cells, so it grows with GPUs × slots; a
node of a large cluster pays for the others. Up to a thousand GPUs a step takes microseconds.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

from allocator.problem import Choice, Job, Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    Where = tuple[
        tuple[str, ...], str | None
    ]  # the types a job accepts, and the one meant (None: any of them)


class Option:
    """One way to run a job: a width and the slots it takes, on the nodes where that is so.

    Attributes:
        gpus, slots: the block; for a gang ``gpus`` is the sum over its nodes.
        cells: ``gpus × slots``.
        time_shifts, width_shifts: shifts that leave the cells where a block (of a gang: a node) may begin.
        starts: the cells it may begin in: release, deadline, horizon, node boundaries, types.
        shape: the block as a mask with its first cell at bit 0.
        edge: positions in a row whose block ends where its node ends.
        first, last: earliest and latest start slot.
        anywhere: whether it may begin in any slot that leaves room, on any node: then what is no wider and no
            longer cannot fail where this fits, and what is as wide and long fails where this fails.
        gang: 0, or the number of nodes it takes; then ``groups`` are masks of the first GPUs of nodes that
            may work together.
    """

    __slots__ = (
        "anywhere",
        "cells",
        "edge",
        "first",
        "gang",
        "gpus",
        "groups",
        "last",
        "shape",
        "slots",
        "starts",
        "time_shifts",
        "width_shifts",
    )

    def __init__(
        self,
        layout: Layout,
        gpus: int,
        slots: int,
        positions: int,
        window: tuple[int, int],
        edge: int = 0,
        gang: int = 0,
        groups: tuple[int, ...] = (),
    ) -> None:
        width = gpus // (gang or 1)
        self.gpus = gpus
        self.slots = slots
        self.cells = gpus * slots
        self.width_shifts = layout.shifts(width, 1)
        self.time_shifts = layout.shifts(slots, layout.gpus)
        self.shape = layout.shape(width, slots)
        self.starts = layout.starts(positions, *window)
        self.first, self.last = window
        self.edge = edge
        self.gang = gang
        self.groups = groups
        self.anywhere = False


class Task:
    """A job that may be started, as the search sees it.

    Attributes:
        worth: what it adds when it runs whole.
        gpus, slots, cells: of its smallest option, cut to the horizon.
        density: worth per cell in that option.
        inside: what it adds when it starts at once: less than its worth where it outlasts the horizon.
        urgent: whether it has to start earlier than the horizon alone would ask.
        told: latest start that keeps what was announced, or -1 without an announcement.
        move_cost: what a later start, or none, costs.
    """

    __slots__ = (
        "cells",
        "density",
        "gpus",
        "index",
        "inside",
        "job",
        "last",
        "move_cost",
        "options",
        "slots",
        "told",
        "urgent",
        "worth",
    )

    def __init__(self, index: int, job: Job, worth: float, options: list[Option], layout: Layout) -> None:
        first = options[0]
        self.index = index
        self.job = job
        self.worth = worth
        self.options = options
        self.gpus = first.gpus
        self.slots = slots = first.slots
        self.last = first.last
        self.urgent = job.deadline is not None and first.last < layout.latest(slots)
        self.density = worth / first.cells
        self.cells = first.cells if slots <= layout.horizon else first.gpus * layout.horizon
        self.inside = worth if slots <= layout.horizon else self.density * self.cells
        self.told = -1
        self.move_cost: float = 0


class Layout:
    """What follows from nodes, horizon and holes: strides, masks and the free cells at the start."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.gpus = gpus = problem.total_gpus
        self.horizon = horizon = problem.slots
        self.rows = horizon
        if problem.open_end:
            longest = [slots for job in problem.jobs for c in job.choices for slots in _all_slots(c)]
            self.rows += max(longest, default=1) - 1
        self.row = (1 << gpus) - 1
        self.all = (1 << (gpus * self.rows)) - 1
        self.one_per_row = self.all // self.row
        self.node_starts = reduce(or_, [1 << first for first in problem.first_gpu])
        self._shifts: dict[tuple[int, int], tuple[int, ...]] = {}
        self._shapes: dict[tuple[int, int], int] = {}
        self._starts: dict[tuple[int, int, int], int] = {}
        self._positions: dict[tuple[int, tuple[str, ...], str | None], tuple[int, int]] = {}
        self._options: dict[tuple[object, ...], list[Option]] = {}
        self._widest: dict[tuple[str, ...], int] = {}
        self.rules: object = None  # what ``quota`` keeps for the problem
        self.out = 0
        for hole in problem.unavailable:
            self.out |= self.cells(hole.gpus, hole.start, hole.end)
        self.running = 0
        for job in problem.jobs:
            if job.running is not None:
                self.running |= self.cells(job.running.gpus, *problem.running_window(job))
        self.free = self.all & ~(self.out | self.running)

    def cells(self, gpus: Iterable[int], start: int, end: int) -> int:
        """The mask of some GPUs from start to end, cut to the grid."""
        start, end = max(start, 0), min(end, self.rows)
        if start >= end:
            return 0
        mask = 0
        for gpu in gpus:
            mask |= 1 << gpu
        return mask * self.repeat(end - start) << (start * self.gpus)

    def repeat(self, rows: int) -> int:
        """A one in the first cell of each of the first rows: times a row mask, it repeats the row."""
        return self.one_per_row & ((1 << (rows * self.gpus)) - 1)

    def shifts(self, length: int, stride: int) -> tuple[int, ...]:
        """Shifts after which a bit is set where ``length`` cells, ``stride`` apart, are all set."""
        key = (length, stride)
        found = self._shifts.get(key)
        if found is None:
            steps, reach = [], 1
            while 2 * reach <= length:
                steps.append(reach * stride)
                reach *= 2
            if length > reach:
                steps.append((length - reach) * stride)
            found = self._shifts[key] = tuple(steps)
        return found

    def shape(self, width: int, slots: int) -> int:
        key = (width, slots)
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = ((1 << width) - 1) * self.repeat(slots)
        return found

    def starts(self, positions: int, first: int, last: int) -> int:
        """The positions of a row, repeated for the slots from first to last."""
        key = (positions, first, last)
        found = self._starts.get(key)
        if found is None:
            found = positions * self.repeat(last - first + 1) << (first * self.gpus)
            self._starts[key] = found
        return found

    def block_starts(self, window: int, width: int) -> int:
        """Where in a row of free GPUs a block of one node may begin."""
        for shift in self.shifts(width, 1):
            window &= window >> shift
        return window & self.positions(width, (), None)[0]

    def replicas(self, mask: int, width: int) -> list[int]:
        """Blocks of one node, ``width`` wide, in a set of GPUs, from the lowest; the rest is left."""
        found, ones = [], (1 << width) - 1
        while begins := self.block_starts(mask, width):
            block = ones * (begins & -begins)
            found.append(block)
            mask &= ~((block & -block) * 2 - 1) & ~block
        return found

    def options(
        self,
        gpus: int,
        slots: int,
        types: tuple[str, ...],
        gpu: str | None,
        window: tuple[int, int],
        widest: int,
    ) -> list[Option]:
        """The options of a width and length on given types, started in a window of slots."""
        key = (gpus, slots, types, gpu, window)
        found = self._options.get(key)
        if found is None:
            make = _block if gpus <= widest else _gangs
            found = self._options[key] = make(self, gpus, slots, (types, gpu), window)
            latest = self.latest(slots)
            if found and not types and gpu is None and window == (0, latest) and not found[0].gang:
                found[0].anywhere = True
        return found

    def latest(self, slots: int) -> int:
        """Last slot in which a job of so many slots may start, its deadline aside."""
        return self.horizon - (1 if self.problem.open_end else slots)

    def widest(self, types: tuple[str, ...]) -> int:
        """GPUs of the largest node of the types (none: of all); 0 when there is no such node."""
        found = self._widest.get(types)
        if found is None:
            nodes = self.problem.nodes
            found = max([node.gpus for node in nodes if not types or node.gpu in types], default=0)
            self._widest[types] = found
        return found

    def positions(self, width: int, types: tuple[str, ...], gpu: str | None) -> tuple[int, int]:
        """Where in a row a block of one node may begin, and where it then ends with its node.

        ``types`` are those the job accepts, ``gpu`` the one type meant, or None for any that it accepts.
        """
        key = (width, types, gpu)
        found = self._positions.get(key)
        if found is None:
            begins = edge = 0
            for first, node in zip(self.problem.first_gpu, self.problem.nodes, strict=True):
                if (
                    node.gpus < width
                    or (types and node.gpu not in types)
                    or (gpu is not None and node.gpu != gpu)
                ):
                    continue
                begins |= ((1 << (node.gpus - width + 1)) - 1) << first
                edge |= 1 << (first + node.gpus - width)
            found = self._positions[key] = (begins, edge)
        return found


def build_tasks(layout: Layout) -> list[Task]:
    """The jobs that could start somewhere if the cluster were empty, in file order."""
    problem = layout.problem
    tasks: list[Task] = []
    for job in problem.jobs:
        if job.running is None:
            options = job_options(layout, job)
            if options:
                task = Task(len(tasks), job, problem.worth(job), options, layout)
                if problem.move_cost and (cost := problem.move_cost_of(job, None)):
                    assert job.announced is not None
                    task.told, task.move_cost = max(job.announced.start, 0), cost
                tasks.append(task)
    return tasks


def job_options(layout: Layout, job: Job) -> list[Option]:
    """The ways a job can run, those with the fewest cells first. Equal jobs share them."""
    options: list[Option] = []
    widest = layout.widest(job.gpu_types)
    for choice in job.choices:
        every = choice.slots
        for gpu, slots in ((None, every),) if isinstance(every, int) else every:
            # The slots in which a job of this length may start.
            last = layout.latest(slots)
            if job.deadline is not None and job.deadline - slots < last:
                last = job.deadline - slots
            if last >= job.release and widest:
                options += layout.options(choice.gpus, slots, job.gpu_types, gpu, (job.release, last), widest)
    if len(options) > 1:
        options.sort(key=lambda option: (option.cells, option.slots))
    return options


def _block(layout: Layout, gpus: int, slots: int, where: Where, window: tuple[int, int]) -> list[Option]:
    """A job that fits in a node: one option, on consecutive GPUs of any node of the types."""
    positions, edge = layout.positions(gpus, *where)
    return [Option(layout, gpus, slots, positions, window, edge)] if positions else []


def _gangs(layout: Layout, gpus: int, slots: int, where: Where, window: tuple[int, int]) -> list[Option]:
    """A wider job takes whole nodes of one size, type and domain: one option for each size of node."""
    types, gpu = where
    sizes: dict[int, dict[tuple[str | None, str | None], int]] = {}
    for first, node in zip(layout.problem.first_gpu, layout.problem.nodes, strict=True):
        if gpus % node.gpus == 0 and (not types or node.gpu in types) and gpu in (None, node.gpu):
            alike = sizes.setdefault(node.gpus, {})
            alike[node.gpu, node.domain] = alike.get((node.gpu, node.domain), 0) | 1 << first
    options = []
    for size, alike in sizes.items():
        count = gpus // size
        groups = tuple([mask for mask in alike.values() if mask.bit_count() >= count])
        if groups:
            options.append(Option(layout, gpus, slots, reduce(or_, groups), window, 0, count, groups))
    return options


def _all_slots(choice: Choice) -> list[int]:
    return [choice.slots] if isinstance(choice.slots, int) else [slots for _, slots in choice.slots]
