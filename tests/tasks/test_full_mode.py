"""Full mode in a process of its own: its plan comes back whole, and whatever it does ends nothing else."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import allocator
from tasks import full_mode
from tasks.full_mode import FullModeError, plan_in_full_mode

SCENARIOS = Path(allocator.__file__).parent / "scenarios"


def scenario(name: str) -> allocator.Problem:
    return allocator.load_problem(SCENARIOS / f"{name}.yaml")


def test_its_plan_is_the_one_of_the_allocator_with_bound_and_reasons() -> None:
    plan = plan_in_full_mode(scenario("fragmentation"), 20.0)
    assert (plan.mode, plan.objective, plan.bound) == ("full", 1326, 1326)
    placed = {placement.job for placement in plan.placements}
    out = {entry.job: entry.reason for entry in plan.unplaced}
    assert placed and out.keys() == {job.id for job in scenario("fragmentation").jobs} - placed
    assert all(out.values())


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by signal 9"),
        ("import os; os.abort()", "ended by signal 6"),
        ("import sys; sys.exit('first\\nno licence')", "exit 1: no licence"),
        ("print('[]')", "its answer is no plan: TypeError"),
        ("print('half a pl')", "its answer is no plan: JSONDecodeError"),
        ("import time; time.sleep(60)", "no answer 0 s after its time limit of 0.5 s"),
        (
            "import json, sys; from allocator import Problem, solve\n"
            "plan = solve(Problem.from_dict(json.load(sys.stdin))).to_dict()\n"
            "plan['placements'][0]['slots'] += 1; print(json.dumps(plan))",
            "its answer is no plan: RuntimeError: fast made a plan that breaks a rule",
        ),
    ],
    ids=["killed", "aborted", "gives up", "no plan", "half an answer", "hangs", "breaks a rule"],
)
def test_what_goes_wrong_in_it_is_said_in_a_line(
    program: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_mode, "SOLVER", ("-c", program))
    monkeypatch.setattr(full_mode, "GRACE_S", 0.2 if "sleep" in program else 30.0)
    with pytest.raises(FullModeError) as failed:
        plan_in_full_mode(scenario("contention"), 0.5)
    assert expected in str(failed.value) and "\n" not in str(failed.value)


def test_a_process_that_cannot_start_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FullModeError, match=r"its process cannot be started: .*No such file"):
        plan_in_full_mode(scenario("contention"), 0.5)


def test_it_dies_with_the_planner(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    sleeper = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    planner = (
        "import allocator\nfrom tasks import full_mode\n"
        f"full_mode.SOLVER = ('-c', {sleeper!r})\n"
        f"full_mode.plan_in_full_mode(allocator.load_problem({str(SCENARIOS / 'contention.yaml')!r}), 300)"
    )
    process = subprocess.Popen([sys.executable, "-c", planner])
    try:
        until = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text()):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    solver = int(pid_file.read_text())
    until = time.monotonic() + 30
    while Path(f"/proc/{solver}").exists() and _state(solver) != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"
