"""The hour that is planned: which instant, from when to when, and who may plan it.

Invariant: one planner at a time on this machine (a file lock, which dies with its holder), and one commitment
for an instant (the key of its fact). A slot that nobody planned before the next one began is recorded as
missed.
"""

import contextlib
import fcntl
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from tasks.cluster import Site
from tasks.facts import fact_key, write_fact
from tasks.instants import floor, text
from tasks.secrets import redacted
from tasks.storage import exists

Trigger = Literal["hourly", "replan"]
SCHEDULED_PLAN_GRACE = timedelta(minutes=2)


@dataclass(frozen=True)
class Hour:
    """One planning moment.

    `instant` names it, and its commitment; slot 0 of the problem starts at `begin`, which is later than the
    instant only when the planner is late by whole slots; what starts before `until`, the next plan, is
    committed.
    """

    instant: datetime
    begin: datetime
    until: datetime
    trigger: Trigger

    @property
    def commit_key(self) -> str:
        """Key of the commitment that this hour makes, if no one has."""
        return fact_key("commit", self.instant, text(self.instant))


@dataclass(frozen=True)
class Degradation:
    """A step that did less than it should have, and why."""

    step: str
    subject: str
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", redacted(self.reason))


class StaleHourError(Exception):
    """The slot has passed; the message says by how much."""


def scheduled_hour(site: Site, scheduled: datetime, now: datetime) -> Hour:
    """The hour of a run that was scheduled for `scheduled` (a run may start a little before or long after).

    Raises StaleHourError when the next plan's instant has come.
    """
    instant = floor(scheduled + timedelta(seconds=1), site.cluster.plan_every_minutes)
    until = instant + site.plan_every
    if now >= until:
        raise StaleHourError(f"slot {text(instant)} ended at {text(until)}, it is {text(now)}: not planned")
    late = max(now - instant, timedelta(0)) // site.slot
    return Hour(instant, instant + late * site.slot, until, "hourly")


def present_hour(site: Site, now: datetime, trigger: Trigger) -> Hour:
    """An hour that begins at this second and lasts until the next scheduled plan.

    The instant of a scheduled plan is that plan's own: a re-plan in the same second is named one later.
    """
    instant = now.replace(microsecond=0)
    scheduled = floor(instant, site.cluster.plan_every_minutes)
    if trigger == "replan" and instant == scheduled:
        instant += timedelta(seconds=1)
    return Hour(instant, instant, scheduled + site.plan_every, trigger)


def scheduled_plan_is_due(site: Site, now: datetime) -> bool:
    """Whether the scheduled plan of this moment is about to be committed: a re-plan must not come before it.

    After two minutes it is given up, so that ended runs make room for others though no hour is planned.
    """
    instant = floor(now, site.cluster.plan_every_minutes)
    if now - instant >= SCHEDULED_PLAN_GRACE:
        return False
    return not exists(site.storage, scheduled_hour(site, instant, now).commit_key)


@contextlib.contextmanager
def planning(site: Site, wait: bool = True) -> Iterator[bool]:
    """Hold the planner's lock. Yields False, at once, when `wait` is false and another planner is at work."""
    site.state.mkdir(parents=True, exist_ok=True)
    with (site.state / "planning.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def record_missed(site: Site, scheduled: datetime, reason: str, now: datetime) -> None:
    """Leave the fact that a slot was not planned. Doing it again changes nothing."""
    instant = floor(scheduled + timedelta(seconds=1), site.cluster.plan_every_minutes)
    key = fact_key("missed", instant, text(instant))
    write_fact(site.storage, key, now, {"instant": text(instant), "reason": reason})


def record_degraded(site: Site, hour: Hour, problems: list[Degradation], now: datetime) -> None:
    """Leave a fact for each step that did less than it should have."""
    storage = site.storage
    for problem in problems:
        crc = zlib.crc32(f"{problem.subject}: {problem.reason}".encode(errors="replace"))
        name = f"{problem.step}.{crc:08x}"
        body = {
            "instant": text(hour.instant),
            "step": problem.step,
            "subject": problem.subject,
            "reason": problem.reason,
        }
        write_fact(storage, fact_key("degraded", hour.instant, text(hour.instant), name), now, body)
