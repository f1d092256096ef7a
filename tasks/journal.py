"""The ledger of a replay: what each policy did, as the live loop records it, in one DuckDB file.

Each policy has a schema of its own with the live ledger's tables and views (`FROM slotwise.jobs`,
`FROM fifo.plans`); what compares them lies in `main`. Rows are written by way of Parquet files while a policy
runs, a bounded number at a time, so that policies run side by side and memory does not grow with the trace.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.facts import FactKind, fact_key
from tasks.instants import text
from tasks.ledger import MIGRATIONS, rows
from tasks.projections import Rows, project
from tasks.trace import quoted

FLUSHED = 20_000  # rows of a table held at once
SUMMARY = Path(__file__).parent / "replay.sql"


class Journal:
    """Writes facts as rows of the ledger's tables, into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pending: Rows = {}
        self.parts = 0
        folder.mkdir(parents=True, exist_ok=True)

    def fact(self, kind: FactKind, at: datetime, body: dict[str, Any], *name: str | int) -> None:
        """What the live loop would leave in storage at this instant."""
        key = fact_key(kind, at, *name)
        projected = project(kind, key, {"at": text(at), **body})
        self.add(
            {"facts": [{"key": key, "day": at.date(), "kind": kind, "recorded_at": at}], **projected.tables}
        )

    def add(self, tables: Mapping[str, Iterable[dict[str, Any]]]) -> None:
        """Rows by table."""
        for table, lines in tables.items():
            held = self.pending.setdefault(table, [])
            held.extend(lines)
            if len(held) >= FLUSHED:
                self._flush(table)

    def close(self) -> None:
        """Write what is left."""
        for table in list(self.pending):
            self._flush(table)

    def _flush(self, table: str) -> None:
        lines = self.pending.pop(table)
        if lines:
            names = dict.fromkeys(name for line in lines for name in line)
            columns = {name: [line.get(name) for line in lines] for name in names}
            self.parts += 1
            pq.write_table(pa.table(columns), self.folder / f"{table}.{self.parts}.parquet")


def assemble(
    file: Path, folders: Mapping[str, Path], shared: Path, jobs: Path, about: Mapping[str, Any]
) -> None:
    """Make the ledger of a set of replays.

    Args:
        folders: the journal of each policy.
        shared: the journal of what all share: demand and forecasts.
        jobs: the trace (Parquet).
        about: what was replayed and how, kept in `main.replay`.
    """
    temporary = file.with_name(f".{file.name}.new")
    temporary.unlink(missing_ok=True)
    with duckdb.connect(str(temporary), config={"threads": "2", "memory_limit": "512MB"}) as sql:
        sql.execute("SET TimeZone = 'UTC'")
        sql.execute("CREATE TABLE replay (about JSON)")
        sql.execute("INSERT INTO replay VALUES (?)", [json.dumps(about)])
        sql.execute(f"CREATE TABLE trace AS FROM read_parquet({quoted(jobs)})")
        for policy, folder in folders.items():
            sql.execute("BEGIN")  # else every comment is a transaction
            sql.execute(f'CREATE SCHEMA "{policy}"')
            sql.execute(f'SET schema = "{policy}"')
            sql.execute("CREATE TABLE schema_versions (version INTEGER PRIMARY KEY)")
            for migration in sorted(MIGRATIONS.glob("[0-9]*.sql")):
                sql.execute(migration.read_text())
                sql.execute("INSERT INTO schema_versions VALUES (?)", [int(migration.name.split("_")[0])])
            sql.execute("COMMIT")
            for source in (shared, folder):
                _load(sql, source, f'"{policy}".', skip="replayed_")
            sql.execute("SET schema = 'main'")
        first = next(iter(folders))
        sql.execute(f'CREATE VIEW forecast_errors AS FROM "{first}".forecast_errors')
        sql.execute(SUMMARY.read_text())
        for folder in folders.values():
            _load(sql, folder, "main.", only="replayed_")
    temporary.replace(file)


def _load(
    sql: duckdb.DuckDBPyConnection, folder: Path, schema: str, skip: str = "\0", only: str = ""
) -> None:
    for table in sorted({part.name.split(".")[0] for part in folder.glob("*.parquet")}):
        if table.startswith(only) and not table.startswith(skip):
            parts = quoted(folder / f"{table}.*.parquet")
            sql.execute(
                f"INSERT INTO {schema}{table} BY NAME FROM read_parquet({parts}, union_by_name = true)"
            )


def ask(file: Path, query: str, parameters: Iterable[Any] = ()) -> list[dict[str, Any]]:
    """Rows of a replay's ledger."""
    with duckdb.connect(str(file), read_only=True, config={"threads": "2"}) as sql:
        sql.execute("SET TimeZone = 'UTC'")
        return rows(sql, query, parameters)
