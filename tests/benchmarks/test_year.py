"""What years and crowds cost: a year in the ledger, a thousand outcomes and specs at once, many nodes and
jobs.

Printed, not judged. The year is made in the database itself, 8,760 slots and 200,000 runs, as facts would
make it.
"""

import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tasks import ledger
from tasks.cluster import Site, load_site
from tasks.collect import collect, ledger_directory
from tasks.facts import fact_keys
from tasks.nodes import node_states, renew_lease
from tasks.upkeep import upkeep
from tests.conftest import MakeStorage, make_site
from tests.tasks.planned_hours import Runs, answer, ask, begin, leave_end, plan_hour, submit

pytestmark = pytest.mark.benchmark
HOUR = datetime(2026, 12, 1, 6, tzinfo=UTC)
SLOTS, RUNS = 8_760, 200_000
USUAL = {
    "jobs by state": "SELECT state, count(*) FROM jobs GROUP BY ALL",
    "the latest jobs": "FROM jobs ORDER BY submitted_at DESC LIMIT 100",
    "one job": "FROM jobs WHERE job = 'job-777'",
    "what waits": "FROM jobs WHERE state = 'queued'",
    "who holds GPUs": "FROM holders",
    "live ranks": "FROM live_ranks",
    "one job's runs": "FROM runs WHERE job = 'job-777'",
    "MFU by kind": "SELECT kind, avg(mfu) FROM runs GROUP BY ALL",
    "the latest runs": "FROM runs ORDER BY ended_at DESC LIMIT 100",
    "the hours": "FROM hours ORDER BY instant DESC LIMIT 100",
    "durations": "FROM durations ORDER BY ended_at DESC LIMIT 10000",
    "serving": "FROM serving_counts",
    "forecast errors": "FROM forecast_errors LIMIT 1000",
}


@contextmanager
def timed(what: str) -> Iterator[None]:
    wall, used = time.monotonic(), time.process_time()
    yield
    print(f"  {what:52} {time.monotonic() - wall:7.2f} s, {time.process_time() - used:6.2f} s CPU")


def best(what: str, work: Callable[[], Any], tries: int = 3) -> None:
    """Print the shortest of a few tries."""
    took = []
    for _ in range(tries):
        wall, used = time.monotonic(), time.process_time()
        work()
        took.append((time.monotonic() - wall, time.process_time() - used))
    wall, used = min(took)
    print(f"  {what:52} {wall:7.2f} s, {used:6.2f} s CPU")


def memory() -> str:
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB at most"


def answer_together(site: Site, ranks: list[dict[str, Any]], now: datetime, ended: datetime) -> None:
    """Let all nodes' workers answer in the same moment, and the runners of these ranks leave their outcomes.

    Each node is a thread with requests of its own, eight to a process; all begin when the last is ready.
    """
    context = multiprocessing.get_context("spawn")
    names = [node.name for node in site.cluster.nodes]
    work = [(name, [rank for rank in ranks if rank["node"] == name]) for name in names]
    ready, told = context.Barrier(len(names) + 1), context.SimpleQueue()
    processes = [
        context.Process(target=_answer, args=(site.file, work[number::8], now, ended, ready, told))
        for number in range(8)
    ]
    for process in processes:
        process.start()
    ready.wait(120)
    began = time.monotonic()
    took = sorted(seconds for _ in processes for seconds in told.get())
    wall = time.monotonic() - began
    for process in processes:
        process.join()
    found = node_states(site.storage, names, now, site.lost_after)
    assert len(took) == len(names) and {node.state for node in found.values()} == {"ready"}
    what = f"{len(names)} nodes answer together, {len(ranks)} runs end"
    print(f"  {what:52} {wall:7.2f} s, half of the nodes in {took[len(took) // 2]:.2f} s")


def _answer(
    file: Path,
    work: list[tuple[str, list[dict[str, Any]]]],
    now: datetime,
    ended: datetime,
    ready: Any,
    told: Any,
) -> None:
    """In a process: some of the nodes."""
    storage = load_site(file).storage
    storage.keys("leases/")  # the first request costs imports and a connection

    def one(node: str, ranks: list[dict[str, Any]]) -> float:
        ready.wait(120)
        began = time.monotonic()
        renew_lease(storage, node, now)
        for rank in ranks:
            leave_end(storage, rank, ended)
        return time.monotonic() - began

    with ThreadPoolExecutor(len(work)) as nodes:
        told.put(list(nodes.map(lambda each: one(*each), work)))


def make_year(site: Site) -> None:
    """Fill the site's ledger."""
    values = {"begin": HOUR - timedelta(hours=SLOTS), "slots": SLOTS, "runs": RUNS, "details": 60}
    with ledger.open_ledger(ledger_directory(site)) as connection:
        for name, value in values.items():
            connection.execute(f"SET VARIABLE {name} = ?", [value])
        connection.execute(Path(__file__).with_name("year.sql").read_text())


def test_a_year_of_hours_in_the_ledger(tmp_path: Path) -> None:
    site = make_site(tmp_path, full_mode_seconds=0)
    directory = ledger_directory(site)
    print(f"\na year: {SLOTS} slots, {RUNS} runs; best of three")
    make_year(site)
    best("outcomes.duckdb published", lambda: ledger.publish(directory))
    print(f"  it has {ledger.published_file(directory).stat().st_size >> 20} MB")
    with duckdb.connect(str(ledger.published_file(directory)), read_only=True) as connection:
        for name, query in USUAL.items():
            best(name, lambda query=query: connection.execute(query).fetchall())  # type: ignore[misc]
    print(f"  {memory()}")
    answer(site, HOUR)
    with timed("a whole hour on top of it, without Prefect"):
        plan_hour(site, HOUR, Runs())
    with timed("collect alone, nothing new"):
        collect(site, HOUR + timedelta(minutes=1))
    with timed("the hour after"):
        plan_hour(site, HOUR + timedelta(hours=1), Runs())
    print(f"  {memory()}")


def test_a_thousand_outcomes_and_five_hundred_specs_at_once(tmp_path: Path) -> None:
    """Ten of the specs are broken in ten ways."""
    nodes = [{"name": f"node{number}", "gpus": 16} for number in range(64)]
    site, runs = make_site(tmp_path, nodes=nodes, full_mode_seconds=0), Runs()
    answer(site, HOUR)
    for job in range(1000):
        submit(site, f"first-{job}")
    print("\n1,000 outcomes and 500 specs at once on 64 nodes of 16 GPUs")
    with timed("an hour that takes in 1,000 specs and starts them"):
        plan_hour(site, HOUR, runs)
    ranks = list(runs.made.values())
    for rank in ranks:
        begin(site, rank, HOUR)
    broken = [
        b"",
        b"\xff\xfe",
        b"a: &a [*a]",
        b"kind: !!python/object:x {}",
        b"[" * 400,
        b"kind: training\nkind: training\n",
        b"kind: training\n",
        b"x" * 300_000,
        b"kind: training\ngpus: 99999\npriority: 1\nduration: 1h\ncommand: [a]\n",
        b"kind: nothing\ngpus: 1\npriority: 1\nduration: 1h\ncommand: [a]\n",
    ]
    for job in range(490):
        submit(site, f"second-{job}")
    for number, content in enumerate(broken):
        site.storage.write(f"inbox/broken-{number}.yaml", content)
    later = HOUR + timedelta(hours=1)
    answer_together(site, ranks, later, HOUR + timedelta(minutes=30))
    with timed(f"an hour that takes in {len(ranks)} outcomes and 500 specs"):
        plan_hour(site, later, runs)
    (counts,) = ask(
        site, "SELECT (SELECT count(*) FROM outcomes) AS outcomes, (SELECT count(*) FROM specs) AS specs"
    )
    rejected = ask(site, "SELECT count(*) AS n FROM rejections")[0]["n"]
    print(f"  {counts['outcomes']} outcomes, {counts['specs']} jobs, {rejected} rejected; {memory()}")
    loose = len(fact_keys(site.storage))
    with timed(f"upkeep a month later, {loose} loose facts"):
        done = upkeep(site, later + timedelta(days=30))
    assert done is not None
    print(f"  {done.packed} packed, {len(fact_keys(site.storage))} left loose")
    with timed("the ledger made again from them"):
        ledger.rebuild(ledger_directory(site), site.storage)


def test_64_nodes_answer_together_over_s3(tmp_path: Path, s3: MakeStorage) -> None:
    nodes = [{"name": f"node{number}", "gpus": 16} for number in range(64)]
    site = make_site(tmp_path, nodes=nodes, storage=s3().root)
    ranks = [
        {"instant": HOUR, "job": f"job-{number}", "attempt": 1, "rank": 0, "node": f"node{number % 64}"}
        for number in range(1000)
    ]
    print("\n64 nodes over S3 (moto, one process)")
    answer_together(site, ranks, HOUR, HOUR)
    with timed("taking the outcomes in"):
        taken = ledger.take_in(ledger_directory(site), site.storage)
    print(f"  {taken.new} facts; {memory()}")


def test_a_queue_of_five_thousand_jobs(tmp_path: Path) -> None:
    nodes = [{"name": f"node{number}", "gpus": 8} for number in range(64)]
    site = make_site(tmp_path, nodes=nodes, full_mode_seconds=0)
    answer(site, HOUR)
    for job in range(5000):
        submit(
            site,
            f"job-{job}",
            gpus=(1, 1, 2, 4, 8)[job % 5],
            priority=1 + job % 7,
            duration=f"{20 + job % 300}m",
        )
    print("\na queue of 5,000 jobs on 64 nodes of 8 GPUs")
    with timed("taking them in"):
        collect(site, HOUR)
    with timed("planning, committing and dispatching"):
        plan_hour(site, HOUR, Runs())
    (plan,) = ask(site, "SELECT placed, unplaced, solve_ms FROM plans")
    print(
        f"  {plan['placed']} placed, {plan['unplaced']} not, solved in {plan['solve_ms']:.0f} ms; {memory()}"
    )
