"""The cache of S3 objects: fetched once, kept while used, never above its limit."""

import os
import random
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


ASKING = """
import random, sys, time
from tasks import object_cache
from tasks.storage import open_storage
storage, draw = open_storage(sys.argv[1]), random.Random(sys.argv[2])
for turn in range(int(sys.argv[3])):
    held = {}
    for name in draw.sample("abcdef", 2):
        found = object_cache.cached(storage, name)
        if found is not None:
            held[name] = found
        print(f"{name} {turn}", flush=True)
    time.sleep(draw.random() / 200)
    for name, path in held.items():
        assert path.read_bytes() == name.encode() * 4000, name
    for lock in object_cache._held.values():
        lock.close()  # as if this process had ended, and another one begun
    object_cache._held.clear()
"""


def asking(root: str, seed: str, turns: int) -> "subprocess.Popen[str]":
    """A process that uses objects, two at a time, of which three have room in the cache."""
    command = [sys.executable, "-c", ASKING, root, seed, str(turns)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("kills", "turns"), [pytest.param(1, 25), pytest.param(10, 150, marks=pytest.mark.long)]
)
def test_processes_that_evict_and_are_killed_leave_each_other_what_they_use(
    storage: S3Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, turns: int
) -> None:
    monkeypatch.setenv("SLOTWISE_CACHE_GB", str(13 * KB / 1e9))
    for name in "abcdef":
        storage.write(name, name.encode() * 4 * KB)
    draw = random.Random(kills)
    going = [asking(storage.root, f"stays {place}", turns) for place in range(2)]
    try:
        for kill in range(kills):
            victim = asking(storage.root, f"dies {kill}", 1_000_000)
            going.append(victim)
            assert victim.stdout
            for _ in range(draw.randint(1, 12)):
                victim.stdout.readline()
            victim.kill()
            victim.communicate()
            assert victim.returncode == -9
            assert kept(tmp_path) <= 13 * KB
        for process in going[:2]:
            _, said = process.communicate(timeout=200)
            assert process.returncode == 0, said
    finally:
        for process in going:
            process.kill()
            process.communicate()
    assert kept(tmp_path) <= 13 * KB
    assert cached(storage, "a") is not None
    assert not list((tmp_path / "cache").glob("gone-*"))


def test_what_died_while_it_removed_an_entry_takes_no_room(storage: S3Storage, tmp_path: Path) -> None:
    left = tmp_path / "cache" / "gone-1"
    left.mkdir(parents=True)
    (left / "object").write_bytes(b"?")
    (left / "bytes").write_text(str(9 * KB))
    storage.write("a", b"x" * 5 * KB)
    assert cached(storage, "a") is not None
    assert not left.exists()
