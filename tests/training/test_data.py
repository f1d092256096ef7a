"""Text, tokens and the order of windows."""

from pathlib import Path

import numpy as np
import pytest

from training.data import DataError, Windows, packed_tokens, split, text_files
from training.tokenizer import END, byte_tokenizer, byte_tokens, tokens_of_directory, write_tokenizer

TEXT = "Où est-ce? “Here”, said the 猫.\n\ttabs\0and <|end|> too \N{PILE OF POO}\r\n"


def windows(count: int, seed: int = 0, seq_len: int = 4) -> Windows:
    return Windows(np.arange(count * seq_len + 1, dtype=np.int32), seq_len, seed)


def test_a_byte_is_a_token() -> None:
    assert byte_tokens("Aé").tolist() == [65, 0xC3, 0xA9]


def test_the_tokenizer_library_gives_the_same_tokens() -> None:
    text = TEXT.replace("<|end|>", "")
    assert byte_tokenizer().encode(text).ids == byte_tokens(text).tolist()
    assert byte_tokenizer().decode(byte_tokens(text).tolist()) == text


def test_transformers_loads_the_tokenizer_that_is_written_beside_a_model(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, None)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = TEXT.replace("<|end|>", "")
    assert loaded(text)["input_ids"] == byte_tokens(text).tolist()
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.padding_side) == (256, 257, "left")
    assert tokens_of_directory(tmp_path, text) == byte_tokens(text).tolist()


def test_the_shipped_text_is_the_four_plays() -> None:
    files = text_files("shakespeare")
    assert [file.stem for file in files] == [
        "hamlet",
        "macbeth",
        "midsummer_nights_dream",
        "romeo_and_juliet",
    ]
    tokens = packed_tokens(files, byte_tokens, END)
    assert len(tokens) == sum(file.stat().st_size for file in files) + 4
    assert tokens.flags.c_contiguous
    assert np.count_nonzero(tokens == END) == 4


def test_held_out_text_is_the_end_and_never_trained_on() -> None:
    kept, held_out = split(np.arange(1000, dtype=np.int32), 0.05)
    assert kept.tolist() == list(range(950))
    assert held_out.tolist() == list(range(950, 1000))


def test_each_pass_over_the_text_takes_every_window_once_in_another_order() -> None:
    found = windows(50)
    first, second = (found.at(start, 50)[:, 0].tolist() for start in (0, 50))
    assert sorted(first) == sorted(second) == [4 * index for index in range(50)]
    assert first != second


def test_a_position_means_the_same_however_it_is_reached() -> None:
    whole = windows(10).at(0, 25)
    parts = windows(10)
    resumed = windows(10)
    assert parts.at(0, 7).equal(whole[:7])
    assert resumed.at(7, 18).equal(whole[7:])


def test_another_seed_is_another_order() -> None:
    assert not windows(50, seed=1).at(0, 50).equal(windows(50, seed=2).at(0, 50))


def test_labels_follow_inputs_by_one() -> None:
    rows = windows(3).in_order(0, 3)
    assert rows.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10, 11, 12]]


def test_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(DataError, match=r"data: 4 tokens; expected at least seq_len \+ 1 = 5"):
        Windows(np.arange(4, dtype=np.int32), 4, 0)


def test_a_missing_text_is_named() -> None:
    with pytest.raises(DataError, match=r"'gone\.txt': no such file"):
        text_files(["gone.txt"])


def test_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") * 9)
    with pytest.raises(DataError, match=r"latin\.txt: not a text file in UTF-8"):
        packed_tokens([tmp_path / "latin.txt"], byte_tokens, END)
