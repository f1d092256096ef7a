"""Where the rows of a batch job go: shards, what is known of each, who works on which, and the end.

Invariant: a shard is done when its file is there, which appears whole; everything else can be found out from
the shards again. Records of finished shards save reading them once more; claims keep the processes of one
attempt off each other's shards; each of these keeps its share of the work there, so that the last one
knows the whole job's. All that is gone when the manifest lists all shards, which is written last.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any

from tasks.generating import Work
from tasks.program import JobFailedError
from tasks.rows import Format, Shard, decoded, encoded
from tasks.storage import NotFoundError, Storage, exists
from training.manifest import MANIFEST, Entry, manifest_bytes
from training.processes import World

REPORT = "report.json"  # what came of all rows
FOR_THE_WORK = ("claims", "records", "shares")  # folders
EXAMPLES = 5


@dataclass
class Tally:
    """Rows of shards, by how they ended, with examples of what went wrong."""

    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Take in the rows of another."""
        self.rows += other.rows
        self.failed += other.failed
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.examples = (self.examples + other.examples)[:EXAMPLES]


@dataclass(frozen=True)
class Output:
    """The files of a job under a prefix."""

    storage: Storage
    prefix: str
    form: Format
    shards: tuple[Shard, ...]

    @property
    def rows(self) -> int:
        """Of the whole input."""
        return sum(shard.rows for shard in self.shards)

    def key(self, index: int) -> str:
        """Where the rows of a shard lie."""
        return shard_key(self.prefix, index, self.form)

    def put(self, shard: Shard, rows: Sequence[dict[str, Any]], table: Any, tally: Tally) -> None:
        """Write a shard, then what is to be known of it without reading it again."""
        data = encoded(rows, table, self.form)
        self.storage.write(self.key(shard.index), data)
        self.note(shard.index, data, tally)
        print(f"{self.key(shard.index)}: {len(rows)} rows", flush=True)

    def note(self, index: int, data: bytes, tally: Tally) -> dict[str, Any]:
        """Keep what is known of a finished shard."""
        record = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "tally": asdict(tally)}
        self.storage.write(self._record_key(index), json.dumps(record).encode())
        return record

    def tally(self, index: int) -> Tally:
        """How the rows of a finished shard ended."""
        return Tally(**self._record(index)["tally"])

    def finished(self) -> set[int]:
        """Shards that are there."""
        there = set(self.storage.keys(f"{self.prefix}/rows-"))
        return {shard.index for shard in self.shards if self.key(shard.index) in there}

    def claimed(self, world: World, done: set[int]) -> Iterator[Shard]:
        """Shards for this process alone: its own stretch of what is left, then the ends of the others'.

        Claims are the attempt's: another attempt begins when all processes of this one are gone.
        """
        left = [shard for shard in self.shards if shard.index not in done]
        if world.size == 1:
            yield from left
            return
        cuts = [len(left) * rank // world.size for rank in range(world.size + 1)]
        stretches = [left[begin:end] for begin, end in pairwise(cuts)]
        order = list(stretches[world.rank])
        for step in range(1, world.size):
            order += reversed(stretches[(world.rank + step) % world.size])
        prefix = f"{self.prefix}/claims/{_attempt()}"
        taken: set[int] = set()
        for shard in order:
            if shard.index in taken:
                continue
            if self.storage.create(f"{prefix}/{shard.index:05d}", f"rank {world.rank}".encode()):
                # Who finishes last removes the claims: what is done is not to be claimed again.
                if not exists(self.storage, self.key(shard.index)):
                    yield shard
            else:
                taken = {int(key.rpartition("/")[2]) for key in self.storage.keys(f"{prefix}/")}

    def total(self) -> tuple[Tally, dict[str, Entry]] | None:
        """How all rows ended, and the shards' files; None while shards are missing."""
        if len(self.finished()) < len(self.shards):
            return None
        with ThreadPoolExecutor(8) as pool:
            records = list(pool.map(lambda shard: self._record(shard.index), self.shards))
        tally = Tally()
        entries = {}
        for shard, record in zip(self.shards, records, strict=True):
            tally.add(Tally(**record["tally"]))
            name = self.key(shard.index).rpartition("/")[2]
            entries[name] = Entry(record["bytes"], record["sha256"])
        return tally, entries

    def share(self, world: World, work: Work) -> None:
        """Keep what a process of this attempt did so far."""
        key = f"{self.prefix}/shares/{_attempt()}/{world.rank:05d}.json"
        self.storage.write(key, json.dumps(asdict(work)).encode())

    def whole_work(self, gpus_per_process: int) -> dict[str, Any]:
        """Figures of all processes of all nodes: of this attempt so far, or of the one that ended the job."""
        work = Work(processes=0)
        try:
            for key in self.storage.keys(f"{self.prefix}/shares/{_attempt()}/"):
                work.add(Work(**json.loads(self.storage.read(key))))
        except NotFoundError:  # another process ended the job meanwhile
            work = Work(processes=0)
        if work.processes:
            return work.metrics(gpus_per_process)
        try:
            return dict(json.loads(self.storage.read(f"{self.prefix}/{REPORT}"))["last_attempt"])
        except (NotFoundError, KeyError):
            return {}

    def close(self, tally: Tally, entries: dict[str, Entry], figures: dict[str, Any]) -> list[str]:
        """List the shards in a manifest, and remove what was only for the work; the first keys."""
        report = {**asdict(tally), "last_attempt": figures}
        self.storage.write(f"{self.prefix}/{REPORT}", json.dumps(report, indent=1).encode())
        self.storage.write(f"{self.prefix}/{MANIFEST}", manifest_bytes(entries))
        self._tidy()
        return [f"{self.prefix}/{MANIFEST}", *(self.key(shard.index) for shard in self.shards[:20])]

    def closed(self) -> Tally | None:
        """How all rows ended, when an earlier attempt finished them; it may have died before it tidied up."""
        if not exists(self.storage, f"{self.prefix}/{MANIFEST}"):
            return None
        self._tidy()
        report = json.loads(self.storage.read(f"{self.prefix}/{REPORT}"))
        return Tally(**{part.name: report[part.name] for part in fields(Tally)})

    def _tidy(self) -> None:
        for folder in FOR_THE_WORK:
            for key in self.storage.keys(f"{self.prefix}/{folder}/"):
                self.storage.delete(key)

    def _record_key(self, index: int) -> str:
        return f"{self.prefix}/records/{index:05d}.json"

    def _record(self, index: int) -> dict[str, Any]:
        """What is known of a finished shard; counted again when its writer died before it noted that."""
        try:
            return dict(json.loads(self.storage.read(self._record_key(index))))
        except (NotFoundError, ValueError):
            pass
        try:
            data = self.storage.read(self.key(index))
        except NotFoundError:
            raise JobFailedError(f"{self.key(index)}: was there and is gone") from None
        tally = Tally()
        for row in decoded(data, self.form):
            tally.add(counted(row))
        return self.note(index, data, tally)


def _attempt() -> str:
    return os.environ.get("SLOTWISE_ATTEMPT", "1")


def shard_key(output: str, index: int, form: Format = "jsonl") -> str:
    """Where the rows of a shard lie."""
    return f"{output}/rows-{index:05d}.{form}"


def counted(row: dict[str, Any]) -> Tally:
    """A row by the columns that were added to it."""
    error = row["error"]
    return Tally(
        1,
        int(error is not None),
        row["prompt_tokens"] or 0 if error is None else 0,
        row["completion_tokens"] or 0,
        [] if error is None else [str(error)[:300]],
    )
