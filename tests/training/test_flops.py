"""The counts people publish: FLOPs per token under each convention, and the MFU rows they led to."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.training.traced_memory import checkpoint_layers
from training.fit import PUBLISHED as DATA
from training.flops import (
    CONVENTIONS,
    Work,
    counted_flops_per_token,
    flops_per_token,
    hfu,
    mfu,
    recomputed_per_token,
    split_mfu,
    work_per_token,
)
from training.hardware import gpu, published_peak
from training.models import SHIPPED, ModelError, Shape, config_of, shape_of

SIZES = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b")
# GFLOP per token at a sequence of 8192, for the three sizes, and how many digits were published.
PUBLISHED = {
    "palm": (61.07, 487.7, 2638),
    "no_embedding": (57.91, 481.4, 2625),
    "matmul": (57.913, 481.435, 2625.425),
    "causal": (51.47, 449.2, 2524),
    "6n": (48.18, 423.3, 2435),
}
# model, convention, tokens/s per GPU, GPU, precision, published MFU in percent, rounding as published
ROWS = [
    ("llama-3.1-8b", "no_embedding", 5762, "H100 SXM", "bf16", 33.7, 0.05),  # torchtitan
    ("llama-3.1-8b", "no_embedding", 6667, "H100 SXM", "bf16", 39.0, 0.05),  # the same, compiled
    ("llama-3.1-8b", "palm", 2904, "A100 SXM", "bf16", 56.8, 0.05),
    ("llama-3.1-70b", "palm", 331, "A100 SXM", "bf16", 51.7, 0.05),
    ("llama-3.1-8b", "causal", 14451, "H100 SXM", "fp8", 37.6, 0.05),  # NeMo
    ("llama-3.1-8b", "causal", 30624, "B200", "fp8", 35.0, 0.05),
    ("llama-3.1-405b", "causal", 328, "H100 SXM", "fp8", 41.8, 0.05),
]


@pytest.mark.parametrize("convention", PUBLISHED)
def test_each_convention_gives_its_published_counts(convention: str) -> None:
    for model, published in zip(SIZES, PUBLISHED[convention], strict=True):
        counted = flops_per_token(shape_of(model), 8192, convention) / 1e9
        digits = len(str(published).partition(".")[2])
        assert round(counted, digits) == published


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(SIZES[0], 8_030_261_248), (SIZES[1], 70_553_706_496), (SIZES[2], 405_853_388_800)],
)
def test_llama_has_exactly_its_parameters(model: str, parameters: int) -> None:
    assert shape_of(model).parameters == parameters


@pytest.mark.parametrize(("model", "convention", "rate", "gpu", "precision", "percent", "rounding"), ROWS)
def test_published_mfu_is_reproduced(
    model: str, convention: str, rate: float, gpu: str, precision: str, percent: float, rounding: float
) -> None:
    per_token = flops_per_token(shape_of(model), 8192, convention)
    share = mfu(per_token, rate, published_peak(gpu, precision).flops_per_s)
    assert 100 * share == pytest.approx(percent, abs=rounding)


def test_mfu_is_work_done_over_work_possible() -> None:
    assert mfu(flops_per_token=10.0, tokens_per_s=5.0, peak_flops_per_s=200.0) == 0.25


def test_matmul_is_the_default() -> None:
    shape = shape_of("llama-tiny")
    assert flops_per_token(shape, 128) == flops_per_token(shape, 128, "matmul")


def test_a_tied_embedding_counts_once_and_stays() -> None:
    tied = Shape(2, 64, 176, 4, 2, 16, 264, tied=True)
    loose = Shape(2, 64, 176, 4, 2, 16, 264)
    assert loose.parameters - tied.parameters == 264 * 64
    assert flops_per_token(tied, 1, "no_embedding") == flops_per_token(loose, 1, "no_embedding")


def test_an_unknown_convention_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=f"'hfu'; expected one of {', '.join(CONVENTIONS)}"):
        flops_per_token(shape_of("llama-tiny"), 8, "hfu")


@pytest.mark.parametrize(
    ("model", "seq_len"), [("llama-micro", 96), ("llama-tiny", 64), ("llama-3.1-8b", 8192)]
)
def test_torch_counts_what_matmul_counts(model: str, seq_len: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {key: value for key, value in config_of(model).items() if key != "model_type"}
    with torch.device("meta"):
        config = LlamaConfig(**settings, attn_implementation="eager")  # type: ignore[call-arg]
        built = LlamaForCausalLM(config)
    assert counted_flops_per_token(built, seq_len) == flops_per_token(shape_of(model), seq_len)
    assert sum(p.numel() for p in built.parameters()) == shape_of(model).parameters


def test_the_small_models_are_small() -> None:
    assert 1e5 < shape_of("llama-micro").parameters < 2e5
    assert 2e6 < shape_of("llama-tiny").parameters < 4e6
    assert {"llama-30m", "llama-60m"} <= SHIPPED.keys()


def bridge_rows() -> list[dict[str, str]]:
    return list(csv.DictReader((DATA / "megatron_bridge_llama.csv").read_text(encoding="utf-8").splitlines()))


def test_the_85_published_throughputs_give_their_published_flops() -> None:
    errors = []
    for row in bridge_rows():
        model = {"8B": SIZES[0], "70B": SIZES[1], "405B": SIZES[2]}[row["model"].rpartition("_")[2]]
        rate = flops_per_token(shape_of(model), int(row["seq"]), "causal") * float(row["tok_s_gpu"])
        errors.append(abs(rate / 1e12 / float(row["published_tflops"]) - 1))
    assert len(errors) == 85
    assert sum(errors) / 85 < 0.004
    assert max(errors) < 0.024


def test_the_85_published_rows_give_their_mfu_over_the_peak_of_their_own_precision() -> None:
    recipes = {"GB200": {"fp8": 4900e12, "fp4": 9800e12}, "GB300": {"fp8": 4900e12, "fp4": 14700e12}}
    for row in bridge_rows():
        precision = "fp4" if "NVFP4" in row["precision"] else "fp8"
        # The tables were made with the recipes' peaks of the two superchips, 2 % below the datasheet's.
        peak = recipes.get(row["system"], gpu(row["system"]).peaks)[precision]
        share = 100 * float(row["published_tflops"]) * 1e12 / peak
        assert share == pytest.approx(float(row["mfu_own_precision_peak_pct"]), abs=0.06)


def test_hfu_counts_what_is_computed_again() -> None:
    model, again = Work(6, 0), Work(2, 0)
    assert hfu(model, again, tokens_per_s=5.0, peak_flops_per_s=100.0) == 0.4
    assert hfu(model, Work(0, 0), 5.0, 100.0) == mfu(6, 5.0, 100.0)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_torch_recomputes_what_checkpointing_is_said_to(mode: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, seq_len = shape_of("llama-micro"), 32
    settings = {key: value for key, value in config_of("llama-micro").items() if key != "model_type"}
    # Real tensors: on meta the policy's operations differ.
    config = LlamaConfig(**settings, attn_implementation="sdpa" if mode == "selective" else "eager")  # type: ignore[call-arg]
    counted = []
    for checkpointing in ("none", mode):
        torch.manual_seed(0)
        built = LlamaForCausalLM(config)
        checkpoint_layers(built, checkpointing)
        counted.append(counted_flops_per_token(built, seq_len))
    assert counted[1] - counted[0] == recomputed_per_token(shape, seq_len, mode).total


def test_a_split_denominator_takes_each_part_over_its_own_peak() -> None:
    assert split_mfu(
        Work(linear=80, attention=20), 1.0, linear_peak=200, attention_peak=100
    ) == pytest.approx(0.6)


def test_work_is_split_and_adds_up() -> None:
    found = work_per_token(shape_of(SIZES[0]), 8192)
    assert found.total == flops_per_token(shape_of(SIZES[0]), 8192)
    assert found.attention == 12 * 32 * 4096 * 8192


@pytest.mark.parametrize(("convention", "keys"), [("matmul", 12 * 16), ("causal", 12 * (16 - 16 * 16 / 128))])
def test_a_window_counts_only_the_keys_inside_it(convention: str, keys: float) -> None:
    shape = replace(shape_of("llama-micro"), window=16, windowed_layers=2)
    assert work_per_token(shape, 64, convention).attention == keys * 2 * 64


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_window_as_long_as_the_sequence_is_full_attention(convention: str) -> None:
    plain = shape_of("llama-micro")
    windowed = replace(plain, window=64, windowed_layers=2)
    assert flops_per_token(windowed, 64, convention) == flops_per_token(plain, 64, convention)


SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"head_dim": 32, "sliding_window": None}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_each_architecture_has_the_parameters_that_transformers_gives_it(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**SMALL, **more}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **settings}))
    make: Any = AutoModelForCausalLM
    with torch.device("meta"):
        built = make.from_config(AutoConfig.for_model(kind, **settings))
    assert shape_of(str(tmp_path)).parameters == sum(p.numel() for p in built.parameters())


def test_experts_that_a_token_does_not_visit_are_not_counted() -> None:
    dense = shape_of("llama-micro")
    mixture = replace(dense, experts=8, experts_per_token=2)
    more = 3 * dense.hidden * dense.ffn + 8 * dense.hidden  # one more expert, and the router
    assert mixture.matmul_parameters == dense.matmul_parameters + dense.layers * more
    assert mixture.parameters > 3 * mixture.active_parameters


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3'; expected one of llama"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window: True is not supported"),
        ({"model_type": "llama", "sliding_window": 128}, "sliding_window: 128 is not supported"),
        ({"model_type": "mixtral"}, "num_local_experts"),
        ({"model_type": "llama", "hidden_size": "wide"}, "config.json: .*missing or not a number"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
)
def test_what_would_be_counted_wrongly_is_refused(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **more}))
    with pytest.raises(ModelError, match=message):
        shape_of(str(tmp_path))
