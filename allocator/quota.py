"""Rules about who may use how many GPUs: the guarantees of tenants and reservations.

Both limit, for a job that would start, in which slots another so many GPUs are allowed. ``Quota`` keeps the use of
each slot while a plan is built and answers with the slots that are closed to a job; the packing then sees
their cells as taken. The invariant: taking a job in slots that were open to it never breaks a rule for a job
that was placed before (what is checked for a job covers all that others are checked for), so only the job
that comes is checked. The cost: a look at each slot for each job, so it exists only in problems with such rules.
"""

from __future__ import annotations

from allocator.grid import Layout, Task
from allocator.problem import Problem


QuotaState = tuple[dict[str | None, list[int]], list[dict[str, int]], dict[int, int]]


class Quota:
    """Use of guarantees and reservations, slot by slot.

    Args:
        service_cells: the cells that services hold.
    """

    def __init__(self, layout: Layout, service_cells: int) -> None:
        problem = layout.problem
        self.layout = layout
        self.tenants = {tenant.name: tenant for tenant in problem.tenants}
        shared = problem.total_gpus - sum(tenant.gpus for tenant in problem.tenants)
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

    def _share(self, tenant: str | None, slots: int) -> list[int] | None:
        """What is left, slot by slot, of the share that a job counts against; None when it borrows."""
        if not self.tenants:
            return None
        entry = self.tenants.get(tenant or "")
        if entry is None:
            return self.left[None]
        return None if slots <= entry.borrow_slots else self.left[entry.name]

    def _count(self, tenant: str | None, gpus: int, slots: int, first: int, last: int) -> None:
        share = self._share(tenant, slots)
        if share is not None:
            for slot in range(first, last):
                share[slot] -= gpus

    def closed(self, task: Task, gpus: int, slots: int) -> int:
        """The cells of all slots in which the job may not hold so many GPUs."""
        tenant = task.job.tenant
        share = self._share(tenant, slots)
        shut = [] if share is None else [slot for slot, left in enumerate(share) if left < gpus]
        for slot in self.reserved:
            others = sum([max(0, kept) for name, kept in self.kept[slot].items() if name != tenant])
            if others and self.open[slot] - gpus < others:
                shut.append(slot)
        stride, row, mask = self.layout.gpus, self.layout.row, 0
        for slot in shut:
            mask |= row << (slot * stride)
        return mask

    def take(self, task: Task, gpus: int, start: int, slots: int) -> None:
        """Count a job that was placed; with negative ``gpus``, one that was removed."""
        tenant = task.job.tenant
        self._count(tenant, gpus, slots, start, start + slots)
        for slot in self.reserved:
            if start <= slot < start + slots:
                self.open[slot] -= gpus
                if tenant in self.kept[slot]:
                    self.kept[slot][tenant] -= gpus

    def save(self) -> QuotaState:
        """The use of every slot, for ``restore``."""
        left = {name: row.copy() for name, row in self.left.items()}
        return left, [row.copy() for row in self.kept], self.open.copy()

    def restore(self, saved: QuotaState) -> None:
        self.left, self.kept, self.open = saved


def has_quota(problem: Problem) -> bool:
    """Whether the problem has such rules at all."""
    return bool(problem.tenants or problem.reservations)
