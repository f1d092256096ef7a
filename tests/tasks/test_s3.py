"""S3 through a network that fails: a real S3 server behind a real proxy that injects the faults."""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks import s3 as module
from tasks.inference import infer
from tasks.program import Place, is_published, local_directory, publish_directory
from tasks.quantization import quantize_job
from tasks.s3 import S3Storage
from tasks.storage import NotFoundError, StorageError, open_storage
from tests.conftest import MakeStorage, wait_for
from tests.tasks.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.tasks.kind_programs import ROWS, program, put, rows, small_model

SMALL = 1 << 18  # segment and part of these tests


@pytest.fixture
def proxy(
    s3: MakeStorage, s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[FaultyProxy]:
    """Stands between the tests' client and the S3 server; waits between attempts are short."""
    monkeypatch.setattr(module, "SEGMENT", SMALL)
    monkeypatch.setattr(module, "PAUSE_S", 0.001)
    monkeypatch.setenv("SLOTWISE_CACHE", str(tmp_path / "cache"))
    with faulty_proxy(s3_server) as running:
        yield running


@pytest.fixture
def storage(s3: MakeStorage, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> S3Storage:
    """Storage by way of the proxy; boto3's own pauses are left out."""
    made = s3()
    assert isinstance(made, S3Storage)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setattr("botocore.retryhandler.random.random", lambda: 0.0)
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)
    return made


def first(count: int, fault: Fault, part: str = "GET") -> Callable[[int, str, str], Fault | None]:
    """A fault for the first requests whose method or path holds this, and none for those after them."""
    left = iter(range(count))
    return lambda number, method, path: (
        fault if part in f"{method} {path}" and next(left, None) is not None else None
    )


def content(size: int) -> bytes:
    return os.urandom(size)


def test_every_operation_outlives_server_errors(
    storage: S3Storage, proxy: FaultyProxy, tmp_path: Path
) -> None:
    data = content(3 * SMALL)
    (tmp_path / "up").write_bytes(data)
    proxy.fault = lambda number, method, path: (
        Fault(status=503 if number % 2 else 500) if number % 3 else None
    )
    storage.write("a", b"one")
    assert storage.read("a") == b"one"
    assert storage.create("claim", b"me")
    assert not storage.create("claim", b"you")
    storage.upload("big", tmp_path / "up")
    storage.download("big", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data
    assert storage.keys() == ["a", "big", "claim"]
    storage.delete("a")
    with pytest.raises(NotFoundError):
        storage.read("a")


def test_a_server_that_only_fails_is_said_in_one_line(storage: S3Storage, proxy: FaultyProxy) -> None:
    proxy.fault = lambda number, method, path: Fault(status=500)
    with pytest.raises(StorageError, match="'a': the server answered 500") as told:
        storage.read("a")
    assert "\n" not in str(told.value)
    assert len(proxy.asked) == module.ATTEMPTS


def test_a_read_that_is_cut_off_is_asked_for_again(storage: S3Storage, proxy: FaultyProxy) -> None:
    data = content(5000)
    storage.write("a", data)
    proxy.fault = first(2, Fault(cut_after=2000))
    assert storage.read("a") == data


def test_a_download_goes_on_where_it_was_cut_off(
    storage: S3Storage, proxy: FaultyProxy, tmp_path: Path
) -> None:
    data = content(4 * SMALL)
    storage.write("big", data)
    sent = proxy.sent
    proxy.fault = lambda number, method, path: Fault(cut_after=SMALL // 3) if method == "GET" else None
    storage.download("big", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data
    assert proxy.sent - sent < 1.01 * len(data)  # no byte came twice
    assert [path.name for path in tmp_path.iterdir()] == ["down"]


def test_a_connection_that_brings_nothing_ends_in_one_line_and_leaves_no_file(
    storage: S3Storage, proxy: FaultyProxy, tmp_path: Path
) -> None:
    storage.write("big", content(2 * SMALL))
    proxy.fault = lambda number, method, path: Fault(cut_after=0) if method == "GET" else None
    with pytest.raises(StorageError, match=r"'big': .*; tried 6 times") as told:
        storage.download("big", tmp_path / "down")
    assert "\n" not in str(told.value)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_falls_silent_is_asked_again(
    storage: S3Storage, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content(2 * SMALL)
    storage.write("big", data)
    monkeypatch.setattr(module, "READ_TIMEOUT_S", 0.3)
    proxy.fault = first(2, Fault(silent_s=2.0))
    slow = open_storage(storage.root)
    slow.download("big", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data


def test_bytes_that_changed_on_the_way_are_noticed(
    storage: S3Storage, proxy: FaultyProxy, tmp_path: Path
) -> None:
    data = content(2 * SMALL)
    storage.write("big", data)
    proxy.fault = first(1, Fault(flip=True))
    assert storage.read("big") == data
    proxy.fault = first(1, Fault(flip=True))
    storage.download("big", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data
    proxy.fault = lambda number, method, path: Fault(flip=True) if method == "GET" else None
    for operation in (lambda: storage.read("big"), lambda: storage.download("big", tmp_path / "again")):
        with pytest.raises(StorageError, match="came with other bytes than its hash says"):
            operation()
    assert not (tmp_path / "again").exists()


def test_an_object_of_somebody_else_is_checked_by_its_tag(
    storage: S3Storage, proxy: FaultyProxy, tmp_path: Path
) -> None:
    data = content(1000)
    bucket = storage.root.removeprefix("s3://").split("/")[0]
    storage.client.put_object(Bucket=bucket, Key="some/prefix/theirs", Body=data)
    assert storage.version("theirs").hash == ("md5", hashlib.md5(data).hexdigest())
    proxy.fault = lambda number, method, path: Fault(flip=True) if method == "GET" else None
    with pytest.raises(StorageError, match="came with other bytes"):
        storage.download("theirs", tmp_path / "down")


def test_a_large_file_goes_up_in_parts_and_an_error_in_one_is_asked_again(
    storage: S3Storage, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = 5 << 20  # the least that S3 takes
    monkeypatch.setattr(module, "PART", part)
    data = content(2 * part + 1000)
    (tmp_path / "up").write_bytes(data)
    proxy.fault = first(1, Fault(status=500), "partNumber=2")
    storage.upload("big", tmp_path / "up")
    puts = [path for method, path, _ in proxy.asked if method == "PUT" and "partNumber" in path]
    assert len(puts) == 4
    assert storage.version("big").hash == ("sha256", hashlib.sha256(data).hexdigest())
    storage.download("big", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data


def test_an_upload_that_fails_leaves_no_object(
    storage: S3Storage, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 5 << 20)
    (tmp_path / "up").write_bytes(content(11 << 20))
    proxy.fault = lambda number, method, path: Fault(status=500) if "partNumber=2" in path else None
    with pytest.raises(StorageError, match="'big': the server answered 500"):
        storage.upload("big", tmp_path / "up")
    proxy.fault = lambda number, method, path: None
    assert storage.keys() == []
    bucket = storage.root.removeprefix("s3://").split("/")[0]
    assert not storage.client.list_multipart_uploads(Bucket=bucket).get("Uploads")


def test_an_object_that_is_replaced_meanwhile_is_not_mixed(
    storage: S3Storage, proxy: FaultyProxy, tmp_path: Path
) -> None:
    storage.write("big", content(2 * SMALL))
    version = storage.version("big")
    storage.write("big", content(2 * SMALL))
    with pytest.raises(StorageError, match="'big': was replaced while it was read"):
        storage.fetch("big", version, tmp_path / "down", tmp_path / "part")
    assert not (tmp_path / "down").exists()


def test_an_empty_object_comes_down(storage: S3Storage, tmp_path: Path) -> None:
    storage.write("empty", b"")
    storage.download("empty", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == b""


FETCH = """
import sys
from pathlib import Path
from tasks import s3
from tasks.object_cache import cached
from tasks.storage import open_storage
s3.SEGMENT, s3.AT_ONCE = int(sys.argv[3]), 1
print(cached(open_storage(sys.argv[1]), sys.argv[2]), flush=True)
"""


def test_a_fetch_that_was_killed_goes_on_where_it_was(
    storage: S3Storage, proxy: FaultyProxy, tmp_path: Path
) -> None:
    data = content(6 * SMALL)
    storage.write("big", data)
    reached = len(proxy.asked)

    def hold(number: int, method: str, path: str) -> Fault | None:  # the fourth segment never ends
        return Fault(silent_s=60.0) if method == "GET" and number >= reached + 5 else None

    proxy.fault = hold
    command = [sys.executable, "-c", FETCH, storage.root, "big", str(SMALL)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        wait_for(lambda: len(proxy.asked) >= reached + 5, "the fourth segment")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    proxy.fault = lambda number, method, path: None
    before = len(proxy.asked)
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(said).read_bytes() == data
    ranges = [begin for method, _, begin in proxy.asked[before:] if method == "GET"]
    assert ranges == [f"bytes={n * SMALL}-{(n + 1) * SMALL - 1}" for n in (3, 4, 5)]


def test_jobs_come_through_a_network_that_fails_and_publish_all_or_nothing(
    storage: S3Storage, proxy: FaultyProxy, tmp_path: Path
) -> None:
    publish_directory(storage, "models/small", small_model(tmp_path / "small", steps=5))
    put(storage, *[{"id": n, "prompt": f"{n} What"} for n in range(12)])
    infer(program(storage, tmp_path / "quiet", ROWS, "quiet"))
    smaller = {"model": "models/small", "seq_len": 32, "windows": 1, "measure_speed": False}

    def failing(number: int, method: str, path: str) -> Fault | None:
        if number % 3 == 0:
            return Fault(status=500)
        if number % 4 == 0 and method == "GET":
            return Fault(cut_after=1000)
        return Fault(silent_s=0.05) if number % 5 == 0 else None

    proxy.fault = failing
    infer(program(storage, tmp_path / "noisy", ROWS, "noisy"))
    assert rows(storage, "noisy") == rows(storage, "quiet")
    quantize_job(program(storage, tmp_path / "q", smaller, "q"))
    assert is_published(storage, "outputs/q/model")
    local_directory(Place(storage, "outputs/q/model", "it"), tmp_path / "read")  # whole by its hashes

    proxy.fault = lambda number, method, path: (
        Fault(status=500)
        if method == "PUT" and "/again/model/model.safetensors" in path
        else failing(number, method, path)
    )
    with pytest.raises(StorageError, match="the server answered 500"):
        quantize_job(program(storage, tmp_path / "again", smaller, "again"))
    assert not is_published(storage, "outputs/again/model")
    proxy.fault = failing
    quantize_job(program(storage, tmp_path / "again", smaller, "again"))
    assert is_published(storage, "outputs/again/model")
