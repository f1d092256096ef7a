"""Packs: the facts of days that are over, many in one object, so that years of them can be listed and read.

Invariant: a fact is packed only once the ledger has it and nothing will ask for it by its key; the pack
stands in storage, and was read back, before the first of its facts goes. A fact in a pack counts as created:
a runner that comes back after days asks `is_packed` before it believes that its start is its own. The key is
`packs/<day>/<digest>.jsonl.gz`, created only if absent; a line is `[key, fact]`.
"""

import gzip
import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from datetime import date
from typing import Any

from tasks.facts import FactError, parse_key, read_json
from tasks.storage import NotFoundError, Storage

MOST_BYTES = 256 << 20  # of an unpacked pack


def pack_keys(storage: Storage, day: date | None = None) -> list[str]:
    """Keys of the packs of a day, or of every day."""
    return storage.keys(f"packs/{day.isoformat()}/" if day else "packs/")


def read_pack(storage: Storage, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The facts in a pack with their keys. Raises FactError when it is none."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(storage.read(key))) as packed:
            for line in _lines(packed):
                name, fact = json.loads(line)
                if not isinstance(name, str) or not isinstance(fact, dict):
                    raise ValueError("a line is not a key and its fact")
                yield name, fact
    except (ValueError, OSError, EOFError, TypeError) as error:
        raise FactError(f"{key}: not a pack: {error}") from None


def pack(storage: Storage, day: date, keys: Iterable[str]) -> tuple[str, int]:
    """Put these facts of a day into one object, and remove them; its key, and how many it holds."""
    lines = []
    for name in sorted(keys):
        try:
            lines.append(
                json.dumps([name, read_json(storage, name)], ensure_ascii=False, separators=(",", ":"))
            )
        except NotFoundError:  # another upkeep was here
            continue
    data = "".join(f"{line}\n" for line in lines).encode(errors="replace")
    key = f"packs/{day.isoformat()}/{hashlib.sha256(data).hexdigest()[:16]}.jsonl.gz"
    storage.create(key, gzip.compress(data, mtime=0))
    kept = [name for name, _ in read_pack(storage, key)]
    if len(kept) != len(lines):
        raise FactError(
            f"{key}: holds {len(kept)} facts, expected {len(lines)}; its facts stay where they are"
        )
    for name in kept:
        storage.delete(name)
    return key, len(kept)


def is_packed(storage: Storage, key: str) -> bool:
    """Whether a fact of this key is in a pack: then it was created before, by whomever."""
    return any(
        key == name for pack in pack_keys(storage, parse_key(key).day) for name, _ in read_pack(storage, pack)
    )


def _lines(packed: gzip.GzipFile) -> Iterator[bytes]:
    total = 0
    for line in packed:
        total += len(line)
        if total > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        yield line
