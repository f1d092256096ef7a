"""The loop on recorded load: what it may know, what it may never do, and what it records."""

import itertools
import math
import random
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.replay import Order, Replayed, run_replays
from tasks.cluster import Site
from tasks.journal import ask
from tasks.policies import POLICIES
from tests.conftest import make_site

SERVICE: dict[str, Any] = {
    "name": "chat",
    "demand": {"file": "unused.csv", "unit": "gpus"},
    "expected_gpus": 2,
    "ramp_per_hour": 4,
    "priority": 3,
    "shortage_penalty": 8,
}
NODES, GPUS = ("node0", "node1"), 8
HOURS = 14
OUTAGE = ("node1", 180, 330)  # minutes
BUSY = ("fifo", "backfill", "greedy", "slotwise", "oracle")


@dataclass(frozen=True)
class Ran:
    """A finished set of replays, and what it was given."""

    done: Replayed
    ledger: Path
    jobs: list[tuple[str, int, int, int, int]]  # id, submit_s, gpus, duration_s, priority
    demand: list[float]


def small_site(folder: Path, **fields: Any) -> Site:
    """Two nodes of four GPUs, a service, slots of half an hour."""
    return make_site(folder, **{"slot_minutes": 30, "plan_slots": 12, "services": [SERVICE], **fields})


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return small_site(tmp_path)


def write_jobs(file: Path, rows: list[str], header: str = "job_id,submit_s,gpus,duration_s,priority") -> Path:
    file.write_text("\n".join([header, *rows]) + "\n")
    return file


def write_demand(file: Path, gpus: list[float]) -> Path:
    """An empty field for nan."""
    lines = [
        f"2026-12-{1 + hour // 24:02d}T{hour % 24:02d}:00Z,{'' if math.isnan(want) else want}"
        for hour, want in enumerate(gpus)
    ]
    file.write_text("\n".join(["ts,chat", *lines]) + "\n")
    return file


def run(site: Site, jobs: Path, demand: Path | None, policies: str, **fields: Any) -> tuple[Replayed, Path]:
    ledger = jobs.parent / "replay.duckdb"
    order = replace(Order(site, jobs, demand, tuple(policies.split(",")), processes=1), **fields)
    return run_replays(order, ledger), ledger


def busy_load() -> tuple[list[tuple[str, int, int, int, int]], list[float]]:
    """More work than the cluster holds, in whole minutes, and a load with a gap."""
    jobs = [
        (
            f"j{at:02d}",
            at * 480,
            (1, 1, 2, 4, 8)[at % 5],
            (600, 4980, 9000, 2400)[at % 4],
            (1, 5, 2, 8)[at % 4],
        )
        for at in range(100)
    ]
    demand = [1.5 + 2 * math.sin(hour / 12 * math.pi) ** 2 for hour in range(HOURS)]
    demand[9] = math.nan
    return jobs, demand


def run_busy(folder: Path, policies: str, **changes: Any) -> Ran:
    jobs, demand = busy_load()
    jobs, demand = changes.pop("jobs", jobs), changes.pop("demand", demand)
    jobs_file = write_jobs(folder / "jobs.csv", [",".join(map(str, job)) for job in jobs])
    down = folder / "down.csv"
    down.write_text(f"node,from_s,to_s\n{OUTAGE[0]},{60 * OUTAGE[1]},{60 * OUTAGE[2]}\n")
    fields = {"failures": str(down), "start_s": 0.0, "days": HOURS / 24, **changes}
    done, ledger = run(
        small_site(folder), jobs_file, write_demand(folder / "demand.csv", demand), policies, **fields
    )
    return Ran(done, ledger, jobs, demand)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Half a day under every policy, with a node that fails."""
    return run_busy(tmp_path_factory.mktemp("busy"), ",".join(BUSY))


def minute(ran: Ran, instant: datetime) -> int:
    begin = datetime.fromisoformat(ran.done.about["begin"])
    found = (instant - begin) / timedelta(minutes=1)
    assert found == int(found)
    return int(found)


def minutes_of(ran: Ran, policy: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What has each GPU in each minute, from the ledger's rows alone: jobs there, counted."""
    grid = np.zeros((GPUS, 60 * HOURS), dtype=np.int64)
    rows = ask(ran.ledger, f"FROM {policy}.ranks WHERE started_at IS NOT NULL")
    for row in rows:
        begin = minute(ran, row["started_at"])
        end = 60 * HOURS if row["ended_at"] is None else minute(ran, row["ended_at"])
        for gpu in row["gpus"]:
            grid[4 * NODES.index(row["node"]) + gpu, begin:end] += 1
    return grid


def serving_of(ran: Ran, policy: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """GPUs told to the service in each minute: of the latest commitment, the latest set that has begun."""
    grid = np.zeros((GPUS, 60 * HOURS), dtype=np.int64)
    rows = ask(ran.ledger, f"FROM {policy}.serving ORDER BY instant, from_at")
    for _, commitment in itertools.groupby(rows, lambda row: row["instant"]):
        for from_at, places in itertools.groupby(commitment, lambda row: row["from_at"]):
            grid[:, minute(ran, from_at) :] = 0
            for row in places:
                for gpu in row["gpus"]:
                    grid[4 * NODES.index(row["node"]) + gpu, minute(ran, from_at) :] = 1
    return grid


@pytest.mark.parametrize("policy", BUSY)
def test_no_gpu_is_ever_used_twice_nor_while_its_node_is_gone(busy: Ran, policy: str) -> None:
    jobs = minutes_of(busy, policy)
    assert jobs.max() == 1
    gone = slice(OUTAGE[1], OUTAGE[2])
    assert jobs[4:, gone].sum() == 0 < jobs[:4, gone].sum()


@pytest.mark.parametrize("policy", BUSY)
def test_the_sums_are_those_of_a_count_minute_by_minute(busy: Ran, policy: str) -> None:
    jobs = minutes_of(busy, policy)
    lost = np.zeros_like(jobs, dtype=bool)
    lost[4:, OUTAGE[1] : OUTAGE[2]] = True
    held = ((serving_of(busy, policy) == 1) & (jobs == 0) & ~lost).sum(axis=0)
    wanted = np.repeat(np.nan_to_num(busy.demand), 60)
    served = np.minimum(held, wanted)
    account = busy.done.accounts[policy]
    assert account["utilization"] == pytest.approx((jobs.sum() + served.sum()) / jobs.size)
    assert account["batch_utilization"] == pytest.approx(jobs.sum() / jobs.size)
    assert account["demand_gpu_slots"] == pytest.approx(wanted.sum() / 30)
    assert account["shortage_gpu_slots"] == pytest.approx((wanted - served).sum() / 30)
    lacked_h = (wanted - served).sum() / 60
    assert account["value"] - account["net_value"] == pytest.approx(
        lacked_h * SERVICE["priority"] * SERVICE["shortage_penalty"]
    )
    short = (wanted > held + 1e-6).reshape(-1, 30).any(axis=1).sum()
    assert account["short_share"] == pytest.approx(short / (2 * (HOURS - 1)))


@pytest.mark.parametrize("policy", BUSY)
def test_value_is_that_of_the_jobs_that_completed(busy: Ran, policy: str) -> None:
    ended = {
        row["job"] for row in ask(busy.ledger, f"SELECT job FROM {policy}.outcomes WHERE state = 'completed'")
    }
    worth = [(job, priority * gpus * s / 3600) for job, _, gpus, s, priority in busy.jobs]
    account = busy.done.accounts[policy]
    assert account["completed"] == len(ended) > 10
    assert account["value"] == pytest.approx(sum(value for job, value in worth if job in ended))
    offered = sum(value for (_, value), job in zip(worth, busy.jobs, strict=True) if job[1] < 3600 * HOURS)
    assert account["offered_value"] == pytest.approx(offered)


@pytest.mark.parametrize("policy", BUSY)
def test_each_job_runs_after_its_submission_for_as_long_as_it_truly_takes(busy: Ran, policy: str) -> None:
    rows = ask(busy.ledger, "FROM replayed_jobs WHERE policy = ?", [policy])
    assert sorted(row["job"] for row in rows) == [job for job, *_ in busy.jobs]
    runs = [row for row in rows if row["state"] == "completed"]
    for row in runs:
        assert row["started_at"] >= row["submitted_at"]
        assert (row["ended_at"] - row["started_at"]).total_seconds() == row["duration_s"]
    waits = [
        (row["started_at"] - row["submitted_at"]).total_seconds()
        if row["started_at"]
        else 3600 * HOURS - 60 * minute(busy, row["submitted_at"])
        for row in rows
    ]
    assert busy.done.accounts[policy]["mean_wait_s"] == pytest.approx(sum(waits) / len(waits))


@pytest.mark.parametrize("policy", BUSY)
def test_the_views_of_the_live_ledger_answer_for_each_policy(busy: Ran, policy: str) -> None:
    account = busy.done.accounts[policy]
    states = ask(busy.ledger, f"SELECT count(*) AS jobs FROM {policy}.jobs WHERE state = 'completed'")
    assert states[0]["jobs"] == account["completed"]
    hours = ask(busy.ledger, f"SELECT sum(value) AS value, count(*) AS hours FROM {policy}.slots")[0]
    assert hours == {"value": pytest.approx(account["value"]), "hours": HOURS}
    assert ask(busy.ledger, f"SELECT count(*) AS rows FROM {policy}.forecast_errors")[0]["rows"] > 50


def test_a_seed_gives_the_same_course(busy: Ran, tmp_path: Path) -> None:
    again = run_busy(tmp_path, "greedy,slotwise")
    for table in ("replayed_jobs", "replayed_hours"):
        query = f"FROM {table} WHERE policy IN ('greedy', 'slotwise') ORDER BY ALL"
        assert ask(again.ledger, query) == ask(busy.ledger, query)


def test_what_comes_later_changes_nothing_that_was_done_before(busy: Ran, tmp_path: Path) -> None:
    until = 300  # minutes
    first = {
        row["job"]: minute(busy, row["ended_at"])
        for row in ask(busy.ledger, "SELECT job, ended_at FROM slotwise.ranks WHERE ended_at IS NOT NULL")
    }
    longer = [
        (job, submit_s, gpus, seconds if first.get(job, until) < until else seconds + 7200, priority)
        for job, submit_s, gpus, seconds, priority in busy.jobs
        if submit_s < 60 * until
    ]
    demand = busy.demand[: until // 60] + [0.5] * (HOURS - until // 60)
    other = run_busy(tmp_path, "slotwise", jobs=longer, demand=demand)
    assert (minutes_of(other, "slotwise")[:, :until] == minutes_of(busy, "slotwise")[:, :until]).all()
    assert (serving_of(other, "slotwise")[:, :until] == serving_of(busy, "slotwise")[:, :until]).all()
    assert (minutes_of(other, "slotwise") != minutes_of(busy, "slotwise")).any()


def test_a_job_on_a_node_that_fails_begins_again_elsewhere(tmp_path: Path) -> None:
    site = small_site(tmp_path, services=[])
    jobs = write_jobs(tmp_path / "jobs.csv", ["a,0,4,7200,5"])
    down = tmp_path / "down.csv"
    down.write_text("node,from_s,to_s\nnode0,1800,36000\nnode1,900,1000\nnode0,2000,3000\n")
    done, ledger = run(site, jobs, None, "slotwise", failures=str(down), days=0.5)
    assert (done.accounts["slotwise"]["completed"], done.accounts["slotwise"]["lost_attempts"]) == (1, 1)
    outcomes = ask(ledger, "SELECT state, node FROM slotwise.outcomes ORDER BY ended_at")
    assert [row["state"] for row in outcomes] == ["lost", "completed"]
    nodes = ask(ledger, "SELECT node, state FROM slotwise.node_states ORDER BY recorded_at")
    assert [(row["node"], row["state"]) for row in nodes if row["node"] == "node0"] == [
        ("node0", "lost"),
        ("node0", "ready"),
    ]


def test_every_policy_fills_gpus_as_soon_as_a_run_ends(tmp_path: Path) -> None:
    site = small_site(tmp_path, services=[], slot_minutes=60, full_mode_seconds=0.1)
    jobs = write_jobs(tmp_path / "jobs.csv", ["a,0,8,600,1", "b,60,8,1200,1", "c,120,8,60,1"])
    done, ledger = run(site, jobs, None, ",".join(POLICIES), days=0.25)
    assert {account["completed"] for account in done.accounts.values()} == {3}
    idle = ask(
        ledger,
        """SELECT policy, max(epoch(started_at - free)) AS idle FROM (
            SELECT policy, started_at,
                lag(ended_at, 1, started_at) OVER (PARTITION BY policy ORDER BY started_at) AS free
            FROM replayed_jobs) GROUP BY ALL""",
    )
    assert {row["policy"] for row in idle if row["idle"] <= 60} == set(POLICIES)


def test_a_service_that_wants_more_than_there_is_lacks_the_rest(site: Site, tmp_path: Path) -> None:
    jobs = write_jobs(tmp_path / "jobs.csv", ["a,0,1,60,1"])
    demand = write_demand(tmp_path / "demand.csv", [10.0] * 12)
    done, _ = run(site, jobs, demand, "slotwise,oracle")
    for account in done.accounts.values():
        assert account["demand_gpu_slots"] == pytest.approx(240)
        assert account["shortage_gpu_slots"] >= 48 - 1e-6
        assert account["short_share"] == 1.0


def test_undeclared_jobs_are_expected_to_last_as_long_as_their_tenants_did_and_do_so_far(
    tmp_path: Path,
) -> None:
    site = small_site(tmp_path, services=[])
    rows = [
        f"{name}{at},{at},1,{seconds},1,{name}"
        for name, seconds in (("quick", 60), ("long", 9000))
        for at in range(3)
    ]
    rows += ["runs,0,1,86400,1,other"]
    rows += [f"new-{name},{3600 * 4},1,60,1,{name}" for name in ("quick", "long", "other")]
    jobs = write_jobs(tmp_path / "jobs.csv", rows, "job_id,submit_s,gpus,duration_s,priority,tenant")
    _, ledger = run(site, jobs, None, "slotwise", days=0.25)
    found = ask(ledger, "SELECT job, estimate_s FROM replayed_jobs WHERE job LIKE 'new-%'")
    expected = {row["job"]: row["estimate_s"] for row in found}
    assert expected["new-quick"] < 3600 < expected["new-long"]
    assert expected["new-other"] > 2 * 3600  # one run that has lasted for four hours, and no end


def test_a_job_that_fits_nowhere_is_rejected_and_the_others_go_on(tmp_path: Path) -> None:
    site = small_site(tmp_path, services=[])
    jobs = write_jobs(tmp_path / "jobs.csv", ["wide,0,6,60,1", "wider,0,900,60,1", "good,0,8,60,1"])
    done, ledger = run(site, jobs, None, "slotwise")
    assert (done.accounts["slotwise"]["rejected"], done.accounts["slotwise"]["completed"]) == (2, 1)
    assert "use at most 4" in ask(ledger, "SELECT error FROM slotwise.rejections")[0]["error"]


def test_a_deadline_that_passes_is_an_end_without_value(tmp_path: Path) -> None:
    site = small_site(tmp_path, services=[])
    rows = ["late,0,8,60,1,-5,", "long,0,8,7200,5,,", "soon,60,8,600,1,3600,600", "easy,60,8,60,1,20000,60"]
    header = "job_id,submit_s,gpus,duration_s,priority,deadline_s,estimate_s"
    jobs = write_jobs(tmp_path / "jobs.csv", rows, header)
    _, ledger = run(site, jobs, None, "fifo", days=0.5)
    rows_by = {row["job"]: row for row in ask(ledger, "FROM replayed_jobs")}
    assert {job: row["state"] for job, row in rows_by.items()} == {
        "late": "expired",
        "long": "completed",
        "soon": "expired",
        "easy": "completed",
    }
    assert rows_by["soon"]["earned"] == 0.0 < rows_by["easy"]["earned"]


def test_jobs_from_parquet_in_any_order_replay_as_those_from_csv(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    site = small_site(tmp_path, services=[])
    rows = [(f"j{at}", at * 300, 1 + at % 4, 900 + at) for at in range(20)]
    random.Random(0).shuffle(rows)
    text = [",".join(map(str, row)) for row in sorted(rows, key=lambda row: row[1])]
    csv = write_jobs(tmp_path / "jobs.csv", text, "job_id,submit_s,gpus,duration_s")
    columns = dict(zip(("job_id", "submit_s", "gpus", "duration_s"), zip(*rows, strict=True), strict=True))
    parquet = tmp_path / "jobs.parquet"
    pq.write_table(pa.table({**columns, "priority": [math.nan] * 20, "extra": ["x"] * 20}), parquet)
    first, second = (
        run(site, file, None, "greedy", days=0.5)[0].accounts["greedy"] for file in (csv, parquet)
    )
    assert first["completed"] == 20
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_a_window_takes_the_jobs_and_the_demand_of_its_time(site: Site, tmp_path: Path) -> None:
    jobs = write_jobs(tmp_path / "jobs.csv", ["a,3600,1,60,1", "b,7200,1,60,1", "c,10800,1,60,1"])
    demand = write_demand(tmp_path / "demand.csv", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    done, _ = run(site, jobs, demand, "oracle", start_s=7200.0, days=1 / 24)
    assert (done.about["jobs"], done.about["jobs_outside_window"]) == (1, 2)
    assert done.about["begin"] == "2026-12-01T02:00:00Z"
    assert done.accounts["oracle"]["demand_gpu_slots"] == pytest.approx(2 * 3.0)
    late, _ = run(
        site, jobs, demand, "oracle", start_s=7200.0, days=0.25
    )  # six hours: the demand begins with them
    assert late.about["begin"] == "2026-12-01T00:00:00Z"
    assert late.accounts["oracle"]["demand_gpu_slots"] == pytest.approx(2 * 21.0)
