"""The policies that every comparison is made with: fifo, backfill and greedy.

They see the same problem as the solvers and keep the same rules. In all three, services hold the
highest-numbered GPUs and jobs take the first block that fits. With demand quantiles they plan for the
highest one, as a team does that sizes its service for the worst day it expects.

* ``fifo`` holds each service's peak of the horizon in every slot, climbing to it at the ramp, and starts
  jobs strictly in the order of the queue: none before one that came earlier. A job that can no longer be
  placed is passed over.
* ``backfill`` holds the same, takes jobs by priority (raised by ageing, where the problem has it), each as
  early as it fits; a lower job goes ahead where it delays no higher one.
* ``greedy`` is backfill with only what the demand needs at each time and what the ramp needs before and
  after.
"""

from __future__ import annotations

from functools import partial

from allocator.grid import Layout, Task
from allocator.packing import FIRST
from allocator.problem import Service
from allocator.realtime import choose_counts
from allocator.schedule import Schedule, serve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from allocator.realtime import Chooser


def fifo(layout: Layout, tasks: list[Task]) -> Schedule:
    schedule = Schedule(layout, tasks, serve(layout, hold_peak))
    schedule.packing.fill(tasks, FIRST, queue=True)
    return schedule


def backfill(layout: Layout, tasks: list[Task]) -> Schedule:
    schedule = Schedule(layout, tasks, serve(layout, hold_peak))
    schedule.packing.fill(by_priority(layout, tasks), FIRST)
    return schedule


def greedy(layout: Layout, tasks: list[Task]) -> Schedule:
    schedule = Schedule(layout, tasks, serve(layout, follow_demand))
    schedule.packing.fill(by_priority(layout, tasks), FIRST)
    return schedule


def by_priority(layout: Layout, tasks: list[Task]) -> list[Task]:
    """Highest priority first; equals stay in the order of the queue."""
    ageing = layout.problem.ageing_per_slot
    return sorted(tasks, key=lambda task: -task.job.priority * (1 + ageing * task.job.waited))


def follow_demand(service: Service) -> Chooser:
    """The lowest counts that follow the demand as far as the ramp allows."""
    return partial(choose_counts, service, 0)


def hold_peak(service: Service) -> Chooser:
    """The highest demand of the horizon in every slot."""
    return partial(_peak_counts, service)


def _peak_counts(service: Service, caps: Sequence[int], lost: Sequence[int], start: int | None) -> list[int]:
    unit = service.gpus_per_replica
    peak = -(-max([max(service.wanted(slot)) for slot in range(len(caps))]) // unit)
    counts, count = [], peak if start is None else start
    for slot, cap in enumerate(caps):
        if slot or start is not None:
            step = service.ramp_at(slot) // unit
            count = min(max(peak, count - step - lost[slot]), count + step)
        count = min(count, cap)
        counts.append(count)
    return counts
