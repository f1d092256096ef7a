"""Full mode: the best plan that an optimiser finds in the time given, and a proof of how good it is.

Several searches work on one set of variables (``relaxation``) and help each other. The linear program bounds
the objective and says which starts cannot be part of a better plan. Branch and bound in counts (HiGHS)
sharpens the bound; its solutions, and those of CP-SAT for the same problem in counts, are given GPUs
(``rectangles``). Local search and large neighbourhoods (``search``) improve the best plan, beginning with the
one that came in, at the same time as branch and bound and on a second core.

On problems of a few jobs the whole problem is solved cell by cell in the end, which leaves no gap. The
invariant: what is returned is never worth less than the plan that came in, whatever a solver does, and its
bound is proven. Random choices follow from the seed; but where time ends a search, and not its own end, two
runs may differ. With a number of iterations one search runs alone and counts its steps: then two runs are
equal, and branch and bound, whose help depends on the clock, is left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from threading import Thread
from time import perf_counter

from allocator.bound import Bound, Branching, linear_bound, rounded_down
from allocator.cells import Budget, CellModel
from allocator.check import broken_rules
from allocator.counts import solve_counts
from allocator.grid import Layout
from allocator.plan import Plan
from allocator.problem import Problem
from allocator.realtime import Held, hold
from allocator.rectangles import no_more, pack, spot_counts
from allocator.relaxation import Relaxation
from allocator.schedule import Schedule
from allocator.search import Search
from allocator.sooner import sooner
from allocator.squeeze import squeeze
from allocator.state import State, keeps_rules, schedule_of, state_of

_DUST = 1e-7
_LINEAR_SHARE = 0.3  # of the time, at most, for the linear program
_COUNT_SHARE, _COUNT_SECONDS = 0.5, 8.0  # of the time left, at most, for CP-SAT in counts
_PACK_SECONDS = 3.0
_MOST_RECTANGLES = 250  # jobs that CP-SAT places at once
_FIRST_STEPS = 1000  # of fast mode's local search, before all else
_BRANCHING_BUILDS, _COUNT_BUILDS = 4, 24  # times as long as the first build: what each needs at least
_GRACE_SECONDS = 0.3  # for branch and bound to notice that it should stop
_MOST_PLACES = 4000  # of a whole problem that is solved cell by cell
_POLISH_ROUNDS, _POLISH_EFFORT = 12, 60
_MOST_TRIMS = 200  # ways of giving one replica back that are tried


def solve_full(
    problem: Problem,
    incumbent: Plan,
    time_limit: float,
    seed: int,
    workers: int = 2,
    iterations: int | None = None,
) -> Plan:
    """The best plan found, starting from another, with its proven bound.

    Args:
        incumbent: a plan that keeps every rule; it stands when nothing better is found.
        time_limit: seconds.
        workers: 1 to search with one solver at a time, 2 for two at once.
        iterations: steps of neighbourhood search; None for as many as the time allows.
    """
    began = perf_counter()
    until = began + time_limit
    relaxation = Relaxation(problem)
    built = perf_counter() - began
    share = _LINEAR_SHARE if iterations is None else 1.0
    linear = linear_bound(relaxation, share * time_limit)
    effort = _Effort(relaxation, linear, state_of(relaxation, incumbent), seed, built)
    if iterations is not None:
        effort.search.step_seconds = time_limit
        effort.search.run(until, effort.closed, iterations)
    elif not effort.closed():
        effort.branch_and_search(until, workers)
    if iterations is None and not effort.closed() and perf_counter() < until:
        effort.whole(until)
    best = incumbent
    for state in (effort.search.state, state_of(relaxation, incumbent)):
        try:
            plan = polished(relaxation, state)
        except RuntimeError:  # it broke a rule: then what came in stands
            continue
        if plan.objective >= best.objective - _DUST:
            best = plan
            break
    bound = max(rounded_down(relaxation, effort.bound), best.objective)
    return replace(best, mode="full", bound=bound, solve_ms=1000 * (perf_counter() - began))


class _Effort:
    """The best state and the best bound while several searches work.

    Attributes:
        built: seconds that the variables and rows took to build: what models of the whole problem take
            follows from it, and one is only begun in time to end.
    """

    def __init__(self, relaxation: Relaxation, linear: Bound, state: State, seed: int, built: float) -> None:
        self.relaxation = relaxation
        self.linear = linear
        self.bound = linear.value
        self.search = Search(relaxation, state, seed)
        self.seed = seed
        self.built = built

    def closed(self) -> bool:
        return rounded_down(self.relaxation, self.bound) <= self.search.worth + _DUST

    def branch_and_search(self, until: float, workers: int) -> None:
        """Branch and bound in counts beside neighbourhood search, each using what the other found."""
        relaxation = self.relaxation
        self.search.shuffle(_FIRST_STEPS, perf_counter() + 0.1 * (until - perf_counter()))
        if self.closed():
            return
        if not self._has_time(_BRANCHING_BUILDS, until):
            self.search.run(until, self.closed)
            return
        start = self.search.state.values(relaxation)
        branching = Branching(relaxation, self.linear, start, self.search.worth)
        if workers == 1:
            branching.run(0.5 * (until - perf_counter()))
            self._use(branching, until)
            self.search.run(until, self.closed)
            return
        thread = Thread(target=branching.run, args=(until - perf_counter(),), daemon=True)
        thread.start()
        try:
            seconds = min(_COUNT_SHARE * (until - perf_counter()), _COUNT_SECONDS)
            if self._has_time(_COUNT_BUILDS, until):
                self._count(seconds, until, lambda: not thread.is_alive())
            used = 0
            while thread.is_alive() and perf_counter() < until:
                branching.known = self.search.worth
                if branching.improvements > used:
                    used = branching.improvements
                    self._use(branching, until)
                self.bound = min(self.bound, branching.bound)
                if self.closed():
                    break
                self.search.step(until - perf_counter())
        finally:
            branching.stop()
            thread.join(max(0.0, until - perf_counter()) + _GRACE_SECONDS)
        self._use(branching, until)
        if not self.closed() and not self._is_small():
            self.search.run(until, self.closed)

    def _has_time(self, builds: float, until: float) -> bool:
        """Whether what takes as long as so many builds can end in time."""
        return perf_counter() + builds * self.built < until

    def _count(self, seconds: float, until: float, enough: Callable[[], bool]) -> None:
        """The same problem in counts by CP-SAT, for some seconds."""
        compact = Relaxation(self.relaxation.problem, compact=True)
        start = self.search.state.values(compact)
        budget = Budget(seconds, max(0.0, min(seconds, until - perf_counter())), self.seed)
        values, bound = solve_counts(compact, compact.block_rows(), start, budget, enough)
        self.bound = min(self.bound, bound)
        if not enough():
            self._give_gpus(compact, values, until)

    def _use(self, branching: Branching, until: float) -> None:
        self.bound = min(self.bound, branching.bound)
        self._give_gpus(self.relaxation, branching.values, until)

    def _give_gpus(self, counted: Relaxation, values: dict[int, int], until: float) -> None:
        """Give GPUs to a solution in counts, when it is worth more than the best plan."""
        relaxation = self.relaxation
        worth = counted.constant + sum(float(counted.objective[at]) * v for at, v in values.items())
        if not values or worth <= self.search.worth + _DUST:
            return
        for found in self._ways_to_place(counted, values, until):
            if perf_counter() > until:
                return
            if found is None:
                continue
            placed = found.worth(relaxation)
            if placed > self.search.worth + _DUST and keeps_rules(relaxation, found):
                self.search.adopt(found)
            if placed >= worth - _DUST:
                break

    def _ways_to_place(
        self, counted: Relaxation, values: dict[int, int], until: float
    ) -> Iterator[State | None]:
        """States with the starts and replicas of a solution in counts, each way only when it is asked for."""
        counts = spot_counts(counted, values)
        replicas = {
            s.service.service: no_more(
                s.service, [sum(values.get(v, 0) for v in total.tolist()) for total in s.total]
            )
            for s in counted.services
        }
        moment = min(until, perf_counter() + _PACK_SECONDS)
        yield squeeze(self.relaxation, counts, replicas, Random(self.seed), moment)
        if sum(counts.values()) <= _MOST_RECTANGLES:
            for together in (True, False):
                seconds = min(_PACK_SECONDS, until - perf_counter())
                yield pack(counted, counts, replicas, Budget(_PACK_SECONDS, seconds, self.seed), together)

    def _is_small(self) -> bool:
        where = self.relaxation.spots
        return sum(spot.where.bit_count() for spot in where) <= _MOST_PLACES

    def whole(self, until: float) -> None:
        """Solve the whole problem cell by cell."""
        if not self._is_small():
            return
        relaxation, state = self.relaxation, self.search.state
        slots = {s.service: (0, relaxation.layout.horizon) for s in relaxation.problem.services}
        model = CellModel(relaxation, state, range(len(state.jobs)), slots)
        seconds = until - perf_counter()
        found = model.solve(Budget(10 * seconds, seconds, self.seed, 2))
        better = found.state is not None and found.state.worth(relaxation) > self.search.worth + _DUST
        if better and found.state is not None and keeps_rules(relaxation, found.state):
            self.search.adopt(found.state)
        self.bound = min(self.bound, found.bound)


def polished(relaxation: Relaxation, state: State) -> Plan:
    """The plan of a state: services hold no more than they need, and jobs start as early as they can."""
    from allocator.solver import finish

    schedule = schedule_of(relaxation, state)
    for _ in range(_POLISH_ROUNDS):
        schedule = sooner(schedule, _POLISH_EFFORT)
        lean = _leaner(relaxation.layout, schedule)
        if lean is None:
            break
        schedule = lean
    return finish(schedule, "full")


def _leaner(layout: Layout, schedule: Schedule) -> Schedule | None:
    """The same jobs, with a service that holds or misses fewer GPUs; None when there is nothing to gain."""
    for at, now in enumerate(schedule.held):
        choices = [
            hold(layout, free, now.service, 0) for free in (now.cells, schedule.packing.free | now.cells)
        ]
        choices += [Held(now.service, rows, layout, True) for rows in _trimmed(layout, now)]
        for other in choices:
            fewer = (other.cost, sum(other.counts)) < (now.cost - _DUST, sum(now.counts)) or (
                other.cost <= now.cost + _DUST and sum(other.counts) < sum(now.counts)
            )
            if fewer and other.allowed:
                held = [other if k == at else same for k, same in enumerate(schedule.held)]
                lean = Schedule(layout, schedule.tasks, held)
                for task in schedule.tasks:
                    option = schedule.packing.option[task.index]
                    cells = schedule.packing.cells[task.index]
                    if cells and option is not None:
                        lean.packing.put(task, option, schedule.packing.start[task.index], cells)
                if not broken_rules(layout.problem, _draft(lean)):
                    return lean
    return None


def _draft(schedule: Schedule) -> Plan:
    return Plan("full", 0.0, 0.0, None, 0.0, 0.0, schedule.placements(), schedule.realtime())


def _trimmed(layout: Layout, held: Held) -> list[list[int]]:
    """What a service holds, less one replica in a slot that does not need it, in the ways to try."""
    service, rows = held.service, held.rows
    found: list[list[int]] = []
    for slot, row in enumerate(rows):
        if row.bit_count() - service.gpus_per_replica < max(service.wanted(slot)):
            continue
        for replica in layout.replicas(row, service.gpus_per_replica):
            around = (rows[slot - 1] if slot else 0) | (rows[slot + 1] if slot + 1 < len(rows) else 0)
            if not replica & around or service.gpus_per_replica > 1 or len(found) < _MOST_TRIMS:
                found.append([*rows[:slot], row & ~replica, *rows[slot + 1 :]])
    return found
