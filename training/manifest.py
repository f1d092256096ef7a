"""A list of a directory's files with their sizes and hashes, which says that the directory is whole.

Invariant: the manifest is the last file written and the first one read, so that a reader who finds it
complete and matching has every byte. Hashing costs one read of the files, about a second for each gigabyte.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"


class ManifestError(Exception):
    """A directory that is not whole; the message names it and what is wrong."""


@dataclass(frozen=True)
class Entry:
    """One file."""

    bytes: int
    sha256: str


def write_manifest(directory: Path) -> None:
    """List the directory's files, as they are now, in its manifest."""
    (directory / MANIFEST).write_bytes(manifest_bytes(entries_of(directory)))


def entries_of(directory: Path) -> dict[str, Entry]:
    """The files below the directory, by path; not the manifest itself, nor hidden ones but a checkpoint's."""
    found = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        name = path.relative_to(directory).as_posix()
        if name != MANIFEST and (not path.name.startswith(".") or path.name == ".metadata"):
            found[name] = Entry(path.stat().st_size, _sha256(path))
    return found


def manifest_bytes(entries: dict[str, Entry], complete: bool = True) -> bytes:
    """What the file holds. An incomplete one marks a directory that is being written."""
    files = {name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in entries.items()}
    return json.dumps({"complete": complete, "files": files}, indent=1).encode()


def parse_manifest(data: bytes, where: str) -> dict[str, Entry]:
    """The files that a complete manifest lists. Raises ManifestError."""
    try:
        found = json.loads(data)
        complete = found["complete"]
        entries = {name: Entry(int(e["bytes"]), str(e["sha256"])) for name, e in found["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ManifestError(f"{where}: its {MANIFEST} cannot be read") from None
    if not complete:
        raise ManifestError(f"{where}: is not complete: whoever writes it has not finished")
    return entries


def verify(directory: Path, where: str | None = None) -> dict[str, Entry]:
    """The directory's files, all there and unchanged. Raises ManifestError."""
    where = where or str(directory)
    try:
        entries = parse_manifest((directory / MANIFEST).read_bytes(), where)
    except OSError:
        raise ManifestError(f"{where}: has no {MANIFEST}; it is not complete") from None
    for name, entry in entries.items():
        path = directory / name
        if not path.is_file():
            raise ManifestError(f"{where}: {name} is missing")
        if (size := path.stat().st_size) != entry.bytes:
            raise ManifestError(f"{where}: {name} has {size} bytes; expected {entry.bytes}")
        if _sha256(path) != entry.sha256:
            raise ManifestError(f"{where}: {name} is corrupt: its hash is not the one in {MANIFEST}")
    return entries


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
