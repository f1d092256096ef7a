"""The cache of S3 objects: fetched once, kept while used, never above its limit."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks import object_cache
from tasks.object_cache import cached
from tasks.program import Place, local_file
from tasks.s3 import S3Storage
from tasks.storage import NotFoundError, StorageError
from tests.conftest import MakeStorage

KB = 1000


@pytest.fixture
def storage(s3: MakeStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Storage:
    """S3, and a cache of 10 kB of this test's own."""
    monkeypatch.setenv("SLOTWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SLOTWISE_CACHE_GB", str(10 * KB / 1e9))
    monkeypatch.setattr(object_cache, "_held", {})
    made = s3()
    assert isinstance(made, S3Storage)
    return made


def let_go() -> None:
    """As if the process that used the objects so far had ended."""
    for lock in object_cache._held.values():
        lock.close()
    object_cache._held.clear()


def kept(tmp_path: Path) -> int:
    """Bytes of objects in the cache."""
    return sum(path.stat().st_size for path in (tmp_path / "cache").glob("*/object"))


def test_an_object_is_fetched_once(
    storage: S3Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write("a", b"x" * KB)
    first = cached(storage, "a")
    let_go()
    monkeypatch.setattr(S3Storage, "fetch", None)  # would fail if it were called
    assert first is not None
    assert cached(storage, "a") == first
    assert first.read_bytes() == b"x" * KB


def test_an_object_that_was_replaced_is_another_one(storage: S3Storage) -> None:
    storage.write("a", b"old")
    old = cached(storage, "a")
    storage.write("a", b"new")
    new = cached(storage, "a")
    assert old is not None and new is not None
    assert (old.read_bytes(), new.read_bytes()) == (b"old", b"new")


def test_the_object_longest_unused_makes_room(storage: S3Storage, tmp_path: Path) -> None:
    paths = {}
    for turn, name in enumerate("abc"):
        storage.write(name, name.encode() * 4 * KB)
        paths[name] = cached(storage, name)
        let_go()
        if name != "c":
            entry = paths[name]
            assert entry is not None
            os.utime(entry.parent / "lock", (turn, turn))
    assert [path is not None and path.exists() for path in paths.values()] == [False, True, True]
    assert kept(tmp_path) <= 10 * KB


def test_what_is_in_use_stays(storage: S3Storage, tmp_path: Path) -> None:
    storage.write("a", b"a" * 6 * KB)
    storage.write("b", b"b" * 6 * KB)
    used = cached(storage, "a")
    assert cached(storage, "b") is None
    assert used is not None and used.exists()
    let_go()
    assert cached(storage, "b") is not None
    assert not used.exists()


def test_what_finds_no_room_is_copied_for_its_job(storage: S3Storage, tmp_path: Path) -> None:
    storage.write("big", b"x" * 11 * KB)
    found = local_file(Place(storage, "big", "input: 'big'"), tmp_path / "scratch")
    assert not found.is_symlink()
    assert found.read_bytes() == b"x" * 11 * KB
    assert not any((tmp_path / "cache").glob("*/object"))


def test_threads_and_processes_that_ask_at_once_share_one_fetch(storage: S3Storage, tmp_path: Path) -> None:
    storage.write("a", b"x" * 5 * KB)
    code = (
        "import sys\nfrom tasks import s3\nfrom tasks.object_cache import cached\n"
        "from tasks.storage import open_storage\nfetch = s3.S3Storage.fetch\n"
        "def counted(*given):\n    print('fetched', flush=True)\n    fetch(*given)\n"
        "s3.S3Storage.fetch = counted\nfound = cached(open_storage(sys.argv[1]), 'a')\n"
        "assert found.read_bytes() == b'x' * 5000\n"
    )

    def run(_: int) -> str:
        command = [sys.executable, "-c", code, storage.root]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(run, range(3)))
    assert sorted(said) == ["", "", "fetched\n"]


def test_a_damaged_entry_of_a_killed_process_counts_and_can_go(storage: S3Storage, tmp_path: Path) -> None:
    left = tmp_path / "cache" / "left"
    left.mkdir(parents=True)
    (left / "lock").touch()
    (left / "bytes").write_text(str(9 * KB))
    (left / "part").write_bytes(b"?")
    storage.write("a", b"x" * 5 * KB)
    assert cached(storage, "a") is not None
    assert not left.exists()


def test_what_is_not_there_is_not_found(storage: S3Storage) -> None:
    with pytest.raises(NotFoundError, match="no object 'gone'"):
        cached(storage, "gone")


def test_a_limit_that_is_no_number_is_said(storage: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write("a", b"x")
    monkeypatch.setenv("SLOTWISE_CACHE_GB", "lots")
    with pytest.raises(StorageError, match="SLOTWISE_CACHE_GB: 'lots': expected a number of gigabytes"):
        cached(storage, "a")
