"""Fast mode: the best plan that a few milliseconds can find.

Services first follow their demand. Jobs are then packed by several recipes (see ``orders``) and the best
packing is kept. Then services are tried on other GPUs, because where they stand decides which nodes stay
whole, and, where real-time GPUs cost more than the batch work they displace would earn, at levels chosen at
the price of that work. What is left of the budget goes into local search. In the end shortage is met with
GPUs that stayed idle, and every job is moved as early as it can go, the most valuable first.

The invariant: the plan is never worth less than fifo, backfill or greedy, because they are among what is
tried, unless a ceiling on what their reservations leave room for shows that they cannot win. The cost of
the choice: the levels of services are chosen by price and not together with the packing; full mode does
both at once.

The budget is counted in steps, so that a plan depends on the problem and the seed alone; time is only a
cap.
"""

from __future__ import annotations

from functools import partial
from random import Random
from time import perf_counter

from allocator import baselines
from allocator.frontier import LARGE
from allocator.grid import Layout, Task, build_tasks
from allocator.improve import improve
from allocator.orders import LARGE_RECIPES, RECIPES, Recipe, arrange, ceiling
from allocator.packing import FIRST
from allocator.problem import Problem, Service
from allocator.realtime import Held, choose_counts, hold
from allocator.schedule import Schedule, serve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from allocator.realtime import Chooser

    Policy = Callable[[Layout, list[Task]], Schedule]

_DUST = 1e-9
_PLACINGS = 400  # jobs that all recipes together place at most, but ...
_FEWEST = 5  # ... so many recipes in any case
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
    best, won, most = _pack(layout, tasks, held, _affordable(layout, tasks), until)
    price = marginal_price(tasks, layout.free.bit_count() - sum([sum(service.counts) for service in held]))
    may_pay = price > 0 and _may_pay(held, price)
    if best.objective < most - _DUST or may_pay or any(service.shortage for service in held):
        best, won, prefer = _try_elsewhere(best, won, until)
        if may_pay:
            best = _try_leaner(best, price, won, prefer, until)
        steps = _default_steps(layout, tasks) if iterations is None else iterations
        best = improve(best, steps, Random(seed), until, adaptive=iterations is None)
        best = _meet_shortage(best)
        best = _not_below_baselines(best)
    _move_up(best)
    return best


def _affordable(layout: Layout, tasks: list[Task]) -> Sequence[Recipe]:
    """As many recipes, the most useful first, as jobs and cells leave time for."""
    count, cells = max(len(tasks), 1), layout.gpus * layout.rows
    if cells < LARGE:
        return RECIPES[: max(_FEWEST, _PLACINGS // count)]
    return LARGE_RECIPES[: max(2, _LARGE_WORK // (count * cells))]


def _try_elsewhere(
    best: Schedule, won: Recipe, until: float | None
) -> tuple[Schedule, Recipe, Sequence[int]]:
    """Services on other GPUs, where that leaves more room for jobs; with the recipe and what they prefer."""
    layout, tasks = best.layout, best.tasks
    prefer: Sequence[int] = ()
    if layout.gpus * layout.rows >= LARGE or not any(held.cells for held in best.held):
        return best, won, prefer
    for other in _preferences(layout):
        held = serve(layout, baselines.follow_demand, other)
        if [service.rows for service in held] == [service.rows for service in best.held]:
            continue
        packed, recipe, _ = _pack(layout, tasks, held, (won, *RECIPES[:3]), until)
        if packed.objective > best.objective + _DUST:
            best, won, prefer = packed, recipe, other
    return best, won, prefer


def _preferences(layout: Layout) -> list[list[int]]:
    """Where services could stand but on the highest GPUs, as row masks in the order of preference.

    On nodes that holes and running jobs have broken already, so that whole nodes remain for wide jobs; on
    the GPUs of one type, which jobs may not want; on the lowest nodes.
    """
    nodes = layout.problem.nodes
    masks = [
        ((1 << node.gpus) - 1) << first for first, node in zip(layout.problem.first_gpu, nodes, strict=True)
    ]
    lost = [(mask * layout.repeat(layout.horizon) & ~layout.free).bit_count() for mask in masks]
    by_loss = sorted(zip(lost, masks, strict=True), reverse=True)
    found = [[mask for cells, mask in by_loss if cells]] if any(lost) else []
    types = {node.gpu for node in nodes}
    if len(types) > 1:
        for gpu in sorted(types, key=str):
            found.append([mask for mask, node in zip(masks, nodes, strict=True) if node.gpu == gpu][::-1])
    return [*found, masks]


def _try_leaner(
    best: Schedule, price: float, won: Recipe, prefer: Sequence[int], until: float | None
) -> Schedule:
    """Levels of services at the price of the work that they displace, where that is worth more."""
    layout, tasks = best.layout, best.tasks
    leaner = serve(layout, partial(_at_price, price), prefer)
    if [held.counts for held in leaner] == [held.counts for held in best.held]:
        return best
    other, _, _ = _pack(layout, tasks, leaner, (won, *RECIPES[:2]), until)
    return other if other.objective > best.objective + _DUST else best


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


def _pack(
    layout: Layout, tasks: list[Task], held: list[Held], recipes: Sequence[Recipe], until: float | None
) -> tuple[Schedule, Recipe, float]:
    """The best packing of some recipes and of the order by priority.

    Returns:
        the schedule, the recipe that made it (the first of all when it was the priority), and an objective
        that no packing exceeds with these levels.
    """
    best, won = Schedule(layout, tasks, held), recipes[0]
    capacity = (best.packing.free & ((1 << (layout.gpus * layout.horizon)) - 1)).bit_count()
    most = ceiling(tasks, capacity)
    shortage = sum([service.cost for service in held])
    best.packing.fill(baselines.by_priority(layout, tasks), FIRST)
    for recipe in recipes:
        if best.packing.gain >= most - _DUST or (until is not None and perf_counter() > until):
            break
        if recipe.late and layout.problem.open_end:
            continue  # what ends after the horizon is worth less
        fresh = Schedule(layout, tasks, held)
        order = arrange(tasks, capacity, recipe)
        fresh.packing.fill(order, recipe.side, late=recipe.late, column=recipe.column)
        if fresh.packing.gain > best.packing.gain:
            best, won = fresh, recipe
    return best, won, most - shortage


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
        room = layout.free.bit_count() - sum([sum(service.counts) for service in held])
        if ceiling(tasks, room) - sum([service.cost for service in held]) <= schedule.objective + _DUST:
            return schedule
        policies = (baselines.fifo, baselines.backfill)
    for policy in policies:
        other = policy(layout, tasks)
        if other.objective > schedule.objective + _DUST:
            schedule = other
    return schedule


def _move_up(schedule: Schedule) -> None:
    """Start every job as early as all others allow, the most valuable first, until none can move."""
    order = sorted(schedule.tasks, key=lambda task: -task.density)
    while schedule.packing.advance(order):
        pass
    schedule.packing.fill(order, FIRST)
