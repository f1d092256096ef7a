"""`python -m training flops | mfu`: figures that follow from a model's sizes, at once and without torch.

Only `--gpu measured`, which times a matmul on this machine, loads torch.
"""

import argparse
import json
import math
from typing import Any

from training import flops, hardware, models
from training.memory import CHECKPOINTING

Commands = Any  # argparse's subparsers have no public name


def register(commands: Commands) -> None:
    """Add the commands to a parser; the parsed arguments carry the function to call as `answer`."""
    for name, help_text, answer in (
        ("flops", "model FLOPs per token", _flops),
        ("mfu", "the share of the peak that was used", _mfu),
    ):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("--model", required=True, help="a shipped name, a config.json or its directory")
        command.add_argument("--seq-len", type=int, required=True)
        command.add_argument("--convention", choices=list(flops.CONVENTIONS), default="matmul")
        command.add_argument("--json", action="store_true")
        command.set_defaults(answer=answer)
    share = commands.choices["mfu"]
    share.add_argument("--tokens-per-s-per-gpu", type=float, required=True)
    share.add_argument("--gpu", required=True, help="a product, or `measured`: a matmul timed on this device")
    share.add_argument("--precision", default="bf16", help="of the linear layers")
    share.add_argument("--attention-precision", help="adds MFU with each part over its own peak")
    share.add_argument("--checkpointing", choices=CHECKPOINTING, default="none", help="for HFU")


def _flops(asked: argparse.Namespace) -> tuple[str, int]:
    found = _counted(asked)
    if asked.json:
        return json.dumps(found), 0
    text = (
        f"{found['flops_per_token'] / 1e9:.3f} GFLOP per token; {found['parameters']:,} parameters; "
        f"convention {asked.convention}"
    )
    return text, 0


def _counted(asked: argparse.Namespace) -> dict[str, Any]:
    if asked.seq_len < 1:
        raise models.ModelError(f"--seq-len: {asked.seq_len}; expected 1 or more")
    shape = models.shape_of(asked.model)
    work = flops.work_per_token(shape, asked.seq_len, asked.convention)
    return {
        "model": asked.model,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "seq_len": asked.seq_len,
        "convention": asked.convention,
        "flops_per_token": work.total,
        "linear_flops_per_token": work.linear,
        "attention_flops_per_token": work.attention,
    }


def _mfu(asked: argparse.Namespace) -> tuple[str, int]:
    found = _counted(asked)
    rate = asked.tokens_per_s_per_gpu
    if not (rate > 0 and math.isfinite(rate)):
        raise models.ModelError(f"--tokens-per-s-per-gpu: {rate:g}; expected more than 0")
    shape = models.shape_of(asked.model)
    work = flops.work_per_token(shape, asked.seq_len, asked.convention)
    again = flops.recomputed_per_token(shape, asked.seq_len, asked.checkpointing, asked.convention)
    peak = _peak(asked.gpu, asked.precision)
    found |= {
        "tokens_per_s_per_gpu": rate,
        "flops_per_s_per_gpu": work.total * rate,
        "precision": asked.precision,
        "peak_flops_per_s": peak.flops_per_s,
        "peak_source": peak.source,
        "mfu": flops.mfu(work.total, rate, peak.flops_per_s),
        "hfu": flops.hfu(work, again, rate, peak.flops_per_s),
    } | _other_readings(asked, work, rate, peak)
    if asked.json:
        return json.dumps(found), 0
    text = f"{found['mfu']:.2%} of {peak.flops_per_s / 1e12:g} TFLOP/s, {peak.source}"
    lines = [f"{text}; convention {asked.convention}"]
    lines += [
        f"{found[key]:.2%} {meaning}" for key, meaning in _READINGS.items() if found.get(key) is not None
    ]
    if asked.checkpointing != "none":
        lines.append(f"{found['hfu']:.2%} HFU, with what {asked.checkpointing} checkpointing computes again")
    if found["mfu"] > 1:
        lines.append("more than the peak: a figure that was given is wrong")
    return "\n".join(lines), 0


_READINGS = {
    "split_mfu": "with linear layers and attention each over their own peak",
    "mfu_of_achievable": "of the best measured bf16 matmul",
    "mfu_if_divided_by_bf16_peak": "if divided by the bf16 peak, which is not that of this work",
}


def _other_readings(
    asked: argparse.Namespace, work: flops.Work, rate: float, peak: hardware.Peak
) -> dict[str, float]:
    """Shares of other denominators, each under a name that says which."""
    found: dict[str, float] = {}
    if asked.attention_precision:
        other = _peak(asked.gpu, asked.attention_precision)
        found["split_mfu"] = flops.split_mfu(work, rate, peak.flops_per_s, other.flops_per_s)
    if asked.gpu == "measured":
        return found
    if asked.precision == "bf16" and hardware.gpu(asked.gpu).matmul_tflops is not None:
        found["mfu_of_achievable"] = flops.mfu(
            work.total, rate, hardware.achievable_peak(asked.gpu).flops_per_s
        )
    elif asked.precision in ("fp8", "fp4"):
        bf16 = hardware.published_peak(asked.gpu, "bf16")
        found["mfu_if_divided_by_bf16_peak"] = flops.mfu(work.total, rate, bf16.flops_per_s)
    return found


def _peak(gpu: str, precision: str) -> hardware.Peak:
    if gpu != "measured":
        return hardware.published_peak(gpu, precision)
    if precision not in ("fp32", "bf16", "fp16"):
        raise hardware.HardwareError(
            f"--precision: {precision}; expected fp32, bf16 or fp16 with --gpu measured"
        )
    import torch

    return hardware.measured_peak(torch.device("cuda" if torch.cuda.is_available() else "cpu"), precision)
