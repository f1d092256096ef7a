"""The command `replay`: policies side by side on recorded load."""

import json
import math
from pathlib import Path

from flows.cli_answers import MistakeError, print_table
from flows.replay import Order, run_replays, title
from flows.replay_picture import picture
from flows.replay_report import read_report
from tasks.cluster import Site
from tasks.instants import parse_duration
from tasks.trace import TraceError


def replay(
    site: Site,
    files: tuple[Path, Path | None],
    window: tuple[str | None, float | None],
    policies: str,
    chance: tuple[int, str | None],
    outputs: tuple[Path, Path | None],
) -> None:
    """Replay, print the tables, and write the figures (JSON), the ledger and the picture.

    `files` are jobs and demand, `window` start and days, `chance` the seed and node failures, `outputs` the
    JSON file and the ledger, which lies beside it by default, as the picture does.
    """
    figures, ledger = outputs
    ledger = ledger or figures.with_name(f"{figures.stem}.duckdb")
    drawing = figures.with_name(f"{figures.stem}.svg")
    _check_outputs(figures, drawing, ledger, [file for file in (site.file, *files) if file is not None])
    named = tuple(name.strip() for name in policies.split(",") if name.strip())
    order = Order(site, *files, named, _start(window[0]), window[1], *chance)
    try:
        done = run_replays(order, ledger)
        report = read_report(ledger)
        figures.write_text(json.dumps(done.figures(), indent=2, allow_nan=False) + "\n")
        drawing.write_text(picture(report, title(done)))
    except TraceError as error:
        raise MistakeError(str(error)) from None
    except OSError as error:
        raise MistakeError(f"{error.filename}: {error.strerror}") from None
    print(title(done))
    for table in report.tables():
        print_table(site, table.names, table.rows, table.title)
    about = done.about
    if about["jobs_outside_window"]:
        print(f"{about['jobs_outside_window']} jobs were submitted before or after these days and left out")
    rejected = next(iter(done.accounts.values()))["rejected"]
    if rejected:
        print(f"{rejected} jobs fit no node and no gang of whole nodes; they were rejected")
    print(f"figures: {figures}; picture: {drawing}")
    print(f"ledger: {ledger}, with a schema for each policy (FROM {named[0]}.jobs) and FROM waiting for all")


def _check_outputs(figures: Path, drawing: Path, ledger: Path, inputs: list[Path]) -> None:
    """Say before the work what could not be written after it."""
    for file in (figures, drawing, ledger):
        if file.is_dir() or not file.name:
            raise MistakeError(f"{file}: a directory; expected the name of a file to write")
        if not file.parent.is_dir():
            raise MistakeError(f"{file}: there is no directory {file.parent}; make it first")
        if any(file.absolute() == each.absolute() for each in inputs):
            raise MistakeError(f"{file}: is an input too; expected another name for what is written")
    if len({figures.absolute(), drawing.absolute(), ledger.absolute()}) < 3:
        raise MistakeError(f"{figures}: expected different names for --json, its picture (.svg) and --ledger")


def _start(value: str | None) -> float | None:
    """Seconds on the clock of `submit_s`, from seconds or a duration such as 60d."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parse_duration(value).total_seconds()
        except ValueError:
            seconds = math.nan
    if not abs(seconds) < 1e10:
        raise MistakeError(f"--start: {value!r}; expected seconds of submit_s, or a duration such as 60d")
    return seconds
