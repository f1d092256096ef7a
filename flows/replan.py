"""The light flow between hours: commit what fits when a run ends, a node changes, demand exceeds a target.

It moves nothing that has started or is committed, and stands aside when another planner is at work or due.
"""

from prefect import flow, get_run_logger

from flows.steps import allocate, collect, commit, dispatch, forecast, record
from tasks import instants
from tasks.cluster import load_site
from tasks.hour import planning, present_hour, scheduled_plan_is_due
from tasks.replan import reasons_to_replan


@flow(name="replan", validate_parameters=False)
def replan(cluster: str) -> str:
    """Bring the commitment of the current hour up to date, if something has happened."""
    site = load_site(cluster)
    with planning(site, wait=False) as alone:
        if not alone:
            return "another planner is at work"
        if scheduled_plan_is_due(site, instants.now()):
            return "the scheduled plan comes first"
        hour = present_hour(site, instants.now(), "replan")
        collected = collect(site, hour)
        reasons = reasons_to_replan(site)
        if reasons:
            get_run_logger().info("; ".join(reasons))
            expected = forecast(site, hour)
            planned = allocate(site, hour, expected, collected)
            commit(site, planned)
        dispatch(site, hour)
        record(site)
    return "; ".join(reasons) or "nothing has changed"
