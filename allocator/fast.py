"""Fast mode: the best plan that a millisecond or two can find.

Services first follow their demand. Jobs are then packed by several recipes (see ``orders``) and the best packing is
kept; where real-time GPUs cost more than the batch work they displace would earn, levels chosen at the price
of that work are tried as well. What is left of the budget goes into local search. In the end shortage is met with GPUs
that stayed idle, and every job is moved as early as it can go, the most valuable first.

The invariant: the plan is never worth less than fifo, backfill or greedy, because they are among what is tried, unless a
ceiling on what their reservations leave room for shows that they cannot win. The cost of the choice: the
levels of services are chosen by price and not together with the packing; full mode does both at once.

The budget is counted in steps, so that a plan depends on the problem and the seed alone; time is only a cap.
"""

from __future__ import annotations

from functools import partial
from random import Random
from time import perf_counter

from allocator import baselines
from allocator.grid import Layout, Task, build_tasks
from allocator.improve import improve
from allocator.orders import RECIPES, arrange, ceiling
from allocator.packing import FIRST
from allocator.problem import Problem, Service
from allocator.realtime import Held, choose_counts, hold
from allocator.schedule import Schedule, serve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from allocator.realtime import Chooser

_DUST = 1e-9


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
    best, most = _pack(layout, tasks, held, until)
    if best.objective < most - _DUST:
        price = marginal_price(tasks, layout.free.bit_count() - sum([sum(h.counts) for h in held]))
        for factor in (1.0, 0.5) if price else ():
            leaner = serve(layout, partial(_at_price, price * factor))
            if [h.counts for h in leaner] != [h.counts for h in held]:
                other, _ = _pack(layout, tasks, leaner, until)
                if other.objective > best.objective + _DUST:
                    best = other
    if best.objective < most - _DUST:
        steps = _default_steps(layout, tasks) if iterations is None else iterations
        best = improve(best, steps, Random(seed), until, adaptive=iterations is None)
        best = _meet_shortage(best)
        best = _not_below_baselines(best)
    _move_up(best)
    return best


def marginal_price(tasks: list[Task], capacity: int) -> float:
    """Worth per cell of the first job that does not fit when cells go to the densest; 0 when all fit."""
    for task in sorted(tasks, key=lambda task: -task.density):
        capacity -= task.cells
        if capacity < 0:
            return task.density
    return 0.0


def _at_price(price: float, service: Service) -> Chooser:
    return partial(choose_counts, service, price)


def _pack(layout: Layout, tasks: list[Task], held: list[Held], until: float | None) -> tuple[Schedule, float]:
    """The best packing of the recipes and of the order by priority; and what none can exceed with these levels."""
    best = Schedule(layout, tasks, held)
    free, fresh = best.packing.free, best
    capacity = (free & ((1 << (layout.gpus * layout.horizon)) - 1)).bit_count()
    shortage = best.packing.gain - best.objective
    most = ceiling(tasks, capacity)
    fresh.packing.fill(baselines.by_priority(layout, tasks), FIRST)
    for recipe in RECIPES:
        if best.packing.gain >= most - _DUST or (until is not None and perf_counter() > until):
            break
        fresh = Schedule(layout, tasks, held)
        if recipe.late and layout.problem.open_end:
            continue  # what ends after the horizon is worth less
        order = arrange(tasks, capacity, recipe)
        fresh.packing.fill(order, recipe.side, late=recipe.late, column=recipe.column)
        if fresh.packing.gain > best.packing.gain:
            best = fresh
    return best, most - shortage


def _default_steps(layout: Layout, tasks: list[Task]) -> int:
    """Steps of local search, fewer where each costs more."""
    cells = layout.gpus * layout.rows
    return max(0, min(12, 400_000 // (cells * max(len(tasks), 1))))


def _meet_shortage(schedule: Schedule) -> Schedule:
    """Let services that lack GPUs take those that stayed idle."""
    layout = schedule.layout
    for at, held in enumerate(schedule.held):
        if not held.shortage:
            continue
        fuller = hold(layout, schedule.packing.free | held.cells, held.service, 0)
        if fuller.cost < held.cost - _DUST:
            everyone = [fuller if k == at else other for k, other in enumerate(schedule.held)]
            raised = Schedule(layout, schedule.tasks, everyone)
            inside = [task for task in schedule.tasks if schedule.packing.cells[task.index]]
            if raised.packing.copy(schedule.packing, inside):
                schedule = raised
    return schedule


def _not_below_baselines(schedule: Schedule) -> Schedule:
    """The schedule, or fifo's or backfill's where that is worth more. Greedy was among the packings."""
    layout, tasks = schedule.layout, schedule.tasks
    held = serve(layout, baselines.hold_peak)
    flat = [h.counts for h in held] == [h.counts for h in schedule.held]
    room = layout.free.bit_count() - sum([sum(h.counts) for h in held])
    if ceiling(tasks, room) - sum([h.cost for h in held]) <= schedule.objective + _DUST:
        return schedule
    # Where the peak is what services hold anyway, backfill is greedy, which was among the packings.
    for baseline in (baselines.fifo,) if flat else (baselines.fifo, baselines.backfill):
        other = baseline(layout, tasks)
        if other.objective > schedule.objective + _DUST:
            schedule = other
    return schedule


def _move_up(schedule: Schedule) -> None:
    """Start every job as early as all others allow, the most valuable first, until none can move."""
    order = sorted(schedule.tasks, key=lambda task: -task.density)
    while schedule.packing.advance(order):
        pass
    schedule.packing.fill(order, FIRST)
