"""Packed tokens on disk: shards of plain integers that are mapped into memory, not read.

Invariant: a packed directory is whole or refused: `tokens.json` says the type and each shard's length, the
manifest the bytes and hashes of them all. Tokens lie in one contiguous row across the shards, so a window may
begin in one and end in the next. Mapping costs nothing until a page is touched, and the page cache is shared
by the processes of a node; checking the hashes reads everything once, at the start.
"""

import bisect
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.manifest import MANIFEST, ManifestError, entries_of, manifest_bytes, parse_manifest, verify

INDEX = "tokens.json"
SHARD_TOKENS = 1 << 27


class PackedTokens:
    """The tokens of a packed directory, in one row. Raises ManifestError when it is not whole."""

    def __init__(self, directory: Path) -> None:
        verify(directory)
        try:
            index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
            dtype = np.dtype({"uint16": "<u2", "uint32": "<u4"}[index["dtype"]])
            lengths = [int(length) for length in index["shards"].values()]
            shards = [np.memmap(directory / name, dtype, "r") for name in index["shards"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"{directory}: {INDEX}: {error!r}; expected packed tokens") from None
        for name, shard, length in zip(index["shards"], shards, lengths, strict=True):
            if len(shard) != length:
                raise ManifestError(f"{directory}: {name} has {len(shard)} tokens; expected {length}")
        self.largest = max((int(shard.max()) for shard in shards), default=0)  # whatever the index says of it
        self.shards = shards
        self.ends = list(itertools.accumulate(lengths))
        manifest = parse_manifest((directory / MANIFEST).read_bytes(), str(directory))
        self.digest = manifest[INDEX].sha256[:8] + _digest(manifest)

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """Tokens from `start` to `stop`; in place when they lie in one shard."""
        start, stop, _ = part.indices(len(self))
        found = []
        shard = bisect.bisect_right(self.ends, start)
        while start < stop:
            begin = self.ends[shard] - len(self.shards[shard])
            end = min(stop, self.ends[shard])
            found.append(self.shards[shard][start - begin : end - begin])
            start, shard = end, shard + 1
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty(0, np.int32)


def pack(parts: Iterable[NDArray[Any]], vocab: int, directory: Path, shard_tokens: int = SHARD_TOKENS) -> int:
    """Write tokens as a packed directory, which must not exist or be empty; how many there were."""
    if directory.exists() and any(directory.iterdir()):
        raise ManifestError(f"{directory}: is not empty; packed tokens go into a directory of their own")
    writing = directory.with_name(f".{directory.name}.packing")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    dtype = "<u2" if vocab <= 1 << 16 else "<u4"
    lengths: dict[str, int] = {}
    largest = total = room = 0
    name = ""
    for part in parts:
        if len(part):
            largest = max(largest, int(part.max()))
        rest = part
        while len(rest):
            if not room:
                name, room = f"shard-{len(lengths):05}.bin", shard_tokens
                lengths[name] = 0
            taken, rest = rest[:room], rest[room:]
            with (writing / name).open("ab") as out:
                out.write(np.ascontiguousarray(taken).astype(dtype).tobytes())
            lengths[name] += len(taken)
            room -= len(taken)
            total += len(taken)
    index = {"dtype": "uint16" if dtype == "<u2" else "uint32", "largest": largest, "shards": lengths}
    (writing / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    (writing / MANIFEST).write_bytes(manifest_bytes(entries_of(writing)))
    if directory.exists():
        directory.rmdir()
    writing.replace(directory)
    return total


def _digest(manifest: dict[str, Any]) -> str:
    together = "".join(f"{name}:{entry.sha256}\n" for name, entry in sorted(manifest.items()))
    return hashlib.sha256(together.encode()).hexdigest()[:8]
