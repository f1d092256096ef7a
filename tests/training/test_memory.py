"""Memory that is predicted is the memory that torch's trackers count, and what fits is known beforehand."""

from dataclasses import replace

import pytest

from tests.training.traced_memory import kept_by_a_layer, peak_of_sharded_step, peak_of_step, shape_with
from training.memory import (
    CHECKPOINTING,
    GIB,
    Checkpointing,
    Layout,
    Memory,
    largest_micro_batch,
    layer_activations,
    predict,
)
from training.models import ModelError, shape_of

LLAMA = shape_of("llama-3.1-8b")


LONG = pytest.mark.long  # seconds each; one of a sort is enough for CI


@pytest.mark.parametrize(
    ("precision", "checkpointing"),
    [
        ("bf16", "selective"),
        pytest.param("fp32", "none", marks=LONG),
        pytest.param("fp32", "selective", marks=LONG),
        pytest.param("fp32", "full", marks=LONG),
        pytest.param("bf16", "none", marks=LONG),
        pytest.param("bf16", "full", marks=LONG),
    ],
)
def test_a_step_takes_what_the_tracker_counts(precision: str, checkpointing: Checkpointing) -> None:
    layout = Layout(2048, precision=precision, checkpointing=checkpointing, device="cpu")
    shape = shape_with(layers=3)
    assert predict(shape, layout).total == pytest.approx(peak_of_step(shape, layout), rel=0.04)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize(("heads", "kv_heads", "micro_batch"), [(8, 2, 1), pytest.param(4, 4, 3, marks=LONG)])
def test_a_layer_keeps_what_the_tracker_counts(
    checkpointing: Checkpointing, heads: int, kv_heads: int, micro_batch: int
) -> None:
    layout = Layout(512, micro_batch, checkpointing=checkpointing, sharding="fsdp", device="cpu")
    shape = shape_with(1, 512, heads, kv_heads)
    assert layer_activations(shape, layout) == pytest.approx(kept_by_a_layer(shape, layout), rel=0.005)


@pytest.mark.parametrize(
    ("checkpointing", "reshard"),
    [
        ("full", True),
        pytest.param("none", True, marks=LONG),
        pytest.param("selective", True, marks=LONG),
        pytest.param("full", False, marks=LONG),
    ],
)
def test_a_sharded_step_takes_what_the_tracker_counts(checkpointing: Checkpointing, reshard: bool) -> None:
    shape = shape_with(layers=4)
    layout = Layout(4096, checkpointing=checkpointing, sharding="fsdp", gpus=8, device="cpu")
    layout = replace(layout, reshard_after_forward=reshard)
    assert predict(shape, layout).total == pytest.approx(peak_of_sharded_step(shape, layout), rel=0.04)


@pytest.mark.parametrize(("checkpointing", "gib"), [("selective", 0.486), ("full", 0.0625)])
def test_a_layer_of_8b_keeps_what_was_measured_elsewhere(checkpointing: Checkpointing, gib: float) -> None:
    layout = Layout(8192, checkpointing=checkpointing, sharding="fsdp")
    assert layer_activations(LLAMA, layout) / GIB == pytest.approx(gib, abs=0.001)


def test_state_is_sixteen_bytes_a_parameter_and_is_shared_by_the_shards() -> None:
    alone = predict(LLAMA, Layout(64, precision="fp32", device="cpu"))
    assert alone.weights + alone.gradients + alone.optimizer == 16 * LLAMA.parameters
    shared = predict(LLAMA, Layout(8192, sharding="fsdp", gpus=64))
    assert shared.optimizer == 8 * LLAMA.parameters // 64


def test_hsdp_shards_within_a_node_only() -> None:
    layout = Layout(8192, sharding="hsdp", gpus=64)
    assert predict(LLAMA, layout).optimizer == 8 * LLAMA.parameters // 8


def test_gradients_that_wait_for_the_last_micro_batch_are_whole() -> None:
    layout = Layout(8192, sharding="fsdp", gpus=8, accumulation=4)
    assert predict(LLAMA, layout).gradients == 4 * LLAMA.parameters
    assert predict(LLAMA, replace(layout, sync_last=False)).gradients == 4 * LLAMA.parameters // 8


def test_logits_are_the_fullest_moment_of_8b_until_they_are_chunked() -> None:
    layout = Layout(8192, sharding="fsdp", gpus=8, checkpointing="full")
    whole, chunked = predict(LLAMA, layout), predict(LLAMA, replace(layout, loss_chunk=1024))
    assert whole.moment == "the loss"
    assert whole.logits == 12 * 128256 * 8192
    assert chunked.moment != "the loss"
    assert chunked.total < whole.total - 5 * GIB


def test_each_lever_that_saves_memory_saves_some() -> None:
    base = Layout(8192, 2, checkpointing="none", sharding="ddp", gpus=8)
    savers = (
        {"micro_batch": 1},
        {"checkpointing": "selective"},
        {"checkpointing": "full"},
        {"loss_chunk": 1024},
        {"sharding": "fsdp"},
        {"sharding": "hsdp"},
        {"tensor": 2},
        {"context": 2, "sharding": "fsdp"},
    )
    for saver in savers:
        assert predict(LLAMA, replace(base, **saver)).total < predict(LLAMA, base).total, saver


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    layout = Layout(8192, sharding="fsdp", gpus=8, checkpointing="selective", loss_chunk=1024)
    found = largest_micro_batch(LLAMA, layout, 80e9, spare=0.05)

    def total(size: int) -> int:
        return predict(LLAMA, replace(layout, micro_batch=size)).total

    assert total(found) <= 0.95 * 80e9 < total(found + 1)
    assert largest_micro_batch(LLAMA, layout, 10e9) == 0


def test_the_parts_are_the_total() -> None:
    found: Memory = predict(LLAMA, Layout(2048, sharding="ddp", gpus=2))
    assert sum(found.parts.values()) == found.total


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(8192, gpus=6, tensor=4), "gpus: 6; expected a multiple of tensor × pipeline × context = 4"),
        (Layout(8192, precision="int8"), "precision: 'int8'; expected one of fp32, bf16"),
        (Layout(0), "seq_len: 0; expected 1 or more"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(layout: Layout, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        predict(LLAMA, layout)
