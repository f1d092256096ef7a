"""Full mode in a process of its own: what a solver's native code does there ends no hour.

Invariant: the plan that comes back keeps every rule; a solver that dies, hangs or takes the machine's memory
costs its own process, and the fast plan stands. The process dies with this one. Costs about a second more
(imports, the problem out and the plan back), and leaves this process small.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from allocator import Plan, Problem
from allocator.solver import verified

GRACE_S = 30.0  # beyond the time limit, for a busy machine
SOLVER = ("-m", "allocator", "solve", "/dev/stdin", "--mode", "full", "--json", "-")  # of our Python
_GUARD = Path(__file__).with_name("die_with_parent.py")


class FullModeError(Exception):
    """Full mode gave no plan: why."""


def plan_in_full_mode(problem: Problem, seconds: float) -> Plan:
    """The best plan that full mode finds in so many seconds, with the reasons of unplaced jobs.

    Raises FullModeError when the process cannot start, fails, is killed, is silent for too long, or gives no
    valid plan.
    """
    guard = [sys.executable, "-S", "-E", str(_GUARD), str(os.getpid()), "0"]
    try:
        done = subprocess.run(
            [*guard, sys.executable, *SOLVER, "--time-limit", str(seconds)],
            input=json.dumps(problem.to_dict()).encode(),
            capture_output=True,
            timeout=seconds + GRACE_S,
            cwd=Path(__file__).parents[1],  # where the package is, when it is not installed
        )
    except subprocess.TimeoutExpired:
        raise FullModeError(f"no answer {GRACE_S:.0f} s after its time limit of {seconds:g} s") from None
    except OSError as error:  # no memory for another process, say
        raise FullModeError(f"its process cannot be started: {error}") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        ended = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        raise FullModeError(f"{ended}: {said[-1]}" if said else ended)
    try:
        return verified(problem, Plan.from_dict(json.loads(done.stdout)))
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise FullModeError(f"its answer is no plan: {type(error).__name__}: {error}") from None
