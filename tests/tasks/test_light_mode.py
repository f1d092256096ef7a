"""How a replay plans between hours."""

import pytest

from allocator import Choice, Job, Node, Problem, Running, solve
from tasks.replay import light_mode

ONE = (Choice(1, 2),)


def problem(*jobs: Job) -> Problem:
    return Problem(name="p", slots=4, slot_minutes=60, nodes=(Node("n0", 1),), jobs=jobs)


@pytest.mark.parametrize("due_is_running", [False, True])
def test_a_replan_searches_only_where_a_job_that_waits_has_a_deadline(due_is_running: bool) -> None:
    running = Running(-1, (0,)) if due_is_running else None
    due = Job("due", ONE, kind="training", priority=1, deadline=2, running=running)
    dear = Job("dear", ONE, kind="training", priority=2)
    asked = problem(dear, due)
    assert light_mode(asked) == ("greedy" if due_is_running else "fast")
    assert light_mode(problem(dear)) == "greedy"


def test_such_a_replan_keeps_a_deadline_that_the_order_of_priorities_would_miss() -> None:
    due = Job("due", ONE, kind="training", priority=1, deadline=2)
    asked = problem(Job("dear", ONE, kind="training", priority=2), due)
    placed = {mode: {place.job for place in solve(asked, mode).placements} for mode in ("greedy", "fast")}
    assert placed["greedy"] == {"dear"}
    assert placed[light_mode(asked)] == {"dear", "due"}
