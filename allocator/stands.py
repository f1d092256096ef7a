"""Where services could stand: cells that they are kept off, so that jobs find wide runs that last.

A service takes its GPUs as demand asks for them, slot by slot. What it leaves is enough in number, but
often in pieces: a run as wide as a large job needs lasts only until the next GPU beside it is taken. A
stand keeps a block of cells clear of all services. They then use what is left in a smaller space, or lack
a few GPUs for a while, and jobs are packed in the clear block. What a stand is worth shows only when jobs
are packed around it, so several are tried: blocks for the whole horizon, as wide as a large job or as all
that the peak leaves, at either end of the cluster or inside it; then the places where valuable jobs that
are still out would take least from services, as with a narrow burst in the way of a long wide job.

The invariant: a stand never takes away a GPU that a service holds now. The cost of the choice: the jobs
that a place is cleared for are looked at one by one.
"""

from __future__ import annotations

from allocator.grid import Layout, Option, Task
from allocator.packing import places
from allocator.realtime import Held
from allocator.schedule import Schedule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MOVED = 0.2  # of a missing GPU, what one that a service has to take elsewhere counts
_WAYS = 3  # options of jobs that are out that a place is cleared for


class Stand:
    """GPUs to keep clear, and what a GPU-slot costs services.

    Attributes:
        clear: the cells that services are kept off.
        prices: how many times what the last job that fits earns in a GPU-slot.
        prefer: sets of GPUs, as row masks, that services take before others.
    """

    __slots__ = ("clear", "prefer", "prices")

    def __init__(self, clear: int, prices: float, prefer: Sequence[int] = ()) -> None:
        self.clear = clear
        self.prices = prices
        self.prefer = prefer


def stands(layout: Layout, tasks: list[Task], held: list[Held]) -> Iterator[Stand]:
    """Stands to try, the most useful first; ``held`` is what services hold without one."""
    gpus, every = layout.gpus, layout.repeat(layout.horizon)
    counts = [sum(column) for column in zip(*[service.counts for service in held], strict=True)]
    spare = gpus - max(counts)
    widths = sorted({task.gpus for task in tasks if not task.options[0].gang}, reverse=True)
    widest, second = (widths * 2)[:2] if widths else (0, 0)
    nodes = [
        ((1 << node.gpus) - 1) << first
        for first, node in zip(layout.problem.first_gpu, layout.problem.nodes, strict=True)
    ]
    seen = set()
    for width, first, prices in (
        (widest, gpus - widest, 0),
        (spare, (gpus - spare) // 4, 2),
        (second, gpus - second, 0),
        (0, 0, 0),
        (spare, -1, 2),
        (spare, (gpus - spare) // 2, 2),
        (widest, _aligned((gpus - widest) // 2, widest), 0),
        (second, _aligned((gpus - second) // 4, second), 2),
        (spare, gpus - spare, 0),
        (2 * widest, gpus - 2 * widest, 2),
    ):
        if width > gpus:
            continue
        clear = _intact(layout, nodes, width) if first < 0 else ((1 << width) - 1) << first
        clear = clear * every & ~_kept(layout)
        if (clear or not width) and (clear, prices) not in seen:
            seen.add((clear, prices))
            yield Stand(clear, prices, () if width else nodes)


def ways(schedule: Schedule) -> Iterator[Stand]:
    """For the most valuable jobs that are out: the place where services would lack least, and what stands
    there is worth least."""
    layout, packing, held = schedule.layout, schedule.packing, schedule.held
    stride, row = layout.gpus, layout.row
    penalty = min([service.service.penalty for service in held if service.cells], default=0.0)
    kept = _kept(layout)
    spare = []
    for slot in range(layout.horizon):
        free = ((layout.free >> (slot * stride)) & row).bit_count()
        spare.append(free - sum([service.counts[slot] for service in held]))
    out = [task for task in schedule.tasks if not packing.cells[task.index] and not task.options[0].gang]
    seen: set[Option] = set()
    for task in sorted(out, key=lambda task: -task.worth):
        for option in task.options:
            if option in seen:
                continue
            seen.add(option)
            where = places(option, layout.free & ~kept)
            lack = [penalty * max(0, option.gpus - left) for left in spare]
            costs = []
            for start in range(option.first, option.last + 1):
                if (where >> (start * stride)) & row:
                    costs.append((sum(lack[start : start + option.slots]), start))
            if costs and min(costs)[0] < task.worth:
                start = min(costs)[1]
                yield Stand(_least_in_way(schedule, option, start, (where >> (start * stride)) & row), 0)
            if len(seen) == _WAYS:
                return


def _least_in_way(schedule: Schedule, option: Option, start: int, positions: int) -> int:
    """Of the blocks in a slot, the one with the least worth of jobs in it, and of services in part."""
    cells, least, chosen = schedule.packing.cells, -1.0, 0
    while positions:
        first = positions & -positions
        positions ^= first
        block = option.shape * first << (start * schedule.layout.gpus)
        loss = sum([task.worth for task in schedule.tasks if cells[task.index] & block])
        for service in schedule.held:
            loss += _MOVED * service.service.penalty * (service.cells & block).bit_count()
        if least < 0 or loss < least:
            least, chosen = loss, block
    return chosen


def _kept(layout: Layout) -> int:
    """The cells of GPUs that services hold now."""
    row = 0
    for service in layout.problem.services:
        if isinstance(service.current, tuple):
            row |= sum([1 << gpu for gpu in service.current])
    return row * layout.repeat(layout.horizon)


def _aligned(first: int, width: int) -> int:
    return first - first % width if width else first


def _intact(layout: Layout, nodes: list[int], most: int) -> int:
    """Whole nodes, no more than so many GPUs together, those that holes and running jobs touch least."""
    every, clear = layout.repeat(layout.horizon), 0
    for _, mask in sorted([((mask * every & ~layout.free).bit_count(), mask) for mask in nodes]):
        if mask.bit_count() <= most:
            most -= mask.bit_count()
            clear |= mask
    return clear
