"""The ledger among processes: writers at once, one that is killed, and readers of the published copy."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import duckdb

from tasks import ledger
from tests.tasks.ledgers import contents, query
from tests.tasks.ledgers import directory as directory
from tests.tasks.ledgers import facts as facts
from tests.tasks.ledgers import migrated as migrated
from tests.tasks.ledgers import plain as plain
from tests.tasks.worked_hours import HOUR, Facts


def run(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


WRITER = """
import sys
from pathlib import Path
from tasks import ledger
from tasks.storage import open_storage
from tests.tasks.worked_hours import Facts, HOUR
directory, storage, name, count = Path(sys.argv[1]), open_storage(sys.argv[2]), sys.argv[3], int(sys.argv[4])
facts = Facts(storage)
new = 0
for number in range(count):
    facts.spec(f"{name}-{number}")
    new += ledger.take_in(directory, storage, HOUR.date()).new
    if len(sys.argv) > 5:
        ledger.publish(directory)
print(new)
"""
READER = """
import sys, duckdb
file, done = sys.argv[1:]
reads = most = 0
import pathlib
while not pathlib.Path(done).exists() or not reads:
    with duckdb.connect(file, read_only=True) as connection:
        jobs, = connection.execute("SELECT count(*) FROM jobs").fetchone()
        facts, = connection.execute("SELECT count(*) FROM facts").fetchone()
    assert jobs == facts >= most, (jobs, facts, most)
    most = jobs
    reads += 1
print(reads, most)
"""


def test_readers_of_the_published_copy_see_no_error_while_it_is_replaced(
    facts: Facts, directory: Path, tmp_path: Path
) -> None:
    facts.spec("first")
    ledger.take_in(directory, facts.storage, HOUR.date())
    ledger.publish(directory)
    done = tmp_path / "done"
    readers = [run(READER, ledger.published_file(directory), done) for _ in range(2)]
    writer = run(WRITER, directory, facts.storage.root, "w", 8, "publish")
    try:
        assert finish(writer) == "8\n"
    finally:
        done.touch()
    for reader in readers:
        reads, most = map(int, finish(reader).split())
        assert reads >= 1
        assert most <= 9


def test_two_processes_that_take_in_at_once_lose_nothing(facts: Facts, directory: Path) -> None:
    writers = [run(WRITER, directory, facts.storage.root, name, 6) for name in ("x", "y")]
    taken = [int(finish(writer)) for writer in writers]
    assert sum(taken) == 12
    assert query(directory, "SELECT count(*) AS n, count(DISTINCT job) AS jobs FROM specs") == [
        {"n": 12, "jobs": 12}
    ]
    assert ledger.verify(directory, facts.storage) == []


KILLED = """
import sys
from pathlib import Path
from tasks import ledger
from tasks.storage import open_storage
real = ledger._insert_rows
def insert(connection, facts):
    real(connection, facts)
    print("inserted", flush=True)
    sys.stdin.read()
ledger._insert_rows = insert
ledger.take_in(Path(sys.argv[1]), open_storage(sys.argv[2]))
"""


def test_a_process_killed_while_it_takes_in_leaves_all_or_nothing(facts: Facts, directory: Path) -> None:
    facts.spec("before")
    ledger.take_in(directory, facts.storage)
    facts.spec("after")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(directory), facts.storage.root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "inserted\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert query(directory, "SELECT job FROM specs") == [{"job": "before"}]
    assert ledger.take_in(directory, facts.storage).new == 1


SCRIBBLER = """
import os, sys, duckdb
connection = duckdb.connect(sys.argv[1])
connection.execute("CREATE TABLE notes AS SELECT 1 AS a")
os._exit(0)  # without a checkpoint: the table is in a log beside the file
"""


def test_what_people_wrote_into_the_copy_does_not_outlive_it(facts: Facts, directory: Path) -> None:
    facts.spec()
    ledger.take_in(directory, facts.storage)
    copy = ledger.publish(directory)
    finish(run(SCRIBBLER, copy))
    assert copy.with_name(f"{copy.name}.wal").exists()
    facts.spec("b")
    ledger.take_in(directory, facts.storage)
    ledger.publish(directory)
    assert len(contents(copy)["specs"]) == 2
    assert "notes" not in contents(copy)


def test_a_reader_keeps_what_it_has_open(facts: Facts, directory: Path) -> None:
    facts.spec()
    ledger.take_in(directory, facts.storage)
    copy = ledger.publish(directory)
    with duckdb.connect(str(copy), read_only=True) as connection:
        facts.spec("b")
        ledger.take_in(directory, facts.storage)
        ledger.publish(directory)
        assert connection.execute("SELECT count(*) FROM jobs").fetchall() == [(1,)]
