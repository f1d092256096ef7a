"""Waiting raises what plans see in a job, where the cluster file says so, and never what is recorded."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tasks.allocate import allocate, build_problem, read_state
from tasks.collect import collect
from tasks.hour import scheduled_hour
from tests.conftest import make_site
from tests.tasks.planned_hours import answer, ask, submit

HOUR = datetime(2026, 12, 3, 6, tzinfo=UTC)
NODE = [{"name": "node0", "gpus": 4}]


@pytest.mark.parametrize(("ageing", "first"), [(0, "fresh"), (0.2, "fresh"), (1, "patient")])
def test_a_job_that_has_waited_two_days_goes_first_when_its_worth_has_risen_enough(
    tmp_path: Path, ageing: float, first: str
) -> None:
    site = make_site(tmp_path, full_mode_seconds=0, ageing_per_day=ageing, nodes=NODE)
    submit(site, "patient", gpus=4, priority=2)
    collect(site, HOUR - timedelta(days=2))
    submit(site, "fresh", gpus=4, priority=3)
    answer(site, HOUR)
    collect(site, HOUR)
    planned = allocate(site, scheduled_hour(site, HOUR, HOUR), {}, [])
    assert next(one.job for one in planned.plan.placements if one.start == 0) == first
    assert planned.plan.value == 4 * (2 + 3)
    assert ask(site, "SELECT value FROM jobs WHERE job = 'patient'")[0]["value"] == 4 * 2


def test_a_job_has_not_waited_before_its_release(tmp_path: Path) -> None:
    site = make_site(tmp_path, ageing_per_day=1)
    submit(site, "later")
    collect(site, HOUR - timedelta(days=2))
    state = read_state(site, HOUR)
    state.queued[0]["release_at"] = HOUR - timedelta(hours=1)
    (job,) = build_problem(site, scheduled_hour(site, HOUR, HOUR), state, {}, set(), []).jobs
    assert job.waited == 6  # slots of ten minutes
