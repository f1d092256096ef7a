"""What the trainer gets out of this machine: levers, exchange between processes, and the tuner's choice.

Every rate is of a fresh process with all of the machine's threads, the fastest of a few optimizer steps;
shares are by the `matmul` convention, of the best square matmul measured in the same run. Each benchmark
shows its details, and the run ends with one table of all of them, beside what was set out for.
"""

import contextlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from tests.benchmarks.conftest import Figure
from tests.conftest import wait_for
from training.config import TrainingConfig, plain_of
from training.flops import mfu
from training.hardware import measured_peak
from training.precision import PEAK_OF, bf16_is_fast
from training.probe import Probe, measure, probe
from training.processes import free_port, run_quietly
from training.tuner import Machine, candidates, tune

pytestmark = pytest.mark.benchmark
GRID_STEPS, GRID_TURNS = 1, 3  # timed, of each setting in each turn
TURNS = 2  # of all rows, of which the better counts: something else may run for a while
WARM = 5  # steps: the memory that a process keeps grows for the first three
PRESERVING, ALL = "the same, layers compiled", "all levers: bf16, compiled"
WANTED = {PRESERVING: "× 1.2, MFU 88 %", ALL: "× 2.2, MFU 78 %"}
MODEL = TrainingConfig(
    model="llama-30m", seq_len=512, global_batch=4, micro_batch=4, held_out_windows=1, tune_steps=WARM
)
GRID = TrainingConfig(
    model="llama-tiny",
    seq_len=192,
    global_batch=16,
    micro_batch="auto",
    activation_checkpointing="auto",
    held_out_windows=1,
    attention="auto",
    tune=["attention"],
)


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[[Table], None]:
    """Print a table, with the load that the figures were taken under."""

    def shown(table: Table) -> None:
        with capsys.disabled():
            console = Console(width=120)
            console.print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
            console.print(table)

    return shown


@pytest.fixture(autouse=True)
def _fresh_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is measured in this run, not remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_levers(show: Callable[[Table], None], figure: Figure) -> None:
    import torch

    device = torch.device("cpu")
    fast, why = bf16_is_fast(device)
    rows: list[tuple[str, TrainingConfig]] = [
        ("plain: fp32, one sequence a pass", plain_of(MODEL, 1)),
        ("levers without attention in blocks", MODEL.model_copy(update={"attention": "library"})),
        ("numerics-preserving levers", MODEL),
        (PRESERVING, MODEL.model_copy(update={"compile": True})),
    ]
    if fast:
        every = {"precision": "bf16", "compile": True}
        rows.append((ALL, MODEL.model_copy(update=every)))
    table = Table("30 M parameters, 512 tokens", "tokens/s", "× plain", "MFU", "GFLOP/s", "of", "GB")
    found: list[Probe] = []
    precisions = ("fp32", "bf16")[: 1 + fast]
    for name in precisions:
        measured_peak(device, name, seconds=30)
    turns = [[probe(config) for _, config in rows] for _ in range(TURNS)]
    # Before and after, of which the better counts: a peak that is too low flatters every share.
    peaks = {name: measured_peak(device, name, seconds=30, refresh=True) for name in precisions}
    for place, (name, _) in enumerate(rows):
        one = max((turn[place] for turn in turns), key=lambda each: each.tokens_per_s or 0)
        assert one.tokens_per_s and one.flops_per_token and one.memory_bytes, one.problem
        found.append(one)
        peak = peaks[PEAK_OF[one.precision]].flops_per_s
        work = one.tokens_per_s * one.flops_per_token
        gain = one.tokens_per_s / (found[0].tokens_per_s or 1)
        share = mfu(one.flops_per_token, one.tokens_per_s, peak)
        figure(name, f"{one.tokens_per_s:.0f} tokens/s, × {gain:.2f}, MFU {share:.1%}", WANTED.get(name, ""))
        table.add_row(
            name,
            f"{one.tokens_per_s:.0f}",
            f"{gain:.2f}",
            f"{share:.1%}",
            f"{work / 1e9:.1f}",
            f"{peak / 1e9:.1f} {PEAK_OF[one.precision]}",
            f"{one.memory_bytes / 1e9:.2f}",
        )
    if not fast:
        table.caption = f"fp32 alone: {why}"
        figure(ALL, f"not measured: {why}", WANTED[ALL])
    show(table)
    for one in found[1:4]:
        assert one.losses == pytest.approx(found[0].losses, rel=0.01)


def test_the_first_fifty_steps(show: Callable[[Table], None], figure: Figure) -> None:
    tuned = MODEL.model_copy(update={"compile": True})
    plain, other = (probe(config, steps=49) for config in (plain_of(MODEL, 1), tuned))
    assert len(plain.losses) == len(other.losses) == 50, plain.problem or other.problem
    apart = [abs(right / left - 1) for left, right in zip(plain.losses, other.losses, strict=True)]
    table = Table("30 M parameters, fp32", "plain", "compiled, all that keeps the numbers", "apart")
    for step in (1, 10, 20, 30, 40, 50):
        place = step - 1
        table.add_row(
            f"step {step}", f"{plain.losses[place]:.5f}", f"{other.losses[place]:.5f}", f"{apart[place]:.1e}"
        )
    table.add_row("furthest", "", "", f"{max(apart):.1e}")
    show(table)
    figure("first 50 steps, compiled against plain, fp32", f"at most {max(apart):.1e} apart", "1 %")
    assert max(apart) < 0.01


def test_where_the_time_of_a_tuned_step_goes(
    show: Callable[[Table], None], figure: Figure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warm step of all levers that keep the numbers, beside its matmuls each at its own shape's best."""
    import torch

    profiled = _profiled_step(MODEL.model_copy(update={"compile": True}), monkeypatch)
    kinds = {"matmul": 0.0, "attention": 0.0, "optimizer": 0.0, "elementwise, copies and the rest": 0.0}
    for event in profiled.key_averages():
        if event.key == "aten::mm":
            kind = "matmul"
        elif "scaled_dot_product" in event.key or "causal_attention" in event.key:
            kind = "attention"
        elif "adam" in event.key.lower() or "norm" in event.key:
            kind = "optimizer"
        else:
            kind = "elementwise, copies and the rest"
        kinds[kind] += event.self_cpu_time_total / 1e6
    whole = sum(kinds.values())
    counts: dict[tuple[int, int, int], int] = {}
    for event in profiled.key_averages(group_by_input_shape=True):
        if event.key == "aten::mm":
            (rows, inner), (_, columns) = event.input_shapes[:2]
            counts[rows, inner, columns] = counts.get((rows, inner, columns), 0) + event.count
    work = sum(2.0 * math.prod(shape) * count for shape, count in counts.items())
    timed = {shape: _seconds_alone(shape) for shape in counts}
    alone, usual = (sum(timed[shape][which] * count for shape, count in counts.items()) for which in (0, 1))
    peak = measured_peak(torch.device("cpu"), "fp32", seconds=30).flops_per_s
    table = Table("one tuned step, profiled", "seconds", "of the step", "GFLOP/s", "of the peak")
    for kind, spent in kinds.items():
        rates = (f"{work / spent / 1e9:.1f}", f"{work / spent / peak:.1%}") if kind == "matmul" else ("", "")
        table.add_row(kind, f"{spent:.3f}", f"{spent / whole:.1%}", *rates)
    beside = {
        "its matmuls, each shape alone, its usual time": usual,
        "its matmuls, each shape alone, its best": alone,
        "its matmuls at the peak": work / peak,
    }
    for name, seconds in beside.items():
        shares = (f"{work / seconds / 1e9:.1f}", f"{work / seconds / peak:.1%}")
        table.add_row(name, f"{seconds:.3f}", f"{seconds / whole:.1%}", *shares)
    show(table)
    figure("a tuned step", ", ".join(f"{kind} {spent / whole:.0%}" for kind, spent in kinds.items()), "")


def _profiled_step(config: TrainingConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The last step of a run whose memory is warm, as torch's profiler saw it."""
    from torch.profiler import ProfilerActivity, profile

    from training.trainer import Run

    steps = itertools.count()
    plainly = Run.step
    profiled = profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    def step(run: Run, *given: Any) -> Any:
        with profiled if next(steps) == WARM else contextlib.nullcontext():
            return plainly(run, *given)

    monkeypatch.setattr(Run, "step", step)
    measure(config, WARM)
    return profiled


def _seconds_alone(shape: tuple[int, int, int]) -> tuple[float, float]:
    """The shortest time of a matmul of this shape with nothing else going on, and the median.

    A peak is the best moment of a machine; between the two lies what others on it take meanwhile.
    """
    import torch

    rows, inner, columns = shape
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)
    out = torch.empty(rows, columns)
    times = []
    for _ in range(50):
        began = time.perf_counter()
        torch.mm(left, right, out=out)
        times.append(time.perf_counter() - began)
    return min(times), median(times)


def test_two_processes(show: Callable[[Table], None], figure: Figure, tmp_path: Path) -> None:
    from tests.benchmarks.exchange import LAYOUTS as TIMED
    from tests.training.pair import LAYOUTS as COUNTED

    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    answers: dict[str, Any] = {}
    for module in ("tests.training.pair", "tests.benchmarks.exchange"):
        file = tmp_path / "answer.json"
        own = {**environment, "MASTER_PORT": str(free_port())}
        code, said = run_quietly([sys.executable, "-m", module, str(file)], 2, own)
        assert code == 0, said
        answers |= json.loads(file.read_text())
    counts = Table("collectives of a step of 4 passes", "all-reduce", "reduce-scatter", "all-gather")
    for name in COUNTED:
        made = answers[name]["collectives"]
        counts.add_row(name, *(str(made[kind]) for kind in ("all_reduce", "reduce_scatter", "all_gather")))
    show(counts)
    once, often = (answers[name]["collectives"]["reduce_scatter"] for name in ("fsdp", "fsdp, every pass"))
    figure(
        "reduce-scatters of 4 passes, 3 groups of layers", f"{once}; {often} after every pass", "one a group"
    )
    times = Table("exposed communication of a step, 4 passes", "step ms", "exposed ms", "less than plain")
    plain = None
    for name in TIMED:
        took = answers[name]
        exposed = took["with"] - took["without"]
        plain = exposed if plain is None else plain
        times.add_row(name, f"{took['with'] * 1e3:.1f}", f"{exposed * 1e3:.1f}", f"{1 - exposed / plain:.0%}")
        if exposed != plain:
            figure(f"exposed communication, {name}", f"{1 - exposed / plain:.0%} less than plain", "30 %")
    show(times)


def test_the_tuner_against_the_whole_grid(show: Callable[[Table], None], figure: Figure) -> None:
    import torch

    machine = Machine.of(torch.device("cpu"))
    settings = [each.setting for each in candidates(GRID, 1, machine)]
    rates = dict.fromkeys(map(json.dumps, settings), 0.0)
    for _ in range(GRID_TURNS):  # of all, so that what else runs meanwhile decides nothing
        for tried in settings:
            rate = measure(GRID.model_copy(update=tried), GRID_STEPS).tokens_per_s
            rates[json.dumps(tried)] = max(rates[json.dumps(tried)], rate or 0.0)
    names = list(settings[0])

    def known(config: TrainingConfig) -> Probe:
        return Probe(rates[json.dumps({name: getattr(config, name) for name in names})])

    best = max(rates, key=lambda setting: rates[setting])
    probes = -(-len(settings) // 10)
    tuned = tune(GRID, 1, machine, known, probes=probes)
    chosen = json.dumps(tuned.chosen)
    table = Table(f"{len(settings)} settings", "setting", "tokens/s", "of the best")
    for name, setting in (("best of all", best), (f"tuner, {probes} probes", chosen)):
        table.add_row(name, setting, f"{rates[setting]:.0f}", f"{rates[setting] / rates[best]:.1%}")
    worst = min(rates, key=lambda setting: rates[setting])
    table.add_row("worst", worst, f"{rates[worst]:.0f}", f"{rates[worst] / rates[best]:.1%}")
    show(table)
    share = f"{rates[chosen] / rates[best]:.1%} of the best (the worst: {rates[worst] / rates[best]:.1%})"
    figure(f"tuner, {probes} probes of {len(settings)} settings", share, "95 %")


def test_a_run_that_is_killed_goes_on_to_the_same_curve(figure: Figure, tmp_path: Path) -> None:
    file, steps = tmp_path / "run.yaml", 24
    asked = {"model": "llama-tiny", "seq_len": 64, "micro_batch": 4, "steps": steps, "checkpoint_every": 3}
    file.write_text(json.dumps({**asked, "held_out_windows": 1, "profile_steps": 0}))
    after = random.randrange(4, steps - 2)

    def run(output: Path, killed_after: int | None = None) -> None:
        command = [sys.executable, "-m", "training", "run", str(file), "--output", str(output)]
        metrics = output / "metrics.jsonl"
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            if killed_after is not None:
                wait_for(
                    lambda: metrics.is_file() and metrics.read_text().count("\n") >= killed_after,
                    f"step {killed_after}",
                )
                process.send_signal(signal.SIGKILL)
        assert process.returncode == (0 if killed_after is None else -signal.SIGKILL)

    run(tmp_path / "whole")
    run(tmp_path / "cut", after)
    run(tmp_path / "cut")
    whole, cut = ((tmp_path / name / "curve.jsonl").read_bytes() for name in ("whole", "cut"))
    weights = ((tmp_path / name / "model/model.safetensors").read_bytes() for name in ("whole", "cut"))
    same = "the same bits" if whole == cut and len(set(weights)) == 1 else "another curve"
    figure(f"kill -9 after step {after} of {steps}, then on: losses and weights", same, "the same bits")
    assert same == "the same bits"


def test_importing_the_package(figure: Figure) -> None:
    def seconds(modules: str) -> float:
        timed = f"began = time.perf_counter(); import {modules}; print(time.perf_counter() - began)"
        command = [sys.executable, "-c", f"import time; {timed}"]
        return min(float(subprocess.check_output(command)) for _ in range(5))

    every = seconds("training.trainer, training.tuner, training.commands")
    figure("import training; the trainer, the tuner", f"{seconds('training'):.3f} s; {every:.3f} s", "0.3 s")
