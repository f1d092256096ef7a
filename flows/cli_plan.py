"""Commands about plans and the ledger: plan, sql, ledger."""

import sys
from dataclasses import replace
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from flows.cli_answers import MistakeError, at, print_json, print_table, published, terminal
from tasks import instants
from tasks.cluster import Site
from tasks.collect import ledger_directory
from tasks.storage import NotFoundError


def plan(site: Site, when: str | None, as_json: bool) -> None:
    """The latest plan, or the one in force at an instant: its grid, what it leaves out and why."""
    from allocator.picture import show
    from tasks.commit import read_plan
    from tasks.ledger import rows

    zone = ZoneInfo(site.cluster.time_zone)
    until = instants.now() if when is None else _instant(when)
    with published(site) as connection:
        found = rows(connection, "FROM plans WHERE instant <= ? ORDER BY instant DESC LIMIT 1", [until])
        if not found:
            raise MistakeError(f"there is no plan from {instants.text(until)} or before")
        places = rows(connection, "FROM planned_jobs WHERE instant = ?", [found[0]["instant"]])
    row = found[0]
    try:
        problem, solved = read_plan(site.storage, row["instant"])
    except NotFoundError as error:
        raise MistakeError(f"the plan of {instants.text(row['instant'])} was recorded, but {error}") from None
    if as_json:
        jobs = [{name: each[name] for name in each if name != "instant"} for each in places]
        print_json({**row, "jobs": jobs, "plan": solved.to_dict()})
        return
    begin = instants.parse(problem.name)
    end = instants.floor(row["instant"], site.cluster.plan_every_minutes) + site.plan_every
    named = replace(problem, name=f"{site.cluster.name}, {row['trigger']} plan of {at(begin, zone)}")
    show(terminal(markup=True), named, solved, committed=max(-((begin - end) // site.slot), 1))
    starts = sorted((each for each in places if each["start_at"]), key=lambda each: each["start_at"])
    if starts:
        columns = {"job": "job", "start_at": "start", "end_at": "end", "gpus": "GPUs of the grid"}
        print_table(site, list(columns.values()), [[each[name] for name in columns] for each in starts])


def sql(site: Site, query: str, as_json: bool) -> None:
    """Any query of the published copy; `-` reads it from standard input."""
    import duckdb

    query = sys.stdin.read() if query == "-" else query
    with published(site) as connection:
        try:
            result = connection.execute(query)
            names = _distinct([column[0] for column in result.description or ()])
            rows = result.fetchall()
        except duckdb.Error as error:
            raise MistakeError(" ".join(str(error).split())) from None
    if as_json:
        print_json([dict(zip(names, row, strict=True)) for row in rows])
    else:
        print_table(site, names, rows)


def rebuild_ledger(site: Site, as_json: bool) -> None:
    """Make the ledger again from the facts alone."""
    from tasks import ledger

    taken = ledger.rebuild(ledger_directory(site), site.storage)
    if as_json:
        print_json({"facts": taken.new, "set_aside": taken.bad})
        return
    print(f"the ledger was made again from {taken.new} facts")
    for bad in taken.bad:
        print(f"set aside: {bad}")


def verify_ledger(site: Site, as_json: bool) -> bool:
    """Compare the ledger with the facts; whether they agree."""
    from tasks import ledger

    differences = ledger.verify(ledger_directory(site), site.storage)
    if as_json:
        print_json({"agrees": not differences, "differences": differences})
    else:
        print("\n".join(differences) or "the ledger is what the facts say")
    return not differences


def _instant(value: str) -> datetime:
    try:
        return instants.parse(value)
    except ValueError:
        raise MistakeError(f"--at: {value!r}: expected an instant such as 2026-12-01T06:00Z") from None


def _distinct(names: list[str]) -> list[str]:
    """Column names, each once: JSON objects cannot hold two alike."""
    seen: dict[str, int] = {}
    distinct: list[Any] = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        distinct.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return distinct
