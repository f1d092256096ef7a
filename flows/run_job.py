"""The flow that a GPU worker runs: one rank of a committed job, on this node.

It imports nothing of planning or the ledger: its start is part of every job's time.
"""

import contextlib
import os
import re
import zlib
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.artifacts import create_table_artifact
from prefect.states import Completed, Failed

from flows.orchestration import is_cancelling, request_replan
from tasks import instants
from tasks.facts import FactError
from tasks.runner import Order, Outcome, read_order, run_rank
from tasks.storage import StorageError


@flow(name="run_job", validate_parameters=False)
def run_job(storage: str, commit: str, job: str, rank: int) -> Any:
    """Run the rank; the flow run fails when the rank did not complete. Its outcome is a fact either way."""
    log = get_run_logger()
    try:
        order = read_order(storage, commit, job, rank)
    except (FactError, StorageError) as error:
        return Failed(message=str(error))
    node = os.environ.get("SLOTWISE_NODE")
    if node != order.node["node"]:
        return Failed(message=f"this worker is node {node!r}, the rank belongs to {order.node['node']}")
    outcome = run_rank(order, Path(os.environ["SLOTWISE_NODE_DIR"]), log.info, _cancelled)
    return _finish(order, outcome)


def _finish(order: Order, outcome: Outcome) -> Any:
    if outcome.state is None:
        return Completed(message=outcome.error)
    if order.rank == 0:  # it knows the metrics of a gang
        with contextlib.suppress(Exception):  # what people see must not undo what was done
            _show(order, outcome)
    with contextlib.suppress(Exception):  # the schedule replans anyway
        request_replan(instants.now())
    if outcome.state == "completed":
        return Completed(message="completed")
    return Failed(message=f"{outcome.state}: {outcome.error}")


def _show(order: Order, outcome: Outcome) -> None:
    """`run-<job>`: what became of the run, and where its outputs and its log are."""
    rows: list[dict[str, Any]] = [
        {"figure": name, "value": value} for name, value in run_figures(order, outcome).items()
    ]
    create_table_artifact(
        rows, key=artifact_key(order.job), description=f"{order.job}, attempt {order.attempt}"
    )


def run_figures(order: Order, outcome: Outcome) -> dict[str, Any]:
    """What people see of a run: its state, its metrics, what its levers saved at this node's price."""
    metrics = {name: value for name, value in (outcome.metrics or {}).items() if not isinstance(value, dict)}
    metrics.pop("breakdowns", None)  # of every rank, for programs; people read step_ms
    price, saved = order.node["price_per_gpu_hour"], metrics.get("saved_gpu_hours")
    if price and isinstance(saved, int | float):
        metrics["saved_cost"] = saved * price
    return {
        "state": outcome.state,
        "error": outcome.error or "",
        **metrics,
        "outputs": _link(order.storage.root, f"outputs/{order.job}/"),
        "log": _link(order.storage.root, f"logs/{order.job}/{order.attempt}-{order.rank}.log"),
    }


def artifact_key(job: str) -> str:
    """The key of a job's artifact: its id as far as keys allow, and a mark where that is not the whole id."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")
    return f"run-{plain}" if plain == job else f"run-{plain}-{zlib.crc32(job.encode()):08x}"


def _link(root: str, key: str) -> str:
    """A Markdown link to an object of the storage."""
    url = f"{root}/{key}" if "://" in root else (Path(root) / key).as_uri()
    return f"[{key}]({url})"


def _cancelled() -> bool:
    with contextlib.suppress(Exception):  # no server, no person who cancelled
        return is_cancelling(runtime.flow_run.id)
    return False
