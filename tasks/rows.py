"""The rows of a batch job: read from JSONL or Parquet files, cut into shards, written as JSONL or Parquet.

Invariant: every row of the input belongs to exactly one shard, shards follow the rows' order, and what is in
memory is one shard of about 64 MiB at most, however large the files and their rows: JSONL is read line by
line (a line above 16 MiB is an error row whose rest is skipped), Parquet page by page. The cost is one pass
over JSONL files to find where shards begin; of Parquet only the footers are read for that.
"""

import base64
import hashlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from tasks.specfile import SpecError
from tasks.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

Format = Literal["jsonl", "parquet"]
SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
MOST_LINE = 16 << 20  # bytes of a line that are read
MOST_SHARD = 64 << 20  # bytes of the lines of a shard, above which it takes no other row
PARQUET_BUFFER = 1 << 20
PARQUET_BATCH = 4 << 20  # bytes that are decoded at a time, by what rows take on average
# What a job adds to each row.
ADDED = ("completion", "prompt_tokens", "completion_tokens", "finish_reason", "error")


@dataclass(frozen=True)
class InputFile:
    """A file of the input on this machine; `name` is what messages call it."""

    name: str
    path: Path


@dataclass(frozen=True)
class Shard:
    """Consecutive rows: where the first one is, and how many. They may go on in the files after it.

    `position` is the byte (JSONL) or the row (Parquet) in `file` to begin at; `number` the line or row there,
    from 1, for messages.
    """

    index: int
    file: int
    position: int
    number: int
    rows: int


@dataclass(frozen=True)
class Row:
    """A row as it was read: its own columns, what is asked (a text or messages), or why nothing can be."""

    where: str
    columns: dict[str, Any]
    asked: Any
    error: str | None


def format_of(names: Sequence[str]) -> Format:
    """The one format of files with these names. Raises SpecError when they differ or are of neither."""
    found = {name: SUFFIXES.get(Path(name).suffix.lower()) for name in names}
    for name, known in found.items():
        if known is None:
            raise SpecError(f"input: {name!r}: expected a name that ends in {', '.join(SUFFIXES)}")
    if len(set(found.values())) > 1:
        raise SpecError(
            f"input: {names[0]!r} and others: JSONL and Parquet files are mixed; expected one of them"
        )
    return SUFFIXES[Path(names[0]).suffix.lower()]


def matches(pattern: str, keys: Sequence[str]) -> list[str]:
    """The keys that a glob names, in their order: `*` and `?` stay within a folder, `**` does not."""
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^/\]]+\])", pattern)
    regex = "".join(
        tokens.get(part) or (part.replace("[!", "[^") if part.startswith("[") else re.escape(part))
        for part in parts
    )
    return [key for key in keys if re.fullmatch(regex, key)]


def matching(storage: Storage, pattern: str) -> list[str]:
    """The keys in storage that a glob names, in their order."""
    fixed = pattern[: min(pattern.index(mark) for mark in "*?[" if mark in pattern)]
    return matches(pattern, storage.keys(fixed.rpartition("/")[0] + "/" if "/" in fixed else ""))


def count(name: str, data: bytes) -> int:
    """How many rows a whole file of this name has."""
    if format_of([name]) == "jsonl":
        return sum(1 for line in data.splitlines() if line.strip())
    import pyarrow.parquet as pq

    return int(pq.read_metadata(io.BytesIO(data)).num_rows)


def is_pattern(reference: str) -> bool:
    """Whether a reference is a glob."""
    return any(mark in reference for mark in "*?[")


def shards(files: Sequence[InputFile], size: int) -> list[Shard]:
    """The shards of the input, of at most `size` rows each. Raises SpecError for a file that is none."""
    total, starts = _parquet_starts(files, size) if _parquet(files) else _jsonl_starts(files, size)
    ends = [first for first, _ in starts[1:]] + [total]
    return [
        Shard(index, *start, end - first)
        for index, ((first, start), end) in enumerate(zip(starts, ends, strict=False))  # no start: no end
    ]


def fingerprint(path: Path) -> str:
    """Tells a file from another one of its name without reading all of it: its size, begin and end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(1 << 16))
        file.seek(max(size - (1 << 16), 0))
        digest.update(file.read(1 << 16))
    return f"{size}-{digest.hexdigest()[:32]}"


class Reader:
    """Reads shards; one after the other in their order costs no seeking.

    Rows of Parquet that are written as Parquet need but one column as Python has it: `whole` is False then.
    """

    def __init__(self, files: Sequence[InputFile], column: str, whole: bool = True) -> None:
        self.files = files
        self.column = column
        self.whole = whole
        self.parquet = _parquet(files)
        self._cursors: dict[int, _ParquetCursor] = {}

    def read(self, shard: Shard) -> tuple[list[Row], "pa.Table | None"]:
        """The shard's rows, and their Arrow table where the input is Parquet."""
        return self._from_parquet(shard) if self.parquet else (self._from_jsonl(shard), None)

    def check(self) -> None:
        """Raise SpecError when the column is in none of the rows, as far as Parquet says."""
        for file in self.files if self.parquet else ():
            if (names := _open_parquet(file).schema_arrow.names).count(self.column) != 1:
                wrong = "more than one" if self.column in names else "no"
                raise SpecError(
                    f"input: {file.name!r}: has {wrong} column {self.column!r}; it has {', '.join(names)}"
                )

    def _from_jsonl(self, shard: Shard) -> list[Row]:
        rows: list[Row] = []
        position, number = shard.position, shard.number
        for index in range(shard.file, len(self.files)):
            prefix = f"{self.files[index].name}: " if len(self.files) > 1 else ""
            with self.files[index].path.open("rb") as file:
                file.seek(position)
                for _, found, line in _lines(file, position, number):
                    rows.append(_parsed(f"{prefix}line {found}", line, self.column))
                    if len(rows) == shard.rows:
                        return rows
            position, number = 0, 1
        raise SpecError(f"input: {self.files[shard.file].name!r}: has fewer rows than before; it was changed")

    def _from_parquet(self, shard: Shard) -> tuple[list[Row], "pa.Table"]:
        import pyarrow as pa

        tables, wanted, position, rows = [], shard.rows, shard.position, []
        for index in range(shard.file, len(self.files)):
            cursor = self._cursors.setdefault(index, _ParquetCursor(self.files[index]))
            table = cursor.take(position, wanted)
            tables.append(table)
            prefix = f"{self.files[index].name}: " if len(self.files) > 1 else ""
            shown = table if self.whole else table.select([self.column])
            for number, columns in enumerate(shown.to_pylist(), position + 1):
                rows.append(_checked(f"{prefix}row {number}", columns, self.column))
            wanted -= table.num_rows
            if not wanted:
                break
            del self._cursors[index]
            position = 0
        if wanted:
            raise SpecError(
                f"input: {self.files[shard.file].name!r}: has fewer rows than before; it was changed"
            )
        try:
            return rows, pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            raise SpecError(
                f"input: {self.files[shard.file].name!r}: its columns do not fit those after it: {error}"
            ) from None


def encoded(rows: Sequence[dict[str, Any]], table: "pa.Table | None", form: Format) -> bytes:
    """A shard's file: input columns and what was added to them, row for row."""
    if form == "jsonl":
        text = "".join(f"{json.dumps(row, ensure_ascii=False, default=_plain)}\n" for row in rows)
        return text.encode("utf-8", errors="replace")
    import pyarrow as pa
    import pyarrow.parquet as pq

    assert table is not None  # Parquet is written from Parquet only
    types = {"prompt_tokens": pa.int64(), "completion_tokens": pa.int64()}
    for name in ADDED:
        values = [row[name] for row in rows]
        texts = name not in types
        column = pa.array(
            [v if v is None or not texts else v.encode(errors="replace").decode() for v in values],
            types.get(name, pa.string()),
        )
        place = table.schema.get_field_index(name)
        table = table.append_column(name, column) if place < 0 else table.set_column(place, name, column)
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def decoded(data: bytes, form: Format) -> list[dict[str, Any]]:
    """The columns that were added to the rows of a shard's file."""
    if form == "jsonl":
        return [{name: row[name] for name in ADDED} for row in map(json.loads, data.splitlines())]
    import pyarrow.parquet as pq

    return list(pq.read_table(io.BytesIO(data), columns=list(ADDED)).to_pylist())


def _parquet(files: Sequence[InputFile]) -> bool:
    return SUFFIXES.get(Path(files[0].name).suffix.lower()) == "parquet"


Start = tuple[int, int, int]  # file, position, number


def _jsonl_starts(files: Sequence[InputFile], size: int) -> tuple[int, list[tuple[int, Start]]]:
    """How many rows there are, and before how many of them a shard begins where."""
    starts: list[tuple[int, Start]] = []
    total = held = 0
    for index, source in enumerate(files):
        with source.path.open("rb") as file:
            for position, number, line in _lines(file, 0, 1):
                if not starts or total - starts[-1][0] == size or held + len(line) > MOST_SHARD:
                    starts.append((total, (index, position, number)))
                    held = 0
                held += len(line)
                total += 1
    return total, starts


def _parquet_starts(files: Sequence[InputFile], size: int) -> tuple[int, list[tuple[int, Start]]]:
    """The same; footers tell how large rows are on average."""
    starts: list[tuple[int, Start]] = []
    counts = []
    for source in files:
        footer = _open_parquet(source).metadata
        counts.append(int(footer.num_rows))
        held = sum(footer.row_group(group).total_byte_size for group in range(footer.num_row_groups))
        if counts[-1]:
            size = max(min(size, MOST_SHARD * counts[-1] // max(held, 1)), 1)
    total = 0
    for index, rows in enumerate(counts):
        for position in range(-total % size, rows, size):
            starts.append((total + position, (index, position, position + 1)))
        total += rows
    return total, starts


def _lines(file: BinaryIO, position: int, number: int) -> Iterator[tuple[int, int, bytes]]:
    """Lines that hold anything, with their byte and number; of a huge one only its begin."""
    while line := file.readline(MOST_LINE + 1):
        begin, cut = position, line
        position += len(line)
        while len(line) > MOST_LINE and not line.endswith(b"\n"):
            line = file.readline(MOST_LINE + 1)
            position += len(line)
        if cut.strip():
            yield begin, number, cut
        number += 1


def _parsed(where: str, line: bytes, column: str) -> Row:
    """A row from a line of JSONL; one that cannot be read keeps the begin of its line."""
    if len(line) > MOST_LINE:
        shown = line[:200].decode("utf-8", errors="replace")
        return Row(where, {"line": shown}, None, f"{where}: longer than {MOST_LINE >> 20} MiB")
    try:
        columns = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        shown = line[:200].decode("utf-8", errors="replace").strip()
        return Row(where, {"line": shown}, None, f"{where}: not JSON in UTF-8: {error}")
    if not isinstance(columns, dict):
        return Row(where, {"line": str(columns)[:200]}, None, f"{where}: expected an object with {column!r}")
    return _checked(where, columns, column)


def _checked(where: str, columns: dict[str, Any], column: str) -> Row:
    if column not in columns:
        return Row(where, columns, None, f"{where}: has no column {column!r}")
    return Row(where, columns, columns[column], None)


class _ParquetCursor:
    """Takes rows from a file; in their order without reading any twice."""

    def __init__(self, file: InputFile) -> None:
        self.file = _open_parquet(file)
        self.name = file.name
        self.next = -1  # the row that comes next
        self.rest: pa.RecordBatch | None = None
        self.batches: Iterator[pa.RecordBatch] = iter(())

    def take(self, position: int, count: int) -> "pa.Table":
        """Rows from `position` on, at most `count`: less at the end of the file. Raises SpecError."""
        import pyarrow as pa

        if position != self.next:
            self._begin(position)
        parts: list[pa.RecordBatch] = []
        wanted = count
        try:
            while wanted and (batch := self.rest or next(self.batches, None)) is not None:
                parts.append(batch.slice(0, wanted))
                self.rest = batch.slice(wanted) if batch.num_rows > wanted else None
                wanted -= parts[-1].num_rows
        except (pa.ArrowException, OSError) as error:
            raise SpecError(
                f"input: {self.name!r}: cannot be read: {' '.join(str(error).split())[:200]}"
            ) from None
        self.next = position + count - wanted
        return pa.Table.from_batches(parts, schema=self.file.schema_arrow)

    def _begin(self, position: int) -> None:
        first, group = 0, 0
        while group < self.file.num_row_groups and first + self._rows(group) <= position:
            first += self._rows(group)
            group += 1
        size = sum(self.file.metadata.row_group(n).total_byte_size for n in range(self.file.num_row_groups))
        average = max(size // max(self.file.metadata.num_rows, 1), 1)
        self.batches = self.file.iter_batches(
            batch_size=max(min(PARQUET_BATCH // average, 256), 1),
            row_groups=list(range(group, self.file.num_row_groups)),
            use_threads=False,
        )
        self.rest, self.next = None, first
        if position > first:
            self.take(first, position - first)

    def _rows(self, group: int) -> int:
        return int(self.file.metadata.row_group(group).num_rows)


def _open_parquet(file: InputFile) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(file.path, buffer_size=PARQUET_BUFFER, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise SpecError(
            f"input: {file.name!r}: not a Parquet file: {' '.join(str(error).split())[:200]}"
        ) from None


def _plain(value: Any) -> Any:
    """What JSON does not have, such as an instant or bytes, as text."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
