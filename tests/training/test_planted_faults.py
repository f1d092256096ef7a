"""Planted faults are found, named, and sized by what removing them gains; a clean run is left alone.

What needs a GPU is planted in traces: a step with the fault beside the same step without it. The others are
planted in runs; those of two processes, and those that must be measured, are long.
"""

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import yaml

from tests.training.test_trace import event
from training.__main__ import main
from training.capture import captured, gains, step_seconds
from training.config import TrainingConfig
from training.data import Windows
from training.diagnosis import words
from training.trace import Breakdown, breakdown

CLEAN = "nothing beside computing takes a twentieth of the step"
SMALL = TrainingConfig(model="llama-micro", seq_len=16, micro_batch=1, global_batch=2, held_out_windows=1)


def a_step(*faults: str) -> Breakdown:
    """A step on a GPU, with faults: 80 ms of matmuls, a pinned copy beside them, a reduce-scatter of 2."""
    now = 0.0
    events: list[dict[str, Any]] = [event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 30, 1)]
    if "copies" in faults:  # the loop waits for a copy from memory that may be paged out
        events.append(event("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", now, 15))
        events.append(event("cudaMemcpyAsync", "cuda_runtime", now, 15))
        now += 15
    for _ in range(4):
        events.append(event("gemm", "kernel", now, 20))
        now += 20
        if "item" in faults:  # the host reads a value of this layer, and has sent nothing meanwhile
            events.append(event("aten::_local_scalar_dense", "cpu_op", now - 10, 10.5))
            events.append(event("cudaStreamSynchronize", "cuda_runtime", now - 10, 10.5))
            now += 4
        if "tensors" in faults:  # an all-reduce for each of its weights
            events += [event("ncclDevKernel_AllReduce", "kernel", now + each, 1) for each in range(7)]
            now += 7
    if "tensors" not in faults:
        events.append(event("ncclDevKernel_ReduceScatter", "kernel", now, 2))
        now += 2
    return breakdown([*events, event("ProfilerStep#1", "user_annotation", 0, now)], 0)


PLANTED = {
    "copies from memory that is not pinned": ("copies", "copies", "un-pinned copies take 15.00 ms", 0.0),
    "an .item() after each layer": ("item", "idle", "the device stands idle 16.00 ms of each step", 0.0),
    "an all-reduce for each tensor": ("tensors", "communication", "is 28 collectives a step", 2e-3),
}


@pytest.mark.parametrize(("fault", "cause", "said", "left"), PLANTED.values(), ids=PLANTED)
def test_a_fault_in_a_gpus_trace_is_named_and_sized(fault: str, cause: str, said: str, left: float) -> None:
    """`left` is what the cause costs without the fault."""
    faulty, clean = a_step(fault), a_step()
    assert any(said in line for line in words([faulty])), words([faulty])
    gained = faulty.total - clean.total
    assert faulty.seconds[cause] - left == pytest.approx(gained, rel=0.2)
    assert words([clean]) == [CLEAN]


def test_faults_together_are_each_sized_as_alone() -> None:
    both = a_step("copies", "item")
    assert both.seconds["copies"] == pytest.approx(a_step("copies").seconds["copies"])
    assert both.signs["host_read_idle_seconds"] == pytest.approx(0.016)
    assert both.signs["host_reads"] == 4
    assert "un-pinned" in " ".join(words([both]))
    assert ".item()" in " ".join(words([both]))


def test_idle_time_that_no_read_explains_is_not_put_on_one() -> None:
    """The host comes too late with small kernels: nothing of it waits for the device."""
    events = [event("gemm", "kernel", 10 * each, 5) for each in range(20)]
    events.append(event("aten::_local_scalar_dense", "cpu_op", 195, 5))
    found = breakdown([*events, event("ProfilerStep#1", "user_annotation", 0, 200)], 0)
    assert found.seconds["idle"] == pytest.approx(0.1)
    assert found.signs["host_read_idle_seconds"] == pytest.approx(0.005)
    assert not any(".item() or the like" in line for line in words([found]))


def slow_loader(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Each batch takes so much longer to make."""
    made = Windows.at

    def slow(self: Windows, position: int, count: int) -> Any:
        time.sleep(seconds)
        return made(self, position, count)

    monkeypatch.setattr(Windows, "at", slow)


@pytest.mark.long
def test_a_slow_loader_is_sized_by_what_a_fast_one_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow, said = [], [], []
    for _ in range(3):  # one beside the other: the machine is not the same a minute later
        fast.append(step_seconds(SMALL))
        with monkeypatch.context() as planted:
            slow_loader(planted, 0.1)
            slow.append(step_seconds(SMALL))
            (found,), _ = captured(SMALL)
            said.append(found.seconds["data"] / found.steps)
            assert words([found])[0].startswith("waiting for data takes")
    assert median(said) == pytest.approx(median(slow) - median(fast), rel=0.2)


@pytest.mark.long
def test_a_clean_run_of_real_size_is_accused_of_nothing() -> None:
    config = TrainingConfig(model="llama-tiny", seq_len=256, micro_batch=4, held_out_windows=1)
    (found,), _ = captured(config)
    assert words([found]) == [CLEAN]


@pytest.mark.long
def test_a_batch_of_one_is_found_by_measuring_a_larger_one() -> None:
    config = TrainingConfig(model="llama-tiny", seq_len=64, micro_batch=1, global_batch=8, held_out_windows=1)
    times = {gain.line: gain.times for gain in gains(config)}
    assert times["micro_batch: 8"] > 1.1


@pytest.mark.long
def test_a_graph_break_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = SMALL.model_copy(update={"compile": True})
    assert not any("broke its graph" in line for line in words(captured(config)[0]))
    torch.compiler.reset()
    made: Any = LlamaMLP.forward

    def broken(self: Any, rows: Any) -> Any:
        torch._dynamo.graph_break()
        return made(self, rows)

    monkeypatch.setattr(LlamaMLP, "forward", broken)
    said = words(captured(config)[0])
    assert any(line.startswith("torch.compile broke its graph") for line in said), said


TWO = {"model": "llama-tiny", "seq_len": 64, "micro_batch": 1, "global_batch": 16, "held_out_windows": 1}
FAULTS = {
    "gradients exchanged after each of eight passes": ({"sync": "every"}, "sync: last"),
    "an all-reduce for each tensor": ({"sync": "last", "bucket_mb": 0.001}, "bucket_mb: 100.0"),
}


@pytest.mark.long
@pytest.mark.parametrize(("fault", "remedy"), FAULTS.values(), ids=FAULTS)
def test_a_fault_between_two_processes_is_named_with_its_remedy(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: dict[str, Any], remedy: str
) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(yaml.safe_dump({**TWO, "parallel": "ddp", **fault}))
    asked = ["diagnose", str(file), "--processes", "2", "--no-levers", "--json"]
    assert main(asked) == 0
    found = json.loads(next(line for line in capfd.readouterr().out.splitlines() if line.startswith("{")))
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert any(line.startswith("exposed communication takes") for line in found["words"])
    assert found["next_lever"].startswith(remedy)
