"""Objects of S3 on this machine's disk, shared by all jobs on it, within a limit.

Invariant: an object is fetched once however many processes ask for it at a time; what a process was given
stays as it is while that process lives (a shared file lock that dies with it says so); and fetched objects
together never take more than the limit, the ones longest unused going first. An object that finds no room
is not kept: its caller gets a copy of its own. The cost: whoever asks first makes the others wait.

The directory is `SLOTWISE_CACHE` (default: `slotwise/objects` in the user's cache), the limit
`SLOTWISE_CACHE_GB` (default: 200, and at most half of the disk).
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tasks.s3 import S3Storage, Version
from tasks.storage import StorageError

DEFAULT_GB = 200.0
OBJECT, PART, LOCK, SIZE = "object", "part", "lock", "bytes"
GONE = "gone-"  # prefix of an entry that is being removed
_held: dict[Path, IO[str]] = {}  # entries that this process uses, until it ends


def cached(storage: S3Storage, key: str) -> Path | None:
    """A file on this machine with the object's bytes as they are now; None when the cache has no room.

    Raises NotFoundError, or StorageError when the object cannot be fetched or the settings are wrong.
    """
    directory, limit = _directory(), _limit()
    version = storage.version(key)
    named = f"{storage.root}\n{key}\n{version.etag}\n{version.bytes}"
    entry = directory / hashlib.sha256(named.encode()).hexdigest()[:32]
    if entry in _held:
        return entry / OBJECT
    try:
        return _entered(storage, key, version, entry, limit) if version.bytes <= limit else None
    except OSError as error:
        raise StorageError(f"cache: {directory}: {error.strerror or error}") from error


def _entered(storage: S3Storage, key: str, version: Version, entry: Path, limit: float) -> Path | None:
    while True:
        entry.mkdir(parents=True, exist_ok=True)
        try:
            lock = (entry / LOCK).open("a")
        except FileNotFoundError:  # evicted this very moment
            continue
        keep = False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)  # waits while another process fetches it
            if _is_current(lock, entry) and not (entry / OBJECT).exists():
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_current(lock, entry):
                    continue
                if not (entry / OBJECT).exists():
                    if not _reserved(entry, version.bytes, limit):
                        return None
                    storage.fetch(key, version, entry / OBJECT, entry / PART)
                fcntl.flock(lock, fcntl.LOCK_SH)  # not in one step: it may be evicted before
            if _is_current(lock, entry) and (entry / OBJECT).exists():
                os.utime(lock.fileno())
                keep = True
                _held[entry] = lock
                return entry / OBJECT
        finally:
            if not keep:
                lock.close()


def _reserved(entry: Path, size: int, limit: float) -> bool:
    """Whether there is room for an entry, which counts from now on; removes others that nobody uses."""
    with (entry.parent / LOCK).open("a") as everyone:
        fcntl.flock(everyone, fcntl.LOCK_EX)
        for left in entry.parent.glob(f"{GONE}*"):  # who removed it died over that
            shutil.rmtree(left, ignore_errors=True)
        known = {other: _bytes(other) for other in _entries(entry.parent) if other != entry}
        total = sum(known.values())
        for other in sorted(known, key=_used):
            if total + size <= limit:
                break
            if _evicted(other):
                total -= known[other]
        if total + size > limit:
            return False
        (entry / SIZE).write_text(str(size))
        return True


def _evicted(entry: Path) -> bool:
    """Remove an entry unless a process uses or fetches it.

    It goes by its name first, with all that is in it: else somebody could make the lock anew while files are
    deleted, and be given one of them.
    """
    try:
        with (entry / LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if _is_current(lock, entry):
                gone = entry.rename(entry.with_name(f"{GONE}{entry.name}"))
                shutil.rmtree(gone, ignore_errors=True)
    except FileNotFoundError:
        pass
    return not entry.exists()


def _is_current(lock: IO[str], entry: Path) -> bool:
    """Whether the lock is still the entry's: whoever waited for it may hold that of one that was removed."""
    try:
        return os.fstat(lock.fileno()).st_ino == (entry / LOCK).stat().st_ino
    except FileNotFoundError:
        return False


def _entries(directory: Path) -> Iterator[Path]:
    return (path for path in directory.iterdir() if path.is_dir() and not path.name.startswith(GONE))


def _bytes(entry: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((entry / SIZE).read_text())
    return 0


def _used(entry: Path) -> float:
    with contextlib.suppress(OSError):
        return (entry / LOCK).stat().st_mtime
    return 0.0


def _directory() -> Path:
    if given := os.environ.get("SLOTWISE_CACHE"):
        return Path(given).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slotwise" / "objects"


def _limit() -> float:
    """Bytes that the cache may hold."""
    given = os.environ.get("SLOTWISE_CACHE_GB")
    try:
        wanted = float(given) * 1e9 if given else DEFAULT_GB * 1e9
    except ValueError:
        raise StorageError(f"SLOTWISE_CACHE_GB: {given!r}: expected a number of gigabytes") from None
    if given:
        return wanted
    directory = _directory()
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        return min(wanted, shutil.disk_usage(directory).total / 2)
    return wanted
