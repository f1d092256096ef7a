"""Hours together, twice, late, missed or early; clocks that are set; days of 23 and of 25 hours."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tasks import ledger
from tasks.collect import ledger_directory
from tasks.instants import text
from tests.crash.world import MINUTE, World
from tests.invariants import Facts
from tests.tasks.planned_hours import ask

HOUR = datetime(2026, 12, 1, 6, tzinfo=UTC)


def world_at(directory: Path, minutes: float = 0, **cluster: Any) -> World:
    """Two jobs that wait, so many minutes after the hour."""
    world = World(directory, HOUR + timedelta(minutes=minutes), cluster=cluster)
    world.submit("a", minutes=30)
    world.submit("b", minutes=30, gpus=2)
    return world


def instants(world: World, kind: str) -> list[str]:
    return sorted(body["instant"] for body in Facts(world.storage).of(kind))


def test_two_hours_started_at_the_same_moment_are_planned_once(tmp_path: Path) -> None:
    world = world_at(tmp_path)
    assert world.hours([{}, {}]) == [0, 0]
    assert instants(world, "commit") == instants(world, "plan") == [text(HOUR)]
    world.check()
    world.finish()


def test_the_same_hour_run_again_changes_nothing_that_was_committed(tmp_path: Path) -> None:
    world = world_at(tmp_path)
    assert world.hour() == 0
    before = Facts(world.storage).by_kind["commit"]
    world.submit("c")
    assert world.hour() == 0
    assert Facts(world.storage).by_kind["commit"] == before
    world.check()
    world.finish()


def test_an_hour_three_slots_late_begins_with_the_slot_that_runs(tmp_path: Path) -> None:
    world = world_at(tmp_path, minutes=33)
    assert world.hour() == 0
    (commit,) = Facts(world.storage).of("commit")
    assert commit["instant"] == text(HOUR)
    assert {place["start"] for place in commit["placements"]} == {text(HOUR + 30 * MINUTE)}
    world.check()
    world.finish()


def test_ten_missed_hours_that_start_together_out_of_order_are_one_plan_and_nine_missed_slots(
    tmp_path: Path,
) -> None:
    world = world_at(tmp_path)
    assert world.hour() == 0
    world.pass_minutes(10 * 60 + 1)
    missed = [HOUR + timedelta(hours=hours) for hours in (4, 9, 2, 10, 1, 7, 3, 8, 6, 5)]
    codes = world.hours([{"scheduled": hour} for hour in missed])
    assert Counter(codes) == {3: 9, 0: 1}
    assert instants(world, "commit") == [text(HOUR), text(HOUR + timedelta(hours=10))]
    assert instants(world, "missed") == sorted(text(HOUR + timedelta(hours=hours)) for hours in range(1, 10))
    assert len(ask(world.site, "FROM missed_slots")) == 9
    world.check()
    world.finish()


def test_an_hour_missed_long_ago_is_known_to_the_ledger_at_once(tmp_path: Path) -> None:
    world = world_at(tmp_path)
    assert world.hour() == 0
    for _ in range(6):  # days on which the planner ran
        world.now += timedelta(days=1)
        world.tick(0)
        assert world.hour() == 0
    long_ago = HOUR + timedelta(hours=5)
    assert world.hour(scheduled=long_ago) == 3
    found = ask(world.site, "FROM missed_slots ORDER BY instant")
    assert long_ago in [row["instant"] for row in found]


@pytest.mark.parametrize("step", [timedelta(minutes=-10), timedelta(days=1)], ids=["10 min back", "a day on"])
def test_a_control_clock_that_steps_ends_no_run_and_stops_no_work(tmp_path: Path, step: timedelta) -> None:
    world = world_at(tmp_path)
    world.submit("long", minutes=150)
    assert world.hour() == 0
    world.pass_minutes(30)
    assert world.hour("replan") == 0
    world.control_is_ahead = step
    for _ in range(3):
        world.tick()
        assert world.hour("replan") == 0
        world.check()
    world.control_is_ahead = timedelta(0)
    world.finish()
    assert {body["state"] for body in Facts(world.storage).of("outcome")} == {"completed"}


STEPS = ("collect", "forecast", "commit", "dispatch", "degraded", "record", "upkeep")
JUMPS = {"10 min back": -10 * MINUTE, "a day back": -1440 * MINUTE, "40 min on": 40 * MINUTE}
JUMPS |= {"a day on": 1440 * MINUTE}


@pytest.mark.parametrize(
    ("step", "jump"),
    [
        pytest.param(step, jump, marks=() if (step, jump) == ("dispatch", "a day on") else pytest.mark.long)
        for step in STEPS
        for jump in JUMPS
    ],
)
def test_a_clock_that_jumps_between_two_steps_of_an_hour_loses_and_shares_nothing(
    tmp_path: Path, step: str, jump: str
) -> None:
    world = World(tmp_path, HOUR - 2 * MINUTE)
    world.submit("runs-on", minutes=90, gpus=4)
    world.submit("ends", minutes=20, gpus=4)
    world.pass_minutes(2)
    assert world.hour() == 0
    world.pass_minutes(56)
    for minutes in range(0, 60, 10):
        world.demand("chat", 2.0 + minutes / 30, HOUR + minutes * MINUTE)
    for job in range(4):
        world.submit(f"job{job}", minutes=30, gpus=2)
    world.to_next_hour()
    assert world.hour(jump=(STEPS.index(step) + 1, JUMPS[jump])) == 0
    world.check(settled=False)
    world.pass_minutes(6)
    world.check(settled=False)
    assert world.hour("replan") == 0
    world.check()
    world.finish()
    assert {body["state"] for body in Facts(world.storage).of("outcome")} == {"completed"}
    assert ledger.verify(ledger_directory(world.site), world.storage) == []


@pytest.mark.parametrize(
    "minutes",
    [-30, pytest.param(-1.5, marks=pytest.mark.long), 1.5, pytest.param(30, marks=pytest.mark.long)],
)
def test_a_node_whose_clock_is_wrong_is_used_and_its_runs_end_as_they_do(
    tmp_path: Path, minutes: float
) -> None:
    world = World(tmp_path, HOUR, cluster={"services": []})
    world.ahead = {node.name: minutes * MINUTE for node in world.site.cluster.nodes}
    for _ in range(3):
        world.tick()
        assert world.hour("replan") == 0
    for job in range(3):
        world.submit(f"job{job}", minutes=90, gpus=4)
    world.to_next_hour()
    assert world.hour() == 0
    for _ in range(5):
        world.pass_minutes(4)
        assert world.hour("replan") == 0
        world.check()
    world.finish()
    assert Counter(body["state"] for body in Facts(world.storage).of("outcome")) == {"completed": 3}


def test_a_node_with_a_wrong_clock_that_dies_is_still_found_out(tmp_path: Path) -> None:
    world = World(tmp_path, HOUR, cluster={"services": []})
    world.ahead = {"node0": -30 * MINUTE, "node1": -30 * MINUTE, "node2": -30 * MINUTE}
    for _ in range(2):
        world.tick()
        world.hour("replan")
    for job in range(3):
        world.submit(f"job{job}", minutes=45, gpus=4)
    world.to_next_hour()
    assert world.hour() == 0
    world.pass_minutes(10)
    assert world.hour("replan") == 0
    world.lose("node1")
    for _ in range(4):
        world.pass_minutes(3)
        assert world.hour("replan") == 0
        world.check()
    states = {(body["node"], body["state"]) for body in Facts(world.storage).of("outcome")}
    assert ("node1", "lost") in states
    world.finish()


def test_an_hour_that_starts_four_tenths_of_a_second_early_is_the_hour_it_was_scheduled_for(
    tmp_path: Path,
) -> None:
    world = world_at(tmp_path)
    world.now = HOUR - timedelta(seconds=0.4)
    assert world.hour(scheduled=HOUR) == 0
    assert instants(world, "commit") == [text(HOUR)]
    world.check()
    world.finish()


DAYS = {  # around the night in which the clocks of Berlin change: local hours, occurrences at 02:30
    "23 hours": (datetime(2027, 3, 27, 23, tzinfo=UTC), 23),
    "25 hours": (datetime(2026, 10, 24, 22, tzinfo=UTC), 25),
}


@pytest.mark.parametrize("name", ["25 hours", pytest.param("23 hours", marks=pytest.mark.long)])
def test_a_local_day_of_another_length_has_each_hour_and_each_occurrence_once(
    tmp_path: Path, name: str
) -> None:
    begin, hours = DAYS[name]
    world = World(tmp_path, begin, cluster={"time_zone": "Europe/Berlin", "plan_every_minutes": 240})
    world.submit("nightly", minutes=5, schedule="30 2 * * *")
    world.asked.jobs.remove("nightly")
    for _ in range(0, hours + 4, 4):
        world.to_next_hour()
        assert world.hour() == 0
        world.check()
    planned = [datetime.fromisoformat(instant) for instant in instants(world, "commit")]
    assert {later - earlier for earlier, later in pairwise(planned)} == {timedelta(hours=4)}
    made = [body["job"] for body in Facts(world.storage).of("spec") if body["template"]]
    assert len(made) == len(set(made))
    local_days = {body["release"][:10] for body in Facts(world.storage).of("spec") if body["template"]}
    assert len(made) == len(local_days)
