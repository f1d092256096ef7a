"""Services give way to a job: what it costs them slot by slot, and the schedule in which they have.

A service may fall below its demand for a while, or to other GPUs: it leaves some in one slot and takes others
in the next, which costs a shortage of one slot. So nothing that a service holds, not even what it holds
now, is out of reach of a job that is worth more; but no faster than its ramp lets it fall.

The invariant: a schedule that comes back keeps every rule; it may be worth less. The cost of the choice:
what ramps cost in the slots before and after is only known once the schedule is made, so ``lacks`` ranks
and never decides.
"""

from __future__ import annotations

from itertools import accumulate

from allocator.grid import Layout, Option, Task
from allocator.realtime import Held, hold, hold_same
from allocator.schedule import Schedule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_MOVED = 0.2  # of a missing GPU, what one that a service has to take elsewhere counts
_MANY = 48  # positions; of more, the likely ones are looked at
_NEVER = float("inf")


def lacks(layout: Layout, held: Sequence[Held], spare: Sequence[int], gpus: int) -> list[float]:
    """What services would lack in each slot, in worth, if a job took so many GPUs: the cheapest yield first.

    Args:
        spare: GPUs of each slot that no service has and the job may take.
    """
    costs = [0.0] * layout.horizon
    ranked = sorted(held, key=lambda one: one.service.penalty)
    floors = [_floor(layout, one) for one in ranked]
    for slot in range(layout.horizon):
        needed = gpus - spare[slot]
        for one, (start, ramp) in zip(ranked, floors, strict=True):
            if needed <= 0:
                break
            unit, count = one.service.gpus_per_replica, one.counts[slot]
            most = count - max(0, start - ramp * slot)
            yielded = min(-(-needed // unit) * unit, most)
            if yielded > 0:
                less = one.service.shortage(slot, count - yielded) - one.missing[slot]
                costs[slot] += one.service.penalty * less
                needed -= yielded
        if needed > 0:
            costs[slot] = _NEVER
    return costs


def clear_from(layout: Layout, gpus: int) -> float:
    """The first slot in which services may have left all of some GPUs (a row mask) that they hold now."""
    soonest = 0.0
    for service in layout.problem.services:
        if isinstance(service.current, tuple):
            left = sum([1 << gpu for gpu in service.current]) & gpus & layout.free & layout.row
            more = left.bit_count() - service.ramp_at(0)
            if more > 0:
                soonest = max(soonest, -(-more // service.ramp) if service.ramp else _NEVER)
    return soonest


def spare_gpus(layout: Layout, free: int) -> list[int]:
    """Free GPUs of each slot."""
    return [((free >> (slot * layout.gpus)) & layout.row).bit_count() for slot in range(layout.horizon)]


def over(costs: Sequence[float], slots: int) -> list[float]:
    """The sum of the costs of so many slots from each slot on, cut to the horizon."""
    sums = list(accumulate(costs, initial=0.0))
    last = len(costs)
    if sums[-1] != _NEVER:
        return [sums[min(slot + slots, last)] - sums[slot] for slot in range(last)]
    return [sum(costs[slot : slot + slots]) for slot in range(last)]


def earnings(layout: Layout, task: Task, option: Option) -> list[float]:
    """What the job earns with each start, and the move cost that it saves."""
    horizon = layout.horizon
    worth = [task.worth * min(1.0, (horizon - start) / option.slots) for start in range(horizon)]
    return [gain + task.move_cost * (start <= task.told) for start, gain in enumerate(worth)]


def cheapest_block(schedule: Schedule, option: Option, start: int, positions: int) -> int:
    """Of the blocks of a slot, the one with the least worth of jobs in it, and of services in part; 0 for
    none.

    Args:
        positions: where in the row a block (of a gang: of one node) may begin.
    """
    shape, base = option.shape, start * schedule.layout.gpus
    if positions.bit_count() > _MANY:
        positions = _likely(schedule, option, start, positions)
    losses = []
    while positions:
        first = positions & -positions
        positions ^= first
        losses.append((_loss(schedule, shape * first << base), first))
    if not option.gang:
        return shape * min(losses)[1] << base if losses else 0
    best, chosen = _NEVER, 0
    for group in option.groups:
        nodes = sorted([(loss, first) for loss, first in losses if first & group])[: option.gang]
        loss = sum([loss for loss, _ in nodes])
        if len(nodes) == option.gang and loss < best:
            best, chosen = loss, sum([shape * first << base for _, first in nodes])
    return chosen


def given_way(
    schedule: Schedule, task: Task, option: Option, start: int, block: int, counts_stay: bool = False
) -> Schedule | None:
    """The schedule with a job in a block and services elsewhere; None when a ramp or a guarantee forbids it.

    Jobs in the block go out.

    Args:
        counts_stay: whether services must hold as many GPUs as before in each slot.
    """
    layout, packing = schedule.layout, schedule.packing
    stay = [
        other
        for other in schedule.tasks
        if other is not task and packing.cells[other.index] and not packing.cells[other.index] & block
    ]
    free = layout.free & ~block
    for other in stay:
        free &= ~packing.cells[other.index]
    for one in schedule.held:
        free &= ~one.cells
    held = list(schedule.held)
    for at, one in enumerate(held):
        if one.cells & block or (one.shortage and not counts_stay):
            free |= one.cells & ~block
            moved = hold_same(layout, free, one) if counts_stay else hold(layout, free, one.service, 0)
            if moved is None or not moved.allowed:
                return None
            held[at] = moved
            free &= ~moved.cells
    made = Schedule(layout, schedule.tasks, held)
    if not made.packing.copy(packing, stay):
        return None
    quota = made.packing.quota
    if block & ~made.packing.free or (
        quota is not None and block & ~quota.open(task, option.gpus, option.slots)
    ):
        return None
    made.packing.put(task, option, start, block)
    return made


def _floor(layout: Layout, held: Held) -> tuple[int, int]:
    """The least that a service may hold in slot 0, and its ramp from there."""
    service = held.service
    if isinstance(service.current, tuple):
        mask = sum([1 << gpu for gpu in service.current])
        return (mask & layout.free & layout.row).bit_count() - service.ramp_at(0), service.ramp
    return (service.current or 0) - service.ramp_at(0), service.ramp


def _likely(schedule: Schedule, option: Option, start: int, positions: int) -> int:
    """Of many positions those where the least is lost, if what a job is worth is spread over its GPUs."""
    layout, packing = schedule.layout, schedule.packing
    base, slots = start * layout.gpus, min(option.slots, layout.rows - start)
    window = (layout.row * layout.repeat(slots)) << base
    each = [0.0] * layout.gpus
    for task in schedule.tasks:
        cells = packing.cells[task.index] & window
        if cells:
            row = cells >> ((cells & -cells).bit_length() - 1) // layout.gpus * layout.gpus & layout.row
            gpus = _bits(row)
            for gpu in gpus:
                each[gpu] += task.worth / len(gpus)
    for one in schedule.held:
        for row in one.rows[start : start + slots]:
            for gpu in _bits(row):
                each[gpu] += _MOVED * one.service.penalty
    sums = list(accumulate(each, initial=0.0))
    width = option.gpus // (option.gang or 1)
    ranked = sorted(_bits(positions), key=lambda first: sums[first + width] - sums[first])
    return sum([1 << first for first in ranked[: max(_MANY, option.gang)]])


def _bits(row: int) -> list[int]:
    found = []
    while row:
        low = row & -row
        found.append(low.bit_length() - 1)
        row ^= low
    return found


def _loss(schedule: Schedule, block: int) -> float:
    cells = schedule.packing.cells
    loss = sum([task.worth for task in schedule.tasks if cells[task.index] & block])
    for one in schedule.held:
        loss += _MOVED * one.service.penalty * (one.cells & block).bit_count()
    return loss
