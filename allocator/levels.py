"""Services in the relaxation: how many replicas they hold in each slot, as levels.

A level says "holds at least n". So a linear program cannot give up half a replica to save half of the cost,
and a row can say that the n-th replica takes the last GPUs that a wide job needs. In a compact relaxation
there is one number for each slot instead. The invariant: a level is never held without the one below.
"""

from functools import partial
from itertools import pairwise

import numpy as np

from allocator.problem import Service
from allocator.relaxation import Relaxation, ServiceVariables
from allocator.roundings import Ints


def add_service(relaxation: Relaxation, service: Service) -> ServiceVariables:
    unit, slots = service.gpus_per_replica, relaxation.layout.horizon
    # More than the highest demand, or than it holds now, is never of use: the ramps allow less as well.
    most = -(-max(max(service.wanted(slot)) for slot in range(slots)) // unit)
    if service.current is not None:
        now = service.current if isinstance(service.current, int) else len(service.current)
        most = max(most, -(-now // unit))
    levels, total = [], []
    for slot in range(slots):
        wanted = service.wanted(slot)
        relaxation.constant -= service.penalty * sum(wanted) / len(wanted)
        room = [
            min(most, len(relaxation.layout.replicas(relaxation.free[slot] & mask, unit)))
            for mask in relaxation.classes
        ]
        worth = [
            service.penalty * sum(min(max(want - level * unit, 0), unit) for want in wanted) / len(wanted)
            for level in range(min(most, sum(room)))
        ]
        make = _one_number if relaxation.compact else _levels
        together = make(relaxation, len(worth), worth)
        by_class = [together]
        if len(room) > 1:
            by_class = [make(relaxation, n, []) for n in room]
            held = [(int(v), 1) for stack in by_class for v in stack]
            if held:
                relaxation.add([*((int(v), 1) for v in together), *((v, -1) for v, _ in held)], 0)
                relaxation.add([*((int(v), -1) for v in together), *held], 0)
        levels.append(tuple(by_class))
        total.append(together)
    _add_ramp(relaxation, service, total)
    if len(relaxation.classes) > 1 and not relaxation.compact:
        _stay_in_classes(relaxation, service, levels, total)
    return ServiceVariables(service, tuple(levels), tuple(total))


def _levels(relaxation: Relaxation, count: int, worth: list[float]) -> Ints:
    """A variable for each level, of which the lower come first."""
    levels = [relaxation.new(1, worth[level] if worth else 0.0) for level in range(count)]
    for lower, higher in pairwise(levels):
        relaxation.add([(higher, 1), (lower, -1)], 0)
    return np.array(levels, dtype=np.int64)


def _one_number(relaxation: Relaxation, count: int, worth: list[float]) -> Ints:
    """One variable for all levels, and one for the levels of each worth, of which the dearer come
    first."""
    if not count:
        return np.zeros(0, dtype=np.int64)
    number = relaxation.new(count)
    steps = [
        (relaxation.new(worth.count(gain), gain), 1) for gain in sorted(set(worth), reverse=True) if gain
    ]
    if steps:
        relaxation.add([*steps, (number, -1)], 0)
        relaxation.steps[number] = [step for step, _ in steps]
    return np.array([number], dtype=np.int64)


def _add_ramp(relaxation: Relaxation, service: Service, total: list[Ints]) -> None:
    unit = service.gpus_per_replica
    ramp = service.ramp // unit
    for slot in range(1, relaxation.layout.horizon):
        before, now = total[slot - 1].tolist(), total[slot].tolist()
        # A failure, or a committed job, may take replicas: as many as GPUs that are free no more.
        lost = (relaxation.free[slot - 1] & ~relaxation.free[slot]).bit_count()
        _never_above(relaxation, now, before, ramp)
        if not lost:
            _never_above(relaxation, before, now, ramp)
        elif before:
            relaxation.add(
                [*((v, unit) for v in before), *((v, -unit) for v in now)], service.ramp + unit * lost
            )
    first = [(v, unit) for v in total[0].tolist()]
    if isinstance(service.current, tuple):
        mask = sum(1 << gpu for gpu in service.current)
        alive = [r for r in relaxation.layout.replicas(mask, unit) if not r & relaxation.out[0]]
        kept = [r for r in alive if not r & ~relaxation.free[0]]
        most = unit * len(kept) + (service.ramp_at(0) if len(kept) == len(alive) else 0)
        # What a running job took counts GPU by GPU, as the check does.
        least = sum(r & relaxation.free[0] for r in alive).bit_count() - service.ramp_at(0)
        if first:
            relaxation.add(first, most)
            relaxation.add([(v, -weight) for v, weight in first], -max(0, least))
    elif service.current is not None and first:
        relaxation.add(first, service.current + service.ramp_at(0))


def _stay_in_classes(
    relaxation: Relaxation, service: Service, levels: list[tuple[Ints, ...]], total: list[Ints]
) -> None:
    """Replicas do not move from class to class: in a slot all classes rise, or all fall."""
    unit, layout = service.gpus_per_replica, relaxation.layout
    ramp = service.ramp // unit
    if isinstance(service.current, tuple):
        mask = sum(1 << gpu for gpu in service.current)
        kept = [r for r in layout.replicas(mask, unit) if not r & ~relaxation.free[0]]
        # Of the first so many replicas, those that a class has now stay there, or all that fall are of
        # these.
        first = [(v, 1) for v in total[0][: len(kept)].tolist()]
        for kind, inside in enumerate(relaxation.classes):
            here = sum(1 for r in kept if r & inside)
            if here and first:
                relaxation.add([*first, *((v, -1) for v in levels[0][kind].tolist())], len(kept) - here)
    for slot in range(1, layout.horizon):
        if relaxation.free[slot - 1] & ~relaxation.free[slot]:
            continue
        rises = relaxation.new(1)
        relaxation.completions.append((rises, partial(_more, total[slot].tolist(), total[slot - 1].tolist())))
        for before, now in zip(levels[slot - 1], levels[slot], strict=True):
            difference = [*((v, 1) for v in now.tolist()), *((v, -1) for v in before.tolist())]
            if difference:
                relaxation.add([*difference, (rises, -ramp)], 0)
                relaxation.add([*((v, -w) for v, w in difference), (rises, ramp)], ramp)


def _never_above(relaxation: Relaxation, this: list[int], that: list[int], by: int) -> None:
    """One stack of levels is no more than ``by`` higher than another."""
    if relaxation.compact:
        terms = [*((v, 1) for v in this), *((v, -1) for v in that)]
        if terms:
            relaxation.add(terms, by)
        return
    for level in range(by, len(this)):
        if level - by < len(that):
            relaxation.add([(this[level], 1), (that[level - by], -1)], 0)
        else:
            relaxation.add([(this[level], 1)], 0)


def set_count(relaxation: Relaxation, values: dict[int, int], levels: Ints, count: int) -> None:
    """Set the variables of a stack of levels to so many."""
    if not relaxation.compact:
        values.update(dict.fromkeys(levels[:count].tolist(), 1))
        return
    for number in levels.tolist():
        values[number] = count
        for step in relaxation.steps.get(number, ()):
            values[step] = min(count, relaxation.upper_so_far[step])
            count -= values[step]


def _more(these: list[int], those: list[int], values: dict[int, int]) -> int:
    return int(sum(values.get(v, 0) for v in these) > sum(values.get(v, 0) for v in those))
