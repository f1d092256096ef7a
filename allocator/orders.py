"""Orders in which jobs are packed: choose what, then pack the large first.

Placing jobs by worth per cell fills the best slots with small valuable jobs and leaves no room for wide
ones; placing wide jobs first spends the room on work of little worth. So a recipe does it in two steps:
take jobs by worth until they would fill a share of the free cells, then pack those that were taken with
the wide, the long or the urgent first, and give the rest what is left. The share leaves room for what does
not fit together; no one share and no one order is best for all problems, hence several recipes and the
best packing kept. What they reach together was measured on random problems of seven families.
"""

from __future__ import annotations

from allocator.grid import Layout, Task
from allocator.packing import HIGH, LOW

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Key = Callable[[Task], tuple[float, ...]]


def _dense_large(task: Task) -> tuple[float, ...]:
    return (-task.density, -task.cells)


def _dense_small(task: Task) -> tuple[float, ...]:
    return (-task.density, task.cells)


def _worth_per_side(task: Task) -> tuple[float, ...]:
    return (-task.inside / task.cells**0.5,)


def _dense_worth(task: Task) -> tuple[float, ...]:
    return (-task.inside / task.cells**0.8,)


def _worth(task: Task) -> tuple[float, ...]:
    return (-task.inside, task.cells)


def _large(task: Task) -> tuple[float, ...]:
    return (-task.cells, -task.gpus)


def _urgent_large(task: Task) -> tuple[float, ...]:
    return (not task.urgent, -task.cells, -task.gpus)


def _urgent_wide(task: Task) -> tuple[float, ...]:
    return (not task.urgent, -task.gpus, -task.slots)


def _urgent_long(task: Task) -> tuple[float, ...]:
    return (not task.urgent, -task.slots, -task.gpus)


def _last_start(task: Task) -> tuple[float, ...]:
    return (task.last, -task.gpus)


class Recipe:
    """An order and a way to place.

    Attributes:
        by: what to choose jobs by.
        share: how much of the free cells to choose.
        first: what to pack first of those chosen; None as they were chosen.
        side, late, column: where each goes, see ``Packing.fill``.
    """

    __slots__ = ("by", "column", "first", "late", "share", "side")

    def __init__(
        self, by: Key, share: float, first: Key | None, side: int, late: bool = False, column: bool = False
    ) -> None:
        self.by = by
        self.share = share
        self.first = first
        self.side = side
        self.late = late
        self.column = column


# Each adds most to those before it.
RECIPES: tuple[Recipe, ...] = (
    Recipe(_worth_per_side, 1.0, None, HIGH),
    Recipe(_worth_per_side, 1.0, None, HIGH, late=True, column=True),
    Recipe(_dense_small, 0.88, _urgent_large, HIGH),
    Recipe(_worth_per_side, 1.0, None, HIGH, late=True),
    Recipe(_dense_large, 1.0, _last_start, HIGH, column=True),
    Recipe(_dense_worth, 0.95, _urgent_long, LOW),
    Recipe(_worth, 1.0, None, HIGH, column=True),
    Recipe(_dense_worth, 0.88, _last_start, HIGH),
    Recipe(_dense_small, 1.0, _large, HIGH),
    Recipe(_dense_worth, 0.88, _urgent_wide, HIGH, column=True),
)

# In large grids packing is nearly fluid, and columns and lengths matter more than what fits snugly.
LARGE_RECIPES: tuple[Recipe, ...] = (
    RECIPES[1],
    RECIPES[9],
    RECIPES[5],
    Recipe(_dense_small, 0.97, _last_start, HIGH),
    RECIPES[6],
    RECIPES[0],
)


def arrange(tasks: Sequence[Task], capacity: int, recipe: Recipe) -> list[Task]:
    """The order of a recipe for so many free cells."""
    ranked = sorted(tasks, key=recipe.by)
    if recipe.first is None:
        return ranked
    room = capacity * recipe.share
    chosen, rest = [], []
    for task in ranked:
        if task.cells <= room:
            room -= task.cells
            chosen.append(task)
        else:
            rest.append(task)
    chosen.sort(key=recipe.first)
    return chosen + rest


def ceiling(layout: Layout, tasks: Sequence[Task], capacity: int) -> float:
    """More than so many cells can earn.

    The densest jobs fill them, the last of them cut to what is left. And of jobs that take more than half of
    the largest node, each node runs one at a time: the dearest per slot fill the slots up to the last end.
    """
    most = wide = 0.0
    rest = capacity
    half, room = layout.widest(()) / 2, 0
    broad: list[tuple[float, int, float]] = []
    for task in sorted(tasks, key=_dense_large):
        most += task.move_cost
        if rest > 0:
            most += task.inside if task.cells <= rest else task.density * rest
            rest -= task.cells
        if task.gpus > half and len(task.options) == 1 and not task.options[0].gang:
            slots = min(task.slots, layout.horizon)
            broad.append((task.inside / slots, slots, task.inside))
            room = max(room, min(task.last + slots, layout.horizon))
        else:
            wide += task.inside
        wide += task.move_cost
    if len(broad) > 1:
        room *= len(layout.problem.nodes)
        for worth, slots, whole in sorted(broad, reverse=True):
            if room <= 0:
                break
            wide += whole if slots <= room else worth * room
            room -= slots
        most = min(most, wide)
    return most
