"""The counts people publish: FLOPs per token under each convention, and the MFU rows they led to."""

import pytest

from training.flops import CONVENTIONS, counted_flops_per_token, flops_per_token, mfu
from training.hardware import published_peak
from training.models import SHIPPED, Shape, config_of, shape_of

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
