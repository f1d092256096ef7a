"""The hourly flow: collect, forecast, allocate, commit, dispatch, record."""

from datetime import datetime, timedelta

from prefect import flow, get_run_logger, runtime

from flows.steps import allocate, collect, commit, dispatch, forecast, record
from tasks import instants
from tasks.cluster import Site, load_site
from tasks.collect import collect_missed
from tasks.hour import Hour, StaleHourError, planning, present_hour, scheduled_hour
from tasks.storage import exists


def _name() -> str:
    at = runtime.flow_run.parameters.get("instant") or runtime.flow_run.scheduled_start_time.isoformat()
    return f"hourly/{instants.parse(at) + timedelta(seconds=1):%Y-%m-%dT%H:%MZ}"


@flow(name="hourly", flow_run_name=_name, validate_parameters=False)
def hourly(cluster: str, instant: str | None = None) -> str:
    """Plan one hour of the cluster in this file; `instant` (ISO, UTC) names one other than the scheduled."""
    site = load_site(cluster)
    with planning(site):
        try:
            hour = _hour(site, instant)
        except StaleHourError as stale:
            return _missed(site, instant, str(stale))
        collected = collect(site, hour)
        if exists(site.storage, hour.commit_key):
            get_run_logger().info("%s is committed; repairing what was not dispatched", hour.commit_key)
        else:
            expected = forecast(site, hour)
            planned = allocate(site, hour, expected, collected)
            commit(site, planned)
        dispatch(site, hour)
        record(site)
    return f"slot {instants.text(hour.instant)} is committed"


def _hour(site: Site, instant: str | None) -> Hour:
    """The hour named, or the scheduled one (not the clock's: a run can start early, or late), or now."""
    if instant is not None:
        return scheduled_hour(site, instants.parse(instant), instants.now())
    if "auto-scheduled" in runtime.flow_run.tags:
        return scheduled_hour(site, _scheduled(), instants.now())
    return present_hour(site, instants.now(), "hourly")


def _missed(site: Site, instant: str | None, reason: str) -> str:
    get_run_logger().warning(reason)
    at = instants.parse(instant) if instant is not None else _scheduled()
    collect_missed(site, at, reason, instants.now())
    record(site)
    return f"missed: {reason}"


def _scheduled() -> datetime:
    scheduled: datetime = runtime.flow_run.scheduled_start_time
    return instants.parse(scheduled.isoformat())
