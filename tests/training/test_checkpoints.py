"""Checkpoints and manifests: whole, or passed over."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from training.checkpoints import (
    CheckpointError,
    LocalCheckpoints,
    Writer,
    newest,
    read_random,
    read_state,
    read_tensors,
)
from training.manifest import MANIFEST, ManifestError, manifest_bytes, verify, write_manifest
from training.processes import World

STATE: dict[str, Any] = {
    "identity": {},
    "losses": [],
    "position": 0,
    "seconds": 0.0,
    "tokens": 0,
    "tokens_timed": 0,
    "micro_batch": 1,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "model" / "sub").mkdir(parents=True)
    (tmp_path / "model" / "a.bin").write_bytes(b"abc")
    (tmp_path / "model" / "sub" / "b.bin").write_bytes(b"defg")
    write_manifest(tmp_path / "model")
    return tmp_path / "model"


def saved(tmp_path: Path, *steps: int) -> LocalCheckpoints:
    """Checkpoints of these steps, of one small tensor."""
    import torch

    checkpoints = LocalCheckpoints(tmp_path / "checkpoints")
    writer = Writer(checkpoints, tmp_path / "scratch", World(), sharded=False, keep=9, background=True)
    for step in steps:
        state = {**STATE, "step": step}
        writer.write(step, state, {"weights": torch.full((3,), float(step))}, {"cpu": torch.get_rng_state()})
    writer.wait()
    return checkpoints


def test_a_whole_directory_passes(directory: Path) -> None:
    assert sorted(verify(directory)) == ["a.bin", "sub/b.bin"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "b.bin is missing"), (b"def", "b.bin has 3 bytes; expected 4"), (b"defX", "b.bin is corrupt")],
)
def test_a_file_that_is_not_as_listed_is_named(directory: Path, content: bytes | None, message: str) -> None:
    (directory / "sub" / "b.bin").unlink()
    if content is not None:
        (directory / "sub" / "b.bin").write_bytes(content)
    with pytest.raises(ManifestError, match=message):
        verify(directory)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (None, "it is not complete"),
        (manifest_bytes({}, complete=False), "is not complete: whoever writes it has not finished"),
        (b"{", "cannot be read"),
        (b"[]", "cannot be read"),
    ],
)
def test_a_directory_without_a_complete_manifest_is_refused(
    directory: Path, manifest: bytes | None, message: str
) -> None:
    (directory / MANIFEST).unlink()
    if manifest is not None:
        (directory / MANIFEST).write_bytes(manifest)
    with pytest.raises(ManifestError, match=message):
        verify(directory)


def test_the_newest_checkpoint_is_found(tmp_path: Path) -> None:
    found = newest(saved(tmp_path, 5, 10, 9), print)
    assert found is not None
    assert read_state(found[1])["step"] == 10
    import torch

    tensors = {"weights": torch.zeros(3)}
    read_tensors(found[1], tensors, World())
    assert tensors["weights"].tolist() == [10.0] * 3


def test_without_checkpoints_there_is_none(tmp_path: Path) -> None:
    assert newest(saved(tmp_path), print) is None


def test_a_damaged_checkpoint_is_passed_over_aloud(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 5, 10)
    (tmp_path / "checkpoints" / "step-10" / "__0_0.distcp").write_bytes(b"")
    heard: list[str] = []
    found = newest(checkpoints, heard.append)
    assert found is not None and found[0] == 5
    assert "step-10: __0_0.distcp has 0 bytes" in heard[0]


def test_nothing_is_trained_over_when_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 5)
    (tmp_path / "checkpoints" / "step-5" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is undamaged"):
        newest(checkpoints, lambda line: None)


def test_a_removed_checkpoint_is_gone(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 5, 10)
    checkpoints.remove(10)
    checkpoints.remove(10)
    assert checkpoints.steps() == [5]


def test_what_is_trained_on_while_a_checkpoint_is_written_is_not_in_it(tmp_path: Path) -> None:
    import torch

    checkpoints = LocalCheckpoints(tmp_path / "checkpoints")
    writer = Writer(checkpoints, tmp_path / "scratch", World(), sharded=False, keep=1, background=True)
    weights = torch.ones(1000)
    writer.write(1, {"step": 1}, {"weights": weights}, {})
    weights.zero_()
    writer.wait()
    read = {"weights": torch.full((1000,), 7.0)}
    read_tensors(checkpoints.fetch(1), read, World())
    assert read["weights"].eq(1).all()


def test_a_checkpoint_that_cannot_be_written_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    import torch

    (tmp_path / "checkpoints").write_text("a file where a directory should be")
    checkpoints = LocalCheckpoints(tmp_path / "checkpoints")
    writer = Writer(checkpoints, tmp_path / "scratch", World(), sharded=False, keep=1, background=True)
    writer.write(1, {"step": 1}, {"weights": torch.ones(1)}, {})
    with pytest.raises(CheckpointError, match="checkpoint not written"):
        writer.wait()
    assert checkpoints.steps() == []


@pytest.mark.parametrize("sharded", [False, True])
def test_what_goes_wrong_while_tensors_are_written_is_said_in_one_line(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)  # torch makes a BaseException of it
    checkpoints = LocalCheckpoints(tmp_path / "checkpoints")
    writer = Writer(checkpoints, tmp_path / "scratch", World(), sharded=sharded, keep=1, background=True)
    writer.write(1, {"step": 1}, {"weights": torch.ones(1)}, {})
    with pytest.raises(CheckpointError, match=r"checkpoint not written: .*No space left on device") as caught:
        writer.wait()
    assert "\n" not in str(caught.value)
    assert checkpoints.steps() == []


def _read_into(directory: Path) -> None:
    import torch

    read_tensors(directory, {"weights": torch.zeros(3)}, World())


def _read_random(directory: Path) -> None:
    read_random(directory, 0)


def _read_larger(directory: Path) -> None:
    import torch

    read_tensors(directory, {"weights": torch.zeros(4)}, World())


@pytest.mark.parametrize(
    ("file", "content", "read", "message"),
    [
        ("state.json", b"[]", read_state, r"state\.json: expected an object"),
        ("state.json", b'{"step": "ten"}', read_state, r"state\.json: identity: None; expected dict"),
        (
            "random-0.pt",
            b"no archive",
            lambda found: read_random(found, 0),
            r"random-0\.pt: is no random state",
        ),
        (".metadata", b"no pickle", _read_into, r"step-1: cannot be read"),
        ("__0_0.distcp", b"", _read_into, r"step-1: cannot be read"),
        (None, b"", _read_larger, r"step-1: cannot be read: .*weights"),
    ],
)
def test_a_checkpoint_of_another_kind_is_one_line(
    file: str | None,
    content: bytes,
    read: Callable[[Path], Any],
    message: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    directory = saved(tmp_path, 1).fetch(1)
    if file is not None:
        (directory / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(directory)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""
