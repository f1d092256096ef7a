"""Real-time services: how many GPUs each holds in each slot, and which.

The count is chosen first. Cost falls with each GPU held (the shortage, convex in the count) and rises with
the price of a GPU-slot, what the batch work displaced by it would earn; counts of neighbouring slots
differ by the ramp at most. Such a problem is solved exactly, slot by slot: the cheapest way to hold n GPUs
stays a convex function of n, and "at most the ramp away" only stretches it around its minimum. At price 0
this gives the lowest counts that follow the demand, rising before a steep burst and falling after it; at a
price, a narrow burst may not be followed to its top.

Then GPUs are given, in replicas: those needed longest get the highest-numbered GPUs that stay free as long
as they are needed, and what came last goes first. So the set only grows while the count rises and only
shrinks while it falls. A GPU that fails is replaced within the ramp; one that a committed job takes over
is left.

The cost of the choice: counts are fixed before GPUs are. Where holes leave no GPU free for as long as
needed, the count found to be out of reach is capped and chosen again.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache, partial
from operator import gt

from allocator.grid import Layout
from allocator.problem import Service

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Chooser = Callable[[Sequence[int], Sequence[int], int | None], list[int]]

_ROUNDS = 6  # how often counts that could not be held are chosen again
_TIE = 1e-6  # a price so small that it only decides between equal plans: hold less


class Held:
    """What a service holds: a mask of GPUs for each slot, the counts, and what is missing.

    It is not ``allowed`` when GPUs that another service takes make it fall by more than its ramp.
    """

    __slots__ = ("allowed", "cells", "counts", "missing", "rows", "service", "shortage")

    def __init__(self, service: Service, rows: list[int], layout: Layout, allowed: bool) -> None:
        self.service = service
        self.allowed = allowed
        self.rows = rows
        self.counts = [row.bit_count() for row in rows]
        self.missing = _missing(service, self.counts)
        self.shortage = sum(self.missing)
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


def hold_counts(
    layout: Layout, free: int, service: Service, choose: Chooser, kept: int = 0, prefer: Sequence[int] = ()
) -> Held:
    """The same for any way to choose the counts: ``choose(caps, lost, start)``, see ``choose_counts``.

    Args:
        kept: cells, free ones, that the service may hold whatever others take later, see ``kept_cells``.
        prefer: sets of GPUs, as row masks, to take from before all others, the first one first.
    """
    slots, stride, row = layout.horizon, layout.gpus, layout.row
    rows = [(free >> (slot * stride)) & row for slot in range(slots)] if free != layout.all else [row] * slots
    held = _hold(layout, service, rows, choose, prefer)
    if not held.allowed:
        # Only GPUs that no other service takes later, and those that were kept for this one.
        steady = row
        for slot in range(slots - 1, -1, -1):
            beyond = ~(layout.free >> (slot * stride)) & row
            steady &= rows[slot] | beyond
            rows[slot] &= steady | kept >> (slot * stride)
        held = _hold(layout, service, rows, choose, prefer)
    return held


def hold_same(layout: Layout, free: int, held: Held) -> Held | None:
    """As many GPUs in each slot as before, among other free cells; None when that cannot be."""
    rows = [(free >> (slot * layout.gpus)) & layout.row for slot in range(layout.horizon)]
    counts = [count // held.service.gpus_per_replica for count in held.counts]
    same = _hold(layout, held.service, rows, lambda *_: counts, (), rounds=1)
    return same if same.allowed and same.counts == held.counts else None


def _hold(
    layout: Layout,
    service: Service,
    rows: list[int],
    choose: Chooser,
    prefer: Sequence[int],
    rounds: int = _ROUNDS,
) -> Held:
    """Choose counts for these free GPUs of each slot until they can be held."""
    slots, replica, stride, row = layout.horizon, service.gpus_per_replica, layout.gpus, layout.row
    whole = layout.free == layout.all
    reach = [row] * slots if whole else [(layout.free >> (slot * stride)) & row for slot in range(slots)]
    out = [(layout.out >> (slot * stride)) & row for slot in range(slots)] if layout.out else [0] * slots
    begin = _Start(layout, service, rows[0], out[0])
    caps = [available.bit_count() // replica for available in rows]
    if begin.shrink_only:
        caps[0] = min(caps[0], len(begin.held))
    # What becomes unavailable may be what the service holds: then it falls by more than its ramp.
    lost = [0] * slots
    if not whole:
        for slot in range(1, slots):
            if gone := reach[slot - 1] & ~reach[slot]:
                lost[slot] = -(-gone.bit_count() // replica)
    for _ in range(rounds):
        counts = choose(caps, lost, begin.count)
        held, slot, losses, allowed = _give(layout, service, rows, (reach, out), counts, begin, prefer)
        if slot < 0:
            break
        reached = held[slot].bit_count() // replica
        if reached < counts[slot]:
            caps[slot] = reached
        elif losses < lost[slot]:
            lost[slot] = losses
        else:
            break
    return Held(service, held, layout, allowed)


def kept_cells(layout: Layout, free: int, service: Service, choose: Chooser) -> int:
    """The cells that a service goes on holding of what it holds now, were it alone among the free cells.

    Where only the count is known, any free GPUs stand for those that it holds.
    """
    if service.current is None:
        return 0
    stride, unit, kept = layout.gpus, service.gpus_per_replica, 0
    rows = [(free >> (slot * stride)) & layout.row for slot in range(layout.horizon)]
    if isinstance(service.current, int):
        start = service.current // unit
        stack = layout.replicas(rows[0], unit)[::-1][:start]
    else:
        stack = layout.replicas(sum([1 << gpu for gpu in service.current]), unit)[::-1]
        start = len(stack)
    caps = [row.bit_count() // unit for row in rows]
    for slot, count in enumerate(choose(caps, [0] * len(caps), start)):
        stack = [replica for replica in stack if not replica & ~rows[slot]][:count]
        kept |= sum(stack) << (slot * stride)
    return kept


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
    ramp, first_ramp = service.ramp // unit, service.ramp_at(0) // unit
    if price == 0 and service.penalty:
        highest = service.demand or [max(row) for row in service.demand_quantiles or ()]
        counts = _envelope(highest, unit, (first_ramp, ramp), caps, start)
        if counts is not None:
            return counts
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
                    far = max(count - start - first_ramp, start - lost[0] - first_ramp - count, 0)
                    best[count] += 1e3 * wall * far
        trail.append(best.index(min(best)))
    counts = [0] * len(caps)
    count = trail[-1]
    for slot in range(len(caps) - 1, -1, -1):
        if slot + 1 < len(caps):
            # The predecessor may lie at most the ramp below, and the ramp and the lost above.
            count = min(max(trail[slot], count - ramp), count + ramp + lost[slot + 1])
        counts[slot] = count
    return counts


def _envelope(
    demand: Sequence[int], unit: int, ramps: tuple[int, int], caps: Sequence[int], start: int | None
) -> list[int] | None:
    """The lowest counts that meet all demand within the ramp; None when caps or the start do not let them.

    What ``choose_counts`` finds at price 0, in two sweeps, for the common case.
    """
    counts = list(demand) if unit == 1 else [-(-want // unit) for want in demand]
    first_ramp, ramp = ramps
    floor = 0 if start is None else start + ramp - first_ramp
    for slot, want in enumerate(counts):
        floor -= ramp
        if floor < want:
            floor = want
        else:
            counts[slot] = floor
    for slot in range(len(counts) - 2, -1, -1):
        if counts[slot] < counts[slot + 1] - ramp:
            counts[slot] = counts[slot + 1] - ramp
    if start is not None and counts[0] > start + first_ramp:
        return None
    return None if any(map(gt, counts, caps)) else counts


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
    wanted = tuple(service.wanted(slot))
    share = penalty / len(wanted)
    return [step * count + share * lack for count, lack in enumerate(lacking(wanted, unit, most))]


@lru_cache(maxsize=4096)
def lacking(wanted: tuple[int, ...], unit: int, most: int) -> tuple[int, ...]:
    """GPUs that 0, 1, … replicas lack, over all quantiles. Kept: a search, and the next plan, ask again."""
    return tuple(
        [
            sum([want - count * unit for want in wanted[bisect_right(wanted, count * unit) :]])
            for count in range(most + 1)
        ]
    )


class _Start:
    """What a service holds before slot 0: replicas in service, and how many count for the ramp."""

    __slots__ = ("count", "held", "shrink_only")

    def __init__(self, layout: Layout, service: Service, free: int, out: int) -> None:
        self.held: list[int] = []
        self.shrink_only = False  # one of its GPUs is taken: no other may be added in slot 0
        if service.current is None:
            self.count: int | None = None
        elif isinstance(service.current, int):
            self.count = service.current // service.gpus_per_replica
        else:
            mask = 0
            for gpu in service.current:
                mask |= 1 << gpu
            whole = layout.replicas(mask, service.gpus_per_replica)  # ones, from the lowest
            alive = [replica for replica in whole if not replica & out]
            self.held = [replica for replica in alive if not replica & ~free]
            self.shrink_only = len(self.held) < len(alive)
            # What another service was given is left in the usual way, within the ramp; running jobs force it.
            in_reach = layout.free & layout.row
            self.count = len([replica for replica in alive if not replica & ~in_reach])


def _give(
    layout: Layout,
    service: Service,
    rows: list[int],
    physical: tuple[list[int], list[int]],
    counts: list[int],
    begin: _Start,
    prefer: Sequence[int],
) -> tuple[list[int], int, int, bool]:
    """Give GPUs slot by slot.

    Args:
        rows: the GPUs that are free in each slot.
        physical: the GPUs without running jobs and holes, and those in holes.

    Returns:
        the mask of each slot; the first slot whose count was not reached (or -1), and the replicas that
        running jobs and holes took there; whether the count never fell by more than that and the ramp.
    """
    unit, ramp = service.gpus_per_replica, service.ramp_at(0) // service.gpus_per_replica
    reach, out = physical
    stack = begin.held[::-1]  # lowest-numbered last: it goes first
    mask = sum(stack)
    held: list[int] = []
    missed, losses, allowed = -1, 0, True
    base = begin.count
    guessed = isinstance(service.current, int)
    for slot, target in enumerate(counts):
        lost, may_grow = 0, slot > 0 or not begin.shrink_only
        if mask & ~rows[slot]:
            gone = [replica for replica in stack if replica & ~rows[slot]]
            may_grow = may_grow and all(replica & out[slot] for replica in gone)
            stack = [replica for replica in stack if not replica & ~rows[slot]]
            lost = len([replica for replica in gone if replica & ~reach[slot]])
            if base is not None:
                base -= lost
        have = len(stack)
        wanted = target if base is None else min(max(target, base - ramp), base + ramp)
        if wanted != have:
            if wanted < have:
                _shrink(rows, slot, have - wanted, stack)
            elif may_grow:
                _grow(layout, unit, rows, counts, slot, wanted, stack, prefer)
        mask = sum(stack)
        held.append(mask)
        if missed < 0 and len(stack) != target:
            missed, losses = slot, lost
        if base is not None and len(stack) < base - ramp and (slot or not guessed):
            allowed = False
        base, ramp = len(stack), service.ramp // unit
    return held, missed, losses, allowed


def _grow(
    layout: Layout,
    unit: int,
    rows: list[int],
    counts: list[int],
    slot: int,
    wanted: int,
    stack: list[int],
    prefer: Sequence[int],
) -> None:
    """Add replicas: each on GPUs that stay free for as long as the counts need it, or else the longest."""
    taken = sum(stack)
    ones = (1 << unit) - 1
    last = len(counts)
    window, until, seen = 0, -1, last + 1
    for level in range(len(stack) + 1, wanted + 1):
        # Higher levels are needed no longer than lower ones.
        end = slot + 1
        while end < last and end < seen and counts[end] >= level:
            end += 1
        if end != until:
            until = seen = end
            window = _lasting(layout, unit, rows, slot, until, taken)
        places = window if unit == 1 else layout.block_starts(window, unit)
        if not places:
            window = _lasting(layout, unit, rows, slot, until, taken)
            places = window if unit == 1 else layout.block_starts(window, unit)
            if not places:
                return
        near = places & (taken >> unit | taken << 1)
        if not near and prefer:
            near = next(filter(None, [places & gpus for gpus in prefer]), 0)
        block = ones << ((near or places).bit_length() - 1)
        stack.append(block)
        taken |= block
        window &= ~block


def _lasting(layout: Layout, unit: int, rows: list[int], slot: int, until: int, taken: int) -> int:
    """GPUs that are free from a slot on, until the last slot up to which any block of them is."""
    window = rows[slot] & ~taken
    for at in range(slot + 1, until):
        narrower = window & rows[at]
        if not (narrower if unit == 1 else layout.block_starts(narrower, unit)):
            break
        window = narrower
    return window


def _shrink(rows: list[int], slot: int, excess: int, stack: list[int]) -> None:
    """Drop replicas: those that will lose their GPUs first, else those that came last."""
    lasting = rows[slot]
    for row in rows[slot + 1 :]:
        lasting &= row
    if all(not replica & ~lasting for replica in stack):
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


def _missing(service: Service, counts: list[int]) -> list[float]:
    """GPUs missing in each slot."""
    if service.demand is not None:
        return [want - have if want > have else 0 for want, have in zip(service.demand, counts, strict=True)]
    return [service.shortage(slot, have) for slot, have in enumerate(counts)]
