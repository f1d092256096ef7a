"""`python -m training predict | compare | fitted`: what a cluster would give, at once and without torch."""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training import fit, models, performance
from training.performance import Prediction
from training.picture import LABELS, curve
from training.roofline import EFFICIENCY, PEAK_OF

_LARGEST = 4096  # GPUs in a picture


def register(commands: Any) -> None:
    """Add the commands to a parser; the parsed arguments carry the function to call as `answer`."""
    predict = commands.add_parser(
        "predict",
        help="step time, MFU, memory and what limits, on GPUs not at hand",
        epilog="How near that comes to published runs: python -m training fitted.",
    )
    compare = commands.add_parser(
        "compare", help="rank the GPUs of a cluster file for a job, by time and cost"
    )
    for command in (predict, compare):
        command.add_argument("--model", required=True, help="a shipped name, a config.json or its directory")
        command.add_argument("--precision", choices=list(PEAK_OF), default="bf16")
        command.add_argument("--seq-len", type=int, default=8192)
        command.add_argument("--batch", type=int, help="sequences in a step")
        command.add_argument("--json", action="store_true")
    predict.add_argument("--gpu", required=True)
    predict.add_argument("--gpus", type=int, required=True)
    predict.add_argument("--price", type=float, help="of a GPU-hour")
    predict.add_argument("--svg", type=Path, help="write MFU and cost against GPU count")
    predict.set_defaults(answer=_predict)
    compare.add_argument(
        "--cluster", type=Path, required=True, help="its nodes: gpu, gpus, price_per_gpu_hour"
    )
    compare.add_argument("--tokens", type=float, required=True, help="that the job trains on")
    compare.set_defaults(answer=_compare)
    fitted = commands.add_parser(
        "fitted",
        help="how near predictions come to published runs, fitted on one half and tested on the other",
    )
    fitted.add_argument("--swap", action="store_true", help="fit on the other half, which takes a minute")
    fitted.set_defaults(answer=_fitted)


def _fitted(asked: argparse.Namespace) -> tuple[str, int]:
    return (fit.swapped_report() if asked.swap else fit.report(EFFICIENCY, *fit.halves())), 0


def _predict(asked: argparse.Namespace) -> tuple[str, int]:
    if asked.price is not None and not 0 < asked.price < math.inf:
        raise models.ModelError(f"--price: {asked.price:g}; expected a number above 0")
    said = performance.predict(
        asked.model, asked.gpu, asked.gpus, asked.precision, asked.seq_len, asked.batch
    )
    if asked.svg:
        counts = [2**power for power in range(max(_LARGEST, asked.gpus).bit_length())]
        shown = performance.predict_counts(
            asked.model, asked.gpu, sorted({*counts, asked.gpus}), asked.precision, asked.seq_len, said.batch
        )
        _write(asked.svg, curve(shown, asked.price))
    if asked.json:
        priced = {}
        if asked.price:
            priced["cost_per_trillion_tokens"] = said.cost_per_trillion_tokens(asked.price)
        counts, sizes = performance.fading(said)
        fades = {
            "mfu_by_gpus": {one.gpus: one.mfu for one in counts},
            "mfu_by_model": {one.model: one.mfu for one in sizes},
        }
        return json.dumps(said.as_json() | fades | priced), 0
    return "\n".join(_lines(said, asked.price)), 0


def _lines(said: Prediction, price: float | None) -> list[str]:
    parts, layout = said.parts, said.layout
    shares = {LABELS[name]: seconds for name, seconds in asdict(parts).items()}
    lines = [
        f"{said.model} on {said.gpus} × {said.gpu}, {said.precision}, "
        f"{said.batch} × {said.seq_len} tokens a step",
        f"step        {parts.total:.3f} s, {said.tokens_per_s_per_gpu:,.0f} tokens/s per GPU",
        f"MFU         {said.mfu:.1%}, nine of ten runs from {said.low:.1%} to {said.high:.1%} "
        "(convention causal)",
        f"limited by  {LABELS[said.limiting]}"
        f"{'' if said.limiting == 'compute' else ', the most beside compute'}; of the step "
        + ", ".join(f"{name} {part / parts.total:.0%}" for name, part in shares.items()),
        f"memory      {said.memory.total / 1e9:.0f} GB per GPU, most in {said.memory.moment}",
        f"layout      tensor {layout.tensor} × pipeline {layout.pipeline} × context {layout.context} × data "
        f"{layout.data_parallel}; micro-batch {layout.micro_batch}, accumulation {layout.accumulation}, "
        f"checkpointing {layout.checkpointing}",
    ]
    if price:
        cost = said.cost_per_trillion_tokens(price)
        lines.append(f"cost        {cost:,.0f} per trillion tokens at {price:g} a GPU-hour")
    lines += [f"beyond      {reason}" for reason in said.extrapolated]
    counts, sizes = performance.fading(said)
    lines.append("by GPUs     " + ", ".join(f"{one.gpus}: {one.mfu:.1%}" for one in counts))
    if sizes:
        lines.append("by size     " + ", ".join(f"{one.model}: {one.mfu:.1%}" for one in sizes))
    return lines


def _compare(asked: argparse.Namespace) -> tuple[str, int]:
    if not 0 < asked.tokens < math.inf:
        raise models.ModelError(f"--tokens: {asked.tokens:g}; expected a number above 0")
    offered = _offered(asked.cluster)
    choices = performance.compare(
        asked.model, asked.tokens, offered, asked.precision, asked.seq_len, asked.batch
    )
    if not choices:
        raise models.ModelError(f"{asked.cluster}: {asked.model} fits on none of its GPUs")
    cheapest = sorted(choices, key=lambda choice: (choice.cost, choice.seconds))
    rank = {id(choice): place for place, choice in enumerate(cheapest, 1)}
    if asked.json:
        return json.dumps(
            [
                {"seconds": choice.seconds, "cost": choice.cost, "rank_by_time": place}
                | {"rank_by_cost": rank[id(choice)]}
                | choice.prediction.as_json()
                for place, choice in enumerate(choices, 1)
            ]
        ), 0
    lines = [
        f"{'by time':>7} {'by cost':>7}  {'GPUs':18} {'hours':>9} {'cost':>12}   MFU           limited by"
    ]
    for place, choice in enumerate(choices, 1):
        said = choice.prediction
        mark = " *" if said.extrapolated else ""
        lines.append(
            f"{place:7} {rank[id(choice)]:7}  {f'{said.gpus} × {said.gpu}':18} {choice.seconds / 3600:9,.1f} "
            f"{choice.cost:12,.2f}   {said.mfu:.0%} ({said.low:.0%}-{said.high:.0%}){mark:2}  "
            f"{LABELS[said.limiting]}"
        )
    if any(choice.prediction.extrapolated for choice in choices):
        lines.append("* beyond what was published: the interval is wider")
    if unpriced := [name for name, (_, price) in offered.items() if price == 0]:
        lines.append(f"no price_per_gpu_hour of {', '.join(unpriced)} in {asked.cluster}: it counts as free")
    return "\n".join(lines), 0


def _offered(file: Path) -> dict[str, tuple[int, float]]:
    """GPUs of each type, and the dearest price of each, as a job on all of them would pay at most."""
    import yaml

    try:
        nodes = yaml.safe_load(file.read_text(encoding="utf-8"))["nodes"]
        offered: dict[str, tuple[int, float]] = {}
        for node in nodes:
            if node.get("gpu", "cpu") == "cpu":
                continue
            count, price = offered.get(node["gpu"], (0, 0.0))
            own, own_price = int(node["gpus"]), float(node.get("price_per_gpu_hour", 0.0))
            if own < 1 or not 0 <= own_price < math.inf:
                raise ValueError(f"gpus: {own}, price_per_gpu_hour: {own_price:g}")
            offered[node["gpu"]] = (count + own, max(price, own_price))
    except OSError as error:
        raise models.ModelError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise models.ModelError(
            f"{file}: nodes: {' '.join(str(error).split())}; "
            "expected a list of {name, gpus, gpu, price_per_gpu_hour}"
        ) from None
    if not offered:
        raise models.ModelError(f"{file}: nodes: no GPUs among them; expected one with gpu: of a known type")
    return offered


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise models.ModelError(f"{file}: {error.strerror}") from None
