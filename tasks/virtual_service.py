"""A stand-in for a serving deployment on virtual GPUs: `python -m tasks.virtual_service chat --cluster
FILE`.

It follows its target as a real service would: new GPUs are taken at once, those taken away are left when
their requests have drained, and after each step it says what it holds. It serves nobody and holds nothing
but the claim. Storage that fails is tried again at the next poll.
"""

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tasks import instants, serving
from tasks.cluster import load_site
from tasks.specfile import SpecError
from tasks.storage import Storage, StorageError, open_storage

Gpu = tuple[str, int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Follow the target until SIGTERM or SIGINT, then hold nothing."""
    parser = argparse.ArgumentParser(prog="python -m tasks.virtual_service", description=__doc__)
    parser.add_argument("name", nargs="?", help="the service")
    parser.add_argument("--service", help="the same")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--storage", help="storage root: a directory or s3://bucket/prefix")
    where.add_argument("--cluster", type=Path, help="cluster file whose storage is used")
    parser.add_argument("--drain-seconds", type=float, default=2.0, help="time that a GPU takes to be left")
    parser.add_argument("--poll-seconds", type=float, default=0.5)
    options = parser.parse_args(arguments)
    name = options.service or options.name
    if not name:
        parser.error("which service? expected a name")
    if not (options.drain_seconds >= 0 and options.poll_seconds > 0):
        parser.error("expected --drain-seconds from 0 up and --poll-seconds above 0")
    try:
        storage = open_storage(options.storage) if options.storage else load_site(options.cluster).storage
    except (SpecError, StorageError) as error:
        print(error, file=sys.stderr)
        return 2
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    follow(storage, name, options.drain_seconds, options.poll_seconds, stop)
    return 0


def follow(
    storage: Storage,
    name: str,
    drain_s: float,
    poll_s: float,
    stop: threading.Event,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Act on each target of the service until `stop` is set."""
    deployment = Deployment(drain_s)
    said: serving.Observed | None = None
    while not stop.is_set():
        said = _say(storage, name, lambda: deployment.step(serving.target(storage, name), clock()), said)
        stop.wait(poll_s)
    _say(storage, name, deployment.shut, said)


class Deployment:
    """The GPUs in use, and those being left with the moment at which they are."""

    def __init__(self, drain_s: float) -> None:
        self.drain_s = drain_s
        self.version = 0
        self.serving: set[Gpu] = set()
        self.draining: dict[Gpu, float] = {}

    def step(self, target: serving.Target, moment: float) -> serving.Observed:
        """Act on the target; what is held after that."""
        if target.version > 0:  # none that can be read: go on as before
            wanted = {(node, gpu) for node, gpus in target.gpus.items() for gpu in gpus}
            for gpu in self.serving - wanted:
                self.draining[gpu] = moment + self.drain_s
            self.version, self.serving = target.version, wanted
        self.draining = {
            gpu: end for gpu, end in self.draining.items() if end > moment and gpu not in self.serving
        }
        return self.observed()

    def shut(self) -> serving.Observed:
        """Leave everything at once, as a process that ends does."""
        self.serving, self.draining = set(), {}
        return self.observed()

    def observed(self) -> serving.Observed:
        """What the service says of itself."""
        gpus: dict[str, set[int]] = {}
        for node, gpu in self.serving | set(self.draining):
            gpus.setdefault(node, set()).add(gpu)
        return serving.Observed(self.version, {node: frozenset(found) for node, found in gpus.items()})


def _say(
    storage: Storage, name: str, act: Callable[[], serving.Observed], said: serving.Observed | None
) -> serving.Observed | None:
    """Act, and say what is held when that is news; what was last said."""
    try:
        found = act()
        if found != said:
            serving.write_observed(storage, name, instants.now(), found)
            holds = "; ".join(f"{node} {sorted(gpus)}" for node, gpus in sorted(found.gpus.items()))
            print(f"{name}: target {found.version}: holds {holds or 'nothing'}", flush=True)
        return found
    except (StorageError, OSError) as error:
        print(f"{name}: {error}; trying again", file=sys.stderr, flush=True)
        return said


if __name__ == "__main__":
    sys.exit(main())
