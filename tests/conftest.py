"""What most tests stand on: storage of both sorts, and a small site in a directory of its own."""

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tasks.cluster import Site, load_site
from tasks.storage import Storage, open_storage

WAIT_S = 60.0  # for what normally takes a moment, on a machine that is busy with other things
MakeStorage = Callable[[], Storage]


def wait_for(condition: Callable[[], object], what: str, seconds: float = WAIT_S) -> None:
    """Return as soon as the condition holds; fail the test, naming what was awaited, when it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(0.02)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an S3 server (moto's, a real process) on a free port, started when first asked for.

    SLOTWISE_TEST_S3 names another that runs already and takes "testing" for key and secret.
    """
    if other := os.environ.get("SLOTWISE_TEST_S3"):
        yield other
        return
    pytest.importorskip("moto.server", reason="moto[server] is not installed (extra s3test)")
    log = tmp_path_factory.mktemp("s3") / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "moto.server", "-p", "0"],
            env={**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": "5"},  # pages of five keys, instead of 1000
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        running = re.compile(r"Running on (http://\S+)")
        wait_for(lambda: process.poll() is not None or running.search(log.read_text()), "the S3 server")
        found = running.search(log.read_text())
        assert found, log.read_text()
        yield found[1]
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> MakeStorage:
    """Opens storage in a bucket of this test's own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    import boto3

    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it keeps the credentials that it found first
    bucket = f"test-{uuid.uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return lambda: open_storage(f"s3://{bucket}/some/prefix")


@pytest.fixture(params=["directory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Empty storage: a test that takes it runs on a directory and on S3."""
    if request.param == "directory":
        return open_storage(f"file:{tmp_path / 'storage'}")
    make: MakeStorage = request.getfixturevalue("s3")
    return make()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A cluster of two nodes with virtual GPUs, four each, planned every hour in slots of ten minutes."""
    return make_site(tmp_path)


def make_site(directory: Path, **fields: object) -> Site:
    """A site whose cluster file lies in this directory; `fields` replace or add to its keys."""
    cluster: dict[str, object] = {
        "name": "test",
        "storage": "file:storage",
        "state": "state",
        "lease_seconds": 1,
        "start_timeout_minutes": 5,
        "nodes": [{"name": "node0", "gpus": 4, "price_per_gpu_hour": 2.0}, {"name": "node1", "gpus": 4}],
    }
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "cluster.yaml"
    file.write_text(yaml.safe_dump({**cluster, **fields}))
    return load_site(file)
