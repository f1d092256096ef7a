"""Kill -9 between any two steps of the hour: after the next hour nothing is lost, doubled or shared.

Each cell is one place in the code at which the planner's process dies for real (SIGKILL). The world around it
goes on: runs that began run, nodes answer, services follow their targets. What came of it is judged by the
checker, which knows only the facts and what the runs noted; then the work is finished.
"""

import random
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasks import ledger
from tasks.collect import ledger_directory
from tasks.faults import POINTS
from tests.crash.world import MINUTE, World

HOUR = datetime(2026, 12, 1, 6, tzinfo=UTC)
STEPS = 80  # that an hour has at least
BAD = b"kind: training\ngpus: many\n"
pytestmark = pytest.mark.xdist_group("kill-matrix")  # they share a world


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world at an hour in which every step has something to do: runs that ended, died, wait or are new."""
    world = World(tmp_path_factory.mktemp("busy"), HOUR - 2 * MINUTE)
    world.submit("runs-on", minutes=90)
    world.submit("ends", minutes=20)
    world.submit("gang", minutes=30, gpus=8)
    world.submit("dies", minutes=45)
    world.submit("nightly", schedule="30 6 * * *")
    world.asked.jobs.remove("nightly")  # a template; its occurrences run
    world.demand("chat", 1.0, HOUR - 10 * MINUTE)
    world.pass_minutes(2)
    assert world.hour() == 0
    world.check()
    world.pass_minutes(40)
    world.crash(next(run for run in world.runs.values() if run.job == "dies"))
    world.pass_minutes(18)
    for minutes in range(0, 60, 10):
        world.demand("chat", 2.0 + minutes / 60, HOUR + minutes * MINUTE)
    world.leave("bad.yaml", BAD)
    world.submit("new", minutes=10)
    world.submit("never", minutes=10)
    world.cancel("never")
    world.pass_minutes(2)
    return world


def test_the_busy_hour_passes_every_place_that_is_listed(busy: World, tmp_path: Path) -> None:
    world, trace = busy.copied(tmp_path / "world"), tmp_path / "trace"
    assert world.hour(fault="nowhere", environment={"SLOTWISE_FAULT_TRACE": str(trace)}) == 0
    world.check()
    assert set(POINTS) - Counter(trace.read_text().split()).keys() == set()


@pytest.mark.parametrize("place", POINTS)
def test_a_planner_killed_anywhere_loses_and_doubles_nothing(busy: World, tmp_path: Path, place: str) -> None:
    killed_and_gone_on(busy.copied(tmp_path / "world"), place)


@pytest.mark.long
@pytest.mark.parametrize("tenth", range(10))
def test_a_planner_killed_at_each_of_its_steps_in_turn(busy: World, tmp_path: Path, tenth: int) -> None:
    trace = tmp_path / "trace"
    whole = busy.copied(tmp_path / "whole")
    assert whole.hour(fault="nowhere", environment={"SLOTWISE_FAULT_TRACE": str(trace)}) == 0
    steps = len(trace.read_text().split())
    assert steps > STEPS
    for step in range(1 + tenth, steps + 1, 10):
        killed_and_gone_on(busy.copied(tmp_path / f"world{step}"), f"*#{step}")


@pytest.mark.parametrize(
    "seed", [seed if seed < 2 else pytest.param(seed, marks=pytest.mark.long) for seed in range(20)]
)
def test_a_planner_told_to_end_at_any_step_leaves_the_rest_to_the_next(
    busy: World, tmp_path: Path, seed: int
) -> None:
    step = random.Random(seed).randint(1, STEPS)
    killed_and_gone_on(busy.copied(tmp_path / "world"), f"*#{step}", told=True)


def killed_and_gone_on(world: World, fault: str, told: bool = False) -> None:
    """Let the hour die there, time pass, the hour run again and the work be finished; judge each time.

    `told`: it is told to end, which it does its own way, instead.
    """
    environment = {"SLOTWISE_FAULT_SIGNAL": "SIGTERM"} if told else {}
    assert world.hour(fault=fault, environment=environment) == (143 if told else -9)
    world.check(settled=False)
    world.pass_minutes(3)
    world.check(settled=False)
    assert world.hour() == 0  # the same hour again
    world.check()
    world.finish()
    assert ledger.verify(ledger_directory(world.site), world.storage) == []
    leftovers = [path.name for path in ledger_directory(world.site).iterdir()]
    assert sorted(leftovers) == ["ledger.duckdb", "ledger.lock", "outcomes.duckdb", "swept", "upkept"]
