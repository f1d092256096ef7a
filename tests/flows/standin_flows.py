"""Flows as small as can be, with the parameters of the real ones, for tests of what starts them."""

import json
import os
import time
from pathlib import Path

from prefect import flow


@flow(name="hourly")
def hourly(cluster: str, instant: str | None = None) -> None:
    """Say that it ran, beside the cluster file."""
    Path(cluster).with_name("hourly.json").write_text(json.dumps({"cluster": cluster, "instant": instant}))


@flow(name="replan")
def replan(cluster: str) -> None:
    """Nothing."""


@flow(name="run_job")
def run_job(storage: str, commit: str, job: str, rank: int) -> None:
    """Leave what it finds, under the name of the job; then take as many seconds as the rank says."""
    found = {"environment": dict(os.environ), "pid": os.getpid(), "commit": commit}
    target = Path(storage) / f"{job}.json"
    target.with_suffix(".tmp").write_text(json.dumps(found))
    target.with_suffix(".tmp").rename(target)
    time.sleep(rank)
