"""Local search on a packing: make room for a job that is out by taking others out, and put back what fits.

A step picks a job that is out and a place for it, takes out the jobs that stand there, and lets these and all
others that are out have the gaps, in an order with some chance in it. The step stands when the plan is worth
at least as much as before; equal ones are kept because they walk off plateaus. The invariant: the packing is
never worth less than when it came in. The cost of the choice: chance; the same seed gives the same plan.
"""

from __future__ import annotations

from random import Random
from time import perf_counter

from allocator.grid import Task
from allocator.packing import HIGH, LOW, Packing, places


def improve(packing: Packing, tasks: list[Task], steps: int, rng: Random, until: float | None = None) -> int:
    """Take up to ``steps`` steps, until a moment. Returns how many; fewer also when all jobs are in."""
    random = rng.random
    layout, cells = packing.layout, packing.cells
    base = packing.free
    for mask in cells:
        base |= mask
    spots: dict[int, int] = {}
    best = packing.gain
    for step in range(steps):
        out = [task for task in tasks if not cells[task.index]]
        if not out or (until is not None and perf_counter() > until):
            return step
        task = out[int(random() * len(out))]
        option = task.options[int(random() * len(task.options))]
        key = id(option)
        where = spots.get(key)
        if where is None:
            where = spots[key] = places(option, base)
        if not where or option.gang:
            continue
        # The better of two chance places: the one where the jobs in the way are worth less.
        loss = -1.0
        size = where.bit_length()
        for _ in range(2):
            at = int(random() * size)
            rest = where >> at
            at += (rest & -rest).bit_length() - 1
            block = option.shape << at
            standing = [other for other in tasks if cells[other.index] & block]
            worth = sum([other.worth for other in standing])
            if loss < 0 or worth < loss:
                loss, victims, chosen = worth, standing, at
        saved = packing.save()
        for other in victims:
            packing.remove(other)
        packing.put(task, option, chosen // layout.gpus, option.shape << chosen)
        queue = victims + [other for other in out if other is not task]
        queue.sort(key=lambda other: other.worth * (0.5 + random()), reverse=True)
        packing.fill(queue, HIGH if random() < 0.5 else LOW)
        if packing.gain < best:
            packing.restore(saved)
            cells = packing.cells
        else:
            best = packing.gain
    return steps
