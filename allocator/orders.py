"""Orders in which jobs are packed: choose what, then pack the large first.

Placing jobs by worth per cell fills the best slots with small valuable jobs and leaves no room for wide
ones; placing wide jobs first spends the room on work of little worth. So a recipe does it in two steps: take jobs
by worth until they would fill a share of the free cells, then pack those that were taken with the wide, the long or the
urgent first, and give the rest what is left. The share leaves room for what does not fit together; no one share
and no one order is best for all problems, hence several recipes and the best packing kept. What they reach
together was measured on random problems of seven families.
"""

from __future__ import annotations

from allocator.grid import Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Key = Callable[[Task], tuple[float, ...]]
    Recipe = tuple[Key, float, Key | None, int]

from allocator.packing import HIGH, LOW


def _dense_large(task: Task) -> tuple[float, ...]:
    return (-task.density, -task.cells)


def _dense_small(task: Task) -> tuple[float, ...]:
    return (-task.density, task.cells)


def _worth_per_side(task: Task) -> tuple[float, ...]:
    return (-task.worth / task.cells**0.5,)


def _worth(task: Task) -> tuple[float, ...]:
    return (-task.worth, task.cells)


def _large(task: Task) -> tuple[float, ...]:
    return (-task.cells, -task.gpus)


def _urgent_large(task: Task) -> tuple[float, ...]:
    return (not task.urgent, -task.cells, -task.gpus)


def _last_start(task: Task) -> tuple[float, ...]:
    return (task.last, -task.gpus)


# What to choose by, how much of the free cells to choose, what to pack first (None: as chosen), which side.
RECIPES: tuple[Recipe, ...] = (
    (_dense_large, 0.93, _urgent_large, HIGH),
    (_dense_small, 0.93, _last_start, LOW),
    (_worth_per_side, 1.0, None, LOW),
    (_worth_per_side, 0.97, _last_start, HIGH),
    (_dense_large, 1.0, _large, HIGH),
    (_worth, 1.0, None, LOW),
)


def arrange(tasks: Sequence[Task], capacity: int, recipe: Recipe) -> list[Task]:
    """The order of a recipe for so many free cells."""
    by, share, first, _ = recipe
    ranked = sorted(tasks, key=by)
    if first is None:
        return ranked
    room = capacity * share
    chosen, rest = [], []
    for task in ranked:
        if task.cells <= room:
            room -= task.cells
            chosen.append(task)
        else:
            rest.append(task)
    chosen.sort(key=first)
    return chosen + rest


def ceiling(tasks: Sequence[Task], capacity: int) -> float:
    """More than so many cells can earn: the densest jobs, the last of them cut to what is left."""
    most = 0.0
    for task in sorted(tasks, key=_dense_large):
        most += task.move_cost
        if capacity > 0:
            most += task.worth if task.cells <= capacity else task.density * capacity
            capacity -= task.cells
    return most
