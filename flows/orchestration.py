"""What Slotwise asks of Prefect: flow runs for ranks, and a replan when a run has ended."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.states import Scheduled

from tasks.cluster import Site

if TYPE_CHECKING:
    from tasks.dispatch import FlowRun

RUN_JOB, REPLAN = "run_job/run_job", "replan/replan"


def run_maker(client: SyncPrefectClient, site: Site) -> "Callable[[dict[str, Any]], FlowRun]":
    """A function from a rank to its flow run, made on its node's queue for its start.

    The idempotency key is the rank's own, so that a run which exists is found instead.
    """

    from tasks.dispatch import FlowRun  # brings the ledger, which a node's run_job does without

    @cache
    def deployment() -> UUID:
        return client.read_deployment_by_name(RUN_JOB).id

    def ensure_run(rank: dict[str, Any]) -> "FlowRun":
        run = client.create_flow_run_from_deployment(
            deployment(),
            name=f"{rank['job']}/{rank['attempt']}/{rank['node']}",
            parameters={
                "storage": site.storage_root,
                "commit": rank["key"],
                "job": rank["job"],
                "rank": rank["rank"],
            },
            state=Scheduled(scheduled_time=rank["start_at"]),
            tags=[f"job:{rank['job']}", f"node:{rank['node']}", f"kind:{rank['kind']}"],
            idempotency_key=f"{rank['job']}/{rank['attempt']}/{rank['rank']}",
            work_queue_name=rank["node"],
        )
        return FlowRun(str(run.id), run.state is not None and run.state.is_final())

    return ensure_run


def request_replan(now: datetime) -> None:
    """Ask for a replan within ten seconds; all who ask within the same ten seconds share one."""
    moment = datetime.fromtimestamp((int(now.timestamp()) // 10 + 1) * 10, UTC)
    with get_client(sync_client=True) as client:
        client.create_flow_run_from_deployment(
            client.read_deployment_by_name(REPLAN).id,
            state=Scheduled(scheduled_time=moment),
            idempotency_key=f"requested/{moment.isoformat()}",
        )


def is_cancelling(flow_run_id: str) -> bool:
    """Whether a person asked Prefect to cancel this run."""
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(flow_run_id)).state
    return state is not None and (state.is_cancelling() or state.is_cancelled())
