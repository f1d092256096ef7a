"""The best solution in counts by CP-SAT: a second opinion beside branch and bound, often quick where that is slow.

It works on the same variables and rows as the linear program (see ``relaxation``). The invariant: worth that
is not whole is scaled and rounded up, so that the bound that comes back holds.
"""

from collections.abc import Iterable, Sequence
from math import ceil

from ortools.sat.python import cp_model

from allocator.bound import objective_scale
from allocator.cells import Budget
from allocator.relaxation import Relaxation, Row

_FINE = 10**5  # parts of a unit of worth, when there is no smaller scale


def solve_counts(
    relaxation: Relaxation,
    rows: Sequence[Row],
    closed: Iterable[int],
    start: dict[int, int],
    budget: Budget,
) -> tuple[dict[int, int], float]:
    """Values of the best solution found (empty for none), and a bound of all solutions without the closed columns.

    Args:
        closed: variables that stay 0.
        start: values of a solution to begin with.
    """
    model = cp_model.CpModel()
    shut = set(closed)
    variables = [
        model.new_int_var(0, 0 if at in shut else upper, "") for at, upper in enumerate(relaxation.upper.tolist())
    ]
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
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return {}, float("inf")
    bound = relaxation.constant + solver.best_objective_bound / (scale or _FINE)
    values = {at: value for at, v in enumerate(variables) if (value := solver.value(v))}
    return values, bound
