"""The processes of one run: who this one is, and how several are started on one machine.

Invariant: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT mean what torchrun makes them mean, so
a run works under torchrun too. `launch` is used in its place because it hands on a worker's own exit code
and a SIGTERM within seconds, where torchrun answers 1 after a report of many lines; it restarts nothing,
which is its caller's work.
"""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

RENDEZVOUS = timedelta(minutes=5)


@dataclass(frozen=True)
class World:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1  # processes of the run on this node


def world_from_environment(environment: Mapping[str, str] = os.environ) -> World:
    """Who this process is; alone when nothing is said."""
    return World(
        int(environment.get("RANK", 0)),
        int(environment.get("WORLD_SIZE", 1)),
        int(environment.get("LOCAL_RANK", 0)),
        int(environment.get("LOCAL_WORLD_SIZE", 1)),
    )


@contextlib.contextmanager
def joined(world: World, device: "torch.device") -> Iterator[None]:
    """Hold the process group of a run with more than one process; one that is held already serves."""
    if world.size == 1:
        yield
        return
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    if (
        os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost", "::1")
        and Path("/sys/class/net/lo").exists()
    ):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",  # checkpoints are agreed on over gloo
        timeout=RENDEZVOUS,
        rank=world.rank,
        world_size=world.size,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def launch(
    command: Sequence[str], processes: int, environment: Mapping[str, str], node_rank: int, nodes: int
) -> int:
    """Run copies of a command as this node's part of a world; 0, or the first failure's exit code.

    When one fails the others are ended. SIGTERM is handed on. Must be called from the main thread.
    """
    children: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)

    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        for local in range(processes):
            own = {
                "RANK": str(node_rank * processes + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(nodes * processes),
                "LOCAL_WORLD_SIZE": str(processes),
            }
            children.append(subprocess.Popen(command, env={**environment, **own}))
        return _first_failure(children)
    finally:
        signal.signal(signal.SIGTERM, before)
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def run_quietly(command: Sequence[str], processes: int, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run copies of a command as a whole world on this machine, from any thread.

    0 or the first failure's exit code, and what they wrote to stderr.
    """
    with tempfile.TemporaryFile("w+") as said:
        children = []
        try:
            for local in range(processes):
                own = {
                    "RANK": str(local),
                    "LOCAL_RANK": str(local),
                    "WORLD_SIZE": str(processes),
                    "LOCAL_WORLD_SIZE": str(processes),
                }
                children.append(
                    subprocess.Popen(
                        command, env={**environment, **own}, stdout=subprocess.DEVNULL, stderr=said
                    )
                )
            code = _first_failure(children)
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.wait()
        said.seek(0)
        return code, said.read()


def free_port() -> int:
    """A port that nothing listens on, for a run on this machine alone."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def _first_failure(children: "list[subprocess.Popen[bytes]]") -> int:
    code = 0
    while running := [child for child in children if child.poll() is None]:
        code = next((found for child in children if (found := child.poll())), 0)
        if code:
            for child in running:
                child.terminate()
            deadline = time.monotonic() + 15
            while any(child.poll() is None for child in running) and time.monotonic() < deadline:
                time.sleep(0.05)
            break
        time.sleep(0.1)
    code = code or next((found for child in children if (found := child.poll())), 0)
    return 128 - code if code < 0 else code
