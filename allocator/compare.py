"""Policies side by side on the same problems: what optimisation adds, honestly.

Each policy gets a freshly built problem and is timed with everything that a caller pays for: the checks of
the problem, the search, the check of the plan. The gain over fifo is flattering; the gain over greedy says
what optimisation adds. Gains are of the objective, so that a plan cannot look good by leaving services
short.

The cost: quick policies are run several times and the median is shown, so a table takes a few times longer
than its parts.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from allocator.check import score
from allocator.picture import plain
from allocator.plan import Plan
from allocator.problem import Problem

if TYPE_CHECKING:
    from rich.table import Table

POLICIES = ("fifo", "backfill", "greedy", "fast", "full")
_REPEATS = 5  # of the policies that take milliseconds
_SLOW_MS = 300.0  # what took longer is not repeated


@dataclass(frozen=True, slots=True)
class Row:
    """What one policy made of a problem.

    Attributes:
        done: jobs that end within the horizon and in time.
        shortage: missing real-time GPU-slots.
        points_over_fifo: utilization above fifo's, in percentage points.
        percent_over_fifo, percent_over_greedy: of their objective; None when that is not above 0.
        percent_below_bound: how far from the best the plan may be; None without a bound.
    """

    policy: str
    utilization: float
    value: float
    objective: float
    done: int
    shortage: float
    ms: float
    points_over_fifo: float
    percent_over_fifo: float | None
    percent_over_greedy: float | None
    percent_below_bound: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows of a problem, in the order of ``POLICIES``, and the bound when one was proven."""

    problem: str
    gpus: int
    jobs: int
    rows: tuple[Row, ...]
    bound: float | None

    def row(self, policy: str) -> Row:
        return next(row for row in self.rows if row.policy == policy)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    problem: Problem, *, policies: Iterable[str] = POLICIES, full_seconds: float = 10.0, seed: int = 0
) -> Comparison:
    """Run policies on a problem; fifo and greedy are always among them.

    Args:
        full_seconds: what full mode may take; 0 leaves it, and the bound, out.
    """
    wanted = {"fifo", "greedy", *policies}
    data = problem.to_dict()
    plans, figures, times = {}, {}, {}
    for policy in POLICIES:
        if policy in wanted and (policy != "full" or full_seconds > 0):
            limit = full_seconds if policy == "full" else None
            plans[policy], times[policy] = _timed(data, policy, limit, seed)
            figures[policy] = score(problem, plans[policy])
    bound = plans["full"].bound if "full" in plans else None
    fifo, greedy = figures["fifo"], figures["greedy"]
    rows = tuple(
        Row(
            policy=policy,
            utilization=found.utilization,
            value=found.value,
            objective=found.objective,
            done=found.completed,
            shortage=found.shortage,
            ms=times[policy],
            points_over_fifo=100 * (found.utilization - fifo.utilization),
            percent_over_fifo=_percent(found.objective, fifo.objective),
            percent_over_greedy=_percent(found.objective, greedy.objective),
            percent_below_bound=None if bound is None else _below(found.objective, bound),
        )
        for policy, found in figures.items()
    )
    return Comparison(problem.name, problem.total_gpus, len(problem.jobs), rows, bound)


def table(comparisons: Iterable[Comparison]) -> "Table":
    """All comparisons as one table for a terminal."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    made.add_column("problem", no_wrap=True)
    made.add_column("policy", no_wrap=True)
    for column in ("util. %", "value", "objective", "done", "short", "ms"):
        made.add_column(column, justify="right", no_wrap=True)
    for column in ("over fifo, points", "over fifo, %", "over greedy, %", "below bound, %"):
        made.add_column(column, justify="right")
    for comparison in comparisons:
        name = f"{comparison.problem} ({comparison.gpus} GPUs, {comparison.jobs} jobs)"
        for row in comparison.rows:
            made.add_row(
                name,
                row.policy,
                f"{100 * row.utilization:.1f}",
                plain(row.value),
                plain(row.objective),
                str(row.done),
                plain(row.shortage),
                f"{row.ms:.1f}" if row.ms < 1000 else f"{row.ms:.0f}",
                f"{row.points_over_fifo:+.1f}",
                _signed(row.percent_over_fifo),
                _signed(row.percent_over_greedy),
                "" if row.percent_below_bound is None else f"{row.percent_below_bound:.2f}",
                style="bold" if row.policy in ("fast", "full") else None,
            )
            name = ""
        if comparison.bound is not None:
            made.add_row("", "bound", "", "", plain(comparison.bound), end_section=True)
    return made


def _timed(data: dict[str, Any], policy: str, limit: float | None, seed: int) -> tuple[Plan, float]:
    from allocator import solve

    times: list[float] = []
    while not times or (len(times) < _REPEATS and max(times) < _SLOW_MS and policy != "full"):
        began = perf_counter()
        plan = solve(Problem.from_dict(data), policy, time_limit=limit, seed=seed)
        times.append(1000 * (perf_counter() - began))
    return plan, median(times)


def _percent(objective: float, base: float) -> float | None:
    return 100 * (objective / base - 1) if base > 0 else None


def _below(objective: float, bound: float) -> float:
    return max(0.0, 100 * (bound - objective) / max(abs(bound), 1e-9))


def _signed(number: float | None) -> str:
    return "–" if number is None else f"{number:+.1f}"
