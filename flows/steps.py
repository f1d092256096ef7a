"""The steps of the hour as Prefect tasks: a name in the UI, retries, and an artifact for what people see.

The work itself is in `tasks`, as plain functions that tests and the replay call without Prefect.
"""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows import artifacts
from flows.orchestration import run_maker
from tasks import allocate as allocating
from tasks import collect as collecting
from tasks import commit as committing
from tasks import dispatch as dispatching
from tasks import expect as expecting
from tasks import instants, ledger
from tasks import record as recording
from tasks import upkeep as keeping
from tasks.allocate import Planned
from tasks.cluster import Site
from tasks.collect import Collected, ledger_directory
from tasks.commit import Committed
from tasks.dispatch import Dispatched
from tasks.forecast import Forecast
from tasks.hour import Degradation, Hour, record_degraded
from tasks.record import Closed


@task(name="collect", retries=2, retry_delay_seconds=[1, 5], cache_policy=NO_CACHE)
def collect(site: Site, hour: Hour) -> Collected:
    """Specs, outcomes, demand and node health into the ledger."""
    found = collecting.collect(site, instants.now(), instants.steady())
    _tell(
        site,
        hour,
        found.problems,
        f"{len(found.received.jobs) + len(found.occurrences)} new jobs, "
        f"{len(found.received.rejected)} rejected, "
        f"{sum(found.samples.values())} demand samples, {len(found.settled)} runs settled",
    )
    return found


@task(name="forecast", retries=2, retry_delay_seconds=[1, 5], cache_policy=NO_CACHE)
def forecast(site: Site, hour: Hour) -> dict[str, Forecast]:
    """Quantiles of each service's demand, for each slot of the horizon."""
    made, problems = expecting.expect(site, hour)
    if hour.trigger == "hourly":
        expecting.record_forecasts(site, hour, made, instants.now())
        artifacts.show_forecast(site, hour, made)
    _tell(site, hour, problems, ", ".join(f"{name}: {found.method}" for name, found in made.items()))
    return made


@task(name="allocate", retries=1, retry_delay_seconds=1, cache_policy=NO_CACHE)
def allocate(site: Site, hour: Hour, expected: dict[str, Forecast], collected: Collected) -> Planned:
    """The best plan of the horizon, beside the baselines'."""
    lost = [name for name, node in collected.nodes.items() if node.state != "ready"]
    planned = allocating.allocate(site, hour, expected, lost)
    plan = planned.plan
    _tell(
        site,
        hour,
        planned.problems,
        f"{plan.mode}: value {plan.value:g}, utilization {plan.utilization:.0%}, "
        f"{len(plan.placements)} placed, {len(plan.unplaced)} not, {plan.solve_ms:.1f} ms",
    )
    return planned


@task(name="commit", retries=3, retry_delay_seconds=[1, 5, 10], cache_policy=NO_CACHE)
def commit(site: Site, planned: Planned) -> Committed:
    """Fix what starts before the next plan."""
    done = committing.commit(site, planned, instants.now())
    ledger.take_in(ledger_directory(site), site.storage, planned.hour.instant.date())
    if done.ours:
        artifacts.show_plan(site, planned)
        get_run_logger().info("committed %s", ", ".join(done.jobs) or "no new start")
    else:
        get_run_logger().warning("%s was there already: another planner was first", done.key)
    return done


@task(name="dispatch", retries=3, retry_delay_seconds=[1, 5, 10], cache_policy=NO_CACHE)
def dispatch(site: Site, hour: Hour) -> Dispatched:
    """Flow runs for committed ranks, targets for services."""
    done = dispatching.dispatch(site, run_maker(site), instants.now())
    _tell(site, hour, done.problems, f"{len(done.created)} runs created, targets {done.targets}")
    return done


@task(name="record", retries=2, retry_delay_seconds=[1, 5], cache_policy=NO_CACHE)
def record(site: Site) -> list[Closed]:
    """Close passed slots and publish the database."""
    closed = recording.record(site, instants.now())
    try:
        keeping.upkeep(site, instants.now())
    except Exception as error:  # it can wait for the next hour
        get_run_logger().warning("upkeep: %s: %s; tried again later", type(error).__name__, error)
    for slot in closed:
        artifacts.show_outcome(site, slot)
        get_run_logger().info("closed slot %s", instants.text(slot.instant))
    return closed


def _tell(site: Site, hour: Hour, problems: list[Degradation], summary: str) -> None:
    """Log what was done, and leave a fact and a warning for each thing that had to give."""
    log = get_run_logger()
    log.info(summary)
    for problem in problems:
        log.warning("%s: %s: %s", problem.step, problem.subject, problem.reason)
    record_degraded(site, hour, problems, instants.now())
