"""Real-time services: how many GPUs each holds in each slot, and which.

The count is chosen first. Cost falls with each GPU held (the shortage, convex in the count) and rises with the
price of a GPU-slot, what the batch work displaced by it would earn; counts of neighbouring slots differ by the ramp
at most. Such a problem is solved exactly, slot by slot: the cheapest way to hold n GPUs stays a convex function
of n, and "at most the ramp away" only stretches it around its minimum. At price 0 this gives the lowest counts
that follow the demand, rising before a steep burst and falling after it; at a price, a narrow burst may not be
followed to its top.

Then GPUs are given, in replicas: those needed longest get the highest-numbered GPUs that stay free as long as
they are needed, and what came last goes first. So the set only grows while the count rises and only shrinks
while it falls. A GPU that fails is replaced within the ramp; one that a committed job takes over is left.

The cost of the choice: counts are fixed before GPUs are. Where holes leave no GPU free for as long as
needed, the count found to be out of reach is capped and chosen again.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial

from allocator.grid import Layout
from allocator.problem import Service

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Chooser = Callable[[Sequence[int], Sequence[int], int | None], list[int]]

_ROUNDS = 6  # how often counts that could not be held are chosen again
_TIE = 1e-6  # a price so small that it only decides between equal plans: hold less


class Held:
    """What a service holds: a mask of GPUs for each slot, and the counts."""

    __slots__ = ("cells", "counts", "rows", "service", "shortage")

    def __init__(self, service: Service, rows: list[int], layout: Layout) -> None:
        self.service = service
        self.rows = rows
        self.counts = [row.bit_count() for row in rows]
        self.shortage = _shortage(service, self.counts)
        self.cells = 0
        stride = layout.gpus
        for slot, row in enumerate(rows):
            if row:
                self.cells |= row << (slot * stride)

    @property
    def cost(self) -> float:
        return self.shortage * self.service.penalty


def hold(layout: Layout, free: int, service: Service, price: float) -> Held:
    """The GPUs that a service holds among the free cells when a GPU-slot costs ``price``."""
    return hold_counts(layout, free, service, partial(choose_counts, service, price))


def hold_counts(layout: Layout, free: int, service: Service, choose: Chooser) -> Held:
    """The same for any way to choose the counts: ``choose(caps, lost, start)``, see ``choose_counts``."""
    slots, replica = layout.horizon, service.gpus_per_replica
    stride, row = layout.gpus, layout.row
    rows = [(free >> (slot * stride)) & row for slot in range(slots)]
    out = [(layout.out >> (slot * stride)) & row for slot in range(slots)] if layout.out else [0] * slots
    begin = _Start(layout, service, rows[0], out[0])
    caps = [available.bit_count() // replica for available in rows]
    if begin.shrink_only:
        caps[0] = min(caps[0], len(begin.held))
    lost = [0] * slots
    for _ in range(_ROUNDS):
        counts = choose(caps, lost, begin.count)
        held, slot, losses = _give(layout, service, rows, out, counts, begin)
        if slot < 0:
            break
        reached = held[slot].bit_count() // replica
        if reached < caps[slot]:
            caps[slot] = reached
        elif losses <= lost[slot]:
            break
        lost[slot] = max(lost[slot], losses)
    return Held(service, held, layout)


def choose_counts(
    service: Service, price: float, caps: Sequence[int], lost: Sequence[int], start: int | None
) -> list[int]:
    """Replicas to hold in each slot at the lowest cost of shortage and GPU-slots.

    Args:
        price: of a GPU-slot.
        caps: most replicas that can be held in each slot.
        lost: replicas that a failure takes at the beginning of each slot, whatever the ramp.
        start: replicas held before slot 0, or None when any count may begin.
    """
    unit = service.gpus_per_replica
    ramp = service.ramp // unit
    most = max([-(-max(service.wanted(slot)) // unit) for slot in range(len(caps))], default=0)
    if start is not None and start > most:
        most = start
    step = (price + _TIE * (1 + price)) * unit
    wall = 1e6 * (1 + service.penalty + price) * (1 + most)
    best: list[float] = []  # cheapest way to hold n replicas in the last slot looked at
    trail: list[int] = []  # where that was lowest, for each slot
    for slot, cap in enumerate(caps):
        cost = _slot_costs(service, slot, most, step)
        if cap < most:
            for count in range(max(cap, 0) + 1, most + 1):
                cost[count] += wall * (count - cap)
        if slot:
            # From m one may go up by the ramp, and down by the ramp and what is lost: stretch both flanks.
            low, down = trail[-1], ramp + lost[slot]
            flat = min(low + ramp, most) - max(low - down, 0) + 1
            reach = best[down:low] + [best[low]] * flat + best[low + 1 : max(most - ramp + 1, 0)]
            best = [a + b for a, b in zip(cost, reach, strict=True)]
        else:
            best = cost
            if start is not None:
                for count in range(most + 1):
                    best[count] += 1e3 * wall * max(count - start - ramp, start - lost[0] - ramp - count, 0)
        trail.append(best.index(min(best)))
    counts = [0] * len(caps)
    count = trail[-1]
    for slot in range(len(caps) - 1, -1, -1):
        if slot + 1 < len(caps):
            # The predecessor may lie at most the ramp below, and the ramp and the lost above.
            count = min(max(trail[slot], count - ramp), count + ramp + lost[slot + 1])
        counts[slot] = count
    return counts


def _slot_costs(service: Service, slot: int, most: int, step: float) -> list[float]:
    """Cost of holding 0, 1, … replicas in a slot: shortage and price."""
    unit, penalty = service.gpus_per_replica, service.penalty
    if service.demand is not None:
        want = service.demand[slot]
        full = min(-(-want // unit), most)
        short = penalty * want
        slope = step - penalty * unit
        costs = [short + slope * count for count in range(full)]
        costs += [step * count for count in range(full, most + 1)]
        return costs
    wanted = service.wanted(slot)
    share = penalty / len(wanted)
    return [
        step * count
        + share * sum([want - count * unit for want in wanted[bisect_right(wanted, count * unit) :]])
        for count in range(most + 1)
    ]


class _Start:
    """What a service holds before slot 0: replicas in service, and how many count for the ramp."""

    __slots__ = ("count", "held", "shrink_only")

    def __init__(self, layout: Layout, service: Service, free: int, out: int) -> None:
        self.held: list[int] = []
        self.shrink_only = False  # a running job sits on one of its GPUs: no other may be added in slot 0
        if service.current is None:
            self.count: int | None = None
        elif isinstance(service.current, int):
            self.count = service.current // service.gpus_per_replica
        else:
            mask = 0
            for gpu in service.current:
                mask |= 1 << gpu
            whole = layout.replicas(mask, service.gpus_per_replica)
            alive = [replica for replica in whole if not replica & out]
            self.held = [replica for replica in alive if not replica & ~free]
            self.shrink_only = len(self.held) < len(alive)
            self.count = len(self.held)


def _give(
    layout: Layout, service: Service, rows: list[int], out: list[int], counts: list[int], begin: _Start
) -> tuple[list[int], int, int]:
    """Give GPUs slot by slot.

    Returns:
        the mask of each slot, the first slot whose count was not reached (or -1), and the replicas lost there.
    """
    unit, ramp = service.gpus_per_replica, service.ramp // service.gpus_per_replica
    fixed = service.current is not None
    stack = list(reversed(begin.held))  # lowest-numbered last: it goes first
    held: list[int] = []
    missed, losses = -1, 0
    mask = 0
    for replica in stack:
        mask |= replica
    before = begin.count
    for slot, target in enumerate(counts):
        free, lost, taken = rows[slot], 0, False
        if mask & ~free:
            gone = [replica for replica in stack if replica & ~free]
            taken = any(not replica & out[slot] for replica in gone)
            stack = [replica for replica in stack if not replica & ~free]
            lost = len(gone)
        have = len(stack)
        if slot == 0:
            taken = taken or begin.shrink_only
            count = before if before is not None else target
            base = have if isinstance(service.current, tuple) else count
        else:
            base = have
        if slot or fixed:
            wanted = min(max(target, base - ramp), base + ramp)
        else:
            wanted = target
        if wanted > have and not taken:
            _grow(layout, unit, rows, counts, slot, wanted, stack)
        elif wanted < have:
            _shrink(rows, slot, have - wanted, stack)
        mask = 0
        for replica in stack:
            mask |= replica
        held.append(mask)
        if missed < 0 and len(stack) != target:
            missed, losses = slot, lost
    return held, missed, losses


def _grow(
    layout: Layout, unit: int, rows: list[int], counts: list[int], slot: int, wanted: int, stack: list[int]
) -> None:
    """Add replicas: each on GPUs that stay free for as long as the counts need it, or else the longest."""
    taken = 0
    for replica in stack:
        taken |= replica
    ones = (1 << unit) - 1
    for level in range(len(stack) + 1, wanted + 1):
        until = slot + 1
        while until < len(counts) and counts[until] >= level:
            until += 1
        places, best = 0, 0
        window = layout.row & ~taken
        for at in range(slot, until):
            window &= rows[at]
            places = window if unit == 1 else layout.block_starts(window, unit)
            if not places:
                break
            best = places
        if not best:
            return
        near = best & (taken >> unit | taken << 1)
        block = ones << ((near or best).bit_length() - 1)
        stack.append(block)
        taken |= block


def _shrink(rows: list[int], slot: int, excess: int, stack: list[int]) -> None:
    """Drop replicas: those that will lose their GPUs first, else those that came last."""
    lasting = rows[slot]
    for row in rows[slot + 1 :]:
        lasting &= row
    if all([not replica & ~lasting for replica in stack]):
        del stack[len(stack) - excess :]
        return
    until = [_free_until(rows, slot, replica) for replica in stack]
    for at in sorted(sorted(range(len(stack)), key=lambda at: (until[at], -at))[:excess], reverse=True):
        del stack[at]


def _free_until(rows: list[int], slot: int, replica: int) -> int:
    for at in range(slot, len(rows)):
        if replica & ~rows[at]:
            return at
    return len(rows)


def _shortage(service: Service, counts: list[int]) -> float:
    if service.demand is not None:
        return sum([want - have for want, have in zip(service.demand, counts, strict=True) if want > have])
    return sum([service.shortage(slot, have) for slot, have in enumerate(counts)])
