"""Upkeep, once a day: pack the facts of days that are over, forget what only grows, remove what the dead
left.

Invariant: nothing that anybody may still ask for by its key goes: facts of jobs that are not over, of
attempts that run, of the last `pack_after_days`. All facts are kept, for ever; what is forgotten after
`keep_details_days` can be made again from them (rows of forecasts and planned jobs) or is advice that has
passed (the solved problems under plans/). One call works on a bounded number of days; the rest is for the
next.
"""

import contextlib
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path

from tasks import ledger
from tasks.cluster import Site
from tasks.collect import ledger_directory
from tasks.facts import FactError, fact_keys, parse_key
from tasks.inbox import FINAL_STATES
from tasks.notes import read_note, write_note
from tasks.packs import pack
from tasks.storage import TEMPORARY, DirectoryStorage

DAYS_AT_ONCE = 10
WORTH_PACKING = 50  # loose facts of a day
ABANDONED = timedelta(days=2)  # age of a half-written file that nobody will finish


@dataclass(frozen=True)
class Kept:
    """Facts that were packed, solved plans and half-written files that were removed; whether all is done."""

    packed: int
    plans: int
    abandoned: int
    done: bool


def upkeep(site: Site, now: datetime) -> Kept | None:
    """Do what there is to do today; None when it was done already. Raises StorageError and LedgerError."""
    directory = ledger_directory(site)
    noted = directory / "upkept"
    today = now.date().isoformat().encode()
    if read_note(noted) == today:
        return None
    details_from = now - timedelta(days=site.cluster.keep_details_days)
    with ledger.open_ledger(directory) as connection:
        ledger.forget_details(connection, details_from.replace(hour=0, minute=0, second=0, microsecond=0))
    packed, done = _pack(site, directory, now.date() - timedelta(days=site.cluster.pack_after_days), now)
    plans = _remove_plans(site, details_from.date())
    abandoned = _remove_abandoned(site)
    if done:
        write_note(noted, today)
    return Kept(packed, plans, abandoned, done)


def _pack(site: Site, directory: Path, before: date, now: datetime) -> tuple[int, bool]:
    days: dict[date, list[str]] = defaultdict(list)
    for key in fact_keys(site.storage):
        try:
            day = parse_key(key).day
        except FactError:
            continue
        if day < before:
            days[day].append(key)
    total, worked = 0, 0
    for day in sorted(days):
        if worked == DAYS_AT_ONCE:
            return total, False
        keys = _packable(directory, days[day], now)
        if len(keys) >= WORTH_PACKING:
            key, count = pack(site.storage, day, keys)
            with ledger.open_ledger(directory) as connection:
                connection.execute("INSERT OR IGNORE INTO packs VALUES (?, ?)", [key, count])
            total, worked = total + count, worked + 1
    return total, True


def _packable(directory: Path, keys: list[str], now: datetime) -> list[str]:
    """Those that the ledger has and nobody asks for by their key any more.

    A view tells people of a deadline by the database's clock; a job is over when it has passed by ours too.
    """
    with ledger.open_ledger(directory) as connection:
        bad = {row["key"] for row in ledger.rows(connection, "SELECT key FROM bad_facts")}
        open_commits = {
            row["key"]
            for row in ledger.rows(connection, "SELECT DISTINCT key FROM ranks WHERE outcome IS NULL")
        }
        live = {
            row["job"]
            for row in ledger.rows(
                connection,
                "SELECT job FROM jobs WHERE state NOT IN (SELECT unnest(?)) "
                "OR state = 'expired' AND deadline_at > ?",
                [list(FINAL_STATES), now],
            )
        } | {row["job"] for row in ledger.rows(connection, "SELECT job FROM recurring")}
        unknown = set(ledger.unknown(connection, keys))
    return [
        key
        for key in keys
        if key not in bad and key not in open_commits and key not in unknown and not _speaks_of(key, live)
    ]


def _speaks_of(key: str, jobs: set[str]) -> bool:
    """Whether a fact of a job or of its ranks is one of these jobs'."""
    parts = parse_key(key)
    return parts.kind in ("spec", "started", "outcome", "dispatch") and parts.name.split("/")[0] in jobs


def _remove_plans(site: Site, before: date) -> int:
    keys = [key for key in site.storage.keys("plans/") if key.split("/")[1] < before.isoformat()]
    return _remove(site, keys)


def _remove(site: Site, keys: Iterable[str]) -> int:
    count = 0
    for key in keys:
        site.storage.delete(key)
        count += 1
    return count


def _remove_abandoned(site: Site) -> int:
    """What has a temporary name and whose writer died. Buckets have a rule for such: unfinished uploads."""
    if not isinstance(site.storage, DirectoryStorage):
        return 0
    count, oldest = 0, time.time() - ABANDONED.total_seconds()
    for path in list(site.storage.directory.rglob(f"{TEMPORARY}*")):
        with contextlib.suppress(FileNotFoundError):  # its writer was alive, or it lay in one that is gone
            if path.is_symlink() or path.stat().st_mtime >= oldest:
                continue
            if path.is_dir():  # a model that was being published
                shutil.rmtree(path)
            else:
                path.unlink()
            count += 1
    return count
