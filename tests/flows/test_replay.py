"""What a person types to replay recorded load, what is left, and what is said when it cannot be done."""

import csv
import json
import os
import signal
import subprocess
import sys
import uuid
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

from flows.cases import CASES, prepare
from flows.cli import main
from flows.processes import MARK, marked
from flows.replay import FIGURES
from flows.server import ROOT
from tasks.cluster import load_site
from tests.conftest import wait_for

SERVICE = {
    "name": "chat",
    "demand": {"file": "unused.csv", "unit": "gpus"},
    "expected_gpus": 1,
    "ramp_per_hour": 4,
    "priority": 3,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small cluster, jobs and demand."""
    cluster = {
        "name": "small",
        "slot_minutes": 60,
        "plan_slots": 6,
        "full_mode_seconds": 0.1,
        "nodes": [{"name": "node0", "gpus": 4}],
        "services": [SERVICE],
    }
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    jobs = [f"job{at},{at * 600},{1 + at % 3},1200,{1 + at % 5}" for at in range(20)]
    (tmp_path / "jobs.csv").write_text(
        "\n".join(["job_id,submit_s,gpus,duration_s,priority", "huge,0,64,60,1", *jobs]) + "\n"
    )
    demand = [f"2026-12-01T{hour:02d}:00Z,1" for hour in range(6)]
    (tmp_path / "demand.csv").write_text("\n".join(["ts,chat", *demand]) + "\n")
    return tmp_path


def command(folder: Path, **options: str) -> list[str]:
    given = {
        "cluster": str(folder / "cluster.yaml"),
        "jobs": str(folder / "jobs.csv"),
        "demand": str(folder / "demand.csv"),
        "json": str(folder / "out.json"),
        "policies": "greedy",
        **options,
    }
    return ["replay", *(word for name, value in given.items() for word in (f"--{name}", value))]


def test_figures_tables_picture_and_ledger_are_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder)) == 0
    said = capsys.readouterr()
    assert said.err == ""
    for words in ("greedy", "Mean hours of waiting by priority", "1 jobs fit no node", "hours ahead"):
        assert words in said.out
    figures = json.loads((folder / "out.json").read_text())
    assert set(figures) == {"greedy"} and set(FIGURES) < set(figures["greedy"])
    assert all(isinstance(value, int | float) for value in figures["greedy"].values())
    assert figures["greedy"]["demand_gpu_slots"] == pytest.approx(6)
    drawn = ElementTree.parse(folder / "out.svg").getroot()
    texts = {element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Utilization by day", "greedy"} <= texts
    assert sorted(file.name for file in folder.glob(".*")) == []
    assert (folder / "out.duckdb").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"policies": "greedy,best"},
            "--policies: 'best'; expected some of fifo, backfill, greedy, slotwise",
        ),
        ({"policies": ","}, "--policies: nothing named"),
        (
            {"start": "tomorrow"},
            "--start: 'tomorrow'; expected seconds of submit_s, or a duration such as 60d",
        ),
        ({"start": "nan"}, "--start: 'nan'; expected seconds"),
        ({"days": "nan"}, "Invalid value for '--days'"),
        ({"failures": "-3"}, "--failures: -3; expected a file, or days above 0"),
        ({"failures": "nowhere.csv"}, "--failures: nowhere.csv: cannot be read"),
        ({"jobs": "nowhere.csv"}, "nowhere.csv: cannot be read: No such file"),
        ({"json": "/nowhere/out.json"}, "there is no directory /nowhere; make it first"),
        ({"cluster": "nowhere.yaml"}, "nowhere.yaml: cannot be read"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], options: dict[str, str], said: str
) -> None:
    assert main(command(folder, **options)) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert said in told.err
    assert not (folder / "out.json").exists() and not (folder / "out.duckdb").exists()


def test_what_is_written_never_replaces_what_was_given(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "jobs.csv").read_text()
    assert main(command(folder, json=str(folder / "jobs.csv"))) == 2
    assert "is an input too" in capsys.readouterr().err
    assert (folder / "jobs.csv").read_text() == before


@pytest.mark.parametrize("case", CASES)
def test_a_case_is_what_its_rule_says(tmp_path: Path, case: str) -> None:
    cluster, jobs, demand = prepare(case, 0, tmp_path)
    site = load_site(cluster)
    assert sum(node.gpus for node in site.cluster.nodes) == (256 if case == "openb" else 64)
    with jobs.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    gpu_hours = [int(row["gpus"]) * float(row["duration_s"]) / 3600 for row in rows]
    value = sum(int(row["priority"]) * hours for row, hours in zip(rows, gpu_hours, strict=True))
    assert max(float(row["duration_s"]) for row in rows) <= 86400
    if case != "openb":
        assert round(value) == {"narrow": 39911, "wide": 44869}[case]
    with demand.open(newline="") as lines:
        load = [float(row["assistant"]) for row in csv.DictReader(lines)]
    assert max(load) == (128 if case == "openb" else 32)
    again = tmp_path / "again"
    assert [file.read_bytes() for file in prepare(case, 0, again)] == [
        file.read_bytes() for file in (cluster, jobs, demand)
    ]
    other = prepare(case, 1, again)[1]
    assert other.read_bytes() != jobs.read_bytes()


@pytest.mark.long
def test_policies_side_by_side_are_the_same_as_one_after_the_other(folder: Path) -> None:
    assert main(command(folder, policies="fifo,slotwise,full,oracle", failures="0.2", seed="4")) == 0
    together = json.loads((folder / "out.json").read_text())
    for policy in ("fifo", "slotwise", "oracle"):
        assert main(command(folder, policies=policy, failures="0.2", seed="4")) == 0
        alone = json.loads((folder / "out.json").read_text())[policy]
        assert {**alone, "seconds": 0} == {**together[policy], "seconds": 0}


@pytest.mark.long
def test_the_flow_replays_a_set_and_goes_on_after_one_that_fails(folder: Path) -> None:
    environment = os.environ | {"PREFECT_HOME": str(folder / "prefect"), "PYTHONPATH": str(ROOT)}
    environment.pop("PREFECT_API_URL", None)
    done = subprocess.run(
        [sys.executable, "-m", "flows.replays", str(folder / "nowhere"), str(folder), "--policies", "fifo"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert "nowhere/cluster.yaml: cannot be read" in done.stderr
    assert set(json.loads((folder / "replay.json").read_text())) == {"fifo"}
    assert (folder / "replay.svg").exists()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_replay_told_to_end_or_killed_leaves_no_process_behind(
    folder: Path, number: signal.Signals
) -> None:
    jobs = [f"job{at},{at * 60},{1 + at % 3},1200,{1 + at % 5}" for at in range(3000)]
    (folder / "jobs.csv").write_text("\n".join(["job_id,submit_s,gpus,duration_s,priority", *jobs]) + "\n")
    demand = [f"2026-12-0{1 + at // 24}T{at % 24:02d}:00Z,1" for at in range(60)]
    (folder / "demand.csv").write_text("\n".join(["ts,chat", *demand]) + "\n")
    mark = uuid.uuid4().hex
    replays = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *command(folder, policies="slotwise,greedy,backfill")],
        env={**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: any(folder.glob(".replay-*/policy-*")), "the policies at work", 120)
    assert len(marked(mark)) > 2
    replays.send_signal(number)
    assert replays.wait(30) in (143, -signal.SIGKILL)
    wait_for(lambda: marked(mark) == [], "all to be gone", 30)
    assert not (folder / "out.json").exists()
    if number == signal.SIGTERM:
        assert not any(folder.glob(".*"))
