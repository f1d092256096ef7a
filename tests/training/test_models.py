"""Which models are known, and what is refused because its FLOPs would be counted wrongly."""

import json
from pathlib import Path
from typing import Any

import pytest

from training.models import ModelError, config_of, load, longest_sequence, shape_of


def directory_with(tmp_path: Path, **changes: Any) -> str:
    """A directory whose config.json is the micro model's with some keys changed."""
    (tmp_path / "config.json").write_text(json.dumps({**config_of("llama-micro"), **changes}))
    return str(tmp_path)


def test_a_directory_has_the_shape_that_its_config_states(tmp_path: Path) -> None:
    assert shape_of(directory_with(tmp_path)) == shape_of("llama-micro")
    assert longest_sequence(str(tmp_path)) == 1024


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"'llama-3\.1-9b': no such model; did you mean llama-3\.1-8b\?"):
        shape_of("llama-3.1-9b")


@pytest.mark.parametrize(
    ("key", "value"),
    [("sliding_window", 4096), ("num_local_experts", 8), ("num_experts", 8), ("model_type", "deepseek_v3")],
)
def test_what_a_count_would_get_wrong_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=key):
        shape_of(directory_with(tmp_path, **{key: value}))


def test_a_config_without_a_size_names_it(tmp_path: Path) -> None:
    config = config_of("llama-micro")
    del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="hidden_size"):
        shape_of(str(tmp_path))


def test_a_config_that_is_not_json_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not a JSON configuration"):
        shape_of(str(tmp_path))


def test_weights_cut_short_are_one_line(tmp_path: Path) -> None:
    directory_with(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)
