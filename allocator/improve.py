"""Local search on a schedule: take the jobs of a part of the plan out, and pack all that are out anew.

A step clears a chance rectangle of GPUs and slots (now and then chance jobs all over the plan) and packs
what is then out, by worth over the side of a square of as many cells and some noise, in one of several
ways. It stands when the plan is worth no less than before: equal ones are kept because they walk off
plateaus. Moving one job at a time finds far less, because a wide job needs the room of many narrow ones,
and these each other's.

The invariant: the schedule is never worth less than when it came in, and services stay where they are. The
cost of the choice: chance; the same seed gives the same plan. The budget grows while steps succeed, so an
easy problem costs little.
"""

from __future__ import annotations

from random import Random
from time import perf_counter

from allocator.grid import Task
from allocator.packing import HIGH, LOW
from allocator.schedule import Schedule

_PATIENCE = 4  # a step that succeeds earns this many more, up to ...
_MOST = 8  # ... so many times the steps asked for
_SCATTERED = 0.3  # how often chance jobs are taken out, and not those of a rectangle
_USUAL = 40  # jobs in a plan of usual size; of a larger one a smaller part is taken out
_CANDIDATES = 80  # jobs that a step tries to put in, at most
_POWER = 0.5  # worth over cells to this power says what is packed first: large jobs before dense ones
_WAYS = ((HIGH, False), (HIGH, True), (LOW, True))  # side, column: see ``Packing``


def improve(
    schedule: Schedule, steps: int, rng: Random, until: float | None = None, *, adaptive: bool = True
) -> Schedule:
    """Take steps until the budget or the time is spent, or all jobs are in.

    Args:
        steps: budget; with ``adaptive``, success earns more.
        until: moment (of ``perf_counter``) after which no step is begun.
    """
    packing, random = schedule.packing, rng.random
    key = [task.inside / task.cells**_POWER for task in schedule.tasks]
    left, cap = steps, _MOST * steps if adaptive else steps
    while left > 0 and cap > 0 and (until is None or perf_counter() < until):
        inside = [task for task in schedule.tasks if packing.cells[task.index]]
        if len(inside) == len(schedule.tasks) or not inside:
            break
        left -= 1
        cap -= 1
        saved, before = packing.save(), packing.gain
        for task in _chosen(schedule, inside, rng):
            packing.remove(task)
        side, column = _WAYS[int(random() * len(_WAYS))]
        packing.fill(_shuffled(schedule, key, rng), side, column=column)
        if packing.gain < before:
            packing.restore(saved)
        elif packing.gain > before and adaptive:
            left += _PATIENCE
    return schedule


def _chosen(schedule: Schedule, inside: list[Task], rng: Random) -> list[Task]:
    """The jobs to take out."""
    layout, cells, random = schedule.layout, schedule.packing.cells, rng.random
    part = min(1.0, _USUAL / len(inside))
    if random() < _SCATTERED:
        share = part * (0.15 + 0.35 * random())
        return [task for task in inside if random() < share]
    width = int(layout.gpus * part * (0.15 + 0.45 * random())) + 1
    slots = int(layout.horizon * (0.25 + 0.5 * random())) + 1
    gpu = int(random() * (layout.gpus - width + 1))
    slot = int(random() * (layout.horizon - slots + 1))
    window = layout.shape(width, slots) << (slot * layout.gpus + gpu)
    return [task for task in inside if cells[task.index] & window]


def _shuffled(schedule: Schedule, key: list[float], rng: Random) -> list[Task]:
    """Jobs that are out, in the order to try them."""
    cells, random = schedule.packing.cells, rng.random
    noise = 0.05 + 0.35 * random()
    least, span = 1 - noise, 2 * noise
    out = [(key[at] * (least + span * random()), at) for at, taken in enumerate(cells) if not taken]
    out.sort(reverse=True)
    tasks = schedule.tasks
    return [tasks[at] for _, at in out[:_CANDIDATES]]
