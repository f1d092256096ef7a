"""Rules about who may use how many GPUs: the guarantees of tenants and reservations.

Both limit, for a job that would start, in which slots another so many GPUs are allowed. ``Quota`` keeps the room of
each slot while a plan is built and answers with the cells that are closed to a job; the packing then sees
them as taken. The invariant: taking a job in slots that were open to it never breaks a rule for a job
that was placed before (what is checked for a job covers all that others are checked for), so only the job
that comes is checked. The cost: a look at each slot for each width, so it exists only in problems with such rules.
"""

from __future__ import annotations

from allocator.grid import Layout, Task
from allocator.problem import Problem

QuotaState = tuple[dict[str | None, list[int]], list[dict[str, int]], dict[int, int]]


class Quota:
    """Room under guarantees and reservations, slot by slot.

    Args:
        service_cells: the cells that services hold.
    """

    def __init__(self, layout: Layout, service_cells: int) -> None:
        problem = layout.problem
        self.tenants = {tenant.name: tenant for tenant in problem.tenants}
        self.slot_cells = [layout.row << (slot * layout.gpus) for slot in range(layout.rows)]
        shared = problem.total_gpus - sum([tenant.gpus for tenant in problem.tenants])
        self.left: dict[str | None, list[int]] = {None: [shared] * layout.rows}
        for tenant in problem.tenants:
            self.left[tenant.name] = [tenant.gpus] * layout.rows
        self.kept: list[dict[str, int]] = [{} for _ in range(layout.rows)]  # reserved and not yet used
        for reservation in problem.reservations:
            for slot in range(max(reservation.start, 0), min(reservation.end, layout.rows)):
                row = self.kept[slot]
                row[reservation.tenant] = row.get(reservation.tenant, 0) + reservation.gpus
        self.reserved = [slot for slot, row in enumerate(self.kept) if row]
        taken = (layout.all & ~layout.free) | service_cells
        self.open = {
            slot: layout.gpus - ((taken >> (slot * layout.gpus)) & layout.row).bit_count()
            for slot in self.reserved
        }
        for job in problem.jobs:
            if job.running is not None:
                first, last = problem.running_window(job)
                gpus, slots = len(job.running.gpus), problem.running_slots(job)
                self._count(job.tenant, gpus, slots, first, min(last, layout.rows))
                for slot in range(first, min(last, layout.rows)):
                    if job.tenant in self.kept[slot]:
                        self.kept[slot][job.tenant] -= gpus
        # Closed cells by share (or tenant, for reservations) and width, until the room changes.
        self.shut_by_share: dict[str | None, dict[int, int]] = {name: {} for name in self.left}
        self.shut_by_reservation: dict[tuple[str | None, int], int] = {}

    def _share(self, tenant: str | None, slots: int) -> tuple[bool, str | None]:
        """Whether a job counts against a share, and whose; not when it borrows, or where no tenant has one."""
        if not self.tenants:
            return False, None
        entry = self.tenants.get(tenant or "")
        if entry is None:
            return True, None
        return slots > entry.borrow_slots, tenant

    def _count(self, tenant: str | None, gpus: int, slots: int, first: int, last: int) -> None:
        counts, name = self._share(tenant, slots)
        if counts:
            share = self.left[name]
            for slot in range(first, last):
                share[slot] -= gpus

    def closed(self, task: Task, gpus: int, slots: int) -> int:
        """The cells of all slots in which the job may not hold so many GPUs."""
        tenant, mask = task.job.tenant, 0
        counts, name = self._share(tenant, slots)
        if counts:
            known = self.shut_by_share[name]
            found = known.get(gpus)
            if found is None:
                found = 0
                for cells, left in zip(self.slot_cells, self.left[name], strict=True):
                    if left < gpus:
                        found |= cells
                known[gpus] = found
            mask = found
        if self.reserved:
            key = (tenant, gpus)
            found = self.shut_by_reservation.get(key)
            if found is None:
                found = 0
                for slot in self.reserved:
                    others = 0
                    for owner, kept in self.kept[slot].items():
                        if kept > 0 and owner != tenant:
                            others += kept
                    if others and self.open[slot] - gpus < others:
                        found |= self.slot_cells[slot]
                self.shut_by_reservation[key] = found
            mask |= found
        return mask

    def take(self, task: Task, gpus: int, start: int, slots: int) -> None:
        """Count a job that was placed; with negative ``gpus``, one that was removed."""
        tenant, end = task.job.tenant, start + slots
        counts, name = self._share(tenant, slots)
        if counts:
            share = self.left[name]
            for slot in range(start, end):
                share[slot] -= gpus
            self.shut_by_share[name].clear()
        for slot in self.reserved:
            if start <= slot < end:
                self.open[slot] -= gpus
                if tenant in self.kept[slot]:
                    self.kept[slot][tenant] -= gpus
                self.shut_by_reservation.clear()

    def save(self) -> QuotaState:
        """The room of every slot, for ``restore``."""
        left = {name: row.copy() for name, row in self.left.items()}
        return left, [row.copy() for row in self.kept] if self.reserved else [], self.open.copy()

    def restore(self, saved: QuotaState) -> None:
        self.left, kept, self.open = saved
        if self.reserved:
            self.kept = kept
        for known in self.shut_by_share.values():
            known.clear()
        self.shut_by_reservation.clear()


def has_quota(problem: Problem) -> bool:
    """Whether the problem has such rules at all."""
    return bool(problem.tenants or problem.reservations)
