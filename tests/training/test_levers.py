"""Levers: faster or smaller, and the same curve as the plain loop's."""

from pathlib import Path
from typing import Any

import pytest

from tests.training.small_runs import SMALL, trained
from training.config import LEVERS, TrainingConfig, load_config, plain_of, preserving_of
from training.processes import World
from training.trainer import OutOfMemory, train

BATCH = 8
Losses = tuple[float | None, ...]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The curve of the plain loop: fp32, one sequence a pass, nothing on."""
    config = plain_of(SMALL.model_copy(update={"global_batch": BATCH, "steps": 6}), 1)
    return train(config, tmp_path_factory.mktemp("plain")).progress.losses


def tuned(directory: Path, **levers: Any) -> Losses:
    """The curve with some levers on, and the others plain."""
    config = plain_of(SMALL.model_copy(update={"global_batch": BATCH, "steps": 6}), 1)
    return train(config.model_copy(update=levers), directory).progress.losses


@pytest.mark.parametrize(
    "levers",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"prefetch_batches": 2, "loader_workers": 2},
        {"keep_host_memory": True},
        {"pinned": True},  # of no effect without a GPU, and no error
    ],
)
def test_what_is_said_to_keep_the_bits_keeps_them(
    tmp_path: Path, plain: Losses, levers: dict[str, Any]
) -> None:
    assert all(LEVERS[name].numerics == "bitwise" for name in levers)
    assert tuned(tmp_path, **levers) == plain


@pytest.mark.parametrize(
    "levers",
    [
        {"micro_batch": 8},
        {"loss_chunk": 48},
        {"fused_optimizer": True},
        {"micro_batch": 4, "loss_chunk": 256, "fused_optimizer": True, "prefetch_batches": 1},
        pytest.param({"compile": True}, marks=pytest.mark.long),
    ],
)
def test_what_is_said_to_keep_the_numbers_keeps_the_curve(
    tmp_path: Path, plain: Losses, levers: dict[str, Any]
) -> None:
    assert all(LEVERS[name].numerics != "changes" for name in levers)
    assert tuned(tmp_path, **levers) == pytest.approx(plain, rel=1e-4)


@pytest.mark.long
def test_fifty_tuned_steps_agree_with_plain_ones_to_a_percent(tmp_path: Path) -> None:
    config = TrainingConfig(model="llama-micro", seq_len=192, global_batch=8, micro_batch=8, steps=50)
    curves = [
        train(each, tmp_path / name).progress.losses
        for name, each in (
            ("plain", plain_of(config, 1)),
            ("tuned", preserving_of(config.model_copy(update={"compile": True}))),
        )
    ]
    assert len(curves[0]) == 50
    assert curves[1] == pytest.approx(curves[0], rel=0.01)


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.long), "bf16_master"])
def test_a_lower_precision_is_another_curve_nearby(tmp_path: Path, plain: Losses, precision: str) -> None:
    found = tuned(tmp_path, precision=precision)
    assert found != plain
    assert found == pytest.approx(plain, rel=0.05)


def test_the_weights_behind_a_bf16_model_are_restored_to_the_bit(tmp_path: Path) -> None:
    levers: dict[str, Any] = {"precision": "bf16_master", "schedule": "constant", "micro_batch": 1}
    whole = trained(tmp_path / "whole", steps=4, **levers)
    trained(tmp_path / "cut", steps=2, **levers)
    assert trained(tmp_path / "cut", steps=4, **levers).progress.losses == whole.progress.losses


def test_a_run_goes_on_with_other_levers(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", micro_batch=4, schedule="constant")
    trained(tmp_path / "cut", micro_batch=4, schedule="constant", steps=6)
    other: dict[str, Any] = {
        "micro_batch": 2,
        "accumulation": 2,
        "activation_checkpointing": "full",
        "fused_optimizer": False,
    }
    resumed = trained(tmp_path / "cut", schedule="constant", **other)
    assert resumed.progress.losses == pytest.approx(whole.progress.losses, rel=1e-4)


def test_the_resolved_file_repeats_the_run(tmp_path: Path) -> None:
    first = trained(tmp_path / "first", global_batch=2, micro_batch="auto", steps=3)
    resolved = load_config(tmp_path / "first" / "resolved.yaml")
    assert not [name for name in LEVERS if getattr(resolved, name) == "auto"]
    assert resolved.record is not None
    assert {"auto", "hardware", "versions", "git_commit", "processes"} <= resolved.record.keys()
    assert "predicted best of" in resolved.record["auto"]["micro_batch"]
    again = train(resolved, tmp_path / "again")
    assert again.progress.losses == first.progress.losses


def test_out_of_memory_halves_the_micro_batch_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from training import step

    honest = step.forward_backward
    asked: list[int] = []

    def small_device(parts: Any, feed: Any, asks: Any, following: Any, tokens: int) -> float:
        asked.append(asks[0].count)
        if len(asked) > 3 and asks[0].count > 2:  # after some gradients have come
            honest(parts, feed, asks[:1], following, tokens)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return honest(parts, feed, asks, following, tokens)

    monkeypatch.setattr(step, "forward_backward", small_device)
    heard: list[str] = []
    found = trained(tmp_path / "small", micro_batch=8, global_batch=8, steps=6, log=heard.append)
    assert asked == [8, 8, 8, 8, 4, 2, 2, 2]
    assert [line for line in heard if "micro_batch" in line] == [
        "micro_batch 8 -> 4, accumulation 2: out of memory",
        "micro_batch 4 -> 2, accumulation 4: out of memory",
    ]
    monkeypatch.setattr(step, "forward_backward", honest)
    whole = trained(tmp_path / "whole", micro_batch=8, global_batch=8, steps=6)
    assert found.progress.losses == pytest.approx(whole.progress.losses, rel=1e-4)


def test_out_of_memory_with_one_sequence_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from training import step

    def too_small(*asked: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(step, "forward_backward", too_small)
    with pytest.raises(OutOfMemory, match="out of memory with micro_batch 1; expected a smaller one, or"):
        trained(tmp_path, micro_batch=1, global_batch=2)
    assert list((tmp_path / "checkpoints").glob("*")) == []


def test_what_will_not_fit_is_refused_before_anything_runs() -> None:
    import torch

    from training.config import ConfigError
    from training.resolve import check_memory, resolve

    asked = TrainingConfig(model="llama-3.1-8b", seq_len=8192, micro_batch=1, memory_gb=80)
    resolved, _ = resolve(asked, World(), torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"micro_batch: 1; needs 1\d\d\.\d GiB, 74.5 GiB are free"
    ) as caught:
        check_memory(resolved, World(), torch.device("cpu"))
    assert "\n" not in str(caught.value)


def test_a_spike_is_left_out_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from training import step

    honest = step.forward_backward
    made: list[int] = []

    def with_a_spike(*asked: Any) -> float:
        made.append(0)
        return honest(*asked) * (3.0 if len(made) == 13 else 1.0)

    monkeypatch.setattr(step, "forward_backward", with_a_spike)
    heard: list[str] = []
    found = trained(tmp_path, steps=16, spike=2.0, log=heard.append)
    (line,) = [line for line in heard if "left out" in line]
    assert line.startswith("step 13 left out: the loss is 1")
    assert found.progress.step == 16
    assert found.progress.losses[13] == pytest.approx(found.progress.losses[11], abs=0.5)
