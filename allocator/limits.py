"""Who may use how much, as rows of the relaxation: guarantees, reservations, and services at their start.

The invariant is that of ``relaxation``: every row holds for every plan that keeps the rules. Rules that
begin with "when" (where a job of another tenant runs, what is kept for others has to stay free) get a
variable that says whether it is so.
"""

from functools import partial

import numpy as np

from allocator.relaxation import Relaxation, Row


def add_limits(relaxation: Relaxation) -> None:
    """Add the rows of tenants, reservations and services of which only the count is known."""
    _add_tenant_rows(relaxation)
    for slot, kept in enumerate(relaxation.kept):
        _reserve(relaxation, slot, kept)
    _add_start_rows(relaxation)


def _add_tenant_rows(relaxation: Relaxation) -> None:
    if not relaxation.shares or not relaxation.columns:
        return
    whose = np.array([relaxation.share_of(at) for at in relaxation.spot.tolist()], dtype=object)
    most = np.array(relaxation.upper_so_far[: relaxation.columns], dtype=np.int64)
    for name, room in relaxation.shares.items():
        counted = whose == name
        for slot in range(relaxation.layout.rows):
            active = np.flatnonzero(counted & (relaxation.start <= slot) & (relaxation.end > slot))
            if len(active) and int((relaxation.piece[active] * most[active]).sum()) > room[slot]:
                relaxation.rows.append(Row(active, relaxation.piece[active], max(0, room[slot])))


def _reserve(relaxation: Relaxation, slot: int, kept: dict[str, int]) -> None:
    """Where a job of another tenant runs, all that is used and all that is kept has to fit."""
    layout, active = relaxation.layout, relaxation.active(slot, slot + 1)
    if not kept or not len(active):
        return
    gpus = relaxation.piece[active]
    whose = np.array([relaxation.tenant_of(at) for at in relaxation.spot[active].tolist()], dtype=object)
    unused: dict[str, int] = {}
    for tenant, held in kept.items():
        unused[tenant] = relaxation.new(held)
        mine = whose == tenant
        own = [(int(c), -int(g)) for c, g in zip(active[mine], gpus[mine], strict=True)]
        relaxation.completions.append((unused[tenant], partial(_short_of, held, own)))
        relaxation.add([(unused[tenant], -1), *own], -held)
    used = [(int(c), int(g)) for c, g in zip(active, gpus, strict=True)]
    if slot < layout.horizon:
        for s in relaxation.services:
            used += [(v, s.service.gpus_per_replica) for v in s.total[slot].tolist()]
    room = relaxation.free[slot].bit_count()
    for user in sorted({tenant if tenant in kept else "" for tenant in whose}):
        others = {tenant: held for tenant, held in kept.items() if tenant != user}
        if not others:
            continue
        at_work = relaxation.new(1)
        busy = [int(c) for c, t in zip(active, whose, strict=True) if (t if t in kept else "") == user]
        relaxation.completions.append((at_work, partial(_any, busy)))
        slack = sum(others.values())
        relaxation.add([*used, *((unused[t], 1) for t in others), (at_work, slack)], room + slack)
        mine = np.flatnonzero([(tenant if tenant in kept else "") == user for tenant in whose])
        for group in np.unique(relaxation.group[active[mine]]).tolist():
            columns = active[mine][relaxation.group[active[mine]] == group].tolist()
            starts = {c if (gang := relaxation.spots[relaxation.spot[c]].gang) < 0 else gang for c in columns}
            size = len(relaxation.groups[group].tasks)
            relaxation.add([*((v, 1) for v in sorted(starts)), (at_work, -size)], 0)


def _add_start_rows(relaxation: Relaxation) -> None:
    """A service of which only the count is known falls faster than its ramp only for lack of GPUs."""
    room = relaxation.free[0].bit_count()
    for s in relaxation.services:
        lowest = s.service.current - s.service.ramp_at(0) if isinstance(s.service.current, int) else 0
        if lowest <= 0:
            continue
        unit = s.service.gpus_per_replica
        lack = relaxation.new(1)
        relaxation.completions.append((lack, partial(_below, lowest, unit, s.total[0].tolist())))
        relaxation.add([*((v, -unit) for v in s.total[0].tolist()), (lack, -lowest)], -lowest)
        if unit == 1:
            active = relaxation.active(0, 1)
            used = [(int(c), -int(relaxation.piece[c])) for c in active]
            for other in relaxation.services:
                used += [(v, -other.service.gpus_per_replica) for v in other.total[0].tolist()]
            relaxation.add([*used, (lack, room)], 0)


def _short_of(held: int, own: list[tuple[int, int]], values: dict[int, int]) -> int:
    return max(0, held + sum(weight * values.get(column, 0) for column, weight in own))


def _any(columns: list[int], values: dict[int, int]) -> int:
    return int(any(values.get(column, 0) for column in columns))


def _below(lowest: int, unit: int, levels: list[int], values: dict[int, int]) -> int:
    return int(unit * sum(values.get(v, 0) for v in levels) < lowest)
