"""The inbox: every file becomes one job or one rejection, whatever dies in between."""

import json
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tasks import ledger
from tasks.cluster import Site
from tasks.facts import fact_keys, read_json
from tasks.inbox import (
    Received,
    cancel_requested,
    request_cancel,
    take_cancels,
    take_recurring,
    take_specs,
)
from tasks.instants import text
from tasks.specfile import SpecError
from tasks.storage import Storage, StorageError

NOW = datetime(2026, 12, 1, 6, 20, tzinfo=UTC)
SPEC = b"kind: training\ngpus: 2\npriority: 5\nduration: 3h\ncommand: [ls]\n"


def named(name: str) -> bytes:
    return b"id: " + name.encode() + b"\n" + SPEC


def known(site: Site) -> dict[str, str]:
    """What the ledger would say: ids and hashes of what was taken in."""
    facts = [read_json(site.storage, key) for key in fact_keys(site.storage) if "/spec/" in key]
    return {fact["job"]: fact["sha256"] for fact in facts}


def specs(site: Site) -> list[str]:
    return sorted(known(site))


def take(site: Site, now: datetime = NOW) -> Received:
    return take_specs(site, known(site), now)


def test_no_file_leaves_the_inbox_before_the_disk_has_all_facts(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        site.storage.write(f"inbox/{name}.yaml", named(name))

    def breaks(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError("no power")

    monkeypatch.setattr(os, "fsync", breaks)
    with pytest.raises(StorageError, match="no power"):
        take(site)
    assert len(site.storage.keys("inbox/")) == 3
    monkeypatch.undo()
    assert take(site).jobs == ("a", "b", "c")
    assert site.storage.keys("inbox/") == []


def test_a_file_becomes_a_job_and_leaves_the_inbox(site: Site) -> None:
    site.storage.write("inbox/nightly.yaml", named("nightly"))
    assert take(site) == Received(jobs=("nightly",))
    assert site.storage.keys("inbox/") == []
    fact = read_json(site.storage, "facts/2026-12-01/spec/nightly.json")
    assert (fact["job"], fact["value"], fact["source"], fact["release"]) == (
        "nightly",
        30,
        "nightly.yaml",
        text(NOW),
    )
    assert fact["spec"]["command"] == ["ls"]


def test_what_is_taken_in_can_go_into_the_ledger(site: Site) -> None:
    site.storage.write("inbox/a.yaml", SPEC + b"id: a\ndeadline: 2026-12-03\ngpu_types: [cpu]\ntenant: x\n")
    site.storage.write("inbox/bad.yaml", b"id: b\n")
    request_cancel(site.storage, "a", "someone", NOW)
    take(site)
    take_cancels(site, {"a": "queued"}, set(), NOW)
    assert ledger.take_in(site.state, site.storage) == ledger.TakenIn(3, ())
    with ledger.open_ledger(site.state) as connection:
        assert ledger.rows(connection, "SELECT job, state FROM jobs") == [{"job": "a", "state": "cancelled"}]
        assert ledger.rows(connection, "SELECT source FROM rejections") == [{"source": "bad.yaml"}]


def test_a_job_without_an_id_is_named_after_its_file(site: Site) -> None:
    site.storage.write("inbox/one.yaml", SPEC)
    site.storage.write("inbox/two.yaml", SPEC)
    jobs = take(site).jobs
    assert len(set(jobs)) == 2
    assert all(job.startswith("training-") for job in jobs)


def test_it_may_start_only_after_not_before(site: Site) -> None:
    site.storage.write("inbox/a.yaml", named("later") + b"not_before: 2026-12-02T00:00Z\n")
    site.storage.write("inbox/b.yaml", named("long-since") + b"not_before: 2026-01-01T00:00Z\n")
    take(site)
    release = {key: read_json(site.storage, key)["release"] for key in fact_keys(site.storage)}
    assert list(release.values()) == ["2026-12-02T00:00:00Z", text(NOW)]


def test_a_bad_file_lies_beside_its_text_and_the_rest_go_on(site: Site) -> None:
    bad = named("bad").replace(b"gpus", b"gpu")
    site.storage.write("inbox/1-bad.yaml", bad)
    site.storage.write("inbox/2-good.yaml", named("good"))
    assert take(site) == Received(jobs=("good",), rejected=("1-bad.yaml",))
    assert site.storage.keys("inbox/") == []
    assert site.storage.read("rejected/1-bad.yaml") == bad
    told = site.storage.read("rejected/1-bad.yaml.error.txt").decode()
    assert told == "1-bad.yaml:3: gpu: unknown key; did you mean gpus?\n"
    (fact,) = [read_json(site.storage, key) for key in fact_keys(site.storage) if "/rejected/" in key]
    assert (fact["source"], fact["error"] + "\n") == ("1-bad.yaml", told)


HOSTILE = {
    "binary": b"\x00\xff\xfe",
    "empty": b"",
    "nested": b"training: " + b"[" * 5000,
    "not a number": named("x").replace(b"command: [ls]", b"training: {lr: .nan}"),
    "half a character": named("x").replace(b"[ls]", b'["\\ud800"]'),
    "a flood of time": named("x").replace(b"3h", b"99999999999d"),
    "a tag": b"!!python/object/apply:os.system [ls]",
    "bytes": named("x").replace(b"command: [ls]", b"training: {data: !!binary aGVsbG8=}"),
    "a set": named("x").replace(b"command: [ls]", b"training: {data: !!set {a, b}}"),
    "a torn tag": named("x").replace(b"3h", b"!!timestamp soon"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_rejected_and_the_rest_go_on(site: Site, case: str) -> None:
    site.storage.write("inbox/1.yaml", HOSTILE[case])
    os.utime(Path(site.storage.root) / "inbox" / "1.yaml", (0, 0))
    site.storage.write("inbox/2.yaml", named("good"))
    assert take(site) == Received(jobs=("good",), rejected=("1.yaml",))
    assert site.storage.keys("rejected/") == ["rejected/1.yaml", "rejected/1.yaml.error.txt"]


def test_names_of_any_kind_can_be_rejected(site: Site) -> None:
    names = ["a b.yaml", "sub/deep/x.yaml", "n" * 250, "日本" * 40, "-rf", "x.yaml.error.txt"]
    for name in names:
        site.storage.write(f"inbox/{name}", b"bad")
    received = take(site)
    assert (sorted(received.rejected), received.unread) == (sorted(names), ())
    assert site.storage.keys("inbox/") == []
    sources = {read_json(site.storage, key)["source"] for key in fact_keys(site.storage)}
    assert sources == set(names)
    assert len(site.storage.keys("rejected/")) == 2 * len(names)


def test_two_bad_files_of_one_name_are_both_kept(site: Site) -> None:
    for content in (b"first", b"second"):
        site.storage.write("inbox/x.yaml", content)
        take(site)
    kept = [key for key in site.storage.keys("rejected/") if not key.endswith(".error.txt")]
    assert sorted(site.storage.read(key) for key in kept) == [b"first", b"second"]
    assert len(site.storage.keys("rejected/")) == 4


class Dying(BaseException):
    """The process is gone."""


class Mortal:
    """Storage of a process that dies before its n-th change."""

    def __init__(self, storage: Storage, changes: int) -> None:
        self.storage, self.root, self.left = storage, storage.root, changes

    def _change(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Dying

    def write(self, key: str, data: bytes) -> None:
        self._change()
        self.storage.write(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._change()
        return self.storage.create(key, data)

    def delete(self, key: str) -> None:
        self._change()
        self.storage.delete(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)


@pytest.mark.parametrize("remembers", [True, False], ids=["known to the ledger", "not yet known"])
def test_a_death_between_any_two_steps_loses_nothing_and_doubles_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, remembers: bool
) -> None:
    storage = site.storage
    deaths = 0
    for changes in range(20):
        for key in storage.keys(""):
            storage.delete(key)
        storage.write("inbox/a.yaml", named("a"))
        storage.write("inbox/b.yaml", b"bad")
        storage.write("inbox/c.yaml", SPEC)
        with monkeypatch.context() as patched:
            patched.setattr(Site, "storage", Mortal(storage, changes))
            try:
                take(site)
            except Dying:
                deaths += 1
        take_specs(site, known(site) if remembers else {}, NOW + timedelta(minutes=1))
        assert storage.keys("inbox/") == []
        assert storage.keys("rejected/") == ["rejected/b.yaml", "rejected/b.yaml.error.txt"]
        assert len(specs(site)) == 2
        assert len(fact_keys(storage)) == 3
    assert deaths == 8  # one for each change; the rest of the rounds lived


def test_an_id_is_given_once(site: Site) -> None:
    site.storage.write("inbox/a.yaml", named("same"))
    site.storage.write("inbox/b.yaml", named("same") + b"max_attempts: 1\n")
    assert take(site) == Received(jobs=("same",), rejected=("b.yaml",))
    told = site.storage.read("rejected/b.yaml.error.txt").decode()
    assert told == "b.yaml: id: same is taken by an earlier job; use another id\n"
    site.storage.write("inbox/c.yaml", named("same"))
    assert take(site, NOW + timedelta(days=3)).rejected == ("c.yaml",)
    assert len(specs(site)) == 1


def test_the_same_file_left_twice_is_one_job(site: Site) -> None:
    for day in range(3):
        site.storage.write("inbox/a.yaml", named("a"))
        assert take(site, NOW + timedelta(days=day)) == Received(jobs=("a",))
    assert len(fact_keys(site.storage)) == 1
    assert site.storage.keys("inbox/") == []


class Refusing(Mortal):
    """Storage that does not give out one of its objects."""

    def read(self, key: str, most: int | None = None) -> bytes:
        if key.endswith("locked.yaml"):
            raise StorageError("locked.yaml: permission denied")
        return self.storage.read(key)


def test_a_file_that_cannot_be_read_stays_and_the_rest_go_on(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = site.storage
    storage.write("inbox/locked.yaml", named("locked"))
    storage.write("inbox/open.yaml", named("open"))
    monkeypatch.setattr(Site, "storage", Refusing(storage, 100))
    received = take_specs(site, {}, NOW)
    assert received == Received(jobs=("open",), unread=(("locked.yaml", "locked.yaml: permission denied"),))
    assert storage.keys("inbox/") == ["inbox/locked.yaml"]


class Replacing(Mortal):
    """Storage in which someone puts another file under a name right after its first one was read."""

    def read(self, key: str, most: int | None = None) -> bytes:
        content = self.storage.read(key)
        if key.endswith("a.yaml") and b"first" in content:
            self.storage.write(key, named("second"))
        return content


def test_a_file_that_is_replaced_while_it_is_taken_in_is_taken_in_next(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = site.storage
    storage.write("inbox/a.yaml", named("first"))
    with monkeypatch.context() as patched:
        patched.setattr(Site, "storage", Replacing(storage, 100))
        assert take_specs(site, {}, NOW).jobs == ("first",)
    assert take(site).jobs == ("second",)
    assert storage.keys("inbox/") == []


def test_a_file_that_was_opened_and_not_written_yet_is_left_until_it_is(site: Site) -> None:
    site.storage.write("inbox/a.yaml", b"")
    assert take(site) == Received()
    path = Path(site.storage.root) / "inbox" / "a.yaml"
    os.utime(path, (0, 0))  # nobody wrote into it for long
    assert take(site) == Received(rejected=("a.yaml",))
    assert site.storage.keys("inbox/") == []


def template(site: Site, schedule: str, last: datetime) -> dict[str, Any]:
    """A recurring job as the ledger knows it."""
    site.storage.write("inbox/series.yaml", named("series") + f"schedule: '{schedule}'\n".encode())
    take(site)
    fact = read_json(site.storage, "facts/2026-12-01/spec/series.json")
    assert fact["schedule"] == schedule
    row = {name: fact[name] for name in ("job", "schedule", "sha256", "source")}
    return {**row, "spec": json.dumps(fact["spec"]), "last": last}


def test_each_occurrence_becomes_one_job(site: Site) -> None:
    row = template(site, "0 */6 * * *", NOW)
    made = take_recurring(site, [row], NOW)
    assert made == tuple(
        f"series@2026-12-{day}T{hour}:00Z"
        for day, hour in (("01", 12), ("01", 18), ("02", "00"), ("02", "06"))
    )
    assert take_recurring(site, [row], NOW) == ()  # the ledger did not learn of them: still once
    assert take_recurring(site, [{**row, "last": NOW + timedelta(hours=24)}], NOW + timedelta(hours=6)) == (
        "series@2026-12-02T12:00Z",
    )
    fact = read_json(site.storage, "facts/2026-12-02/spec/series@2026-12-02T00:00Z.json")
    assert (fact["template"], fact["schedule"], fact["release"]) == ("series", None, "2026-12-02T00:00:00Z")
    assert fact["value"] == 30


def test_occurrences_that_an_outage_missed_are_caught_up_with(site: Site) -> None:
    row = template(site, "0 6 * * *", NOW - timedelta(days=3, hours=6))
    made = take_recurring(site, [row], NOW)
    assert [name[-17:-7] for name in made] == [
        "2026-11-28",
        "2026-11-29",
        "2026-11-30",
        "2026-12-01",
        "2026-12-02",
    ]


def test_one_recurring_job_that_cannot_be_read_does_not_stop_the_others(site: Site) -> None:
    row = template(site, "0 6 * * *", NOW)
    with pytest.raises(SpecError, match="broken: its spec cannot be read: Field required"):
        take_recurring(site, [{**row, "job": "broken", "spec": "{}"}, row], NOW)
    assert specs(site) == ["series", "series@2026-12-02T06:00Z"]


def test_a_cancel_request_becomes_a_fact_and_stays_until_the_job_has_ended(site: Site) -> None:
    assert request_cancel(site.storage, "a", "someone", NOW)
    assert not request_cancel(site.storage, "a", "someone else", NOW)
    assert take_cancels(site, {"a": "running"}, set(), NOW) == ("a",)
    assert take_cancels(site, {"a": "running"}, {"a"}, NOW + timedelta(minutes=1)) == ()
    assert cancel_requested(site.storage, "a")
    assert take_cancels(site, {"a": "cancelled"}, {"a"}, NOW + timedelta(minutes=2)) == ()
    assert not cancel_requested(site.storage, "a")
    assert len(fact_keys(site.storage)) == 1


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled", "expired", "recurring"])
def test_a_request_for_what_no_runner_watches_is_cleared(site: Site, state: str) -> None:
    request_cancel(site.storage, "a", "someone", NOW)
    assert take_cancels(site, {"a": state}, set(), NOW) == ("a",)
    assert site.storage.keys("cancel/") == []


def test_an_empty_file_is_a_cancel_request_too(site: Site) -> None:
    site.storage.write("cancel/a.json", b"")
    assert cancel_requested(site.storage, "a")
    assert take_cancels(site, {"a": "running"}, set(), NOW) == ("a",)


def test_cancelling_an_unknown_job_is_rejected_and_the_rest_go_on(site: Site) -> None:
    for name in ("a", "nobody", "sub/nobody"):
        request_cancel(site.storage, name, "someone", NOW)
    assert take_cancels(site, {"a": "running"}, set(), NOW) == ("a",)
    assert site.storage.keys("cancel/") == ["cancel/a.json"]
    assert site.storage.read("rejected/cancel-nobody.json.error.txt") == b"cancel: there is no job nobody\n"
