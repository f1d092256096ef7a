"""Who holds what in a plan, as masks, and the first place a job would find when some of it were free.

A ``Board`` splits the cells of the grid into layers: out of service, running work, services, planned jobs;
a place can be asked for with any of them taken. The invariant: nothing is changed here, and a place is
found with the grid's own masks, so it keeps every rule that the solvers keep.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from allocator.grid import Layout, Option, Task, job_options
from allocator.packing import gang_block, places
from allocator.picture import plain, window
from allocator.plan import Plan
from allocator.problem import Choice, Job, Problem
from allocator.quota import Quota, has_quota


@dataclass(frozen=True, slots=True)
class Blocker:
    """What has GPUs that a job would need.

    Attributes:
        sort: ``job``, ``service`` or ``out``.
        name: of the job or service; empty when out of service.
        gpus, start, end: what it has there; of a job all of its GPUs and slots.
        worth: of a job.
    """

    sort: str
    name: str
    gpus: tuple[int, ...]
    start: int
    end: int
    worth: float = 0

    def __str__(self) -> str:
        if self.sort == "out":
            verb = "is" if len(self.gpus) == 1 else "are"
            return f"{gpu_names(self.gpus)} {verb} out of service in slots {self.start} to {self.end}"
        if self.sort == "service":
            return f"{self.name} holds {gpu_names(self.gpus)} in slots {self.start} to {self.end}"
        return f"{self.name} has {gpu_names(self.gpus)} until slot {self.end}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job fits: the option that it uses, its first slot, its GPUs and the cells that it covers."""

    option: Option
    start: int
    gpus: tuple[int, ...]
    block: int

    @property
    def end(self) -> int:
        return self.start + self.option.slots


class Board:
    """The layers of a plan: which cells are out of service, running, serving or planned, and what is free."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem = problem
        self.plan = plan
        self.layout = layout = Layout(problem)
        self.out = layout.out
        self.running = self.planned = self.services = 0
        self.spans = []  # (placement, its cells, whether it is planned) of every job
        for placement in plan.placements:
            job = problem.job_by_id[placement.job]
            cells = layout.cells(placement.gpus, *window(problem, placement))
            self.spans.append((placement, cells, job.running is None))
            if job.running is None:
                self.planned |= cells
            else:
                self.running |= cells
        for service in plan.realtime:
            for slot, gpus in enumerate(service.gpus):
                self.services |= layout.cells(gpus, slot, slot + 1)
        self.hard_free = layout.all & ~(self.out | self.running | self.services)
        self.free = self.hard_free & ~self.planned
        self.quota = has_quota(problem)
        self._quotas: dict[bool, Quota] = {}

    def options(self, job: Job, shape_only: bool = False) -> list[Option]:
        """The ways a job can run on an empty cluster; ``shape_only`` with all the time it wants."""
        if not shape_only:
            return job_options(self.layout, job)
        longest = max((slots for choice in job.choices for slots in slots_of(choice)), default=1)
        wide = replace(self.problem, slots=self.problem.slots + longest, services=())
        return job_options(Layout(wide), job)

    def closed(self, task: Task, option: Option, planned: bool, without: Job | None) -> int:
        """The cells that guarantees and reservations close to a job, beside running and planned work."""
        quota = self._quotas.get(planned)
        if quota is None:
            quota = self._quotas[planned] = Quota(self.layout, self.services)
            for placement, _, new in self.spans:
                if planned and new:
                    quota.take(
                        self.task(placement.job), len(placement.gpus), placement.start, placement.slots
                    )
        own = next((p for p, _, _ in self.spans if without is not None and p.job == without.id), None)
        if own is not None:
            quota.take(task, -len(own.gpus), own.start, own.slots)
        cells = quota.closed(task, option.gpus, option.slots)
        if own is not None:
            quota.take(task, len(own.gpus), own.start, own.slots)
        return cells

    def task(self, name: str) -> Task:
        return self.task_of(self.problem.job_by_id[name])

    def task_of(self, job: Job, options: list[Option] | None = None) -> Task:
        return Task(0, job, self.problem.worth(job), options or self.options(job), self.layout)

    def blockers(self, cells: int) -> tuple[Blocker, ...]:
        """Who holds some of these cells."""
        problem, layout = self.problem, self.layout
        found = [
            self._job(placement.job, placement.gpus, *window(problem, placement))
            for placement, held, _ in self.spans
            if held & cells
        ]
        for service in self.plan.realtime:
            slots = [
                slot
                for slot, gpus in enumerate(service.gpus)
                if gpus and layout.cells(gpus, slot, slot + 1) & cells
            ]
            if slots:
                gpus = sorted({gpu for slot in slots for gpu in service.gpus[slot] if self._in(cells, gpu)})
                found.append(Blocker("service", service.service, tuple(gpus), slots[0], slots[-1] + 1))
        for hole in problem.unavailable:
            if layout.cells(hole.gpus, hole.start, hole.end) & cells:
                gpus = [gpu for gpu in hole.gpus if self._in(cells, gpu)]
                found.append(Blocker("out", "", tuple(gpus), hole.start, hole.end))
        return tuple(found)

    def holders(self, start: int, end: int) -> tuple[Blocker, ...]:
        """The jobs that hold GPUs in these slots."""
        row = self.layout.cells(range(self.layout.gpus), start, end)
        return tuple(
            self._job(placement.job, placement.gpus, *window(self.problem, placement))
            for placement, held, _ in self.spans
            if held & row
        )

    def lots_of_room(self, job: Job) -> tuple[str, str] | None:
        """Where enough GPUs are free for a job, only not together; None when nowhere.

        Returns:
            ``too wide`` or ``too long``, and where and how.
        """
        stride, row, nodes = self.layout.gpus, self.layout.row, self.problem.nodes
        for option in self.options(job):
            accepted = 0
            for first, node in zip(self.problem.first_gpu, nodes, strict=True):
                if self.problem.accepts(job, node) and any(
                    choice.gpus == option.gpus and choice.slots_on(node.gpu) == option.slots
                    for choice in job.choices
                ):
                    accepted |= ((1 << node.gpus) - 1) << first
            rows = [(self.free >> (slot * stride)) & row & accepted for slot in range(self.layout.rows)]
            counts = [free.bit_count() for free in rows]
            for start in range(max(job.release, 0), option.last + 1):
                count = min(counts[start : start + option.slots])
                if count < option.gpus:
                    continue
                end = start + option.slots
                free = f"{count} GPU{'s are' if count > 1 else ' is'} free in slots {start} to {end}"
                if option.gang:
                    return "too wide", f"{free}, but not {option.gang} whole nodes of one type and domain"
                lasting = row
                for slot in range(start, end):
                    lasting &= rows[slot]
                widest = 0
                while self.layout.block_starts(lasting, widest + 1):
                    widest += 1
                if not widest:
                    return "too long", f"too long for what is left: {free}, but none of them throughout"
                return (
                    "too wide",
                    f"too wide for what is left: {free}, but at most {widest} side by side for that long, "
                    f"and it needs {option.gpus}",
                )
        return None

    def _job(self, name: str, gpus: tuple[int, ...], start: int, end: int) -> Blocker:
        return Blocker("job", name, gpus, start, end, self.problem.worth(self.problem.job_by_id[name]))

    def _in(self, cells: int, gpu: int) -> bool:
        return bool(cells & (self.layout.one_per_row << gpu))


def first_place(
    board: Board,
    job: Job,
    *,
    free: int | None = None,
    also_free: int = 0,
    planned: bool = True,
    quota: bool = True,
    without: Job | None = None,
) -> Place | None:
    """The earliest place that a job finds.

    Args:
        free: the cells that are free; those of the plan when absent.
        also_free: cells to count as free besides.
        planned: whether planned jobs count against guarantees and reservations, not only running ones.
        quota: whether guarantees and reservations count at all.
        without: a planned job that does not count against them.
    """
    open_cells = (board.free if free is None else free) | also_free
    options = board.options(job)
    task = board.task_of(job, options) if options and quota and board.quota else None
    stride, best = board.layout.gpus, None
    for option in options:
        cells = open_cells if task is None else open_cells & ~board.closed(task, option, planned, without)
        fits = places(option, cells)
        if option.gang:
            block = gang_block(board.layout, option, fits)
        else:
            block = option.shape << ((fits & -fits).bit_length() - 1) if fits else 0
        if block:
            start = ((block & -block).bit_length() - 1) // stride
            if best is None or start < best.start:
                best = Place(option, start, gpus_of(block >> (start * stride) & board.layout.row), block)
    return best


def gpus_of(row: int) -> tuple[int, ...]:
    """The GPUs of a row mask, in rising order."""
    found = []
    while row:
        low = row & -row
        found.append(low.bit_length() - 1)
        row ^= low
    return tuple(found)


def slots_of(choice: Choice) -> list[int]:
    return [choice.slots] if isinstance(choice.slots, int) else [slots for _, slots in choice.slots]


def gpu_names(gpus: Iterable[int]) -> str:
    """GPU numbers in short: GPU 3, or GPUs 0–7, 12, 16–23."""
    runs: list[list[int]] = []
    for gpu in sorted(gpus):
        if runs and gpu == runs[-1][1] + 1:
            runs[-1][1] = gpu
        else:
            runs.append([gpu, gpu])
    numbers = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)
    return f"GPU {numbers}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"GPUs {numbers}"


def among(blockers: tuple[Blocker, ...]) -> str:
    """Who has what, the first three told in full."""
    return _joined([str(blocker) for blocker in blockers])


def names(blockers: tuple[Blocker, ...]) -> str:
    """The names of jobs with what they are worth, the first four told."""
    return _joined([f"{blocker.name} (worth {plain(blocker.worth)})" for blocker in blockers], 4)


def _joined(texts: list[str], most: int = 3) -> str:
    if len(texts) > most:
        texts = [*texts[: most - 1], f"{len(texts) - most + 1} more"]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
