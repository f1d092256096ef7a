"""Checkpoints and manifests: whole, or passed over."""

from pathlib import Path

import pytest

from training.checkpoints import CheckpointError, LocalCheckpoints, newest, read_checkpoint, write_checkpoint
from training.manifest import MANIFEST, ManifestError, manifest_bytes, verify, write_manifest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "model" / "sub").mkdir(parents=True)
    (tmp_path / "model" / "a.bin").write_bytes(b"abc")
    (tmp_path / "model" / "sub" / "b.bin").write_bytes(b"defg")
    write_manifest(tmp_path / "model")
    return tmp_path / "model"


def saved(tmp_path: Path, *steps: int) -> LocalCheckpoints:
    """Checkpoints of these steps."""
    checkpoints = LocalCheckpoints(tmp_path / "checkpoints")
    for step in steps:
        write_checkpoint(tmp_path / "writing", {"step": step}, {"weights": {}})
        checkpoints.publish(step, tmp_path / "writing")
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
    assert read_checkpoint(found[1])[0] == {"step": 10}


def test_without_checkpoints_there_is_none(tmp_path: Path) -> None:
    assert newest(saved(tmp_path), print) is None


def test_a_damaged_checkpoint_is_passed_over_aloud(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 5, 10)
    (tmp_path / "checkpoints" / "step-10" / "state.pt").write_bytes(b"")
    heard: list[str] = []
    found = newest(checkpoints, heard.append)
    assert found is not None and found[0] == 5
    assert "step-10: state.pt has 0 bytes" in heard[0]


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
