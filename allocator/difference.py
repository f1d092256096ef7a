"""Two plans side by side for a person: what came in, what went out, what moved, and what it is worth."""

from typing import TYPE_CHECKING

from allocator.blockers import gpu_names
from allocator.explain import explain
from allocator.picture import figures, plain
from allocator.plan import Placement, Plan
from allocator.problem import Problem
from allocator.what_if import moves

if TYPE_CHECKING:
    from rich.console import Console


def show_difference(console: "Console", problem: Problem, plan: Plan, changed: Problem, other: Plan) -> None:
    """Print what a change of the problem does to its plan."""
    from rich.markup import escape
    from rich.table import Table

    console.print(f"before: {figures(problem, plan)}", highlight=False)
    console.print(f"after:  {figures(changed, other)}", highlight=False)
    console.print(
        f"objective {_signed(other.objective - plan.objective)}, value {_signed(other.value - plan.value)}, "
        f"utilization {100 * (other.utilization - plan.utilization):+.1f} points",
        style="bold",
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("job", "before", "after"):
        table.add_column(column)
    found = moves(plan, other)
    for move in found:
        after = _where(move.after) if move.after is not None else _why_out(changed, other, move.job)
        before = _where(move.before) if move.before is not None else _was_out(problem, move.job)
        table.add_row(escape(move.job), before, escape(after))
    if found:
        console.print(table, highlight=False)
    else:
        console.print("no job moves")


def _where(placement: Placement) -> str:
    return f"slots {placement.start} to {placement.end}, {gpu_names(placement.gpus)}"


def _was_out(problem: Problem, job: str) -> str:
    return "not placed" if job in problem.job_by_id else "–"


def _why_out(problem: Problem, plan: Plan, job: str) -> str:
    if job not in problem.job_by_id:
        return "dropped"
    return f"not placed: {explain(problem, plan, jobs=[job], remedies=False)[0].reason}"


def _signed(number: float) -> str:
    return f"+{plain(number)}" if number >= 0 else plain(number)
