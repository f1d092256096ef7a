"""What people see of the hour in the Prefect UI: artifacts under keys that stay the same.

Nothing depends on them: a server that does not take one costs a warning, never a step.
"""

import contextlib
import io
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from allocator.picture import grid
from tasks import ledger
from tasks.allocate import BASELINES, Planned
from tasks.cluster import Site
from tasks.collect import ledger_directory
from tasks.commit import committed_slots
from tasks.forecast import LEVELS, Forecast
from tasks.hour import Hour
from tasks.record import Closed


def show_plan(site: Site, planned: Planned) -> None:
    """`plan`: the grid and a table. `unplaced`: the jobs left out, with reasons."""
    with _at_most_a_warning():
        create_markdown_artifact(
            plan_text(site, planned), key="plan", description="The committed slots, and the day as advised"
        )
    with _at_most_a_warning():
        create_table_artifact(
            unplaced_rows(site, planned), key="unplaced", description="Jobs the plan leaves out, and why"
        )


def show_forecast(site: Site, hour: Hour, made: dict[str, Forecast]) -> None:
    """`forecast`: the coming slots, and the last ones' forecast beside what came."""
    with _at_most_a_warning():
        create_markdown_artifact(
            forecast_text(site, hour, made), key="forecast", description="Forecast against what came"
        )


def show_outcome(site: Site, closed: Closed) -> None:
    """`outcome`: the account of the slot that has passed, beside what the baselines planned for it."""
    with _at_most_a_warning():
        create_markdown_artifact(
            outcome_text(site, closed),
            key="outcome",
            description="Outcome against FIFO, backfill and greedy",
        )


def plan_text(site: Site, planned: Planned) -> str:
    """The plan's figures beside the baselines', its grid, and its starts as a table; Markdown."""
    plan, hour = planned.plan, planned.hour
    committed = committed_slots(planned)
    rows = [
        {
            "job": place.job,
            "start": _local(site, hour.begin + place.start * planned.slot),
            "end": _local(site, hour.begin + place.end * planned.slot),
            "gpus": len(place.gpus),
            "node": ", ".join(dict.fromkeys(planned.gpus[gpu][0].name for gpu in place.gpus)),
            "committed": place.start < committed,
        }
        for place in sorted(plan.placements, key=lambda place: (place.start, place.job))
    ]
    baselines = " · ".join(
        f"{name} {found.value:g} ({found.utilization:.0%})" for name, found in planned.baselines.items()
    )
    return (
        f"# Plan of {_local(site, hour.instant)} ({hour.trigger}, {plan.mode})\n\n"
        f"value **{plan.value:g}**, utilization **{plan.utilization:.0%}**, objective {plan.objective:g}, "
        f"solved in {plan.solve_ms:.1f} ms" + (f"; against {baselines}" if baselines else "") + "\n\n"
        f"```\n{_grid(planned, committed)}\n```\n\n" + _table(rows)
    )


def unplaced_rows(site: Site, planned: Planned) -> list[dict[str, Any]]:
    """The jobs that the plan leaves out: why, and the earliest start that each could get."""
    begin, slot = planned.hour.begin, planned.slot
    return [
        {
            "job": job.job,
            "reason": job.reason,
            "earliest start": ""
            if job.earliest_start is None
            else _local(site, begin + job.earliest_start * slot),
        }
        for job in planned.plan.unplaced
    ]


def forecast_text(site: Site, hour: Hour, made: dict[str, Forecast]) -> str:
    """What each service is expected to want, and how the last forecasts did; Markdown."""
    low, middle, high = 0, LEVELS.index(0.45), len(LEVELS) - 1
    coming = [
        {
            "slot": _local(site, hour.begin + step * site.slot),
            "service": name,
            "low": round(quantiles[low], 2),
            "expected": round(quantiles[middle], 2),
            "high": round(quantiles[high], 2),
        }
        for name, found in made.items()
        for step, quantiles in enumerate(found.quantiles[:24])
    ]
    with ledger.open_ledger(ledger_directory(site)) as connection:
        past = ledger.rows(
            connection,
            "SELECT ts, service, low, expected, high, actual FROM forecast_errors "
            "WHERE step = 0 ORDER BY ts DESC, service LIMIT 24",
        )
    came = [{**row, "ts": _local(site, row["ts"])} for row in past]
    reasons = "\n".join(f"- {name}: {found.method} ({found.reason})" for name, found in made.items())
    return (
        f"# GPUs that services will want, from {_local(site, hour.begin)}\n\n{reasons}\n\n"
        f"{_table(coming)}\n\n## What was expected for the next slot, and what came\n\n{_table(came)}"
    )


def outcome_text(site: Site, closed: Closed) -> str:
    """What a passed slot brought, beside what each policy had planned for it; Markdown."""
    figures = closed.figures
    names = {"planned": "slotwise, planned"} | {name: f"{name}, same inputs" for name in BASELINES}
    rows = [
        {
            "": shown,
            "worth of the work in this slot": figures[f"{name}_slot_value"],
            "utilization in this slot": figures[f"{name}_slot_utilization"],
            "value of the whole plan": figures[f"{name}_value"],
        }
        for name, shown in names.items()
    ]
    rows.append(
        {
            "": "what happened",
            "worth of the work in this slot": figures["worked_value"],
            "utilization in this slot": figures["utilization"],
            "value of the whole plan": None,
        }
    )
    return (
        f"# Slot {_local(site, closed.instant)}\n\n{_table(rows)}\n\n{figures['completed']} jobs completed "
        f"and earned {figures['value']:g}, {figures['failed']} attempts ended otherwise, "
        f"real-time shortage {figures['shortage_gpu_s']:.0f} of "
        f"{figures['demand_gpu_s']:.0f} GPU-seconds wanted"
    )


def _grid(planned: Planned, committed: int) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=110, color_system=None, legacy_windows=False)
    console.print(grid(planned.problem, planned.plan, width=110, committed=committed), highlight=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table; a line that says so when there are none."""
    if not rows:
        return "_none_"
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    lines += [f"| {' | '.join(_cell(row[name]) for name in names)} |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    shown = "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
    return shown.replace("|", "\\|").replace("\n", " ")


def _local(site: Site, instant: datetime) -> str:
    """An instant as people of this cluster read it."""
    return f"{instant.astimezone(ZoneInfo(site.cluster.time_zone)):%Y-%m-%d %H:%M}"


@contextlib.contextmanager
def _at_most_a_warning() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # what people see must not stop what is done
        get_run_logger().warning("no artifact: %s", error)
