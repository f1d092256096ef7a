"""A plan, or a part of it, cell by cell in CP-SAT: jobs choose places, services choose GPUs.

There is a boolean for each place that an open job could take (the first GPU of a block, and a start) and,
where a service is open, one for each replica and slot; a cell is taken once. Everything else stays as it is
in the given state. With all open this is the whole problem, exact down to the last rule, for small ones;
with some jobs and slots open it is a neighbourhood for ``search``.

The invariant: the state itself is a solution of every model made from it, so a search never loses it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from ortools.sat.python import cp_model

from allocator.bound import objective_scale
from allocator.grid import Option
from allocator.packing import places
from allocator.problem import Service
from allocator.relaxation import Relaxation
from allocator.state import State, bits

_FINE = 10**5  # parts of a unit of worth, when there is no smaller scale

Literal = cp_model.IntVar
Count = cp_model.LinearExpr | int


@dataclass(frozen=True, slots=True)
class Budget:
    """What a search may use: effort in CP-SAT's deterministic time, and seconds as a cap."""

    effort: float
    seconds: float
    seed: int = 0
    workers: int = 1
    hasty: bool = False  # for small models, of which presolve would take most of the time

    def solver(self) -> cp_model.CpSolver:
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = self.workers
        solver.parameters.random_seed = self.seed
        solver.parameters.max_deterministic_time = max(self.effort, 1e-3)
        solver.parameters.max_time_in_seconds = max(self.seconds, 1e-3)
        if self.hasty:
            solver.parameters.cp_model_probing_level = 0
            solver.parameters.symmetry_level = 0
        return solver


@dataclass(frozen=True, slots=True)
class Improved:
    """What a model gave: a state at least as good, or None; a bound of its objective; whether it is proven
    best."""

    state: State | None
    bound: float
    proven: bool


class CellModel:
    """A model around a state.

    Args:
        open_jobs: positions in the state's list of the jobs that may move or go; others may come in.
        open_slots: of each open service, the slots (from, to) in which it may hold other GPUs.
        within: cells that open jobs and services may use; None for all that are free.
        groups: numbers of the groups whose jobs may come in; None for all.
        snug: whether jobs may only go where they leave room on one side, or to multiples of their width. The
            model is then several times smaller, and its bound holds for such places only.
        tidy: whether services hold no more than they need, in the open slots and in those beside them.
    """

    def __init__(
        self,
        relaxation: Relaxation,
        state: State,
        open_jobs: Iterable[int],
        open_slots: dict[str, tuple[int, int]],
        within: int | None = None,
        groups: Iterable[int] | None = None,
        snug: bool = False,
        tidy: bool = False,
    ) -> None:
        self.relaxation = relaxation
        self.snug, self.tidy = snug, tidy
        self.state = state
        self.open_jobs = sorted(open_jobs)
        self.open_slots = open_slots
        self.model = cp_model.CpModel()
        self.cells: dict[tuple[int, int], list[Literal]] = {}
        self.places: dict[tuple[int, int], Literal] = {}
        self.gangs: dict[int, Literal] = {}
        self.holds: dict[tuple[str, int, int], Literal] = {}
        self._aligned: dict[int, int] = {}
        self.terms: list[tuple[Literal, float]] = []
        self.constant = 0.0
        layout = relaxation.layout
        free = state.free(relaxation, self.open_jobs)
        for name, (first, last) in open_slots.items():
            for slot in range(first, last):
                free |= state.held[name][slot] << (slot * layout.gpus)
        if within is not None:
            free &= within
        self.free = [(free >> (slot * layout.gpus)) & layout.row for slot in range(layout.horizon)]
        is_open = set(self.open_jobs)
        self.fixed = [block for position, block in enumerate(state.jobs) if position not in is_open]
        self._add_jobs(free, groups)
        for service in relaxation.problem.services:
            if service.service in open_slots:
                self._add_service(service, *open_slots[service.service])
        # Cells with the same contenders, such as the slots of a job beside itself, need one row.
        different = {tuple([v.index for v in literals]): literals for literals in self.cells.values()}
        for literals in different.values():
            if len(literals) > 1:
                self.model.add_at_most_one(literals)
        self._add_tenants()
        self._add_reservations()
        self._add_least_start()
        scale = objective_scale(relaxation)
        self.scale = scale or _FINE
        self.rounding = 0.0 if scale else len(self.terms) / _FINE
        self.model.maximize(
            cp_model.LinearExpr.weighted_sum(
                [literal for literal, _ in self.terms], [round(worth * self.scale) for _, worth in self.terms]
            )
        )

    def solve(self, budget: Budget) -> Improved:
        """Search for a better state."""
        solver = budget.solver()
        status = solver.solve(self.model)
        proven = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Improved(None, float("inf"), proven)
        begins: dict[int, list[int]] = {}
        for (at, first), place in self.places.items():
            if solver.boolean_value(place):
                begins.setdefault(at, []).append(first)
        jobs = list(self.fixed)
        for at, firsts in begins.items():
            pieces = self.relaxation.spots[at].pieces
            firsts.sort()
            jobs += [(at, tuple(firsts[k : k + pieces])) for k in range(0, len(firsts), pieces)]
        held = {name: list(masks) for name, masks in self.state.held.items()}
        ones = {s.service: (1 << s.gpus_per_replica) - 1 for s in self.relaxation.problem.services}
        for name, (first, last) in self.open_slots.items():
            held[name][first:last] = [0] * (last - first)
        for (name, slot, begin), hold in self.holds.items():
            if solver.boolean_value(hold):
                held[name][slot] |= ones[name] << begin
        found = State(jobs, held)
        # What the model has not in it.
        rest = found.worth(self.relaxation) - solver.objective_value / self.scale
        return Improved(found, rest + solver.best_objective_bound / self.scale + 2 * self.rounding, proven)

    # Jobs

    def _add_jobs(self, free: int, groups: Iterable[int] | None) -> None:
        relaxation, state = self.relaxation, self.state
        taken = [0] * len(relaxation.groups)
        for at, _ in self.fixed:
            taken[relaxation.spots[at].group] += 1
        mine = [state.jobs[position] for position in self.open_jobs]
        if groups is None:
            numbers = list(range(len(relaxation.groups)))
        else:
            numbers = sorted({relaxation.spots[at].group for at, _ in mine} | set(groups))
        now = {(at, first) for at, firsts in mine for first in firsts}
        self.now: dict[int, int] = {}
        for at, first in now:
            self.now[at] = self.now.get(at, 0) | 1 << first
        where: dict[int, int] = {}
        for number in numbers:
            group = relaxation.groups[number]
            left = group.tasks[taken[number] :]
            starts: list[Literal] = []
            for option in relaxation.tasks[group.tasks[0]].options if left else ():
                key = id(option)
                if key not in where:
                    where[key] = places(option, free)
                starts += self._places(number, option, where[key], len(left))
            if starts:
                self._count(starts, [relaxation.tasks[task].worth for task in left])
        for place_key, place in self.places.items():
            self.model.add_hint(place, place_key in now)
        spots = [at for at, _ in mine]
        for at, gang in self.gangs.items():
            self.model.add_hint(gang, spots.count(at))

    def _places(self, group: int, option: Option, where: int, left: int) -> list[Literal]:
        """A boolean for each place of an option among the free cells; what to count as starts."""
        relaxation, model, layout = self.relaxation, self.model, self.relaxation.layout
        starts: list[Literal] = []
        for slot in range(layout.horizon) if where else ():
            row = (where >> (slot * layout.gpus)) & layout.row
            for at in relaxation.spots_at(group, slot) if row else ():
                spot = relaxation.spots[at]
                inside = row & spot.where
                if spot.option is not option or inside.bit_count() < spot.pieces:
                    continue
                if self.snug and spot.gang < 0:
                    inside = self._snug(inside, spot.piece, left) | self.now.get(at, 0)
                blocks = []
                for first in bits(inside):
                    place = self.places[at, first] = model.new_bool_var("")
                    blocks.append(place)
                    for t in range(slot, min(spot.end, layout.horizon)):
                        for gpu in range(first, first + spot.piece):
                            self.cells.setdefault((t, gpu), []).append(place)
                if spot.gang >= 0:
                    gang = self.gangs[at] = model.new_int_var(0, min(left, len(blocks) // spot.pieces), "")
                    model.add(cp_model.LinearExpr.sum(blocks) == spot.pieces * gang)
                    blocks = [gang]
                starts += blocks
                if gain := relaxation.gain(spot):
                    self.terms += [(block, gain) for block in blocks]
        return starts

    def _snug(self, begins: int, width: int, count: int) -> int:
        """Of the places of a start, those at either end of a run of them, and those at multiples of the
        width."""
        even = self._aligned.get(width)
        if even is None:
            problem = self.relaxation.problem
            even = 0
            for first, node in zip(problem.first_gpu, problem.nodes, strict=True):
                for begin in range(0, node.gpus - width + 1, width if width > 2 else 4):
                    even |= 1 << (first + begin)
            self._aligned[width] = even
        ends = begins & (~(begins << 1) | ~(begins >> 1))
        if width < 3 and count > 1:
            ends |= begins & (~(begins << 2 * width) | ~(begins >> width))
        return begins & (even | ends)

    def _count(self, starts: list[Literal], worths: list[float]) -> None:
        """As many jobs of a group are in as have a place, the most valuable first."""
        model = self.model
        if len(worths) == 1:
            model.add_at_most_one(starts)
        elif len(set(worths)) == 1:
            model.add(cp_model.LinearExpr.sum(starts) <= len(worths))
        else:
            chosen = [model.new_bool_var("") for _ in worths]
            model.add(cp_model.LinearExpr.sum(chosen) == cp_model.LinearExpr.sum(starts))
            for earlier, later in pairwise(chosen):
                model.add_implication(later, earlier)
            self.terms += list(zip(chosen, worths, strict=True))
            return
        self.terms += [(start, worths[0]) for start in starts]

    # Services

    def _add_service(self, service: Service, first: int, last: int) -> None:
        relaxation, model, layout = self.relaxation, self.model, self.relaxation.layout
        name, unit = service.service, service.gpus_per_replica
        variables = next(s for s in relaxation.services if s.service is service)
        masks = self.state.held[name]
        replicas: dict[int, list[int]] = {}
        for slot in range(first, last):
            replicas[slot] = bits(layout.block_starts(self.free[slot], unit))
            now = {(r & -r).bit_length() - 1 for r in layout.replicas(masks[slot], unit)}
            for begin in replicas[slot]:
                hold = self.holds[name, slot, begin] = model.new_bool_var("")
                model.add_hint(hold, begin in now)
                for gpu in range(begin, begin + unit):
                    self.cells.setdefault((slot, gpu), []).append(hold)
            levels = [model.new_bool_var("") for _ in variables.total[slot]]
            for number, (level, variable) in enumerate(
                zip(levels, variables.total[slot].tolist(), strict=True)
            ):
                model.add_hint(level, number < len(now))
                self.terms.append((level, float(relaxation.objective[variable])))
            for lower, higher in pairwise(levels):
                model.add_implication(higher, lower)
            model.add(cp_model.LinearExpr.sum(levels) == self._held(name, slot, replicas[slot]))
        if isinstance(service.current, tuple) and first == 0:
            mask = sum(1 << gpu for gpu in service.current)
            whole = [r for r in layout.replicas(mask, unit) if not r & relaxation.out[0]]
            self._follow(service, 0, self._constant(sum(whole)), self._gpus_held(name, replicas[0], 0, unit))
        elif isinstance(service.current, int) and first == 0:
            model.add(unit * self._held(name, 0, replicas[0]) <= service.current + service.ramp_at(0))
        for slot in range(max(first, 1), min(last + 1, layout.horizon)):
            out = relaxation.out[slot]
            if slot - 1 in replicas:
                ones = (1 << unit) - 1
                alive = [begin for begin in replicas[slot - 1] if not (ones << begin) & out]
                before = self._gpus_held(name, alive, slot - 1, unit)
            else:
                before = self._constant(sum(r for r in layout.replicas(masks[slot - 1], unit) if not r & out))
            if slot in replicas:
                now_held = self._gpus_held(name, replicas[slot], slot, unit)
            else:
                now_held = self._constant(masks[slot])
            self._follow(service, slot, before, now_held)
        if self.tidy:
            counts = [
                self._held(name, slot, replicas[slot])
                if slot in replicas
                else masks[slot].bit_count() // unit
                for slot in range(layout.horizon)
            ]
            for slot in range(max(first - 1, 0), min(last + 1, layout.horizon)):
                self._hold_no_more(service, slot, counts)

    def _hold_no_more(self, service: Service, slot: int, counts: list[Count]) -> None:
        """More than is wanted is held only while the count falls, or rises, as fast as it may."""
        model, unit = self.model, service.gpus_per_replica
        now = counts[slot]
        need = -(-max(service.wanted(slot)) // unit)
        reasons: list[Literal] = []
        neighbours: list[tuple[Count, int]] = []
        if slot + 1 < len(counts):
            neighbours.append((counts[slot + 1], service.ramp))
        if slot:
            neighbours.append((counts[slot - 1], service.ramp))
        elif service.current is not None:
            held = service.current if isinstance(service.current, int) else len(service.current)
            neighbours.append((held // unit, service.ramp_at(0)))
        if isinstance(now, int) and now <= need:
            return
        for neighbour, ramp in neighbours:
            reason = model.new_bool_var("")
            model.add(neighbour - now >= ramp // unit).only_enforce_if(reason)
            reasons.append(reason)
        if isinstance(now, int):
            model.add_bool_or(reasons)
        else:
            model.add(now <= need).only_enforce_if([~reason for reason in reasons])

    def _held(self, name: str, slot: int, begins: list[int]) -> Count:
        return cp_model.LinearExpr.sum([self.holds[name, slot, begin] for begin in begins])

    def _constant(self, mask: int) -> dict[int, Literal]:
        return {gpu: self.model.new_constant(1) for gpu in bits(mask)}

    def _gpus_held(self, name: str, begins: Iterable[int], slot: int, unit: int) -> dict[int, Literal]:
        """Of each GPU that a replica beginning at one of some places may use: whether it does."""
        if unit == 1:
            return {begin: self.holds[name, slot, begin] for begin in begins}
        over: dict[int, list[Literal]] = {}
        for begin in begins:
            for gpu in range(begin, begin + unit):
                over.setdefault(gpu, []).append(self.holds[name, slot, begin])
        held = {}
        for gpu, holds in over.items():
            held[gpu] = self.model.new_bool_var("")
            self.model.add(cp_model.LinearExpr.sum(holds) == held[gpu])
        return held

    def _follow(
        self, service: Service, slot: int, before: dict[int, Literal], now: dict[int, Literal]
    ) -> None:
        """The GPUs of a slot contain those alive from before, or are among them; the ramp counts from
        those."""
        model, rises = self.model, self.model.new_bool_var("")
        committed = ~self.relaxation.free[slot] & ~self.relaxation.out[slot]
        for gpu in sorted(before.keys() | now.keys()):
            if gpu not in before:
                model.add_implication(now[gpu], rises)
            elif gpu not in now:
                model.add_implication(before[gpu], ~rises)
            else:
                model.add_bool_or([~now[gpu], before[gpu], rises])
                model.add_bool_or([now[gpu], ~before[gpu], ~rises])
        have = cp_model.LinearExpr.sum(list(now.values()))
        had = cp_model.LinearExpr.sum(list(before.values()))
        must = cp_model.LinearExpr.sum([v for gpu, v in before.items() if not committed >> gpu & 1])
        model.add(have - had <= service.ramp_at(slot))
        model.add(must - have <= service.ramp_at(slot))

    # Rules about who may use how much

    def _active(self, slot: int) -> list[tuple[Literal, int, int]]:
        """Open blocks that are active in a slot: literal, spot, GPUs."""
        by_slot = self.__dict__.get("_by_slot")
        if by_slot is None:
            by_slot = self.__dict__["_by_slot"] = [[] for _ in range(self.relaxation.layout.rows)]
            for (at, _), place in self.places.items():
                spot = self.relaxation.spots[at]
                for t in range(spot.start, spot.end):
                    by_slot[t].append((place, at, spot.piece))
        return by_slot[slot]  # type: ignore[no-any-return]

    def _fixed_use(self, slot: int) -> list[tuple[int, int]]:
        """Fixed jobs that are active in a slot: spot, GPUs."""
        spots = self.relaxation.spots
        return [
            (at, spots[at].piece * spots[at].pieces)
            for at, _ in self.fixed
            if spots[at].start <= slot < spots[at].end
        ]

    def _add_tenants(self) -> None:
        relaxation = self.relaxation
        for name, room in relaxation.shares.items():
            for slot in range(relaxation.layout.rows):
                open_use = [(v, g) for v, at, g in self._active(slot) if relaxation.share_of(at) == name]
                if open_use:
                    used = sum(g for at, g in self._fixed_use(slot) if relaxation.share_of(at) == name)
                    self.model.add(sum(g * v for v, g in open_use) <= max(0, room[slot] - used))

    def _add_reservations(self) -> None:
        relaxation, model = self.relaxation, self.model
        for slot, kept in enumerate(relaxation.kept):
            active, fixed = self._active(slot), self._fixed_use(slot)
            if not kept or not (active or fixed):
                continue
            unused: dict[str, Literal] = {}
            for tenant, held in kept.items():
                own = sum(g for at, g in fixed if relaxation.tenant_of(at) == tenant)
                mine = [(v, g) for v, at, g in active if relaxation.tenant_of(at) == tenant]
                unused[tenant] = model.new_int_var(0, held, "")
                model.add(unused[tenant] + sum(g * v for v, g in mine) >= held - own)
            used = sum(g for _, g in fixed) + sum(g * v for v, _, g in active) + self._services_hold(slot)
            room = relaxation.free[slot].bit_count()
            users = {relaxation.tenant_of(at) for at, _ in fixed} | {
                relaxation.tenant_of(at) for _, at, _ in active
            }
            for user in sorted(users):
                others = [unused[tenant] for tenant in kept if tenant != user]
                if not others:
                    continue
                at_work = model.new_bool_var("")
                model.add(used + sum(others) <= room).only_enforce_if(at_work)
                for v, at, _ in active:
                    if relaxation.tenant_of(at) == user:
                        model.add_implication(v, at_work)
                if any(relaxation.tenant_of(at) == user for at, _ in fixed):
                    model.add(at_work == 1)

    def _services_hold(self, slot: int) -> Count:
        total: Count = 0
        if slot < self.relaxation.layout.horizon:
            for service in self.relaxation.problem.services:
                first, last = self.open_slots.get(service.service, (0, 0))
                if first <= slot < last:
                    holds = [
                        v for (name, t, _), v in self.holds.items() if name == service.service and t == slot
                    ]
                    total += service.gpus_per_replica * cp_model.LinearExpr.sum(holds)
                else:
                    total += self.state.held[service.service][slot].bit_count()
        return total

    def _add_least_start(self) -> None:
        """A service of which only the count is known falls faster than its ramp only for lack of GPUs."""
        relaxation, model = self.relaxation, self.model
        for service in relaxation.problem.services:
            lowest = service.current - service.ramp_at(0) if isinstance(service.current, int) else 0
            if lowest <= 0:
                continue
            unit = service.gpus_per_replica
            if self.open_slots.get(service.service, (1, 1))[0] == 0:
                have = unit * self._held(
                    service.service, 0, [b for name, t, b in self.holds if name == service.service and t == 0]
                )
            else:
                have = self.state.held[service.service][0].bit_count()
                if have >= lowest:
                    continue
            lack = model.new_bool_var("")
            model.add(have >= lowest).only_enforce_if(~lack)
            if unit == 1:
                used = sum(g * v for v, _, g in self._active(0)) + sum(g for _, g in self._fixed_use(0))
                full = relaxation.free[0].bit_count()
                model.add(used + self._services_hold(0) >= full).only_enforce_if(lack)
