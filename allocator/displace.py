"""The cheapest place that a job could take over from planned work, were it worth enough.

Every place of the grid that running work, services, holes and guarantees leave open is looked at; what it
costs is what the planned jobs in it earn. The place that needs the least worth of the job is the answer: the
best plan without the job is beaten by one with it as soon as the job is worth more than that.

The cost: a few operations for each GPU and slot, so a budget of cells caps it, and jobs of a shape share it.
"""

from dataclasses import dataclass, replace

from allocator.blockers import Blocker, Board, Place, gpus_of
from allocator.check import broken_rules
from allocator.grid import Option
from allocator.packing import places
from allocator.plan import Placement
from allocator.problem import Job

EFFORT = 4_000_000  # cells that a search looks at in all
_TRIES = 12  # cheapest places that are tried against guarantees and reservations


@dataclass(frozen=True, slots=True)
class Displaced:
    """A place to take over.

    Attributes:
        cost: what the jobs there earn in the plan, move costs that they save included.
        share: of its worth that the job would earn there.
        saved: move cost that the job would save there.
    """

    place: Place
    blockers: tuple[Blocker, ...]
    cost: float
    share: float
    saved: float


class Search:
    """Looks for places to take over in one plan."""

    def __init__(self, board: Board, effort: int) -> None:
        self.board = board
        self.effort = effort
        self.planned = [placement for placement, _, new in board.spans if new]
        self.earned = [_earned(board, placement) for placement in self.planned]
        self._found: dict[object, Displaced | None] = {}
        self._costs: dict[int, float] = {}
        self._holders: list[list[list[int]]] = []  # [level][slot][gpu]: whose the next 2**level slots are

    def cheapest(self, job: Job) -> Displaced | None:
        """The place that needs the least worth of the job; None for none, or when the effort is spent."""
        told = job.announced.start if job.announced is not None else None
        key = (job.choices, job.release, job.deadline, job.gpu_types, job.tenant, told)
        if key not in self._found:
            self._found[key] = self._search(job)
        return self._found[key]

    def _search(self, job: Job) -> Displaced | None:
        board, found = self.board, dict[tuple[int, int], tuple[float, float, Option, int, int]]()
        options = board.options(job)
        task = board.task_of(job, options) if options and board.quota else None
        for at, option in enumerate(options):
            free = board.hard_free
            if task is not None:
                free &= ~board.closed(task, option, False, None)
            fits = places(option, free)
            for start in range(max(job.release, 0), option.last + 1):
                row = (fits >> (start * board.layout.gpus)) & board.layout.row
                if row and self.effort > 0:
                    share, saved = _share(board, option, start), _saved(board, job, start)
                    for holders, block_row in self._row(option, start, row).items():
                        cost = self._cost(holders)
                        needed = (cost - saved) / share
                        old = found.get((at, holders))
                        if old is None or needed < old[0]:
                            found[at, holders] = (needed, cost, option, start, block_row)
        ranked = sorted(found.items(), key=lambda entry: (entry[1][0], entry[1][3]))
        for (_, holders), (_, cost, option, start, block_row) in ranked[: _TRIES if task else 1]:
            gpus = gpus_of(block_row)
            place = Place(option, start, gpus, board.layout.cells(gpus, start, start + option.slots))
            gone = [placement for bit, placement in enumerate(self.planned) if holders >> bit & 1]
            if task is None or self._allowed(job, place, gone):
                blockers = tuple(
                    blocker
                    for blocker in board.blockers(place.block & board.planned)
                    if blocker.sort == "job"
                )
                return Displaced(
                    place, blockers, cost, _share(board, option, start), _saved(board, job, start)
                )
        return None

    def _row(self, option: Option, start: int, row: int) -> dict[int, int]:
        """Of the places that begin in a slot: whose cells each covers (a bit for a planned job), its GPUs.

        Of places that cover the same jobs the first is kept.
        """
        holders = self._during(start, option.slots)
        width = option.gpus // (option.gang or 1)
        reach, wide = 1, holders
        while 2 * reach <= width:
            wide = [a | b for a, b in zip(wide, wide[reach:] + [0] * reach, strict=True)]
            reach *= 2
            self.effort -= len(wide)
        rest = width - reach
        ones = (1 << width) - 1
        if not option.gang:
            covers = [a | b for a, b in zip(wide, wide[rest:] + [0] * rest, strict=True)] if rest else wide
            first = {covers[gpu]: gpu for gpu in reversed(gpus_of(row))}
            self.effort -= len(wide) + 10 * len(first)
            return {holders: ones << gpu for holders, gpu in first.items()}
        found: dict[int, int] = {}
        for group in option.groups:
            nodes = sorted(
                gpus_of(row & group), key=lambda gpu: (self._cost(wide[gpu] | wide[gpu + rest]), gpu)
            )
            if len(nodes) >= option.gang:
                all_holders = blocks = 0
                for gpu in nodes[: option.gang]:
                    all_holders |= wide[gpu] | wide[gpu + rest]
                    blocks |= ones << gpu
                found[all_holders] = blocks
        return found

    def _during(self, start: int, slots: int) -> list[int]:
        """For each GPU, the planned jobs that hold it in some of the slots."""
        if not self._holders:
            rows = [[0] * self.board.layout.gpus for _ in range(self.board.layout.rows)]
            for bit, placement in enumerate(self.planned):
                for slot in range(placement.start, min(placement.end, len(rows))):
                    for gpu in placement.gpus:
                        rows[slot][gpu] |= 1 << bit
            self._holders.append(rows)
        level = slots.bit_length() - 1
        while len(self._holders) <= level:
            below, step = self._holders[-1], 1 << (len(self._holders) - 1)
            self._holders.append(
                [
                    [a | b for a, b in zip(below[slot], below[min(slot + step, len(below) - 1)], strict=True)]
                    for slot in range(len(below))
                ]
            )
            self.effort -= self.board.layout.gpus * self.board.layout.rows
        table, late = self._holders[level], start + slots - (1 << level)
        self.effort -= self.board.layout.gpus
        return [a | b for a, b in zip(table[start], table[late], strict=True)]

    def _cost(self, holders: int) -> float:
        """What these jobs earn together."""
        found = self._costs.get(holders)
        if found is None:
            found, left = 0.0, holders
            while left:
                low = left & -left
                found += self.earned[low.bit_length() - 1]
                left ^= low
            self._costs[holders] = found
        return found

    def _allowed(self, job: Job, place: Place, gone: list[Placement]) -> bool:
        """Whether the plan with the job in place of the others keeps every rule, guarantees included."""
        plan = self.board.plan
        left = [placement for placement in plan.placements if placement not in gone]
        left.append(Placement(job.id, place.start, place.option.slots, place.gpus))
        return not broken_rules(self.board.problem, replace(plan, placements=tuple(left), unplaced=()))


def _share(board: Board, option: Option, start: int) -> float:
    """Of a job's worth, what it earns when it starts there: less than all when it ends after the horizon."""
    return min(1.0, (board.problem.slots - start) / option.slots)


def _saved(board: Board, job: Job, start: int) -> float:
    return board.problem.move_cost_of(job, None) - board.problem.move_cost_of(job, start)


def _earned(board: Board, placement: Placement) -> float:
    job = board.problem.job_by_id[placement.job]
    share = min(1.0, (board.problem.slots - placement.start) / placement.slots)
    return board.problem.worth(job) * share + _saved(board, job, placement.start)
