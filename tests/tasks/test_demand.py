"""Demand: what is read from each source, what is left out, and how samples become slots."""

import json
import logging
import socket
import urllib.parse
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.cluster import Cluster, DemandSource, Service, Site
from tasks.demand import DemandError, Sample, gpus_needed, read_demand, read_source, slot_series
from tests.tasks.local_server import Asked, LocalServer, Reply, local_server

SIX = datetime(2026, 12, 1, 6, tzinfo=UTC)
HOUR = timedelta(hours=1)
ALWAYS = (datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    cluster = Cluster.model_validate({"name": "lab", "nodes": [{"name": "node0", "gpus": 4}]})
    return Site(tmp_path / "cluster.yaml", cluster)


def at(hour: float) -> datetime:
    """That hour of the day of the tests."""
    return SIX.replace(hour=0) + hour * HOUR


def write_csv(site: Site, content: str | bytes) -> DemandSource:
    data = content.encode() if isinstance(content, str) else content
    (site.file.parent / "load.csv").write_bytes(data)
    return DemandSource(file="load.csv")


# Files


def test_a_csv_file_is_read_in_order_of_time_with_naive_instants_as_utc(site: Site) -> None:
    source = write_csv(
        site,
        "ts,y\n2026-12-01T08:00Z,3\n2026-12-01 06:00:00,1.5\n2026-12-01T08:00+01:00,2\n",
    )
    expected = [Sample(at(6), 1.5), Sample(at(7), 2.0), Sample(at(8), 3.0)]
    assert read_demand(source, site, *ALWAYS) == expected


def test_only_samples_from_since_on_and_before_until_are_given(site: Site) -> None:
    source = write_csv(site, "ts,y\n" + "".join(f"2026-12-01T{hour:02}:00,{hour}\n" for hour in range(10)))
    assert [sample.value for sample in read_demand(source, site, at(3), at(5))] == [3.0, 4.0]


def test_columns_may_stand_in_any_order_among_others(site: Site) -> None:
    source = write_csv(site, "\ufeffregion, y ,ts\r\neu,4,2026-12-01T06:00Z\r\n")
    assert read_demand(source, site, *ALWAYS) == [Sample(SIX, 4.0)]


def test_of_two_rows_for_one_instant_the_later_one_stands(site: Site) -> None:
    source = write_csv(site, "ts,y\n2026-12-01T06:00Z,4\n2026-12-01T06:00Z,5\n")
    assert read_demand(source, site, *ALWAYS) == [Sample(SIX, 5.0)]


BAD_ROWS = {
    "NaN": "2026-12-01T07:00Z,nan",
    "infinite": "2026-12-01T07:00Z,inf",
    "negative": "2026-12-01T07:00Z,-1",
    "absurd": "2026-12-01T07:00Z,1e300",
    "empty": "2026-12-01T07:00Z,",
    "text": "2026-12-01T07:00Z,many",
    "no instant": "soon,1",
    "no such day": "2026-02-30T07:00Z,1",
    "before time": "0001-01-01T00:00+14:00,1",
    "one field": "2026-12-01T07:00Z",
    "open quote": '"2026-12-01T07:00Z,1',
    "binary": "\0\x01,\x02",
}


@pytest.mark.parametrize("row", BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_bad_row_is_left_out_and_said_and_the_others_stay(site: Site, row: str) -> None:
    source = write_csv(site, f"ts,y\n2026-12-01T06:00Z,1\n{row}\n2026-12-01T08:00Z,3\n")
    reading = read_source(source, site, *ALWAYS)
    assert reading.samples == (Sample(at(6), 1.0), Sample(at(8), 3.0))
    assert len(reading.left_out) == 1
    assert reading.left_out[0].startswith("line 3: ")


def test_bytes_that_are_no_text_spoil_their_own_line_only(site: Site) -> None:
    source = write_csv(site, b"ts,y\n\xff\xfe\xff,1\n2026-12-01T08:00Z,3\n")
    reading = read_source(source, site, *ALWAYS)
    assert reading.samples == (Sample(at(8), 3.0),)
    assert len(reading.left_out) == 1


def test_a_bad_load_outside_the_asked_time_is_not_said_again(site: Site) -> None:
    source = write_csv(site, "ts,y\n2026-11-01T06:00Z,nan\n2026-12-01T06:00Z,1\n")
    assert read_source(source, site, at(0), at(12)).left_out == ()


def test_a_half_written_last_line_waits_for_its_end(site: Site) -> None:
    source = write_csv(site, "ts,y\n2026-12-01T06:00Z,1\n2026-12-01T07:00Z,12")
    reading = read_source(source, site, *ALWAYS)
    assert reading.samples == (Sample(at(6), 1.0),)
    assert "line 3: half a line" in reading.left_out[0]
    with (site.file.parent / "load.csv").open("a") as file:
        file.write("3\n")
    assert read_demand(source, site, *ALWAYS)[1] == Sample(at(7), 123.0)


def test_rows_left_out_are_counted_in_the_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    source = write_csv(site, "ts,y\n" + "2026-12-01T06:00Z,nan\n" * 5)
    with caplog.at_level(logging.WARNING):
        assert read_demand(source, site, *ALWAYS) == []
    assert "load.csv: 5 rows left out: line 2: y 'nan'" in caplog.text


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_a_parquet_file_is_read_with_its_zone(site: Site, zone: str | None) -> None:
    stamps = pa.array([at(6).replace(tzinfo=None), at(7).replace(tzinfo=None)]).cast(pa.timestamp("ns"))
    if zone:
        stamps = stamps.cast(pa.timestamp("ns", tz=zone))
    pq.write_table(pa.table({"ts": stamps, "y": [1, None], "z": [0, 0]}), site.file.parent / "load.parquet")
    reading = read_source(DemandSource(file="load.parquet"), site, *ALWAYS)
    assert reading.samples == (Sample(at(6), 1.0),)
    assert reading.left_out[0].startswith("row 2: y None")


def test_a_parquet_file_may_hold_instants_as_text(site: Site) -> None:
    pq.write_table(pa.table({"ts": ["2026-12-01T06:00Z"], "y": ["2.5"]}), site.file.parent / "load.parquet")
    assert read_demand(DemandSource(file="load.parquet"), site, *ALWAYS) == [Sample(SIX, 2.5)]


BAD_FILES = {
    "empty": (b"", "the first line has nothing; expected ts,y"),
    "other columns": (b"time,value\n1,2\n", "the first line has time, value; expected ts,y"),
    "half a Parquet file": (b"PAR1\x00\x01", "cannot be read as Parquet"),
}


@pytest.mark.parametrize(("content", "said"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_file_that_is_none_of_ours_is_one_clear_line(site: Site, content: bytes, said: str) -> None:
    source = write_csv(site, content)
    with pytest.raises(DemandError, match=said) as error:
        read_demand(source, site, *ALWAYS)
    assert "load.csv" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_parquet_file_with_other_columns_is_an_error(site: Site) -> None:
    pq.write_table(pa.table({"ts": [1], "load": [2]}), site.file.parent / "load.parquet")
    with pytest.raises(DemandError, match="has columns ts, load; expected ts and y"):
        read_demand(DemandSource(file="load.parquet"), site, *ALWAYS)


@pytest.mark.parametrize("name", ["gone.csv", ".", "s3://bucket", "no\0name"])
def test_a_file_that_cannot_be_read_is_one_clear_line(site: Site, name: str) -> None:
    with pytest.raises(DemandError) as error:
        read_demand(DemandSource(file=name), site, *ALWAYS)
    assert "\n" not in str(error.value)


def test_an_absolute_path_is_taken_as_it_is(site: Site, tmp_path: Path) -> None:
    write_csv(site, "ts,y\n2026-12-01T06:00Z,1\n")
    source = DemandSource(file=str(tmp_path / "load.csv"))
    assert read_demand(source, site, *ALWAYS) == [Sample(SIX, 1.0)]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a bucket called `lab` on moto's server."""
    moto_server = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="lab")
    yield client
    server.stop()


def test_an_object_in_s3_is_read_whole_with_its_last_line(site: Site, bucket: Any) -> None:
    bucket.put_object(Bucket="lab", Key="demand/load.csv", Body=b"ts,y\n2026-12-01T06:00Z,7")
    assert read_demand(DemandSource(file="s3://lab/demand/load.csv"), site, *ALWAYS) == [Sample(SIX, 7.0)]
    for gone in ("s3://lab/demand/gone.csv", "s3://other/load.csv"):
        with pytest.raises(DemandError, match=gone):
            read_demand(DemandSource(file=gone), site, *ALWAYS)


# Prometheus


def matrix(*series: list[list[Any]]) -> Reply:
    """An answer of Prometheus with these series."""
    result = [{"metric": {"n": str(n)}, "values": values} for n, values in enumerate(series)]
    data = {"status": "success", "data": {"resultType": "matrix", "result": result}}
    return 200, json.dumps(data).encode()


def parameters(asked: Asked) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(asked.path).query))


@pytest.fixture
def prometheus() -> Iterator[LocalServer]:
    """A server that gives, at every asked point, the point's hour."""

    def answer(asked: Asked) -> Reply:
        found = parameters(asked)
        start, end, step = (int(float(found[name])) for name in ("start", "end", "step"))
        if (end - start) // step > 11_000:
            return 400, b'{"status": "error", "errorType": "bad_data", "error": "too many points"}'
        return matrix([[point, str(point // 3600 % 24)] for point in range(start, end + 1, step)])

    with local_server(answer) as server:
        yield server


def query(server: LocalServer, minutes: int = 60, **more: Any) -> DemandSource:
    return DemandSource(
        prometheus=more.pop("url", server.url), query="sum(rate(http[1h]))", sample_minutes=minutes
    )


def test_a_value_at_a_point_is_the_load_of_the_step_that_ends_there(
    site: Site, prometheus: LocalServer
) -> None:
    found = read_demand(query(prometheus), site, at(3), at(6))
    assert found == [Sample(at(3), 4.0), Sample(at(4), 5.0), Sample(at(5), 6.0)]
    (asked,) = prometheus.asked
    assert asked.path.startswith("/api/v1/query_range?")
    assert parameters(asked)["query"] == "sum(rate(http[1h]))"
    assert parameters(asked)["step"] == "3600"


def test_the_points_are_the_same_whenever_it_is_asked(site: Site, prometheus: LocalServer) -> None:
    odd = timedelta(minutes=17, microseconds=5)
    found = read_demand(query(prometheus), site, at(3) + odd, at(6) + odd)
    assert found == [Sample(at(4), 5.0), Sample(at(5), 6.0)]


def test_a_time_without_a_whole_step_asks_nothing(site: Site, prometheus: LocalServer) -> None:
    assert read_demand(query(prometheus), site, at(3.2), at(3.8)) == []
    assert prometheus.asked == []


def test_a_long_time_is_asked_in_parts(site: Site, prometheus: LocalServer) -> None:
    since = at(0) - timedelta(minutes=25_000)
    found = read_demand(query(prometheus, minutes=1), site, since, at(0))
    assert len(prometheus.asked) == 3
    assert [sample.ts for sample in found] == [since + timedelta(minutes=n) for n in range(25_000)]


def test_values_that_are_no_load_are_left_out(site: Site, prometheus: LocalServer) -> None:
    point = at(4).timestamp()
    prometheus.answer = lambda _: matrix(
        [[point, "NaN"], [point + 3600, "+Inf"], [point + 7200, "2"], ["x", "1"], [1e30, "1"]]
    )
    reading = read_source(query(prometheus), site, at(0), at(12))
    assert reading.samples == (Sample(at(5), 2.0),)
    assert len(reading.left_out) == 4


def test_no_series_is_nothing_known(site: Site, prometheus: LocalServer) -> None:
    prometheus.answer = lambda _: matrix()
    assert read_demand(query(prometheus), site, at(0), at(12)) == []


ANSWERS: dict[str, tuple[Reply, str]] = {
    "a bad query": (
        (400, b'{"status":"error","errorType":"bad_data","error":"parse\\nerror"}'),
        "the query failed: bad_data: parse error",
    ),
    "two series": (matrix([], []), "gives 2 series; expected one"),
    "unavailable": ((503, b"<html>later</html>"), "answered 503 Service Unavailable"),
    "moved": ((302, b""), "answered 302 Found"),
    "a page": ((200, b"<html>welcome</html>"), "not an answer of Prometheus: b'<html>welcome"),
    "a vector": (
        (200, b'{"status":"success","data":{"resultType":"vector","result":[]}}'),
        "not an answer of Prometheus",
    ),
    "a list": ((200, b"[]"), "not an answer of Prometheus"),
    "nesting": ((200, b"[" * 100_000), "not an answer of Prometheus"),
}


@pytest.mark.parametrize(("answer", "said"), ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_without_a_series_is_one_clear_line(
    site: Site, prometheus: LocalServer, answer: Reply, said: str
) -> None:
    prometheus.answer = lambda _: answer
    with pytest.raises(DemandError) as error:
        read_demand(query(prometheus), site, at(0), at(12))
    assert said in str(error.value)
    assert prometheus.url in str(error.value)
    assert "\n" not in str(error.value)


def test_a_server_that_is_not_there_is_one_clear_line_without_its_secrets(site: Site) -> None:
    with socket.socket() as taken:  # bound, not listening: nobody answers here
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        source = DemandSource(prometheus=f"http://me:hunter2@127.0.0.1:{port}/p?token=abc123", query="up")
        with pytest.raises(DemandError) as error:
            read_demand(source, site, at(0), at(12))
    said = str(error.value)
    assert f"http://127.0.0.1:{port}/p" in said
    assert "hunter2" not in said
    assert "abc123" not in said
    assert "\n" not in said


@pytest.mark.parametrize("url", ["prometheus:9090", "http://[", "http://host:port", "ftp://host/", "nothing"])
def test_an_address_that_is_none_is_one_clear_line(site: Site, url: str) -> None:
    with pytest.raises(DemandError) as error:
        read_demand(DemandSource(prometheus=url, query="up"), site, at(0), at(12))
    assert "\n" not in str(error.value)


def test_user_and_password_in_the_address_are_sent_and_never_logged(
    site: Site, prometheus: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = prometheus.url.replace("http://", "http://me:hunter2@") + "?tenant=abc123"
    with caplog.at_level(logging.INFO):
        read_demand(query(prometheus, url=url), site, at(3), at(6))
    assert prometheus.asked[0].headers["Authorization"].startswith("Basic ")
    assert parameters(prometheus.asked[0])["tenant"] == "abc123"
    assert "hunter2" not in caplog.text
    assert "abc123" not in caplog.text


# GPUs and slots


def test_requests_become_gpus_by_the_stated_rate_and_gpus_stay_gpus() -> None:
    service: dict[str, Any] = {
        "name": "chat",
        "requests_per_gpu_hour": 7200,
        "expected_gpus": 1,
        "ramp_per_hour": 1,
        "priority": 1,
    }
    demand = {"file": "load.csv"}
    by_requests = Service.model_validate(service | {"demand": demand})
    by_gpus = Service.model_validate(service | {"demand": demand | {"unit": "gpus"}})
    assert gpus_needed(by_requests, 3.0) == 1.5
    assert gpus_needed(by_gpus, 3.0) == 3.0


def test_a_latency_target_becomes_gpus_with_room_for_the_queue() -> None:
    latency = {"target_s": 3, "service_s": 2, "at_once": 4, "share": 0.9}
    service: dict[str, Any] = {"name": "chat", "expected_gpus": 1, "ramp_per_hour": 1, "priority": 1}
    chat = Service.model_validate(
        service | {"demand": {"file": "load.csv"}, "latency": latency, "gpus_per_replica": 2}
    )
    assert gpus_needed(chat, 0.0) == 0.0
    assert 4.0 < gpus_needed(chat, 3.0) < 4.5  # 6 requests are at work, for which 8.25 places are needed
    assert 40.0 < gpus_needed(chat, 40.0) < 42.0  # 80 at work: a large service needs little room


def minutes(count: float) -> timedelta:
    return timedelta(minutes=count)


def samples(step: timedelta, *values: float | None, start: datetime = SIX) -> list[Sample]:
    """Samples at this distance, without those that are None."""
    return [Sample(start + n * step, value) for n, value in enumerate(values) if value is not None]


SERIES: dict[str, tuple[list[Sample], timedelta, timedelta, list[float | None]]] = {
    "as long as slots": (samples(HOUR, 1, 2, 3), HOUR, HOUR, [1, 2, 3]),
    "missing is not zero": (samples(HOUR, 1, None, 3), HOUR, HOUR, [1, None, 3]),
    "zero is known": (samples(HOUR, 0, None, 0), HOUR, HOUR, [0, None, 0]),
    "several in a slot": (samples(minutes(20), 1, 2, 6, 4, None, None), minutes(20), HOUR, [3, 4, None]),
    "one held over slots": (samples(HOUR, 5), HOUR, minutes(20), [5, 5, 5]),
    "held for its length only": (samples(minutes(30), 5), minutes(30), minutes(15), [5, 5, None]),
    "by time where slots do not divide it": (
        samples(minutes(15), 4, 8),
        minutes(15),
        minutes(10),
        [4, 6, 8],
    ),
    "begun before the first slot": (
        samples(HOUR, 7, start=SIX - minutes(40)),
        HOUR,
        minutes(20),
        [7, None, None],
    ),
    "a late one fills no slot by a sliver": (
        samples(HOUR, 7, start=SIX - HOUR + minutes(1)),
        HOUR,
        minutes(10),
        [None, None, None],
    ),
    "outside": (
        samples(HOUR, 9, start=SIX - 5 * HOUR) + samples(HOUR, 9, start=at(11)),
        HOUR,
        HOUR,
        [None] * 3,
    ),
    "nothing": ([], HOUR, HOUR, [None, None, None]),
}


@pytest.mark.parametrize(("found", "sample", "slot", "expected"), SERIES.values(), ids=SERIES.keys())
def test_samples_become_slots(
    found: list[Sample], sample: timedelta, slot: timedelta, expected: list[float | None]
) -> None:
    assert slot_series(found, SIX, 3, slot, sample) == pytest.approx(expected)
