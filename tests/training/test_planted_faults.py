"""Planted faults are found, named, and sized by what removing them gains; a clean run is left alone.

What needs a GPU is planted in traces: a step with the fault beside the same step without it. The others are
planted in runs; those of two processes, and those that must be measured, are long.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import yaml

from tests.training.gained import Turns, in_turns
from tests.training.test_trace import event
from training.__main__ import main
from training.capture import Captured, Gain, captured, examined, gains, proposed, stepping, times_faster
from training.config import LEVERS, TrainingConfig
from training.data import Windows
from training.diagnosis import words
from training.processes import World, free_port, run_quietly
from training.remedies import Remedy, candidates, causes_left
from training.resolve import resolve
from training.signs import UNBROKEN, UNCOMPILED, graph_breaks
from training.trace import Breakdown, breakdown
from training.unbroken import remove_breaks

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
        if "synchronize" in faults:  # a timer of the loop's own, which reads no value
            events.append(event("cudaDeviceSynchronize", "cuda_runtime", now - 10, 10.5))
            now += 3
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
    "a synchronization after each layer": (
        "synchronize",
        "idle",
        "idle 12.00 ms of each step (13%) after the host waited for it, in a synchronization",
        0.0,
    ),
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


@contextlib.contextmanager
def slow_loader(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    """Each batch takes so much longer to make."""
    made = Windows.at

    def slow(self: Windows, position: int, count: int) -> Any:
        time.sleep(seconds)
        return made(self, position, count)

    with monkeypatch.context() as planted:
        planted.setattr(Windows, "at", slow)
        yield


def sized(fault: str, said: float, gained: float) -> None:
    """Within a fifth of what removing the fault gains, in whatever unit; shown with -s."""
    print(f"{fault}: said {said:.3g}, gained {gained:.3g}, {said / gained - 1:+.0%}")
    assert said == pytest.approx(gained, rel=0.2)


@pytest.mark.long
def test_a_slow_loader_is_sized_by_what_a_fast_one_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_loader(monkeypatch, 0.05):
        (found,) = captured(SMALL).ranks
    assert words([found])[0].startswith("waiting for data takes")
    gained = []
    with stepping(SMALL, World(), torch.device("cpu")) as step:
        for _ in range(9):  # one beside the other: the machine is not the same a minute later
            fast = step()
            with slow_loader(monkeypatch, 0.05):
                gained.append(step() - fast)
    sized("slow loader, ms a step", 1e3 * found.seconds["data"] / found.steps, 1e3 * median(gained))


@pytest.mark.long
def test_a_batch_of_one_is_found_and_sized_by_measuring_a_larger_one(tmp_path: Path) -> None:
    config = TrainingConfig(model="llama-tiny", seq_len=64, micro_batch=1, global_batch=8, held_out_windows=1)
    won = {gain.line: gain.times for gain in gains(config, only=["micro_batch"])}
    whole = config.model_copy(update={"micro_batch": 8})
    with torch.random.fork_rng():
        runs = [Turns(each, tmp_path, World(), torch.device("cpu")) for each in (config, whole)]
        times = in_turns(runs)
    sized("batch of one, speed", won["micro_batch: 8"] - 1, times - 1)


def wave(rows: torch.Tensor) -> torch.Tensor:
    """Small ops that torch.compile fuses with each other and with what surrounds them."""
    found = rows
    for _ in range(12):
        found = (found + 0.3) * rows
    return found * torch.sigmoid(rows)


class Activation(torch.nn.Module):
    """A function in place of a layer's own; `broken` is one that torch.compile may not look into."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.function: Any = torch._dynamo.disable(wave) if broken else wave  # type: ignore[no-untyped-call]

    def forward(self, rows: torch.Tensor) -> Any:
        """Each of its values by itself."""
        return self.function(rows)


def planted(broken: bool) -> Any:
    """Compile layers whose activation is a function of small ops; `broken` has a graph break around it."""
    from training import activations

    def compiled(layers: Any) -> int:
        for layer in layers:
            layer.mlp.act_fn = Activation(broken)
        return activations.compile_layers(layers)

    return compiled


COMPILED = TrainingConfig(
    model="llama-tiny", layers=2, seq_len=256, micro_batch=8, global_batch=8, held_out_windows=1, compile=True
)


@pytest.mark.long
def test_a_graph_break_is_named_and_sized_by_steps_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What removing it gains is measured before the diagnosis and after, as the machine changes meanwhile."""
    from training import assembly

    runs: list[Turns] = []
    for broken in (False, True):
        monkeypatch.setattr(assembly, "compile_layers", planted(broken))
        named = [line for line in words(captured(COMPILED).ranks) if "broke its graph" in line]
        assert bool(named) == broken, named
        runs.insert(0, Turns(COMPILED, tmp_path, World(), torch.device("cpu")))
        runs[0].step()  # compiled as planted
    before = 1 - 1 / in_turns(runs)
    seen, _ = examined(COMPILED, True, ["compile"])
    after = 1 - 1 / in_turns(runs)
    (found,) = seen.ranks
    assert any(line.startswith("torch.compile broke its graph") for line in words([found])), words([found])
    said, (least, most) = found.signs[UNBROKEN] / found.total, sorted((before, after))
    sized("graph break, share of the step", said, min(max(said, least), most))
    assert found.signs[UNCOMPILED] / found.total > 0.9 * said  # what a trace alone says is the most


def test_a_layer_without_its_graph_breaks_computes_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = partial(torch.compile, backend="aot_eager")  # the graphs, without a C++ compiler
    monkeypatch.setattr("training.unbroken.torch.compile", compiled)
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), Activation(broken=True)) for _ in range(2)]
    model, rows = torch.nn.Sequential(*layers), torch.randn(4, 8)

    def trained() -> list[torch.Tensor]:
        model.zero_grad()
        (found := model(rows).square().sum()).backward()
        return [
            found.detach(),
            *(weights.grad.clone() for weights in model.parameters() if weights.grad is not None),
        ]

    plain = trained()
    for layer in layers:
        layer.compile(backend="aot_eager")
    with_breaks = graph_breaks()
    trained()
    assert graph_breaks() > with_breaks
    assert remove_breaks(model) == 2
    torch._dynamo.reset()
    without = graph_breaks()
    for ours, theirs in zip(trained(), plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert graph_breaks() == without


TWO = {
    "model": "module:tests.training.gained:far_apart",
    "seq_len": 8,
    "micro_batch": 1,
    "held_out_windows": 1,
    "parallel": "ddp",
}
FAULTS = {
    "gradients exchanged after each of four passes": (
        {"global_batch": 8, "sync": "every", "bucket_mb": 0.001},
        ("sync", "last"),
    ),
    "an all-reduce for each tensor": (
        {"global_batch": 2, "sync": "last", "bucket_mb": 0.001},
        ("bucket_mb", 100.0),
    ),
}


def in_two(*command: str) -> None:
    """Run a Python module in two gloo processes of one thread each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = str(free_port())
    code, said = run_quietly([sys.executable, "-m", *command], 2, environment)
    assert code == 0, said


@pytest.mark.long
@pytest.mark.parametrize(("fault", "remedy"), FAULTS.values(), ids=FAULTS)
def test_a_fault_between_two_processes_is_named_and_sized(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, Any],
    remedy: tuple[str, Any],
) -> None:
    """What removing it gains is measured before the diagnosis and after, as the machine changes meanwhile."""
    lever, value = remedy
    faulty, clean, answer = tmp_path / "faulty.yaml", tmp_path / "clean.yaml", tmp_path / "answer"
    faulty.write_text(yaml.safe_dump({**TWO, **fault}))
    clean.write_text(yaml.safe_dump({**TWO, **fault, lever: value}))

    def gained() -> float:
        in_two("tests.training.gained", str(answer), str(faulty), str(clean))
        return float(json.loads(answer.read_text()))

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = gained()
    assert main(["diagnose", str(faulty), "--processes", "2", "--levers", lever, "--json"]) == 0
    after = gained()
    found = json.loads(next(line for line in capfd.readouterr().out.splitlines() if line.startswith("{")))
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert any(line.startswith("exposed communication takes") for line in found["words"]), found["words"]
    assert any("collectives a step" in line for line in found["words"]), found["words"]
    assert found["next_lever"].startswith(f"{lever}: {value}")
    said = {one["line"]: one["times"] for one in found["levers"]}[f"{lever}: {value}"]
    least, most = sorted((before, after))
    sized(f"{lever}, speed", said - 1, min(max(said, least), most) - 1)


CLEAN_RUNS = {
    "tiny, small": ("llama-micro", 1, False),
    "compiled": ("llama-tiny", 1, True),
    "two processes, small": ("llama-micro", 2, False),
    "two processes": ("llama-tiny", 2, False),
}


@pytest.mark.long
@pytest.mark.parametrize(("model", "processes", "compiled"), CLEAN_RUNS.values(), ids=CLEAN_RUNS)
def test_a_clean_run_is_accused_of_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    model: str, processes: int, compiled: bool,
) -> None:  # fmt: skip
    file = tmp_path / "clean.yaml"
    asked = {"model": model, "seq_len": 256, "micro_batch": 8, "global_batch": 8 * processes}
    file.write_text(yaml.safe_dump(asked | {"compile": compiled, "held_out_windows": 1}))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["diagnose", str(file), "--processes", str(processes), "--no-levers", "--json"]) == 0
    found = json.loads(next(line for line in capfd.readouterr().out.splitlines() if line.startswith("{")))
    assert found["words"] == [CLEAN], found


@pytest.mark.long
def test_a_lever_that_changes_nothing_helps_nothing() -> None:
    """Two equal runs differ on a busy machine; neither is proposed in the other's place."""
    config = TrainingConfig(
        model="llama-micro", seq_len=64, micro_batch=2, global_batch=2, keep_host_memory=True
    )
    same = Remedy("compute", "spike: 9", config.model_copy(update={"spike": 9.0}))
    least, times = times_faster(config, same, World(), torch.device("cpu"))
    gain = Gain(same.line, times, same.cause, "preserved", least)
    assert not gain.helps, gain
    assert proposed([gain]) is None


def test_what_is_not_sure_is_not_proposed() -> None:
    """One in four pairs says that the lever wins nothing, though the median is above what counts."""
    unsure = Gain("compile: true", 1.1, "compute", "preserved", 0.98)
    sure = Gain("bucket_mb: 100.0", 1.05, "communication", "preserved", 1.01)
    changing = Gain("precision: bf16", 1.5, "compute", "changes", 1.4)
    assert proposed([unsure]) is None
    assert proposed([changing, unsure, sure]) == "bucket_mb: 100.0 (1.05 × as measured)"
    assert proposed([changing, unsure]) == "precision: bf16 (1.50 × as measured)"


@pytest.mark.parametrize("processes", [1, 2])
def test_what_auto_has_put_on_is_not_proposed_again(processes: int) -> None:
    config, reasons = resolve(TrainingConfig(micro_batch=1, global_batch=2), World(), torch.device("cpu"))
    on = {name for name in reasons if getattr(config, name) != LEVERS[name].plain}
    assert {"loss_chunk", "keep_host_memory", "sync"} <= on
    for remedy in candidates(config, processes):
        assert not on - {"bucket_mb"} & set(remedy.levers), remedy.line


def test_an_exchange_that_waits_for_a_core_is_accused_only_where_a_lever_is_left() -> None:
    config = TrainingConfig(micro_batch=1, global_batch=2, parallel="ddp", sync="last", bucket_mb=4.0)
    small = config.model_copy(update={"bucket_mb": 0.1})
    events = [event("aten::mm", "cpu_op", 0, 80), event("gloo:all_reduce", "user_annotation", 80, 20)]
    ranks = [breakdown(events, rank) for rank in range(2)]
    assert words(ranks, causes_left(config, 2, False)) == [CLEAN]
    for left in (causes_left(small, 2, False), None):
        assert words(ranks, left)[0].startswith("exposed communication takes 20% of the step")
        assert "is 1 collectives a step, 20.00 ms of each" in words(ranks, left)[1]


@pytest.mark.parametrize("times", [0.75, 1.25])
def test_a_lever_is_advised_unless_it_was_measured_to_lose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, times: float
) -> None:
    config = TrainingConfig(micro_batch=1, global_batch=4, parallel="ddp", sync="every", bucket_mb=100.0)
    events = [event("aten::mm", "cpu_op", 0, 80), event("gloo:all_reduce", "user_annotation", 80, 20)]
    seen = Captured([breakdown(events, rank) for rank in range(2)], None, config)
    gain = Gain("sync: last", times, "communication", "preserved", times)
    monkeypatch.setattr("training.capture.examined", lambda *asked: (seen, [gain]))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    (file := tmp_path / "run.yaml").write_text("micro_batch: 1\nglobal_batch: 4\n")
    assert main(["diagnose", str(file), "--levers", "sync", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert ("sync: last" in found["words"][0]) == (times > 1), found["words"]


def test_a_fused_optimizer_is_not_accused_and_an_unfused_one_is() -> None:
    events = [event("gemm", "kernel", 0, 80), event("Optimizer.step#AdamW.step", "user_annotation", 0, 3)]
    events.append(event("cudaLaunchKernel", "cuda_runtime", 1, 0.01, correlation=1))
    fused, each = (
        breakdown([*events, event(name, "kernel", 80, 20, correlation=1)], 0)
        for name in ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "vectorized_elementwise_kernel")
    )
    assert fused.seconds["optimizer"] == each.seconds["optimizer"] == pytest.approx(0.02)
    assert words([fused]) == [CLEAN]
    assert words([each])[0].startswith("optimizer takes 20% of the step")


def test_what_lies_between_a_processors_small_ops_is_nobodys_fault() -> None:
    small = [event("aten::add", "cpu_op", 0.1 * each, 0.08) for each in range(1000)]
    assert words([breakdown(small, 0)]) == [CLEAN]
    late = [event("aten::add", "cpu_op", 10 * each, 8) for each in range(10)]
    assert words([breakdown(late, 0)])[0].startswith("idle takes 18% of the step")
