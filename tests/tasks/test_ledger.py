"""The ledger: the same rows from the same facts in any order, bad ones set aside, old files brought up."""

import json
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
from tests.tasks.ledgers import contents, query
from tests.tasks.ledgers import directory as directory
from tests.tasks.ledgers import empty as empty
from tests.tasks.ledgers import facts as facts
from tests.tasks.ledgers import migrated as migrated
from tests.tasks.ledgers import plain as plain
from tests.tasks.worked_hours import HOUR, Facts, minutes

TODAY = HOUR.date()


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
