"""Whatever lies where people and machines leave things, the hour goes on and somebody is told."""

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks import ledger, serving
from tasks.cluster import Cluster, DemandSource, Site
from tasks.collect import ledger_directory
from tasks.demand import DemandError, read_source
from tasks.facts import KINDS, fact_key, read_json, write_fact
from tasks.inbox import request_cancel
from tasks.instants import text
from tasks.jobs import Job, read_job
from tasks.nodes import lease_key, node_states
from tasks.projections import project
from tasks.reconcile import lease_key as rank_lease_key
from tasks.reconcile import outcome_key, started_key
from tasks.specfile import SpecError, read_spec
from tasks.storage import DirectoryStorage, RefusedKeyError, open_storage
from tests.conftest import make_site
from tests.tasks.planned_hours import CHAT, Runs, answer, ask, begin, end, plan_hour, states, submit

HOUR = datetime(2026, 12, 1, 6, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
slow = settings(quick, max_examples=15)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**60, max_value=2**70),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        [
            *("../../etc/passwd", "/etc/passwd", "a\0b", "x" * 500, "💥", "\u202e", "é" * 60, "NaN", "-1h"),
            *(
                "1900-01-01T00:00Z",
                "9999-12-31T23:59Z",
                "2026-12-01T06:00:00Z",
                "1h",
                "training",
                "0 2 * * *",
            ),
        ]
    ),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
JOB: dict[str, Any] = {
    "id": "a",
    "kind": "training",
    "gpus": 1,
    "priority": 5,
    "duration": "1h",
    "command": ["true"],
}
CLUSTER: dict[str, Any] = {
    "name": "c",
    "nodes": [{"name": "node0", "gpus": 1}],
    "services": [
        {"name": "s", "demand": {"file": "f.csv"}, "expected_gpus": 1, "ramp_per_hour": 1, "priority": 1}
    ],
}


def changed(whole: dict[str, Any], model: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A good file in which some keys, known or not, hold anything."""
    names = st.one_of(st.sampled_from(sorted(model.model_fields)), st.text(max_size=8))
    return st.dictionaries(names, values, min_size=1, max_size=3).map(lambda other: {**whole, **other})


def as_yaml(data: Any) -> bytes:
    return yaml.dump(data, allow_unicode=True, Dumper=yaml.SafeDumper).encode(errors="surrogatepass")


def told(error: SpecError, name: str) -> None:
    """Every line is one that a person can act on."""
    for line in str(error).splitlines():
        assert line.startswith(name) and len(line) < 1000, line
        assert "Traceback" not in line and "pydantic" not in line


@quick
@given(
    st.one_of(st.binary(max_size=300), changed(JOB, Job).map(as_yaml), st.text(max_size=200).map(str.encode))
)
def test_any_spec_is_a_job_that_the_ledger_takes_or_a_rejection_for_its_author(
    site: Site, content: bytes
) -> None:
    from tasks.inbox import spec_fact

    try:
        job = read_job(content, "a.yaml", site)
    except SpecError as error:
        told(error, "a.yaml")
        return
    fact = {"at": text(HOUR), **spec_fact(job, job.id or "a", "a.yaml", "0" * 64, HOUR)}
    written = json.loads(json.dumps(fact, allow_nan=False))
    assert project("spec", "facts/2026-12-01/spec/a.json", written).tables["specs"]
    assert 0 < job.value < float("inf")


@quick
@given(st.one_of(st.binary(max_size=300), changed(CLUSTER, Cluster).map(as_yaml)))
def test_any_cluster_file_is_a_cluster_or_lines_for_its_author(content: bytes) -> None:
    try:
        cluster = read_spec(Cluster, content, "cluster.yaml")
    except SpecError as error:
        told(error, "cluster.yaml")
        return
    site = Site(Path("/nowhere/cluster.yaml"), cluster)
    assert len(list(site.gpu_numbers())) == sum(node.gpus for node in cluster.nodes)
    assert site.plan_slots > 0 and site.lost_after > timedelta(0)


lines = st.lists(
    st.one_of(
        st.binary(max_size=30),
        st.tuples(scalars, scalars).map(lambda row: f"{row[0]},{row[1]}".encode(errors="replace")),
    ),
    max_size=8,
)


@quick
@given(st.one_of(st.binary(max_size=300), lines.map(lambda rows: b"\n".join([b"ts,y", *rows, b""]))))
def test_any_demand_file_gives_finite_loads_and_lines_about_the_rest(site: Site, content: bytes) -> None:
    (site.file.parent / "demand.csv").write_bytes(content)
    try:
        reading = read_source(DemandSource(file="demand.csv"), site, HOUR - timedelta(days=400_000), HOUR)
    except DemandError as error:
        assert "\n" not in str(error) and "demand.csv" in str(error)
        return
    assert all(0 <= sample.value <= 1e12 for sample in reading.samples)
    assert all("expected" in line or "still being written" in line for line in reading.left_out)


@slow
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.one_of(values, st.binary(max_size=60))), max_size=12))
def test_any_objects_among_the_facts_are_rows_or_set_aside(
    tmp_path_factory: pytest.TempPathFactory, found: list[tuple[str, Any]]
) -> None:
    place = tmp_path_factory.mktemp("facts")
    storage = open_storage(str(place / "storage"))
    for number, (kind, body) in enumerate(found):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        storage.write(f"facts/2026-12-01/{kind}/{number}.json", content)
    write_fact(storage, fact_key("cancel", HOUR, "good"), HOUR, {"job": "good"})
    taken = ledger.take_in(place / "ledger", storage)
    assert taken.new >= 1
    assert taken.new + len(taken.bad) == len(found) + 1


def test_a_fact_of_gigabytes_is_set_aside_unread(tmp_path: Path) -> None:
    storage = DirectoryStorage(tmp_path)
    huge = tmp_path / "facts/2026-12-01/cancel/huge.json"
    huge.parent.mkdir(parents=True)
    with huge.open("wb") as out:
        out.truncate(8 << 30)  # sparse: it takes no room
    taken = ledger.take_in(tmp_path / "ledger", storage)
    assert taken.new == 0
    assert "has more than 67108864 bytes" in taken.bad[0]


said = st.one_of(
    st.binary(max_size=80),
    values.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries({"version": scalars, "gpus": values, "leaving": values}).map(
        lambda value: json.dumps(value).encode()
    ),
)


@quick
@given(said, said)
def test_whatever_a_service_or_its_target_says_no_gpu_is_cleared_by_it(
    tmp_path_factory: pytest.TempPathFactory, target: bytes, observed: bytes
) -> None:
    storage = open_storage(str(tmp_path_factory.mktemp("serving")))
    serving.publish_target(storage, "chat", {"node0": [0, 1]}, HOUR)
    serving.publish_target(storage, "chat", {"node0": [0]}, HOUR)
    storage.write(serving.observed_key("chat"), observed)
    seen = serving.observed(storage, "chat")
    if seen.version != serving.target(storage, "chat").version:
        assert serving.blockers(storage, "node0", [1])
    storage.write(serving.target_key("chat"), target)
    serving.blockers(storage, "node0", [0])
    serving.publish_target(storage, "chat", {"node0": [3]}, HOUR)
    assert serving.blockers(storage, "node0", [3])


@quick
@given(said)
def test_whatever_a_lease_says_its_node_has_a_state(site: Site, lease: bytes) -> None:
    site.storage.write(lease_key("node0"), lease)
    assert node_states(site.storage, ["node0"], HOUR, site.lost_after)["node0"].state in ("ready", "lost")


@quick
@given(st.text(max_size=40), st.sampled_from(["", "a/", "../", "/", "a/../../"]))
def test_no_key_leads_out_of_a_storage(
    tmp_path_factory: pytest.TempPathFactory, name: str, before: str
) -> None:
    root = tmp_path_factory.mktemp("root")
    inner = root / "inner"
    storage = open_storage(str(inner))
    try:
        storage.write(before + name, b"x")
    except (RefusedKeyError, Exception) as error:
        assert "inner" in str(error) or "key" in str(error)
    assert sorted(path.name for path in root.iterdir()) in (["inner"], [])


HOSTILE = {
    "bomb.yaml": b"a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n",
    "tag.yaml": b"kind: !!python/object/apply:os.system ['true']\n",
    "binary.yaml": bytes(range(256)) * 10,
    "empty.yaml": b"",
    "deep.yaml": b"[" * 5000,
    "long-id.yaml": as_yaml({**JOB, "id": "x" * 5000}),
    "unicode-id.yaml": as_yaml({**JOB, "id": "naïve💥"}),
    "dots-id.yaml": as_yaml({**JOB, "id": "../../escape"}),
    "nan.yaml": b"kind: training\ngpus: 1\npriority: .nan\nduration: 1h\ncommand: [a]\n",
    "negative.yaml": as_yaml({**JOB, "gpus": -1}),
    "y1900.yaml": as_yaml({**JOB, "deadline": "1900-01-01T00:00Z"}),
    "y9999.yaml": as_yaml({**JOB, "deadline": "9999-12-31T23:59Z"}),
    "big.yaml": b"# " + b"x" * (1 << 20),
    "nul.yaml": b"kind: \0\n",
    "two-docs.yaml": b"a: 1\n---\nb: 2\n",
}


def test_an_hour_amid_everything_hostile_takes_the_good_and_tells_of_the_rest(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, full_mode_seconds=0), Runs()
    storage = site.storage
    answer(site, HOUR)
    for name, content in HOSTILE.items():
        storage.write(f"inbox/{name}", content)
    old = HOUR.timestamp() - 3600
    inbox = tmp_path / "storage" / "inbox"
    for path in inbox.iterdir():
        os.utime(path, (old, old))
    secret = tmp_path / "secret.txt"
    secret.write_text("not for everybody")
    (inbox / "link.yaml").symlink_to(secret)
    (inbox / "loop.yaml").symlink_to(inbox / "loop.yaml")
    with (inbox / "huge.yaml").open("wb") as out:
        out.truncate(4 << 30)
    os.mkfifo(inbox / "pipe.yaml")
    (inbox / "folder").mkdir()
    (inbox / b"\xff\xfe.yaml".decode("utf-8", "surrogateescape")).write_bytes(b"x")
    submit(site, "good")
    submit(site, "twice")
    storage.write("inbox/again.yaml", as_yaml({**JOB, "id": "twice"}))
    done = plan_hour(site, HOUR, runs)
    assert states(site) == {"good": "committed", "twice": "committed"}
    told = {row["source"]: row["error"] for row in ask(site, "FROM rejections")}
    assert told.keys() == {*HOSTILE, "twice.yaml"} or told.keys() == {*HOSTILE, "again.yaml"}
    assert all(name in error for name, error in told.items())
    unread = {problem.subject: problem.reason for problem in done.problems}
    assert unread.keys() >= {"link.yaml", "loop.yaml", "huge.yaml"}
    assert "link leads out" in unread["link.yaml"]
    assert "has more than" in unread["huge.yaml"]
    assert (inbox / "huge.yaml").exists()
    assert not any(b"not for everybody" in storage.read(key) for key in storage.keys("rejected/"))


def test_a_spec_edited_after_it_was_taken_in_is_refused_by_its_id_and_the_job_stands(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, full_mode_seconds=0), Runs()
    answer(site, HOUR)
    submit(site, "a", priority=5)
    plan_hour(site, HOUR, runs)
    submit(site, "a", priority=500)
    plan_hour(site, HOUR + MINUTE, runs, "replan")
    assert [row["priority"] for row in ask(site, "SELECT priority FROM jobs")] == [5]
    assert "a is taken by an earlier job" in ask(site, "SELECT error FROM rejections")[0]["error"]


def test_an_outcome_for_a_run_that_never_was_changes_no_job(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, full_mode_seconds=0), Runs()
    answer(site, HOUR)
    submit(site, "a")
    ghost = {"instant": HOUR, "job": "ghost", "attempt": 1, "rank": 0, "node": "node0", "gpus": [0]}
    end(site, ghost, HOUR)
    end(site, {**ghost, "job": "a", "attempt": 7}, HOUR)
    plan_hour(site, HOUR, runs)
    assert states(site) == {"a": "committed"}
    assert ask(site, "FROM runs") == []
    assert len(runs.made) == 1


BAD_OUTCOMES = {
    "no JSON": b"\0\0\0",
    "no state": json.dumps({"at": text(HOUR), "job": "a", "attempt": 1, "rank": 0}).encode(),
    "another rank's": json.dumps(
        {"at": text(HOUR), "job": "b", "attempt": 1, "rank": 0, "node": "node0", "state": "completed"}
        | {"ended_at": text(HOUR), "gpu_seconds": 1, "cost": 0}
    ).encode(),
    "what no table takes": json.dumps(
        {"at": text(HOUR), "job": "a", "attempt": 1, "rank": 0, "node": "node0", "state": "completed"}
        | {"ended_at": text(HOUR), "gpu_seconds": 1, "cost": 0, "exit_code": 2**40}
    ).encode(),
}


@pytest.mark.parametrize("content", BAD_OUTCOMES.values(), ids=BAD_OUTCOMES.keys())
def test_a_bad_outcome_holds_no_gpu_once_its_run_is_silent(tmp_path: Path, content: bytes) -> None:
    site, runs = make_site(tmp_path, full_mode_seconds=0), Runs()
    answer(site, HOUR)
    submit(site, "a")
    plan_hour(site, HOUR, runs)
    (rank,) = runs.made.values()
    begin(site, rank, HOUR)
    site.storage.create(outcome_key(rank), content)
    later = HOUR + 10 * MINUTE
    answer(site, later)
    plan_hour(site, later, runs, "replan")
    assert [(row["job"], row["state"]) for row in ask(site, "SELECT job, state FROM runs")] == [
        ("a", "crashed")
    ]
    assert ask(site, "SELECT job, attempts FROM jobs") == [{"job": "a", "attempts": 2}]
    assert ledger.verify(ledger_directory(site), site.storage) == []


def folder(path: Path) -> None:
    (path / "more").mkdir(parents=True)


def huge(path: Path) -> None:
    with path.open("wb") as out:
        out.truncate(8 << 30)  # sparse


def loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    "lies_there",
    [os.mkfifo, *(pytest.param(each, marks=pytest.mark.long) for each in (loop, folder, huge))],
)
def test_what_lies_where_an_object_belongs_stops_nothing_else(
    tmp_path: Path, lies_there: Callable[[Path], None]
) -> None:
    site, runs = make_site(tmp_path, full_mode_seconds=0, services=[CHAT]), Runs()
    (tmp_path / "demand.csv").write_text(f"ts,y\n{text(HOUR - 20 * MINUTE)},1\n")
    answer(site, HOUR)
    for job in ("outcome", "claim", "lease", "dispatch", "silent", "cancelled"):
        submit(site, job)

    def plant(key: str) -> None:
        path = tmp_path / "storage" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.unlink()
        lies_there(path)

    plant(fact_key("dispatch", HOUR, "dispatch", 1, 0))
    plan_hour(site, HOUR, runs)
    ranks = {rank["job"]: rank for rank in runs.made.values()}
    assert ranks.keys() == {"outcome", "claim", "lease", "dispatch", "silent", "cancelled"}
    for job in ranks.keys() - {"claim", "cancelled"}:
        begin(site, ranks[job], HOUR)
    plant(outcome_key(ranks["outcome"]))
    plant(started_key(ranks["claim"]))
    plant(rank_lease_key("lease", 1, 0))
    plant("cancel/anybody.json")
    request_cancel(site.storage, "cancelled", "a test", HOUR)
    plant(serving.target_key("chat"))
    plant(serving.observed_key("chat"))
    lies_there(tmp_path / "aside.csv")
    (tmp_path / "demand.csv").unlink()
    (tmp_path / "aside.csv").rename(tmp_path / "demand.csv")
    later = HOUR + 10 * MINUTE
    answer(site, later, "node0")
    plant(lease_key("node1"))
    done = plan_hour(site, later, runs, "replan")
    found = {row["job"]: row["state"] for row in ask(site, "SELECT job, state FROM runs")}
    assert found.keys() == {"outcome", "claim", "lease", "dispatch", "silent", "cancelled"}
    assert set(found.values()) <= {"crashed", "lost", "not_started", "cancelled"}
    assert states(site)["cancelled"] == "cancelled"
    assert done.collected.nodes["node0"].state == "ready"
    assert done.collected.nodes["node1"].state == "lost"
    assert ledger.verify(ledger_directory(site), site.storage) == []


@pytest.mark.parametrize("lies_there", [os.mkfifo, loop, folder, huge])
def test_what_lies_where_control_notes_something_for_itself_stops_no_hour(
    tmp_path: Path, lies_there: Callable[[Path], None]
) -> None:
    site, runs = make_site(tmp_path, full_mode_seconds=0), Runs()
    noted = [
        ledger_directory(site) / "swept",
        ledger_directory(site) / "upkept",
        site.state / "leases-seen.json",
    ]
    answer(site, HOUR)
    plan_hour(site, HOUR, runs)
    for file in noted:
        file.unlink()
        lies_there(file)
    submit(site, "a")
    for now in (HOUR + timedelta(hours=1), HOUR + timedelta(hours=2)):
        answer(site, now)
        assert plan_hour(site, now, runs).problems == []
    assert {rank["job"] for rank in runs.made.values()} == {"a"}
    assert all(file.is_dir() or len(file.read_bytes()) < 1000 for file in noted)  # replaced but for folders


def test_a_claim_that_cannot_be_read_stops_neither_the_others_nor_its_job(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, full_mode_seconds=0), Runs()
    answer(site, HOUR)
    submit(site, "a")
    submit(site, "b")
    plan_hour(site, HOUR, runs)
    ranks = {rank["job"]: rank for rank in runs.made.values()}
    site.storage.create(started_key(ranks["a"]), b"{")
    begin(site, ranks["b"], HOUR)
    later = HOUR + 10 * MINUTE
    answer(site, later)
    plan_hour(site, later, runs, "replan")
    found = {row["job"]: row["state"] for row in ask(site, "SELECT job, state FROM runs")}
    assert found == {"a": "crashed", "b": "crashed"}


def test_keys_that_a_listing_shows_and_nobody_wrote_are_passed_over_and_told(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, full_mode_seconds=0), Runs()
    answer(site, HOUR)
    submit(site, "a")
    surprises = (
        "facts/x.json",
        "facts/2026-13-45/spec/a.json",
        "facts/2026-12-01/none/a.json",
        "facts/2026-12-01/spec",
    )
    for key in surprises[:3]:
        site.storage.write(key, b"{}")
    site.storage.write("serving/x/y/z/target.json", b"{}")
    site.storage.write("cancel/..json", b"{}")
    site.storage.write("cancel/a/b/c.json", b"{}")
    plan_hour(site, HOUR, runs)
    assert states(site) == {"a": "committed"}
    assert {row["key"] for row in ask(site, "FROM bad_facts")} >= {surprises[0], surprises[2]}
    assert read_json(site.storage, fact_key("commit", HOUR, text(HOUR)))["placements"]
