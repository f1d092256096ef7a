"""`python -m training diagnose CONFIG | --trace FILE…`: where a step's time goes: table, words, picture.

A configuration is run for a few steps, and again with one lever changed at a time; a trace may be anybody's.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from training import models
from training.picture import stacked_bars
from training.trace import CAUSES, Breakdown, TraceError, read, stragglers

WORTH_NAMING = 0.05  # of the step
# cause: what people call it, and what to do when it is large.
WORDS = {
    "compute": ("compute", ""),
    "optimizer": ("optimizer", "fuse it (fused_optimizer: true), or take a larger global batch"),
    "copies": ("host/device copies", "pin and copy one batch ahead (pinned: true, prefetch_batches: 1)"),
    "communication": (
        "exposed communication",
        "reduce gradients once a step, in large buckets, beside the backward pass (sync: last)",
    ),
    "data": ("waiting for data", "make batches beside the step (loader_workers: 2, prefetch_batches: 2)"),
    "idle": (
        "idle",
        "the host is late: look for .item() and other synchronizations, small batches, graph breaks",
    ),
}


def register(commands: Any) -> None:
    """Add the command to a parser; the parsed arguments carry the function to call as `answer`."""
    diagnose = commands.add_parser("diagnose", help="say where the time of a profiled run goes")
    diagnose.add_argument(
        "config", type=Path, nargs="?", help="a YAML file, run for a few steps in one process"
    )
    diagnose.add_argument(
        "--trace", type=Path, nargs="+", metavar="FILE", help="instead: torch.profiler traces, one a rank"
    )
    diagnose.add_argument("--no-levers", action="store_true", help="do not measure what each lever wins")
    diagnose.add_argument(
        "--mfu", type=float, help="of the run, 0 to 1: gives each cause's cost in MFU points"
    )
    diagnose.add_argument("--svg", type=Path, help="write a stacked bar for each rank")
    diagnose.add_argument("--json", action="store_true")
    diagnose.set_defaults(answer=_answer)


def _answer(asked: argparse.Namespace) -> tuple[str, int]:
    if asked.mfu is not None and not 0 < asked.mfu <= 1:
        raise models.ModelError(f"--mfu: {asked.mfu:g}; expected a share above 0, at most 1")
    if (asked.config is None) == (asked.trace is None):
        raise models.ModelError("diagnose: expected either a configuration or --trace")
    won: list[tuple[str, float]] = []
    if asked.trace:
        ranks = read(asked.trace)
    else:
        ranks, won = _live(asked.config, not asked.no_levers)
    if asked.svg:
        _write(asked.svg, drawing(ranks))
    if asked.json:
        levers = [{"line": line, "times": times} for line, times in won]
        return json.dumps(as_json(ranks, asked.mfu) | {"levers": levers}), 0
    gains = [f"{line:28} {times:.2f} ×" for line, times in won]
    return "\n".join([*table(ranks, asked.mfu), "", *words(ranks), *([""] if gains else []), *gains]), 0


def _live(file: Path, levers: bool) -> tuple[list[Breakdown], list[tuple[str, float]]]:
    """The breakdown of a configuration's own steps, and what each lever wins. Raises TraceError."""
    from training.capture import captured, gains
    from training.config import ConfigError, load_config
    from training.data import DataError
    from training.tokenizer import TokenizerError
    from training.trainer import TrainingError

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TraceError(
            f"{file}: is diagnosed in one process; give the traces of several ranks with --trace"
        )
    try:
        config = load_config(file)
        found = [captured(config)]
        say = partial(print, file=sys.stderr, flush=True)
        return found, [(gain.line, gain.times) for gain in gains(config, say)] if levers else []
    except (ConfigError, DataError, TokenizerError, TrainingError) as error:
        raise TraceError(str(error)) from None


def points(share: float, mfu: float) -> float:
    """MFU points that would be won if a share of the step were not there; never beyond the whole peak."""
    return 100 * (min(mfu / (1 - share), 1.0) - mfu) if share < 1 else 0.0


def table(ranks: Sequence[Breakdown], mfu: float | None = None) -> list[str]:
    """Seconds of a step by cause, for each rank, with its share of the time of all."""
    heading = f"{'ms a step':22}" + "".join(f"{f'rank {one.rank}':>12}" for one in ranks) + f"{'share':>9}"
    lines = [heading + ("   MFU points" if mfu else "")]
    for cause in CAUSES:
        cells = "".join(f"{1e3 * one.seconds[cause] / one.steps:12.2f}" for one in ranks)
        share = _share(ranks, cause)
        cost = f"{points(share, mfu):13.1f}" if mfu and cause != "compute" else ""
        lines.append(f"{WORDS[cause][0]:22}{cells}{share:9.1%}{cost}")
    total = "".join(f"{1e3 * one.total / one.steps:12.2f}" for one in ranks)
    hidden = "".join(f"{1e3 * one.hidden_communication / one.steps:12.2f}" for one in ranks)
    return [*lines, f"{'step':22}{total}{1:9.0%}", f"{'hidden communication':22}{hidden}   (costs nothing)"]


def words(ranks: Sequence[Breakdown]) -> list[str]:
    """A sentence for each cause that is worth one, the largest first, and one for each straggler."""
    named = sorted((cause for cause in CAUSES if cause != "compute"), key=lambda cause: -_share(ranks, cause))
    lines = [
        f"{WORDS[cause][0]} takes {_share(ranks, cause):.0%} of the step; without it the run is "
        f"{1 / (1 - min(_share(ranks, cause), 0.99)):.2f} × as fast: {WORDS[cause][1]}"
        for cause in named
        if _share(ranks, cause) >= WORTH_NAMING
    ]
    for rank, excess in stragglers(ranks):
        steps = next(one.steps for one in ranks if one.rank == rank)
        lines.append(
            f"rank {rank} straggles: {1e3 * excess / steps:.2f} ms of each step, the others wait for it"
        )
    return lines or ["nothing beside computing takes a twentieth of the step"]


def as_json(ranks: Sequence[Breakdown], mfu: float | None = None) -> dict[str, Any]:
    """Everything, for machines."""
    found: dict[str, Any] = {
        "ranks": [
            {
                "rank": one.rank,
                "steps": one.steps,
                "device": one.device,
                "seconds": one.seconds,
                "hidden_communication_seconds": one.hidden_communication,
            }
            for one in ranks
        ],
        "shares": {cause: _share(ranks, cause) for cause in CAUSES},
        "stragglers": [{"rank": rank, "seconds": excess} for rank, excess in stragglers(ranks)],
        "words": words(ranks),
    }
    if mfu:
        found["mfu_points"] = {
            cause: points(_share(ranks, cause), mfu) for cause in CAUSES if cause != "compute"
        }
    return found


def drawing(ranks: Sequence[Breakdown]) -> str:
    """A stacked bar of a step for each rank, in milliseconds."""
    return stacked_bars(
        {
            f"rank {one.rank}": {WORDS[cause][0]: 1e3 * one.seconds[cause] / one.steps for cause in CAUSES}
            for one in ranks
        },
        "Where a step's time goes, milliseconds",
    )


def _share(ranks: Sequence[Breakdown], cause: str) -> float:
    return sum(one.seconds[cause] for one in ranks) / sum(one.total for one in ranks)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise models.ModelError(f"{file}: {error.strerror}") from None
