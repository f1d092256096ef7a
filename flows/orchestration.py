"""What Slotwise asks of Prefect: flow runs for ranks, and a replan when a run has ended.

Over `prefect_api`, which tries again within tenths of a second when SQLite is locked: Prefect's own client
waits two seconds, then four, and an hour that makes twenty runs took half a minute.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from prefect.settings import get_current_settings

from flows.prefect_api import call
from tasks.cluster import Site
from tasks.instants import text

if TYPE_CHECKING:
    from tasks.dispatch import FlowRun

RUN_JOB, REPLAN = "run_job/run_job", "replan/replan"
OVER = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def run_maker(site: Site) -> "Callable[[dict[str, Any]], FlowRun]":
    """A function from a rank to its flow run, made on its node's queue for its start.

    The idempotency key is the rank's own, so that a run which exists is found instead. Raises ApiError.
    """

    from tasks.dispatch import FlowRun  # brings the ledger, which a node's run_job does without

    @cache
    def deployment() -> str:
        return _deployment(RUN_JOB)

    def ensure_run(rank: dict[str, Any]) -> "FlowRun":
        run = _create(
            deployment(),
            rank["start_at"],
            f"{rank['job']}/{rank['attempt']}/{rank['rank']}",
            name=f"{rank['job']}/{rank['attempt']}/{rank['node']}",
            parameters={
                "storage": site.storage_root,
                "commit": rank["key"],
                "job": rank["job"],
                "rank": rank["rank"],
            },
            tags=[f"job:{rank['job']}", f"node:{rank['node']}", f"kind:{rank['kind']}"],
            work_queue_name=rank["node"],
        )
        return FlowRun(run["id"], run["state"] is not None and run["state"]["type"] in OVER)

    return ensure_run


def request_replan(now: datetime) -> None:
    """Ask for a replan within ten seconds; all who ask within the same ten seconds share one."""
    moment = datetime.fromtimestamp((int(now.timestamp()) // 10 + 1) * 10, UTC)
    _create(_deployment(REPLAN), moment, f"requested/{moment.isoformat()}")


def is_cancelling(flow_run_id: str) -> bool:
    """Whether a person asked Prefect to cancel this run."""
    state = call(_url(), "GET", f"/flow_runs/{flow_run_id}")["state"]
    return state is not None and state["type"] in ("CANCELLING", "CANCELLED")


def _create(deployment: str, at: datetime, key: str, **fields: Any) -> dict[str, Any]:
    """The flow run of this idempotency key, made if there is none."""
    state = {"type": "SCHEDULED", "state_details": {"scheduled_time": text(at)}}
    body = {"state": state, "idempotency_key": key, **fields}
    made: dict[str, Any] = call(_url(), "POST", f"/deployments/{deployment}/create_flow_run", body)
    return made


def _deployment(name: str) -> str:
    return str(call(_url(), "GET", f"/deployments/name/{name}")["id"])


def _url() -> str:
    url = get_current_settings().api.url
    if url is None:
        raise RuntimeError("PREFECT_API_URL is not set")
    return url
