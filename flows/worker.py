"""The worker of one node: a Prefect worker on the node's queue, and the lease that says the node is alive.

Invariant: the lease is renewed only while the Prefect worker lives, and that worker never outlives this
process, so a node that looks alive takes work and a node that looks lost takes none. This process imports
neither Prefect nor torch: it costs a few tens of megabytes beside the worker's hundred.
"""

import argparse
import contextlib
import ctypes
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from flows.server import ServerError, api_url, client_environment
from tasks.cluster import Site, load_site
from tasks.die_with_parent import PR_SET_PDEATHSIG
from tasks.endings import gone_in_time
from tasks.nodes import lease_key, renew_lease
from tasks.specfile import SpecError
from tasks.storage import StorageError

log = logging.getLogger("slotwise.worker")


class WorkerError(Exception):
    """The worker cannot start; the message is one line for a person."""


def work(site: Site, node: str, url: str | None = None) -> int:
    """Serve the node's queue until told to end; 0 when told (SIGTERM, SIGINT), the child's failure otherwise.

    `url` is the Prefect API's, by default the one that this site's server says or the environment.

    Raises WorkerError when the cluster has no such node or when a worker of this node runs here already, and
    ServerError when no server is known.
    """
    names = [each.name for each in site.cluster.nodes]
    if node not in names:
        raise WorkerError(f"{site.file}: there is no node {node!r}; expected one of {', '.join(names)}")
    directory = site.state / "nodes" / node
    directory.mkdir(parents=True, exist_ok=True)
    with _only_one(directory / "worker.lock", node):
        environment = client_environment(url or api_url(site)) | {
            "SLOTWISE_NODE": node,
            "SLOTWISE_NODE_DIR": str(directory),
        }
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "gpu", "--type", "process"]
        command += ["--work-queue", node, "--name", f"worker-{node}"]
        told: list[int] = []
        previous = {
            number: signal.signal(number, _telling(told)) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            # In a session of its own a Ctrl-C reaches it once, from here, and not also from the terminal.
            child = subprocess.Popen(
                command, env=environment, start_new_session=True, preexec_fn=_die_with_parent
            )
            return _attend(site, node, child, told)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, work, and say in one line what is wrong with it."""
    parser = argparse.ArgumentParser(prog="slotwise worker", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("node")
    parser.add_argument("--cluster", required=True, type=Path)
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        site = load_site(options.cluster)
        return work(site, options.node)
    except (SpecError, ServerError, WorkerError) as error:
        print(error, file=sys.stderr)
        return 2


def _attend(site: Site, node: str, child: subprocess.Popen[bytes], told: list[int]) -> int:
    """Renew the lease while the child lives; pass the wish to end on to it, once."""
    storage, renew_at, passed_on = site.storage, 0.0, False
    while child.poll() is None:
        if told and not passed_on:
            log.info("asked to end; telling the worker of %s", node)
            child.send_signal(signal.SIGTERM)
            passed_on = True
        if time.monotonic() >= renew_at:
            renew_at = time.monotonic() + site.cluster.lease_seconds / 3
            try:
                renew_lease(storage, node)
            except (StorageError, OSError) as error:
                log.warning("the lease of %s could not be renewed: %s", node, error)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.2)
    with contextlib.suppress(StorageError, OSError):  # known as lost at once, not when the lease has aged
        storage.delete(lease_key(node))
    if told:
        return 0
    log.error("the Prefect worker of %s ended with %s", node, child.returncode)
    return child.returncode if child.returncode > 0 else 1


def _telling(told: list[int]) -> Callable[[int, FrameType | None], None]:
    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)
        gone_in_time()  # and the child with it, should storage not answer

    return note


def _die_with_parent() -> None:
    """In the child: the kernel kills it when this process dies, and it alone: what it runs goes on.

    A job's runner holds its own lease and its GPUs' locks; it needs no worker to end well.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _only_one(path: Path, node: str) -> Iterator[None]:
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise WorkerError(
                f"a worker of {node} runs here already (process {lock.read().strip()})"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


if __name__ == "__main__":
    sys.exit(main())
