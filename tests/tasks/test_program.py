"""What the three programs share: places, publishing, and how a program ends."""

import contextlib
import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks import program as programs
from tasks.program import (
    FinalError,
    JobFailedError,
    Place,
    Program,
    is_published,
    local_file,
    local_model,
    publish_directory,
)
from tasks.specfile import SpecError
from tasks.storage import DirectoryStorage, Storage, StorageError, open_storage
from tests.conftest import wait_for
from tests.tasks.kind_programs import program
from training.manifest import ManifestError, manifest_bytes, write_manifest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "made"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    write_manifest(directory)
    return directory


def at(storage: Storage, key: str) -> Place:
    return Place(storage, key, f"model: {key!r}")


def test_what_is_published_comes_back_whole(storage: Storage, model: Path, tmp_path: Path) -> None:
    keys = publish_directory(storage, "outputs/a/model", model)
    assert sorted(keys) == storage.keys("outputs/a/model/")
    found = local_model(at(storage, "outputs/a/model"), tmp_path / "scratch")
    assert (found / "model.safetensors").read_bytes() == b"weights"


def test_a_model_is_never_replaced_where_a_reader_may_be_at_it(storage: Storage, model: Path) -> None:
    keys = publish_directory(storage, "m", model)
    before = {key: storage.read(key) for key in keys}
    assert publish_directory(storage, "m", model) == keys  # the same once more is no change
    (model / "model.safetensors").write_bytes(b"others!")
    write_manifest(model)
    with pytest.raises(FinalError, match=r"^m: something else lies there already, .* use another output"):
        publish_directory(storage, "m", model)
    assert {key: storage.read(key) for key in storage.keys("m/")} == before


def test_what_somebody_put_there_without_a_manifest_is_left_alone(storage: Storage, model: Path) -> None:
    storage.write("m/config.json", b"theirs")
    with pytest.raises(FinalError, match="m: something else lies there already"):
        publish_directory(storage, "m", model)
    assert storage.keys("m/") == ["m/config.json"]


def test_a_half_whose_writer_died_makes_room(storage: Storage, model: Path) -> None:
    storage.write("m/manifest.json", manifest_bytes({}, complete=False))
    storage.write("m/part-9.safetensors", b"half")
    publish_directory(storage, "m", model)
    assert storage.keys("m/") == ["m/config.json", "m/manifest.json", "m/model.safetensors"]


def test_publishing_that_is_cut_off_is_seen_as_incomplete(
    storage: Storage, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(key: str, path: Path) -> None:
        raise StorageError("gone")

    def full(directory: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        if isinstance(storage, DirectoryStorage):
            patched.setattr("tasks.storage._sync_directory", full)
        else:
            patched.setattr(storage, "upload", cut_off)
        with pytest.raises(StorageError):
            publish_directory(storage, "m", model)
    assert not is_published(storage, "m")
    seen = SpecError if isinstance(storage, DirectoryStorage) else ManifestError
    with pytest.raises(seen, match=r"no model lies there|is not complete"):
        local_model(at(storage, "m"), tmp_path / "scratch")
    assert not isinstance(storage, DirectoryStorage) or not list(storage.directory.rglob(".tmp-*"))
    publish_directory(storage, "m", model)
    assert is_published(storage, "m")


def test_a_reader_that_asks_all_the_time_while_a_model_is_published_gets_none_or_all_of_it(
    storage: Storage, model: Path, tmp_path: Path
) -> None:
    for part in range(6):
        (model / f"part-{part}.safetensors").write_bytes(bytes([part]) * 50_000)
    write_manifest(model)
    whole = {path.name: path.read_bytes() for path in model.iterdir()}
    answers: list[dict[str, bytes] | None] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            try:
                found = local_model(at(storage, "m"), tmp_path / "scratch")
            except (SpecError, ManifestError):  # nothing lies there, or not all of it
                answers.append(None)
            else:
                answers.append({path.name: path.read_bytes() for path in found.iterdir()})

    def look() -> None:
        """What knows no manifest, such as vLLM: where there is a config.json it takes all that there is."""
        while not ended.is_set():
            names = {key.removeprefix("m/") for key in storage.keys("m/")}
            if "config.json" in names or (names and isinstance(storage, DirectoryStorage)):
                seen.append(names | {"manifest.json"})

    def overwrite() -> None:
        """Somebody else, who is about to publish another model there."""
        while not ended.is_set():
            with contextlib.suppress(FinalError, ManifestError):
                publish_directory(storage, "m", other)
                others.append(True)

    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "part-3.safetensors").write_bytes(b"?" * 50_000)
    write_manifest(other)
    seen: list[set[str]] = []
    others: list[bool] = []
    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask), pool.submit(look)]
        try:
            wait_for(lambda: answers or asking[0].done(), "the reader to ask")
            publish_directory(storage, "m", model)
            asking.append(pool.submit(overwrite))
            count = len(answers)
            wait_for(lambda: len(answers) > count + 3 or asking[0].done(), "the reader to find the model")
        finally:
            ended.set()
        for each in asking:
            each.result()
    assert answers[0] is None and answers[-1] == whole
    assert all(answer is None or answer == whole for answer in answers)
    assert seen and all(names == whole.keys() for names in seen)
    assert not others and local_model(at(storage, "m"), tmp_path / "last")


def test_a_damaged_model_is_refused(storage: Storage, model: Path, tmp_path: Path) -> None:
    publish_directory(storage, "m", model)
    storage.write("m/model.safetensors", b"weightZ")
    with pytest.raises(ManifestError, match=r"model: 'm': model\.safetensors is corrupt"):
        local_model(at(storage, "m"), tmp_path / "scratch")


def test_a_directory_that_somebody_uploaded_without_a_manifest_is_a_model(
    storage: Storage, tmp_path: Path
) -> None:
    storage.write("m/config.json", b"{}")
    assert (local_model(at(storage, "m"), tmp_path / "scratch") / "config.json").read_bytes() == b"{}"


# What a checkpoint says of a run whose model lay where this machine has nothing.
ELSEWHERE = json.dumps(
    {"config": {"model": "/gone"}, "identity": {}, "losses": []}
    | dict.fromkeys(("step", "position", "seconds", "tokens", "tokens_timed", "micro_batch"), 1)
)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"weights.bin": "?"}, r"has no config\.json; expected a Hugging Face directory, or a checkpoint"),
        (
            {"state.json": ELSEWHERE, ".metadata": ""},
            r"checkpoint of /gone, whose configuration is not on this",
        ),
        ({"state.json": "{}", ".metadata": ""}, r"state\.json: identity: None; expected dict"),
        ({"state.json": "?", ".metadata": ""}, "cannot be read: Expecting value"),
    ],
)
def test_what_is_neither_a_model_nor_a_checkpoint_that_can_be_one_is_said(
    storage: Storage, tmp_path: Path, files: dict[str, str], message: str
) -> None:
    (tmp_path / "state").mkdir()
    for name, text in files.items():
        (tmp_path / "state" / name).write_text(text)
    write_manifest(tmp_path / "state")
    publish_directory(storage, "outputs/a/checkpoints/step-8", tmp_path / "state")
    with pytest.raises(SpecError, match=message):
        local_model(at(storage, "outputs/a/checkpoints/step-8"), tmp_path / "scratch")


def test_the_output_of_a_job_suggests_the_model_in_it(storage: Storage, model: Path, tmp_path: Path) -> None:
    publish_directory(storage, "outputs/a/model", model)
    with pytest.raises(SpecError, match=r"no model lies there; did you mean outputs/a/model\?"):
        local_model(at(storage, "outputs/a"), tmp_path / "scratch")


def test_a_file_in_storage_is_a_file_here(storage: Storage, tmp_path: Path) -> None:
    storage.write("in/rows.jsonl", b"{}")
    assert local_file(at(storage, "in/rows.jsonl"), tmp_path / "scratch").read_bytes() == b"{}"
    with pytest.raises(SpecError, match=r"'gone': no such object in"):
        local_file(at(storage, "gone"), tmp_path / "scratch")


def test_a_link_out_of_the_storage_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(SpecError, match="a link leads out of the storage root"):
        local_file(at(open_storage(str(tmp_path / "root")), "link"), tmp_path / "scratch")


@pytest.mark.parametrize(
    "reference", ["../x", "/etc/passwd", "a/../../x", "s3://bucket/../x", "", "s3://bucket", "a//b"]
)
def test_a_reference_out_of_the_storage_is_refused(tmp_path: Path, reference: str) -> None:
    where = program(open_storage(str(tmp_path)), tmp_path, {})
    with pytest.raises(SpecError, match=r"spec\.yaml: input: .*; expected a key inside the storage root"):
        where.place("input", reference)


def test_a_reference_to_a_bucket_is_that_bucket(tmp_path: Path) -> None:
    place = program(open_storage(str(tmp_path)), tmp_path, {}).place("input", "s3://bucket/some/key.jsonl")
    assert (place.storage.root, place.key) == ("s3://bucket", "some/key.jsonl")


@pytest.fixture
def ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Program], None]], tuple[int, str]]:
    """Runs some work as a program; its exit code, and the message in its metrics."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLOTWISE_METRICS", str(tmp_path / "metrics.json"))
    Path("spec.yaml").write_text("{}")

    def end(work: Callable[[Program], None]) -> tuple[int, str]:
        code = programs._run(work, ["spec.yaml"])
        return code, json.loads(Path("metrics.json").read_text()).get("message", "")

    return end


def raising(error: BaseException) -> Callable[[Program], None]:
    def work(_: Program) -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (SpecError("a: wrong\nb: wrong"), 2, "spec.yaml: a: wrong; b: wrong"),
        (StorageError("no answer"), 1, "no answer"),
        (JobFailedError("worse than allowed"), 1, "worse than allowed"),
        (KeyError("x"), 1, "KeyError: 'x'"),
    ],
)
def test_an_error_is_one_message_and_says_whether_to_try_again(
    ended: Callable[..., tuple[int, str]], error: Exception, code: int, message: str
) -> None:
    assert ended(raising(error)) == (code, message)


def test_sigterm_ends_work_that_does_not_look(ended: Callable[..., tuple[int, str]]) -> None:
    def work(_: Program) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("went on")

    assert ended(work) == (143, "stopped before its work was done")


def test_sigterm_is_left_to_work_that_looks(ended: Callable[..., tuple[int, str]]) -> None:
    seen = []

    def work(program: Program) -> None:
        with program.stop_deferred() as stopping:
            seen.append(stopping())
            os.kill(os.getpid(), signal.SIGTERM)
            seen.append(stopping())

    assert ended(work) == (0, "")
    assert seen == [False, True]


def test_by_hand_the_current_directory_is_the_storage(ended: Callable[..., tuple[int, str]]) -> None:
    roots = []
    ended(lambda program: roots.append((program.storage.root, program.output)))
    assert roots == [(str(Path.cwd()), "outputs/spec")]


def test_metrics_hold_what_json_can_hold(ended: Callable[..., tuple[int, str]]) -> None:
    ended(lambda program: program.metrics.update(loss=float("nan"), steps=3))
    assert json.loads(Path("metrics.json").read_text()) == {"loss": None, "steps": 3}


def test_a_spec_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert programs._run(raising(AssertionError()), ["gone.yaml"]) == 2
    assert capsys.readouterr().err == "gone.yaml: No such file or directory; expected a spec file\n"


def test_an_incomplete_manifest_is_not_a_published_directory(storage: Storage) -> None:
    storage.write("m/manifest.json", manifest_bytes({}, complete=False))
    assert not is_published(storage, "m")
    assert not is_published(storage, "nothing")
