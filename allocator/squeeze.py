"""GPUs for starts that are known, in large clusters: place one after the other, and those that failed first.

A job goes where the GPUs were taken just before it, or are taken just after it, or beside it, so that what
stays free stays wide and long. What finds no place moves to the front of the next pass, as a squeaky wheel
gets the oil. A pass of a thousand jobs takes some hundredths of a second. The invariant: what is placed
keeps its start. The cost of the choice: no proof that more could not be placed; ``rectangles`` has that for
some dozens of jobs.
"""

from collections.abc import Sequence
from functools import partial
from random import Random
from time import perf_counter

from allocator.problem import Service
from allocator.realtime import Held, hold_counts
from allocator.relaxation import Relaxation, Spot
from allocator.state import State, bits

_PASSES = 60


def squeeze(
    relaxation: Relaxation, counts: dict[int, int], replicas: dict[str, list[int]], rng: Random, until: float
) -> State | None:
    """The most valuable of several passes; None when the services cannot hold so many.

    Args:
        counts: of each spot, how many jobs start there.
        replicas: of each service, how many it holds in each slot.
        until: moment after which no pass is begun.
    """
    held = _serve(relaxation, replicas)
    if held is None:
        return None
    layout = relaxation.layout
    free = layout.free
    for service in held:
        free &= ~service.cells
    rows = [(free >> (slot * layout.gpus)) & layout.row for slot in range(layout.rows)]
    wanted = [relaxation.spots[at] for at, count in counts.items() for _ in range(count)]
    numbers = [at for at, count in counts.items() for _ in range(count)]
    needs = [0.0] * len(wanted)
    by_start = rng.random() < 0.5
    masks = {service.service.service: list(service.rows) for service in held}
    best, most = State([], masks), -1.0
    for _ in range(_PASSES):
        order = sorted(
            range(len(wanted)),
            key=lambda k: (
                (-needs[k], wanted[k].start, -wanted[k].piece)
                if by_start
                else (-needs[k], -wanted[k].piece * wanted[k].pieces, wanted[k].start)
            ),
        )
        placed, failed = _pass(relaxation, list(rows), wanted, order)
        state = State([(numbers[k], firsts) for k, firsts in placed], masks)
        worth = state.worth(relaxation)
        if worth > most:
            best, most = state, worth
        if not failed or perf_counter() > until:
            break
        for k in failed:
            needs[k] += 1.0 + rng.random()
        by_start = rng.random() < 0.5
    return best


def _serve(relaxation: Relaxation, replicas: dict[str, list[int]]) -> list[Held] | None:
    layout = relaxation.layout
    free, held = layout.free, []
    for service in sorted(relaxation.problem.services, key=lambda service: -service.penalty):
        counts = replicas[service.service]
        got = hold_counts(layout, free, service, partial(_as_given, counts))
        if not got.allowed or not _as_many(service, got, counts):
            return None
        held.append(got)
        free &= ~got.cells
    return held


def _as_given(counts: list[int], caps: Sequence[int], lost: Sequence[int], start: int | None) -> list[int]:
    """A chooser, see ``realtime``, that has chosen already."""
    return list(counts)


def _as_many(service: Service, held: Held, counts: list[int]) -> bool:
    return all(
        have == want * service.gpus_per_replica for have, want in zip(held.counts, counts, strict=True)
    )


def _pass(
    relaxation: Relaxation, rows: list[int], wanted: list[Spot], order: list[int]
) -> tuple[list[tuple[int, tuple[int, ...]]], list[int]]:
    """Place what fits, in an order. Returns what was placed where, and what was not."""
    layout = relaxation.layout
    horizon, borders = layout.horizon, layout.node_starts
    placed: list[tuple[int, tuple[int, ...]]] = []
    failed = []
    for k in order:
        spot = wanted[k]
        window = layout.row
        end = min(spot.end, len(rows))
        for slot in range(spot.start, end):
            window &= rows[slot]
        width = spot.piece
        begins = window
        for shift in layout.shifts(width, 1):
            begins &= begins >> shift
        begins &= spot.where
        if begins.bit_count() < spot.pieces:
            failed.append(k)
            continue
        before = ~rows[spot.start - 1] & layout.row if spot.start else layout.row
        after = ~rows[spot.end] & layout.row if spot.end < horizon else layout.row
        for shift in layout.shifts(width, 1):
            before &= before >> shift
            after &= after >> shift
        edge = begins & (~(window << 1) | borders | ~(window >> width))
        firsts: list[int] = []
        for choice in (
            begins & before & after & edge,
            begins & before & after,
            begins & before & edge,
            begins & after & edge,
            begins & before,
            begins & after,
            edge,
            begins,
        ):
            for first in bits(choice):
                if first not in firsts:
                    firsts.append(first)
                if len(firsts) == spot.pieces:
                    break
            if len(firsts) == spot.pieces:
                break
        taken = 0
        for first in firsts:
            taken |= ((1 << width) - 1) << first
        for slot in range(spot.start, end):
            rows[slot] &= ~taken
        placed.append((k, tuple(sorted(firsts))))
    return placed, failed
