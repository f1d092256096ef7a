"""Measurements of the allocator: speed on the scenarios, the policies side by side, growth, and quality on
many seeds.

Run with ``pytest -m benchmark tests/benchmarks/test_allocator.py``. Nothing is asserted about time. These
environment variables shrink or stretch the long ones: ``SLOTWISE_BENCH_SEEDS`` (200),
``SLOTWISE_BENCH_FULL_SECONDS`` (10), ``SLOTWISE_BENCH_BOUND_SECONDS`` (60). ``SLOTWISE_BENCH_RESULTS`` names
a file that keeps what was solved, so that half an hour of seeds may be done in pieces.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from rich.table import Table

from allocator import load_problem
from allocator.compare import compare, table
from tests.benchmarks.seeds import measure, prove, solve_anew
from tests.benchmarks.seeds import table as quality

pytestmark = pytest.mark.benchmark

ROOT = Path(__file__).parents[2]
SCENARIOS = sorted((ROOT / "allocator" / "scenarios").glob("*.yaml"))
SEEDS = int(os.environ.get("SLOTWISE_BENCH_SEEDS", "200"))
FULL_SECONDS = float(os.environ.get("SLOTWISE_BENCH_FULL_SECONDS", "10"))
BOUND_SECONDS = float(os.environ.get("SLOTWISE_BENCH_BOUND_SECONDS", "60"))

# GPUs, jobs, slots, GPUs of a node
GROWTH = (
    (16, 24, 24, 16),
    (64, 30, 24, 64),
    (64, 200, 24, 8),
    (64, 200, 288, 8),
    (256, 120, 24, 8),
    (256, 300, 24, 8),
    (1024, 1000, 24, 8),
    (10_000, 5000, 24, 8),
)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_fast_mode_on_a_freshly_built_scenario(benchmark: Any, path: Path) -> None:
    """Validation, search and check of a problem that was parsed from YAML; the parsing is not counted."""
    data = yaml.safe_load(path.read_text())
    plan = benchmark(lambda: solve_anew(data))
    assert plan.objective > 0


def test_policies_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    found = [compare(load_problem(path), full_seconds=FULL_SECONDS) for path in SCENARIOS]
    _print(capsys, table(found))
    for entry in found:
        best = entry.row("full").objective
        assert best >= entry.row("fast").objective - 1e-6
        assert all(entry.row("fast").objective >= row.objective - 1e-6 for row in entry.rows[:3])


def test_growth_with_gpus_jobs_and_slots(capsys: pytest.CaptureFixture[str]) -> None:
    """Each size in a process of its own, so that memory is that of one solve."""
    grown = Table(
        "GPUs", "jobs", "slots", "fast ms", "placed", "util. %", "below bound, %", "peak MB", box=None
    )
    for gpus, jobs, slots, node in GROWTH:
        row = _grown(gpus, jobs, slots, node, BOUND_SECONDS if gpus * slots <= 25_000 else 0)
        below = "–" if row["below"] is None else f"{row['below']:.2f}"
        grown.add_row(
            *[str(number) for number in (gpus, jobs, slots)],
            *[
                f"{row['ms']:.1f}",
                str(row["placed"]),
                f"{row['utilization']:.1f}",
                below,
                f"{row['peak']:.0f}",
            ],
        )
        assert row["placed"] > 0
    _print(capsys, grown)


_GROW = """
import json, sys
from pathlib import Path
from statistics import median
from time import perf_counter
from allocator import Problem
from allocator.generate import generate
from tests.benchmarks.seeds import solve_anew
gpus, jobs, slots, node, seconds = json.loads(sys.argv[1])
data = generate(1, gpus=gpus, jobs=jobs, slots=slots, node_gpus=node, family="realtime_peak", load=1.6,
                features=()).to_dict()
times = []
while len(times) < (5 if sum(times) < 2000 else 1):
    began = perf_counter()
    plan = solve_anew(data)
    times.append(1000 * (perf_counter() - began))
status = Path("/proc/self/status")  # what getrusage says includes the parent's memory before exec
lines = status.read_text().splitlines() if status.exists() else []
peak = next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0)
below = None
if seconds:
    from allocator.bound import upper_bound
    bound = max(upper_bound(Problem.from_dict(data), seconds), plan.objective)
    below = 100 * (bound - plan.objective) / bound
print(json.dumps({"ms": median(times), "placed": len(plan.placements), "utilization": 100 * plan.utilization,
                  "below": below, "peak": peak}))
"""


def _grown(gpus: int, jobs: int, slots: int, node: int, seconds: float) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-c", _GROW, json.dumps([gpus, jobs, slots, node, seconds])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_quality_on_many_seeds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Fast and full mode on random problems of 16 to 64 GPUs against proven optima, see ``seeds``."""
    results = Path(os.environ.get("SLOTWISE_BENCH_RESULTS", tmp_path / "seeds.jsonl"))
    known = prove(range(SEEDS), results, FULL_SECONDS)
    _print(capsys, quality(measure(known)))
    assert any(best.proven for best in known)


def _print(capsys: pytest.CaptureFixture[str], made: Table) -> None:
    with capsys.disabled():
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
        console = Console(width=150)
        console.print(f"\n{os.cpu_count()} CPUs, load {load:.1f}")
        console.print(made)
