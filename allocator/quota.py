"""Rules about who may use how many GPUs: the guarantees of tenants and reservations.

Both limit, for a job that would start, in which slots another so many GPUs are allowed. ``Quota`` keeps
the room of each slot while a plan is built and answers with the cells that are open to a job; the packing
then sees the others as taken. Room is one integer for all slots, with a field for each as wide as a row of
the grid: one subtraction tests every slot, and the bit that remains in each field is stretched to the row
of cells.

The invariant: taking a job in slots that were open to it never breaks a rule for a job that was placed
before (what is checked for a job covers all that others are checked for), so only the job that comes is
checked. The cost: reservations are counted slot by slot when their own tenant's jobs come or go.
"""

from __future__ import annotations

from allocator.grid import Layout, Option, Task
from allocator.problem import Problem

QuotaState = tuple[dict[str | None, int], dict[str | None, int], list[dict[str, int]]]


class Quota:
    """Room under guarantees and reservations.

    Args:
        service_cells: the cells that services hold.
    """

    def __init__(self, layout: Layout, service_cells: int) -> None:
        start = layout.rules
        if start is None:
            start = layout.rules = _Start(layout)
        assert isinstance(start, _Start)
        self.layout = layout
        self.stride, self.top, self.zero = start.stride, start.stride - 1, start.zero
        self.ones, self.tops = start.ones, start.ones << self.top
        self.borrow, self.owners, self.reserved = start.borrow, start.owners, start.reserved
        self.left = start.left.copy()
        self.room = start.room.copy()
        self.kept: list[dict[str, int]] = []
        self._open: dict[object, int] = {}  # answers that hold until a job comes or goes
        if self.owners:
            self.kept = [row.copy() for row in start.kept]
            busy = 0
            for slot in range(layout.horizon if service_cells else 0):
                cells = (service_cells >> (slot * layout.gpus)) & layout.row
                busy |= cells.bit_count() << (slot * self.stride)
            for owner, others in start.others.items():
                self.room[owner] -= busy & others

    def _window(self, first: int, last: int) -> int:
        """A one in the field of each slot from first to last."""
        return (self.ones & ((1 << ((last - first) * self.stride)) - 1)) << (first * self.stride)

    def open(self, task: Task, gpus: int, slots: int) -> int:
        """The cells of all slots in which the job may hold so many GPUs."""
        tenant = task.job.tenant
        name = share_of(self.left, self.borrow, tenant, slots)
        if name == "" and not self.room:
            return -1
        key = name, gpus, tenant if self.room else None
        found = self._open.get(key)
        if found is None:
            cells = -1
            enough = ((1 << self.top) - self.zero - gpus) * self.ones
            if name != "":
                cells = self._cells((self.left[name] + enough) & self.tops)
            if self.room:
                room = self.room[tenant if tenant in self.owners else None]
                cells &= self._cells((room + enough) & self.tops)
            found = self._open[key] = cells
        return found

    def lasting(self, task: Task, option: Option) -> int:
        """The cells of all slots from which on the job may hold the GPUs of an option for all its slots."""
        cells = self.open(task, option.gpus, option.slots)
        if cells != -1:
            for shift in option.time_shifts:
                cells &= cells >> shift
        return cells

    def closed(self, task: Task, gpus: int, slots: int) -> int:
        """The other cells."""
        return self.layout.all & ~self.open(task, gpus, slots)

    def _cells(self, fields: int) -> int:
        """All cells of the slots whose field has its top bit set."""
        if self.stride == self.layout.gpus:
            return (fields << 1) - (fields >> self.top)
        cells, row = 0, self.layout.row
        for slot in range(self.layout.rows):
            if fields >> (slot * self.stride + self.top) & 1:
                cells |= row << (slot * self.layout.gpus)
        return cells

    def take(self, task: Task, gpus: int, start: int, slots: int) -> None:
        """Count a job that was placed; with negative ``gpus``, one that was removed."""
        self._open.clear()
        tenant = task.job.tenant
        window = self._window(start, start + slots)
        if self.left:
            name = share_of(self.left, self.borrow, tenant, slots)
            if name != "":
                self.left[name] -= gpus * window
        if self.room:
            reserved = window & self.reserved
            if not reserved:
                return
            for owner in self.room:
                self.room[owner] -= gpus * reserved
            if tenant in self.owners:
                self._use(tenant, gpus, start, start + slots)

    def _use(self, tenant: str | None, gpus: int, first: int, last: int) -> None:
        """What a tenant takes of its own reservation is no longer held against others."""
        assert tenant is not None
        freed = 0
        for slot in range(first, last):
            kept = self.kept[slot].get(tenant)
            if kept is not None:
                self.kept[slot][tenant] = kept - gpus
                freed += (max(0, kept) - max(0, kept - gpus)) << (slot * self.stride)
        for owner in self.room:
            if owner != tenant:
                self.room[owner] += freed

    def save(self) -> QuotaState:
        """The room of every slot, for ``restore``."""
        return self.left.copy(), self.room.copy(), [row.copy() for row in self.kept] if self.room else []

    def restore(self, saved: QuotaState) -> None:
        self.left, self.room, kept = saved
        self._open.clear()
        if self.room:
            self.kept = kept


class _Start:
    """What follows from the problem alone: the room before services and new jobs.

    Attributes:
        left: by tenant, None for the common share: what running jobs leave of it, a field for each slot.
        kept: of each slot, what is reserved and not yet used.
        room: by tenant with a reservation, None for all others: free GPUs not held for anybody else, where
            any are held (the fields that ``others`` is set in).
        reserved: a one in the field of each slot in which anything is reserved.
    """

    def __init__(self, layout: Layout) -> None:
        problem, gpus, rows = layout.problem, layout.gpus, layout.rows
        self.stride = stride = max(gpus, 8)  # of a field: a tiny cluster's rows hold no counts
        self.ones = sum([1 << (slot * stride) for slot in range(rows)])
        # Rooms are kept shifted up, so that less than none does not borrow from the next slot.
        self.zero = 2 * gpus
        self.borrow = {tenant.name: tenant.borrow_slots for tenant in problem.tenants}
        self.left: dict[str | None, int] = {}
        if problem.tenants:
            shared = problem.total_gpus - sum([tenant.gpus for tenant in problem.tenants])
            self.left[None] = (shared + self.zero) * self.ones
            for tenant in problem.tenants:
                self.left[tenant.name] = (tenant.gpus + self.zero) * self.ones
        self.kept: list[dict[str, int]] = [{} for _ in range(rows)]
        for reservation in problem.reservations:
            for slot in range(max(reservation.start, 0), min(reservation.end, rows)):
                row = self.kept[slot]
                row[reservation.tenant] = row.get(reservation.tenant, 0) + reservation.gpus
        self.owners = {reservation.tenant for reservation in problem.reservations}
        self.reserved = sum([1 << (slot * stride) for slot, row in enumerate(self.kept) if row])
        for job in problem.jobs:
            if job.running is not None:
                first, last = problem.running_window(job)
                width, slots = len(job.running.gpus), problem.running_slots(job)
                last = min(last, rows)
                name = share_of(self.left, self.borrow, job.tenant, slots)
                if name != "" and first < last:
                    # A guarantee never refuses running work, so there may be less than none left.
                    window = (self.ones & ((1 << ((last - first) * stride)) - 1)) << (first * stride)
                    self.left[name] -= width * window
                if job.tenant in self.owners:
                    for slot in range(first, last):
                        if job.tenant in self.kept[slot]:
                            self.kept[slot][job.tenant] -= width
        self.room: dict[str | None, int] = {}
        self.others: dict[str | None, int] = {}
        taken = layout.all & ~layout.free
        for owner in (None, *sorted(self.owners)) if self.owners else ():
            room = fields = 0
            for slot, kept in enumerate(self.kept):
                held = min(gpus, sum([max(0, n) for name, n in kept.items() if name != owner]))
                spare = gpus
                if held:
                    spare -= ((taken >> (slot * gpus)) & layout.row).bit_count() + held
                    fields |= ((1 << stride) - 1) << (slot * stride)
                room |= (spare + self.zero) << (slot * stride)
            self.room[owner], self.others[owner] = room, fields


def share_of(
    left: dict[str | None, int], borrow: dict[str, int], tenant: str | None, slots: int
) -> str | None:
    """The share a job counts against: a tenant's, None for the common one, '' for none."""
    if not left:
        return ""
    most = borrow.get(tenant or "")
    if most is None:
        return None
    return tenant if slots > most else ""


def has_quota(problem: Problem) -> bool:
    """Whether the problem has such rules at all."""
    return bool(problem.tenants or problem.reservations)
