"""The demonstration: `python -m flows.demo` runs the whole product here, on recorded load, and checks it.

A Prefect server, workers for three nodes of virtual GPUs and a virtual service are started; a recorded hour
passes in each one-minute slot; twelve jobs of every kind are planned, run and accounted for. Sixteen more,
for the night, are only planned: they ask for more than there is, so that there is something to choose. It
exits 0 only if at least three scheduled plans were committed, the twelve completed, and the plans were worth
more than those of first-in-first-out, and it stops what it started.
"""

import argparse
import csv
import json
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import yaml
from rich.console import Console
from rich.table import Table

from allocator.picture import show
from flows import server
from flows.processes import exit_when_told
from tasks import instants, ledger
from tasks.cluster import Site, load_site
from tasks.collect import ledger_directory, record_demand
from tasks.commit import read_plan
from tasks.demand import Sample
from tasks.inbox import FINAL_STATES
from tasks.serving import observed

SOURCE = Path(server.ROOT) / "deployments" / "demo"
HISTORY_SLOTS = 96
FIRST_HOUR = 22  # of the recorded week; after 96 hours of history the demonstration starts as evening falls
PLANS = 3
NIGHT = "night"  # what the jobs come after that are only planned here
NIGHT_SLOTS = 10  # from the start until then: later than the demonstration lasts
FROM_HISTORY = {"blend and model", "blend", "seasonal naive"}  # forecasts, not what the operator stated
TRAINING_STEPS = 8
MODEL = "outputs/plays-small/model"  # what the first training job leaves
PROMPTS = (
    "To be, or",
    "All the world's",
    "Shall I compare",
    "The quality of mercy",
    "Friends, Romans,",
    "Once more",
)
DEADLINE_S = 540.0  # three to five minutes on two cores, more where others are busy; ends before the night
QUERIES = (
    "SELECT kind, count(*) AS runs, round(avg(mfu), 3) AS mfu, round(sum(gpu_seconds)) AS gpu_s, "
    "round(sum(cost), 3) AS cost FROM runs GROUP BY kind ORDER BY kind",
    "SELECT instant, round(planned_value, 2) AS slotwise, round(fifo_value, 2) AS fifo, "
    "round(backfill_value, 2) AS backfill, round(greedy_value, 2) AS greedy, placed, "
    "round(solve_ms, 1) AS ms FROM hours ORDER BY instant",
)


@dataclass(frozen=True)
class Check:
    """One thing that must truly have happened."""

    what: str
    holds: bool


@exit_when_told()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flows.demo", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(".slotwise/demo"), help="made anew each time")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    site = prepare(options.directory)
    recorded = recorded_hours()
    stop = threading.Event()
    began = time.monotonic()
    try:
        first = load_history(site, recorded)
        feeder = threading.Thread(target=feed, args=(site, recorded, first, stop), daemon=True)
        feeder.start()
        prompts = "".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS * 4)
        site.storage.write("prompts.jsonl", prompts.encode())
        submitted = submit(site, after="")
        tonight = submit(site, after=NIGHT, not_before=first + NIGHT_SLOTS * site.slot)
        console.print(
            f"{len(submitted)} jobs in the inbox and {len(tonight)} for the night, "
            f"{HISTORY_SLOTS} recorded hours loaded as history"
        )
        running = server.up(site)
        tell(console, set(), began, f"all runs: {', '.join(running.pids)}; Prefect UI: {running.ui_url}")
        follow(site, console, began)
    except server.ServerError as error:
        console.print(f"[red]{error}[/red]")
        return 1
    finally:
        stop.set()
        server.down(site)
        console.print(f"stopped what was started, after {time.monotonic() - began:.0f} s")
    return report(site, console)


def prepare(directory: Path) -> Site:
    """An empty directory with the demonstration's cluster file; a demonstration that ran there is stopped."""
    directory = directory.absolute()
    file = directory / "cluster.yaml"
    if file.exists():
        server.down(load_site(file))
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    shutil.copyfile(SOURCE / "cluster.yaml", file)
    return load_site(file)


def recorded_hours() -> list[float]:
    """Requests/s in each hour of the recorded week, from the first that is used."""
    with (SOURCE / "azure_code_2024.csv").open() as lines:
        return [float(row["y"]) for row in csv.DictReader(lines)][FIRST_HOUR:]


def load_history(site: Site, recorded: list[float]) -> datetime:
    """Record the hours before now, one for each slot, labelled as recorded; the slot that comes next."""
    first = instants.floor(instants.now(), site.cluster.slot_minutes) + site.slot
    service = site.cluster.services[0]
    past = [
        Sample(first - (HISTORY_SLOTS - slot) * site.slot, value)
        for slot, value in enumerate(recorded[:HISTORY_SLOTS])
    ]
    record_demand(site, service, past, "recorded", instants.now())
    assert service.demand.file is not None
    (site.file.parent / service.demand.file).write_text("ts,y\n")
    return first


def feed(site: Site, recorded: list[float], first: datetime, stop: threading.Event) -> None:
    """Let the recording go on: at the end of each slot, its hour appears in the demand file."""
    file = site.file.parent / str(site.cluster.services[0].demand.file)
    for slot, value in enumerate(recorded[HISTORY_SLOTS:]):
        at = first + slot * site.slot
        if stop.wait(max((at + site.slot - instants.now()).total_seconds(), 0.0)):
            return
        with file.open("a") as out:
            out.write(f"{instants.text(at)},{value}\n")


def submit(site: Site, after: str, not_before: datetime | None = None) -> list[str]:
    """Leave in the inbox the jobs that come after another one has completed, or first of all."""
    rows = [row for row in recorded_jobs() if row["after"] == after]
    for row in rows:
        spec = {
            "id": row["id"],
            "kind": row["kind"],
            "gpus": int(row["gpus"]),
            "priority": int(row["priority"]),
            "duration": f"{float(row['philly_duration_s']) / 60:.0f}s",  # a recorded hour is a minute
            **({"not_before": instants.text(not_before)} if not_before else {}),
            **program(row),
        }
        site.storage.write(f"inbox/{row['id']}.yaml", yaml.safe_dump(spec, sort_keys=False).encode())
    return [row["id"] for row in rows]


def program(row: dict[str, str]) -> dict[str, Any]:
    """What the job runs: small, but the real thing."""
    if row["program"] == "own":
        seconds = f"{float(row['philly_duration_s']) / 240:.0f}"
        return {"command": [sys.executable, str(SOURCE / "own_program.py"), seconds]}
    if row["kind"] == "training":
        batch = {"micro_batch": 2, "global_batch": 4, "seq_len": 128}
        model = {"model": "llama-tiny", "data": "shakespeare", "steps": TRAINING_STEPS, **batch}
        return {"training": {"config": model}}
    if row["kind"] == "batch_inference":
        return {"batch_inference": {"model": MODEL, "input": "prompts.jsonl", "max_new_tokens": 16}}
    scheme = "int8_dynamic" if "dynamic" in row["id"] else "int8_weight_only"
    return {"quantization": {"model": MODEL, "scheme": scheme, "windows": 8, "seq_len": 128}}


def follow(site: Site, console: Console, began: float) -> None:
    """Tell what happens until all is done, or the time is over.

    Submits the second batch when its turn comes.
    """
    told: set[str] = set()
    waiting = True
    while time.monotonic() - began < DEADLINE_S:
        time.sleep(2)
        if not ledger.published_file(ledger_directory(site)).exists():
            continue
        jobs = query(site, "SELECT job, state, attempts, nodes FROM jobs ORDER BY job")
        plans = query(site, "FROM hours ORDER BY instant")
        in_a_row = longest_row([plan["instant"] for plan in plans], site.plan_every)
        for plan in plans:
            line = f"plan of {plan['instant']:%H:%M} committed: {plan['placed']} jobs placed, value "
            line += f"{plan['planned_value']:.2f} (fifo {plan['fifo_value']:.2f})"
            tell(console, told, began, line)
        for job in jobs:
            if job["state"] != "queued":
                where = f" on {', '.join(job['nodes'])}" if job["state"] == "running" else ""
                tell(console, told, began, f"{job['job']} {job['state']}{where}")
        done = {job["job"] for job in jobs if job["state"] == "completed"}
        if waiting and "plays-small" in done:
            more = submit(site, after="plays-small")
            waiting = False
            tell(console, told, began, f"{len(more)} more jobs in the inbox, for the model just trained")
        over = [job for job in jobs if job["state"] in FINAL_STATES]
        if not waiting and len(over) == len(all_jobs()) and in_a_row >= PLANS:
            return


def report(site: Site, console: Console) -> int:
    """Print what came of it, check it, and say where to look next."""
    directory = ledger_directory(site)
    ledger.take_in(directory, site.storage)
    ledger.publish(directory)
    show_plan(site, console)
    jobs = query(site, "FROM jobs ORDER BY started_at, job")
    runs = {row["job"]: row for row in query(site, "FROM runs ORDER BY attempt")}
    show_jobs(console, [job for job in jobs if job["job"] in all_jobs()], runs)
    forecasts = query(
        site,
        "SELECT ts, low, expected, high, actual FROM forecast_errors WHERE step = 0 ORDER BY ts",
    )
    print_table(console, "Forecast of the next slot against what came, GPUs", forecasts)
    hours = query(
        site,
        "SELECT instant, objective AS planned_worth, fifo_objective AS fifo_worth, "
        "backfill_objective AS backfill_worth, greedy_objective AS greedy_worth, "
        "utilization AS planned_utilization, fifo_utilization, backfill_utilization, greedy_utilization "
        "FROM plans WHERE trigger = 'hourly' ORDER BY instant",
    )
    hours = [
        {
            "plan": f"{row['instant']:%H:%M}",
            **{name: row[f"{key}_worth"] for name, key in POLICIES.items()},
            **{f"{name} util.": row[f"{key}_utilization"] for name, key in POLICIES.items()},
        }
        for row in hours
    ]
    print_table(
        console,
        "Worth (value less shortage) and utilization: each plan, and the baselines on the same problem",
        hours,
    )
    for text in QUERIES:
        print_table(console, text, query(site, text))
    checks = list(check(site, jobs, runs, forecasts))
    for found in checks:
        console.print(f"{'[green]yes[/green]' if found.holds else '[red]NO[/red]'}  {found.what}")
    console.print(
        f"\nLook next: slotwise sql --cluster '{site.file}' 'FROM jobs'; the outputs in "
        f"{site.storage_root}/outputs; `make up` for a site that stays, with the UI."
    )
    return 0 if all(found.holds for found in checks) else 1


POLICIES = {"slotwise": "planned", "fifo": "fifo", "backfill": "backfill", "greedy": "greedy"}


def check(
    site: Site, jobs: list[dict[str, Any]], runs: dict[str, dict[str, Any]], forecasts: list[dict[str, Any]]
) -> list[Check]:
    """What must be true for the demonstration to have succeeded."""
    instants_planned = [row["instant"] for row in query(site, "SELECT instant FROM hours ORDER BY instant")]
    in_a_row = longest_row(instants_planned, site.plan_every)
    gangs = query(site, "FROM attempts WHERE ranks > 1 AND state = 'completed'")
    completed = [job for job in jobs if job["state"] == "completed"]
    trained = [run for run in runs.values() if run["kind"] == "training" and run["mfu"] is not None]
    quantized = [json.loads(run["metrics"]) for run in runs.values() if run["kind"] == "quantization"]
    methods = [row["method"] for row in query(site, "SELECT DISTINCT method FROM forecasts ORDER BY ALL")]
    recorded = len(query(site, "FROM demand_samples WHERE origin = 'recorded'"))
    bare = len(
        query(
            site,
            "FROM plans WHERE trigger = 'hourly' AND (fifo_value IS NULL OR backfill_value IS NULL "
            "OR greedy_value IS NULL)",
        )
    )
    (worth,) = query(
        site,
        "SELECT sum(objective) AS ours, sum(fifo_objective) AS fifo FROM plans WHERE trigger = 'hourly'",
    )
    followed = observed(site.storage, site.cluster.services[0].name).version
    different = ledger.verify(ledger_directory(site), site.storage)
    return [
        Check(
            f"{in_a_row} scheduled plans were committed in a row, at least {PLANS} expected",
            in_a_row >= PLANS,
        ),
        Check(f"{len(completed)} of {len(all_jobs())} jobs completed", len(completed) == len(all_jobs())),
        Check(f"{len(trained)} training runs measured their MFU", bool(trained)),
        Check(f"{len(gangs)} gang trained over two nodes", bool(gangs)),
        Check(
            f"{len(quantized)} quantized models were measured before and after",
            bool(quantized)
            and all({"perplexity_before", "perplexity_after"} <= found.keys() for found in quantized),
        ),
        Check("forecasts were compared with what came", bool(forecasts)),
        Check(
            f"they were made by {', '.join(methods)} from {recorded} recorded hours",
            bool(methods) and set(methods) <= FROM_HISTORY,
        ),
        Check("every plan stands beside fifo, backfill and greedy", bare == 0),
        Check(
            f"the plans are worth {worth['ours']:.2f} in all, FIFO's {worth['fifo']:.2f}",
            worth["ours"] > worth["fifo"],
        ),
        Check(f"the service followed {followed} targets", followed > 1),
        Check(f"the ledger equals its facts {different or ''}", not different),
    ]


def longest_row(instants_planned: list[datetime], step: timedelta) -> int:
    """How many instants follow one another without a gap, at most."""
    longest = row = 0
    for at, instant in enumerate(instants_planned):
        row = row + 1 if at and instant - instants_planned[at - 1] == step else 1
        longest = max(longest, row)
    return longest


def show_plan(site: Site, console: Console) -> None:
    """The grid of the plan that committed most."""
    found = query(
        site,
        "SELECT p.instant FROM plans p JOIN allocations a USING (instant) WHERE p.trigger = 'hourly' "
        "GROUP BY p.instant ORDER BY count(*) DESC, p.instant LIMIT 1",
    )
    if not found:
        return
    instant = found[0]["instant"]
    problem, plan = read_plan(site.storage, instant)
    show(console, problem, plan, committed=1)


def show_jobs(console: Console, jobs: list[dict[str, Any]], runs: dict[str, dict[str, Any]]) -> None:
    """Every job with its outcome."""
    rows = []
    for job in jobs:
        run = runs.get(job["job"], {})
        speed = run.get("tokens_per_s") or run.get("rows_per_s")
        rows.append(
            {
                "job": job["job"],
                "kind": job["kind"],
                "outcome": job["state"],
                "GPUs": job["gpus"],
                "on": ", ".join(job["nodes"] or ()),
                "wait s": job["wait_s"],
                "run s": run.get("seconds"),
                "MFU": run.get("mfu"),
                "tokens or rows/s": speed,
                "value": job["earned"],
            }
        )
    print_table(console, "Jobs", rows)


def print_table(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """Rows as a table."""
    console.print(f"\n[bold]{title}[/bold]")
    table = Table()
    for name in rows[0] if rows else ("nothing",):
        table.add_column(name)
    for row in rows:
        table.add_row(*(plain(value) for value in row.values()))
    console.print(table)


def plain(value: Any) -> str:
    """A cell as a person reads it."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return f"{value:%H:%M}"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def query(site: Site, text: str) -> list[dict[str, Any]]:
    """Ask the published copy, as anyone would."""
    with duckdb.connect(str(ledger.published_file(ledger_directory(site))), read_only=True) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        return ledger.rows(connection, text)


def all_jobs() -> list[str]:
    """Ids of the jobs that run here."""
    return [row["id"] for row in recorded_jobs() if row["after"] != NIGHT]


def recorded_jobs() -> list[dict[str, str]]:
    """Jobs of the Philly trace, as the demonstration names them."""
    with (SOURCE / "jobs_philly.csv").open() as lines:
        return list(csv.DictReader(lines))


def tell(console: Console, told: set[str], began: float, line: str) -> None:
    """Say a thing once, with the time."""
    if line not in told:
        told.add(line)
        console.print(f"{timedelta(seconds=round(time.monotonic() - began))}  {line}")


if __name__ == "__main__":
    sys.exit(main())
