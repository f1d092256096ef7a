"""The flow that runs a set of replays and shows them side by side.

    python -m flows.replays /tmp/narrow /tmp/wide --policies fifo,backfill,greedy,slotwise

A replay's folder holds `cluster.yaml`, `jobs.csv` and `demand.csv`, as `flows.cases` makes them; its figures,
ledger and picture are left there.

Invariant: one that fails is told and the others go on. The cost: replays run one after the other, because the
policies of each already run side by side.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from flows.cli_answers import cell
from flows.replay import Order, Replayed, run_replays, title
from flows.replay_picture import picture
from flows.replay_report import Report, Table, read_report
from tasks.cluster import load_site
from tasks.specfile import SpecError
from tasks.trace import TraceError

FAST = ("fifo", "backfill", "greedy", "slotwise")


@flow(name="replays", validate_parameters=False)
def replays(folders: list[str], policies: list[str] | None = None, seed: int = 0) -> dict[str, Any]:
    """Replay every folder; its figures by policy, or the line that says why there are none."""
    told: dict[str, Any] = {}
    lines: list[dict[str, Any]] = []
    for folder in folders:
        try:
            told[folder], report = replay_folder(folder, tuple(policies or FAST), seed)
        except (TraceError, SpecError, OSError) as error:
            told[folder] = str(error)
            get_run_logger().error("%s: %s", folder, error)
            continue
        summary = report.summary()
        lines += [
            {"replay": Path(folder).name, **dict(zip(summary.names, map(_shown, row), strict=True))}
            for row in summary.rows
        ]
    if lines:
        create_table_artifact(lines, key="replays", description="Policies side by side on recorded load")
    return told


@task(name="replay", cache_policy=NO_CACHE)
def replay_folder(folder: str, policies: tuple[str, ...], seed: int) -> tuple[dict[str, Any], Report]:
    """Replay one folder, and leave what came of it there and as an artifact."""
    place = Path(folder)
    demand = place / "demand.csv"
    order = Order(
        load_site(place / "cluster.yaml"),
        place / "jobs.csv",
        demand if demand.exists() else None,
        policies,
        seed=seed,
    )
    done = run_replays(order, place / "replay.duckdb")
    report = read_report(place / "replay.duckdb")
    (place / "replay.json").write_text(json.dumps(done.figures(), indent=2) + "\n")
    (place / "replay.svg").write_text(picture(report, title(done)))
    key = "".join(letter if letter.isalnum() else "-" for letter in place.name.lower()).strip("-")
    create_markdown_artifact(_told(done, report), key=f"replay-{key or 'set'}", description=title(done))
    return done.figures(), report


def _told(done: Replayed, report: Report) -> str:
    return "\n\n".join([f"## {title(done)}", *(_markdown(table) for table in report.tables())])


def _markdown(table: Table) -> str:
    rows = [["" if value is None else str(_shown(value)) for value in row] for row in table.rows]
    lines = [table.names, ["---"] * len(table.names), *rows]
    return "\n".join([f"**{table.title}**", "", *("| " + " | ".join(line) + " |" for line in lines)])


def _shown(value: Any) -> Any:
    return cell(value, ZoneInfo("UTC")) if isinstance(value, float) else value


def main(arguments: list[str] | None = None) -> int:
    """The command line; without PREFECT_API_URL it uses a server of its own for as long as it runs."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.replays", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="cluster.yaml, jobs.csv, demand.csv")
    parser.add_argument("--policies", default=",".join(FAST), help=f"default: {','.join(FAST)}")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    told = replays(chosen.folders, chosen.policies.split(","), chosen.seed)
    return int(any(isinstance(found, str) for found in told.values()))


if __name__ == "__main__":
    sys.exit(main())
