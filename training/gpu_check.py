"""`python -m training gpu-check`: what this GPU does with an 8B-shaped slice, plain and tuned, in one table.

Invariant: each row is a fresh process that trains for a few steps, so that no row leaves memory or compiled
code to the next; shares are of the peak of the row's own precision. The slice has the 8B model's layers and
as many of them as fit with their optimizer state. Without a GPU it says so; `--cpu` measures a small model
with the same rows, as far as a processor can.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.config import LEVERS, ConfigError, TrainingConfig, plain_of, preserving_of
from training.launching import mfu_of
from training.probe import Probe, probe

Row = dict[str, Any]
BUDGET_S = 540.0  # rows that would begin later are left out, and said to be
TUNER_S = 150.0  # that its probes take at most
COPIED = 256 << 20  # bytes, to time a transfer
OFF = {name: lever.plain for name, lever in LEVERS.items() if lever.numerics != "changes"}
_TAKEN_AWAY = (  # levers, one at a time, for what each gains
    "micro_batch",
    "loss_chunk",
    "compile",
    "attention",
    "fused_optimizer",
    "pinned",
    "prefetch_batches",
    "keep_host_memory",
    "expandable_segments",
)


def gpu_check(cpu: bool = False, answer: Path | None = None) -> int:
    """Measure and print the table; the exit code: 1 when there is no GPU and the CPU was not asked for."""
    import torch

    if not cpu and not torch.cuda.is_available():
        print("gpu-check: torch sees no GPU here; --cpu measures a small model instead", file=sys.stderr)
        return 1
    name = "CPU" if cpu else torch.cuda.get_device_name(0)
    rows = measured_rows(_tuned(cpu), cpu)
    print_rows(name, rows)
    if answer is not None:
        answer.write_text(json.dumps({"device": name, "rows": rows}, indent=1), encoding="utf-8")
    return 0


def measured_rows(
    tuned: TrainingConfig, cpu: bool, run: Callable[[TrainingConfig], Probe] = probe
) -> list[Row]:
    """The rows of the table: name, tokens/s, MFU, memory, and how each compares with plain."""
    import torch

    from training.precision import bf16_is_fast

    began = time.monotonic()
    device = torch.device("cpu" if cpu else "cuda")
    plain = plain_of(tuned, 1)
    probes = [run(plain)]
    rows = [_row("plain: fp32, micro-batch 1, nothing on", probes[0], plain)]
    base = rows[0]["tokens_per_s"]
    autocast = plain.model_copy(update={"precision": "bf16"})
    best_precision = "bf16" if bf16_is_fast(device)[0] else "fp32"
    tuned = tuned.model_copy(update={"precision": best_precision})
    first, levers = _planned(tuned, autocast, cpu)
    tuner: list[Row] = []
    for place, (name, config) in enumerate(first + levers):
        if place == len(first):  # before the levers: of what the time leaves out, it is not
            tuner = [_tuner_row(tuned, cpu, run, BUDGET_S - (time.monotonic() - began))]
        if time.monotonic() - began > BUDGET_S:
            rows.append({"row": name, "note": "left out: ten minutes are over"})
            continue
        probes.append(run(config))
        rows.append(_row(name, probes[-1], config))
    for _ in range(2):  # a peak that turns out to be too low is too low for every row
        for row, found in zip(rows, probes, strict=False):  # rows that were left out come last
            row["mfu"] = mfu_of(found, 1)
    rows += tuner
    if not cpu:
        rows.append(_copies_row(device))
    for row in rows:
        if row.get("tokens_per_s") and base:
            row["gain"] = row["tokens_per_s"] / base
    return rows


def _planned(
    tuned: TrainingConfig, autocast: TrainingConfig, cpu: bool
) -> tuple[list[tuple[str, TrainingConfig]], list[tuple[str, TrainingConfig]]]:
    """What is measured beside plain: first what counts most, then tuned without each lever."""
    import torch

    first = [] if cpu else [("plain with bf16 autocast", autocast)]
    first.append((f"tuned, {tuned.precision}", tuned))
    if not cpu and torch.cuda.get_device_capability() >= (8, 9):
        first.append(("tuned, fp8", tuned.model_copy(update={"precision": "fp8"})))
    if (preserving := preserving_of(tuned)) != tuned:
        first.append(("tuned, numerics preserved", preserving))
    levers = [
        (f"tuned without {lever}", tuned.model_copy(update={lever: OFF[lever]}))
        for lever in _TAKEN_AWAY
        if getattr(tuned, lever) not in (OFF[lever], "auto") or lever in _by_device(cpu)
    ]
    levers += [
        (
            f"tuned with activation_checkpointing {mode}",
            tuned.model_copy(update={"activation_checkpointing": mode}),
        )
        for mode in ("selective", "full")
    ]
    if tuned.precision == "bf16":
        levers.append(("tuned, bf16_master", tuned.model_copy(update={"precision": "bf16_master"})))
    return first, levers


def _copies_row(device: Any) -> Row:
    """How fast host memory reaches the GPU, page-locked and not."""
    import torch

    there = torch.empty(COPIED, dtype=torch.uint8, device=device)
    rates = []
    for pinned in (True, False):
        here = torch.zeros(COPIED, dtype=torch.uint8, pin_memory=pinned)
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            there.copy_(here, non_blocking=pinned)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        rates.append(COPIED / min(times) / 1e9)
    return {"row": "transfers to the GPU", "note": f"pinned {rates[0]:.1f} GB/s, not {rates[1]:.1f}"}


def print_rows(name: str, rows: list[Row]) -> None:
    """The table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "tokens/s", "MFU", "times plain", "GB used", "GB predicted", "note", title=name)
    shown: tuple[tuple[str, Callable[[Any], str]], ...] = (
        ("tokens_per_s", lambda value: f"{value:.0f}"),
        ("mfu", lambda value: f"{value:.1%}"),
        ("gain", lambda value: f"{value:.2f}"),
        ("memory_gb", lambda value: f"{value:.2f}"),
        ("predicted_gb", lambda value: f"{value:.2f}"),
        ("note", str),
    )
    for row in rows:
        cells = [how(row[key]) if row.get(key) is not None else "" for key, how in shown]
        table.add_row(row["row"], *cells)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def _row(name: str, found: Probe, config: TrainingConfig) -> Row:
    from training.tuner import predicted_bytes

    predicted = predicted_bytes(config, 1)
    return {
        "row": name,
        "tokens_per_s": found.tokens_per_s,
        "memory_gb": found.memory_bytes / 1e9 if found.memory_bytes else None,
        "predicted_gb": predicted[0] / 1e9 if predicted else None,
        "occupancy": found.occupancy,
        "note": found.problem or (found.occupancy_source and f"occupancy {found.occupancy:.0%}"),
    }


def _tuner_row(tuned: TrainingConfig, cpu: bool, run: Callable[[TrainingConfig], Probe], left: float) -> Row:
    """The tuner on micro-batch and checkpointing, with what it chose."""
    import torch

    from training.tuner import Machine, tune

    name = "tuner"
    if left < TUNER_S and not cpu:
        return {"row": name, "note": "left out: ten minutes are over"}
    machine = Machine.of(torch.device("cpu" if cpu else "cuda"))
    asked = tuned.model_copy(update={"micro_batch": "auto", "activation_checkpointing": "auto"})
    try:
        found = tune(asked, 1, machine, run, probes=2 if cpu else 3)
    except ConfigError as error:
        return {"row": name, "note": str(error)}
    rates = [rate for _, rate in found.probes if rate]
    said = ", ".join(f"{key} {value}" for key, value in found.chosen.items())
    return {"row": name, "tokens_per_s": max(rates, default=None), "note": f"{said}; {found.why}"}


def _by_device(cpu: bool) -> tuple[str, ...]:
    return ("keep_host_memory", "attention") if cpu else ("pinned", "expandable_segments", "prefetch_batches")


def _tuned(cpu: bool) -> TrainingConfig:
    shared: dict[str, Any] = {"compile": not cpu, "steps": 100, "warmup": 10, "tune_steps": 2 if cpu else 5}
    if cpu:
        return TrainingConfig(
            model="llama-tiny", layers=2, seq_len=64, global_batch=4, micro_batch=4, **shared
        )
    return TrainingConfig(
        model="llama-3.1-8b",
        layers=4,
        seq_len=4096,
        global_batch=8,
        micro_batch=4,
        precision="bf16",
        **shared,
    )
