"""The allocator: plans a day of GPUs. See ``problem`` for what is planned and ``check`` for the rules.

Importing it costs a few milliseconds: solvers, checks and readers are loaded when they are first used.
"""

from __future__ import annotations  # no annotation is evaluated, so typing is never loaded: 8 ms of import

from allocator.fields import ProblemError
from allocator.plan import Placement, Plan, ServicePlan, Unplaced
from allocator.problem import (
    Announced,
    Choice,
    Hole,
    Job,
    Node,
    Problem,
    Reservation,
    Running,
    Service,
    Tenant,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "Announced",
    "Choice",
    "Hole",
    "Job",
    "Node",
    "Placement",
    "Plan",
    "Problem",
    "ProblemError",
    "Reservation",
    "Running",
    "Service",
    "ServicePlan",
    "Tenant",
    "Unplaced",
    "load_problem",
    "solve",
]


def load_problem(path: str | Path) -> Problem:
    """Read a problem from a YAML (or JSON) file; a mistake is a ``ProblemError`` that names the file."""
    from allocator.reading import read_problem

    return read_problem(path)


def solve(
    problem: Problem,
    mode: str = "fast",
    *,
    seed: int = 0,
    iterations: int | None = None,
    time_limit: float | None = None,
    bound: bool = False,
) -> Plan:
    """Plan a problem in a mode (fast, full, fifo, backfill, greedy): see ``allocator.solver.solve``."""
    from allocator.solver import solve as run

    return run(problem, mode, seed=seed, iterations=iterations, time_limit=time_limit, bound=bound)
