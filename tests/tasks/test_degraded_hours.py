"""Hours in which something does not work: its step degrades, people are told, and the hour goes on."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import allocator
from tasks import full_mode
from tasks.instants import text
from tasks.serving import target
from tasks.tournament import BUILT_IN, OURS
from tests.conftest import make_site
from tests.tasks.local_server import Asked, Reply, local_server
from tests.tasks.planned_hours import CHAT, Done, Runs, answer, ask, plan_hour, submit

HOUR = datetime(2026, 12, 1, 6, tzinfo=UTC)


def told(done: Done) -> list[tuple[str, str]]:
    """Step and subject of each thing that had to give."""
    return [(problem.step, problem.subject) for problem in done.problems]


def a_mode_fails(monkeypatch: pytest.MonkeyPatch, failing: str, error: Exception) -> None:
    """Let the allocator raise this in one mode."""
    solve = allocator.solve

    def solves(problem: allocator.Problem, mode: Any = "fast", **options: Any) -> allocator.Plan:
        if mode == failing:
            raise error
        return solve(problem, mode, **options)

    monkeypatch.setattr(allocator, "solve", solves)


def test_a_failing_demand_source_degrades_its_step_and_the_hour_goes_on(tmp_path: Path) -> None:
    site, runs = make_site(tmp_path, services=[CHAT], full_mode_seconds=0), Runs()
    answer(site, HOUR)
    submit(site, "a")
    done = plan_hour(site, HOUR, runs)  # there is no demand.csv
    assert done.planned and "a/1/0" in runs.made
    told = ask(site, "SELECT step, subject, reason FROM degradations")
    assert [(row["step"], row["subject"]) for row in told] == [("collect", "chat")]
    assert "demand.csv" in told[0]["reason"]
    assert target(site.storage, "chat").gpus  # the stated mean still gets its GPUs


def test_a_forecaster_that_fails_leaves_its_last_forecast_and_the_hour_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, runs = make_site(tmp_path, services=[CHAT], full_mode_seconds=0), Runs()
    (site.file.parent / "demand.csv").write_text(f"ts,y\n{text(HOUR - timedelta(hours=1))},3\n")
    answer(site, HOUR)
    plan_hour(site, HOUR, runs)

    def fails(*_: object) -> Any:
        raise ArithmeticError("a fault")

    monkeypatch.setitem(BUILT_IN, OURS, fails)
    later = HOUR + timedelta(hours=1)
    answer(site, later)
    submit(site, "a")
    done = plan_hour(site, later, runs)
    assert list(runs.made) == ["a/1/0"]
    assert told(done) == [("forecast", "chat")]
    assert done.problems[0].reason == "ArithmeticError: a fault; using last known"
    before, after = (
        ask(
            site, f"SELECT ts, quantiles FROM forecasts WHERE instant = '{text(at)}' AND ts > '{text(later)}'"
        )
        for at in (HOUR, later)
    )
    assert before and after[: len(before)] == before


def test_a_baseline_that_fails_is_told_and_the_hour_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, runs = make_site(tmp_path, full_mode_seconds=0), Runs()
    a_mode_fails(monkeypatch, "fifo", ValueError("a fault"))
    answer(site, HOUR)
    submit(site, "a")
    done = plan_hour(site, HOUR, runs)
    assert list(runs.made) == ["a/1/0"]
    assert [(p.step, p.subject, p.reason) for p in done.problems] == [
        ("allocate", "fifo", "ValueError: a fault")
    ]
    (plan,) = ask(site, "SELECT fifo_value, backfill_value FROM plans")
    assert plan["fifo_value"] is None and plan["backfill_value"] is not None


def test_full_mode_that_fails_leaves_the_fast_plan_and_the_hour_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_mode, "SOLVER", ("-c", "import sys; sys.exit('the solver is not there')"))
    site, runs = make_site(tmp_path, full_mode_seconds=1), Runs()
    answer(site, HOUR)
    submit(site, "a")
    done = plan_hour(site, HOUR, runs)
    assert list(runs.made) == ["a/1/0"]
    assert told(done) == [("allocate", "full mode")]
    assert done.problems[0].reason == "exit 1: the solver is not there; the fast plan stands"
    assert ask(site, "SELECT mode FROM plans") == [{"mode": "fast"}]


def test_a_service_whose_webhook_refuses_holds_up_nobody_else(tmp_path: Path) -> None:
    def refuses(_: Asked) -> Reply:
        return 503, b"busy"

    with local_server(refuses) as deployment:
        shy = {**CHAT, "name": "shy", "target": {"webhook": deployment.url}, "demand": {**CHAT["demand"]}}
        site, runs = make_site(tmp_path, services=[shy, CHAT], full_mode_seconds=0), Runs()
        (site.file.parent / "demand.csv").write_text(f"ts,y\n{text(HOUR - timedelta(hours=1))},1\n")
        answer(site, HOUR)
        submit(site, "a")
        done = plan_hour(site, HOUR, runs)
        assert deployment.asked
    assert list(runs.made) == ["a/1/0"]
    assert told(done) == [("dispatch", "shy")]
    assert "was not taken" in done.problems[0].reason and "503" in done.problems[0].reason
    assert target(site.storage, "chat").gpus and target(site.storage, "shy").gpus
