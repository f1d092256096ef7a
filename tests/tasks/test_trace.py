"""Recorded load: what is made of it, and what a person is told of a row that cannot be replayed."""

import gzip
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.cluster import Cluster, Node
from tasks.outages import node_events
from tasks.trace import Trace, TraceError, read_trace

CLUSTER = Cluster.model_validate(
    {
        "name": "test",
        "nodes": [{"name": "node0", "gpus": 4}],
        "services": [
            {
                "name": "chat",
                "demand": {"file": "unused.csv", "unit": "gpus"},
                "expected_gpus": 2,
                "ramp_per_hour": 4,
                "priority": 3,
            }
        ],
    }
)
COLUMNS = "job_id,submit_s,gpus,duration_s"
JOBS = f"{COLUMNS}\na,0,1,60\n"
DEMAND = "ts,chat\n2026-12-01T00:00Z,1\n"


def read(folder: Path, jobs: str | bytes = JOBS, demand: str | bytes = DEMAND) -> Trace:
    for name, content in (("jobs.csv", jobs), ("demand.csv", demand)):
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    (folder / "out").mkdir()
    return read_trace(folder / "jobs.csv", folder / "demand.csv", CLUSTER, folder / "out")


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        (f"{COLUMNS}\nb,0,0,60\n", "row 1 (line 2): gpus: '0'; expected a whole number"),
        (f"{COLUMNS}\na,0,1,60\n\nb,0,-1,60\n", "row 2 (line 4): gpus: '-1'; expected a whole number"),
        (f"{COLUMNS}\nb,0,1.5,60\n", "gpus: '1.5'; expected a whole number from 1 up"),
        (f"{COLUMNS}\nb,soon,1,60\n", "submit_s: 'soon'; expected seconds"),
        (f"{COLUMNS}\nb,inf,1,60\n", "submit_s: 'inf'; expected seconds"),
        (f"{COLUMNS}\nb,0,1,nan\n", "duration_s: 'nan'; expected seconds from 0 up"),
        (f"{COLUMNS}\nb,0,1,-60\n", "duration_s: '-60'; expected seconds from 0 up"),
        (f"{COLUMNS}\nb,0,1,\n", "duration_s: missing; expected seconds"),
        (f"{COLUMNS}\nb,0,1\n", "has 3 fields; expected 4"),
        (f"{COLUMNS}\n,0,1,60\n", "job_id: missing; expected a name"),
        (f"{COLUMNS}\nb,0,1,60\nc,5,1,60\nb,9,1,60\n", "row 3: job_id: 'b' is that of row 1 too"),
        (f"{COLUMNS},kind\nb,0,1,60,game\n", "kind: 'game'; expected one of training"),
        (f"{COLUMNS},priority\nb,0,1,60,0\n", "priority: '0'; expected a number above 0"),
        (f"{COLUMNS},estimate_s\nb,0,1,60,-1\n", "estimate_s: '-1'; expected seconds above 0"),
        (f"{COLUMNS},deadline_s\nb,0,1,60,late\n", "deadline_s: 'late'; expected seconds"),
        ("job_id,submit_s,gpus\nb,0,1\n", "expected one duration_s among them"),
        (f"{COLUMNS}\n", "has no rows; expected at least one job"),
        ("", "the columns are nothing; expected one job_id among them"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"PAR1 and no more", "cannot be read"),
        (gzip.compress(JOBS.encode(), mtime=0)[:-9], "cannot be read"),
    ],
)
def test_a_bad_job_is_told_in_one_line(tmp_path: Path, jobs: str | bytes, said: str) -> None:
    with pytest.raises(TraceError) as told:
        read(tmp_path, jobs=jobs)
    assert str(told.value).startswith(f"{tmp_path / 'jobs.csv'}: ") and said in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("demand", "said"),
    [
        ("ts,chat\n2026-12-01T00:00Z,-1\n", "row 1 (line 2): chat: '-1'; expected a number from 0"),
        ("ts,chat\n2026-12-01T00:00Z,nan\n", "chat: 'nan'; expected a number from 0"),
        ("ts,chat\nnoon,1\n", "ts: 'noon'; expected an instant"),
        ("ts,chat\n9999-12-31T00:00Z,1\n", "ts: '9999-12-31T00:00Z'; expected an instant"),
        (
            "ts,chat\n2026-12-01T00:00Z,1\n2026-12-01T00:00Z,2\n",
            "(line 3): ts: 2026-12-01T00:00:00Z is that of",
        ),
        (
            "ts,chat\n2026-12-01T00:00Z,1\n2026-12-01T01:00Z,1\n2026-12-01T02:00Z,1\n2026-12-01T02:30Z,1\n",
            "(line 5): ts: 2026-12-01T02:30:00Z; expected whole steps of 3600 s",
        ),
        (
            "ts,chat\n1900-12-01T00:00:00Z,1\n2026-12-01T00:00:00Z,1\n2026-12-01T00:00:01Z,1\n"
            "2026-12-01T00:00:02Z,1\n",
            "expected at most 1000000 steps of 1 s",
        ),
        ("ts,chat,chats\n", "column 'chats': no service of the cluster; expected ts, chat"),
        ("ts\n", "expected one chat among them"),
        ("ts,chat\n", "has no rows"),
        ("", "the columns are nothing"),
    ],
)
def test_bad_demand_is_told_the_same_way(tmp_path: Path, demand: str, said: str) -> None:
    with pytest.raises(TraceError) as told:
        read(tmp_path, demand=demand)
    assert str(told.value).startswith(f"{tmp_path / 'demand.csv'}: ") and said in str(told.value)
    assert "\n" not in str(told.value)


def test_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere: cannot be read: No such file"):
        read_trace(tmp_path, tmp_path / "nowhere", CLUSTER, tmp_path)
    with pytest.raises(TraceError, match="--demand: missing; the cluster has the services chat"):
        read_trace(tmp_path, None, CLUSTER, tmp_path)


@pytest.mark.parametrize("content", [JOBS, "not a table", ""])
def test_text_named_as_parquet_is_told_as_that(tmp_path: Path, content: str) -> None:
    jobs = tmp_path / "jobs.parquet"
    jobs.write_text(content)
    with pytest.raises(TraceError, match=r"is no Parquet file: begins with b'.*'; expected b'PAR1'") as told:
        read_trace(jobs, None, CLUSTER.model_copy(update={"services": []}), tmp_path)
    assert str(told.value).startswith(f"{jobs}: ")
    assert "\n" not in str(told.value)


def test_a_window_of_centuries_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text(f"{COLUMNS}\na,-5,1,60\nb,9e9,1,60\n")
    bare = CLUSTER.model_copy(update={"services": ()})
    with pytest.raises(
        TraceError, match="104167 days from -3600 s on; expected at most 3660, by --start and"
    ):
        read_trace(tmp_path / "jobs.csv", None, bare, tmp_path)


def test_demand_may_come_in_any_order_and_with_gaps(tmp_path: Path) -> None:
    rows = ["2026-12-01T03:00Z,4", "2026-12-01T00:00Z,1", "2026-12-01 01:00:00,2", "2026-12-01T06:00+01:00,"]
    rows.append("2026-12-01T06:00Z,7")
    demand = read(tmp_path, demand="\n".join(["ts,chat", *rows]) + "\n").demand["chat"]
    assert (demand.sample_s, demand.gpus[:2], demand.gpus[3]) == (3600.0, (1.0, 2.0), 4.0)
    assert len(demand.gpus) == 7 and all(math.isnan(demand.gpus[at]) for at in (2, 4, 5))


def test_jobs_come_in_the_order_of_their_submission_with_what_is_not_said_filled_in(tmp_path: Path) -> None:
    demand = "ts,chat\n2026-12-01T00:00Z,1\n2026-12-01T01:00Z,1\n"
    trace = read(
        tmp_path, jobs=f"{COLUMNS},tenant\nlate,600,2,60,\nearly,0,1,0,x\nafter,7200,1,5,\n", demand=demand
    )
    assert [(job.job, job.submit_s, job.tenant) for job in trace.each_job()] == [
        ("early", 0.0, "x"),
        ("late", 600.0, None),
    ]
    first = next(trace.each_job())
    assert (first.kind, first.priority, first.deadline_s, first.declared_s) == ("training", 1.0, None, None)
    assert (trace.outside, trace.seconds) == (1, 7200.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node,from_s,to_s\nnode9,0,10\n", "line 2: node: 'node9'; expected one of node0"),
        ("node,from_s,to_s\nnode0,10,10\n", "line 2: to_s: 10; expected more than from_s, 10"),
        ("node,from_s,to_s\nnode0,soon,10\n", "line 2: from_s: 'soon'; expected seconds"),
        ("node,from_s\nnode0,0\n", "line 2: to_s: None; expected seconds"),
    ],
)
def test_a_bad_outage_is_told(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "down.csv"
    file.write_text(text)
    with pytest.raises(TraceError) as told:
        node_events(str(file), CLUSTER, read(tmp_path), 0)
    assert said in str(told.value)
    with pytest.raises(TraceError, match="--failures: nan; expected a file, or days above 0"):
        node_events("nan", CLUSTER, read_again(tmp_path), 0)


def test_drawn_outages_depend_on_the_seed_and_the_node(tmp_path: Path) -> None:
    trace = replace(read(tmp_path), seconds=30 * 86400.0)
    wider = CLUSTER.model_copy(update={"nodes": (Node(name="other", gpus=4), *CLUSTER.nodes)})
    first, again, other = (node_events("2", cluster, trace, 1) for cluster in (CLUSTER, CLUSTER, wider))
    assert first == again == tuple(event for event in other if event.node == "node0")
    assert [event.lost for event in first] == [True, False] * (len(first) // 2)
    assert 5 < len(first) / 2 < 40
    assert node_events("2", CLUSTER, trace, 2) != first


def read_again(folder: Path) -> Trace:
    (folder / "again").mkdir()
    return read_trace(folder / "jobs.csv", folder / "demand.csv", CLUSTER, folder / "again")
