"""What people type and what they are told. Plans are made here by the steps themselves, without a server."""

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import yaml

from flows.cli import main
from flows.cli_jobs import job_id
from tasks import instants, ledger
from tasks.allocate import allocate
from tasks.cluster import Site, load_site
from tasks.collect import collect, ledger_directory
from tasks.commit import commit
from tasks.expect import expect
from tasks.facts import fact_key, write_fact
from tasks.hour import Degradation, present_hour, record_degraded
from tasks.inbox import take_specs
from tasks.jobs import read_job
from tasks.nodes import renew_lease
from tasks.record import record

Ask = Callable[..., str]
SPEC = {"kind": "training", "gpus": 1, "priority": 3, "duration": "10m", "command": ["python3", "-c", "pass"]}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A cluster of two GPUs, half a day planned ahead in slots of ten minutes."""
    file = tmp_path / "cluster.yaml"
    cluster = {
        "name": "small",
        "time_zone": "Asia/Kolkata",
        "plan_slots": 12,
        "full_mode_seconds": 0,
        "nodes": [{"name": "node0", "gpus": 2}],
    }
    file.write_text(yaml.safe_dump(cluster))
    monkeypatch.setenv("SLOTWISE_CLUSTER", str(file))
    for name in ("PREFECT_API_URL", "PREFECT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return load_site(file)


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs a command that must succeed; what it printed."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        code = main(arguments)
        said = capsys.readouterr()
        assert (code, said.err) == (0, "")
        return said.out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs a command that must be refused as a mistake; the line it is told."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        code = main(arguments)
        said = capsys.readouterr()
        assert (code, said.out) == (2, "")
        assert said.err.endswith("\n")
        assert "Traceback" not in said.err
        return said.err.rstrip("\n")

    return run


@pytest.mark.parametrize("content", [b"no database", None])
def test_a_copy_that_cannot_be_opened_is_one_line(site: Site, refused: Ask, content: bytes | None) -> None:
    ledger.take_in(ledger_directory(site), site.storage)
    ledger.publish(ledger_directory(site))
    file = ledger.published_file(ledger_directory(site))
    if content is None:  # someone works on it in another process
        code = (
            f"import duckdb, sys; held = duckdb.connect({str(file)!r}); print(flush=True); sys.stdin.read()"
        )
        holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert holder.stdout is not None and holder.stdout.readline()
    else:
        file.write_bytes(content)
    try:
        said = refused("jobs")
    finally:
        if content is None:
            holder.communicate()
    assert "outcomes.duckdb: cannot be opened" in said and "slotwise ledger rebuild" in said
    assert "\n" not in said


def spec(directory: Path, name: str, **changes: Any) -> str:
    """A spec file; its path."""
    file = directory / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"id": name, **SPEC, **changes}))
    return str(file)


def plan(site: Site) -> datetime:
    """Do what the hourly flow does, up to the commitment; the plan's instant."""
    now = instants.now()
    for node in site.cluster.nodes:
        renew_lease(site.storage, node.name, now)
    hour = present_hour(site, now, "hourly")
    collected = collect(site, now)
    forecasts, _ = expect(site, hour)
    lost = [name for name, node in collected.nodes.items() if node.state != "ready"]
    commit(site, allocate(site, hour, forecasts, lost), now)
    publish(site)
    return hour.instant


def publish(site: Site) -> None:
    ledger.take_in(ledger_directory(site), site.storage)
    record(site, instants.now())


def end_of_run(site: Site, job: str, state: str, error: str | None = None) -> None:
    """Leave the facts of a run of the job's first attempt that began and ended."""
    with ledger.open_ledger(ledger_directory(site)) as connection:
        rank = ledger.rows(connection, "FROM ranks WHERE job = ?", [job])[0]
    now = instants.now()
    claim = {
        "job": job,
        "attempt": 1,
        "rank": 0,
        "node": rank["node"],
        "void": False,
        "reason": None,
        "pid": 1,
    }
    write_fact(site.storage, fact_key("started", rank["instant"], job, 1, 0), now, claim)
    common = {"job": job, "attempt": 1, "rank": 0, "node": rank["node"], "metrics": {}}
    times = {"started_at": instants.text(now), "ended_at": instants.text(now)}
    how = {"state": state, "error": error, "exit_code": 0 if state == "completed" else 1}
    outcome = {**common, **times, **how, "gpu_seconds": 1.0, "cost": 0.0}
    write_fact(site.storage, fact_key("outcome", rank["instant"], job, 1, 0), now, outcome)
    publish(site)


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from flows.cli import main; main(['--help']); "
        "print('LOADED', *sorted({m.split('.')[0] for m in sys.modules} & set(sys.argv[1:])))"
    )
    heavy = ["prefect", "torch", "duckdb", "pydantic", "yaml", "boto3", "ortools", "numpy", "pyarrow"]
    command = [sys.executable, "-c", code, *heavy]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.endswith("LOADED\n")
    for name in ("submit", "cancel", "jobs", "plan", "why", "sql", "status", "up", "down", "worker", "hour"):
        assert f" {name} " in said
    assert " ledger " in said


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["sql"], "Missing argument 'query'; see slotwise --help"),
        (["jbos"], "No such command 'jbos'. Did you mean 'jobs'?; see slotwise --help"),
        (["jobs", "--limit", "0"], "Invalid value for '--limit'"),
        (["jobs", "--cluster", "none.yaml"], "none.yaml: cannot be read: No such file or directory"),
        (["submit", "none.yaml"], "none.yaml: cannot be read: No such file or directory"),
        (["plan", "--at", "noon"], "--at: 'noon': expected an instant such as 2026-12-01T06:00Z"),
        (["plan"], "not there yet; it comes with the first plan"),
        (["sql", "FROM jobs"], "not there yet; it comes with the first plan"),
        (["why", "nobody"], "there is no job nobody"),
        (["cancel", "nobody"], "there is no job nobody"),
        (["hour"], "no server runs for "),
        (["worker", "node0"], "no server runs for "),
        (["worker", "node9"], "there is no node 'node9'; expected one of "),
        (["jobs", "--state", "stuck"], "--state: 'stuck': expected one of inbox, invalid, queued, "),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    site: Site, refused: Ask, arguments: list[str], line: str
) -> None:
    said = refused(*arguments)
    assert line in said
    assert "\n" not in said


def test_without_a_cluster_file_the_line_says_how_to_name_one(
    refused: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLOTWISE_CLUSTER", raising=False)
    monkeypatch.chdir(tmp_path)
    assert refused("jobs") == (
        "there is no cluster.yaml here; name the cluster file with --cluster or SLOTWISE_CLUSTER"
    )


def test_a_mistake_in_the_cluster_file_is_shown_as_its_line(refused: Ask, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("name: x\nnodes: [{name: node0, gpus: 1}]\nslot_minuts: 10\n")
    assert refused("jobs", "--cluster", str(file)) == (
        f"{file}:3: slot_minuts: unknown key; did you mean slot_minutes?"
    )


def test_submitting_leaves_the_file_as_it_is_in_the_inbox_and_prints_its_id(
    site: Site, ask: Ask, tmp_path: Path
) -> None:
    file = spec(tmp_path, "first")
    assert ask("submit", file) == "first\n"
    (key,) = site.storage.keys("inbox/")
    assert key.startswith("inbox/first-")
    assert site.storage.read(key) == Path(file).read_bytes()


def test_a_spec_without_an_id_gets_the_one_that_the_inbox_gives_it(
    site: Site, ask: Ask, tmp_path: Path
) -> None:
    file = tmp_path / "anonymous.yaml"
    file.write_text(yaml.safe_dump(SPEC))
    told = ask("submit", str(file)).strip()
    assert take_specs(site, {}, instants.now()).jobs == (told,)


def test_the_same_spec_without_an_id_can_be_submitted_twice(site: Site, ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "anonymous.yaml"
    file.write_text(yaml.safe_dump(SPEC))
    assert ask("submit", str(file)) != ask("submit", str(file))
    assert len(take_specs(site, {}, instants.now()).jobs) == 2


def test_of_several_specs_all_are_submitted_or_none(
    site: Site, refused: Ask, ask: Ask, tmp_path: Path
) -> None:
    good, bad, wide = spec(tmp_path, "good"), spec(tmp_path, "bad", gpuss=1), spec(tmp_path, "wide", gpus=3)
    lines = refused("submit", good, bad, wide).split("\n")
    line = Path(bad).read_text().split("\n").index("gpuss: 1") + 1
    assert lines[0] == f"{bad}:{line}: gpuss: unknown key; did you mean gpus?"
    assert lines[2] == "nothing was submitted"
    assert lines[1].startswith(f"{wide}") and "3 does not fit any node" in lines[1]
    assert site.storage.keys("inbox/") == []
    assert ask("submit", good, spec(tmp_path, "also")) == "good\nalso\n"


def test_an_id_that_is_taken_is_refused_before_it_is_submitted(
    site: Site, refused: Ask, ask: Ask, tmp_path: Path
) -> None:
    file = spec(tmp_path, "once")
    assert "id: once is taken by another job" in refused("submit", file, file)
    ask("submit", file)
    assert "id: once is taken by another job" in refused("submit", file)
    plan(site)
    assert "id: once is taken by another job" in refused("submit", file)


def test_a_spec_is_read_from_standard_input(site: Site, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flows.cli", "submit", "-", "--json", "--cluster", str(site.file)]
    content = yaml.safe_dump({"id": "piped", **SPEC})
    answer = subprocess.run(command, input=content, capture_output=True, text=True, check=True).stdout
    (submitted,) = json.loads(answer)
    assert submitted["job"] == "piped"
    assert site.storage.read(submitted["file"]).decode() == content


def test_jobs_in_the_inbox_are_listed_before_any_plan(site: Site, ask: Ask, tmp_path: Path) -> None:
    ask("submit", spec(tmp_path, "early"))
    site.storage.write("inbox/broken.yaml", b"kind: [")
    assert "early" in ask("jobs")
    rows = json.loads(ask("jobs", "--json"))
    assert {(row["job"], row["state"]) for row in rows} == {("early", "inbox"), (None, "invalid")}
    assert "broken.yaml" in next(row["error"] for row in rows if row["state"] == "invalid")


def test_jobs_are_listed_by_state_the_latest_first(site: Site, ask: Ask, tmp_path: Path) -> None:
    ask("submit", spec(tmp_path, "small"), spec(tmp_path, "long", gpus=2, duration="1d"))
    plan(site)
    ask("submit", spec(tmp_path, "late"))
    rows = json.loads(ask("jobs", "--json"))
    assert rows[0]["job"] == "late"
    states = {row["job"]: row["state"] for row in rows}
    assert states == {"late": "inbox", "small": states["small"], "long": states["long"]}
    assert {states["small"], states["long"]} <= {"committed", "queued"}
    assert [row["job"] for row in json.loads(ask("jobs", "--json", "--state", "inbox"))] == ["late"]
    assert ask("jobs", "--limit", "1").endswith("and 2 more; see --limit\n")


def test_a_cancelled_job_is_cancelled_by_the_next_plan_and_not_twice(
    site: Site, ask: Ask, refused: Ask, tmp_path: Path
) -> None:
    ask("submit", spec(tmp_path, "unwanted"))
    assert ask("cancel", "unwanted") == "unwanted will be cancelled\n"
    assert ask("cancel", "unwanted") == "unwanted: a request to cancel it is there already\n"
    plan(site)
    assert json.loads(ask("jobs", "--json"))[0]["state"] == "cancelled"
    assert refused("cancel", "unwanted") == "unwanted is cancelled already"
    assert refused("cancel", "unwated") == "there is no job unwated; did you mean unwanted?"


def test_a_recurring_job_can_be_cancelled_and_explained(site: Site, ask: Ask, tmp_path: Path) -> None:
    ask("submit", spec(tmp_path, "nightly", schedule="*/30 * * * *"))
    collect(site, instants.now())  # takes the template in; its occurrences are made from the next time on
    plan(site)
    said = json.loads(ask("why", "nightly", "--json"))
    assert said["state"] == "recurring"
    assert len(said["events"]) >= 3
    assert said["events"][0]["what"].startswith("nightly@")
    assert ask("cancel", "nightly") == "nightly will be cancelled\n"


def test_why_says_that_a_job_lies_in_the_inbox(site: Site, ask: Ask, tmp_path: Path) -> None:
    ask("submit", spec(tmp_path, "fresh"))
    assert "it lies in the inbox as fresh-" in ask("why", "fresh")


def test_why_says_where_a_committed_job_starts_in_the_clusters_time_zone(
    site: Site, ask: Ask, tmp_path: Path
) -> None:
    ask("submit", spec(tmp_path, "ready", gpus=2))
    instant = plan(site)
    here = instant + timedelta(hours=5, minutes=30)
    said = ask("why", "ready")
    assert said.startswith("ready: committed\n")
    assert f"it starts at {here:%Y-%m-%d %H:%M}" in said
    assert "on node0 GPUs 0, 1" in said


def test_why_says_what_keeps_a_queued_job_out(site: Site, ask: Ask, tmp_path: Path) -> None:
    ask(
        "submit", spec(tmp_path, "first", gpus=2, duration="1d", priority=9), spec(tmp_path, "second", gpus=2)
    )
    plan(site)
    with ledger.open_ledger(ledger_directory(site)) as connection:
        (row,) = ledger.rows(connection, "FROM planned_jobs WHERE start_at IS NULL")
    said = json.loads(ask("why", row["job"], "--json"))
    assert said["state"] == "queued"
    assert row["reason"] in said["reason"]


def test_why_tells_a_runs_end_and_what_it_earned(site: Site, ask: Ask, tmp_path: Path) -> None:
    ask("submit", spec(tmp_path, "done"))
    plan(site)
    end_of_run(site, "done", "completed")
    said = json.loads(ask("why", "done", "--json"))
    assert said["state"] == "completed"
    assert "and earned 0.5" in said["reason"]
    what = [event["what"] for event in said["events"]]
    assert what[0].startswith("taken in from done-")
    assert what[-1] == "attempt 1 on node0: completed"


def test_a_job_that_ended_is_listed_with_when_it_did(site: Site, ask: Ask, tmp_path: Path) -> None:
    ask("submit", spec(tmp_path, "done"))
    plan(site)
    end_of_run(site, "done", "completed")
    (row,) = json.loads(ask("jobs", "--json"))
    shown = " ".join(ask("jobs").split())
    zone = ZoneInfo(site.cluster.time_zone)
    ended, planned = (
        f"{datetime.fromisoformat(row[name]).astimezone(zone):%Y-%m-%d %H:%M:%S}"
        for name in ("ended_at", "end_at")
    )
    assert ended != planned
    assert ended in shown and planned not in shown


def test_why_tells_the_error_of_a_job_that_will_be_tried_again_and_of_one_that_will_not(
    site: Site, ask: Ask, tmp_path: Path
) -> None:
    ask("submit", spec(tmp_path, "again"), spec(tmp_path, "never", max_attempts=1))
    plan(site)
    for job in ("again", "never"):
        end_of_run(site, job, "failed", "exit code 1: out of luck")
    again, never = (json.loads(ask("why", job, "--json")) for job in ("again", "never"))
    assert (again["state"], never["state"]) == ("queued", "failed")
    assert "attempt 1 ended (exit code 1: out of luck)" in again["reason"]
    assert never["reason"] == "it failed 1 of 1 times; the last time: exit code 1: out of luck"


def test_why_shows_the_error_of_a_rejected_spec(site: Site, ask: Ask) -> None:
    site.storage.write("inbox/wrong.yaml", b"kind: training\n")
    plan(site)
    said = ask("why", "wrong.yaml")
    assert said.startswith("wrong.yaml: rejected\n")
    assert "wrong.yaml:1: gpus: missing" in said


def test_the_latest_plan_is_a_grid_with_its_starts(site: Site, ask: Ask, tmp_path: Path) -> None:
    ask("submit", spec(tmp_path, "shown", gpus=2))
    instant = plan(site)
    said = ask("plan")
    assert f"small, hourly plan of {instant + timedelta(hours=5, minutes=30):%Y-%m-%d %H:%M}" in said
    assert "node0 cpu" in said
    assert "shown" in said
    assert "[bold]" not in said
    as_json = json.loads(ask("plan", "--json"))
    assert instants.parse(as_json["instant"]) == instant
    assert [each["job"] for each in as_json["jobs"]] == ["shown"]
    assert as_json["plan"]["placements"][0]["gpus"] == [0, 1]


def test_the_plan_in_force_at_an_instant_can_be_asked_for(site: Site, ask: Ask, refused: Ask) -> None:
    instant = plan(site)
    later = json.loads(ask("plan", "--json", "--at", instants.text(instant + timedelta(minutes=1))))
    assert instants.parse(later["instant"]) == instant
    before = instants.text(instant - timedelta(seconds=1))
    assert refused("plan", "--at", before) == f"there is no plan from {before} or before"


def test_sql_answers_as_a_table_and_as_json(site: Site, ask: Ask, tmp_path: Path) -> None:
    ask("submit", spec(tmp_path, "asked"))
    plan(site)
    assert "asked" in ask("sql", "SELECT job FROM jobs")
    query = (
        "SELECT 1 AS n, 1 AS n, TIMESTAMPTZ '2026-12-01 06:00:00+00' AS t, 'nan'::FLOAT AS x, "
        "[1, 2] AS l, {'a': DATE '2026-12-01'} AS s, 1.5::DECIMAL(4, 2) AS d, INTERVAL 1 MINUTE AS i"
    )
    assert json.loads(ask("sql", "--json", query)) == [
        {
            "n": 1,
            "n_2": 1,
            "t": "2026-12-01T06:00:00Z",
            "x": None,
            "l": [1, 2],
            "s": {"a": "2026-12-01"},
            "d": 1.5,
            "i": 60.0,
        }
    ]
    assert "2026-12-01 11:30" in ask("sql", query)
    assert ask("sql", "FROM jobs WHERE false") == "(none)\n"


def test_sql_can_change_nothing_and_its_errors_are_one_line(site: Site, refused: Ask) -> None:
    plan(site)
    assert "read-only" in refused("sql", "CREATE TABLE mine (a INTEGER)")
    said = refused("sql", "SELECT\n  nothing_like_it\nFROM jobs")
    assert "nothing_like_it" in said
    assert "\n" not in said


def test_status_says_what_answers_and_what_waits(site: Site, ask: Ask, tmp_path: Path) -> None:
    ask("submit", spec(tmp_path, "waiting"))
    before = json.loads(ask("status", "--json"))
    assert before["server"]["answers"] is False
    assert before["last_plan"] is None
    assert before["inbox"] == 1
    assert before["nodes"][0]["state"] == "lost"
    instant = plan(site)
    problem = Degradation("forecast", "chat", "its source is gone; going on with what was known")
    record_degraded(site, present_hour(site, instant, "hourly"), [problem], instants.now())
    publish(site)
    after = json.loads(ask("status", "--json"))
    assert instants.parse(after["last_plan"]["instant"]) == instant
    assert after["nodes"][0]["state"] == "ready"
    assert after["jobs"] == {"committed": 1}
    assert after["trouble"] == ["forecast: chat: its source is gone; going on with what was known"]
    said = ask("status")
    assert "jobs: 1 committed" in said
    assert "trouble: forecast: chat: its source is gone" in said


def test_status_counts_the_gpus_of_services(tmp_path: Path, ask: Ask, site: Site) -> None:
    cluster = yaml.safe_load(site.file.read_text())
    service = {"name": "chat", "demand": {"file": "d.csv", "unit": "gpus"}, "expected_gpus": 1}
    cluster["services"] = [{**service, "ramp_per_hour": 6, "priority": 5}]
    site.file.write_text(yaml.safe_dump(cluster))
    target = {"service": "chat", "version": 3, "gpus": {"node0": [1]}, "leaving": {"node0": [0]}, "at": "x"}
    site.storage.write("serving/chat/target.json", json.dumps(target).encode())
    observed = {"version": 2, "gpus": {"node0": [0, 1]}, "at": "x"}
    site.storage.write("serving/chat/observed.json", json.dumps(observed).encode())
    (said,) = json.loads(ask("status", "--json"))["services"]
    assert said == {
        "service": "chat",
        "target": 1,
        "holds": 2,
        "to_leave": 1,
        "target_version": 3,
        "acted_on": 2,
    }


def test_the_ledger_is_made_again_from_the_facts_and_compared_with_them(
    site: Site, ask: Ask, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ask("submit", spec(tmp_path, "kept"))
    plan(site)
    assert ask("ledger", "verify") == "the ledger is what the facts say\n"
    (fact,) = (key for key in site.storage.keys("facts/") if "/spec/" in key)
    content = site.storage.read(fact)
    site.storage.delete(fact)
    assert main(["ledger", "verify", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["agrees"] is False
    assert any(line.startswith("specs: 1 rows are only in the ledger") for line in found["differences"])
    site.storage.write(fact, content)
    assert ask("ledger", "rebuild").startswith("the ledger was made again from ")
    assert ask("ledger", "verify") == "the ledger is what the facts say\n"


def test_down_where_nothing_runs_says_so(site: Site, ask: Ask) -> None:
    assert ask("down") == "nothing was running\n"
    assert json.loads(ask("down", "--json")) == {"stopped": []}


def test_a_reader_that_has_seen_enough_is_no_error(site: Site, tmp_path: Path) -> None:
    plan(site)
    query = "SELECT repeat('x', 1000) FROM range(2000)"
    command = [sys.executable, "-m", "flows.cli", "sql", query, "--cluster", str(site.file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""


def test_the_id_that_is_told_is_the_one_of_the_name_in_the_inbox(site: Site) -> None:
    content = yaml.safe_dump(SPEC).encode()
    job = read_job(content, "a.yaml", site)
    assert job_id(job, "a.yaml", content) != job_id(job, "b.yaml", content)
    assert job_id(job, "a.yaml", content).startswith("training-")
