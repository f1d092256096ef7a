"""Batch jobs that are killed at a step of their storage, each in a fork of a process that has its libraries.

`python -m tests.tasks.killed_inference` reads, from stdin, lines of JSON: the storage's root, a section, a
name, a rank of so many nodes, the attempt, and the step at which SIGKILL ends it (null: it ends by itself).
For each it prints how the attempt ended and which writing of each shard is there: a time, or on S3, whose
bucket keeps versions, the versions. There a step is a request that changes something: one before it is
sent, one after it was answered.
"""

import json
import os
import signal
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
        os.environ.update(asked["surroundings"])
        code = attempt(asked)
        print(json.dumps({"code": code, "shards": written(asked["root"], asked["name"])}), flush=True)


def written(root: str, name: str) -> dict[str, str]:
    """The shards of a job, each with what changes when it is written once more."""
    from tasks.s3 import S3Storage
    from tasks.storage import open_storage

    storage = open_storage(root)
    if not isinstance(storage, S3Storage):
        found = sorted((Path(root) / "outputs" / name).glob("rows-*"))
        return {path.name: str(path.stat().st_mtime_ns) for path in found}
    prefix = f"{storage.prefix}outputs/{name}/rows-"
    pages = storage.client.get_paginator("list_object_versions").paginate(
        Bucket=storage.bucket, Prefix=prefix
    )
    versions: dict[str, str] = {}
    for version in [found for page in pages for found in page.get("Versions", [])]:
        shard = str(version["Key"]).rpartition("/")[2]
        versions[shard] = f"{versions.get(shard, '')} {version['VersionId']}".strip()
    return versions


def die_at(storage: Any, step: int) -> None:
    """Die by SIGKILL at this step of S3 storage."""
    left = step

    def reached(**_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    for operation in ("PutObject", "DeleteObject"):
        for moment in ("before-call", "after-call"):
            storage.client.meta.events.register(f"{moment}.s3.{operation}", reached)


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
        storage = open_storage(asked["root"])
        if asked["step"] is not None and asked["root"].startswith("s3:"):
            die_at(storage, asked["step"])
        elif asked["step"] is not None:
            faults.arm({"SLOTWISE_FAULT": f"*#{asked['step']}", "PYTEST_VERSION": "any"})
        with tempfile.TemporaryDirectory() as scratch:
            job = program(storage, Path(scratch), asked["section"], asked["name"])
            infer(replace(job, node_rank=asked["rank"], nodes=asked["nodes"]))
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    main()
