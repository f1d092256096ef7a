"""Facts: keys that say what they are, created once, and read back or refused by name."""

from datetime import UTC, date, datetime

import pytest

from tasks.facts import (
    KINDS,
    FactError,
    fact_key,
    fact_keys,
    parse_key,
    read_json,
    write_fact,
    write_json,
)
from tasks.projections import _BY_KIND
from tasks.storage import NotFoundError, Storage

NOW = datetime(2026, 12, 1, 6, 30, tzinfo=UTC)


def test_a_key_names_day_kind_and_subject() -> None:
    key = fact_key("started", NOW, "nightly", 2, 0)
    assert key == "facts/2026-12-01/started/nightly/2/0.json"
    parts = parse_key(key)
    assert (parts.day, parts.kind, parts.name) == (date(2026, 12, 1), "started", "nightly/2/0")
    assert str(parts) == key


ALIEN = [
    "facts/2026-12-01/started/a",
    "facts/2026-12-01/rumour/a.json",
    "facts/2026-12-01/started.json",
    "facts/20261201/started/a.json",
    "facts/2026-13-01/started/a.json",
    "facts/README.json",
    "inbox/2026-12-01/started/a.json",
]


@pytest.mark.parametrize("key", ALIEN)
def test_a_key_that_is_none_of_ours_is_refused_by_name(key: str) -> None:
    with pytest.raises(FactError, match=key):
        parse_key(key)


def test_the_second_writer_of_a_fact_learns_that_it_lost(storage: Storage) -> None:
    key = fact_key("commit", NOW, "x")
    assert write_fact(storage, key, NOW, {"by": "first"})
    assert not write_fact(storage, key, NOW, {"by": "second"})
    assert read_json(storage, key) == {"at": "2026-12-01T06:30:00Z", "by": "first"}


def test_keys_are_listed_by_day(storage: Storage) -> None:
    days = [date(2026, 12, 1), date(2026, 12, 2), date(2026, 12, 12)]
    for day in days:
        write_fact(storage, fact_key("missed", day, "x"), NOW, {})
    assert len(fact_keys(storage)) == 3
    assert fact_keys(storage, days[0]) == ["facts/2026-12-01/missed/x.json"]


BROKEN = {
    b'{"at": "2026': "not JSON",
    b"": "not JSON",
    b"[1, 2]": "expected a JSON object, found list",
    b"\xff\xfe\x00": "not JSON",
    b"[" * 100_000: "not JSON",
}


@pytest.mark.parametrize(("content", "said"), BROKEN.items(), ids=BROKEN.values())
def test_what_cannot_be_read_is_named(storage: Storage, content: bytes, said: str) -> None:
    storage.write("facts/x.json", content)
    with pytest.raises(FactError, match=rf"facts/x\.json: {said}"):
        read_json(storage, "facts/x.json")


def test_an_absent_object_is_not_found(storage: Storage) -> None:
    with pytest.raises(NotFoundError):
        read_json(storage, "facts/x.json")


def test_a_number_that_is_none_is_never_written(storage: Storage) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        write_fact(storage, "facts/x.json", NOW, {"loss": float("nan")})
    assert storage.keys() == []


def test_half_a_character_is_written_as_a_question_mark(storage: Storage) -> None:
    write_json(storage, "lease.json", {"detail": "a\ud800b€"})
    assert read_json(storage, "lease.json") == {"detail": "a?b€"}


def test_every_kind_has_a_projection() -> None:
    assert set(KINDS) == set(_BY_KIND)
