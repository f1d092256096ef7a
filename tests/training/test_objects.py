"""Data and checkpoints in S3: whole or not there, and a line for what is missing."""

from pathlib import Path

import pytest

from tests.conftest import MakeStorage
from tests.training.small_runs import SMALL, trained
from training.__main__ import main
from training.checkpoints import CheckpointError, ObjectCheckpoints, newest
from training.config import load_config
from training.data import DataError
from training.models import ModelError
from training.objects import fetched, keys, put_directory
from training.packing import pack
from training.tokenizer import byte_tokens
from training.trainer import train

TEXT = "To be, or not to be, that is the question.\n" * 60


@pytest.fixture
def bucket(s3: MakeStorage) -> str:
    """The URL of an empty bucket."""
    return s3().root.rstrip("/")


def test_packed_tokens_train_from_a_bucket_as_from_a_file(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    asked = ["pack", str(tmp_path / "text.txt"), "--model", "llama-micro", "--output"]
    assert main([*asked, f"{bucket}/data/packed"]) == 0
    here = trained(tmp_path / "here", data=str(tmp_path / "text.txt"), steps=2)
    there = trained(tmp_path / "there", data=f"{bucket}/data/packed", steps=2)
    assert there.progress.losses == here.progress.losses


def test_a_model_trains_on_from_a_bucket(bucket: str, tmp_path: Path) -> None:
    model = trained(tmp_path / "first", steps=2).directory
    put_directory(f"{bucket}/models/small", model)
    here = trained(tmp_path / "here", model=str(model), steps=2)
    there = trained(tmp_path / "there", model=f"{bucket}/models/small", steps=2)
    assert there.progress.losses == here.progress.losses
    assert load_config(tmp_path / "there" / "resolved.yaml").model == f"{bucket}/models/small"
    with pytest.raises(ModelError, match=f"model: {bucket}/models/gone: no such object"):
        trained(tmp_path / "gone", model=f"{bucket}/models/gone", steps=2)


def test_what_is_fetched_once_is_not_fetched_again(bucket: str, tmp_path: Path) -> None:
    pack([byte_tokens(TEXT)], 264, tmp_path / "packed")
    put_directory(f"{bucket}/packed", tmp_path / "packed")
    first = fetched(f"{bucket}/packed", tmp_path / "cache")
    before = {path.name: path.stat().st_mtime_ns for path in first.iterdir()}
    assert fetched(f"{bucket}/packed", tmp_path / "cache") == first
    assert {path.name: path.stat().st_mtime_ns for path in first.iterdir()} == before


def test_a_missing_object_is_one_line_and_leaves_nothing(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"{{model: llama-micro, data: {bucket}/gone.txt, seq_len: 16, steps: 2}}")
    assert main(["run", str(config), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said == f"training: data: {bucket}/gone.txt: no such object\n"
    assert not (tmp_path / "out").exists()


def test_a_directory_that_is_still_being_put_is_refused(bucket: str, tmp_path: Path) -> None:
    from training.manifest import manifest_bytes
    from training.objects import put

    (tmp_path / "manifest.json").write_bytes(manifest_bytes({}, complete=False))
    put(f"{bucket}/half/manifest.json", tmp_path / "manifest.json")
    with pytest.raises(DataError, match="is not complete: whoever writes it has not finished"):
        trained(tmp_path / "out", data=f"{bucket}/half")


def test_a_run_goes_on_from_checkpoints_in_a_bucket(bucket: str, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", steps=6, schedule="constant")
    config = SMALL.model_copy(update={"checkpoint_every": 2, "schedule": "constant"})
    place = ObjectCheckpoints(f"{bucket}/run", tmp_path / "restored")
    train(config.model_copy(update={"steps": 4}), tmp_path / "first", place)
    assert place.steps() == [2, 4]
    elsewhere = ObjectCheckpoints(f"{bucket}/run", tmp_path / "restored elsewhere")
    resumed = train(config.model_copy(update={"steps": 6}), tmp_path / "second", elsewhere)
    assert resumed.progress.losses == whole.progress.losses
    assert place.steps() == [4, 6]
    assert not [key for key in keys(f"{bucket}/run/") if key.startswith("step-2/")]


def test_a_damaged_checkpoint_in_a_bucket_is_passed_over(bucket: str, tmp_path: Path) -> None:
    from training.objects import put

    place = ObjectCheckpoints(f"{bucket}/run", tmp_path / "restored")
    train(SMALL.model_copy(update={"steps": 2, "checkpoint_every": 1}), tmp_path / "out", place)
    (tmp_path / "damage").write_bytes(b"damage")
    put(f"{bucket}/run/step-2/state.json", tmp_path / "damage")
    heard: list[str] = []
    found = newest(place, heard.append)
    assert found is not None and found[0] == 1
    assert "step-2: state.json has 6 bytes" in heard[0]
    put(f"{bucket}/run/step-1/state.json", tmp_path / "damage")
    with pytest.raises(CheckpointError, match="no checkpoint is undamaged"):
        newest(ObjectCheckpoints(f"{bucket}/run", tmp_path / "restored elsewhere"), heard.append)
