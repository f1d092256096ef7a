"""Fast mode: the best plan that a few milliseconds can find.

Services first follow their demand. Jobs are then packed by several recipes (see ``orders``) and the best
packing is kept. Then services are tried on other GPUs and at other levels (see ``stands``), because where
they stand decides which wide jobs find room. What is left of the budget goes into local search. In the end
shortage is met with GPUs that stayed idle, and every job is moved as early as it can go, the most valuable
first.

The invariant: the plan is never worth less than fifo, backfill or greedy, because they are among what is
tried, unless a ceiling on what their reservations leave room for shows that they cannot win. The cost of
the choice: services are placed before jobs and not together with them; full mode does both at once.

The budget is counted in steps, so that a plan depends on the problem and the seed alone; time is only a
cap.
"""

from __future__ import annotations

from functools import partial
from random import Random
from time import perf_counter

from allocator import baselines
from allocator.frontier import LARGE
from allocator.give_way import given_way
from allocator.grid import Layout, Task, build_tasks
from allocator.improve import improve
from allocator.orders import LARGE_RECIPES, RECIPES, Recipe, arrange, ceiling
from allocator.packing import FIRST
from allocator.problem import Problem, Service
from allocator.realtime import Held, choose_counts, hold
from allocator.schedule import Schedule, serve
from allocator.sooner import sooner
from allocator.stands import stands, ways, ways_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from allocator.realtime import Chooser

    Policy = Callable[[Layout, list[Task]], Schedule]

_DUST = 1e-9
_FAR = 0.06  # below the best so far, as a share: then a second look does not pay
_SETTLE = 30  # steps of local search around a job that services gave way to, before it is judged
_NEAR = 0.99  # of what no packing exceeds: so near, the search costs more than it can gain
_PLACINGS = 400  # jobs that all recipes together place at most, but ...
_FEWEST = 5  # ... so many recipes in any case
_LET_IN = 6  # places tried for jobs that services give way to; in a large grid as many as ...
_LET_IN_WORK = 30_000_000  # ... jobs × cells × places leave time for
_LARGE_WORK = 120_000_000  # jobs × cells × recipes in a large grid


def plan_fast(problem: Problem, seed: int, iterations: int | None, time_limit: float | None) -> Schedule:
    """Search for a schedule.

    Args:
        iterations: steps of local search; None for a number that fits the size of the problem.
        time_limit: seconds after which no further packing or step is begun; None for no cap.
    """
    until = perf_counter() + time_limit if time_limit is not None else None
    layout = Layout(problem)
    tasks = build_tasks(layout)
    held = serve(layout, baselines.follow_demand)
    best = Schedule(layout, tasks, held)
    best.packing.fill(baselines.by_priority(layout, tasks), FIRST)  # this is greedy
    best, won, most = _pack(best, held, _affordable(layout, tasks), until)
    price = marginal_price(tasks, _capacity(layout) - sum([sum(service.counts) for service in held]))
    may_pay = price > 0 and _may_pay(held, price)
    short = may_pay or any(service.shortage for service in held)
    if best.objective < most - _DUST or short:
        if best.objective < _NEAR * most or short or iterations is not None:
            best = _try_stands(best, won, price, until)
            large = layout.gpus * layout.rows >= LARGE
            if large:  # a step of local search costs much there
                best = _let_in(best, until)
            steps = _default_steps(layout, tasks) if iterations is None else iterations
            best = improve(best, steps, Random(seed), until, adaptive=iterations is None)
            best = _meet_shortage(best)
            if not large:
                best = _let_in(best, until, _SETTLE)
        best = _not_below_baselines(best)
    return sooner(best)


def _affordable(layout: Layout, tasks: list[Task]) -> Sequence[Recipe]:
    """As many recipes, the most useful first, as jobs and cells leave time for."""
    count, cells = max(len(tasks), 1), layout.gpus * layout.rows
    if cells < LARGE:
        return RECIPES[: max(_FEWEST, _PLACINGS // count)]
    return LARGE_RECIPES[: max(2, _LARGE_WORK // (count * cells))]


def _pack(
    best: Schedule, held: list[Held], recipes: Sequence[Recipe], until: float | None
) -> tuple[Schedule, Recipe, float]:
    """The best of a schedule and of the packings of some recipes around what services hold.

    Returns:
        the schedule, the recipe that made it (or the first of all), and an objective that no packing exceeds
        with these levels.
    """
    layout, tasks, won = best.layout, best.tasks, recipes[0]
    fresh = Schedule(layout, tasks, held)
    shortage = sum([service.cost for service in held])
    capacity = _capacity(layout, fresh.packing.free)
    most = ceiling(layout, tasks, capacity) - shortage
    for recipe in recipes:
        if best.objective >= most - _DUST or (until is not None and perf_counter() > until):
            break
        if recipe.late and layout.problem.open_end:
            continue  # what ends after the horizon is worth less
        fresh = Schedule(layout, tasks, held)
        fresh.packing.fill(
            arrange(tasks, capacity, recipe), recipe.side, late=recipe.late, column=recipe.column
        )
        if fresh.objective > best.objective:
            best, won = fresh, recipe
    return best, won, most


def _try_stands(best: Schedule, won: Recipe, price: float, until: float | None) -> Schedule:
    """Services elsewhere, or fewer of them, where that leaves more room for jobs."""
    layout, tasks, held = best.layout, best.tasks, best.held
    if layout.gpus * layout.rows >= LARGE or not any(service.cells for service in held):
        return best
    least = sum([service.cost for service in held])
    recipes = list(dict.fromkeys((won, *RECIPES[:2])))
    seen = {_rows(held)}
    for round_ in (0, 1):
        for stand in list(ways(best)) if round_ else stands(layout, tasks, held):
            if until is not None and perf_counter() > until:
                break
            held = serve(
                layout, partial(_at_price, stand.prices * price), stand.prefer, stand.clear, stand.order
            )
            rows = _rows(held)
            if rows in seen or not all(service.allowed for service in held):
                continue
            seen.add(rows)
            least = min(least, sum([service.cost for service in held]))
            packed, _, _ = _pack(Schedule(layout, tasks, held), held, recipes[:1], until)
            if packed.packing.gain - least < best.objective - _FAR * abs(best.objective):
                continue
            packed, _, _ = _pack(packed, held, recipes[1:], until)
            if packed.packing.gain - least > best.objective + _DUST:
                packed = _meet_shortage(packed)
                if packed.objective > best.objective + _DUST:
                    best = packed
    return best


def _let_in(best: Schedule, until: float | None, settle: int = 0) -> Schedule:
    """One more job, with services elsewhere, and what is out packed around it; then the next one.

    Args:
        settle: steps of local search before what came of it is judged.
    """
    if not best.tasks or not any(service.cells for service in best.held):
        return best
    order = sorted(best.tasks, key=lambda task: -task.density)
    left = min(_LET_IN, _LET_IN_WORK // (len(order) * best.layout.gpus * best.layout.rows))
    while left > 0:
        for way in ways_in(best):
            left -= 1
            if left < 0 or (until is not None and perf_counter() > until):
                return best
            made = given_way(best, *way)
            if made is not None:
                made.packing.fill(order, FIRST)
                if settle and made.objective > best.objective - _FAR * abs(best.objective):
                    made = improve(made, settle, Random(0), until, adaptive=False)
                if made.objective > best.objective + _DUST:
                    best = made
                    break
        else:
            break
    return best


def _capacity(layout: Layout, free: int | None = None) -> int:
    """Cells of the horizon that are free (without services, unless said otherwise).

    An open end lets jobs run on, but what they earn and cost there does not count, so no cell there does.
    """
    return ((layout.free if free is None else free) & ((1 << (layout.gpus * layout.horizon)) - 1)).bit_count()


def _rows(held: list[Held]) -> frozenset[tuple[str, tuple[int, ...]]]:
    return frozenset([(one.service.service, tuple(one.rows)) for one in held])


def _may_pay(held: list[Held], price: float) -> bool:
    """Whether holding less could pay: not where every GPU-slot meets demand that is dearer than the price."""
    return any(
        service.service.demand is None
        or service.service.penalty <= price
        or sum(service.counts) + service.shortage > sum(service.service.demand)
        for service in held
    )


def marginal_price(tasks: list[Task], capacity: int) -> float:
    """Worth per cell of the first job that does not fit when cells go to the densest; 0 when all fit."""
    for task in sorted(tasks, key=lambda task: -task.density):
        capacity -= task.cells
        if capacity < 0:
            return task.density
    return 0.0


def _at_price(price: float, service: Service) -> Chooser:
    return partial(choose_counts, service, price)


def _default_steps(layout: Layout, tasks: list[Task]) -> int:
    """Steps of local search, fewer where each costs more."""
    size = max(len(tasks), 1)
    return min(max(4, min(60, 1800 // size)), 6_000_000 // (layout.gpus * layout.rows * size))


def _meet_shortage(schedule: Schedule) -> Schedule:
    """Let services that lack GPUs take those that stayed idle."""
    layout = schedule.layout
    for at, held in enumerate(schedule.held):
        if not held.shortage:
            continue
        fuller = hold(layout, schedule.packing.free | held.cells, held.service, 0)
        if fuller.allowed and fuller.cost < held.cost - _DUST:
            everyone = [fuller if k == at else other for k, other in enumerate(schedule.held)]
            raised = Schedule(layout, schedule.tasks, everyone)
            inside = [task for task in schedule.tasks if schedule.packing.cells[task.index]]
            if raised.packing.copy(schedule.packing, inside):
                schedule = raised
    return schedule


def _not_below_baselines(schedule: Schedule) -> Schedule:
    """The schedule, or fifo's or backfill's where that is worth more. Greedy was among the packings."""
    layout, tasks = schedule.layout, schedule.tasks
    demands = [service.demand for service in layout.problem.services]
    flat = all(demand is not None and min(demand) == max(demand) for demand in demands)
    if flat and all(service.current is None for service in layout.problem.services):
        # The peak is what services hold anyway, so backfill is greedy, and its ceiling is known to be higher.
        policies: tuple[Policy, ...] = (baselines.fifo,)
    else:
        held = serve(layout, baselines.hold_peak)
        room = _capacity(layout) - sum([sum(service.counts) for service in held])
        if (
            ceiling(layout, tasks, room) - sum([service.cost for service in held])
            <= schedule.objective + _DUST
        ):
            return schedule
        policies = (baselines.fifo, baselines.backfill)
    for policy in policies:
        other = policy(layout, tasks)
        if other.objective > schedule.objective + _DUST:
            schedule = other
    return schedule
