"""Where services could stand: cells that they are kept off, so that jobs find wide runs that last.

A service takes its GPUs as demand asks for them, slot by slot. What it leaves is enough in number, but
often in pieces: a run as wide as a large job needs lasts only until the next GPU beside it is taken. A
stand keeps a block of cells clear of all services. They then use what is left in a smaller space, or lack
a few GPUs for a while, and jobs are packed in the clear block. What a stand is worth shows only when jobs
are packed around it, so several are tried: blocks for the whole horizon, as wide as a large job or as all
that the peak leaves, at either end of the cluster or inside it; then the places where valuable jobs that
are still out would take least from services, as with a narrow burst in the way of a long wide job, or with a
service that stands over two nodes where one would do.

The invariant: blocks for the whole horizon leave a service what it holds now; only whole nodes (a move that
costs a shortage of a slot), and a job that is worth more than what that costs, take it away. The cost of the
choice: the jobs that a place is cleared for are looked at one by one.
"""

from __future__ import annotations

from allocator.give_way import cheapest_block, clear_from, earnings, lacks, over, spare_gpus
from allocator.grid import Layout, Option, Task
from allocator.packing import places
from allocator.realtime import Held
from allocator.schedule import Schedule, least_per_gpu, swing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from allocator.problem import Service

_STARTS = 3  # of such a job that are looked at until services can have left in time
_WAYS = 3  # options of jobs that are out that a place is cleared for


class Stand:
    """GPUs to keep clear, and what a GPU-slot costs services.

    Attributes:
        clear: the cells that services are kept off.
        prices: how many times what the last job that fits earns in a GPU-slot.
        prefer: sets of GPUs, as row masks, that services take before others.
        order: which service takes its GPUs first, see ``serve``; None for the dearest.
    """

    __slots__ = ("clear", "order", "prefer", "prices")

    def __init__(
        self,
        clear: int,
        prices: float,
        prefer: Sequence[int] = (),
        order: Callable[[Service], float] | None = None,
    ) -> None:
        self.clear = clear
        self.prices = prices
        self.prefer = prefer
        self.order = order


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
    # An uncertain demand is met in all its quantiles at first; then each is weighed against the price.
    weighed = [(0, 0, 1)] if any(service.service.demand is None for service in held) else []
    if len(held) > 1:
        # What is held all day stands together at the end; a burst beside it parts the free GPUs least.
        for prices in (0, 2, 1):
            yield Stand(0, prices, order=swing)
        if any(one.service.gpus_per_replica > 1 for one in held) and any(one.shortage for one in held):
            yield Stand(0, 0, order=least_per_gpu)
    seen = set()
    for width, first, prices in (
        (widest, gpus - widest, 0),
        (spare, (gpus - spare) // 4, 2),
        (spare, gpus - spare, 0),
        (second, gpus - second, 0),
        (0, 0, 0),
        (2 * widest, gpus - 2 * widest, 2),
        (spare, -1, 2),
        *weighed,
    ):
        if width > gpus:
            continue
        clear = _intact(layout, nodes, width) if first < 0 else ((1 << width) - 1) << first
        clear = clear * every & ~_kept(layout)
        if (clear or not width) and (clear, prices) not in seen:
            seen.add((clear, prices))
            yield Stand(clear, prices, () if width else nodes)
    if _kept(layout):
        yield from _elsewhere(layout, nodes, spare)


def _elsewhere(layout: Layout, nodes: list[int], most: int) -> Iterator[Stand]:
    """Whole nodes that services leave for good, as soon as their ramps let them."""
    row = _intact(layout, nodes, most)
    soonest = clear_from(layout, row)
    if row and soonest < layout.horizon:
        first = int(soonest)
        yield Stand(row * layout.repeat(layout.horizon - first) << (first * layout.gpus), 0, order=swing)


def ways(schedule: Schedule) -> Iterator[Stand]:
    """For the most valuable jobs that are out: the place where services would lack least, and what stands
    there is worth least."""
    for _, _, _, block in ways_in(schedule):
        yield Stand(block, 0)


def ways_in(schedule: Schedule) -> Iterator[tuple[Task, Option, int, int]]:
    """The same places: job, option, start and cells."""
    layout, packing, held = schedule.layout, schedule.packing, schedule.held
    stride, row = layout.gpus, layout.row
    taken = 0
    for service in held:
        taken |= service.cells
    spare = spare_gpus(layout, layout.free & ~taken)
    out = [task for task in schedule.tasks if not packing.cells[task.index]]
    seen: set[Option] = set()
    for task in sorted(out, key=lambda task: -task.worth):
        for option in task.options:
            if option in seen:
                continue
            seen.add(option)
            where = places(option, layout.free)
            costs = over(lacks(layout, held, spare, option.gpus), option.slots)
            earned = earnings(layout, task, option)
            starts = [
                (costs[start] - earned[start], start)
                for start in range(option.first, option.last + 1)
                if costs[start] < earned[start] and (where >> (start * stride)) & row
            ]
            for _ in range(_STARTS):
                if not starts:
                    break
                start = min(starts)[1]
                block = cheapest_block(schedule, option, start, (where >> (start * stride)) & row)
                soonest = clear_from(layout, block >> (start * stride) & row)
                if block and soonest <= start:
                    yield task, option, start, block
                    break
                starts = [entry for entry in starts if entry[1] >= soonest and entry[1] != start]
            if len(seen) == _WAYS:
                return


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
