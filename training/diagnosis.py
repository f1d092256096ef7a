"""`python -m training diagnose CONFIG | --trace FILE…`: where a step's time goes: table, words, picture.

A configuration is run for a few steps, and again with one lever changed at a time; a trace may be anybody's.
"""

import argparse
import json
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from training import models
from training.picture import stacked_bars
from training.signs import (
    COLLECTIVES,
    FUSED,
    GRAPH_BREAKS,
    HOST_READ_IDLE,
    HOST_READS,
    LONG_IDLE,
    PREEMPTED,
    UNBROKEN,
    UNCOMPILED,
    UNPINNED,
)
from training.trace import CAUSES, Breakdown, TraceError, read, stragglers

WORTH_NAMING = 0.05  # of the step
BEST_ON_GPU = 0.8  # of the published peak, that the best measured plain matmuls reach
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
    diagnose.add_argument("config", type=Path, nargs="?", help="a YAML file, run for a few steps")
    diagnose.add_argument("--processes", type=int, default=1, help="that run it, on this machine")
    diagnose.add_argument(
        "--trace", type=Path, nargs="+", metavar="FILE", help="instead: torch.profiler traces, one a rank"
    )
    tried = diagnose.add_mutually_exclusive_group()
    tried.add_argument("--no-levers", action="store_true", help="do not measure what each lever wins")
    tried.add_argument("--levers", nargs="+", metavar="NAME", help="measure these only")
    diagnose.add_argument(
        "--mfu", type=float, help="of the run, 0 to 1: gives each cause's cost in MFU points"
    )
    diagnose.add_argument("--svg", type=Path, help="write a stacked bar for each rank")
    diagnose.add_argument("--json", action="store_true")
    diagnose.set_defaults(answer=_answer)


@dataclass(frozen=True)
class Found:
    """What a diagnosis came to. `left` are the causes that a lever may help against, None if not known; `won`
    is how many times as fast each lever that was tried makes the run, and what it does to the numbers;
    `lever` is the line to try next."""

    ranks: list[Breakdown]
    mfu: float | None = None
    left: frozenset[str] | None = None
    won: tuple[tuple[str, float, str], ...] = ()
    lever: str | None = None


def _answer(asked: argparse.Namespace) -> tuple[str, int]:
    if asked.mfu is not None and not 0 < asked.mfu <= 1:
        raise models.ModelError(f"--mfu: {asked.mfu:g}; expected a share above 0, at most 1")
    if (asked.config is None) == (asked.trace is None):
        raise models.ModelError("diagnose: expected either a configuration or --trace")
    if asked.processes < 1:
        raise models.ModelError(f"--processes: {asked.processes}; expected 1 or more")
    if asked.trace:
        if asked.processes > 1 or asked.no_levers or asked.levers:
            raise models.ModelError(
                "--trace: a trace is read, nothing is run; expected no --processes, --levers or --no-levers"
            )
        found = Found(read(asked.trace))
    elif asked.processes > 1 and "RANK" not in os.environ:
        return "", _on_several(asked)
    else:
        found = _live(asked.config, not asked.no_levers, asked.levers or ())
        if not found.ranks:
            return "", 0  # the first of several processes speaks for all
    ranks, mfu = found.ranks, asked.mfu or found.mfu
    if asked.svg:
        _write(asked.svg, drawing(ranks))
    if asked.json:
        levers = [{"line": line, "times": times, "numerics": numerics} for line, times, numerics in found.won]
        told = {"words": words(ranks, found.left), "levers": levers, "next_lever": found.lever}
        return json.dumps(as_json(ranks, mfu) | told), 0
    lines = [*table(ranks, mfu), "", *words(ranks, found.left)]
    if mfu:
        costs = three_causes(ranks, mfu).items()
        lines += [
            "",
            f"of the MFU of {mfu:.1%}: " + ", ".join(f"{name} {cost:.1f} points" for name, cost in costs),
        ]
    if found.won:
        lines += ["", *(_gain_line(*won, mfu) for won in found.won)]
    lines += ["", f"to try next: {found.lever}"] if found.lever else []
    return "\n".join(lines), 0


def _gain_line(line: str, times: float, numerics: str, mfu: float | None) -> str:
    """What a lever wins, in speed and, in the same precision, in MFU points; a price in numerics is named."""
    known = mfu is not None and not line.startswith("precision")
    points_won = f"  {100 * mfu * (times - 1):+.1f} MFU points" if known and mfu else ""
    return f"{line:36} {times:.2f} ×{points_won}" + ("  changes numerics" if numerics == "changes" else "")


def _on_several(asked: argparse.Namespace) -> int:
    """Diagnose in several processes of this machine; the exit code. The first of them answers."""
    from training.processes import free_port, launch

    command = [sys.executable, "-m", "training", "diagnose", str(asked.config)]
    command += [f"--{name}={value}" for name in ("mfu", "svg") if (value := getattr(asked, name)) is not None]
    command += [f"--{name.replace('_', '-')}" for name in ("json", "no_levers") if getattr(asked, name)]
    command += ["--levers", *asked.levers] if asked.levers else []
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return launch(command, asked.processes, environment, 0, 1)


def _live(file: Path, levers: bool, only: Sequence[str]) -> Found:
    """What a configuration's own steps show, and what each lever wins. Raises TraceError."""
    from training.capture import examined, proposed
    from training.config import LEVERS, ConfigError, load_config
    from training.data import DataError
    from training.remedies import candidates, causes_left, next_lever
    from training.tokenizer import TokenizerError
    from training.trainer import TrainingError

    if unknown := [name for name in only if name not in LEVERS]:
        raise models.ModelError(f"--levers: {unknown[0]}; expected some of {', '.join(LEVERS)}")
    processes, first = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
    say = partial(print, file=sys.stderr, flush=True) if first else lambda line: None
    try:
        config = load_config(file)
        seen, won = examined(config, levers, only, say)
    except (ConfigError, DataError, TokenizerError, TrainingError) as error:
        raise TraceError(str(error)) from None
    if not seen.ranks:
        return Found([])
    cuda = any(one.device == "cuda" for one in seen.ranks)
    left = frozenset(causes_left(seen.config, processes, cuda))
    guess = next_lever(seen.ranks, seen.config, processes, cuda)
    line = None if guess is None else f"{guess[0]} ({guess[1]})"
    if levers:
        line = proposed(won)
        # A cause that no lever was seen to help against stays one only while another is left to try.
        tried = {gain.line for gain in won}
        untried = {each.cause for each in candidates(seen.config, processes, cuda) if each.line not in tried}
        left = left & untried if only else frozenset()
        left |= {gain.cause for gain in won if gain.helps}
    return Found(
        seen.ranks, seen.mfu, left, tuple((gain.line, gain.times, gain.numerics) for gain in won), line
    )


def points(share: float, mfu: float) -> float:
    """MFU points that would be won if a share of the step were not there; never beyond the whole peak."""
    return 100 * (min(mfu / (1 - share), 1.0) - mfu) if share < 1 else 0.0


def table(ranks: Sequence[Breakdown], mfu: float | None = None) -> list[str]:
    """Seconds of a step by cause, for each rank, with its share of the time of all."""
    heading = f"{'ms a step':22}" + "".join(f"{f'rank {one.rank}':>12}" for one in ranks) + f"{'share':>9}"
    lines = [heading + ("   MFU points" if mfu else "")]
    for cause in CAUSES:
        cells = "".join(f"{1e3 * one.seconds[cause] / one.steps:12.2f}" for one in ranks)
        share = share_of(ranks, cause)
        cost = f"{points(share, mfu):13.1f}" if mfu and cause != "compute" else ""
        lines.append(f"{WORDS[cause][0]:22}{cells}{share:9.1%}{cost}")
    total = "".join(f"{1e3 * one.total / one.steps:12.2f}" for one in ranks)
    hidden = "".join(f"{1e3 * one.hidden_communication / one.steps:12.2f}" for one in ranks)
    lines += [f"{'step':22}{total}{1:9.0%}", f"{'hidden communication':22}{hidden}   (costs nothing)"]
    if len(ranks) > 1 and all(one.exchange is not None for one in ranks):
        waits = "".join(f"{1e3 * one.waiting / one.steps:12.2f}" for one in ranks)
        lines.append(f"{'waiting for a rank':22}{waits}   (of the exposed communication)")
    return lines


def accused(ranks: Sequence[Breakdown], left: Collection[str] | None = None) -> list[str]:
    """Causes that are worth a sentence, the largest first.

    `left` are those that a lever of the configuration is left against, where that is known. An optimizer that
    is one kernel already is nobody's fault; on a processor neither is what lies between small ops, nor an
    exchange without a lever left: it waits for cores that others compute on.
    """

    def is_named(cause: str) -> bool:
        if cause == "compute" or cost_of(ranks, cause) < WORTH_NAMING:
            return False
        if cause == "optimizer":
            return not all(one.signs.get(FUSED) for one in ranks)
        if cause == "communication" and ranks[0].device == "cpu":
            return left is None or cause in left
        if cause == "idle" and ranks[0].device == "cpu":
            whole = sum(one.total for one in ranks)
            elsewhere = sum(one.signs.get(LONG_IDLE, 0.0) - one.signs.get(PREEMPTED, 0.0) for one in ranks)
            return "idle" in (left or ()) or elsewhere >= WORTH_NAMING * whole
        return True

    return sorted(filter(is_named, CAUSES), key=lambda cause: -cost_of(ranks, cause))


def words(ranks: Sequence[Breakdown], left: Collection[str] | None = None) -> list[str]:
    """A sentence for each cause that is worth one, the largest first, and one for each straggler."""
    named = accused(ranks, left)
    lines = [
        f"{WORDS[cause][0]} takes {cost_of(ranks, cause):.0%} of the step; without it the run is "
        f"{1 / (1 - min(cost_of(ranks, cause), 0.99)):.2f} × as fast: {WORDS[cause][1]}"
        for cause in named
    ]
    lines += _signs(ranks, "communication" in named)
    for rank, excess in stragglers(ranks):
        steps = next(one.steps for one in ranks if one.rank == rank)
        lines.append(
            f"rank {rank} straggles: {1e3 * excess / steps:.2f} ms of each step, the others wait for it"
        )
    return lines or ["nothing beside computing takes a twentieth of the step"]


def broken(ranks: Sequence[Breakdown]) -> bool:
    """Whether torch.compile broke the graphs of what it compiled, and enough of the step lies between."""
    between = sum(one.signs.get(UNCOMPILED, 0.0) for one in ranks)
    breaks = any(one.signs.get(GRAPH_BREAKS) for one in ranks)
    return breaks or between >= WORTH_NAMING * sum(one.total for one in ranks)


def _signs(ranks: Sequence[Breakdown], communicating: bool) -> list[str]:
    """A sentence for each well-known mistake that explains enough of the step; `communicating` when exchanges
    do."""
    whole, steps = sum(one.total for one in ranks), sum(one.steps for one in ranks)

    def sum_of(sign: str) -> float:
        return sum(one.signs.get(sign, 0.0) for one in ranks)

    lines = []
    if (unpinned := sum_of(UNPINNED)) >= WORTH_NAMING * whole:
        lines.append(
            f"un-pinned copies take {1e3 * unpinned / steps:.2f} ms of each step ({unpinned / whole:.0%}): "
            "pin the host's memory and copy without blocking (pinned: true)"
        )
    if (idle := sum_of(HOST_READ_IDLE)) >= WORTH_NAMING * whole:
        said = "in a synchronization of a stream or the device: let it run ahead"
        if reads := sum_of(HOST_READS):
            said = f"with {reads / steps:.3g} values read by .item() or the like: read them once, at the end"
        lines.append(
            f"the device stands idle {1e3 * idle / steps:.2f} ms of each step ({idle / whole:.0%}) after the "
            f"host waited for it, {said}"
        )
    if broken(ranks):
        breaks = max(one.signs.get(GRAPH_BREAKS, 0.0) for one in ranks)
        told = f"torch.compile broke its graph{f' {breaks:.0f} times' if breaks else ''}: "
        if won := sum_of(UNBROKEN):
            told += (
                f"steps without that take {1e3 * won / steps:.2f} ms ({won / whole:.0%}) less, as measured"
            )
        else:
            lost = sum_of(UNCOMPILED)
            told += f"what lies between takes {1e3 * lost / steps:.2f} ms of each step ({lost / whole:.0%}) "
            told += "uncompiled, the most that removing it can win"
        lines.append(f"{told}; TORCH_LOGS=graph_breaks says where")
    if communicating and (count := sum_of(COLLECTIVES)):
        each = sum(one.seconds["communication"] - one.waiting for one in ranks) / count
        lines.append(
            f"the exposed communication is {count / steps:.0f} collectives a step, {1e3 * each:.2f} ms "
            "of each: fewer and larger ones (bucket_mb: 100) cost less"
        )
    return lines


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
        "shares": {cause: share_of(ranks, cause) for cause in CAUSES},
        "stragglers": [{"rank": rank, "seconds": excess} for rank, excess in stragglers(ranks)],
        "words": words(ranks),
    }
    if mfu:
        found["mfu_points"] = {
            cause: points(share_of(ranks, cause), mfu) for cause in CAUSES if cause != "compute"
        }
        found |= {"mfu": mfu, "three_causes_mfu_points": three_causes(ranks, mfu)}
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


def three_causes(ranks: Sequence[Breakdown], mfu: float) -> dict[str, float]:
    """MFU points that each of the usual three causes costs: memory movement (waiting for data, host/device
    copies), hardware that the work does not fill (idle time, waiting for other ranks, and compute that takes
    longer than the FLOPs would at the best that matmuls reach), and communication that nothing hides."""
    best = BEST_ON_GPU if ranks[0].device == "cuda" else 1.0  # a processor's peak was measured with a matmul
    computing = max(share_of(ranks, "compute") - mfu / best, 0.0)
    waiting = sum(one.waiting for one in ranks) / sum(one.total for one in ranks)
    shares = {
        "memory movement": share_of(ranks, "data") + share_of(ranks, "copies"),
        "unfilled hardware": share_of(ranks, "idle") + computing + waiting,
        "communication": share_of(ranks, "communication") - waiting,
    }
    return {cause: points(share, mfu) for cause, share in shares.items()}


def share_of(ranks: Sequence[Breakdown], cause: str) -> float:
    """Of the time of all ranks."""
    return sum(one.seconds[cause] for one in ranks) / sum(one.total for one in ranks)


def cost_of(ranks: Sequence[Breakdown], cause: str) -> float:
    """What a cause takes of a step. In a collective ranks also wait for the last to come, which is not its
    cost; where exchanges are not known apart, what all ranks spend there is."""
    if cause != "communication":
        return share_of(ranks, cause)
    least = min((one.seconds[cause] - one.waiting) / one.steps for one in ranks)
    return least / max(one.total / one.steps for one in ranks)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise models.ModelError(f"{file}: {error.strerror}") from None
