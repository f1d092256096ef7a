"""Nodes that are alike, and the windows of slots in which free GPUs are few.

Equal nodes could be exchanged in any plan, so a model need not say which of them a job is on. The
invariant: two nodes of a class have the same GPUs free in the same slots, held by the same services
(unless told apart by type only, where that many classes would be too many).
"""

from allocator.grid import Option
from allocator.problem import Problem

_MAX_WINDOWS = 500  # windows of several slots that are looked at in a class, the shortest first


def classes(problem: Problem, options: list[Option], free: list[int], fine: bool) -> list[int]:
    """Masks of the GPUs of each class of nodes.

    Nodes are alike when no job tells them apart: by their type or domain, where that matters to some job, and
    (``fine``) by their size, the slots in which their GPUs are free and the services that hold them now.
    """
    by_type = any(
        job.gpu_types or any(not isinstance(choice.slots, int) for choice in job.choices)
        for job in problem.jobs
        if job.running is None
    )
    by_domain = any(option.gang for option in options)
    holder = {
        gpu: at
        for at, service in enumerate(problem.services)
        if isinstance(service.current, tuple)
        for gpu in service.current
    }
    masks: dict[tuple[object, ...], int] = {}
    for first, node in zip(problem.first_gpu, problem.nodes, strict=True):
        inside = (1 << node.gpus) - 1
        key: tuple[object, ...] = (
            node.gpu if by_type or by_domain else None,
            node.domain if by_domain else None,
        )
        if fine:
            key += (node.gpus, *((row >> first) & inside for row in free))
            key += tuple(holder.get(gpu) for gpu in range(first, first + node.gpus))
        masks[key] = masks.get(key, 0) | inside << first
    return list(masks.values())


def windows(free: list[int]) -> list[tuple[int, int]]:
    """Each slot, and the shortest windows in which fewer GPUs are free throughout than in any part of
    them."""
    rows = len(free)
    found = [(slot, slot + 1) for slot in range(rows)]
    before = free  # free throughout the window of one slot less that begins there
    for length in range(2, rows + 1):
        now = [before[first] & free[first + length - 1] for first in range(rows - length + 1)]
        found += [
            (first, first + length)
            for first, mask in enumerate(now)
            if mask != before[first] and mask != before[first + 1]
        ]
        before = now
        if len(found) > rows + _MAX_WINDOWS:
            break
    return found
