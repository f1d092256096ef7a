"""`python -m tasks.forecast`: forecasts of a series in a file, their scores, and training.

Invariant: a forecast at an origin is made of the slots before it alone; the origin is the begin of the first
slot that is forecast. A mistake of the caller is one line on the error stream and exit code 2. A row that
is no sample is left out and said.
"""

import argparse
import csv
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import pairwise
from pathlib import Path
from typing import NoReturn
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np

from tasks.experts import MOST_SEASONS
from tasks.forecast import Forecast, at_levels, forecast
from tasks.forecast_scores import pinball, seasonal_difference, seasonal_naive
from tasks.instants import parse
from tasks.local_clock import on_wall_clock
from tasks.quantile_model import WEIGHTS, packed

DAY = timedelta(days=1)
SHORTEST_SLOT = timedelta(minutes=1)
MOST_LOAD = 1e300  # beyond it a number is a mistake
DAY_PARTS = (
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    24,
    48,
    72,
    96,
    144,
    288,
    1440,
)  # slots of a day, where clocks are unsteady
NEAR = 0.1  # as a share of the slot: how far the usual distance may be from it
LATEST_SECONDS = 1e11  # since 1970, the year 5138; more are milliseconds


class CommandError(Exception):
    """What the caller got wrong, in one line."""


@dataclass(frozen=True)
class Recorded:
    """A series by slot, 0 for the first; slots without a sample are absent."""

    first: datetime
    slot: timedelta
    load: dict[int, float]
    stamps: dict[int, str]  # as the file writes them
    left_out: int

    @property
    def season(self) -> int:
        """Slots in a day."""
        return max(1, round(DAY / self.slot))

    def before(self, origin: int) -> list[float | None]:
        """The slots before one, as many as a forecast looks at."""
        begin = max(0, origin - MOST_SEASONS * self.season)
        return [self.load.get(index) for index in range(begin, origin)]


@dataclass(frozen=True)
class Scores:
    """Means over origins, in units of the seasonal difference before each."""

    origins: int
    mase: float
    pinball: float
    coverage: float  # share of the truth between the lowest and the highest quantile
    naive_mase: float
    naive_pinball: float


def main(arguments: Sequence[str]) -> None:
    """Run a command; ends the process with its exit code."""
    try:
        chosen = _parser().parse_args(arguments)
        chosen.run(chosen)
    except CommandError as error:
        sys.exit(_failed(str(error)))
    except OSError as error:
        sys.exit(_failed(f"{error.filename}: {error.strerror}"))


def _failed(line: str) -> int:
    print(line, file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{self.prog}: {message} (--help says more)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m tasks.forecast", description="Forecast a service's load.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for name, run, told in (
        ("predict", _predict, "write the quantiles at the last origins that have true values after them"),
        ("evaluate", _evaluate, "score the same forecasts"),
    ):
        command = commands.add_parser(name, help=told)
        command.add_argument("series", type=Path, metavar="SERIES.csv", help="with columns ts and y")
        command.add_argument("--steps", type=_count, default=24, metavar="N", help="slots ahead (24)")
        command.add_argument(
            "--quantiles", type=_levels, default=(0.1, 0.5, 0.9), metavar="Q,…", help="(0.1,0.5,0.9)"
        )
        command.add_argument("--origins", type=_count, default=100, metavar="N", help="at most (100)")
        command.add_argument(
            "--time-zone", type=_zone, default=UTC, metavar="ZONE", help="of the service's users (UTC)"
        )
        command.add_argument("--json", metavar="FILE", help="where to write; - for the output")
        command.set_defaults(run=run)
    train = commands.add_parser("train", help="train the networks on recorded services (needs minutes)")
    train.add_argument("--series", type=Path, metavar="FILE.csv.gz", help="instead of those in the package")
    train.add_argument("--out", type=Path, metavar="FILE.npz", help="instead of the weights in the package")
    train.add_argument("--networks", type=_count, default=3, metavar="N", help="whose mean is used (3)")
    train.add_argument("--seed", type=int, default=0, metavar="N")
    train.add_argument("--steps", type=_count, metavar="N", help="of the optimizer, for each network")
    train.add_argument(
        "--held-out", action="store_true", help="first score on each source networks trained on the others"
    )
    train.set_defaults(run=_train)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 to 100000")
    return int(text)


def _zone(text: str) -> ZoneInfo:
    try:
        return ZoneInfo(text)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a time zone such as Europe/Berlin") from None


def _levels(text: str) -> tuple[float, ...]:
    try:
        levels = tuple(float(part) for part in text.split(","))
    except ValueError:
        levels = ()
    if not levels or not all(0 < level < 1 for level in levels):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers between 0 and 1, such as 0.1,0.5,0.9")
    return levels


def read_series(file: Path) -> Recorded:
    """The series in a CSV file with columns `ts` and `y`, in any order of rows.

    Of two samples for one instant the later in the file stands; several instants in one slot are averaged.
    The slot is the distance that most instants have, see `_slot`. Raises CommandError.
    """
    samples: dict[datetime, tuple[str, float]] = {}
    left_out = 0
    text = file.read_bytes().decode("utf-8-sig", errors="replace").replace("\0", "")
    # Line by line: an odd quote spoils its own line only.
    lines = [line for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n") if line.strip()]
    first_line = lines[0] if lines else ""
    separator = next((mark for mark in ",;\t" if mark in first_line), ",")
    header = [column.strip().lower() for column in _fields(first_line, separator)]
    if not {"ts", "y"} <= set(header):
        raise CommandError(f"{file}: the first line has {', '.join(header)[:80] or 'nothing'}; expected ts,y")
    ts, y = header.index("ts"), header.index("y")
    for line in lines[1:]:
        try:
            row = _fields(line, separator)
            stamp, value = row[ts].strip(), float(row[y])
            if not 0 <= value <= MOST_LOAD:
                raise ValueError
            samples[_instant(stamp)] = (stamp, value)
        except (ValueError, IndexError, OverflowError):
            left_out += 1
    if not samples:
        raise CommandError(f"{file}: no row has a ts such as 2026-12-01T06:00Z and a y from 0 up")
    instants = sorted(samples)
    slot, unsteady = _slot(instants)
    first = instants[0]
    found: dict[int, list[float]] = {}
    stamps: dict[int, str] = {}
    for instant in instants:
        index = (instant - first + unsteady) // slot
        stamps.setdefault(index, samples[instant][0])
        found.setdefault(index, []).append(samples[instant][1])
    load = {index: sum(values) / len(values) for index, values in found.items()}
    return Recorded(first, slot, load, stamps, left_out)


def _fields(line: str, separator: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=separator), [])
    except csv.Error:
        return []


def _slot(instants: list[datetime]) -> tuple[timedelta, timedelta]:
    """The slot, and by how much an instant may come before its slot.

    The commonest distance between instants, if half of them have it; else, where clocks are unsteady, the
    part of a day that they are about apart.
    """
    apart = sorted(right - left for left, right in pairwise(instants))
    if not apart:
        return timedelta(hours=1), timedelta(0)
    common, count = Counter(apart).most_common(1)[0]
    middle = apart[len(apart) // 2]
    near = min((DAY / parts for parts in DAY_PARTS), key=lambda slot: abs(slot - middle))
    if 2 * count < len(apart) and abs(near - middle) < NEAR * near:
        return near, near / 2
    return max(common, SHORTEST_SLOT), timedelta(0)


def _instant(stamp: str) -> datetime:
    """An ISO instant, also with UTC written out or slashes, or (milli)seconds since 1970."""
    try:
        since = float(stamp)
    except ValueError:
        return parse(re.sub(r"\s*(UTC|GMT)$", "Z", stamp.replace("/", "-")))
    try:
        return datetime.fromtimestamp(since / 1000 if since > LATEST_SECONDS else since, UTC)
    except OSError as error:
        raise ValueError(str(error)) from None


def forecasts(series: Recorded, steps: int, most: int, zone: tzinfo = UTC) -> list[tuple[int, Forecast]]:
    """Forecasts at the last origins that have something before them and `steps` true values after them; the
    season goes by the clocks of the zone."""
    origins: list[int] = []
    run, after = 0, None
    for index in sorted(series.load, reverse=True):
        run = run + 1 if after == index + 1 else 1
        after = index
        if run >= steps and index > 0 and len(origins) < most:
            origins.append(index)
    return [(origin, _at(series, origin, steps, zone)) for origin in reversed(origins)]


def _at(series: Recorded, origin: int, steps: int, zone: tzinfo) -> Forecast:
    begin = series.first + origin * series.slot
    local = on_wall_clock(series.before(origin), steps, begin, series.slot, zone)
    return local.put_back(forecast(local.history, local.steps, series.season, 0.0, local.calendar))


def _predict(chosen: argparse.Namespace) -> None:
    series = read_series(chosen.series)
    made = forecasts(series, chosen.steps, chosen.origins, chosen.time_zone)
    if not made:
        raise CommandError(f"{chosen.series}: no origin has {chosen.steps} true values after it")
    found = [
        {"origin": series.stamps[origin], "quantiles": at_levels(one, chosen.quantiles).tolist()}
        for origin, one in made
    ]
    text = json.dumps(found)
    if chosen.json in (None, "-"):
        print(text)
    else:
        Path(chosen.json).write_text(text, encoding="utf-8")
        print(f"{chosen.json}: forecasts at {len(found)} origins{_said(series)}")


def _evaluate(chosen: argparse.Namespace) -> None:
    series = read_series(chosen.series)
    scores = evaluate(series, chosen.steps, chosen.quantiles, chosen.origins, chosen.time_zone)
    if scores is None:
        raise CommandError(
            f"{chosen.series}: no origin can be scored; expected over a day of load before one, which "
            f"differs from the day before, and {chosen.steps} true values after it"
        )
    low, high = min(chosen.quantiles), max(chosen.quantiles)
    print(f"{scores.origins} origins, {chosen.steps} slots of {series.slot}{_said(series)}")
    print(f"MASE      {scores.mase:.3f}   seasonal naive {scores.naive_mase:.3f}")
    print(f"sPL       {scores.pinball:.3f}   seasonal naive {scores.naive_pinball:.3f}")
    print(f"coverage  {scores.coverage:.3f}   between the quantiles {low:g} and {high:g}")
    if chosen.json:
        text = json.dumps(vars(scores))
        print(text) if chosen.json == "-" else Path(chosen.json).write_text(text, encoding="utf-8")


def _said(series: Recorded) -> str:
    return f"; {series.left_out} rows left out" if series.left_out else ""


def evaluate(
    series: Recorded, steps: int, levels: Sequence[float], most: int, zone: tzinfo = UTC
) -> Scores | None:
    """Scores of the forecasts, and of the seasonal naive one: the value a season before, with the last
    week's seasonal differences around it. None when no origin has a season and a slot before it.
    """
    rows = []
    for origin, found in forecasts(series, steps, most, zone):
        past = np.array([math.nan if value is None else value for value in series.before(origin)])
        unit = seasonal_difference(past, series.season)
        if not unit > 0:
            continue
        truth = np.array([series.load[origin + step] for step in range(steps)])
        naive = seasonal_naive(past, steps, series.season, levels)
        ours = at_levels(found, levels)
        middle = at_levels(found, (0.5,))[:, 0]
        inside = (truth >= ours.min(axis=1)) & (truth <= ours.max(axis=1))
        rows.append(
            (
                np.mean(np.abs(truth - middle)) / unit,
                pinball(truth, ours, levels) / unit,
                np.mean(inside),
                np.mean(np.abs(truth - seasonal_naive(past, steps, series.season, (0.5,))[:, 0])) / unit,
                pinball(truth, naive, levels) / unit,
            )
        )
    if not rows:
        return None
    return Scores(len(rows), *(float(mean) for mean in np.mean(np.array(rows), axis=0)))


def _train(chosen: argparse.Namespace) -> None:
    from tasks import forecast_training as training

    series = training.read_series(chosen.series or training.SERIES)
    made = {one.name: training.examples(one, chosen.seed) for one in series}
    seeds = range(chosen.seed, chosen.seed + chosen.networks)
    steps = chosen.steps or training.STEPS
    print(
        f"{len(series)} series, {sum(len(part.truth) for part in made.values())} forecast steps", flush=True
    )
    if chosen.held_out:
        networks = training.held_out(series, made, seeds, steps)
        for line in training.compared(series, networks):
            print(line, flush=True)
    trained = training.Examples.joined(list(made.values()))
    file = chosen.out or WEIGHTS
    arrays = packed(tuple(training.train(trained, seed, steps) for seed in seeds))
    np.savez_compressed(file, allow_pickle=False, **arrays)
    print(f"{file}: {chosen.networks} networks")
