"""Batch jobs that are killed at a step of their storage, each in a fork of a process that has its libraries.

`python -m tests.tasks.killed_inference` reads, from stdin, lines of JSON: the storage's root, a section, a
name, a rank of so many nodes, the attempt, and the step at which SIGKILL ends it (null: it ends by itself).
For each it prints how the attempt ended and when each shard was written.
"""

import json
import os
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks import faults
from tests.tasks.kind_programs import program


def main() -> None:
    """Make the attempts, one after the other."""
    import torch
    import transformers.generation.utils
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        code = attempt(asked)
        folder = Path(asked["root"]) / "outputs" / asked["name"]
        shards = {path.name: path.stat().st_mtime_ns for path in sorted(folder.glob("rows-*"))}
        print(json.dumps({"code": code, "shards": shards}), flush=True)


def attempt(asked: dict[str, Any]) -> int:
    """How a fork that does the job ends: its exit code, or the signal's number below zero."""
    from tasks.inference import infer
    from tasks.storage import open_storage

    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        os.environ["SLOTWISE_ATTEMPT"] = str(asked["attempt"])
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if asked["step"] is not None:
            faults.arm({"SLOTWISE_FAULT": f"*#{asked['step']}", "PYTEST_VERSION": "any"})
        with tempfile.TemporaryDirectory() as scratch:
            job = program(open_storage(asked["root"]), Path(scratch), asked["section"], asked["name"])
            infer(replace(job, node_rank=asked["rank"], nodes=asked["nodes"]))
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    main()
