"""The ledger: a DuckDB database made from the facts, which people query through a published copy.

Invariant: the file is written by one process at a time, under a file lock held from connect to close
(DuckDB's own lock comes too late in some versions), and every row comes from a fact; a fact that cannot be
read, or that its tables refuse, is set aside and stops no other. Tables only grow, so
taking facts in is a set difference, in any order, as often as one likes; `rebuild` from the facts gives the
same rows. Views judge a deadline by the clock of the machine that asks (`now()`), on the control machine the
loop's own: what waits or has expired is right for whoever looks, whenever the copy was made, and as nothing
judged so is stored, a clock that is set right brings a job back. The cost is one more copy of the file at the
end of each flow run.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from tasks import faults
from tasks.facts import FactError, fact_keys, parse_key, read_json
from tasks.notes import read_note, write_note
from tasks.packs import pack_keys, read_pack
from tasks.projections import Rows, project
from tasks.storage import NotFoundError, RefusedKeyError, Storage

# What a fact's values can be to blame for, unlike a full disk or a missing column.
MISFIT = (duckdb.DataError, duckdb.IntegrityError, pa.ArrowException, UnicodeError, OverflowError)
MIGRATIONS = Path(__file__).parent / "migrations"
PUBLISHED = "outcomes.duckdb"
# What keeps a sound file from being opened.
NOT_DAMAGE = (
    "No space left",
    "Permission denied",
    "Too many open files",
    "File too large",
    "Input/output error",
)
DETAILS = ("forecasts", "planned_jobs")  # a row for every slot and every job of every plan
AT_ONCE = 20_000  # facts whose rows are in memory together
READERS = 8  # objects read at once; a directory gains little, S3 much


class LedgerError(Exception):
    """The database cannot be used; the message says what to do."""


class DamagedLedgerError(LedgerError):
    """The file is no database, or not a whole one."""


@dataclass(frozen=True)
class TakenIn:
    """How many facts were new, and which of them could not be read."""

    new: int
    bad: tuple[str, ...]


def ledger_file(directory: Path) -> Path:
    """The database that the control machine writes."""
    return directory / "ledger.duckdb"


def published_file(directory: Path) -> Path:
    """The copy that people open."""
    return directory / PUBLISHED


@contextlib.contextmanager
def open_ledger(directory: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """The database, ours alone until the block ends; created or migrated as needed.

    Raises LedgerError when the file is of a later version or damaged.
    """
    with _lock(directory), _connect(ledger_file(directory)) as connection:
        migrate(connection)
        yield connection


def take_in(
    directory: Path, storage: Storage, today: date | None = None, also: Iterable[date] = ()
) -> TakenIn:
    """Take new facts of the open days into the ledger, in one transaction.

    Open are the days from one before the last three with facts (an outage may lie between them, after which
    its missed slots and recurring jobs are caught up with) to the day after `today`, those of attempts that
    have not ended, and `also`; without `today`, and once on each day, all: what came too late for its day.
    """
    swept = directory / "swept"
    with open_ledger(directory) as connection:
        whole = today is None or read_note(swept) != today.isoformat().encode()
        packed = _take_in_packs(connection, storage) if whole else TakenIn(0, ())
        keys = fact_keys(storage) if whole or not today else _open_keys(connection, storage, today, also)
        taken = _insert_new(connection, storage, keys)
        if whole and today is not None:
            write_note(swept, today.isoformat().encode())
        return TakenIn(packed.new + taken.new, packed.bad + taken.bad)


def publish(directory: Path) -> Path:
    """Replace the published copy in one step; readers keep what they have open. Returns its path."""
    target = published_file(directory)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    with _lock(directory):
        _clear_leftovers(directory)
        with _connect(ledger_file(directory)) as connection:
            migrate(connection)
            connection.execute("CHECKPOINT")
        faults.point("ledger.checkpointed")
        try:
            shutil.copyfile(ledger_file(directory), temporary)
            faults.point("ledger.copied")
            # Someone who wrote into the copy and died left a log, which does not belong to the new one.
            target.with_name(f"{target.name}.wal").unlink(missing_ok=True)
            temporary.replace(target)
            faults.point("ledger.published")
        finally:
            temporary.unlink(missing_ok=True)
    return target


def snapshot(directory: Path, storage: Storage) -> list[str]:
    """Put the ledger's tables into storage as Parquet files, for readers elsewhere; their keys.

    Not from the published copy: a person may have that one open as they like.
    """
    with contextlib.ExitStack() as cleanup:
        folder = directory / f".snapshot.{os.getpid()}"
        folder.mkdir(parents=True, exist_ok=True)
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        with open_ledger(directory) as connection:
            found = connection.execute("SELECT table_name FROM duckdb_tables() ORDER BY ALL").fetchall()
            tables = [str(table) for (table,) in found]
            for table in tables:
                file = folder / f"{table}.parquet"
                connection.execute(f"COPY {table} TO '{_quoted(file)}' (FORMAT parquet)")
        faults.point("ledger.exported")
        keys = {table: f"snapshots/{table}.parquet" for table in tables}
        for table, key in keys.items():
            storage.upload(key, folder / f"{table}.parquet")
        return list(keys.values())


def mend(directory: Path, storage: Storage) -> str | None:
    """Make the database again from the facts if it is damaged, and keep the damaged file; what was wrong.

    Raises LedgerError when it cannot be used for another reason.
    """
    try:
        with open_ledger(directory):
            return None
    except DamagedLedgerError as error:
        kept = ledger_file(directory).with_name("ledger.damaged")
        kept.unlink(missing_ok=True)
        os.link(ledger_file(directory), kept)
        rebuild(directory, storage)
        return f"{str(error).partition(';')[0]}; it was made anew from the facts, the old file is {kept}"


def rebuild(directory: Path, storage: Storage) -> TakenIn:
    """Make the database again from the facts alone, and publish it.

    The old one stands until the new one is whole.
    """
    with contextlib.ExitStack() as cleanup:
        fresh = directory / f".rebuild.{os.getpid()}"
        cleanup.callback(shutil.rmtree, fresh, ignore_errors=True)
        taken = take_in(fresh, storage)
        with contextlib.suppress(LedgerError), open_ledger(directory) as connection:
            kept_from = details_kept_from(connection)
            with open_ledger(fresh) as other:
                forget_details(other, kept_from)
        with _lock(directory):
            ledger_file(directory).with_name("ledger.duckdb.wal").unlink(missing_ok=True)
            ledger_file(fresh).replace(ledger_file(directory))
    publish(directory)
    return taken


def verify(directory: Path, storage: Storage) -> list[str]:
    """What differs between the ledger and one made from the facts alone; nothing when all is well."""
    with contextlib.ExitStack() as cleanup:
        fresh = directory / f".verify.{os.getpid()}"
        cleanup.callback(shutil.rmtree, fresh, ignore_errors=True)
        take_in(fresh, storage)
        with open_ledger(directory) as connection:
            _take_in_packs(connection, storage)
            keys = fact_keys(storage)  # of this moment, for both: nodes go on writing facts
            _insert_new(connection, storage, keys)
            with open_ledger(fresh) as other:
                _insert_new(other, storage, keys)
                forget_details(other, details_kept_from(connection))
            connection.execute(f"ATTACH '{_quoted(ledger_file(fresh))}' AS facts_alone (READ_ONLY)")
            found = []
            for (table,) in connection.execute(
                "SELECT table_name FROM duckdb_tables() WHERE database_name = current_database() ORDER BY ALL"
            ).fetchall():
                for here, there, what in (
                    (table, f"facts_alone.{table}", "only in the ledger"),
                    (f"facts_alone.{table}", table, "only in the facts"),
                ):
                    query = f"SELECT count(*) FROM (FROM {here} EXCEPT ALL FROM {there})"
                    count = connection.execute(query).fetchall()[0][0]
                    if count:
                        found.append(f"{table}: {count} rows are {what}")
            return found


def details_kept_from(connection: duckdb.DuckDBPyConnection) -> datetime | None:
    """From when on the rows of DETAILS are kept; None while all are."""
    found = connection.execute("SELECT max(kept_from) FROM details").fetchall()[0][0]
    return None if found is None else found.astimezone(UTC)


def forget_details(connection: duckdb.DuckDBPyConnection, kept_from: datetime | None) -> None:
    """Remove rows of plans from before that instant from the tables that would grow without end."""
    if kept_from is None:
        return
    connection.execute("BEGIN")
    for table in DETAILS:
        connection.execute(f"DELETE FROM {table} WHERE instant < ?", [kept_from])
    connection.execute("DELETE FROM details")
    connection.execute("INSERT INTO details VALUES (?)", [kept_from])
    connection.execute("COMMIT")


def migrate(connection: duckdb.DuckDBPyConnection) -> None:
    """Apply the numbered migrations that the database lacks. Raises LedgerError when it is ahead of them."""
    connection.execute("CREATE TABLE IF NOT EXISTS schema_versions (version INTEGER PRIMARY KEY)")
    known = {row[0] for row in connection.execute("SELECT version FROM schema_versions").fetchall()}
    files = {int(path.name.split("_")[0]): path for path in sorted(MIGRATIONS.glob("[0-9]*.sql"))}
    if ahead := known - files.keys():
        raise LedgerError(
            f"the ledger has schema {max(ahead)}, this version knows {max(files)}: upgrade Slotwise"
        )
    for version in sorted(files.keys() - known):
        connection.execute("BEGIN")
        connection.execute(files[version].read_text())
        connection.execute("INSERT INTO schema_versions VALUES (?)", [version])
        connection.execute("COMMIT")


def rows(
    connection: duckdb.DuckDBPyConnection, query: str, parameters: Iterable[Any] = ()
) -> list[dict[str, Any]]:
    """A query's rows as dictionaries; instants come in UTC."""
    result = connection.execute(query, list(parameters))
    names = [column[0] for column in result.description or ()]
    return [
        {n: v.astimezone(UTC) if isinstance(v, datetime) else v for n, v in zip(names, row, strict=True)}
        for row in result.fetchall()
    ]


def _insert_new(connection: duckdb.DuckDBPyConnection, storage: Storage, keys: list[str]) -> TakenIn:
    new, count = unknown(connection, keys), 0
    bad: list[str] = []
    with ThreadPoolExecutor(READERS) as pool:
        for begin in range(0, len(new), AT_ONCE):
            some = new[begin : begin + AT_ONCE]
            read = dict(zip(some, pool.map(lambda key: _project(storage, key), some), strict=True))
            taken = _insert_read(connection, read)
            count, bad = count + taken.new, [*bad, *taken.bad]
    return TakenIn(count, tuple(bad))


def _take_in_packs(connection: duckdb.DuckDBPyConnection, storage: Storage) -> TakenIn:
    """Take in the packs that the ledger does not know: all, when it is made anew."""
    known = {row[0] for row in connection.execute("SELECT key FROM packs").fetchall()}
    new, bad = 0, []
    for pack in pack_keys(storage):
        if pack in known:
            continue
        try:
            facts = dict(read_pack(storage, pack))
        except FactError as error:
            bad.append(str(error))
            continue
        wanted = set(unknown(connection, list(facts)))
        taken = _insert_read(
            connection, {key: _projected(key, fact) for key, fact in facts.items() if key in wanted}
        )
        connection.execute("INSERT INTO packs VALUES (?, ?)", [pack, len(facts)])
        new, bad = new + taken.new, [*bad, *taken.bad]
    return TakenIn(new, tuple(bad))


def unknown(connection: duckdb.DuckDBPyConnection, keys: list[str]) -> list[str]:
    """Those of the keys that the ledger does not have, in their order."""
    if not keys:
        return []
    connection.register("asked", pa.table({"key": pa.array(list(dict.fromkeys(keys)), pa.string())}))
    try:
        found = connection.execute(
            "SELECT key FROM asked ANTI JOIN facts USING (key) ANTI JOIN bad_facts USING (key)"
        ).fetchall()
    finally:
        connection.unregister("asked")
    lacking = {row[0] for row in found}
    return [key for key in dict.fromkeys(keys) if key in lacking]


def _insert_read(connection: duckdb.DuckDBPyConnection, read: dict[str, Rows | str | None]) -> TakenIn:
    good = {key: found for key, found in read.items() if isinstance(found, dict)}
    bad = {key: found for key, found in read.items() if isinstance(found, str)}
    try:
        _insert(connection, good, bad)
    except MISFIT:
        misfits = _misfits(connection, good)
        good = {key: found for key, found in good.items() if key not in misfits}
        bad |= misfits
        _insert(connection, good, bad)
    return TakenIn(len(good), tuple(f"{key}: {error}" for key, error in bad.items()))


def _insert(connection: duckdb.DuckDBPyConnection, good: dict[str, Rows], bad: dict[str, str]) -> None:
    """Insert the rows of facts, and what is wrong with others, in one transaction."""
    connection.execute("BEGIN")
    try:
        _insert_rows(connection, good)
        for key, error in bad.items():
            connection.execute("INSERT INTO bad_facts VALUES (?, ?, ?)", [key, _day(key), error])
        faults.point("ledger.inserted")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    faults.point("ledger.committed")


def _misfits(connection: duckdb.DuckDBPyConnection, facts: dict[str, Rows]) -> dict[str, str]:
    """Facts whose rows their tables refuse, with the reason; found by halves."""
    connection.execute("BEGIN")
    try:
        _insert_rows(connection, facts)
        return {}
    except MISFIT as error:
        if len(facts) == 1:
            reason = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
            return dict.fromkeys(facts, reason.partition("\n")[0])
    finally:
        connection.execute("ROLLBACK")
    keys = list(facts)
    halves = keys[: len(keys) // 2], keys[len(keys) // 2 :]
    found: dict[str, str] = {}
    for half in halves:
        found |= _misfits(connection, {key: facts[key] for key in half})
    return found


def _insert_rows(connection: duckdb.DuckDBPyConnection, facts: dict[str, Rows]) -> None:
    tables: Rows = {}
    for found in facts.values():
        for table, lines in found.items():
            tables.setdefault(table, []).extend(lines)
    for table, lines in tables.items():
        if lines:
            names = dict.fromkeys(name for line in lines for name in line)  # not all rows have all columns
            columns = {name: [line.get(name) for line in lines] for name in names}
            connection.register("new_rows", pa.Table.from_pydict(columns))
            connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM new_rows")
            connection.unregister("new_rows")


def _project(storage: Storage, key: str) -> Rows | str | None:
    """The rows of a fact, or what is wrong with it, or None when it is gone since it was listed.

    A storage that fails is raised: the fact may be good.
    """
    try:
        return _projected(key, read_json(storage, key))
    except NotFoundError:
        return None
    except (FactError, RefusedKeyError) as error:
        return str(error).removeprefix(f"{key}: ")


def _projected(key: str, payload: dict[str, Any]) -> Rows | str:
    try:
        parts = parse_key(key)
        projected = project(parts.kind, key, payload)
        fact = {"key": key, "day": parts.day, "kind": parts.kind, "recorded_at": projected.recorded_at}
        return {"facts": [fact], **projected.tables}
    except FactError as error:
        return str(error).removeprefix(f"{key}: ")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return f"{type(error).__name__}: {error}"


def _open_keys(
    connection: duckdb.DuckDBPyConnection, storage: Storage, today: date, also: Iterable[date]
) -> list[str]:
    last = "SELECT DISTINCT day FROM facts WHERE day <= ? ORDER BY day DESC LIMIT 3"
    known = [row[0] for row in connection.execute(last, [today]).fetchall()]
    if not known:
        return fact_keys(storage)
    first = known[-1] - timedelta(days=1)
    days = {first + timedelta(days=offset) for offset in range((today - first).days + 2)} | {*also}
    days |= {
        row[0]
        for row in connection.execute(
            "SELECT DISTINCT instant::DATE FROM ranks WHERE outcome IS NULL"
        ).fetchall()
    }
    return [key for day in sorted(days) for key in fact_keys(storage, day)]


def _day(key: str) -> date | None:
    try:
        return date.fromisoformat(key.split("/")[1])
    except (IndexError, ValueError):
        return None


def _clear_leftovers(directory: Path) -> None:
    """Remove the copies of processes that died before they could: each is as large as the database."""
    for path in directory.glob(".*.*"):
        owner = path.name.rpartition(".")[2]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LedgerError(f"{directory}: cannot be made: {error.strerror}; see `state:`") from None
    with (directory / "ledger.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _connect(file: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    try:
        connection = duckdb.connect(str(file), config={"threads": "2", "memory_limit": "1GB"})
    except duckdb.Error as error:
        said = " ".join(str(error).split())
        if "Could not set lock" in said:
            raise LedgerError(
                f"{file}: another program has it open; close that, and open {PUBLISHED}"
            ) from None
        if any(trouble in said for trouble in NOT_DAMAGE):
            raise LedgerError(f"{file}: {said}") from None
        raise DamagedLedgerError(
            f"{file}: {said}; `slotwise ledger rebuild` makes it anew from the facts"
        ) from None
    try:
        connection.execute("SET TimeZone = 'UTC'")
        yield connection
    finally:
        connection.close()


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")
