"""Make a site's work pools, queues and deployments on a running Prefect server, in one process.

The deployments are defined in a prefect.yaml and made by Prefect's own `deploy` command, run in here: what
`prefect deploy --all --prefect-file deployments/prefect.yaml` would do, without a start of its own.
Idempotent; making a deployment again also drops its scheduled runs that never started: an outage leaves no
backlog.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tasks.cluster import Site, load_site
from tasks.specfile import SpecError

if TYPE_CHECKING:
    from prefect.events.schemas.automations import AutomationCore

POOLS = ("control", "gpu")
HEARTBEAT_S = 30
SILENT_RUNS = "runs that fell silent"


def main(arguments: Sequence[str] | None = None) -> int:
    """Wait for the server that PREFECT_API_URL names, then deploy. The last line says `deployed`."""
    parser = argparse.ArgumentParser(prog="python -m flows.deploy", description=__doc__)
    parser.add_argument("--cluster", required=True, type=Path)
    parser.add_argument("--file", required=True, type=Path, help="a prefect.yaml")
    parser.add_argument("--wait", type=float, default=120.0, help="seconds to wait for the server")
    options = parser.parse_args(arguments)
    try:
        site = load_site(options.cluster)
    except SpecError as error:
        print(error, file=sys.stderr)
        return 2
    asyncio.run(prepare(site, options.wait))
    rendered = site.state / "run" / "prefect.yaml"
    rendered.write_text(with_periods(options.file.read_text(), site))
    deploy(rendered)
    print("deployed")
    return 0


async def prepare(site: Site, wait_s: float = 0.0) -> None:
    """Pool `control` for planning, pool `gpu` with a queue for each node. Changes none that exists.

    Also an automation that marks a run as crashed when both its process and its worker died unseen.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    deadline = time.monotonic() + wait_s
    async with get_client() as client:
        while await client.api_healthcheck() is not None and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        for pool in POOLS:
            with contextlib.suppress(ObjectAlreadyExists):
                await client.create_work_pool(
                    WorkPoolCreate(name=pool, type="process", base_job_template=template)
                )
        for node in site.cluster.nodes:
            with contextlib.suppress(ObjectAlreadyExists):
                await client.create_work_queue(name=node.name, work_pool_name="gpu")
        if not await client.read_automations_by_name(SILENT_RUNS):
            await client.create_automation(_silent_runs())


def _silent_runs() -> "AutomationCore":
    """A run that has sent heartbeats and then nothing, not even its end, for three of them."""
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
    from prefect.events.schemas.events import ResourceSpecification

    ends = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Crashed", "Cancelled")}
    heartbeat = "prefect.flow-run.heartbeat"
    trigger = EventTrigger(
        match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
        for_each={"prefect.resource.id"},
        after={heartbeat},
        expect={heartbeat, *ends},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=3 * HEARTBEAT_S),
    )
    message = f"no heartbeat for {3 * HEARTBEAT_S} s: its process and its worker are gone"
    action = ChangeFlowRunState(name=None, state=StateType.CRASHED, message=message, force=False)
    return AutomationCore(name=SILENT_RUNS, description=message, trigger=trigger, actions=[action])


def with_periods(text: str, site: Site) -> str:
    """A prefect.yaml with the site's own periods in its schedules: Prefect takes no variable there."""
    periods = {"hourly": site.cluster.plan_every_minutes * 60, "replan": site.cluster.replan_every_seconds}
    content = yaml.safe_load(text)
    for deployment in content["deployments"]:
        for schedule in deployment.get("schedules") or ():
            if "interval" in schedule and deployment["name"] in periods:
                schedule["interval"] = periods[deployment["name"]]
    return yaml.safe_dump(content, sort_keys=False)


def deploy(prefect_file: Path) -> None:
    """Run Prefect's own deploy command in this process. Raises SystemExit when it fails."""
    from prefect.cli import app

    command = sys.argv
    sys.argv = ["prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(prefect_file)]
    try:
        app()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.argv = command


if __name__ == "__main__":
    sys.exit(main())
