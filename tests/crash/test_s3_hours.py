"""The whole loop over S3 by way of a network that fails: single requests, or the server from one of them on.

What the planner asks for goes through the proxy; nodes, runs and the checker see the bucket as it is.
"""

import json
import os
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tasks import ledger
from tasks.collect import ledger_directory
from tests.conftest import MakeStorage
from tests.crash.world import MINUTE, World
from tests.tasks.faulty_proxy import Fault, FaultyProxy, faulty_proxy

HOUR = datetime(2026, 12, 1, 6, tzinfo=UTC)
FAULTS = (Fault(status=500), Fault(status=503), Fault(lost=True), Fault(cut_after=20), Fault(silent_s=0.05))


def shaky(share: float, seed: int) -> Callable[[int, str, str], Fault | None]:
    """Faults for this share of the requests."""

    def fault(number: int, method: str, path: str) -> Fault | None:
        chance = random.Random(f"{seed} {number}")
        return chance.choice(FAULTS) if chance.random() < share else None

    return fault


class Bucket:
    """A world whose storage is a bucket, and the planner's way to it."""

    def __init__(self, directory: Path, root: str, proxy: FaultyProxy) -> None:
        cluster = {"storage": root, "nodes": [{"name": f"node{number}", "gpus": 2} for number in range(3)]}
        self.world = World(directory, HOUR - 2 * MINUTE, cluster=cluster)
        self.proxy = proxy
        self.environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        self.environment |= {"AWS_ENDPOINT_URL": proxy.url}
        self.world.submit("ends", minutes=20)
        self.world.submit("gang", minutes=15, gpus=4)
        self.world.submit("dies", minutes=45)
        self.world.leave("bad.yaml", b"kind: training\ngpus: many\n")
        self.world.demand("chat", 1.0, HOUR - 10 * MINUTE)
        self.world.pass_minutes(2)

    def hour(self) -> int:
        return self.world.hour(environment=self.environment)

    def go_on(self, minutes: int = 15) -> None:
        """A run dies, another job comes, time passes."""
        for run in self.world.runs.values():
            if run.job == "dies" and run.state == "running":
                self.world.crash(run)
        self.world.pass_minutes(minutes)

    def asked_for(self) -> list[dict[str, Any]]:
        """The flow runs that the planner made."""
        return [json.loads(file.read_text()) for file in self.world.flow_runs.glob("*.json")]

    def finish(self) -> None:
        """All is done, and the ledger is what the facts say."""
        self.proxy.fault = lambda number, method, path: None
        self.world.finish()
        assert ledger.verify(ledger_directory(self.world.site), self.world.storage) == []


@pytest.fixture
def bucket(s3: MakeStorage, s3_server: str, tmp_path: Path) -> Iterator[Bucket]:
    with faulty_proxy(s3_server) as proxy:
        yield Bucket(tmp_path, s3().root, proxy)


def test_an_hour_whose_requests_fail_now_and_then_is_planned_all_the_same(bucket: Bucket) -> None:
    bucket.proxy.fault = shaky(0.1, 1)
    assert bucket.hour() == 0
    assert bucket.proxy.asked
    bucket.world.check()
    assert {run["job"] for run in bucket.asked_for()} == {"ends", "gang", "dies"}


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_hours_of_which_a_fifth_of_the_requests_fails_finish_the_work(bucket: Bucket, seed: int) -> None:
    bucket.proxy.fault = shaky(0.2, seed)
    for _ in range(2):
        assert bucket.hour() == 0
        bucket.world.check()
        bucket.go_on()
        bucket.world.to_next_hour()
    bucket.finish()


@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
def test_a_server_that_goes_away_during_the_hour_costs_that_hour_at_most(bucket: Bucket, part: int) -> None:
    """From each of some requests on there are only errors, until the hour is run again."""
    for turn in range(4):
        last = len(bucket.proxy.asked) + 1 + 4 * (4 * part + turn)
        bucket.proxy.fault = lambda number, method, path, last=last: (  # type: ignore[misc]
            Fault(status=503) if number > last else None
        )
        bucket.hour()
        bucket.world.check(settled=False)
        bucket.go_on(minutes=3)
        bucket.proxy.fault = lambda number, method, path: None
        assert bucket.hour() == 0
        bucket.world.check()
        bucket.world.submit(f"new{turn}", minutes=5)
        bucket.go_on(minutes=3)
        bucket.world.to_next_hour()
    bucket.finish()
