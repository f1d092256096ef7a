"""Several processes of a batch job on one node: started together, one for each GPU or group of GPUs.

Invariant: a group's GPUs are seen by its process alone, and what people see of the job is the sum over its
processes, at most a second old.
"""

import json
import os
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.generating import Work
from tasks.program import Program
from training.processes import launch

WORKER = "SLOTWISE_WORKER"  # in the processes that were started so: the model's directory


def start_workers(program: Program, directory: Path, processes: int, tensor_parallel: int) -> None:
    """One process for each GPU, or group of them, of this node; their metrics add up to the job's."""
    command = [sys.executable, "-m", "tasks.inference", *sys.argv[1:]]
    surroundings = {**os.environ, WORKER: str(directory)}
    surroundings.setdefault("SLOTWISE_ATTEMPT", uuid.uuid4().hex)  # by hand
    program.scratch.mkdir(parents=True, exist_ok=True)
    files = [program.scratch / f"worker-{rank}.json" for rank in range(processes)]
    for file in files:
        file.unlink(missing_ok=True)
    with _added_up(program, files, tensor_parallel):
        code = launch(command, processes, surroundings, program.node_rank, program.nodes)
    if code:
        program.metrics.write()
        sys.exit(code)  # the worker has said why


@contextmanager
def _added_up(program: Program, files: list[Path], gpus_per_process: int) -> Iterator[None]:
    """Keep the job's metrics the sum of its workers'."""
    over = threading.Event()

    def look() -> None:
        found = []
        for file in files:
            try:
                found.append(json.loads(file.read_text(encoding="utf-8")))
            except (OSError, ValueError):
                continue
        work = Work(processes=0)
        for each in found:
            if each.get("work"):
                work.add(Work(**each["work"]))
        sums = {name: sum(each.get(name) or 0 for each in found) for name in ("rows_done", "rows_failed")}
        closed = next((each for each in found if each.get("outputs")), None)
        if closed:  # by who finished last, which counted the rows of all nodes
            sums = {name: closed[name] for name in ("rows_done", "rows_failed", "outputs")}
        progress = 1.0 if closed else sum(each.get("progress") or 0 for each in found)
        said = next((each["message"] for each in found if each.get("message")), None)
        program.metrics.update(
            **sums, progress=progress, **work.metrics(gpus_per_process), **({"message": said} if said else {})
        )

    def watch() -> None:
        while not over.wait(1.0):
            look()

    thread = threading.Thread(target=watch, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()


def see_own_gpus(local_rank: int, tensor_parallel: int) -> None:
    """Leave this process the GPUs of its group; nothing has looked at them yet."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = [str(gpu) for gpu in range((local_rank + 1) * tensor_parallel)]
    given = every if visible is None else visible.split(",")
    own = given[local_rank * tensor_parallel : (local_rank + 1) * tensor_parallel]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
