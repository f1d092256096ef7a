"""A start that people were told is put off only for a gain of more than `move_cost`."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tasks.allocate import allocate, build_problem, read_state
from tasks.cluster import Site
from tasks.collect import collect
from tasks.hour import present_hour, scheduled_hour
from tasks.instants import floor, now
from tests.conftest import make_site
from tests.tasks.planned_hours import Runs, answer, begin, plan_hour, submit

HOUR = floor(now(), 60) + timedelta(hours=1)  # the ledger's views judge deadlines by the machine's clock
NEXT = HOUR + timedelta(hours=1)
NODE = [{"name": "node0", "gpus": 4}]


def announce(directory: Path, **fields: Any) -> Site:
    """A site on which `told` waits for three hours of `runs`, as the hour's plan said."""
    site = make_site(directory, full_mode_seconds=0, nodes=NODE, **fields)
    submit(site, "runs", gpus=4, duration="3h", priority=9)
    submit(site, "told", gpus=4, duration="1h", priority=2)
    answer(site, HOUR)
    runs = Runs()
    plan_hour(site, HOUR, runs)
    begin(site, runs.made["runs/1/0"], HOUR)
    return site


@pytest.mark.parametrize(("move_cost", "first"), [(0, "newer"), (11, "newer"), (13, "told")])
def test_a_job_of_more_worth_goes_first_when_it_gains_more_than_the_move_costs(
    tmp_path: Path, move_cost: float, first: str
) -> None:
    site = announce(tmp_path, move_cost=move_cost)
    # Worth 12, and a long run of it could miss its deadline if it began later than `told` was to begin.
    deadline = NEXT + timedelta(hours=4)
    submit(site, "newer", gpus=4, duration="1h", priority=3, deadline=deadline.isoformat())
    answer(site, NEXT)
    collect(site, NEXT)
    planned = allocate(site, scheduled_hour(site, NEXT, NEXT), {}, [])
    assert next(place.job for place in planned.plan.placements if place.start == 12) == first


def test_of_two_that_both_can_go_the_one_that_was_announced_goes_first(tmp_path: Path) -> None:
    site = announce(tmp_path, move_cost=0.1)
    submit(site, "newer", gpus=4, duration="1h", priority=3)
    answer(site, NEXT)
    collect(site, NEXT)
    planned = allocate(site, scheduled_hour(site, NEXT, NEXT), {}, [])
    starts = {place.job: place.start for place in planned.plan.placements}
    assert starts == {"runs": 0, "told": 12, "newer": 18}


def test_a_replan_goes_by_what_the_hour_announced_rounded_up_to_its_own_slots(tmp_path: Path) -> None:
    site = announce(tmp_path, move_cost=1)
    state = read_state(site, HOUR + timedelta(minutes=25))
    assert state.announced == {"runs": HOUR, "told": HOUR + timedelta(hours=3)}
    hour = present_hour(site, HOUR + timedelta(minutes=25), "replan")
    jobs = {job.id: job for job in build_problem(site, hour, state, {}, set(), []).jobs}
    assert jobs["told"].announced is not None
    assert jobs["told"].announced.start == 16  # 155 minutes, in slots of ten
    assert jobs["runs"].announced is None


def test_nothing_is_announced_where_moves_are_free(tmp_path: Path) -> None:
    site = announce(tmp_path)
    assert read_state(site, NEXT).announced == {}
