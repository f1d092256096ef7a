"""Sharded models: what one process would have, though none holds it whole."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.sharded import LARGE, digests, know_large
from training import models, output, shards
from training.models import ModelError
from training.processes import free_port, run_quietly


def written(directory: Path, name: str = "llama-micro", dtype: torch.dtype = torch.float32) -> str:
    """A Hugging Face directory with fresh weights."""
    models.build(name, seed=5).to(dtype).save_pretrained(directory)
    return str(directory)


def read(directory: str, shapes: dict[str, torch.Size], rows: slice) -> dict[str, torch.Tensor]:
    """These rows of each tensor."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, part: torch.Tensor) -> None:
        found[name] = part.clone()

    shards.read_rows(directory, shapes, dict.fromkeys(shapes, rows), keep)
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["two embeddings", "one"])
def test_weights_drawn_one_by_one_are_those_drawn_together(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, longest, rope = models.SHIPPED["llama-micro"]
    monkeypatch.setitem(models.SHIPPED, "llama-micro", (replace(shape, tied=tied), longest, rope))
    together = dict(models.build("llama-micro", 3).named_parameters())
    state = torch.get_rng_state()
    apart = dict(shards.drawn("llama-micro", 3, None, torch.device("cpu")))
    assert apart.keys() == together.keys()
    assert all(torch.equal(apart[name], together[name]) for name in together)
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_of_a_directory_are_read_alone(tmp_path: Path) -> None:
    directory = written(tmp_path)
    whole = dict(models.load(directory).named_parameters())
    shapes = {name: value.shape for name, value in whole.items()}
    found = read(directory, shapes, slice(3, 11))
    assert all(torch.equal(found[name], whole[name][3:11]) for name in whole)
    with pytest.raises(ModelError, match=r"mismatched keys: model\.norm\.weight; the weights are not whole"):
        read(directory, {**shapes, "model.norm.weight": torch.Size([65])}, slice(3, 11))


def test_a_directory_with_other_names_is_loaded_whole(tmp_path: Path) -> None:
    whole = models.build("llama-micro", seed=5)
    whole.base_model.save_pretrained(tmp_path)  # no `model.` before the names, no output layer
    (tmp_path / "config.json").write_text(json.dumps(models.config_of("llama-micro")))
    shapes = {"model.norm.weight": torch.Size([64])}
    with pytest.raises(ModelError, match=r"missing keys: lm_head\.weight"):
        read(str(tmp_path), shapes, slice(0, 64))
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    found = read(str(tmp_path), shapes, slice(0, 64))
    assert torch.equal(found["model.norm.weight"], whole.base_model.norm.weight)


def test_weights_in_several_files_are_what_transformers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.build("llama-micro", seed=5)
    monkeypatch.setattr(output, "FILE_BYTES", 100_000)
    weights = ((name, value.detach()) for name, value in model.named_parameters())
    output.write_model(models.skeleton("llama-micro"), tmp_path / "model", None, weights)
    files = list((tmp_path / "model").glob("model-*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 120_000 for file in files)
    assert digests(models.load(str(tmp_path / "model"))) == digests(model)


def built(tmp_path: Path, model: str) -> list[dict[str, Any]]:
    """What two processes that share a model say of it."""
    answer = tmp_path / "answer"
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.training.sharded", str(answer), model]
    code, said = run_quietly(command, 2, environment)
    assert code == 0, said
    return [json.loads(Path(f"{answer}.{rank}").read_text()) for rank in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("source", ["large", "a directory", "tied", "a tied directory"])
def test_no_process_holds_the_whole_of_a_sharded_model(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("large", "tied"):
        monkeypatch.setitem(models.SHIPPED, name, ())  # taken out again afterwards
    know_large()
    name = "tied" if "tied" in source else "large"
    if "directory" in source:
        whole = models.load(directory := written(tmp_path / "model", name, torch.bfloat16))
    else:
        whole, directory = models.build(name, seed=0), name
    expected = digests(whole)
    del whole
    for one in built(tmp_path, directory):
        assert one["digests"] == expected
        if name == "large":  # half of it is kept
            assert 0.45 < one["bytes"] / (4 * LARGE.parameters) < 0.65
