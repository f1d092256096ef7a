"""Which hour is planned, and that one planner at a time plans it."""

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tasks.cluster import Site
from tasks.facts import read_json, write_fact
from tasks.hour import (
    Degradation,
    StaleHourError,
    planning,
    present_hour,
    record_degraded,
    record_missed,
    scheduled_hour,
    scheduled_plan_is_due,
)
from tests.conftest import make_site, wait_for

SIX = datetime(2026, 12, 1, 6, tzinfo=UTC)


def after(seconds: float) -> datetime:
    return SIX + timedelta(seconds=seconds)


# seconds of the schedule and of the clock after six -> minutes of the instant and of slot 0 after six
SCHEDULED = {
    "on time": (0, 0, 0, 0),
    "begins 0.4 s early": (0, -0.4, 0, 0),
    "is scheduled 0.4 s early": (-0.4, -0.4, 0, 0),
    "a little late": (0, 8, 0, 0),
    "late by most of a slot": (0, 599, 0, 0),
    "late by a slot": (0, 600, 0, 10),
    "late by more than two": (0, 1500, 0, 20),
    "at the very end": (0, 3599.9, 0, 50),
    "scheduled within the hour": (1234, 1240, 0, 20),
}


@pytest.mark.parametrize("case", SCHEDULED)
def test_a_scheduled_run_plans_the_hour_of_its_schedule(site: Site, case: str) -> None:
    scheduled, clock, instant, begin = SCHEDULED[case]
    hour = scheduled_hour(site, after(scheduled), after(clock))
    assert (hour.instant, hour.begin) == (after(60 * instant), after(60 * begin))
    assert hour.until == after(3600)
    assert hour.trigger == "hourly"
    assert hour.commit_key == "facts/2026-12-01/commit/2026-12-01T06:00:00Z.json"


@pytest.mark.parametrize("clock", [3600, 3601, 86_400])
def test_an_hour_that_is_over_is_stale(site: Site, clock: float) -> None:
    with pytest.raises(
        StaleHourError, match="slot 2026-12-01T06:00:00Z ended at 2026-12-01T07:00:00Z, it is"
    ):
        scheduled_hour(site, SIX, after(clock))


def test_plans_may_come_more_often_than_slots(tmp_path: Path) -> None:
    site = make_site(tmp_path, slot_minutes=60, plan_every_minutes=30)
    hour = scheduled_hour(site, after(1800), after(1805))
    assert (hour.instant, hour.begin, hour.until) == (after(1800), after(1800), after(3600))


def test_a_replan_begins_now_and_lasts_until_the_next_plan(site: Site) -> None:
    hour = present_hour(site, after(125.7), "replan")
    assert (hour.instant, hour.begin, hour.until) == (after(125), after(125), after(3600))
    assert hour.trigger == "replan"


def test_a_replan_never_takes_the_instant_of_a_scheduled_plan(site: Site) -> None:
    scheduled = scheduled_hour(site, SIX, after(0.2))
    assert present_hour(site, after(0.1), "replan").commit_key != scheduled.commit_key
    assert present_hour(site, after(0.1), "replan").until == scheduled.until


def test_a_replan_leaves_the_first_minutes_to_the_scheduled_plan(site: Site) -> None:
    assert [scheduled_plan_is_due(site, after(s)) for s in (-1, 0, 119, 120)] == [False, True, True, False]
    write_fact(site.storage, scheduled_hour(site, SIX, SIX).commit_key, SIX, {})
    assert not scheduled_plan_is_due(site, after(10))


def test_a_missed_slot_is_recorded_once(site: Site) -> None:
    record_missed(site, after(-0.4), "too late", after(4000))
    record_missed(site, SIX, "still too late", after(5000))
    (key,) = site.storage.keys("facts/")
    assert key == "facts/2026-12-01/missed/2026-12-01T06:00:00Z.json"
    assert read_json(site.storage, key)["reason"] == "too late"


def test_each_degradation_is_recorded_and_the_same_one_once(site: Site) -> None:
    hour = present_hour(site, SIX, "hourly")
    problems = [Degradation("collect", "chat", reason) for reason in ("gone", "gone", "slow \ud800")]
    record_degraded(site, hour, problems, SIX)
    record_degraded(site, hour, problems[:1], after(60))
    found = [read_json(site.storage, key) for key in site.storage.keys("facts/")]
    assert sorted(fact["reason"] for fact in found) == ["gone", "slow ?"]
    assert all(fact["instant"] == "2026-12-01T06:00:00Z" for fact in found)


PLANNER = """
import sys
from tasks.cluster import load_site
from tasks.hour import planning
with planning(load_site(sys.argv[1]), wait=sys.argv[2] == "wait") as alone:
    print("alone" if alone else "aside", flush=True)
    sys.stdin.read()
print("done", flush=True)
"""


def planner(site: Site, wait: str = "wait") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PLANNER, str(site.file), wait]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def waits_for_a_lock(process: subprocess.Popen[str]) -> bool:
    """Linux marks who waits for a lock with -> in its list."""
    waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
    return any(str(process.pid) in line for line in waiting)


def test_a_second_planner_waits_for_the_first(site: Site) -> None:
    first = planner(site)
    assert says(first) == "alone"
    second = planner(site)
    wait_for(lambda: waits_for_a_lock(second), "the second planner to wait")
    assert first.communicate("")[0] == "done\n"
    assert says(second) == "alone"
    assert second.communicate("")[0] == "done\n"


def test_a_planner_that_need_not_run_stands_aside(site: Site) -> None:
    with planning(site) as alone:
        assert alone
        other = planner(site, "no wait")
        assert says(other) == "aside"
        other.communicate("")
    with planning(site, wait=False) as alone:
        assert alone


def test_the_planners_lock_dies_with_it(site: Site) -> None:
    first = planner(site)
    assert says(first) == "alone"
    second = planner(site)
    wait_for(lambda: waits_for_a_lock(second), "the second planner to wait")
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert says(second) == "alone"
    second.communicate("")
