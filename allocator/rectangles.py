"""GPUs for starts that are known: rectangles in the grid of GPUs × slots.

When it is known which jobs run, when, and how many GPUs each service holds in each slot, what is left to
find is where. Every block of a job is a rectangle of fixed size that slides along the GPUs. A service is
made of levels: its k-th replica is held in the intervals in which it holds at least k. These intervals are
nested, so one rectangle for each keeps the rule that the GPUs of a service only grow while its count rises
and only shrink while it falls. Where a GPU fails, the rectangle may go on elsewhere, and what it holds now
stays with it. CP-SAT places the rectangles; jobs that cannot be placed together are left out, those of
least worth first.

The cost of the choice: replicas that come and go together are first kept side by side, which is faster; a
second attempt lets them part.
"""

from dataclasses import dataclass
from itertools import pairwise

from ortools.sat.python import cp_model

from allocator.cells import Budget
from allocator.problem import Service
from allocator.relaxation import Relaxation, ServiceVariables, Spot
from allocator.state import State, bits

_FINE = 1000  # parts of a unit of worth that choose between jobs to leave out


def pack(
    relaxation: Relaxation,
    counts: dict[int, int],
    replicas: dict[str, list[int]],
    budget: Budget,
    together: bool,
) -> State | None:
    """Find GPUs for a solution of the relaxation.

    Args:
        counts: of each spot, how many jobs start there.
        replicas: of each service, how many it holds in each slot.
        together: whether replicas that come and go together stay side by side.

    Returns:
        the state, less the jobs that were left out; None when the services alone have no place.
    """
    board = _Board(relaxation)
    worth: list[tuple[cp_model.IntVar, int]] = []
    jobs: list[tuple[int, cp_model.IntVar, list[cp_model.IntVar]]] = []
    for number, count in sorted(counts.items()):
        spot = relaxation.spots[number]
        same = board.jobs(spot, count)
        jobs += [(number, present, at) for present, at in same]
        gain = relaxation.tasks[relaxation.groups[spot.group].tasks[-1]].worth
        worth += [(present, max(1, round(_FINE * gain))) for present, _ in same]
    levels: list[tuple[str, _Level]] = []
    for s in relaxation.services:
        laid = board.service(s, replicas[s.service.service], together)
        if laid is None:
            return None
        levels += [(s.service.service, level) for level in laid]
    solver, status = board.solve(worth, budget)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    placed = []
    for number, present, at in jobs:
        if solver.boolean_value(present):
            placed.append((number, tuple(sorted(solver.value(a) for a in at))))
    held = {s.service.service: [0] * relaxation.layout.horizon for s in relaxation.services}
    for name, level in levels:
        block = ((1 << level.width) - 1) << solver.value(level.at)
        for slot in range(level.first, level.last):
            held[name][slot] |= block
    return State(placed, held)


def no_more(service: Service, counts: list[int]) -> list[int]:
    """The counts of replicas, less those that neither the demand nor the ramp needs."""
    unit, counts = service.gpus_per_replica, list(counts)
    before: int | None = None
    if service.current is not None:
        before = (service.current if isinstance(service.current, int) else len(service.current)) // unit
    changed = True
    while changed:
        changed = False
        for slot, count in enumerate(counts):
            last = counts[slot - 1] if slot else before
            after = counts[slot + 1] if slot + 1 < len(counts) else count - 1
            idle = (count - 1) * unit >= max(service.wanted(slot)) and count > 0
            near = last is None or abs(count - 1 - last) <= service.ramp_at(slot) // unit
            if idle and near and abs(after - count + 1) <= service.ramp // unit:
                counts[slot] -= 1
                changed = True
    return counts


def spot_counts(relaxation: Relaxation, values: dict[int, int]) -> dict[int, int]:
    """How many jobs start at each spot in a solution."""
    counts: dict[int, int] = {}
    for at, value in values.items():
        if at < relaxation.columns:
            spot = int(relaxation.spot[at])
            counts[spot] = counts.get(spot, 0) + value
    return {at: count // relaxation.spots[at].pieces for at, count in counts.items()}


@dataclass(frozen=True, slots=True)
class _Level:
    """GPUs that a service holds in the slots from first up to last: ``width`` of them, beginning at
    ``at``."""

    first: int
    last: int
    width: int
    at: cp_model.IntVar


class _Board:
    def __init__(self, relaxation: Relaxation) -> None:
        self.relaxation = relaxation
        self.model = cp_model.CpModel()
        self.across: list[cp_model.IntervalVar] = []
        self.along: list[cp_model.IntervalVar] = []

    def rectangle(
        self, begins: int, width: int, first: int, last: int, present: cp_model.IntVar | None = None
    ) -> cp_model.IntVar:
        model = self.model
        at = model.new_int_var_from_domain(cp_model.Domain.from_values(bits(begins)), "")
        if present is None:
            self.across.append(model.new_fixed_size_interval_var(at, width, ""))
            self.along.append(model.new_fixed_size_interval_var(first, last - first, ""))
        else:
            self.across.append(model.new_optional_fixed_size_interval_var(at, width, present, ""))
            self.along.append(model.new_optional_fixed_size_interval_var(first, last - first, present, ""))
        return at

    def jobs(self, spot: Spot, count: int) -> list[tuple[cp_model.IntVar, list[cp_model.IntVar]]]:
        """Like jobs with the same start: whether each is in, and where its blocks begin."""
        model = self.model
        end = min(spot.end, self.relaxation.layout.horizon)  # behind the horizon nothing starts
        found = []
        for _ in range(count):
            present = model.new_bool_var("")
            model.add_hint(present, True)
            at = [
                self.rectangle(spot.where, spot.piece, spot.start, end, present) for _ in range(spot.pieces)
            ]
            for lower, higher in pairwise(at):
                model.add(lower < higher)
            found.append((present, at))
        for (one, here), (other, there) in pairwise(found):
            model.add_implication(other, one)
            model.add(here[0] < there[0]).only_enforce_if(other)
        return found

    def service(self, s: ServiceVariables, counts: list[int], together: bool) -> list[_Level] | None:
        """The levels of a service; None when one has no place."""
        relaxation, layout = self.relaxation, self.relaxation.layout
        unit = s.service.gpus_per_replica
        now: list[int] = []
        if isinstance(s.service.current, tuple):
            mask = sum(1 << gpu for gpu in s.service.current)
            now = [r for r in layout.replicas(mask, unit) if not r & ~relaxation.free[0]]
        side_by_side = 1
        if together:
            side_by_side = max(1, min(8, *(node.gpus for node in layout.problem.nodes)) // unit)
        found: list[_Level] = []
        first_levels: list[cp_model.IntVar] = []
        moves: dict[int, list[tuple[int, cp_model.IntVar]]] = {}
        for (first, last), replicas in _intervals(counts).items():
            at_once = 1 if first == 0 and now else side_by_side
            while replicas > 0:
                width = unit * min(at_once, replicas)
                replicas -= min(at_once, replicas)
                laid = self._level(counts, first, last, width, moves)
                if laid is None:
                    return None
                if first == 0:
                    first_levels.append(laid[0].at)
                found += laid
        for slot, moved in moves.items():
            # What is moved counts as a rise.
            left = s.service.ramp - unit * max(0, counts[slot] - counts[slot - 1])
            self.model.add(sum(width * flag for width, flag in moved) <= max(0, left))
        if now and first_levels:
            self._keep_current(first_levels, [(r & -r).bit_length() - 1 for r in now])
        return found

    def _level(
        self,
        counts: list[int],
        first: int,
        last: int,
        width: int,
        moves: dict[int, list[tuple[int, cp_model.IntVar]]],
    ) -> list[_Level] | None:
        """One level, in parts where GPUs fail and the count does not fall: there a part may be elsewhere."""
        relaxation, out = self.relaxation, self.relaxation.out
        cuts = [t for t in range(first + 1, last) if out[t] & ~out[t - 1] and counts[t] >= counts[t - 1]]
        found: list[_Level] = []
        for begin, end in pairwise([first, *cuts, last]):
            begins = relaxation.layout.block_starts(relaxation.throughout(begin, end), width)
            if not begins:
                return None
            at = self.rectangle(begins, width, begin, end)
            if found:
                before = found[-1]
                failing = out[begin] & ~out[begin - 1]
                lost = [g for g in range(relaxation.layout.gpus) if ((1 << width) - 1) << g & failing]
                moved = self.model.new_bool_var("")
                self.model.add(at == before.at).only_enforce_if(~moved)
                self.model.add_linear_expression_in_domain(
                    before.at, cp_model.Domain.from_values(lost)
                ).only_enforce_if(moved)
                moves.setdefault(begin, []).append((width, moved))
            found.append(_Level(begin, end, width, at))
        return found

    def _keep_current(self, levels: list[cp_model.IntVar], now: list[int]) -> None:
        """What a service holds is among what it holds in slot 0, or the other way round."""
        domain, kept = cp_model.Domain.from_values(now), []
        for at in levels:
            keeps = self.model.new_bool_var("")
            self.model.add_linear_expression_in_domain(at, domain).only_enforce_if(keeps)
            kept.append(keeps)
        self.model.add(sum(kept) == min(len(levels), len(now)))

    def solve(
        self, worth: list[tuple[cp_model.IntVar, int]], budget: Budget
    ) -> tuple[cp_model.CpSolver, object]:
        if self.across:
            self.model.add_no_overlap_2d(self.across, self.along)
        if worth:
            self.model.maximize(
                cp_model.LinearExpr.weighted_sum([v for v, _ in worth], [w for _, w in worth])
            )
        solver = budget.solver()
        return solver, solver.solve(self.model)


def _intervals(counts: list[int]) -> dict[tuple[int, int], int]:
    """The intervals in which each level is held, and how many levels share each."""
    found: dict[tuple[int, int], int] = {}
    for level in range(1, max(counts, default=0) + 1):
        slot = 0
        while slot < len(counts):
            if counts[slot] < level:
                slot += 1
                continue
            first = slot
            while slot < len(counts) and counts[slot] >= level:
                slot += 1
            found[first, slot] = found.get((first, slot), 0) + 1
    return found
