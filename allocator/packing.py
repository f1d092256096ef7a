"""Jobs in the grid: the earliest free block for each job of an order, and taking jobs out again.

A packing is what the search changes: the free cells, where each job is, and what the jobs are worth
together. The invariant: the cells of placed jobs, the free cells and what was taken from the start never
overlap and together are the grid, so a packing that was only changed through its methods keeps every rule.

A job goes to the earliest slot where it fits (or, as a recipe says, to the latest, or to one end of the
cluster). Among the blocks of that slot it takes one that touches other work, the border of its node, or best
both, so that the runs of free GPUs that remain stay wide. The cost of the choice: a job takes the place that
is best for itself; the order in which jobs come, and ``improve``, have to make up for it.
"""

from __future__ import annotations

from allocator.frontier import LARGE, Frontier
from allocator.grid import Layout, Option, Task
from allocator.quota import Quota, QuotaState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    Saved = tuple[int, list[int], list[int], list[Option | None], float, QuotaState | None]


FIRST, LOW, HIGH = 0, 1, 2


class Packing:
    """Where jobs are.

    Attributes:
        free: the free cells.
        cells: of each task, its cells; 0 when it is out.
        start, option: of each task that is in, its start slot and the option it uses.
        gain: worth of the jobs that are in, and the move costs that they save.
    """

    __slots__ = ("cells", "free", "gain", "layout", "option", "quota", "start")

    def __init__(self, layout: Layout, tasks: list[Task], free: int, quota: Quota | None) -> None:
        self.layout = layout
        self.free = free
        self.quota = quota
        self.cells = [0] * len(tasks)
        self.start = [0] * len(tasks)
        self.option: list[Option | None] = [None] * len(tasks)
        self.gain = 0.0

    def fill(
        self,
        order: Iterable[Task],
        side: int,
        *,
        late: bool = False,
        column: bool = False,
        queue: bool = False,
    ) -> None:
        """Place each job of an order that is out and fits, at its earliest start.

        Args:
            side: which block of that slot: FIRST takes the lowest; LOW and HIGH the lowest and the highest of
                those that fit snugly.
            late: at its latest start instead.
            column: on the GPU at that side where it fits at all, only then at its earliest (latest) start.
            queue: none starts before one that came earlier in the order.
        """
        layout, quota, horizon = self.layout, self.quota, self.layout.horizon
        stride, row_mask, borders = layout.gpus, layout.row, layout.node_starts
        cells, free, gain = self.cells, self.free, self.gain
        walls: list[tuple[int, int]] = []  # widths and lengths that fit nowhere
        failed: set[Option] = set()  # options that fit nowhere; no more is free later in the order
        refused: set[tuple[Option, str | None]] = set()  # that guarantees let start nowhere; nor later
        eroded: dict[int, int] = {}  # cells that stay free for so many slots, until a job is placed
        earliest, origin = 0, 0
        room = free.bit_count()
        near = None
        if quota is None and not late and not column and stride * layout.rows >= LARGE:
            near = Frontier(stride)
        for task in order:
            index = task.index
            if cells[index]:
                continue
            for option in task.options:
                gpus, slots = option.gpus, option.slots
                if option.cells > room or option in failed:
                    continue
                if walls and not option.gang and any([gpus >= w and slots >= d for w, d in walls]):  # noqa: C419 - quicker
                    continue
                if quota is not None and (option, task.job.tenant) in refused:
                    continue
                if near is not None and not option.gang:
                    origin, lasting, fits = near.search(free, option, earliest)
                else:
                    origin, kept = 0, eroded.get(slots)
                    if kept is None:
                        kept = free
                        for shift in option.time_shifts:
                            kept &= kept >> shift
                        eroded[slots] = kept
                    lasting = fits = kept
                    for shift in option.width_shifts:
                        fits &= fits >> shift
                    fits &= option.starts
                    if earliest:
                        fits = fits >> (earliest * stride) << (earliest * stride)
                if not fits:
                    failed.add(option)
                    if option.anywhere:
                        walls.append((gpus, slots))
                    continue
                if quota is not None:
                    fits &= quota.lasting(task, option)
                    if not fits:
                        refused.add((option, task.job.tenant))
                        continue
                if option.gang:
                    block = gang_block(layout, option, fits)
                    if not block:
                        continue
                    start = ((block & -block).bit_length() - 1) // stride
                    break
                if column:
                    ever = _fold(fits, layout)
                    first = (ever if side == HIGH else ever & -ever).bit_length() - 1
                    times = (fits >> first) & layout.one_per_row
                    base = (times if late else times & -times).bit_length() - 1
                    start = base // stride
                    block = option.shape << (base + first)
                    break
                start = ((fits if late else fits & -fits).bit_length() - 1) // stride
                base = start * stride
                row = (fits >> base) & row_mask
                if row & (row - 1):
                    if side:
                        around = (lasting >> base) & row_mask
                        left = row & (~(around << 1) | borders)
                        right = row & (~(around >> gpus) | option.edge)
                        row = left & right or left | right
                    if side != HIGH:
                        row &= -row
                start += origin
                block = option.shape << (start * stride + row.bit_length() - 1)
                break
            else:
                continue
            free ^= block
            room -= option.cells
            eroded.clear()
            cells[index] = block
            self.start[index] = start
            self.option[index] = option
            if queue:
                earliest = start
            inside = horizon - start
            gain += task.worth if option.slots <= inside else task.worth * inside / option.slots
            if start <= task.told:
                gain += task.move_cost
            if quota is not None:
                quota.take(task, option.gpus, start, option.slots)
        self.free, self.gain = free, gain

    def remove(self, task: Task) -> None:
        """Take a job out."""
        index = task.index
        option = self.option[index]
        assert option is not None
        self.free |= self.cells[index]
        self.cells[index] = 0
        self.gain -= _gain(task, self.start[index], option.slots, self.layout.horizon)
        if self.quota is not None:
            self.quota.take(task, -option.gpus, self.start[index], option.slots)

    def put(self, task: Task, option: Option, start: int, block: int) -> None:
        """Place a job on free cells that are known to suit it."""
        index = task.index
        self.free ^= block
        self.cells[index] = block
        self.start[index] = start
        self.option[index] = option
        self.gain += _gain(task, start, option.slots, self.layout.horizon)
        if self.quota is not None:
            self.quota.take(task, option.gpus, start, option.slots)

    def advance(self, order: Iterable[Task]) -> bool:
        """Move each job to the earliest start its option has with all others fixed; whether any moved."""
        stride, moved = self.layout.gpus, False
        for task in order:
            block = self.cells[task.index]
            if not block or not self.start[task.index] or self.start[task.index] == task.job.release:
                continue
            option = self.option[task.index]
            assert option is not None
            start = self.start[task.index]
            self.remove(task)
            earlier = places(option, self.free) & ((1 << (start * stride)) - 1)
            if self.quota is not None and earlier:
                earlier &= self.quota.lasting(task, option)
            if option.gang:
                found = gang_block(self.layout, option, earlier)
            else:
                found = option.shape * (earlier & -earlier)
            if found:
                moved = True
                block = found
                start = ((found & -found).bit_length() - 1) // stride
            self.put(task, option, start, block)
        return moved

    def copy(self, other: Packing, tasks: Iterable[Task]) -> bool:
        """Place jobs where they are in another packing; their cells have to be free here.

        Returns:
            whether tenants' and reservations' rules allow all of them; if not, the packing is of no use.
        """
        for task in tasks:
            block, option = other.cells[task.index], other.option[task.index]
            assert option is not None
            if self.quota is not None and block & ~self.quota.open(task, option.gpus, option.slots):
                return False
            self.put(task, option, other.start[task.index], block)
        return True

    def save(self) -> Saved:
        """All that changes, for ``restore``."""
        quota = None if self.quota is None else self.quota.save()
        return self.free, self.cells.copy(), self.start.copy(), self.option.copy(), self.gain, quota

    def restore(self, saved: Saved) -> None:
        self.free, cells, self.start, self.option, self.gain, quota = saved
        self.cells[:] = cells
        if self.quota is not None and quota is not None:
            self.quota.restore(quota)


def _fold(fits: int, layout: Layout) -> int:
    """The positions of a row that are set in any slot."""
    reach = 1
    while reach < layout.rows:
        fits |= fits >> (reach * layout.gpus)
        reach *= 2
    return fits & layout.row


def places(option: Option, free: int) -> int:
    """Where a block of the option (of a gang: of one node) may begin among the free cells."""
    for shift in option.time_shifts:
        free &= free >> shift
    for shift in option.width_shifts:
        free &= free >> shift
    return free & option.starts


def _gain(task: Task, start: int, slots: int, horizon: int) -> float:
    """What a job adds with this start: its worth inside the horizon, and the move cost that it saves."""
    inside = horizon - start
    gain = task.worth if slots <= inside else task.worth * inside / slots
    return gain + task.move_cost if start <= task.told else gain


def gang_block(layout: Layout, option: Option, fits: int) -> int:
    """The cells of the earliest gang: whole nodes, the first that are free in a group with enough of them."""
    stride, row_mask = layout.gpus, layout.row
    while fits:
        base = ((fits & -fits).bit_length() - 1) // stride * stride
        row = (fits >> base) & row_mask
        for group in option.groups:
            nodes = row & group
            if nodes.bit_count() >= option.gang:
                block = 0
                for _ in range(option.gang):
                    first = nodes & -nodes
                    block |= option.shape << (base + first.bit_length() - 1)
                    nodes ^= first
                return block
        fits = fits >> (base + stride) << (base + stride)
    return 0
