"""Hours that follow one another, on real files and a real ledger: what is planned, kept, given back."""

import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tasks import ledger
from tasks.allocate import allocate
from tasks.cluster import Site
from tasks.collect import collect, ledger_directory
from tasks.commit import commit
from tasks.dispatch import dispatch
from tasks.facts import fact_key, write_fact, write_json
from tasks.hour import scheduled_hour
from tasks.inbox import request_cancel
from tasks.instants import text
from tasks.reconcile import lease_key
from tasks.serving import target
from tests.conftest import MakeStorage, make_site
from tests.tasks.planned_hours import CHAT, Runs, answer, ask, begin, end, plan_hour, states, submit

HOUR = datetime(2026, 12, 1, 6, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def renew_run(site: Site, rank: dict[str, Any], at: datetime) -> None:
    """Let the rank's runner be alive."""
    write_json(site.storage, lease_key(rank["job"], rank["attempt"], rank["rank"]), {"at": text(at)})


def test_an_hour_run_twice_plans_once_and_dispatches_once(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path), Runs()
    answer(site, HOUR)
    submit(site, "a")
    assert plan_hour(site, HOUR, runs).planned
    again = plan_hour(site, HOUR + MINUTE, runs)
    assert not again.planned
    assert list(runs.made) == ["a/1/0"]
    assert len(ask(site, "FROM plans")) == len(ask(site, "FROM dispatches")) == 1


def test_what_was_not_dispatched_is_repaired_by_the_next_run_of_the_hour(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    answer(site, HOUR)
    submit(site, "a")

    def refuses(rank: object) -> None:
        raise ConnectionError("the server is away")

    done = plan_hour(site, HOUR, refuses)  # type: ignore[arg-type]
    assert [(p.step, p.subject) for p in done.problems if p.step == "dispatch"] == [("dispatch", "a.1.0")]
    runs = Runs()
    answer(site, HOUR + MINUTE)
    plan_hour(site, HOUR + MINUTE, runs)
    assert list(runs.made) == ["a/1/0"]


def test_a_started_job_keeps_its_gpus_when_it_overruns_and_the_next_plan_knows(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path), Runs()
    answer(site, HOUR)
    submit(site, "long", gpus=4, duration="30m")
    plan_hour(site, HOUR, runs)
    rank = runs.made["long/1/0"]
    begin(site, rank, HOUR)
    submit(site, "other", gpus=4)
    later = HOUR + 60 * MINUTE
    answer(site, later)
    renew_run(site, rank, later)
    plan_hour(site, later, runs)
    held, given = ask(site, "SELECT node, gpus FROM allocations ORDER BY job")
    assert states(site) == {"long": "running", "other": "committed"}
    assert held["node"] != given["node"]


def test_an_hour_late_in_its_slot_leaves_alone_what_a_replan_committed_in_it(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, full_mode_seconds=0, slot_minutes=15), Runs()
    answer(site, HOUR - 60 * MINUTE)
    submit(site, "before")
    plan_hour(site, HOUR - 60 * MINUTE, runs)
    end(site, runs.made["before/1/0"], HOUR)
    submit(site, "wide", gpus=8, duration="30m")
    answer(site, HOUR + 3 * MINUTE)
    assert plan_hour(site, HOUR + 3 * MINUTE, runs, "replan").planned
    submit(site, "short", gpus=1, duration="15m")
    answer(site, HOUR + 4 * MINUTE)
    assert plan_hour(site, HOUR + 4 * MINUTE, runs).planned
    assert states(site)["wide"] == "committed"
    starts = {row["job"]: row["start_at"] for row in ask(site, "SELECT job, start_at FROM allocations")}
    assert starts["wide"] == HOUR + 3 * MINUTE
    assert starts["short"] >= HOUR + 33 * MINUTE  # the GPUs are promised, though the slot began before


def test_replans_within_a_slot_share_its_ramp(tmp_path: Path) -> None:
    chat = {**CHAT, "expected_gpus": 5, "ramp_per_hour": 12}  # 2 GPUs in a slot of 10 minutes
    site, runs = make_site(tmp_path, services=[chat], full_mode_seconds=0), Runs()
    counts = []
    for minute, job in ((0, "a"), (3, "b"), (6, "c"), (10, "d")):
        at = HOUR + minute * MINUTE
        answer(site, at)
        submit(site, job, priority=1)  # something that makes the plan out of date
        assert plan_hour(site, at, runs, "replan" if minute else "hourly").planned
        counts.append(sum(map(len, target(site.storage, "chat").gpus.values())))
    assert counts == [2, 2, 2, 4]


def test_a_job_without_a_place_is_told_who_has_it(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, full_mode_seconds=0, plan_slots=6), Runs()
    answer(site, HOUR)
    submit(site, "dear", gpus=8, priority=9, duration="1h")
    submit(site, "cheap", gpus=8, priority=1, duration="1h")
    plan_hour(site, HOUR, runs)
    (told,) = ask(site, "SELECT reason FROM planned_jobs WHERE job = 'cheap'")
    assert "goes to dear" in told["reason"]


def test_a_crashed_attempt_is_tried_again_on_its_own_gpus_while_they_are_committed(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path), Runs()
    answer(site, HOUR)
    submit(site, "a", gpus=2)
    plan_hour(site, HOUR, runs)
    begin(site, runs.made["a/1/0"], HOUR)
    end(site, runs.made["a/1/0"], HOUR + MINUTE, "crashed", exit_code=-9)
    submit(site, "tempted", gpus=4, priority=50)
    answer(site, HOUR + 2 * MINUTE)
    assert plan_hour(site, HOUR + 2 * MINUTE, runs, "replan").planned
    first, second = ask(site, "SELECT node, gpus FROM allocations WHERE job = 'a' ORDER BY attempt")
    assert first == second
    assert "a/2/0" in runs.made


def test_a_job_fails_after_as_many_attempts_as_its_spec_allows(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path), Runs()
    submit(site, "a", max_attempts=2)
    for attempt in (1, 2):
        at = HOUR + attempt * MINUTE
        answer(site, at)
        plan_hour(site, at, runs, "hourly" if attempt == 1 else "replan")
        begin(site, runs.made[f"a/{attempt}/0"], at)
        end(site, runs.made[f"a/{attempt}/0"], at, "failed", exit_code=1)
    answer(site, HOUR + 3 * MINUTE)
    plan_hour(site, HOUR + 3 * MINUTE, runs, "replan")
    assert states(site) == {"a": "failed"}
    assert len(runs.made) == 2


def test_a_wrong_spec_is_not_tried_again(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path), Runs()
    answer(site, HOUR)
    submit(site, "a")
    plan_hour(site, HOUR, runs)
    begin(site, runs.made["a/1/0"], HOUR)
    end(site, runs.made["a/1/0"], HOUR + MINUTE, "failed", exit_code=2)
    answer(site, HOUR + 2 * MINUTE)
    plan_hour(site, HOUR + 2 * MINUTE, runs, "replan")
    assert states(site) == {"a": "failed"}


def test_a_run_whose_node_is_gone_before_it_began_goes_back_to_the_queue(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path), Runs()
    answer(site, HOUR)
    submit(site, "a", gpus=4)
    plan_hour(site, HOUR, runs)
    gone = runs.made["a/1/0"]["node"]
    other = "node1" if gone == "node0" else "node0"
    later = HOUR + MINUTE
    answer(site, later, other)
    plan_hour(site, later, runs, "replan")
    assert {row["node"]: row["state"] for row in ask(site, "FROM nodes")} == {gone: "lost", other: "ready"}
    assert runs.made["a/2/0"]["node"] == other


def test_a_rank_whose_flow_run_died_before_it_began_is_planned_again(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path), Runs()
    answer(site, HOUR)
    submit(site, "a")
    plan_hour(site, HOUR, runs)
    runs.dead.add("a/1/0")
    for minute in (1, 2):
        answer(site, HOUR + minute * MINUTE)
        plan_hour(site, HOUR + minute * MINUTE, runs, "replan")
    assert "a/2/0" in runs.made
    assert ask(site, "SELECT failures FROM jobs") == [{"failures": 0}]


def test_a_cancelled_job_frees_its_gpus_and_is_not_run(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path), Runs()
    answer(site, HOUR)
    submit(site, "a", gpus=4)
    submit(site, "b", gpus=4)
    submit(site, "waits", gpus=4, priority=1)
    plan_hour(site, HOUR, runs)
    assert states(site)["waits"] == "queued"
    request_cancel(site.storage, "a", "somebody", HOUR)
    answer(site, HOUR + MINUTE)
    plan_hour(site, HOUR + MINUTE, runs, "replan")
    assert states(site) == {"a": "cancelled", "b": "committed", "waits": "committed"}


def test_a_gang_takes_whole_nodes_and_one_flow_run_on_each(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path), Runs()
    answer(site, HOUR)
    submit(site, "gang", gpus=8)
    plan_hour(site, HOUR, runs)
    assert {key: rank["node"] for key, rank in runs.made.items()} == {
        "gang/1/0": "node0",
        "gang/1/1": "node1",
    }


def test_a_bad_spec_is_rejected_with_its_line_and_the_others_go_on(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path), Runs()
    answer(site, HOUR)
    submit(site, "good")
    site.storage.write("inbox/bad.yaml", b"kind: training\ngpu: 2\n")
    plan_hour(site, HOUR, runs)
    assert states(site) == {"good": "committed"}
    assert site.storage.keys("inbox/") == []
    assert b"bad.yaml:2: gpu: unknown key; did you mean gpus?" in site.storage.read(
        "rejected/bad.yaml.error.txt"
    )


def test_observed_demand_above_the_target_gets_idle_gpus_between_hours(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, services=[CHAT]), Runs()
    file = site.file.parent / "demand.csv"
    file.write_text(f"ts,y\n{text(HOUR - timedelta(hours=1))},1\n")
    answer(site, HOUR)
    plan_hour(site, HOUR, runs)
    before = sum(map(len, target(site.storage, "chat").gpus.values()))
    later = HOUR + 20 * MINUTE
    file.write_text(file.read_text() + f"{text(HOUR)},5\n")
    answer(site, later)
    done = plan_hour(site, later, runs, "replan")
    assert done.planned
    assert sum(map(len, target(site.storage, "chat").gpus.values())) > before


def test_a_gpu_that_a_job_still_holds_is_left_out_of_a_service_target(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, services=[CHAT], full_mode_seconds=0), Runs()
    answer(site, HOUR)
    submit(site, "overruns", gpus=2)
    plan_hour(site, HOUR, runs)
    rank = runs.made["overruns/1/0"]
    begin(site, rank, HOUR)
    later = HOUR + 30 * MINUTE
    node, busy = rank["node"], rank["gpus"][0]
    given = {"from": text(later), "gpus": {node: [busy, 3]}}
    body = {"instant": text(later), "placements": [], "targets": {"chat": [given]}}
    write_fact(site.storage, fact_key("commit", later, text(later)), later, body)
    ledger.take_in(ledger_directory(site), site.storage, later.date())
    dispatch(site, runs, later)
    assert target(site.storage, "chat").gpus == {node: {3}}


def test_a_recurring_job_makes_each_occurrence_once(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, plan_slots=18), Runs()
    answer(site, HOUR)
    submit(site, "nightly", schedule="30 * * * *")
    plan_hour(site, HOUR, runs)
    answer(site, HOUR + 60 * MINUTE)
    plan_hour(site, HOUR + 60 * MINUTE, runs)
    made = sorted(states(site))
    assert made == [f"nightly@2026-12-01T{hour:02d}:30Z" for hour in (6, 7, 8, 9)]


def test_a_closed_slot_says_what_happened_beside_what_was_planned(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path), Runs()
    answer(site, HOUR)
    submit(site, "a", gpus=4)
    plan_hour(site, HOUR, runs)
    rank = runs.made["a/1/0"]
    begin(site, rank, HOUR)
    end(site, rank, HOUR + 30 * MINUTE, started_at=text(HOUR), gpu_seconds=7200.0)
    answer(site, HOUR + 60 * MINUTE)
    plan_hour(site, HOUR + 60 * MINUTE, runs)
    (slot,) = ask(site, "FROM slots")
    assert slot["completed"] == 1 and slot["value"] == pytest.approx(20)
    assert slot["busy_gpu_s"] == pytest.approx(4 * 1800)
    assert slot["utilization"] == pytest.approx(4 * 1800 / (8 * 3600))
    assert slot["fifo_value"] == pytest.approx(20)


def test_hours_that_nobody_planned_are_recorded_by_the_next_one(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, full_mode_seconds=0), Runs()
    for hour in (HOUR, HOUR + 180 * MINUTE, HOUR + 240 * MINUTE):
        answer(site, hour)
        plan_hour(site, hour, runs)
    missed = ask(site, "SELECT instant, reason FROM missed_slots ORDER BY instant")
    assert missed == [
        {"instant": HOUR + 60 * MINUTE, "reason": "no planner ran"},
        {"instant": HOUR + 120 * MINUTE, "reason": "no planner ran"},
    ]


def test_a_slot_is_closed_once_the_demand_in_it_is_known(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, services=[CHAT]), Runs()
    file = site.file.parent / "demand.csv"
    file.write_text(f"ts,y\n{text(HOUR - 60 * MINUTE)},2\n")
    site_hours = [HOUR + 60 * hour * MINUTE for hour in range(3)]
    for hour in site_hours[:2]:
        answer(site, hour)
        plan_hour(site, hour, runs)
    assert ask(site, "FROM slots") == []  # what came in the first hour is not known yet
    file.write_text(file.read_text() + f"{text(HOUR)},2\n{text(HOUR + 60 * MINUTE)},2\n")
    plan_hour(site, HOUR + 70 * MINUTE, runs, "replan")
    (slot,) = ask(site, "FROM slots")
    assert slot["instant"] == HOUR and slot["demand_gpu_s"] == pytest.approx(2 * 3600)


def test_a_slot_whose_demand_never_comes_is_closed_one_hour_later(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, services=[CHAT]), Runs()
    closed = []
    for hour in (HOUR, HOUR + 60 * MINUTE, HOUR + 120 * MINUTE):
        answer(site, hour)
        plan_hour(site, hour, runs)
        closed.append(len(ask(site, "FROM slots")))
    assert closed == [0, 0, 1]


def test_a_demand_sample_that_comes_late_is_not_lost(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, services=[CHAT]), Runs()
    file = site.file.parent / "demand.csv"
    early, late = HOUR - 300 * MINUTE, HOUR - 60 * MINUTE
    file.write_text(f"ts,y\n{text(late)},2\n")
    answer(site, HOUR)
    plan_hour(site, HOUR, runs)
    file.write_text(f"ts,y\n{text(early)},3\n{text(late)},2\n")
    plan_hour(site, HOUR + MINUTE, runs)
    assert ask(site, "SELECT ts, value FROM demand ORDER BY ts") == [
        {"ts": early, "value": 3.0},
        {"ts": late, "value": 2.0},
    ]


def test_a_commitment_whose_plan_was_not_written_gets_it_from_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, now = make_site(tmp_path, full_mode_seconds=0), HOUR
    answer(site, now)
    submit(site, "a")
    collect(site, now)
    planned = allocate(site, scheduled_hour(site, now, now), {}, [])
    with monkeypatch.context() as broken:
        broken.setattr("tasks.faults.point", lambda name: 1 / (name != "commit.committed"))
        with pytest.raises(ZeroDivisionError):
            commit(site, planned, now)
    assert commit(site, planned, now + MINUTE).ours
    ledger.take_in(ledger_directory(site), site.storage, now.date())
    assert len(ask(site, "FROM plans")) == len(ask(site, "FROM allocations")) == 1


def test_the_ledger_equals_its_facts_after_several_hours(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, services=[CHAT]), Runs()
    for hour in range(3):
        at = HOUR + 60 * hour * MINUTE
        answer(site, at)
        submit(site, f"job{hour}", gpus=2)
        plan_hour(site, at, runs)
    assert ledger.verify(ledger_directory(site), site.storage) == []
    before = ask(site, "FROM jobs ORDER BY job")
    ledger.rebuild(ledger_directory(site), site.storage)
    after = ask(site, "FROM jobs ORDER BY job")
    assert [{**row, "wait_s": 0} for row in before] == [{**row, "wait_s": 0} for row in after]


def test_hours_on_s3_are_as_hours_on_a_directory(tmp_path: Path, s3: MakeStorage) -> None:
    site, runs = make_site(tmp_path, storage=s3().root, services=[CHAT], full_mode_seconds=0), Runs()
    for hour in range(2):
        at = HOUR + 60 * hour * MINUTE
        answer(site, at)
        submit(site, f"job{hour}", gpus=2)
        plan_hour(site, at, runs)
    assert states(site) == {"job0": "committed", "job1": "committed"}
    assert set(runs.made) == {"job0/1/0", "job0/2/0", "job1/1/0"}  # job0 did not begin in its time
    assert target(site.storage, "chat").gpus
    assert ledger.verify(ledger_directory(site), site.storage) == []


def test_the_tables_of_a_closed_hour_lie_in_storage_as_parquet(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, full_mode_seconds=0), Runs()
    for at in (HOUR, HOUR + 60 * MINUTE):
        answer(site, at)
        submit(site, f"job{at.hour}")
        plan_hour(site, at, runs)
    specs = pyarrow.parquet.read_table(io.BytesIO(site.storage.read("snapshots/specs.parquet")))
    assert sorted(specs["job"].to_pylist()) == ["job6", "job7"]


def test_every_committed_plan_passes_the_independent_check(tmp_path: Path) -> None:
    from allocator.check import check
    from tasks.commit import read_plan

    site, runs = make_site(tmp_path, services=[CHAT], full_mode_seconds=0), Runs()
    for hour in range(3):
        at = HOUR + 60 * hour * MINUTE
        answer(site, at)
        for size in (1, 2, 4):
            submit(site, f"job{hour}-{size}", gpus=size, duration=f"{20 * size}m")
        plan_hour(site, at, runs)
        problem, plan = read_plan(site.storage, at)
        assert check(problem, plan) == []
        assert json.loads(plan.to_json()) == plan.to_dict()
