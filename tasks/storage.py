"""Where facts, specs and outputs lie: a directory or an S3 bucket, behind one small interface.

Invariant: whoever lists or reads a key sees a whole object or none. A write replaces the object in one step;
`create` lets exactly one of several writers win. The cost is one temporary file and two fsyncs per write in a
directory (one where many are written together), one request per write in S3.
"""

import contextlib
import contextvars
import errno
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from tasks import faults
from tasks.secrets import redacted

SETTLING_S = 1.0  # for so long after its last change someone may still be writing a file
TEMPORARY = ".tmp-"  # prefix of what is being written, files and directories; never listed
_unsynced: contextvars.ContextVar[set[Path] | None] = contextvars.ContextVar("_unsynced", default=None)
S3_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>.*))?")


class StorageError(Exception):
    """A key or a root that cannot be used; the message names it and what was expected, without secrets."""

    def __init__(self, message: str) -> None:
        super().__init__(redacted(message))


class NotFoundError(StorageError):
    """No object has this key."""


class TooLargeError(StorageError):
    """An object of more bytes than its reader takes."""


class RefusedKeyError(StorageError):
    """A key that could lead out of the storage's root, or cannot be one everywhere."""


UNUSABLE = (RefusedKeyError, TooLargeError)  # of an object that is there and is nothing that we would write


class Storage(Protocol):
    """Objects by key. A key is a relative path with `/` between its parts."""

    root: str

    def read(self, key: str, most: int | None = None) -> bytes:
        """The object's bytes. Raises NotFoundError, and StorageError when there are more than `most`."""

    def write(self, key: str, data: bytes) -> None:
        """Create or replace the object in one step."""

    def create(self, key: str, data: bytes) -> bool:
        """Create the object unless the key exists; True for the one writer that did.

        Over S3 a lost answer is retried, so an existing object with the very same bytes counts as ours:
        a claim that competes with others carries something of its own.
        """

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that begin with `prefix`, sorted.

        Names that are not UTF-8, and what is no object (a pipe, a folder's mark), are not listed.
        """

    def settled(self, key: str) -> bool:
        """Whether it is whole by all appearance: people copy files into a directory piece by piece."""

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens when there is none."""

    def upload(self, key: str, path: Path) -> None:
        """Like `write`, from a file of any size."""

    def download(self, key: str, path: Path) -> None:
        """Write the object to a file, in one step. Raises NotFoundError."""


def open_storage(root: str) -> Storage:
    """The storage at `root`: a directory (`file:DIR`, or a plain path) or `s3://bucket/prefix`.

    Raises StorageError for any other scheme. Credentials and endpoint come from boto3's usual chain.
    """
    if match := S3_URL.fullmatch(root):
        from tasks.s3 import S3Storage

        return S3Storage(match["bucket"], (match["prefix"] or "").strip("/"))
    path = root.removeprefix("file://").removeprefix("file:")
    if "://" in path or not path:
        raise StorageError(f"storage: {root!r} is neither a directory (file:DIR) nor s3://bucket/prefix")
    return DirectoryStorage(Path(path).absolute())


@contextlib.contextmanager
def written_together() -> Iterator[None]:
    """Sync the directories of all that is written meanwhile once, at the end: until then a power cut (no
    other death) may take any of it back, never a part of an object. For facts that are made again from what
    stays until the end has come, not for claims. Raises StorageError when they cannot be synced.
    """
    directories: set[Path] = set()
    before = _unsynced.set(directories)
    try:
        yield
    finally:
        _unsynced.reset(before)
        for directory in sorted(directories):
            try:
                _sync_directory(directory)
            except OSError as error:
                raise StorageError(f"{directory}: {error.strerror or error}") from error


def located(storage: Storage, reference: str) -> tuple[Storage, str]:
    """What a spec names: a key in the storage root, or s3://bucket/key. Raises StorageError."""
    if match := re.fullmatch(r"(s3://[^/]+)/(.+)", reference):
        return open_storage(match[1]), checked_key(match[2].rstrip("/"))
    return storage, checked_key(reference.rstrip("/"))


def exists(storage: Storage, key: str) -> bool:
    """Whether an object has this key."""
    return key in storage.keys(key)


def upload_tree(storage: Storage, prefix: str, directory: Path) -> None:
    """Put every file below `directory` under `prefix`."""
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        storage.upload(f"{prefix}/{path.relative_to(directory).as_posix()}", path)


def download_tree(storage: Storage, prefix: str, directory: Path) -> None:
    """Get every object under `prefix` into `directory`. Raises NotFoundError when there is none."""
    keys = storage.keys(prefix.rstrip("/") + "/")
    if not keys:
        raise NotFoundError(f"{storage.root}: nothing lies under {prefix!r}")
    for key in keys:
        path = directory / key.removeprefix(prefix.rstrip("/") + "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.download(key, path)


def checked_key(key: str) -> str:
    """The key itself, when it stays inside its root. Raises RefusedKeyError otherwise."""
    parts = key.split("/")
    if (
        any(part in ("", ".", "..") or part.startswith(TEMPORARY) for part in parts)
        or "\\" in key
        or "\0" in key
        or not _is_utf8(key)
        or len(key.encode()) > 900
    ):
        raise RefusedKeyError(
            f"key {key[:200]!r}: expected a relative path that stays inside the storage root"
        )
    return key


def checked_prefix(prefix: str) -> str:
    """A prefix whose folders stay inside the root; its last part may be cut short."""
    folder = prefix.rpartition("/")[0]
    if folder or prefix.startswith("/"):
        checked_key(folder)
    return prefix


def too_large(root: str, key: str, most: int) -> TooLargeError:
    return TooLargeError(f"{root}: {key!r} has more than {most} bytes; it is left where it is")


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # bytes of a file name that are not UTF-8 come as lone surrogates
        return False
    return True


class DirectoryStorage:
    """Objects as files below a directory, which may be shared by several machines."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = str(directory)

    def read(self, key: str, most: int | None = None) -> bytes:
        with self._errors(key, reads=True):
            data = read_file(self._path(key), most)
            if data is None:
                raise RefusedKeyError(f"{self.root}: {key!r}: a pipe or a device; expected a file")
            if most is not None and len(data) > most:
                raise too_large(self.root, key, most)
            return data

    def write(self, key: str, data: bytes) -> None:
        with self._errors(key):
            path = self._path(key)
            with _temporary(path, data) as temporary:
                faults.point("storage.written")
                temporary.replace(path)
                faults.point("storage.named")
                _sync_directory(path.parent)

    def create(self, key: str, data: bytes) -> bool:
        with self._errors(key):
            path = self._path(key)
            with _temporary(path, data) as temporary:
                faults.point("storage.written")
                try:
                    os.link(temporary, path)
                except FileExistsError:
                    return False
                faults.point("storage.named")
                _sync_directory(path.parent)
                return True

    def keys(self, prefix: str = "") -> list[str]:
        with self._errors(prefix):
            folder = checked_prefix(prefix).rpartition("/")[0]
            return sorted(key for key in self._below(folder) if key.startswith(prefix))

    def settled(self, key: str) -> bool:
        with self._errors(key, reads=True):
            return time.time() - self._path(key).stat().st_mtime > SETTLING_S

    def delete(self, key: str) -> None:
        with self._errors(key), contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._path(key).unlink()

    def upload(self, key: str, path: Path) -> None:
        with self._errors(key):
            target = self._path(key)
            with _temporary(target, path) as temporary:
                faults.point("storage.written")
                temporary.replace(target)
                faults.point("storage.named")
                _sync_directory(target.parent)

    def download(self, key: str, path: Path) -> None:
        with self._errors(key, reads=True):
            source = self._path(key)
            if not source.is_file():
                raise NotFoundError(f"{self.root}: no object {key!r}")
            with _temporary(path, source) as temporary:
                temporary.replace(path)

    def place(self, prefix: str, directory: Path, names: Sequence[str]) -> bool:
        """Have copies of files of a directory appear under a prefix, all of them in one step.

        False, and nothing done, when something lies there.
        """
        with self._errors(prefix):
            target = self._path(prefix)
            building = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
            try:
                building.mkdir(parents=True)
                for name in names:
                    with _temporary(building / name, directory / name) as temporary:
                        temporary.replace(building / name)
                for folder in {(building / name).parent for name in names}:
                    _sync_directory(folder)
                faults.point("storage.written")
                building.rename(target)  # refused where there is anything but an empty directory
                faults.point("storage.named")
                _sync_directory(target.parent)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    return False
                raise
            finally:
                shutil.rmtree(building, ignore_errors=True)
            return True

    def _path(self, key: str) -> Path:
        path = self.directory / checked_key(key)
        if not path.parent.resolve().is_relative_to(self.directory.resolve()) or path.is_symlink():
            raise RefusedKeyError(f"key {key!r}: a link leads out of {self.directory}")
        return path

    def _below(self, folder: str) -> Iterator[str]:
        """Keys of the files below a folder. A link is listed: whoever reads it learns that it is refused."""
        base = f"{folder}/" if folder else ""
        try:
            with os.scandir(self.directory / folder) as listing:
                entries = [entry for entry in listing if _is_utf8(entry.name)]
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            if entry.name.startswith(TEMPORARY):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self._below(base + entry.name)
            elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                yield base + entry.name

    @contextlib.contextmanager
    def _errors(self, key: str, reads: bool = False) -> Iterator[None]:
        """The system's errors as ours, which a person or the caller can act on."""
        try:
            yield
        except OSError as error:
            if reads and isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
                raise NotFoundError(f"{self.root}: no object {key!r}") from None
            raise StorageError(f"{self.root}: {key!r}: {error.strerror or error}") from error


def read_file(path: Path, most: int | None = None) -> bytes | None:
    """A file's bytes, one more than `most` where it has more; None for what is no file: a pipe would wait."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as found:  # noqa: PTH123 - of a descriptor
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            return None
        return found.read() if most is None else found.read(most + 1)


@contextlib.contextmanager
def _temporary(target: Path, content: bytes | Path) -> Iterator[Path]:
    """A synced file with this content beside `target`, gone at the end if it still has its temporary name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as out:
            if isinstance(content, bytes):
                out.write(content)
            else:
                with content.open("rb") as source:
                    while block := source.read(1 << 20):
                        out.write(block)
            out.flush()
            os.fsync(out.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    together = _unsynced.get()
    if together is not None:
        together.add(directory)
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
