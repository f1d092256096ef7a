"""Replays: every policy on the same recorded load, side by side in processes, and the ledger of them all.

Invariant: policies share nothing but their inputs, which are made once: the checked trace and the forecasts.
The ledger and the figures appear whole at the end, or not at all; no policy's process outlives the replay.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flows.processes import exit_when_told
from tasks.cluster import Site
from tasks.die_with_parent import PR_SET_PDEATHSIG
from tasks.forecast_table import make_forecasts
from tasks.instants import text
from tasks.journal import Journal, assemble
from tasks.outages import node_events
from tasks.policies import POLICIES
from tasks.replay import Inputs, replay
from tasks.trace import TraceError, read_trace

FIGURES = (
    "value",
    "utilization",
    "completed",
    "shortage_gpu_slots",
    "demand_gpu_slots",
    "mean_wait_s",
    "seconds",
)


@dataclass(frozen=True)
class Order:
    """What to replay.

    Attributes:
        start_s, days: the window, see `tasks.trace.read_trace`.
        failures: a file (node, from_s, to_s) or the mean days between failures of a node; None for none.
        processes: policies that run at a time.
    """

    site: Site
    jobs: Path
    demand: Path | None
    policies: tuple[str, ...]
    start_s: float | None = None
    days: float | None = None
    seed: int = 0
    failures: str | None = None
    processes: int = 2


@dataclass(frozen=True)
class Replayed:
    """What came of it: the accounts by policy, and what was replayed."""

    accounts: dict[str, dict[str, Any]]
    about: dict[str, Any]

    def figures(self) -> dict[str, dict[str, Any]]:
        """The figures of each policy, as the JSON file holds them."""
        return {
            name: {
                **{key: account[key] for key in FIGURES},
                **{key: value for key, value in account.items() if key not in (*FIGURES, "policy")},
            }
            for name, account in self.accounts.items()
        }


@exit_when_told()
def run_replays(order: Order, ledger: Path) -> Replayed:
    """Replay the policies and leave the ledger. Raises TraceError for input that cannot be used."""
    for name in order.policies:
        if name not in POLICIES:
            raise TraceError(f"--policies: {name!r}; expected some of {', '.join(POLICIES)}")
    if not order.policies:
        raise TraceError(f"--policies: nothing named; expected some of {', '.join(POLICIES)}")
    ledger.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".replay-", dir=ledger.parent) as folder_name:
        folder = Path(folder_name)
        cluster = order.site.cluster
        trace = read_trace(order.jobs, order.demand, cluster, folder, order.start_s, order.days)
        shared = Journal(folder / "shared")
        forecasts = make_forecasts(order.site, trace, folder, shared)
        shared.close()
        inputs = Inputs(
            order.site,
            trace,
            forecasts,
            node_events(order.failures, order.site.cluster, trace, order.seed),
            order.seed,
        )
        folders = {name: folder / f"policy-{name}" for name in dict.fromkeys(order.policies)}
        accounts = _side_by_side(inputs, folders, order.processes)
        about = {
            "cluster": cluster.name,
            "gpus": sum(node.gpus for node in cluster.nodes),
            "slot_minutes": cluster.slot_minutes,
            "begin": text(trace.begin),
            "days": trace.seconds / 86400,
            "jobs": trace.jobs,
            "jobs_outside_window": trace.outside,
            "node_failures": sum(event.lost for event in inputs.nodes),
            "seed": order.seed,
            "policies": list(folders),
        }
        assemble(ledger, folders, shared.folder, trace.jobs_file, about)
    return Replayed(accounts, about)


def title(done: Replayed) -> str:
    """What was replayed, in a line."""
    about = done.about
    return (
        f"{about['cluster']}: {about['days']:g} days from {about['begin']}, {about['jobs']} jobs on "
        f"{about['gpus']} GPUs, seed {about['seed']}"
        + (f", {about['node_failures']} node failures" if about["node_failures"] else "")
    )


def _side_by_side(inputs: Inputs, folders: dict[str, Path], processes: int) -> dict[str, dict[str, Any]]:
    if processes == 1 or len(folders) == 1:
        return {name: _replay_one(inputs, name, folder) for name, folder in folders.items()}
    # Not forked: the caller may have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(folders)), context, _die_with, (os.getpid(),)) as pool:
        # Those that search go first: they take longest.
        searching_first = sorted(folders, key=lambda name: not POLICIES[name].searches)
        running = {name: pool.submit(_replay_one, inputs, name, folders[name]) for name in searching_first}
        try:
            return {name: running[name].result() for name in folders}
        except (SystemExit, KeyboardInterrupt):  # told to end: nobody waits for the rest
            for child in multiprocessing.active_children():
                child.kill()
            raise


def _die_with(parent: int) -> None:
    """In a policy's process: the kernel kills it when the replay dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was told
        sys.exit(1)


def _replay_one(inputs: Inputs, policy: str, folder: Path) -> dict[str, Any]:
    journal = Journal(folder)
    account = replay(inputs, POLICIES[policy], journal)
    journal.close()
    return account
