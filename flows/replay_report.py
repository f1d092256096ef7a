"""What a set of replays says, read from its ledger: tables for a terminal, for Prefect and for the picture.

Invariant: every figure here is a query that anyone can repeat on the ledger.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.journal import ask

AHEAD = (1, 3, 6, 12, 24)  # hours at which the forecast's error is shown
BASELINES = ("fifo", "backfill", "greedy")


@dataclass(frozen=True)
class Table:
    """Rows under their names."""

    title: str
    names: tuple[str, ...]
    rows: list[list[Any]]


@dataclass(frozen=True)
class Report:
    """The tables of a ledger, and its policies in the order in which they were asked for."""

    policies: tuple[str, ...]
    accounts: list[dict[str, Any]]
    days: list[dict[str, Any]]
    by_priority: Table
    by_gpus: Table
    forecast: Table
    plans: Table

    def summary(self) -> Table:
        """Each policy on a line, its value beside the baselines'."""
        value = {account["policy"]: account["value"] for account in self.accounts}
        base = [name for name in BASELINES if value.get(name)]
        names = ("policy", "value", *(f"of {name}" for name in base), "net value", "utilization", "completed",
                 "short GPU-slots", "served", "slots short", "mean wait h", "seconds")  # fmt: skip
        rows = [
            [
                account["policy"],
                account["value"],
                *(account["value"] / value[name] for name in base),
                account["net_value"],
                account["utilization"],
                account["completed"],
                account["shortage_gpu_slots"],
                account["served_share"],
                account["short_share"],
                account["mean_wait_s"] / 3600,
                account["seconds"],
            ]
            for account in self.accounts
        ]
        return Table("Policies", names, rows)

    def tables(self) -> list[Table]:
        """All of it, the summary first; without those that have nothing to say."""
        found = [self.summary(), self.by_priority, self.by_gpus, self.forecast, self.plans]
        return [table for table in found if table.rows]


def read_report(ledger: Path) -> Report:
    """Read a ledger that `tasks.journal.assemble` made."""
    policies = tuple(json.loads(ask(ledger, "SELECT about FROM replay")[0]["about"])["policies"])
    accounts = ask(ledger, "FROM replayed_policies ORDER BY list_position(?, policy)", [policies])
    days = ask(
        ledger,
        "SELECT policy, time_bucket(INTERVAL 1 DAY, instant) AS day, avg(utilization) AS utilization "
        "FROM replayed_hours GROUP BY ALL ORDER BY day",
    )
    forecast = ask(ledger, f"FROM forecast_quality WHERE hours_ahead IN {AHEAD} ORDER BY ALL")
    plans = ask(
        ledger,
        "SELECT policy, count(*) AS plans, avg(jobs) AS jobs, median(solve_ms) AS median_ms, "
        "quantile_cont(solve_ms, 0.95) AS p95_ms, any_value(kept) AS kept, any_value(moved) AS moved, "
        "any_value(moved_share) AS moved_share FROM replayed_solves JOIN changes USING (policy) "
        "GROUP BY policy ORDER BY list_position(?, policy)",
        [policies],
    )
    return Report(
        policies,
        accounts,
        days,
        _waiting(ledger, policies, "priority"),
        _waiting(ledger, policies, "gpus"),
        Table(
            "Forecast",
            ("service", "hours ahead", "slots", "mean error", "mean", "inside .05-.95"),
            [list(row.values()) for row in forecast],
        ),
        Table(
            "Plans, and advised starts that the next hour's plan kept or moved",
            ("policy", "plans", "jobs", "median ms", "p95 ms", "kept", "moved", "moved share"),
            [list(row.values()) for row in plans],
        ),
    )


def _waiting(ledger: Path, policies: tuple[str, ...], by: str) -> Table:
    """Mean hours by priority or GPU count, a column for each policy."""
    found = ask(
        ledger,
        f"SELECT {by}, policy, count(*) AS jobs, avg(wait_s) / 3600 AS wait_h FROM replayed_jobs "
        "WHERE state <> 'rejected' GROUP BY ALL ORDER BY ALL",
    )
    waits = {(row[by], row["policy"]): row["wait_h"] for row in found}
    jobs = {row[by]: row["jobs"] for row in found}
    rows = [[key, count, *(waits.get((key, name)) for name in policies)] for key, count in jobs.items()]
    return Table(f"Mean hours of waiting by {by}", (by, "jobs", *policies), rows)
