"""Of plans that are worth the same, the one in which valuable work starts earlier.

A search keeps what is worth most and does not look at when. But the plan is made anew every hour, and a job
that is planned for late in the day without a reason would be late in the next plan as well, and so for ever.
So every search ends here. Each job, the most valuable first, moves up as far as all others allow. All jobs
are packed anew in the order of their worth, if that loses none. Then those that wait longest for their worth
move up past services, where these lack no more for it.

The invariant: the schedule that comes back is worth no less. The cost of the choice: jobs that would have
to change places one with another are only found by the packing of all, and only some places are tried.
"""

from __future__ import annotations

from allocator.give_way import cheapest_block, earnings, given_way, lacks, over, spare_gpus
from allocator.grid import Layout, Option, Task
from allocator.packing import FIRST, HIGH, places
from allocator.realtime import Held, hold
from allocator.schedule import Schedule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_DUST = 1e-9
_JOBS = 8  # that are looked at
_PLACES = 3  # that are tried for a job
_EFFORT = 1  # places tried in all; ...
_HARD = 2  # ... one for which a service has to choose how many to hold counts as so many
_USUAL = 2_000  # cells of a grid of usual size; in a larger one ...
_MORE = 20  # ... so many times the effort, or what jobs × cells leave time for
_MOST_WORK = 40_000_000  # jobs × cells × effort


def sooner(schedule: Schedule, effort: int | None = None) -> Schedule:
    """Start jobs earlier where that costs nothing.

    Args:
        effort: places past services that are tried; None for as many as the size of the problem allows.
    """
    layout = schedule.layout
    order = sorted(schedule.tasks, key=lambda task: -task.density)
    _move_up(schedule, order)
    work = len(order) * layout.gpus * layout.rows
    late = _lateness(schedule)
    if late and work <= _MOST_WORK:
        anew = Schedule(layout, schedule.tasks, schedule.held)
        anew.packing.fill([task for task in order if schedule.packing.cells[task.index]], HIGH)
        if anew.packing.gain >= schedule.packing.gain - _DUST and _lateness(anew) < late:
            schedule = anew
            _move_up(schedule, order)
    if effort is None:
        more = _MORE if layout.gpus * layout.rows > _USUAL else 1
        effort = min(_EFFORT * more, _MOST_WORK // max(work, 1))
    if not effort or not late or not any(held.cells for held in schedule.held):
        return schedule
    for task in _latest(schedule)[:_JOBS]:
        moved, spent = _past_services(schedule, task, effort)
        effort -= spent
        if moved is not schedule:
            schedule = moved
            _move_up(schedule, order)
        if effort <= 0:
            break
    return schedule


def _move_up(schedule: Schedule, order: list[Task]) -> None:
    """Start every job as early as all others allow, until none can move."""
    while schedule.packing.advance(order):
        pass
    schedule.packing.fill(order, FIRST)


def _lateness(schedule: Schedule) -> float:
    return sum([late for late, _ in _delays(schedule)])


def _latest(schedule: Schedule) -> list[Task]:
    """The jobs that are in, those first that gain most if they start as early as they may."""
    delays = sorted(_delays(schedule), key=lambda delay: -delay[0])
    return [task for late, task in delays if late > 0]


def _delays(schedule: Schedule) -> Iterator[tuple[float, Task]]:
    """Of each job that is in: its worth per cell, times the slots that it waits."""
    packing = schedule.packing
    for task in schedule.tasks:
        option = packing.option[task.index]
        if packing.cells[task.index] and option is not None:
            yield task.density * (packing.start[task.index] - option.first), task


def _past_services(schedule: Schedule, task: Task, effort: int) -> tuple[Schedule, int]:
    """The job earlier, with services elsewhere, where these lack no more than now; and the effort spent."""
    layout, packing = schedule.layout, schedule.packing
    block, now, option = packing.cells[task.index], packing.start[task.index], packing.option[task.index]
    if not block or option is None:
        return schedule, 0
    open_cells = packing.free | block
    for held in schedule.held:
        open_cells |= held.cells
    fits = places(option, open_cells) & ((1 << (now * layout.gpus)) - 1)
    if not fits:
        return schedule, 0
    lacking = _is_lacking(schedule, now, option)
    net = _costs(schedule, task, option, block) if lacking else []
    spent = _HARD if lacking else 0
    for _ in range(_PLACES):
        while fits:
            start = ((fits & -fits).bit_length() - 1) // layout.gpus
            row = (fits >> (start * layout.gpus)) & layout.row
            fits = fits >> ((start + 1) * layout.gpus) << ((start + 1) * layout.gpus)
            if net:
                allowed = net[start] <= net[now] + _DUST
            else:
                allowed = _has_room(layout, packing.free | block, option, start)
            if allowed and (there := cheapest_block(schedule, option, start, row)):
                break
        else:
            break
        moved = given_way(schedule, task, option, start, there, counts_stay=not lacking)
        spent += _HARD if lacking else 1
        if moved is not None and moved.objective >= schedule.objective - _DUST:
            return moved, spent
        if spent >= effort:
            break
    return schedule, spent


def _has_room(layout: Layout, free: int, option: Option, start: int) -> bool:
    """Whether in every slot as many GPUs are free as the job needs, wherever they are."""
    slots = range(start, min(start + option.slots, layout.horizon))
    return all(((free >> (slot * layout.gpus)) & layout.row).bit_count() >= option.gpus for slot in slots)


def _costs(schedule: Schedule, task: Task, option: Option, block: int) -> list[float]:
    """What services would lack with each start, less what the job would earn."""
    layout = schedule.layout
    held, free = _alone(layout, schedule.held, schedule.packing.free | block)
    lost = over(lacks(layout, held, spare_gpus(layout, free), option.gpus), option.slots)
    return [cost - gain for cost, gain in zip(lost, earnings(layout, task, option), strict=True)]


def _is_lacking(schedule: Schedule, start: int, option: Option) -> bool:
    """Whether a service lacks GPUs while the job runs."""
    end = start + option.slots
    return any(held.shortage and any(held.missing[start:end]) for held in schedule.held)


def _alone(layout: Layout, held: Sequence[Held], free: int) -> tuple[list[Held], int]:
    """What services would hold were a job not there, and the cells that are then free."""
    found = list(held)
    for at, one in enumerate(held):
        if one.shortage:
            fuller = hold(layout, free | one.cells, one.service, 0)
            if fuller.allowed:
                free = (free | one.cells) & ~fuller.cells
                found[at] = fuller
    return found, free
