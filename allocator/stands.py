"""Where services could stand: GPUs that they are kept off, so that jobs find wide runs that last.

A service takes its GPUs as demand asks for them, slot by slot. What it leaves is enough in number, but often in
pieces: a run as wide as a large job needs lasts only until the next GPU is taken beside it. A stand keeps some
neighbouring GPUs clear of all services in every slot. Services then use what is left in a smaller space, or
lack a few GPUs for a while, and jobs are packed in the clear block. What a stand is worth shows only when jobs
are packed around it, so several are tried: as wide as a large job, or as all that the peak leaves, at either
end of the cluster or inside it.

The invariant: a stand never takes away a GPU that a service holds now. The cost of the choice: a stand is the
same in all slots, so a burst that wide jobs could stand before and after is met by luck only.
"""

from __future__ import annotations

from allocator.grid import Layout, Task
from allocator.realtime import Held

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Stand:
    """GPUs to keep clear, and what a GPU-slot costs services.

    Attributes:
        clear: row mask of the GPUs that services are kept off.
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
    gpus, taken = layout.gpus, 0
    counts = [sum(column) for column in zip(*[service.counts for service in held], strict=True)]
    spare = gpus - max(counts)
    widths = sorted({task.gpus for task in tasks if not task.options[0].gang}, reverse=True)
    widest, second = (widths * 2)[:2] if widths else (0, 0)
    for service in layout.problem.services:
        if isinstance(service.current, tuple):
            taken |= sum([1 << gpu for gpu in service.current])
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
        clear &= ~taken
        if (clear or not width) and (clear, prices) not in seen:
            seen.add((clear, prices))
            yield Stand(clear, prices, () if width else nodes)


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
