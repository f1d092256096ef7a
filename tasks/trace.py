"""Recorded load: a trace of jobs and one of demand, checked, cut to a window and put in order of time.

Invariant: a row that is not what it should be ends the reading with one TraceError, which names the file, the
row, the field, the value and what was expected; nothing is guessed or left out in silence. Rows stream
through files that DuckDB sorts, so memory does not grow with the trace. The cost: a trace is read whole
before the first hour is replayed.

`submit_s` counts seconds from any origin; instants come from the demand. Its first row lies at the origin
when it then covers the window, and at the window's begin otherwise.
"""

import csv
import gzip
import io
import itertools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, cast

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.cluster import Cluster, Service
from tasks.demand import MOST_LOAD, gpus_needed
from tasks.instants import EPOCH, parse, text
from tasks.jobs import KIND_SECTIONS

Values = dict[str, Any]
BATCH = 10_000  # rows held at once
MOST_SECONDS = 1e10  # of any figure in a trace: three centuries
NO_DEMAND = EPOCH + timedelta(days=10957)  # begin of a window without demand: the year 2000
MOST_SAMPLES = 1_000_000  # of a service's demand: two years of minutes
MOST_DAYS = 3660  # of a window


class TraceError(Exception):
    """Input that cannot be used; the message is one line for the person who gave it."""


@dataclass(frozen=True)
class TraceJob:
    """One recorded job; seconds count from the window's begin.

    `declared_s` is what its owner said it would take, or None: then nobody knew.
    """

    job: str
    submit_s: float
    gpus: int
    duration_s: float
    kind: str
    priority: float
    deadline_s: float | None
    declared_s: float | None
    tenant: str | None

    @property
    def value(self) -> float:
        """Worth when done: priority × the GPU-hours that it truly needs."""
        return self.priority * self.gpus * self.duration_s / 3600


@dataclass(frozen=True)
class Demand:
    """GPUs that a service wanted, a figure for each sample from `first_s` on; nan where nothing is known."""

    first_s: float
    sample_s: float
    gpus: tuple[float, ...]

    def at(self, seconds: float) -> float:
        """What was wanted then; nan for unknown."""
        index = math.floor((seconds - self.first_s) / self.sample_s + 1e-9)
        return self.gpus[index] if 0 <= index < len(self.gpus) else math.nan

    @property
    def end_s(self) -> float:
        """Where the record ends."""
        return self.first_s + len(self.gpus) * self.sample_s


@dataclass(frozen=True)
class Trace:
    """What is replayed: the window [begin, begin + seconds), the jobs submitted in it (a Parquet file in
    their order) and each service's demand. `begin_s` is its begin on the clock of `submit_s`.
    """

    begin: datetime
    begin_s: float
    seconds: float
    jobs_file: Path
    jobs: int
    outside: int  # jobs of the file that were submitted before or after the window
    demand: dict[str, Demand]

    def each_job(self) -> Iterator[TraceJob]:
        """The jobs in the order of their submission, a batch in memory at a time."""
        for batch in pq.ParquetFile(self.jobs_file).iter_batches(BATCH):
            for row in batch.to_pylist():
                yield TraceJob(**row)

    def at(self, seconds: float) -> datetime:
        """The instant so many seconds after the begin."""
        return self.begin + timedelta(seconds=seconds)


def read_trace(
    jobs: Path,
    demand: Path | None,
    cluster: Cluster,
    folder: Path,
    start_s: float | None = None,
    days: float | None = None,
) -> Trace:
    """Read and check both files; the window's jobs are left in `folder`.

    Args:
        start_s: begin of the window on the clock of `submit_s`; when None, where the demand begins if it
            reaches to the first submission, else the hour of that.
        days: its length; until the demand ends when None, or without demand until the last job could have
            ended.

    Raises:
        TraceError: naming file, row, field, value and what was expected.
    """
    services = {service.name: service for service in cluster.services}
    if services and demand is None:
        raise TraceError(f"--demand: missing; the cluster has the services {', '.join(services)}")
    first, series = _read_demand(demand, services) if demand is not None else (None, {})
    covered = max((each.end_s for each in series.values()), default=0.0)
    parts = folder / "parts"
    parts.mkdir()
    _check_jobs(jobs, parts)
    with duckdb.connect(
        config={"threads": "2", "memory_limit": "256MB", "temp_directory": str(folder)}
    ) as sql:
        sql.execute(f"CREATE VIEW jobs AS FROM read_parquet({quoted(parts / '*.parquet')})")
        _check_unique(sql, jobs)
        low, high, total = _one(sql, "SELECT min(submit_s), max(submit_s + duration_s), count(*) FROM jobs")
        begin_s = _begin(low, covered) if start_s is None else start_s
        seconds = _length(begin_s, high, covered, days)
        if seconds > MOST_DAYS * 86400:
            raise TraceError(
                f"{jobs}: {seconds / 86400:.0f} days from {begin_s:g} s on; expected at most {MOST_DAYS}, "
                "by --start and --days"
            )
        shift = begin_s if covered >= begin_s + seconds - 1e-6 else 0.0
        series = {
            name: Demand(each.first_s - shift, each.sample_s, each.gpus) for name, each in series.items()
        }
        window = (
            f"SELECT job, submit_s - {begin_s!r} AS submit_s, gpus, duration_s, kind, priority, "
            f"deadline_s - {begin_s!r} AS deadline_s, declared_s, tenant FROM jobs "
            f"WHERE submit_s >= {begin_s!r} AND submit_s < {begin_s + seconds!r} ORDER BY submit_s, line"
        )
        file = folder / "jobs.parquet"
        sql.execute(f"COPY ({window}) TO {quoted(file)} (FORMAT parquet)")
    count = pq.ParquetFile(file).metadata.num_rows
    begin = NO_DEMAND if first is None else first + timedelta(seconds=shift)
    return Trace(begin, begin_s, seconds, file, count, total - count, series)


def _begin(low: float, covered: float) -> float:
    """Where a window begins that nobody stated; `low` is the first submission."""
    return 0.0 if 0 <= low < covered else math.floor(low / 3600) * 3600.0


def _length(begin_s: float, high: float, covered: float, days: float | None) -> float:
    if days is not None:
        return days * 86400
    if covered > 0:  # from the origin where that reaches the window, else from its begin
        return covered - begin_s if covered > begin_s else covered
    return max(math.ceil((high - begin_s) / 3600), 1) * 3600.0


def _one(sql: duckdb.DuckDBPyConnection, query: str) -> tuple[Any, ...]:
    row = sql.execute(query).fetchone()
    assert row is not None
    return row


# Jobs


JOB_SCHEMA = pa.schema(
    [("line", pa.int64()), ("job", pa.string()), ("submit_s", pa.float64()), ("gpus", pa.int64()),
     ("duration_s", pa.float64()), ("kind", pa.string()), ("priority", pa.float64()),
     ("deadline_s", pa.float64()), ("declared_s", pa.float64()), ("tenant", pa.string())]
)  # fmt: skip


def _check_jobs(file: Path, parts: Path) -> None:
    """Leave the checked rows in files of a batch each."""
    batch: list[Values] = []
    number = 0
    for place, line, found in _rows(file, REQUIRED, tuple(FIELDS)):
        batch.append({"line": line, **_checked(file, place, found)})
        if len(batch) == BATCH:
            _write(batch, parts / f"{number}.parquet")
            number, batch = number + 1, []
    if batch:
        _write(batch, parts / f"{number}.parquet")
    elif not number:
        raise TraceError(f"{file}: has no rows; expected at least one job")


def _write(batch: list[Values], file: Path) -> None:
    pq.write_table(pa.Table.from_pylist(batch, schema=JOB_SCHEMA), file)


def _checked(file: Path, place: str, found: Values) -> Values:
    """The fields of a row under their names here."""
    checked: Values = {}
    for name, check in FIELDS.items():
        value, ours = found.get(name), COLUMNS.get(name, name)
        if value is None or value == "":
            if name in REQUIRED:
                raise TraceError(f"{file}: {place}: {name}: missing; expected {EXPECTED[name]}")
            checked[ours] = DEFAULTS.get(name)
            continue
        try:
            checked[ours] = check(value)
        except (ValueError, TypeError, OverflowError):
            raise TraceError(f"{file}: {place}: {name}: {value!r:.60}; expected {EXPECTED[name]}") from None
    return checked


def _check_unique(sql: duckdb.DuckDBPyConnection, file: Path) -> None:
    twice = sql.execute(
        "SELECT job, min(line), max(line) FROM jobs GROUP BY job HAVING count(*) > 1 ORDER BY 3 LIMIT 1"
    ).fetchone()
    if twice is not None:
        raise TraceError(
            f"{file}: row {twice[2]}: job_id: {twice[0]!r:.60} is that of row {twice[1]} too; "
            "expected unique ids"
        )


def _name(value: Any) -> str:
    name = str(value).strip()
    if not name or len(name) > 100 or not name.isprintable():
        raise ValueError
    return name


def _kind(value: Any) -> str:
    if value not in KIND_SECTIONS:
        raise ValueError
    return str(value)


def _whole(value: Any) -> int:
    number = float(value)
    if isinstance(value, bool) or number != int(number) or not 1 <= number <= 1_000_000:
        raise ValueError
    return int(number)


def _number(least: float, most: float = MOST_SECONDS, above: bool = False) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        number = float(value)
        if isinstance(value, bool) or not least <= number <= most or (above and number == least):
            raise ValueError
        return number

    return check


REQUIRED = ("job_id", "submit_s", "gpus", "duration_s")
FIELDS: dict[str, Callable[[Any], Any]] = {
    "job_id": _name,
    "submit_s": _number(-MOST_SECONDS),
    "gpus": _whole,
    "duration_s": _number(0),
    "kind": _kind,
    "priority": _number(0, 1000, above=True),
    "deadline_s": _number(-MOST_SECONDS),
    "estimate_s": _number(0, above=True),
    "tenant": _name,
}
COLUMNS = {"job_id": "job", "estimate_s": "declared_s"}
DEFAULTS: Values = {"kind": "training", "priority": 1.0}
EXPECTED = {
    "job_id": "a name of at most 100 characters",
    "submit_s": "seconds, a number",
    "gpus": "a whole number from 1 up",
    "duration_s": "seconds from 0 up",
    "kind": f"one of {', '.join(KIND_SECTIONS)}",
    "priority": "a number above 0, at most 1000",
    "deadline_s": "seconds on the clock of submit_s",
    "estimate_s": "seconds above 0",
    "tenant": "a name of at most 100 characters",
}


# Demand


def _read_demand(file: Path, services: dict[str, Service]) -> tuple[datetime, dict[str, Demand]]:
    """The instant of the earliest row, and the GPUs that each service wanted, seconds counted from there."""
    samples: dict[datetime, tuple[str, dict[str, float]]] = {}
    for place, _, found in _rows(file, ("ts", *services), ("ts", *services), strict=True):
        try:
            ts = _instant(found.get("ts"))
        except (ValueError, TypeError, AttributeError, OverflowError):
            raise TraceError(
                f"{file}: {place}: ts: {found.get('ts')!r:.40}; expected an instant such as 2026-12-01T06:00Z"
            ) from None
        if ts in samples:
            raise TraceError(f"{file}: {place}: ts: {text(ts)} is that of {samples[ts][0]} too; expected one")
        wanted = {name: _gpus(file, place, service, found.get(name)) for name, service in services.items()}
        samples[ts] = (place, wanted)
    if not samples:
        raise TraceError(f"{file}: has no rows; expected at least one sample")
    instants = sorted(samples)
    places = _sample_places(file, instants, samples)
    series = {}
    for name, service in services.items():
        sample_s = places[0] or service.demand.sample_minutes * 60.0
        gpus = [math.nan] * (places[1][-1] + 1)
        for index, instant in zip(places[1], instants, strict=True):
            gpus[index] = samples[instant][1][name]
        series[name] = Demand(0.0, sample_s, tuple(gpus))
    return instants[0], series


def _sample_places(
    file: Path, instants: Sequence[datetime], samples: dict[datetime, tuple[str, Any]]
) -> tuple[float | None, list[int]]:
    """Seconds between samples (the most frequent distance; None for one alone), and where each lies."""
    gaps = Counter((b - a).total_seconds() for a, b in itertools.pairwise(instants))
    if not gaps:
        return None, [0]
    sample_s = min(gaps, key=lambda gap: (-gaps[gap], gap))
    places = []
    for instant in instants:
        index, rest = divmod((instant - instants[0]).total_seconds(), sample_s)
        place = f"{file}: {samples[instant][0]}: ts: {text(instant)}"
        if rest > 1e-6:
            raise TraceError(f"{place}; expected whole steps of {sample_s:g} s from {text(instants[0])}")
        if index >= MOST_SAMPLES:
            raise TraceError(
                f"{place}; expected at most {MOST_SAMPLES} steps of {sample_s:g} s from {text(instants[0])}"
            )
        places.append(int(index))
    return sample_s, places


def _instant(value: Any) -> datetime:
    if isinstance(value, datetime):
        instant = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    else:
        instant = parse(value.strip())
    if not 1900 <= instant.year <= 2200:
        raise ValueError
    return instant


def _gpus(file: Path, place: str, service: Service, value: Any) -> float:
    """An empty field is a gap in the record."""
    if value is None or value == "":
        return math.nan
    try:
        load = float(value)
    except (TypeError, ValueError):
        load = -1.0
    if not 0 <= load <= MOST_LOAD:
        raise TraceError(
            f"{file}: {place}: {service.name}: {value!r:.40}; expected a number from 0 to {MOST_LOAD:g}"
        )
    return gpus_needed(service, load)


# Files


PARQUET = b"PAR1"  # what its files begin with


def _rows(
    file: Path, required: Sequence[str], known: Sequence[str], strict: bool = False
) -> Iterator[tuple[str, int, Values]]:
    """(place for people, row number, values) of each row. `strict`: an unknown column is an error."""
    try:
        with file.open("rb") as opened:
            magic = opened.read(4)
        if magic != PARQUET and file.suffix.lower() in (".parquet", ".pq"):
            raise TraceError(
                f"{file}: is no Parquet file: begins with {magic!r}; expected {PARQUET!r}, or CSV named .csv"
            )
        if magic == PARQUET:
            yield from _parquet_rows(file, required, known, strict)
        else:
            yield from _csv_rows(file, magic[:2] == b"\x1f\x8b", required, known, strict)
    except OSError as error:
        raise TraceError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (pa.ArrowException, EOFError, zlib.error, csv.Error, UnicodeDecodeError) as error:
        raise TraceError(f"{file}: cannot be read: {str(error).splitlines()[0][:200]}") from None


def _csv_rows(
    file: Path, packed: bool, required: Sequence[str], known: Sequence[str], strict: bool
) -> Iterator[tuple[str, int, Values]]:
    with (
        gzip.open(file, "rb") if packed else file.open("rb") as raw,
        io.TextIOWrapper(cast(IO[bytes], raw), encoding="utf-8-sig", newline="") as lines,
    ):
        reader = csv.reader(lines)
        names = [name.strip() for name in next(reader, [])]
        _columns(file, names, required, known, strict)
        for number, fields in enumerate((row for row in reader if row), start=1):
            place = f"row {number} (line {reader.line_num})"
            if len(fields) != len(names):
                raise TraceError(f"{file}: {place}: has {len(fields)} fields; expected {len(names)}")
            yield place, number, dict(zip(names, map(str.strip, fields), strict=True))


def _parquet_rows(
    file: Path, required: Sequence[str], known: Sequence[str], strict: bool
) -> Iterator[tuple[str, int, Values]]:
    found = pq.ParquetFile(file)
    names = found.schema_arrow.names
    _columns(file, names, required, known, strict)
    number = 0
    for batch in found.iter_batches(BATCH, columns=[name for name in names if name in known]):
        for row in batch.to_pylist():
            number += 1
            # Where a column of floats may be empty, many writers say so by nan.
            yield (
                f"row {number}",
                number,
                {
                    name: None if value != value and name not in REQUIRED else value
                    for name, value in row.items()
                },
            )


def quoted(path: Path) -> str:
    """A path as SQL text."""
    return "'" + str(path).replace("'", "''") + "'"


def _columns(
    file: Path, names: Sequence[str], required: Sequence[str], known: Sequence[str], strict: bool
) -> None:
    for name in required:
        if names.count(name) != 1:
            there = ", ".join(names)[:200] or "nothing"
            raise TraceError(f"{file}: the columns are {there}; expected one {name} among them")
    for name in names:
        if strict and name not in known:
            raise TraceError(
                f"{file}: column {name!r:.60}: no service of the cluster; expected {', '.join(known)}"
            )
