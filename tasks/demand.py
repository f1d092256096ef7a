"""What a service was asked for: samples from a growing file or a Prometheus server, and slots made of them.

Invariant: a sample is a finite load from 0 up in [ts, ts + sample_minutes). What cannot be read as one is
left out and said, never guessed; what is missing stays missing and is not zero. A file is read whole each
time: simple, and right for years of minutes, not for every request.
"""

import csv
import io
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks import instants, web
from tasks.cluster import DemandSource, Service, Site
from tasks.sizing import servers_needed
from tasks.storage import S3_URL, StorageError, open_storage, read_file

Rows = Iterator[tuple[str, Any, Any]]  # place in the source, ts, y, both as found

log = logging.getLogger(__name__)

MOST_LOAD = 1e12  # beyond it a number is a mistake, not a load
MOST_BYTES = 128 << 20  # of a demand file, which is read whole: a sample a minute for four years has half
MOST_POINTS = 10_000  # of one range query; servers refuse more than 11,000
SHOWN_ROWS = 3  # of those left out


class DemandError(Exception):
    """A source that gives nothing usable; the message is one line naming it and what was expected."""


class BadRowError(Exception):
    """A row that is no sample, and why."""


@dataclass(frozen=True)
class Sample:
    """The load from `ts` on, in the source's unit, for the source's `sample_minutes`."""

    ts: datetime
    value: float


@dataclass(frozen=True)
class Reading:
    """The samples in order of time, and a line for every row that was left out."""

    samples: tuple[Sample, ...]
    left_out: tuple[str, ...]


def read_demand(source: DemandSource, site: Site, since: datetime, until: datetime) -> list[Sample]:
    """The samples with since <= ts < until; rows left out are logged. Raises DemandError."""
    reading = read_source(source, site, since, until)
    if reading.left_out:
        first = "; ".join(reading.left_out[:SHOWN_ROWS])
        more = ", …" if len(reading.left_out) > SHOWN_ROWS else ""
        log.warning("%s: %d rows left out: %s%s", _name(source), len(reading.left_out), first, more)
    return list(reading.samples)


def read_source(source: DemandSource, site: Site, since: datetime, until: datetime) -> Reading:
    """The same, with what was left out. Of two samples for one instant the later in the file stands."""
    left_out: list[str] = []
    rows = _file_rows(source, site) if source.file is not None else _prometheus_rows(source, since, until)
    samples: dict[datetime, float] = {}
    for place, ts, value in rows:
        try:
            instant = _instant(ts)
            if since <= instant < until:
                samples[instant] = _load(value)
        except BadRowError as problem:
            left_out.append(f"{place}: {problem}")
    return Reading(tuple(Sample(ts, samples[ts]) for ts in sorted(samples)), tuple(left_out))


def gpus_needed(service: Service, value: float) -> float:
    """GPUs, with their fraction, that carry a load given in the unit of the service's source."""
    if service.demand.unit == "gpus":
        return value
    if (promise := service.latency) is not None:
        wait_s = promise.target_s - promise.service_s
        servers = servers_needed(value, promise.service_s, wait_s, promise.share)
        return servers / promise.at_once * service.gpus_per_replica
    return value * 3600 / service.requests_per_gpu_hour


def slot_series(
    samples: Sequence[Sample], first: datetime, slots: int, slot: timedelta, sample: timedelta
) -> list[float | None]:
    """A value for each of `slots` slots, the first beginning at `first`; None where nothing is known.

    A slot's value is the mean of the samples that begin in it. A sample longer than a slot holds for its
    length: then it is the mean by time, where at least half of the slot is known.
    """
    sums, known = [0.0] * slots, [0.0] * slots
    for item in samples:
        if sample <= slot:
            index = (item.ts - first) // slot
            if 0 <= index < slots:
                sums[index] += item.value
                known[index] += 1.0
            continue
        for index in range(max(0, (item.ts - first) // slot), slots):
            begin = first + index * slot
            shared = (min(begin + slot, item.ts + sample) - max(begin, item.ts)) / slot
            if shared <= 0:
                break
            sums[index] += shared * item.value
            known[index] += shared
    least = 1.0 if sample <= slot else 0.5
    return [total / weight if weight >= least else None for total, weight in zip(sums, known, strict=True)]


def _name(source: DemandSource) -> str:
    return source.file if source.file is not None else web.shown(source.prometheus or "")


def _instant(ts: Any) -> datetime:
    try:
        if isinstance(ts, BadRowError):
            raise ts
        if isinstance(ts, datetime):
            return ts.replace(tzinfo=UTC) if ts.tzinfo is None else ts.astimezone(UTC)
        if isinstance(ts, date):
            return datetime.combine(ts, time(), UTC)
        return instants.parse(ts.strip())
    except (AttributeError, ValueError, OverflowError):
        raise BadRowError(f"ts {ts!r:.40}; expected an instant such as 2026-12-01T06:00Z") from None


def _load(value: Any) -> float:
    try:
        load = float(value)
    except (TypeError, ValueError):
        load = -1.0
    if not 0 <= load <= MOST_LOAD:
        raise BadRowError(f"y {value!r:.40}; expected a number from 0 to {MOST_LOAD:g}")
    return load


def _file_rows(source: DemandSource, site: Site) -> Rows:
    """(place, ts, y) of every row."""
    name = source.file or ""
    content, may_grow = _content(name, site)
    if content[:4] == b"PAR1":
        return _parquet_rows(name, content)
    return _csv_rows(name, content, may_grow)


def _content(name: str, site: Site) -> tuple[bytes, bool]:
    """The file's bytes, and whether they may end in the middle of a line that is being written."""
    if (match := S3_URL.fullmatch(name)) and match["prefix"]:
        try:
            return open_storage(f"s3://{match['bucket']}").read(match["prefix"], MOST_BYTES), False
        except StorageError as error:
            raise DemandError(f"{name}: {error}") from None
    if name.startswith("s3://"):
        raise DemandError(f"{name}: expected s3://bucket/key")
    path = site.file.parent / name
    try:
        content = read_file(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DemandError(f"{path}: cannot be read: {reason}") from None
    if content is None:
        raise DemandError(f"{path}: a pipe or a device; expected a file")
    if len(content) > MOST_BYTES:
        raise DemandError(f"{path}: has more than {MOST_BYTES >> 20} MB; expected the load of a year or so")
    return content, True


def _csv_rows(name: str, content: bytes, may_grow: bool) -> Rows:
    lines = content.decode("utf-8-sig", errors="replace").replace("\r\n", "\n").split("\n")
    header = [column.strip() for column in _fields(lines[0]) or []]
    if "ts" not in header or "y" not in header:
        raise DemandError(f"{name}: the first line has {', '.join(header)[:200] or 'nothing'}; expected ts,y")
    ts, y = header.index("ts"), header.index("y")
    return _csv_body(lines, ts, y, may_grow)


def _csv_body(lines: list[str], ts: int, y: int, may_grow: bool) -> Rows:
    # Line by line: an odd quote or NUL spoils its own line only.
    for number, line in enumerate(lines[1:], start=2):
        fields = _fields(line) if line.strip() else []
        if may_grow and number == len(lines) and line:
            # Without its end, 12 may become 123.
            yield f"line {number}", BadRowError("half a line, still being written"), None
        elif fields is None or (fields and len(fields) <= max(ts, y)):
            yield f"line {number}", BadRowError(f"{line!r:.40}; expected a ts and a y"), None
        elif fields:
            yield f"line {number}", fields[ts], fields[y]


def _fields(line: str) -> list[str] | None:
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return None


def _parquet_rows(name: str, content: bytes) -> Rows:
    try:
        file = pq.ParquetFile(io.BytesIO(content))
        columns = file.schema_arrow.names
        if "ts" not in columns or "y" not in columns:
            raise DemandError(f"{name}: has columns {', '.join(columns)[:200]}; expected ts and y")
        table = file.read(columns=["ts", "y"])
        ts = table.column("ts")
        if pa.types.is_timestamp(ts.type):
            ts = ts.cast(pa.timestamp("us", tz=None if ts.type.tz is None else "UTC"), safe=False)
        stamps, loads = ts.to_pylist(), table.column("y").to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        first = str(error).splitlines()[0][:200]
        raise DemandError(f"{name}: cannot be read as Parquet: {first}") from None
    return ((f"row {number}", *row) for number, row in enumerate(zip(stamps, loads, strict=True), start=1))


def _prometheus_rows(source: DemandSource, since: datetime, until: datetime) -> Rows:
    """A query's value at t is the load of the step that ends at t, as `rate(…[step])` gives it.

    The grid is anchored at the epoch, so that asking again gives the same samples.
    """
    step = timedelta(minutes=source.sample_minutes)
    first = instants.floor(since - timedelta(microseconds=1), source.sample_minutes) + step
    points = max(0, (until - first) // step)  # whole steps in [since, until)
    for start in range(0, points, MOST_POINTS):
        begin = first + (start + 1) * step
        end = first + min(points, start + MOST_POINTS) * step
        for at, value in _range_query(source, begin, end):
            try:
                ts: Any = datetime.fromtimestamp(float(at), UTC) - step
            except (TypeError, ValueError, OverflowError, OSError):
                ts = at
            yield f"at {at!r:.20}", ts, value


def _range_query(source: DemandSource, begin: datetime, end: datetime) -> list[tuple[Any, Any]]:
    base = source.prometheus or ""
    params = {
        "query": source.query or "",
        "start": f"{begin.timestamp():.3f}",
        "end": f"{end.timestamp():.3f}",
        "step": f"{source.sample_minutes * 60}",
    }
    where = web.shown(base)
    try:
        found = web.call("GET", _query_address(base), params=params)
    except web.WebError as error:
        raise DemandError(str(error)) from None
    try:
        answer = json.loads(found.body)
        if answer["status"] != "success":
            kind, text = str(answer.get("errorType"))[:40], str(answer.get("error"))[:200]
            raise DemandError(f"{where}: the query failed: {kind}: {' '.join(text.split())}")
        if answer["data"]["resultType"] != "matrix":
            raise TypeError
        series = answer["data"]["result"]
        if len(series) > 1:
            raise DemandError(f"{where}: the query gives {len(series)} series; expected one, such as sum(…)")
        return [(at, value) for at, value in series[0]["values"]] if series else []
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        said = f"{found.body[:80]!r}" if found.ok else found.said
        raise DemandError(f"{where}: not an answer of Prometheus: {said}") from None


def _query_address(base: str) -> str:
    """The range query below the base address, whose own query (a token, say) is kept."""
    address, mark, query = base.partition("?")
    return f"{address.rstrip('/')}/api/v1/query_range{mark}{query}"
