"""The loop: the same curve however it is cut into passes, attempts and directories."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.training.small_runs import SMALL, trained
from training.config import ConfigError, TrainingConfig
from training.trainer import Stopped, TrainingError, learning_rate, load_text, train, write_curve


def test_training_lowers_the_loss_on_text_that_it_has_not_seen(tmp_path: Path) -> None:
    result = trained(tmp_path, steps=30)
    assert result.progress.losses[0] == pytest.approx(math.log(264), abs=0.3)
    assert result.held_out_loss < 4.5


def test_a_stopped_run_saves_its_step_and_resumes_to_the_same_curve(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole")
    with pytest.raises(Stopped, match="stopped after step 7"):
        trained(tmp_path / "cut", stop_after=7)
    resumed = trained(tmp_path / "cut")
    assert resumed.progress.losses == whole.progress.losses
    assert resumed.held_out_loss == whole.held_out_loss


def test_a_finished_run_that_starts_again_trains_no_further(tmp_path: Path) -> None:
    first = trained(tmp_path)
    steps: list[int] = []
    again = train(SMALL, tmp_path, report=lambda metrics: steps.append(metrics["steps"]))
    assert steps == []
    assert again.held_out_loss == first.held_out_loss
    assert again.metrics["tokens_per_s"] == first.metrics["tokens_per_s"]


def test_passes_of_a_step_count_as_one_batch(tmp_path: Path) -> None:
    once = trained(tmp_path / "once", micro_batch=8)
    in_four = trained(tmp_path / "four", micro_batch=2, accumulation=4)
    assert in_four.progress.losses == pytest.approx(once.progress.losses, rel=1e-4)


def test_another_seed_is_another_curve(tmp_path: Path) -> None:
    one, other = trained(tmp_path / "1", steps=2, seed=1), trained(tmp_path / "2", steps=2, seed=2)
    assert one.progress.losses != other.progress.losses


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    trained(tmp_path, checkpoint_every=3, keep_checkpoints=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-12", "step-9"]


@pytest.mark.parametrize(
    "changes", [{"seed": 5}, {"seq_len": 64}, {"model": "llama-tiny"}, {"held_out": 0.1}]
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    trained(tmp_path, steps=1)
    with pytest.raises(ConfigError, match=r"the checkpoint after step 1 was made with .* use another output"):
        trained(tmp_path, **changes)


def test_steps_that_are_no_number_are_left_out_and_then_stop_the_run_unsaved(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"step 5: the (loss|gradient's norm) is (nan|inf)"):
        trained(tmp_path, lr=1e30, warmup=0, clip=1e30, checkpoint_every=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]
    for state in (tmp_path / "checkpoints").glob("*/state.json"):
        assert all(math.isfinite(loss) for loss in json.loads(state.read_text())["losses"])


def bigrams() -> Any:
    """A module of one's own: the next byte from this one; a configuration names it by module and function."""
    import torch
    from torch import nn

    class Bigrams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.next = nn.Embedding(264, 16)
            self.out = nn.Linear(16, 264)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            scores = self.out(self.next(inputs)).flatten(0, 1)
            return nn.functional.cross_entropy(scores, labels.flatten())

    return Bigrams()


def test_any_module_that_returns_a_loss_trains(tmp_path: Path) -> None:
    named = "module:tests.training.test_trainer:bigrams"
    asked: dict[str, Any] = {"model": named, "lr": 0.05, "steps": 20, "checkpoint_every": 8}
    found = trained(tmp_path / "named", **asked)
    first, last = found.progress.losses[0], found.progress.losses[-1]
    assert first is not None and last is not None and last < first - 1.5
    per_token = found.metrics["flops"] / found.progress.tokens
    assert per_token == 6 * 16 * 264  # torch counts the one matmul, forward and backward
    assert (found.directory / "model.safetensors").is_file()
    with pytest.raises(Stopped):
        trained(tmp_path / "cut", stop_after=10, **asked)
    assert trained(tmp_path / "cut", **asked).progress.losses == found.progress.losses


def test_held_out_text_is_scored_on_the_way(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    train(SMALL.model_copy(update={"eval_every": 4, "steps": 9}), tmp_path, report=heard.append)
    scored = [(line["steps"], line.get("eval_step")) for line in heard]
    assert scored == [(1, None), (2, None), (3, None), *((step, 4) for step in range(4, 8)), (8, 8), (9, 8)]
    assert heard[-1]["eval_loss"] < heard[3]["eval_loss"]


def test_the_result_loads_in_transformers_and_trains_on(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first = trained(tmp_path / "first")
    loaded = AutoModelForCausalLM.from_pretrained(first.directory)
    assert loaded.config.vocab_size == 264
    tokens = AutoTokenizer.from_pretrained(first.directory)("To be, or not to be", return_tensors="pt")
    assert loaded(**tokens).logits.shape == (1, 19, 264)
    second = trained(tmp_path / "second", model=str(first.directory), steps=1)
    before, after = first.progress.losses[0], second.progress.losses[0]
    assert before is not None and after is not None and after < before - 0.5


def test_bf16_trains_too(tmp_path: Path) -> None:
    result = trained(tmp_path, precision="bf16", steps=3, seq_len=16, micro_batch=1)
    assert all(loss is not None and math.isfinite(loss) for loss in result.progress.losses)
    assert "bf16" in result.metrics["peak_source"]


def test_metrics_agree_with_each_other(tmp_path: Path) -> None:
    metrics = trained(tmp_path, steps=3).metrics
    assert 0 < metrics["mfu"] <= 1
    tokens = 3 * SMALL.micro_batch * SMALL.seq_len
    per_token = metrics["flops"] / tokens
    assert metrics["mfu"] == pytest.approx(per_token * metrics["tokens_per_s"] / metrics["peak_flops_per_s"])
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["held_out_loss"]))


def test_work_that_beats_the_peak_has_it_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from training import hardware

    monkeypatch.setattr(hardware, "_CACHED", {})
    honest = hardware._best_matmul
    calls: list[float] = []

    def first_on_a_busy_machine(*asked: Any) -> tuple[float, int]:
        calls.append(0)
        return (1.0, 1024) if len(calls) == 1 else honest(*asked)

    monkeypatch.setattr(hardware, "_best_matmul", first_on_a_busy_machine)
    assert 0 < trained(tmp_path, steps=3).metrics["mfu"] <= 1
    assert len(calls) == 2


def test_a_sequence_longer_than_the_model_sees_is_refused() -> None:
    with pytest.raises(ConfigError, match="seq_len: 2000; llama-micro sees at most 1024"):
        load_text(SMALL.model_copy(update={"seq_len": 2000}))


def test_the_rate_climbs_then_falls_to_its_share() -> None:
    config = TrainingConfig(lr=1.0, min_lr=0.1, warmup=4, steps=14)
    rates = [learning_rate(config, step) for step in range(15)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[14] == pytest.approx(0.1)


def test_a_curve_is_a_line_per_step(tmp_path: Path) -> None:
    write_curve(tmp_path / "curve.jsonl", (3.5, 2.25))
    lines = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 3.5}, {"step": 2, "loss": 2.25}]
