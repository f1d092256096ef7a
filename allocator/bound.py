"""A proven upper bound of the objective: the linear program over starts, tightened by rows that plans keep.

The relaxation (see ``relaxation``) is solved by HiGHS; rows that its solution breaks are added and it is
solved again, until none is broken or time is up. Where not even the first solution ends in time, a bound that
needs no solver stands. What is reported never depends on the solver being right:
the bound is computed from the row prices by weak duality, in which any prices that are not negative give a
bound, good ones a good one. So a run that was cut short, or ended with small errors, still proves what it
says.

The cost of the choice: the linear program lets half a job run, so on few large jobs the bound is some
percent above the best plan. ``full`` closes that with an integer model over the same rows.
"""

import ctypes
import os
import sys
from dataclasses import dataclass
from fractions import Fraction
from math import floor, isfinite, lcm
from time import perf_counter
from typing import Any

import highspy
import numpy as np

from allocator.problem import Problem
from allocator.relaxation import Floats, Ints, Relaxation, Row

_greeted = False
_ROUNDS = 25
_SAFE = 1e-9  # relative, for the rounding of sums
_SLACK = 1e-7  # relative, for the tolerances of branch and bound
_MAX_SCALE = 10**4
# Probing and enumeration in presolve do not watch the clock, and take longer than the search.
_BRANCHING = {
    "presolve_rule_off": 32768 + 65536 + 1048576,
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 1e-6,
    "time_limit": 0.0,
}


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound and what it was proven with.

    Attributes:
        value: no plan is worth more.
        reduced: of each variable, by how much a plan that uses one more of it falls short of ``value``
            (negative), or by how much one that uses one less does (positive).
        solution: the last solution of the linear program, empty when there is none.
        rows: the rows that were added.
    """

    value: float
    reduced: Floats
    solution: Floats
    rows: tuple[Row, ...]


def upper_bound(problem: Problem, time_limit: float) -> float:
    """No plan of the problem has an objective above this, whatever the time limit (in seconds)."""
    until = perf_counter() + time_limit
    relaxation = Relaxation(problem)
    linear = linear_bound(relaxation, time_limit)
    branching = Branching(relaxation, linear, {}, -float("inf"))
    branching.run(until - perf_counter())
    return rounded_down(relaxation, min(linear.value, branching.bound))


def linear_bound(relaxation: Relaxation, time_limit: float, rounds: int = _ROUNDS) -> Bound:
    """Solve the linear program, adding rows that its solution breaks, for so many seconds at most."""
    until = perf_counter() + time_limit
    upper = relaxation.upper.astype(float)
    poured = fluid_bound(relaxation)
    all_in = relaxation.constant + float(upper @ np.maximum(relaxation.objective, 0))
    # What one more of a variable would cost is known beside the bound that it was found with, not another.
    reduced = relaxation.objective.copy() if all_in < poured else np.zeros(len(upper))
    best = Bound(min(all_in, poured), reduced, np.zeros(0), ())
    if not len(upper):
        return best
    program = LinearProgram(relaxation)
    program.add(relaxation.rows)
    added: list[Row] = []
    for _ in range(rounds):
        solution, prices = program.solve(until - perf_counter())
        if prices is not None:
            value, reduced = program.proven(prices)
            # What was poured may be as good, but does not say what a variable costs.
            tighter = value <= best.value + 2 * _SAFE * (1 + abs(value))
            if tighter or not len(best.solution):
                # Rows only help, but prices of a run that was cut short need not.
                best = Bound(
                    value if tighter else best.value,
                    reduced if tighter else best.reduced,
                    solution if solution is not None else best.solution,
                    tuple(added),
                )
        if solution is None or perf_counter() > until:
            break
        best = Bound(best.value, best.reduced, solution, tuple(added))
        broken = relaxation.broken_rows(solution)
        if not broken:
            break
        added += broken
        program.add(broken)
    return best


def fluid_bound(relaxation: Relaxation) -> float:
    """A bound that takes no solver: free cells go to what earns most for each, jobs and services alike, as if
    work could be poured.

    It stands where the linear program is too large to end in time, as with hundreds of short slots.
    """
    horizon = relaxation.layout.horizon
    worths: list[tuple[float, int]] = []  # for each cell, and for how many of them
    total = relaxation.constant
    for task in relaxation.tasks:
        total += task.move_cost
        # One option alone is cut to the horizon; of several another may end within it.
        cells = task.cells if len(task.options) == 1 else task.options[0].cells
        worths.append((task.density, cells))
    for service in relaxation.problem.services:
        unit = service.gpus_per_replica
        for slot in range(horizon):
            wanted = service.wanted(slot)
            for level in range(-(-max(wanted) // unit)):
                met = sum([min(max(want - level * unit, 0), unit) for want in wanted])
                worths.append((service.penalty * met / len(wanted) / unit, unit))
    left = sum(free.bit_count() for free in relaxation.free[:horizon])
    for worth, cells in sorted(worths, reverse=True):
        total += worth * min(cells, left)
        left -= min(cells, left)
    return total + _SAFE * (1 + abs(total))


class LinearProgram:
    """The linear program in HiGHS, and its rows as arrays for the proof."""

    def __init__(self, relaxation: Relaxation) -> None:
        self.relaxation = relaxation
        self.upper = relaxation.upper.astype(float)
        self.highs = _silent_solver()
        self.highs.setOptionValue("threads", 1)
        self.highs.setOptionValue("random_seed", 0)
        count = len(self.upper)
        empty = np.zeros(0, dtype=np.int32)
        self.highs.addCols(
            count,
            -relaxation.objective,
            np.zeros(count),
            self.upper,
            0,
            np.zeros(count, dtype=np.int32),
            empty,
            np.zeros(0),
        )
        self.rows: list[Row] = []

    def add(self, rows: list[Row]) -> None:
        if not rows:
            return
        lengths = np.array([len(row.variables) for row in rows], dtype=np.int32)
        begins = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32)
        self.highs.addRows(
            len(rows),
            np.full(len(rows), -highspy.kHighsInf),
            np.array([row.limit for row in rows], dtype=float),
            int(lengths.sum()),
            begins,
            np.concatenate([row.variables for row in rows]).astype(np.int32),
            np.concatenate([row.weights for row in rows]).astype(float),
        )
        self.rows += rows

    def solve(self, seconds: float) -> tuple[Floats | None, Floats | None]:
        """The values of the variables when solved to the end, and the prices of the rows when there are
        any."""
        if seconds <= 0:
            return None, None
        self.highs.setOptionValue("time_limit", self.highs.getRunTime() + seconds)
        self.highs.run()
        found = self.highs.getSolution()
        prices = np.maximum(-np.array(found.row_dual), 0) if found.dual_valid else None
        if self.highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None, prices
        return np.array(found.col_value), prices

    def bound(self, variables: list[int], lower: Floats, upper: Floats) -> None:
        """Narrow some variables."""
        if variables:
            numbers = np.array(variables, dtype=np.int32)
            self.highs.changeColsBounds(len(variables), numbers, lower, upper)

    def proven(self, prices: Floats) -> tuple[float, Floats]:
        """Weak duality: the limits at these prices, and what each variable earns beyond what it pays."""
        if not self.rows:
            value = float(self.upper @ np.maximum(self.relaxation.objective, 0))
            return self.relaxation.constant + value, self.relaxation.objective.copy()
        lengths = [len(row.variables) for row in self.rows]
        variables: Ints = np.concatenate([row.variables for row in self.rows])
        weights = np.concatenate([row.weights for row in self.rows]).astype(float)
        paid = np.bincount(variables, weights * np.repeat(prices, lengths), minlength=len(self.upper))
        reduced = self.relaxation.objective - paid
        limits = np.array([row.limit for row in self.rows], dtype=float)
        value = float(limits @ prices + self.upper @ np.maximum(reduced, 0))
        size = float(np.abs(limits) @ prices) + abs(self.relaxation.constant)
        return self.relaxation.constant + value + _SAFE * (1 + size), reduced


class Branching:
    """Branch and bound over the same rows with whole jobs, in HiGHS; may run in a thread of its own.

    Args:
        start: values of a solution to begin with.
        known: worth of the best plan; the run ends when nothing better is left. May be raised meanwhile.

    Attributes:
        bound: no plan is worth more.
        values, worth: the best solution in counts so far.
        improvements: how often it changed.
        rows: those beside the relaxation's own.
        closed: variables that no better plan uses.
    """

    def __init__(self, relaxation: Relaxation, linear: Bound, start: dict[int, int], known: float) -> None:
        self.relaxation = relaxation
        self.known = known
        self.bound = linear.value
        self.values: dict[int, int] = {}
        self.worth = -float("inf")
        self.improvements = 0
        self._stopped = False
        self._program = LinearProgram(relaxation)
        self.rows = [*linear.rows, *relaxation.block_rows()]
        self._program.add([*relaxation.rows, *self.rows])
        self.closed = self._close(linear, start)
        self._start = start
        self._scale = objective_scale(relaxation)

    def stop(self) -> None:
        self._stopped = True

    def run(self, seconds: float) -> None:
        highs, count = self._program.highs, len(self._program.upper)
        numbers = np.arange(count, dtype=np.int32)
        highs.changeColsIntegrality(count, numbers, np.array([highspy.HighsVarType.kInteger] * count))
        start = highspy.HighsSolution()
        start.col_value = [float(self._start.get(at, 0)) for at in range(count)]
        highs.setSolution(start)
        for option, value in _BRANCHING.items():
            highs.setOptionValue(option, value)
        highs.setOptionValue("time_limit", max(seconds, 0.01))
        highs.cbMipImprovingSolution += self._improved
        highs.cbMipInterrupt += self._look
        highs.run()
        self._lower(highs.getInfo().mip_dual_bound)
        if highs.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            self._take(np.array(highs.getSolution().col_value))

    def _close(self, linear: Bound, start: dict[int, int]) -> list[int]:
        """Close what no better plan uses, but what the start uses, so that it stays a solution."""
        hopeless = linear.value + np.minimum(linear.reduced, 0) < self.known - _SAFE * (1 + abs(self.known))
        closed = [at for at in np.flatnonzero(hopeless).tolist() if at not in start]
        upper = self._program.upper.copy()
        upper[closed] = 0
        numbers = np.arange(len(upper), dtype=np.int32)
        self._program.highs.changeColsBounds(len(upper), numbers, np.zeros(len(upper)), upper)
        return closed

    def _improved(self, event: Any) -> None:
        self._take(np.array(event.data_out.mip_solution))

    def _look(self, event: Any) -> None:
        self._lower(event.data_out.mip_dual_bound)
        beaten = rounded_down(self.relaxation, self.bound, self._scale) <= self.known + _SAFE
        event.interrupt(self._stopped or beaten)

    def _lower(self, dual_bound: float) -> None:
        """HiGHS minimises; what was closed as hopeless is worth no more than what is known."""
        if np.isfinite(dual_bound):
            bound = max(self.relaxation.constant - dual_bound, self.known)
            self.bound = min(self.bound, bound + _SLACK * (1 + abs(bound)))

    def _take(self, solution: Floats) -> None:
        values = np.rint(solution).astype(np.int64)
        if len(values) != len(self._program.upper):
            return
        worth = self.relaxation.constant + float(self.relaxation.objective @ values)
        if worth > self.worth + 1e-9:
            self.values = {at: int(values[at]) for at in np.flatnonzero(values).tolist()}
            self.worth = worth
            self.improvements += 1


def _silent_solver() -> highspy.Highs:
    """A solver that prints nothing: the first one of a process writes a banner past every option."""
    global _greeted
    if _greeted:
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
    else:
        sys.stdout.flush()
        libc = ctypes.CDLL(None)
        kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        try:
            solver = highspy.Highs()  # type: ignore[no-untyped-call]
            libc.fflush(None)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            os.close(nowhere)
        _greeted = True
    solver.setOptionValue("output_flag", False)
    return solver


def objective_scale(relaxation: Relaxation) -> int | None:
    """The smallest number that makes all figures of the objective whole; None when there is no small one."""
    scale = 1
    for figure in {*relaxation.objective.tolist(), relaxation.constant}:
        fraction = Fraction(figure).limit_denominator(_MAX_SCALE)
        if abs(float(fraction) - figure) > 1e-9 * max(1.0, abs(figure)):
            return None
        scale = lcm(scale, fraction.denominator)
        if scale > _MAX_SCALE:
            return None
    return scale


def rounded_down(relaxation: Relaxation, bound: float, scale: int | None = None) -> float:
    """The largest objective that a plan can have and that is not above the bound."""
    scale = scale or objective_scale(relaxation)
    return floor(bound * scale + 1e-4) / scale if scale and isfinite(bound) else bound
