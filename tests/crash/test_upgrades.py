"""Facts and a ledger of every earlier schema are today's: read, migrated, made again, and planned on.

The fixtures were made by the versions themselves: a little of everything, and two hours with runs on top.
"""

import gzip
import hashlib
import json
import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from tasks import ledger
from tasks.cluster import Site
from tasks.collect import ledger_directory
from tests.conftest import make_site
from tests.tasks.planned_hours import Runs, answer, ask, plan_hour, states
from tests.tasks.worked_hours import HOUR

FIXTURES = Path(__file__).parents[1] / "fixtures"
VERSIONS = sorted(path.name for path in FIXTURES.glob("schema_*"))
IN_SHORT = ("schema_2", "schema_5", "schema_8")  # the oldest, one that came in two forms, the latest
RELEASED = {  # ledgers were made with these; what changes afterwards is a migration of its own
    "0001_tables.sql": "a010a845a666cd2f",
    "0002_views.sql": "64701755571c77a1",
    "0003_slot_worth.sql": "2a620b0423ad393e",
    "0004_years.sql": "db8bfeb8d07a353a",
    "0005_forecasts.sql": "30c038e4d46f055c",
    "0006_tuned.sql": "cc265ee4eb2a4643",
    "0007_work.sql": "6a60a56b5b259f6b",
    "0008_predictions.sql": "cfbd952a057b828c",
}


@pytest.fixture(
    params=[
        version if version in IN_SHORT else pytest.param(version, marks=pytest.mark.long)
        for version in VERSIONS
    ]
)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    """A site as that version left it."""
    source = FIXTURES / request.param
    site = make_site(tmp_path, full_mode_seconds=0)
    with gzip.open(source / "facts.jsonl.gz") as facts:
        for line in facts:
            key, fact = json.loads(line)
            site.storage.write(key, json.dumps(fact).encode())
    directory = ledger_directory(site)
    directory.mkdir(parents=True)
    ledger.ledger_file(directory).write_bytes(gzip.decompress((source / "ledger.duckdb.gz").read_bytes()))
    return site


def shape(directory: Path) -> list[tuple[object, ...]]:
    with ledger.open_ledger(directory) as connection:
        views = connection.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()
        for (view,) in views:
            connection.execute(f"FROM {view}").fetchall()
        return connection.execute(
            "SELECT table_name, column_name, data_type, comment FROM duckdb_columns() "
            "WHERE NOT internal ORDER BY ALL"
        ).fetchall()


@pytest.fixture(scope="module")
def todays(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[object, ...]]:
    """The shape of a ledger that is made today."""
    return shape(tmp_path_factory.mktemp("new"))


def test_a_migration_that_was_released_is_not_edited() -> None:
    digests = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for file in ledger.MIGRATIONS.glob("[0-9]*.sql")
    }
    assert {name: digests.get(name) for name in RELEASED} == RELEASED


@pytest.mark.parametrize(
    "made",
    [made if made == 1 else pytest.param(made, marks=pytest.mark.long) for made in range(1, len(RELEASED))],
)
def test_a_ledger_whose_migrations_were_cut_short_is_finished(
    tmp_path: Path, todays: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch, made: int
) -> None:
    """Each is a transaction of its own. A ledger of schema 1 comes about in no other way."""
    (tmp_path / "first").mkdir()
    for file in sorted(ledger.MIGRATIONS.glob("[0-9]*.sql"))[:made]:
        shutil.copy(file, tmp_path / "first")
    with monkeypatch.context() as then:
        then.setattr(ledger, "MIGRATIONS", tmp_path / "first")
        with ledger.open_ledger(tmp_path) as connection:
            versions = connection.execute("SELECT max(version) FROM schema_versions").fetchall()
    assert versions == [(made,)]
    assert shape(tmp_path) == todays


def test_an_old_ledger_becomes_one_of_today_and_is_what_the_old_facts_say(
    old: Site, todays: list[tuple[object, ...]]
) -> None:
    directory = ledger_directory(old)
    assert shape(directory) == todays
    assert ledger.verify(directory, old.storage) == []
    assert len(ask(old, "FROM facts")) > 50


def test_a_ledger_made_again_from_old_facts_has_todays_schema_and_the_same_jobs(
    old: Site, todays: list[tuple[object, ...]]
) -> None:
    before = ask(old, "SELECT job, state, attempts, value FROM jobs ORDER BY job")
    taken = ledger.rebuild(ledger_directory(old), old.storage)
    assert taken.bad == ()
    assert shape(ledger_directory(old)) == todays
    assert ask(old, "SELECT job, state, attempts, value FROM jobs ORDER BY job") == before


def test_an_hour_is_planned_on_what_an_earlier_version_left(old: Site) -> None:
    now = HOUR + timedelta(days=1, hours=2)
    answer(old, now)
    done = plan_hour(old, now, Runs())
    assert done.planned
    assert states(old)["real0"] in ("completed", "queued", "committed")
    assert ledger.verify(ledger_directory(old), old.storage) == []
