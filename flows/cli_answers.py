"""What the command line prints: rows as a table for people, or as JSON for programs.

Instants are UTC in JSON and in the cluster's own time zone in tables, where figures keep four digits.
"""

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from tasks.cluster import Site
from tasks.instants import text

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection
    from rich.console import Console

MOST_ROWS = 1000  # of a table; --json has them all
WIDE = 240  # columns, where no terminal says how wide it is


class MistakeError(Exception):
    """What a person asked for cannot be done; the message is the line that says why."""


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    json.dump(_plain(value), sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def print_table(site: Site, names: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "") -> None:
    """Rows under their names. No rows are said in words."""
    from rich.table import Table
    from rich.text import Text

    console = terminal()
    if title:
        console.print(Text(title, style="bold"))
    if not rows:
        console.print("(none)")
        return
    table = Table()
    zone = ZoneInfo(site.cluster.time_zone)
    for index, name in enumerate(names):
        numbers = all(isinstance(row[index], int | float | None) for row in rows)
        table.add_column(Text(name), justify="right" if numbers else "left", overflow="fold")
    for row in rows[:MOST_ROWS]:
        table.add_row(*(Text(cell(value, zone)) for value in row))
    console.print(table)
    if len(rows) > MOST_ROWS:
        console.print(f"and {len(rows) - MOST_ROWS} rows more; --json has them all")


def cell(value: Any, zone: ZoneInfo) -> str:
    """A value as a person reads it."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
        case datetime():
            return at(value, zone)
        case list() | tuple():
            return ", ".join(cell(each, zone) for each in value)
    return str(value)


def at(instant: datetime, zone: ZoneInfo) -> str:
    """An instant in the cluster's zone, to the second where it has seconds."""
    here = instant.astimezone(zone) if instant.tzinfo else instant
    return f"{here:%Y-%m-%d %H:%M:%S}" if here.second else f"{here:%Y-%m-%d %H:%M}"


def terminal(markup: bool = False) -> "Console":
    """Standard output as rich sees it; a pipe or a file gets whole lines."""
    from rich.console import Console

    console = Console(highlight=False, markup=markup)
    return console if console.is_terminal else Console(highlight=False, markup=markup, width=WIDE)


@contextlib.contextmanager
def published(site: Site) -> Iterator["DuckDBPyConnection"]:
    """The published copy of the ledger, read-only. Raises MistakeError when there is none yet."""
    import duckdb

    from tasks.collect import ledger_directory
    from tasks.ledger import published_file

    file = published_file(ledger_directory(site))
    if not file.exists():
        raise MistakeError(
            f"{file}: not there yet; it comes with the first plan: `slotwise up` plans every "
            f"{site.cluster.plan_every_minutes} minutes, `slotwise hour` plans now"
        )
    try:
        connection = duckdb.connect(str(file), read_only=True, config={"threads": 2})
    except duckdb.Error as error:
        said = str(error).partition("\n")[0]
        raise MistakeError(
            f"{file}: cannot be opened: {said}; open it with -readonly elsewhere, "
            "or if it is damaged, `slotwise ledger rebuild` makes it anew"
        ) from None
    with connection:
        connection.execute("SET TimeZone = 'UTC'")
        yield connection


def _plain(value: Any) -> Any:
    """The value in what JSON has; a figure that is none becomes null."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Decimal():
            return float(value)
        case datetime():
            return text(value) if value.tzinfo else value.isoformat()
        case date():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case dict():
            return {str(name): _plain(each) for name, each in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(each) for each in value]
    return str(value)
