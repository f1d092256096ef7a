"""What the Prefect UI shows of an hour and of a run: the texts and tables, from real plans."""

from datetime import timedelta
from pathlib import Path

import pytest

from flows.artifacts import forecast_text, outcome_text, plan_text, unplaced_rows
from flows.run_job import artifact_key
from tasks.allocate import Planned, allocate
from tasks.cluster import Site
from tasks.collect import collect
from tasks.expect import expect
from tasks.hour import scheduled_hour
from tasks.instants import text
from tasks.record import record
from tests.conftest import make_site
from tests.tasks.planned_hours import CHAT, Runs, answer, ask, begin, end, plan_hour, submit
from tests.tasks.test_planned_hours import HOUR, MINUTE


def planned(site: Site) -> Planned:
    """The plan of the hour, with what was submitted so far."""
    answer(site, HOUR)
    collect(site, HOUR)
    hour = scheduled_hour(site, HOUR, HOUR)
    made, _ = expect(site, hour)
    return allocate(site, hour, made, [])


def test_a_plan_is_shown_with_its_grid_its_starts_and_the_baselines(tmp_path: Path) -> None:
    site = make_site(tmp_path, time_zone="Europe/Berlin", full_mode_seconds=0)
    submit(site, "nightly", gpus=4)
    shown = plan_text(site, planned(site))
    assert shown.startswith("# Plan of 2026-12-01 07:00 (hourly, fast)\n")
    assert "value **20**" in shown and "against fifo 20 (" in shown and "greedy 20 (" in shown
    assert "| nightly | 2026-12-01 07:00 | 2026-12-01 08:00 | 4 | node0 | True |" in shown
    grid = shown.split("```")[1]
    assert "node0" in grid and "committed" in grid


def test_jobs_left_out_are_shown_with_the_reason_and_their_earliest_start(tmp_path: Path) -> None:
    site = make_site(tmp_path, full_mode_seconds=0, plan_slots=6)
    submit(site, "first", gpus=4, priority=9, duration="2h")
    submit(site, "second", gpus=4, priority=9, duration="2h")
    submit(site, "left-out", gpus=3, priority=1, duration="40m")
    (row,) = unplaced_rows(site, planned(site))
    assert row["job"] == "left-out"
    assert "first" in row["reason"] or "second" in row["reason"]


def test_an_outcome_stands_beside_what_each_policy_had_in_that_slot(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, full_mode_seconds=0), Runs()
    answer(site, HOUR)
    submit(site, "a", gpus=4, duration="2h")
    plan_hour(site, HOUR, runs)
    begin(site, runs.made["a/1/0"], HOUR)
    end(site, runs.made["a/1/0"], HOUR + 50 * MINUTE, started_at=text(HOUR))
    answer(site, HOUR + 60 * MINUTE)
    collect(site, HOUR + 60 * MINUTE)
    (closed,) = record(site, HOUR + 60 * MINUTE)
    shown = outcome_text(site, closed)
    for policy in ("slotwise, planned", "fifo, same inputs", "backfill, same inputs", "greedy, same inputs"):
        assert f"| {policy} | 20 | 0.5 | 40 |" in shown
    assert "| what happened | 40 | 0.417 |  |" in shown  # sooner than was planned
    assert "1 jobs completed and earned 40, 0 attempts ended otherwise" in shown
    (slot,) = ask(site, "FROM hours")
    assert slot["planned_slot_value"] == pytest.approx(20)
    assert slot["worked_value"] == pytest.approx(40)


def test_a_forecast_is_shown_with_its_method_and_what_came_of_the_last(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, services=[CHAT], full_mode_seconds=0), Runs()
    answer(site, HOUR)
    plan_hour(site, HOUR, runs)
    site.file.parent.joinpath("demand.csv").write_text(f"ts,y\n{text(HOUR)},3\n")
    answer(site, HOUR + 60 * MINUTE)
    collect(site, HOUR + 60 * MINUTE)
    hour = scheduled_hour(site, HOUR + 60 * MINUTE, HOUR + 60 * MINUTE)
    made, _ = expect(site, hour)
    shown = forecast_text(site, hour, made)
    assert f"- chat: {made['chat'].method} ({made['chat'].reason})" in shown
    came = shown.split("what came")[1]
    assert f"| {HOUR:%Y-%m-%d %H:%M} | chat |" in came


def test_no_two_jobs_share_the_key_of_their_artifact() -> None:
    keys = {artifact_key(job) for job in ("a.b", "a-b", "A-B", "a_b", "nightly@2026-12-01T06:30Z")}
    assert len(keys) == 5
    assert artifact_key("a-b") == "run-a-b"
    assert all(key.replace("-", "").isalnum() and key == key.lower() for key in keys)


def test_a_plan_of_an_hour_that_began_late_counts_the_slots_that_are_left(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, full_mode_seconds=0), Runs()
    late = HOUR + timedelta(minutes=30)
    answer(site, late)
    submit(site, "a", gpus=8, duration="2h")
    plan_hour(site, late, runs)
    (plan,) = ask(site, "FROM plans")
    assert plan["slot_value"] == pytest.approx(80 / 4)  # half an hour of two
    assert plan["slot_utilization"] == plan["fifo_slot_utilization"] == 1
