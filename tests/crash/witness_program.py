"""A job that notes down which GPUs it really had, and finds out by locks of its own whether anyone else had
them.

    python witness_program.py WITNESS_FILE LOCKS_DIRECTORY SECONDS [fail-first]

Runs by itself, without the product: it believes the environment and the operating system only.
"""

import fcntl
import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    """Hold the GPUs for so long."""
    witness, locks, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    gpus = [int(gpu) for gpu in os.environ["SLOTWISE_GPU_INDICES"].split(",")]
    node = os.environ["SLOTWISE_NODE"]
    name = {
        "job": os.environ["SLOTWISE_JOB"],
        "attempt": int(os.environ["SLOTWISE_ATTEMPT"]),
        "rank": int(os.environ["SLOTWISE_NODE_RANK"]),
    }
    held = []
    ours = [*(f"{node}-{gpu}" for gpu in gpus), f"job-{name['job']}-{name['rank']}"]
    for what in ours:
        lock = (locks / what).open("a")  # gone with this process, however it ends
        held.append(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _note(witness, {"what": "shared", **name, "node": node, "gpu": what})
    with (locks / "holders").open("a+") as holders:
        fcntl.flock(holders, fcntl.LOCK_EX)
        _bury(witness, locks, ours)
        _note(witness, {"what": "begin", **name, "node": node, "gpus": gpus, "pid": os.getpid()})
        for what in ours:
            (locks / f"{what}.holder").write_text(json.dumps(name))
    time.sleep(seconds)
    with (locks / "holders").open("a+") as holders:
        fcntl.flock(holders, fcntl.LOCK_EX)
        _note(witness, {"what": "end", **name, "ok": True})
        for what in ours:
            (locks / f"{what}.holder").unlink()


def _bury(witness: Path, locks: Path, ours: list[str]) -> None:
    """Whoever had these GPUs or was this job, and did not say that it ended, is dead: we have its locks."""
    for what in ours:
        holder = locks / f"{what}.holder"
        if holder.exists():
            dead = json.loads(holder.read_text())
            _note(witness, {"what": "dead", **dead})
            for other in locks.glob("*.holder"):
                if json.loads(other.read_text()) == dead:
                    other.unlink()


def _note(witness: Path, event: dict[str, object]) -> None:
    with witness.open("a") as out:
        out.write(json.dumps(event) + "\n")


if __name__ == "__main__":
    main()
