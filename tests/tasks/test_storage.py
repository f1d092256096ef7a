"""Storage: a directory and S3 behave alike, one writer wins, and no key leads out of the root."""

import os
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks.storage import (
    DirectoryStorage,
    NotFoundError,
    RefusedKeyError,
    Storage,
    StorageError,
    download_tree,
    exists,
    open_storage,
    upload_tree,
    written_together,
)
from tests.conftest import MakeStorage, wait_for


def test_what_is_written_is_read(storage: Storage) -> None:
    storage.write("a/b.json", b"one")
    assert storage.read("a/b.json") == b"one"


def test_what_is_written_together_is_there_at_once_and_its_folder_is_synced_once_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, synced = open_storage(str(tmp_path)), []
    honest = os.fsync

    def sync(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        honest(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(ValueError), written_together():
        for number in range(5):
            assert storage.create(f"facts/{number}", b"one")
        assert synced == [False] * 5 and len(storage.keys("facts/")) == 5
        raise ValueError("what fails meanwhile")
    assert synced == [False] * 5 + [True]
    storage.write("facts/alone", b"one")
    assert synced[6:] == [False, True]


def test_writing_again_replaces(storage: Storage) -> None:
    storage.write("a", b"one")
    storage.write("a", b"")
    assert storage.read("a") == b""


def test_an_absent_key_is_not_found(storage: Storage, tmp_path: Path) -> None:
    for operation in (storage.read, lambda key: storage.download(key, tmp_path / "got")):
        with pytest.raises(NotFoundError, match="no object 'no/such'"):
            operation("no/such")
    assert not (tmp_path / "got").exists()


def test_a_folder_is_not_an_object(storage: Storage) -> None:
    storage.write("folder/a", b"one")
    with pytest.raises(NotFoundError):
        storage.read("folder")
    storage.delete("folder")
    assert storage.keys() == ["folder/a"]


def test_creating_wins_once_and_never_replaces(storage: Storage) -> None:
    assert storage.create("claim", b"first")
    assert not storage.create("claim", b"second")
    assert storage.read("claim") == b"first"


def test_a_deleted_key_can_be_created_again(storage: Storage) -> None:
    storage.create("claim", b"first")
    storage.delete("claim")
    assert storage.create("claim", b"second")


def test_deleting_what_is_absent_does_nothing(storage: Storage) -> None:
    storage.write("a", b"")
    storage.delete("b")
    storage.delete("a/b")
    assert storage.keys() == ["a"]


def test_one_of_sixteen_racing_creators_wins(storage: Storage) -> None:
    for turn in range(5):
        gate = threading.Barrier(16)

        def claim(writer: int, key: str = f"claims/{turn}", gate: threading.Barrier = gate) -> bool:
            gate.wait()
            return storage.create(key, f"writer {writer}".encode())

        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(claim, range(16)))
        assert won.count(True) == 1
        assert storage.read(f"claims/{turn}") == f"writer {won.index(True)}".encode()


PREFIXES = {
    "": ["a/1", "a/2/3", "ab", "b"],
    "a": ["a/1", "a/2/3", "ab"],
    "a/": ["a/1", "a/2/3"],
    "a/2": ["a/2/3"],
    "ab": ["ab"],
    "b/": [],
    "c/d/": [],
}


def test_keys_are_listed_by_prefix_in_order(storage: Storage) -> None:
    for key in ("b", "a/2/3", "a/1", "ab"):
        storage.write(key, b"")
    assert {prefix: storage.keys(prefix) for prefix in PREFIXES} == PREFIXES


def test_a_listing_goes_on_over_pages(s3: MakeStorage) -> None:
    storage = s3()
    names = [f"k/{number:02}" for number in range(12)]  # the server gives five at a time
    for name in names:
        storage.write(name, b"")
    assert storage.keys("k/") == names


def test_existence_is_of_the_whole_key(storage: Storage) -> None:
    storage.write("a/bc", b"")
    assert exists(storage, "a/bc")
    assert not exists(storage, "a/b")
    assert not exists(storage, "a")


def test_files_go_up_and_come_down(storage: Storage, tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    (tmp_path / "up").write_bytes(content)
    storage.upload("big", tmp_path / "up")
    storage.download("big", tmp_path / "new" / "folder" / "down")
    assert (tmp_path / "new" / "folder" / "down").read_bytes() == content
    assert list((tmp_path / "new" / "folder").iterdir()) == [tmp_path / "new" / "folder" / "down"]


def test_trees_go_up_and_come_down(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "up" / "deep").mkdir(parents=True)
    (tmp_path / "up" / "a").write_text("A")
    (tmp_path / "up" / "deep" / "b").write_text("B")
    upload_tree(storage, "outputs/x", tmp_path / "up")
    download_tree(storage, "outputs/x", tmp_path / "down")
    assert storage.keys() == ["outputs/x/a", "outputs/x/deep/b"]
    assert (tmp_path / "down" / "deep" / "b").read_text() == "B"
    with pytest.raises(NotFoundError, match="nothing lies under 'outputs/y'"):
        download_tree(storage, "outputs/y", tmp_path / "down")


def test_a_file_that_is_not_there_cannot_go_up(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        storage.upload("a", tmp_path / "missing")
    assert storage.keys() == []


BAD_KEYS = [
    "",
    "/etc/x",
    "../x",
    "a/../../x",
    "a/./b",
    "a//b",
    "a/",
    "a\\b",
    "a\0b",
    "k" * 901,
    "a/.tmp-1",
    "\udcff",
]


def test_a_key_outside_the_root_is_refused_by_every_operation(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    operations: list[Callable[[str], object]] = [
        storage.read,
        lambda key: storage.write(key, b""),
        lambda key: storage.create(key, b""),
        storage.delete,
        lambda key: storage.upload(key, tmp_path / "x"),
        lambda key: storage.download(key, tmp_path / "y"),
    ]
    for key in BAD_KEYS:
        for operation in operations:
            with pytest.raises(RefusedKeyError, match="stays inside the storage root"):
                operation(key)
    assert (tmp_path / "x").read_text() == "x"


def test_nothing_outside_the_root_is_listed(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    for prefix in ("../", "a/../../", "/", "/etc/", "a//"):
        with pytest.raises(RefusedKeyError):
            storage.keys(prefix)


def test_links_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("x")
    storage = open_storage(str(tmp_path / "root"))
    storage.write("a", b"")
    (tmp_path / "root" / "folder").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "file").symlink_to(tmp_path / "outside" / "secret")
    assert storage.keys() == ["a", "file", "folder"]
    for key in ("folder/secret", "file", "folder/new"):
        for operation in (storage.read, storage.delete, lambda key: storage.write(key, b"y")):
            with pytest.raises(RefusedKeyError, match="leads out"):
                operation(key)
    assert (tmp_path / "outside" / "secret").read_text() == "x"
    assert list((tmp_path / "outside").iterdir()) == [tmp_path / "outside" / "secret"]


def test_what_is_no_object_is_not_listed(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.write("inbox/a", b"")
    os.mkfifo(tmp_path / "inbox" / "pipe")  # reading it would wait without end
    Path(os.fsdecode(os.fsencode(tmp_path / "inbox") + b"/\xff.yaml")).write_text("x")
    assert storage.keys("inbox/") == ["inbox/a"]


def test_the_mark_of_a_folder_is_not_listed(s3: MakeStorage, s3_server: str) -> None:
    import boto3

    storage = s3()
    storage.write("inbox/a", b"")
    bucket = storage.root.removeprefix("s3://").split("/")[0]
    boto3.client("s3").put_object(Bucket=bucket, Key="some/prefix/inbox/", Body=b"")
    assert storage.keys("inbox/") == ["inbox/a"]


HALF = """
import sys, time
from pathlib import Path
from tasks.storage import open_storage
class Slow:
    def open(self, mode):
        return self
    def __enter__(self):
        return self
    def __exit__(self, *_):
        pass
    def read(self, size):
        print("half", flush=True)
        time.sleep(0 if not self.begun else 600)
        self.begun = True
        return b"x" * size
    begun = False
open_storage(sys.argv[1]).upload("inbox/a", Slow())
"""


def test_a_half_written_upload_is_never_listed(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", HALF, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        assert process.stdout.readline() == "half\n"  # the first block is on its way
        wait_for(lambda: any((tmp_path / "inbox").iterdir()), "the temporary file")
        assert storage.keys() == []
    finally:
        process.kill()
        process.wait()
    assert storage.keys() == []
    with pytest.raises(NotFoundError):
        storage.read("inbox/a")


def test_a_reader_sees_the_old_object_or_the_new_one(storage: Storage) -> None:
    versions = [bytes([letter]) * 50_000 for letter in b"abcd"]
    storage.write("target", versions[0])
    done = threading.Event()

    def read() -> int:
        reads = 0
        while not done.is_set():
            assert storage.read("target") in versions
            reads += 1
        return reads

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for turn in range(40):
            storage.write("target", versions[turn % 4])
        done.set()
        assert all(reader.result() > 0 for reader in readers)


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.write("a", b"a file")
    for operation in (storage.write, storage.create):
        with pytest.raises(StorageError, match="'a/b'"):
            operation("a/b", b"below a file")
        with pytest.raises(StorageError, match="File name too long"):
            operation("n" * 300, b"")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_object_that_may_not_be_read_is_a_storage_error(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.write("a", b"")
    (tmp_path / "a").chmod(0)
    with pytest.raises(StorageError, match="Permission denied"):
        storage.read("a")


@pytest.mark.parametrize(
    "root", ["gs://bucket/x", "S3://bucket", "s3://UPPER_case/x", "http://x/y", "", "file:"]
)
def test_a_root_that_is_neither_is_refused_in_one_line(root: str) -> None:
    with pytest.raises(StorageError, match="neither a directory") as refused:
        open_storage(root)
    assert repr(root) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_two_prefixes_of_one_bucket_do_not_meet(s3: MakeStorage) -> None:
    root = s3().root
    first, second = open_storage(f"{root}/a"), open_storage(f"{root}/ab/")
    first.write("x", b"1")
    second.write("y", b"2")
    assert (first.keys(), second.keys()) == (["x"], ["y"])


def test_a_bucket_that_is_not_there_is_named_in_one_line(s3: MakeStorage, tmp_path: Path) -> None:
    s3()
    storage = open_storage("s3://no-such-bucket/x")
    (tmp_path / "a").write_text("x")
    operations: list[Callable[[], object]] = [
        storage.keys,
        lambda: storage.read("a"),
        lambda: storage.write("a", b""),
        lambda: storage.create("a", b""),
        lambda: storage.upload("a", tmp_path / "a"),
    ]
    for operation in operations:
        with pytest.raises(StorageError, match="there is no bucket 'no-such-bucket'") as told:
            operation()
        assert "\n" not in str(told.value)


def test_missing_credentials_are_said_in_one_line(s3: MakeStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    storage = s3()
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StorageError, match="no credentials found; set AWS_ACCESS_KEY_ID") as told:
        storage.write("a", b"")
    assert "\n" not in str(told.value)


def test_wrong_credentials_are_said_in_one_line(s3: MakeStorage, s3_server: str, tmp_path: Path) -> None:
    storage = s3()
    (tmp_path / "a").write_text("x")

    def check_from(count: str) -> None:  # moto looks at credentials after so many more requests
        plain = {"Content-Type": "text/plain"}
        urllib.request.urlopen(
            urllib.request.Request(f"{s3_server}/moto-api/reset-auth", count.encode(), plain)
        ).close()

    check_from("0")
    try:
        operations: list[Callable[[], object]] = [
            storage.keys,
            lambda: storage.write("a", b""),
            lambda: storage.create("a", b""),
            lambda: storage.upload("a", tmp_path / "a"),
        ]
        for operation in operations:
            with pytest.raises(StorageError, match="the server answered 403 InvalidAccessKeyId") as told:
                operation()
            assert "\n" not in str(told.value)
            assert "testing" not in str(told.value)
    finally:
        check_from(str(10**9))


def test_an_endpoint_that_does_not_answer_is_said_in_one_line(
    s3: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3()
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between boto3's retries
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # and never listens
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        with pytest.raises(StorageError, match="Could not connect to the endpoint") as told:
            open_storage("s3://bucket/x").keys()
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("AWS_PROFILE", "nobody", "nobody"), ("AWS_ENDPOINT_URL", "not a url", "Invalid endpoint")],
)
def test_settings_that_boto3_refuses_are_storage_errors(
    s3: MakeStorage, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    import boto3

    s3()
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.setenv(name, value)
    with pytest.raises(StorageError, match=said) as told:
        open_storage("s3://bucket/x").keys()
    assert "\n" not in str(told.value)


def test_a_directory_appears_in_one_step_and_takes_no_other_ones_place(tmp_path: Path) -> None:
    storage = DirectoryStorage(tmp_path / "root")
    made = tmp_path / "made"
    (made / "deep").mkdir(parents=True)
    for name in ("a", "deep/b", "left"):
        (made / name).write_text(name)
    (tmp_path / "root" / "out" / "empty").mkdir(parents=True)
    for prefix in ("out/new", "out/empty"):
        assert storage.place(prefix, made, ["a", "deep/b"])
        assert storage.keys(f"{prefix}/") == [f"{prefix}/a", f"{prefix}/deep/b"]
    storage.write("out/file", b"?")
    for prefix in ("out/new", "out", "out/file"):
        assert not storage.place(prefix, made, ["left"])
    assert storage.keys("out/") == [
        "out/empty/a",
        "out/empty/deep/b",
        "out/file",
        "out/new/a",
        "out/new/deep/b",
    ]
    assert not list((tmp_path / "root").rglob(".tmp-*"))


def test_what_is_being_written_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-1").mkdir()
    (tmp_path / ".tmp-1" / "config.json").write_text("{}")
    assert open_storage(str(tmp_path)).keys() == []
