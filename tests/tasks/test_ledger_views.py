"""What the ledger's views say of jobs: each state follows from the facts, and all of it explains itself."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks import ledger
from tasks.instants import text
from tests.tasks.ledgers import directory as directory
from tests.tasks.ledgers import facts as facts
from tests.tasks.ledgers import migrated as migrated
from tests.tasks.ledgers import plain as plain
from tests.tasks.ledgers import query
from tests.tasks.worked_hours import Facts, minutes


def starts(facts: Facts, *ranks: int) -> list[str]:
    return [facts.started(rank=rank) for rank in ranks]


def ends(facts: Facts, *states: str) -> list[str]:
    return [facts.outcome(state, rank=rank) for rank, state in enumerate(states)]


State = tuple[str, int, int, float]  # state, attempts, failures, earned
STATES: dict[str, tuple[Callable[[Facts], object], State]] = {
    "taken in": (lambda f: (), ("queued", 0, 0, 0)),
    "committed": (lambda f: f.commit(), ("committed", 1, 0, 0)),
    "one of two began": (lambda f: (f.commit(nodes=2), starts(f, 1)), ("starting", 1, 0, 0)),
    "both began": (lambda f: (f.commit(nodes=2), starts(f, 0, 1)), ("running", 1, 0, 0)),
    "one of two done": (
        lambda f: (f.commit(nodes=2), starts(f, 0, 1), ends(f, "completed")), ("ending", 1, 0, 0),
    ),
    "both done": (
        lambda f: (f.commit(nodes=2), starts(f, 0, 1), ends(f, "completed", "completed")),
        ("completed", 1, 0, 10),
    ),
    "one done, one stopped": (
        lambda f: (f.commit(nodes=2), starts(f, 0, 1), ends(f, "completed", "stopped")), ("queued", 1, 1, 0),
    ),
    "one failed, one stopped": (
        lambda f: (f.commit(nodes=2), starts(f, 0, 1), ends(f, "stopped", "failed")), ("queued", 1, 1, 0),
    ),
    "failed": (lambda f: f.attempt("failed", exit_code=1), ("queued", 1, 1, 0)),
    "crashed": (lambda f: f.attempt("crashed", exit_code=-9), ("queued", 1, 1, 0)),
    "lost": (lambda f: f.attempt("lost"), ("queued", 1, 1, 0)),
    "timed out": (lambda f: f.attempt("timed_out"), ("failed", 1, 0, 0)),
    "a wrong spec": (lambda f: f.attempt("failed", exit_code=2), ("failed", 1, 1, 0)),
    "failed as often as it may": (
        lambda f: [f.attempt("failed", attempt=n, exit_code=1) for n in (1, 2, 3)], ("failed", 3, 3, 0),
    ),
    "failed twice, then done": (
        lambda f: (
            f.attempt("failed", exit_code=1),
            f.attempt("crashed", attempt=2),
            f.attempt("completed", attempt=3),
        ),
        ("completed", 3, 2, 10),
    ),
    "failed, then committed": (
        lambda f: (f.attempt("failed", exit_code=1), f.commit(attempt=2, at=40)), ("committed", 2, 1, 0),
    ),
    "never began": (
        lambda f: (f.commit(), f.started(void=True), f.outcome("not_started")), ("queued", 1, 0, 0),
    ),
    "voided, outcome to come": (lambda f: (f.commit(), f.started(void=True)), ("committed", 1, 0, 0)),
    "cancelled in the queue": (lambda f: f.cancel(), ("cancelled", 0, 0, 0)),
    "cancelled while it runs": (
        lambda f: (f.commit(), f.started(), f.cancel()), ("running", 1, 0, 0),
    ),
    "cancelled and over": (
        lambda f: (f.commit(), f.started(), f.cancel(), f.outcome("cancelled")), ("cancelled", 1, 0, 0),
    ),
    "cancelled after it failed": (
        lambda f: (f.attempt("failed", exit_code=1), f.cancel()), ("cancelled", 1, 1, 0),
    ),
    "cancelled too late": (lambda f: (f.attempt("completed"), f.cancel()), ("completed", 1, 0, 10)),
    "cancelled twice": (
        lambda f: (f.cancel(), f.write("cancel", "again", minutes(30), {"job": "a"})), ("cancelled", 0, 0, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_the_state_of_a_job_follows_from_its_facts(facts: Facts, directory: Path, case: str) -> None:
    tell, expected = STATES[case]
    facts.spec()
    tell(facts)
    ledger.take_in(directory, facts.storage)
    (row,) = query(directory, "SELECT state, attempts, failures, earned FROM jobs")
    assert tuple(row.values()) == expected


def test_a_job_that_waits_beyond_its_deadline_expires(facts: Facts, directory: Path) -> None:
    facts.spec(deadline="2001-01-01T00:00Z")
    facts.spec("runs", deadline="2001-01-01T00:00Z")
    facts.commit("runs")
    facts.spec("has time", deadline="2199-01-01T00:00Z")
    ledger.take_in(directory, facts.storage)
    states = {row["job"]: row["state"] for row in query(directory, "SELECT job, state FROM jobs")}
    assert states == {"a": "expired", "runs": "committed", "has time": "queued"}


def test_a_job_that_completes_too_late_earns_nothing(facts: Facts, directory: Path) -> None:
    facts.spec(deadline=text(minutes(30)))
    facts.attempt("completed")
    ledger.take_in(directory, facts.storage)
    assert query(directory, "SELECT state, earned FROM jobs") == [{"state": "completed", "earned": 0}]


def test_cancelling_a_recurring_job_cancels_what_has_not_begun(facts: Facts, directory: Path) -> None:
    facts.spec("series", schedule="0 * * * *")
    for name in ("waits", "runs", "waits and is cancelled itself"):
        facts.spec(name, template="series")
    facts.commit("runs")
    facts.cancel("series")
    facts.cancel("waits and is cancelled itself")
    ledger.take_in(directory, facts.storage)
    rows = query(directory, "SELECT job, state, cancel_at FROM jobs ORDER BY job")
    assert rows == [
        {"job": "runs", "state": "committed", "cancel_at": None},
        {"job": "waits", "state": "cancelled", "cancel_at": minutes(20)},
        {"job": "waits and is cancelled itself", "state": "cancelled", "cancel_at": minutes(20)},
    ]
    assert query(directory, "FROM recurring") == []


def test_every_table_view_and_column_says_what_it_is(facts: Facts, directory: Path) -> None:
    facts.spec()
    ledger.take_in(directory, facts.storage)
    silent = """
        SELECT table_name AS name FROM duckdb_tables() WHERE comment IS NULL
        UNION ALL SELECT view_name FROM duckdb_views() WHERE comment IS NULL AND NOT internal
        UNION ALL SELECT table_name || '.' || column_name FROM duckdb_columns()
            WHERE comment IS NULL AND NOT internal
    """
    assert query(directory, silent) == []
    views = query(directory, "SELECT view_name AS name FROM duckdb_views() WHERE NOT internal")
    assert len(views) >= 12
    for view in views:  # each can be asked
        query(directory, f"FROM {view['name']}")


def test_all_times_are_utc(facts: Facts, directory: Path) -> None:
    facts.every_kind()
    ledger.take_in(directory, facts.storage)
    ledger.publish(directory)
    plain = "SELECT table_name FROM duckdb_columns() WHERE data_type = 'TIMESTAMP' AND NOT internal"
    assert query(directory, plain) == []
    (row,) = query(directory, "SELECT instant FROM missed_slots")
    assert row["instant"] == minutes(-60)
