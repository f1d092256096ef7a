"""A schedule: services and jobs in the grid, as solvers build them, and the plan that is made of it.

The invariant: a schedule is only built from free cells, services first, so it keeps every rule; the check
that ends each solve only guards against mistakes here. Services come first because a missing real-time GPU
costs many times what batch work earns; what they hold at which price of a GPU-slot is the solver's to
choose.
"""

from __future__ import annotations

from allocator.grid import Layout, Task
from allocator.packing import Packing
from allocator.plan import Placement, ServicePlan
from allocator.problem import Service
from allocator.quota import Quota, has_quota
from allocator.realtime import Held, hold_counts, kept_cells

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from allocator.realtime import Chooser


class Schedule:
    """What services hold, and the jobs packed around them."""

    __slots__ = ("held", "layout", "packing", "tasks")

    def __init__(self, layout: Layout, tasks: list[Task], held: list[Held]) -> None:
        self.layout = layout
        self.tasks = tasks
        self.held = held
        service_cells = 0
        for service in held:
            service_cells |= service.cells
        quota = Quota(layout, service_cells) if has_quota(layout.problem) else None
        self.packing = Packing(layout, tasks, layout.free & ~service_cells, quota)

    @property
    def objective(self) -> float:
        """Worth less shortage; short of the plan's objective by what no choice changes (running jobs)."""
        return self.packing.gain - sum([held.cost for held in self.held])

    def placements(self) -> tuple[Placement, ...]:
        """All jobs of the plan, those at work included, in the order of their starts."""
        problem, packing, stride = self.layout.problem, self.packing, self.layout.gpus
        found = [
            Placement(job.id, job.running.start, problem.running_slots(job), tuple(sorted(job.running.gpus)))
            for job in problem.jobs
            if job.running is not None
        ]
        for task in self.tasks:
            block = packing.cells[task.index]
            if block:
                option, start = packing.option[task.index], packing.start[task.index]
                assert option is not None
                if option.gang:
                    gpus = _gpus((block >> (start * stride)) & self.layout.row)
                else:
                    first = (block & -block).bit_length() - 1 - start * stride
                    gpus = tuple(range(first, first + option.gpus))
                found.append(Placement(task.job.id, start, option.slots, gpus))
        found.sort(key=lambda placement: (placement.start, placement.gpus))
        return tuple(found)

    def realtime(self) -> tuple[ServicePlan, ...]:
        """What each service holds and lacks, in the order of the problem."""
        rows: dict[str, ServicePlan] = {}
        for held in self.held:
            gpus: list[tuple[int, ...]] = []
            last = -1
            same: tuple[int, ...] = ()
            for row in held.rows:
                if row != last:
                    last, same = row, _gpus(row)
                gpus.append(same)
            name = held.service.service
            rows[name] = ServicePlan(name, tuple(gpus), tuple(held.missing))
        return tuple([rows[service.service] for service in self.layout.problem.services])


def serve(
    layout: Layout,
    chooser: Callable[[Service], Chooser],
    prefer: Sequence[int] = (),
    clear: int = 0,
    order: Callable[[Service], float] | None = None,
) -> list[Held]:
    """Give every service its GPUs; ``chooser`` says how many for each.

    The dearest to leave short comes first, or the one that ``order`` gives the least: see ``swing`` and
    ``least_per_gpu``.

    ``prefer`` are sets of GPUs (row masks) that services take first, ``clear`` cells that they are kept off.

    What a service holds now and would keep is out of reach of those that come before it.
    """
    services, free = layout.problem.services, layout.free & ~clear
    if len(services) == 1:
        return [hold_counts(layout, free, services[0], chooser(services[0]), 0, prefer)]
    ranked = sorted(services, key=order or (lambda service: -service.penalty))
    kept: dict[str, int] = {}
    held = []
    for service in sorted(ranked, key=lambda service: isinstance(service.current, int)):
        kept[service.service] = kept_cells(layout, free & ~sum(kept.values()), service, chooser(service))
    for service in ranked:
        own = kept.pop(service.service)
        got = hold_counts(layout, free & ~sum(kept.values()), service, chooser(service), own, prefer)
        held.append(got)
        free &= ~got.cells
    return held


def least_per_gpu(service: Service) -> float:
    """Minus what is lost for each GPU that it would hold: little for a replica that is mostly spare."""
    unit, wanted = service.gpus_per_replica, _most_wanted(service)
    held = sum([-(-want // unit) * unit for want in wanted])
    return -service.penalty * (sum(wanted) / held if held else 1)


def swing(service: Service) -> float:
    """How many GPUs come and go with its demand."""
    wanted = _most_wanted(service)
    return max(wanted) - min(wanted)


def _most_wanted(service: Service) -> Sequence[int]:
    return service.demand or [row[-1] for row in service.demand_quantiles or ()]


def _gpus(row: int) -> tuple[int, ...]:
    """The GPUs of a row mask, in rising order."""
    if not row:
        return ()
    low = row & -row
    if not row & (row + low):  # one block
        return tuple(range(low.bit_length() - 1, row.bit_length()))
    found = []
    while row:
        low = row & -row
        found.append(low.bit_length() - 1)
        row ^= low
    return tuple(found)
