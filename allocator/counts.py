"""The best solution in counts by CP-SAT: a second opinion beside branch and bound, often quick where that
is slow.

It works on the same variables and rows as the linear program (see ``relaxation``). The invariant: worth that
is not whole is scaled and rounded up, so that the bound that comes back holds.
"""

from collections.abc import Callable, Sequence
from math import ceil
from threading import Event, Thread

from ortools.sat.python import cp_model

from allocator.bound import objective_scale
from allocator.cells import Budget
from allocator.relaxation import Relaxation, Row

_LOOK_SECONDS = 0.02
_FINE = 10**5  # parts of a unit of worth, when there is no smaller scale


class _Watch(Thread):
    """Stops a solver from outside, when others have found what it is searching for."""

    def __init__(self, solver: cp_model.CpSolver, enough: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self.solver = solver
        self.enough = enough
        self.done = Event()

    def run(self) -> None:
        while not self.done.wait(_LOOK_SECONDS):
            if self.enough():
                self.solver.stop_search()


def solve_counts(
    relaxation: Relaxation,
    rows: Sequence[Row],
    start: dict[int, int],
    budget: Budget,
    enough: Callable[[], bool],
) -> tuple[dict[int, int], float]:
    """Values of the best solution found (empty for none), and a bound.

    Args:
        start: values of a solution to begin with.
        enough: asked now and then; whether to stop.
    """
    model = cp_model.CpModel()
    variables = [model.new_int_var(0, upper, "") for upper in relaxation.upper.tolist()]
    for row in (*relaxation.rows, *rows):
        numbers, weights = row.variables.tolist(), row.weights.tolist()
        terms = [variables[at] for at in numbers]
        if row.limit == 0 and weights == [1, -1] and all(relaxation.upper[at] == 1 for at in numbers):
            model.add_implication(*terms)
        else:
            model.add(cp_model.LinearExpr.weighted_sum(terms, weights) <= row.limit)
    for at, variable in enumerate(variables):
        model.add_hint(variable, start.get(at, 0))
    scale = objective_scale(relaxation)
    worths = relaxation.objective.tolist()
    figures = [round(w * scale) if scale else ceil(w * _FINE - 1e-9) for w in worths]
    model.maximize(cp_model.LinearExpr.weighted_sum(variables, figures))
    solver = budget.solver()
    watch = _Watch(solver, enough)
    watch.start()
    status = solver.solve(model)
    watch.done.set()
    watch.join()
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return {}, float("inf")
    bound = relaxation.constant + solver.best_objective_bound / (scale or _FINE)
    values = {at: value for at, v in enumerate(variables) if (value := solver.value(v))}
    return values, bound
