"""What an hour costs: 200 queued jobs on 64 GPUs, through the real flow and server, without the jobs.

Printed: the flow process's wall time (start and imports included), its CPU time and its peak memory.
"""

import os
import subprocess
import sys
import threading
import time

import pytest
import yaml

from flows.server import client_environment, up
from tasks import instants, ledger
from tasks.collect import ledger_directory
from tasks.nodes import renew_lease
from tests.flows.conftest import MakeSite

pytestmark = [pytest.mark.benchmark, pytest.mark.xdist_group("server")]
NODES, GPUS, JOBS = 8, 8, 200


def test_an_hour_of_200_jobs_on_64_gpus(make_site: MakeSite) -> None:
    service = {
        "name": "chat",
        "demand": {"file": "demand.csv"},
        "requests_per_gpu_hour": 3600,
        "expected_gpus": 8,
        "ramp_per_hour": 24,
        "priority": 8,
    }
    # No worker runs here for nodes at another address: the jobs stay where dispatch put them.
    nodes = [
        {"name": f"node{k}", "gpus": GPUS, "gpu": "H100", "address": f"10.0.0.{k}"} for k in range(NODES)
    ]
    site = make_site(nodes=nodes, slot_minutes=10, services=[service])
    (site.file.parent / "demand.csv").write_text("ts,y\n")
    for job in range(JOBS):
        spec = {
            "id": f"job-{job:03d}",
            "kind": ("training", "batch_inference", "quantization")[job % 3],
            "gpus": (1, 1, 2, 4, 8)[job % 5],
            "priority": (1, 2, 3, 5, 8)[job % 7 % 5],
            "duration": f"{20 + 37 * job % 400}m",
            "command": ["true"],
        }
        site.storage.write(f"inbox/{spec['id']}.yaml", yaml.safe_dump(spec).encode())
    stop = threading.Event()

    def nodes_answer() -> None:
        while not stop.wait(2.0):
            for node in nodes:
                renew_lease(site.storage, str(node["name"]))

    for node in nodes:
        renew_lease(site.storage, str(node["name"]))
    thread = threading.Thread(target=nodes_answer)
    thread.start()
    try:
        running = up(site)
        hour = instants.text(instants.floor(instants.now(), 60))
        code = f"from flows.hourly import hourly; hourly({str(site.file)!r}, {hour!r})"
        environment = client_environment(running.api_url)
        began = time.monotonic()
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.monotonic() - began
        assert status == 0
    finally:
        stop.set()
        thread.join()
    with ledger.open_ledger(ledger_directory(site)) as connection:
        (plan,) = ledger.rows(connection, "FROM plans")
        dispatched = ledger.rows(connection, "FROM dispatches")
    print(
        f"\nan hour of {JOBS} jobs on {NODES * GPUS} GPUs: {wall:.1f} s wall, "
        f"{used.ru_utime + used.ru_stime:.1f} s CPU, {used.ru_maxrss / 1024:.0f} MB at most; "
        f"{plan['placed']} placed, {len(dispatched)} runs created, "
        f"solved in {plan['solve_ms']:.1f} ms"
    )
    assert plan["placed"] and dispatched
