"""Sites on this machine for tests that need the real server: in a temporary directory, on a free port."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.server import DEPLOYMENTS, Running, client_environment, down, up
from tasks.cluster import Site, load_site

CLUSTER: dict[str, Any] = {
    "name": "test",
    "slot_minutes": 1,
    "plan_every_minutes": 60,
    "replan_every_seconds": 3600,
    "lease_seconds": 3,
    "nodes": [{"name": "node0", "gpus": 2}],
}
MakeSite = Callable[..., Site]


@dataclass(frozen=True)
class RunningSite:
    """A site whose server and workers run: all that its cluster file puts on this machine."""

    site: Site
    running: Running


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty Prefect database with all its tables. Making one takes longer than starting a server on it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    home = shared / "migrated"
    home.mkdir(exist_ok=True)
    database = home / "prefect.db"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not database.exists():
            making = home / "making"
            environment = client_environment("http://127.0.0.1:1/api") | {"PREFECT_HOME": str(making)}
            command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
            subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
            (making / "prefect.db").rename(database)
    return database


@pytest.fixture(scope="session")
def make_site(tmp_path_factory: pytest.TempPathFactory, migrated_database: Path) -> Iterator[MakeSite]:
    """Writes a cluster file in a directory of its own; whatever runs for it is stopped at the end."""
    sites: list[Site] = []

    def make(**cluster: Any) -> Site:
        directory = tmp_path_factory.mktemp("site")
        file = directory / "cluster.yaml"
        file.write_text(yaml.safe_dump({**CLUSTER, **cluster}))
        site = load_site(file)
        (site.state / "prefect").mkdir(parents=True)
        shutil.copy(migrated_database, site.state / "prefect" / "prefect.db")
        sites.append(site)
        return site

    yield make
    for site in sites:
        down(site)


@pytest.fixture(scope="session")
def standin_deployments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The product's own deployments, of flows that only say that they ran."""
    text = DEPLOYMENTS.read_text()
    for flow in ("hourly", "replan", "run_job"):
        text = text.replace(f"flows.{flow}.{flow}", f"tests.flows.standin_flows.{flow}")
    file = tmp_path_factory.mktemp("deployments") / "prefect.yaml"
    file.write_text(text)
    return file


@pytest.fixture(scope="session")
def running_site(make_site: MakeSite, standin_deployments: Path) -> RunningSite:
    """A site with one node here and one elsewhere. Tests of one xdist group share it, and change nothing."""
    nodes = [{"name": "node0", "gpus": 2}, {"name": "node1", "gpus": 2, "address": "192.0.2.1"}]
    site = make_site(plan_every_minutes=90, replan_every_seconds=1234, slot_minutes=30, nodes=nodes)
    return RunningSite(site, up(site, deployments=standin_deployments))
