"""Years of facts: packed, all kept, and never one that somebody may still ask for."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest

from tasks import ledger, upkeep
from tasks.cluster import Site
from tasks.collect import ledger_directory
from tasks.facts import FactError, fact_key, fact_keys, write_fact
from tasks.instants import text
from tasks.packs import is_packed, pack, pack_keys, read_pack
from tasks.storage import DirectoryStorage, NotFoundError
from tests.conftest import make_site
from tests.tasks import worked_hours
from tests.tasks.planned_hours import ask
from tests.tasks.worked_hours import HOUR, Facts

LATER = HOUR + timedelta(days=10)


@pytest.fixture
def worked(site: Site, monkeypatch: pytest.MonkeyPatch) -> Facts:
    """A day with a bit of everything: job `a` is over, `b` still holds GPUs."""
    monkeypatch.setattr(upkeep, "WORTH_PACKING", 1)
    facts = Facts(site.storage)
    facts.every_kind()
    ledger.take_in(ledger_directory(site), site.storage)
    return facts


def rows(site: Site) -> dict[str, list[str]]:
    tables = [row["table_name"] for row in ask(site, "SELECT table_name FROM duckdb_tables()")]
    return {
        table: sorted(map(repr, ask(site, f"FROM {table}")))
        for table in tables
        if table not in ("packs", "details", *ledger.DETAILS)
    }


def test_facts_of_a_day_that_is_over_are_packed_and_the_ledger_is_the_same_made_from_them(
    site: Site, worked: Facts
) -> None:
    before, loose = rows(site), fact_keys(site.storage)
    done = upkeep.upkeep(site, LATER)
    assert done is not None and done.done and done.packed > 10
    assert len(fact_keys(site.storage)) == len(loose) - done.packed
    assert rows(site) == before
    assert ledger.verify(ledger_directory(site), site.storage) == []
    ledger.rebuild(ledger_directory(site), site.storage)
    assert rows(site) == before
    assert ledger.verify(ledger_directory(site), site.storage) == []


def test_what_may_still_be_asked_for_by_its_key_stays(site: Site, worked: Facts) -> None:
    upkeep.upkeep(site, LATER)
    left = fact_keys(site.storage)
    assert "facts/2026-12-01/spec/b.json" in left  # a job that is not over
    assert "facts/2026-12-01/spec/series.json" in left  # a recurring one
    assert any("/started/b/" in key for key in left)
    committed = {row["key"] for row in ask(site, "SELECT key FROM ranks WHERE outcome IS NULL")}
    assert committed and committed <= set(left)
    assert "facts/2026-12-01/spec/a.json" not in left


def test_a_deadline_has_passed_by_the_control_machines_clock_not_the_databases(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = HOUR.replace(year=2001)
    monkeypatch.setattr(worked_hours, "HOUR", begin)
    monkeypatch.setattr(upkeep, "WORTH_PACKING", 1)
    Facts(site.storage).spec("over", deadline=text(begin + timedelta(days=1)))
    open_spec = Facts(site.storage).spec("open", deadline=text(begin + timedelta(days=30)))
    ledger.take_in(ledger_directory(site), site.storage)
    assert {row["state"] for row in ask(site, "SELECT state FROM jobs")} == {"expired"}
    upkeep.upkeep(site, begin + timedelta(days=10))
    assert fact_keys(site.storage) == [open_spec]


def test_days_that_are_not_old_enough_stay_loose(site: Site, worked: Facts) -> None:
    loose = fact_keys(site.storage)
    upkeep.upkeep(site, HOUR + timedelta(days=7))
    assert fact_keys(site.storage) == loose


def test_upkeep_is_done_once_a_day(site: Site, worked: Facts) -> None:
    assert upkeep.upkeep(site, LATER) is not None
    assert upkeep.upkeep(site, LATER) is None
    assert upkeep.upkeep(site, LATER + timedelta(days=1)) is not None


def test_a_fact_that_the_ledger_does_not_know_is_not_packed(site: Site, worked: Facts) -> None:
    late = fact_key("cancel", HOUR, "late")
    write_fact(site.storage, late, HOUR, {"job": "late"})
    upkeep.upkeep(site, LATER)
    assert late in fact_keys(site.storage)


class Dying:
    """Storage whose user dies after some deletions."""

    def __init__(self, storage: DirectoryStorage, left: int) -> None:
        self.storage, self.root, self.left = storage, storage.root, left

    def delete(self, key: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        self.storage.delete(key)

    def __getattr__(self, name: str) -> object:
        return getattr(self.storage, name)


@pytest.mark.parametrize("deleted", [0, 3])
def test_a_death_while_packing_loses_and_doubles_nothing(site: Site, worked: Facts, deleted: int) -> None:
    before = rows(site)
    keys = [key for key in fact_keys(site.storage) if "/demand/" in key or "/node/" in key]
    assert isinstance(site.storage, DirectoryStorage)
    with pytest.raises(KeyboardInterrupt):
        pack(Dying(site.storage, deleted), HOUR.date(), keys)  # type: ignore[arg-type]
    ledger.take_in(ledger_directory(site), site.storage)
    assert rows(site) == before
    upkeep.upkeep(site, LATER)
    assert rows(site) == before
    ledger.rebuild(ledger_directory(site), site.storage)
    assert rows(site) == before


def test_a_claim_that_was_packed_counts_as_taken(site: Site, worked: Facts) -> None:
    claim = "facts/2026-12-01/started/a/1/0.json"
    assert not is_packed(site.storage, claim)
    upkeep.upkeep(site, LATER)
    assert claim not in fact_keys(site.storage)
    assert is_packed(site.storage, claim)
    assert not is_packed(site.storage, "facts/2026-12-01/started/a/9/0.json")


@pytest.mark.parametrize("content", [b"", b"not gzip", b"\x1f\x8b\x08\x00half"])
def test_a_pack_that_cannot_be_read_is_told_and_stops_nothing(
    site: Site, worked: Facts, content: bytes
) -> None:
    site.storage.write("packs/2026-12-01/bad.jsonl.gz", content)
    if content:
        with pytest.raises(FactError, match=r"bad\.jsonl\.gz: not a pack"):
            list(read_pack(site.storage, "packs/2026-12-01/bad.jsonl.gz"))
        taken = ledger.take_in(ledger_directory(site), site.storage)
        assert "bad.jsonl.gz" in taken.bad[0]
    assert upkeep.upkeep(site, LATER) is not None


def test_details_are_forgotten_after_their_time_and_plans_with_them(tmp_path: Path) -> None:
    site = make_site(tmp_path, keep_details_days=20)
    facts = Facts(site.storage)
    facts.every_kind()
    site.storage.write("plans/2026-12-01/x.json", b"{}")
    ledger.take_in(ledger_directory(site), site.storage)
    assert ask(site, "FROM forecasts") and ask(site, "FROM planned_jobs")
    upkeep.upkeep(site, HOUR + timedelta(days=20))
    assert ask(site, "FROM forecasts")
    upkeep.upkeep(site, HOUR + timedelta(days=22))
    assert ask(site, "FROM forecasts") == ask(site, "FROM planned_jobs") == []
    assert ask(site, "FROM plans")
    with pytest.raises(NotFoundError):
        site.storage.read("plans/2026-12-01/x.json")
    assert ledger.verify(ledger_directory(site), site.storage) == []
    ledger.rebuild(ledger_directory(site), site.storage)
    assert ask(site, "FROM forecasts") == []


def test_files_whose_writers_died_are_removed_once_they_are_old(site: Site, worked: Facts) -> None:
    old, young = (Path(site.storage.root) / f".tmp-{age}" for age in ("old", "young"))
    for file in (old, young):
        file.write_bytes(b"half")
    model = Path(site.storage.root) / "outputs" / ".tmp-model"
    model.mkdir(parents=True)
    (model / "config.json").write_bytes(b"{}")
    for path in (old, model):
        os.utime(path, (time.time() - 3 * 86_400,) * 2)
    done = upkeep.upkeep(site, LATER)
    assert done is not None and done.abandoned == 2
    assert young.exists() and not old.exists() and not model.exists()


def test_more_days_than_one_call_takes_are_left_for_the_next(
    site: Site, worked: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for day in range(3):
        instant = HOUR - timedelta(days=day + 1)
        write_fact(site.storage, fact_key("cancel", instant, "x"), instant, {"job": "x"})
    ledger.take_in(ledger_directory(site), site.storage)
    monkeypatch.setattr(upkeep, "DAYS_AT_ONCE", 2)
    first = upkeep.upkeep(site, LATER)
    assert first is not None and not first.done
    assert len(pack_keys(site.storage)) == 2
    second = upkeep.upkeep(site, LATER)
    assert second is not None and second.done
    assert len(pack_keys(site.storage)) == 4
