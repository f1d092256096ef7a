"""The ledger: the same rows from the same facts in any order, nothing lost, readers never disturbed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks import ledger
from tasks.facts import KINDS, fact_key, write_fact
from tasks.instants import text
from tasks.storage import NotFoundError, Storage, StorageError, open_storage
from tests.tasks.worked_hours import HOUR, Facts, minutes

TODAY = HOUR.date()
Tables = dict[str, list[tuple[Any, ...]]]


@pytest.fixture
def plain(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "storage"))


@pytest.fixture
def facts(plain: Storage) -> Facts:
    return Facts(plain)


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger without facts: copying it is quicker than making another."""
    directory = tmp_path_factory.mktemp("migrated")
    with ledger.open_ledger(directory):
        pass
    return ledger.ledger_file(directory)


@pytest.fixture
def directory(tmp_path: Path, migrated: Path) -> Path:
    directory = tmp_path / "ledger"
    directory.mkdir()
    shutil.copy(migrated, ledger.ledger_file(directory))
    return directory


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """Where no ledger has been yet."""
    return tmp_path / "new" / "ledger"


def query(directory: Path, text: str) -> list[dict[str, Any]]:
    with ledger.open_ledger(directory) as connection:
        return ledger.rows(connection, text)


def contents(file: Path) -> Tables:
    """All rows of all tables, sorted."""
    with duckdb.connect(str(file), read_only=True) as connection:
        names = connection.execute("SELECT table_name FROM duckdb_tables() ORDER BY 1").fetchall()
        return {name: sorted(connection.execute(f"FROM {name}").fetchall(), key=repr) for (name,) in names}


def test_facts_are_taken_in_once(storage: Storage, empty: Path) -> None:
    Facts(storage).every_kind()
    keys = storage.keys("facts/")
    assert ledger.take_in(empty, storage, TODAY) == ledger.TakenIn(len(keys), ())
    before = contents(ledger.ledger_file(empty))
    assert ledger.take_in(empty, storage, TODAY) == ledger.TakenIn(0, ())
    assert ledger.take_in(empty, storage) == ledger.TakenIn(0, ())
    assert contents(ledger.ledger_file(empty)) == before
    assert {row[2] for row in before["facts"]} == set(KINDS)
    without_rows = [name for name, rows in before.items() if not rows]
    assert without_rows == ["bad_facts", "details", "packs"]


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.data())
def test_the_order_in_which_facts_come_does_not_matter(
    order: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("order")
    whole, piecewise = open_storage(str(place / "whole")), open_storage(str(place / "piecewise"))
    Facts(whole).every_kind()
    keys = order.draw(st.permutations(whole.keys()))
    cut = order.draw(st.integers(0, len(keys)))
    for part in (keys[:cut], keys[cut:]):
        for key in part:
            piecewise.create(key, whole.read(key))
        ledger.take_in(place / "b", piecewise, TODAY)
    ledger.take_in(place / "a", whole)
    assert contents(ledger.ledger_file(place / "b")) == contents(ledger.ledger_file(place / "a"))


def test_rows_of_one_fact_may_have_different_columns(facts: Facts, directory: Path) -> None:
    facts.plan()  # the job that is placed has no reason, the other one no start
    ledger.take_in(directory, facts.storage)
    rows = query(directory, "SELECT job, start_at, reason, earliest_start_at FROM planned_jobs ORDER BY job")
    assert rows == [
        {"job": "a", "start_at": HOUR, "reason": None, "earliest_start_at": None},
        {"job": "b", "start_at": None, "reason": "no GPU is free", "earliest_start_at": minutes(60)},
    ]


def test_a_rebuild_from_the_facts_gives_the_same_rows(facts: Facts, directory: Path) -> None:
    facts.spec()
    ledger.take_in(directory, facts.storage, TODAY)
    facts.attempt("completed")
    facts.plan()
    ledger.take_in(directory, facts.storage, TODAY)
    before = contents(ledger.ledger_file(directory))
    taken = ledger.rebuild(directory, facts.storage)
    assert taken.new == 5
    assert contents(ledger.ledger_file(directory)) == before
    assert contents(ledger.published_file(directory)) == before
    assert not list(directory.glob(".*"))


def test_verify_finds_nothing_when_all_is_well(facts: Facts, directory: Path) -> None:
    facts.every_kind()
    assert ledger.verify(directory, facts.storage) == []
    assert not list(directory.glob(".*"))


PLANTED = {
    "DELETE FROM outcomes": ["outcomes: 2 rows are only in the facts"],
    "UPDATE specs SET value = 11 WHERE job = 'b'": [
        "specs: 1 rows are only in the ledger",
        "specs: 1 rows are only in the facts",
    ],
    "INSERT INTO cancels SELECT * FROM cancels": ["cancels: 1 rows are only in the ledger"],
}


@pytest.mark.parametrize(("change", "found"), PLANTED.items(), ids=PLANTED)
def test_verify_finds_a_planted_difference(
    facts: Facts, directory: Path, change: str, found: list[str]
) -> None:
    facts.every_kind()
    ledger.take_in(directory, facts.storage)
    with ledger.open_ledger(directory) as connection:
        connection.execute(change)
    assert ledger.verify(directory, facts.storage) == found


class Arriving:
    """Storage in which a fact arrives with every listing: nodes go on while the ledger is verified."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.root = facts.storage.root
        self.listed = 0

    def keys(self, prefix: str = "") -> list[str]:
        self.listed += 1
        found = self.facts.storage.keys(prefix)
        self.facts.spec(f"late{self.listed}")
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.facts.storage, name)


def test_facts_that_arrive_during_verify_are_no_difference(facts: Facts, directory: Path) -> None:
    facts.spec()
    storage: Any = Arriving(facts)
    assert ledger.verify(directory, storage) == []
    assert storage.listed >= 2


GOOD_OUTCOME = {
    "at": text(minutes(31)), "job": "a", "attempt": 1, "rank": 0, "node": "node0", "state": "completed",
    "ended_at": text(minutes(31)), "gpu_seconds": 1, "cost": 0,
}  # fmt: skip
BAD_FACTS: dict[str, tuple[str, bytes, str]] = {
    "torn": ("outcome/a/1/0", json.dumps(GOOD_OUTCOME).encode()[:40], "not JSON"),
    "empty": ("outcome/a/1/0", b"", "not JSON"),
    "no object": ("outcome/a/1/0", b"[1]", "expected a JSON object"),
    "without what its kind needs": ("outcome/a/1/0", b'{"at": "2026-12-01T06:00Z"}', "KeyError: 'job'"),
    "of the wrong type": ("outcome/a/1/0", b'{"at": 5}', "TypeError"),
    "of no known kind": ("rumour/x", b"{}", "known kind"),
    "with a number that no column holds": (
        "outcome/a/1/0", json.dumps(GOOD_OUTCOME | {"exit_code": 2**40}).encode(), "ConversionException"
    ),
    "with a number that no machine holds": (
        "outcome/a/1/0", json.dumps(GOOD_OUTCOME | {"exit_code": 2**70}).encode(), "OverflowError"
    ),
    "with half a character": (
        "outcome/a/1/0", json.dumps(GOOD_OUTCOME | {"error": "\ud800"}).encode(), "UnicodeEncodeError"
    ),
    "with half a character within JSON": (
        "outcome/a/1/0", json.dumps(GOOD_OUTCOME | {"metrics": {"m": "\ud800"}}).encode(), "Malformed JSON"
    ),
    "of an infinite cost": (
        "outcome/a/1/0", json.dumps(GOOD_OUTCOME | {"cost": float("inf")}).encode(), "finite"
    ),
    "of a day that never was": ("spec/x", b'{"at": "2026-02-30"}', "ValueError"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FACTS)
def test_a_bad_fact_is_set_aside_and_the_rest_go_on(facts: Facts, directory: Path, case: str) -> None:
    name, content, said = BAD_FACTS[case]
    key = f"facts/{TODAY}/{name}.json"
    facts.storage.write(key, content)
    facts.spec("before")
    facts.commit("before")
    facts.spec("after")
    taken = ledger.take_in(directory, facts.storage, TODAY)
    assert (taken.new, len(taken.bad)) == (3, 1)
    assert taken.bad[0].startswith(f"{key}: ")
    assert said in taken.bad[0]
    assert "\n" not in taken.bad[0]
    assert query(directory, "SELECT key, day FROM bad_facts") == [{"key": key, "day": TODAY}]
    assert [row["job"] for row in query(directory, "SELECT job FROM specs ORDER BY job")] == [
        "after",
        "before",
    ]
    assert ledger.take_in(directory, facts.storage, TODAY) == ledger.TakenIn(0, ())
    assert ledger.verify(directory, facts.storage) == []


def test_what_is_no_fact_of_a_day_is_set_aside(facts: Facts, directory: Path) -> None:
    facts.spec()
    facts.storage.write("facts/README.txt", b"hello")
    facts.storage.write("facts/20261201/spec/x.json", b"{}")
    (Path(facts.storage.root) / "facts" / "2026-12-01" / "link.json").symlink_to("/etc/hostname")
    taken = ledger.take_in(directory, facts.storage)
    assert taken.new == 1
    assert [bad.split(": ")[0] for bad in taken.bad] == [
        "facts/2026-12-01/link.json",
        "facts/20261201/spec/x.json",
        "facts/README.txt",
    ]


class Failing:
    """Storage that stops answering after some reads."""

    def __init__(self, storage: Storage, reads: int) -> None:
        self.storage, self.root, self.left = storage, storage.root, reads

    def read(self, key: str, most: int | None = None) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise StorageError("gone")
        return self.storage.read(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)


def test_storage_that_fails_makes_no_fact_bad(facts: Facts, directory: Path) -> None:
    facts.every_kind()
    failing: Any = Failing(facts.storage, 3)
    with pytest.raises(StorageError, match="gone"):
        ledger.take_in(directory, failing, TODAY)
    assert query(directory, "SELECT count(*) AS n FROM facts") == [{"n": 0}]
    assert ledger.take_in(directory, facts.storage, TODAY).bad == ()


class Vanishing(Failing):
    """Storage whose objects go between their listing and their reading."""

    def read(self, key: str, most: int | None = None) -> bytes:
        raise NotFoundError(key)


def test_a_fact_that_is_gone_when_it_is_read_is_not_there(facts: Facts, directory: Path) -> None:
    facts.spec()
    vanishing: Any = Vanishing(facts.storage, 0)
    assert ledger.take_in(directory, vanishing, TODAY) == ledger.TakenIn(0, ())


def late(facts: Facts, day: date) -> None:
    key = fact_key("missed", day, "late")
    write_fact(facts.storage, key, HOUR, {"instant": f"{day}T00:00:00Z", "reason": "an outage"})


@pytest.mark.parametrize("days_ago", [1, 4, 9])
def test_days_of_an_outage_are_still_open_when_it_ends(facts: Facts, directory: Path, days_ago: int) -> None:
    write_fact(facts.storage, fact_key("cancel", HOUR - timedelta(days=10), "x"), HOUR, {"job": "x"})
    ledger.take_in(directory, facts.storage, TODAY)
    facts.spec()
    ledger.take_in(directory, facts.storage, TODAY)  # the first fact of today
    late(facts, TODAY - timedelta(days=days_ago))
    assert ledger.take_in(directory, facts.storage, TODAY).new == 1


def test_the_day_of_an_attempt_that_runs_is_open(facts: Facts, directory: Path) -> None:
    facts.spec()
    facts.commit()
    today = TODAY + timedelta(days=30)
    for day in range(1, 31):
        late(facts, TODAY + timedelta(days=day))
    ledger.take_in(directory, facts.storage, today)
    facts.started()
    facts.outcome("completed")
    assert ledger.take_in(directory, facts.storage, today).new == 2
    late(facts, TODAY)
    assert ledger.take_in(directory, facts.storage, today).new == 0  # ended: closed


def test_a_fact_of_tomorrow_is_taken_in_and_moves_nothing(facts: Facts, directory: Path) -> None:
    late(facts, TODAY + timedelta(days=1))
    facts.spec()
    assert ledger.take_in(directory, facts.storage, TODAY).new == 2
    facts.spec("b")
    assert ledger.take_in(directory, facts.storage, TODAY).new == 1


def starts(facts: Facts, *ranks: int) -> list[str]:
    return [facts.started(rank=rank) for rank in ranks]


def ends(facts: Facts, *states: str) -> list[str]:
    return [facts.outcome(state, rank=rank) for rank, state in enumerate(states)]


State = tuple[str, int, int, float]  # state, attempts, failures, earned
STATES: dict[str, tuple[Callable[[Facts], object], State]] = {
    "taken in": (lambda f: (), ("queued", 0, 0, 0)),
    "committed": (lambda f: f.commit(), ("committed", 1, 0, 0)),
    "one of two began": (lambda f: (f.commit(nodes=2), starts(f, 1)), ("starting", 1, 0, 0)),
    "both began": (lambda f: (f.commit(nodes=2), starts(f, 0, 1)), ("running", 1, 0, 0)),
    "one of two done": (
        lambda f: (f.commit(nodes=2), starts(f, 0, 1), ends(f, "completed")), ("ending", 1, 0, 0),
    ),
    "both done": (
        lambda f: (f.commit(nodes=2), starts(f, 0, 1), ends(f, "completed", "completed")),
        ("completed", 1, 0, 10),
    ),
    "one done, one stopped": (
        lambda f: (f.commit(nodes=2), starts(f, 0, 1), ends(f, "completed", "stopped")), ("queued", 1, 1, 0),
    ),
    "one failed, one stopped": (
        lambda f: (f.commit(nodes=2), starts(f, 0, 1), ends(f, "stopped", "failed")), ("queued", 1, 1, 0),
    ),
    "failed": (lambda f: f.attempt("failed", exit_code=1), ("queued", 1, 1, 0)),
    "crashed": (lambda f: f.attempt("crashed", exit_code=-9), ("queued", 1, 1, 0)),
    "lost": (lambda f: f.attempt("lost"), ("queued", 1, 1, 0)),
    "timed out": (lambda f: f.attempt("timed_out"), ("failed", 1, 0, 0)),
    "a wrong spec": (lambda f: f.attempt("failed", exit_code=2), ("failed", 1, 1, 0)),
    "failed as often as it may": (
        lambda f: [f.attempt("failed", attempt=n, exit_code=1) for n in (1, 2, 3)], ("failed", 3, 3, 0),
    ),
    "failed twice, then done": (
        lambda f: (
            f.attempt("failed", exit_code=1),
            f.attempt("crashed", attempt=2),
            f.attempt("completed", attempt=3),
        ),
        ("completed", 3, 2, 10),
    ),
    "failed, then committed": (
        lambda f: (f.attempt("failed", exit_code=1), f.commit(attempt=2, at=40)), ("committed", 2, 1, 0),
    ),
    "never began": (
        lambda f: (f.commit(), f.started(void=True), f.outcome("not_started")), ("queued", 1, 0, 0),
    ),
    "voided, outcome to come": (lambda f: (f.commit(), f.started(void=True)), ("committed", 1, 0, 0)),
    "cancelled in the queue": (lambda f: f.cancel(), ("cancelled", 0, 0, 0)),
    "cancelled while it runs": (
        lambda f: (f.commit(), f.started(), f.cancel()), ("running", 1, 0, 0),
    ),
    "cancelled and over": (
        lambda f: (f.commit(), f.started(), f.cancel(), f.outcome("cancelled")), ("cancelled", 1, 0, 0),
    ),
    "cancelled after it failed": (
        lambda f: (f.attempt("failed", exit_code=1), f.cancel()), ("cancelled", 1, 1, 0),
    ),
    "cancelled too late": (lambda f: (f.attempt("completed"), f.cancel()), ("completed", 1, 0, 10)),
    "cancelled twice": (
        lambda f: (f.cancel(), f.write("cancel", "again", minutes(30), {"job": "a"})), ("cancelled", 0, 0, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_the_state_of_a_job_follows_from_its_facts(facts: Facts, directory: Path, case: str) -> None:
    tell, expected = STATES[case]
    facts.spec()
    tell(facts)
    ledger.take_in(directory, facts.storage)
    (row,) = query(directory, "SELECT state, attempts, failures, earned FROM jobs")
    assert tuple(row.values()) == expected


def test_a_job_that_waits_beyond_its_deadline_expires(facts: Facts, directory: Path) -> None:
    facts.spec(deadline="2001-01-01T00:00Z")
    facts.spec("runs", deadline="2001-01-01T00:00Z")
    facts.commit("runs")
    facts.spec("has time", deadline="2199-01-01T00:00Z")
    ledger.take_in(directory, facts.storage)
    states = {row["job"]: row["state"] for row in query(directory, "SELECT job, state FROM jobs")}
    assert states == {"a": "expired", "runs": "committed", "has time": "queued"}


def test_a_job_that_completes_too_late_earns_nothing(facts: Facts, directory: Path) -> None:
    facts.spec(deadline=text(minutes(30)))
    facts.attempt("completed")
    ledger.take_in(directory, facts.storage)
    assert query(directory, "SELECT state, earned FROM jobs") == [{"state": "completed", "earned": 0}]


def test_cancelling_a_recurring_job_cancels_what_has_not_begun(facts: Facts, directory: Path) -> None:
    facts.spec("series", schedule="0 * * * *")
    for name in ("waits", "runs", "waits and is cancelled itself"):
        facts.spec(name, template="series")
    facts.commit("runs")
    facts.cancel("series")
    facts.cancel("waits and is cancelled itself")
    ledger.take_in(directory, facts.storage)
    rows = query(directory, "SELECT job, state, cancel_at FROM jobs ORDER BY job")
    assert rows == [
        {"job": "runs", "state": "committed", "cancel_at": None},
        {"job": "waits", "state": "cancelled", "cancel_at": minutes(20)},
        {"job": "waits and is cancelled itself", "state": "cancelled", "cancel_at": minutes(20)},
    ]
    assert query(directory, "FROM recurring") == []


def test_every_table_view_and_column_says_what_it_is(facts: Facts, directory: Path) -> None:
    facts.spec()
    ledger.take_in(directory, facts.storage)
    silent = """
        SELECT table_name AS name FROM duckdb_tables() WHERE comment IS NULL
        UNION ALL SELECT view_name FROM duckdb_views() WHERE comment IS NULL AND NOT internal
        UNION ALL SELECT table_name || '.' || column_name FROM duckdb_columns()
            WHERE comment IS NULL AND NOT internal
    """
    assert query(directory, silent) == []
    views = query(directory, "SELECT view_name AS name FROM duckdb_views() WHERE NOT internal")
    assert len(views) >= 12
    for view in views:  # each can be asked
        query(directory, f"FROM {view['name']}")


def test_all_times_are_utc(facts: Facts, directory: Path) -> None:
    facts.every_kind()
    ledger.take_in(directory, facts.storage)
    ledger.publish(directory)
    plain = "SELECT table_name FROM duckdb_columns() WHERE data_type = 'TIMESTAMP' AND NOT internal"
    assert query(directory, plain) == []
    (row,) = query(directory, "SELECT instant FROM missed_slots")
    assert row["instant"] == minutes(-60)


def test_later_migrations_are_applied_to_an_old_database(facts: Facts, empty: Path) -> None:
    directory = empty
    directory.mkdir(parents=True)
    first = min(ledger.MIGRATIONS.glob("0001*.sql"))
    with duckdb.connect(str(ledger.ledger_file(directory))) as connection:
        connection.execute("CREATE TABLE schema_versions (version INTEGER PRIMARY KEY)")
        connection.execute(first.read_text())
        connection.execute("INSERT INTO schema_versions VALUES (1)")
        connection.execute("INSERT INTO cancels VALUES ('kept', now())")
    facts.spec()
    assert ledger.take_in(directory, facts.storage).new == 1
    assert query(directory, "SELECT job FROM cancels") == [{"job": "kept"}]
    assert query(directory, "SELECT state FROM jobs") == [{"state": "queued"}]
    versions = sorted(int(path.name[:4]) for path in ledger.MIGRATIONS.glob("*.sql"))
    assert query(directory, "FROM schema_versions ORDER BY 1") == [{"version": n} for n in versions]


def test_a_database_of_a_later_version_is_left_alone(directory: Path) -> None:
    with ledger.open_ledger(directory) as connection:
        connection.execute("INSERT INTO schema_versions VALUES (999)")
    with (
        pytest.raises(ledger.LedgerError, match=r"has schema 999, this version knows \d+: upgrade Slotwise"),
        ledger.open_ledger(directory),
    ):
        pass


def test_a_damaged_database_is_said_to_be_and_rebuilt(facts: Facts, directory: Path) -> None:
    facts.spec()
    ledger.take_in(directory, facts.storage)
    ledger.ledger_file(directory).write_bytes(b"not a database" * 1000)
    with pytest.raises(ledger.LedgerError, match=r"ledger rebuild. makes it anew from the facts"):
        ledger.take_in(directory, facts.storage)
    ledger.rebuild(directory, facts.storage)
    assert query(directory, "SELECT state FROM jobs") == [{"state": "queued"}]


def run(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


WRITER = """
import sys
from pathlib import Path
from tasks import ledger
from tasks.storage import open_storage
from tests.tasks.worked_hours import Facts, HOUR
directory, storage, name, count = Path(sys.argv[1]), open_storage(sys.argv[2]), sys.argv[3], int(sys.argv[4])
facts = Facts(storage)
new = 0
for number in range(count):
    facts.spec(f"{name}-{number}")
    new += ledger.take_in(directory, storage, HOUR.date()).new
    if len(sys.argv) > 5:
        ledger.publish(directory)
print(new)
"""
READER = """
import sys, duckdb
file, done = sys.argv[1:]
reads = most = 0
import pathlib
while not pathlib.Path(done).exists() or not reads:
    with duckdb.connect(file, read_only=True) as connection:
        jobs, = connection.execute("SELECT count(*) FROM jobs").fetchone()
        facts, = connection.execute("SELECT count(*) FROM facts").fetchone()
    assert jobs == facts >= most, (jobs, facts, most)
    most = jobs
    reads += 1
print(reads, most)
"""


def test_readers_of_the_published_copy_see_no_error_while_it_is_replaced(
    facts: Facts, directory: Path, tmp_path: Path
) -> None:
    facts.spec("first")
    ledger.take_in(directory, facts.storage, TODAY)
    ledger.publish(directory)
    done = tmp_path / "done"
    readers = [run(READER, ledger.published_file(directory), done) for _ in range(2)]
    writer = run(WRITER, directory, facts.storage.root, "w", 8, "publish")
    try:
        assert finish(writer) == "8\n"
    finally:
        done.touch()
    for reader in readers:
        reads, most = map(int, finish(reader).split())
        assert reads >= 1
        assert most <= 9


def test_two_processes_that_take_in_at_once_lose_nothing(facts: Facts, directory: Path) -> None:
    writers = [run(WRITER, directory, facts.storage.root, name, 6) for name in ("x", "y")]
    taken = [int(finish(writer)) for writer in writers]
    assert sum(taken) == 12
    assert query(directory, "SELECT count(*) AS n, count(DISTINCT job) AS jobs FROM specs") == [
        {"n": 12, "jobs": 12}
    ]
    assert ledger.verify(directory, facts.storage) == []


KILLED = """
import sys
from pathlib import Path
from tasks import ledger
from tasks.storage import open_storage
real = ledger._insert_rows
def insert(connection, facts):
    real(connection, facts)
    print("inserted", flush=True)
    sys.stdin.read()
ledger._insert_rows = insert
ledger.take_in(Path(sys.argv[1]), open_storage(sys.argv[2]))
"""


def test_a_process_killed_while_it_takes_in_leaves_all_or_nothing(facts: Facts, directory: Path) -> None:
    facts.spec("before")
    ledger.take_in(directory, facts.storage)
    facts.spec("after")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(directory), facts.storage.root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "inserted\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert query(directory, "SELECT job FROM specs") == [{"job": "before"}]
    assert ledger.take_in(directory, facts.storage).new == 1


SCRIBBLER = """
import os, sys, duckdb
connection = duckdb.connect(sys.argv[1])
connection.execute("CREATE TABLE notes AS SELECT 1 AS a")
os._exit(0)  # without a checkpoint: the table is in a log beside the file
"""


def test_what_people_wrote_into_the_copy_does_not_outlive_it(facts: Facts, directory: Path) -> None:
    facts.spec()
    ledger.take_in(directory, facts.storage)
    copy = ledger.publish(directory)
    finish(run(SCRIBBLER, copy))
    assert copy.with_name(f"{copy.name}.wal").exists()
    facts.spec("b")
    ledger.take_in(directory, facts.storage)
    ledger.publish(directory)
    assert len(contents(copy)["specs"]) == 2
    assert "notes" not in contents(copy)


def test_a_reader_keeps_what_it_has_open(facts: Facts, directory: Path) -> None:
    facts.spec()
    ledger.take_in(directory, facts.storage)
    copy = ledger.publish(directory)
    with duckdb.connect(str(copy), read_only=True) as connection:
        facts.spec("b")
        ledger.take_in(directory, facts.storage)
        ledger.publish(directory)
        assert connection.execute("SELECT count(*) FROM jobs").fetchall() == [(1,)]
