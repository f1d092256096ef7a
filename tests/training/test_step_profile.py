"""A run says where its steps went, from a few profiled ones that change nothing, and what to try next."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.small_runs import SMALL, trained
from training.config import TrainingConfig
from training.diagnosis import three_causes, words
from training.remedies import candidates, causes_left, diagnosed, next_lever
from training.step_profile import StepProfile, of_metrics
from training.trace import CAUSES, Breakdown

TINY: dict[str, Any] = {"seq_len": 8, "micro_batch": 1, "held_out_windows": 1, "checkpoint_every": 99}


def spent(device: str = "cpu", rank: int = 0, **milliseconds: float) -> Breakdown:
    """One step."""
    return Breakdown(rank, 1, {cause: milliseconds.get(cause, 0.0) / 1e3 for cause in CAUSES}, 0.0, device)


def test_a_run_of_many_steps_says_where_they_went_and_learns_what_it_would_have_learned(
    tmp_path: Path,
) -> None:
    watched = trained(tmp_path / "watched", steps=85, **TINY)
    (found,) = of_metrics(watched.metrics)
    assert (found.steps, found.device) == (3, "cpu")
    assert found.seconds["compute"] > found.seconds["optimizer"] > 0
    table = json.loads(watched.metrics["step_ms"])
    assert table == pytest.approx({cause: 1e3 * found.seconds[cause] / 3 for cause in CAUSES})
    assert watched.metrics["bottleneck"] == "; ".join(words([found], causes_left(SMALL, 1, False)))
    assert watched.metrics["next_lever"]
    timed = watched.progress.tokens_timed / (8 * 1)
    assert timed == 85 - 1 - 4, "the first step, and those under the profiler, are not timed"
    plain = trained(tmp_path / "plain", steps=85, profile_steps=0, **TINY)
    assert "step_ms" not in plain.metrics
    assert plain.progress.losses == watched.progress.losses


def test_a_short_run_is_not_profiled(tmp_path: Path) -> None:
    assert "step_ms" not in trained(tmp_path, steps=12, **TINY).metrics


def test_a_profiler_that_fails_is_said_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(profile: StepProfile) -> Any:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(StepProfile, "_started", broken)
    said: list[str] = []
    result = trained(tmp_path, steps=85, log=said.append, **TINY)
    assert result.progress.step == 85
    assert "step_ms" not in result.metrics
    assert "no profile of the steps: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES" in said


def test_what_the_profiler_adds_to_a_step_is_taken_out_of_idle_time_and_then_of_a_processors_ops() -> None:
    slowed = spent(compute=60, data=10, idle=30)
    assert slowed.at_most(0.08).seconds == pytest.approx(spent(compute=60, data=10, idle=10).seconds)
    assert slowed.at_most(0.05).seconds == pytest.approx(spent(compute=40, data=10).seconds)
    assert slowed.at_most(0.2) == slowed
    kernels = spent("cuda", compute=60, data=10, idle=30)
    assert kernels.at_most(0.05).seconds == pytest.approx(spent(compute=60, data=10).seconds)


PLAIN = TrainingConfig(
    model="llama-micro", micro_batch=2, global_batch=16, sync="every", parallel="ddp", fused_optimizer=False,
    loader_workers=0, prefetch_batches=0, bucket_mb=25.0, pinned=False, precision="bf16", compile=True,
    keep_host_memory=True,
)  # fmt: skip
NEXT = {
    "waiting for data": (spent(compute=60, data=40), "loader_workers: 1, prefetch_batches: 1"),
    "copies": (spent("cuda", compute=60, copies=40), "pinned: true, prefetch_batches: 1"),
    "communication": (spent(compute=60, communication=30, data=10), "sync: last"),
    "the optimizer": (spent(compute=60, optimizer=40), "fused_optimizer: true"),
    "idle": (spent("cuda", compute=60, idle=40), "micro_batch: 4"),
    "the largest first": (
        spent(compute=20, communication=30, data=50),
        "loader_workers: 1, prefetch_batches: 1",
    ),
}


@pytest.mark.parametrize(("step", "line"), NEXT.values(), ids=NEXT)
def test_the_largest_cause_that_something_is_known_against_decides_what_to_try(
    step: Breakdown, line: str
) -> None:
    found = next_lever([step], PLAIN, 2, step.device == "cuda")
    assert found is not None
    assert found[0] == line
    assert "of the step" in found[1]


def test_what_is_proposed_keeps_the_numbers_where_it_can_and_ends_when_all_was_tried() -> None:
    computing = [spent(compute=100)]
    known = PLAIN.model_copy(update={"compile": False, "precision": "fp32", "keep_host_memory": False})
    assert next_lever(computing, known, 1, False) == ("compile: true", "compute takes 100% of the step")
    assert {one.line for one in candidates(known) if one.numerics == "changes"} == {"precision: bf16"}
    assert next_lever(computing, PLAIN, 1, False) is None


def test_one_process_is_told_nothing_of_collectives_and_no_gpu_nothing_of_pinning() -> None:
    for remedy in candidates(PLAIN):
        assert "pinned" not in remedy.line
        assert remedy.cause != "communication"
    assert any("pinned" in remedy.line for remedy in candidates(PLAIN, cuda=True))
    assert [one.line for one in candidates(PLAIN, 2) if one.cause == "communication"] == [
        "sync: last",
        "bucket_mb: 100.0",
    ]


def test_each_of_the_three_causes_has_its_mfu_points() -> None:
    step = spent("cuda", compute=50, data=10, copies=10, communication=20, idle=10)
    costs = three_causes([step], 0.3)
    # Without its share the run is as much faster: 0.3 / 0.8 is 7.5 points more, and so on.
    assert costs == pytest.approx(
        {"memory movement": 7.5, "communication": 7.5, "unfilled hardware": 30 / (1 - 0.225) - 30}
    )
    metrics = diagnosed([step], PLAIN, 0.3, 2)
    assert json.loads(metrics["three_causes"]) == pytest.approx(costs)
    assert json.loads(metrics["mfu_points"])["communication"] == pytest.approx(7.5)


def test_a_rank_that_is_late_is_named_in_the_metrics() -> None:
    ranks = [spent(rank=rank, compute=60, communication=40) for rank in (0, 1)]
    ranks.append(spent(rank=2, compute=100))
    metrics = diagnosed(ranks, PLAIN, None, 4)
    assert json.loads(metrics["stragglers"]) == [2]
    assert "rank 2 straggles: 40.00 ms of each step" in metrics["bottleneck"]
    assert of_metrics(metrics) == ranks


def test_a_trace_of_many_passes_is_kept_small() -> None:
    import torch

    def steps(passes: int, left: int = 1000) -> int:
        return StepProfile(3, left, passes, torch.device("cpu"), lambda line: None).steps

    assert (steps(1), steps(8), steps(12), steps(100)) == (3, 3, 2, 1)
    assert (steps(1, 80), steps(1, 79), StepProfile(0, 99, 1, torch.device("cpu"), print).steps) == (3, 0, 0)
    assert SMALL.profile_steps == 3
