"""What Slotwise asks of Prefect: flow runs for ranks, and a replan when a run has ended."""

from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun as PrefectFlowRun
from prefect.states import Scheduled

from tasks.cluster import Site
from tasks.dispatch import FlowRun

RUN_JOB, REPLAN = "run_job/run_job", "replan/replan"


class Orchestrator:
    """A connection to the Prefect server, for one flow run."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._deployments: dict[str, Any] = {}

    def ensure_run(self, rank: dict[str, Any]) -> FlowRun:
        """The flow run of a rank: made on its node's queue for its start, or found by its idempotency key."""
        with get_client(sync_client=True) as client:
            run = client.create_flow_run_from_deployment(
                self._deployment(client, RUN_JOB),
                name=f"{rank['job']}/{rank['attempt']}/{rank['node']}",
                parameters={
                    "storage": self.site.storage_root,
                    "commit": rank["key"],
                    "job": rank["job"],
                    "rank": rank["rank"],
                },
                state=Scheduled(scheduled_time=rank["start_at"]),
                tags=[f"job:{rank['job']}", f"node:{rank['node']}", f"kind:{rank['kind']}"],
                idempotency_key=f"{rank['job']}/{rank['attempt']}/{rank['rank']}",
                work_queue_name=rank["node"],
            )
        return FlowRun(str(run.id), _is_over(run))

    def _deployment(self, client: SyncPrefectClient, name: str) -> Any:
        if name not in self._deployments:
            self._deployments[name] = client.read_deployment_by_name(name).id
        return self._deployments[name]


def request_replan(key: str) -> None:
    """Ask for a replan, once for each key."""
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(REPLAN)
        client.create_flow_run_from_deployment(deployment.id, idempotency_key=key)


def is_cancelling(flow_run_id: str) -> bool:
    """Whether a person asked Prefect to cancel this run."""
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run_id).state  # type: ignore[arg-type]
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def _is_over(run: PrefectFlowRun) -> bool:
    return run.state is not None and run.state.is_final()
