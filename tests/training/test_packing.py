"""Packed tokens: contiguous across shards, whole or refused, and read in place."""

from pathlib import Path

import numpy as np
import pytest

from tests.training.small_runs import trained
from training.__main__ import main
from training.data import DataError, Windows
from training.manifest import ManifestError
from training.packing import PackedTokens, pack

TOKENS = np.arange(1000, dtype=np.int32) * 7 % 300


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A thousand tokens in shards of 300, packed from parts of other sizes."""
    pack([TOKENS[:10], TOKENS[10:650], TOKENS[650:]], 300, tmp_path / "packed", shard_tokens=300)
    return tmp_path / "packed"


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (295, 305), (0, 1000), (599, 901), (900, 1000), (5, 5)])
def test_a_slice_is_the_same_whatever_shards_it_lies_in(packed: Path, start: int, stop: int) -> None:
    assert PackedTokens(packed)[start:stop].tolist() == TOKENS[start:stop].tolist()


def test_tokens_of_one_shard_are_not_copied(packed: Path) -> None:
    tokens = PackedTokens(packed)
    assert len(tokens) == 1000 and len(tokens.shards) == 4
    assert np.shares_memory(tokens[10:20], tokens.shards[0])


def test_windows_are_those_of_the_same_tokens_in_memory(packed: Path) -> None:
    ours, plain = Windows(PackedTokens(packed), 16, 1), Windows(TOKENS, 16, 1)
    assert ours.at(50, 30).equal(plain.at(50, 30))


@pytest.mark.parametrize(
    ("vocab", "kind"), [(65_536, "uint16"), (65_537, "uint32")], ids=["two bytes", "four bytes"]
)
def test_a_token_takes_as_many_bytes_as_the_vocabulary_needs(tmp_path: Path, vocab: int, kind: str) -> None:
    pack([np.array([0, vocab - 1], np.int32)], vocab, tmp_path / "p")
    assert f'"dtype": "{kind}"' in (tmp_path / "p" / "tokens.json").read_text()
    assert PackedTokens(tmp_path / "p")[0:2].tolist() == [0, vocab - 1]


def test_a_corrupt_shard_is_named(packed: Path) -> None:
    shard = packed / "shard-00001.bin"
    shard.write_bytes(b"\xff" + shard.read_bytes()[1:])
    with pytest.raises(ManifestError, match=r"shard-00001\.bin is corrupt"):
        PackedTokens(packed)


def test_a_directory_in_use_is_not_packed_over(packed: Path) -> None:
    with pytest.raises(ManifestError, match="is not empty"):
        pack([TOKENS], 300, packed)


def test_packed_text_trains_as_the_text_does(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 60)
    assert main(["pack", str(text), "--model", "llama-micro", "--output", str(tmp_path / "packed")]) == 0
    plain = trained(tmp_path / "plain", data=str(text), steps=3)
    ours = trained(tmp_path / "ours", data=str(tmp_path / "packed"), steps=3)
    assert ours.progress.losses == plain.progress.losses
    assert ours.held_out_loss == plain.held_out_loss


def test_tokens_that_the_model_does_not_know_are_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has token 299; llama-micro knows 264 tokens"):
        trained(tmp_path / "out", data=str(packed))


def test_a_corrupt_shard_ends_a_run_in_one_line_and_leaves_nothing(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (packed / "shard-00002.bin").write_bytes(b"")
    config = tmp_path / "c.yaml"
    config.write_text(f"{{model: llama-micro, data: {packed}, seq_len: 16, steps: 2}}")
    assert main(["run", str(config), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "shard-00002.bin has 0 bytes; expected 600" in said
    assert not (tmp_path / "out").exists()
