"""What people see of a training run's steps and savings: in the ledger, and in the run's artifact."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from flows.run_job import run_figures
from tasks import ledger
from tasks.runner import Order, Outcome
from tasks.storage import open_storage
from tests.tasks.worked_hours import HOUR, Facts
from training.launching import Baseline, gain
from training.remedies import diagnosed
from training.trace import CAUSES, Breakdown

STEP = Breakdown(
    0, 1, dict.fromkeys(CAUSES, 0.0) | {"compute": 0.06, "data": 0.03, "communication": 0.01}, 0.0, "cuda"
)


def metrics() -> dict[str, Any]:
    """Those of a run that took half as long as the plain loop would have, for half an hour of two GPUs."""
    from training.config import TrainingConfig

    config = TrainingConfig(loader_workers=0, prefetch_batches=0, parallel="ddp", micro_batch=1)
    found = diagnosed([STEP], config, 0.4, 1)
    base = {"model": "llama-micro", "gpu_type": "H100", "mfu": 0.4, "tokens": 3.6e6, "tokens_per_s": 2000.0}
    told = gain({**base, **found}, Baseline(1000.0, 0.2))
    assert told["saved_hours"] == pytest.approx(0.5)
    return {**told, "saved_gpu_hours": 2 * told["saved_hours"]}


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """The row of each view, of a ledger with that run in it."""
    facts = Facts(open_storage(str(tmp_path / "storage")))
    facts.spec()
    facts.commit()
    facts.started()
    facts.outcome("completed", metrics=metrics())
    ledger.take_in(tmp_path / "ledger", facts.storage)
    with ledger.open_ledger(tmp_path / "ledger") as connection:
        return {view: ledger.rows(connection, f"FROM {view}")[0] for view in ("step_times", "savings")}


def test_the_ledger_says_where_a_step_went_and_what_to_try_next(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["step_times"]
    spent = {cause: row[f"{cause}_ms"] for cause in CAUSES}
    assert spent == pytest.approx({cause: 1e3 * STEP.seconds[cause] for cause in CAUSES})
    assert row["next_lever"] == "loader_workers: 1, prefetch_batches: 1"
    assert row["next_lever_why"] == "waiting for data takes 30% of the step"
    assert row["bottleneck"].startswith("waiting for data takes 30% of the step; without it")
    # 0.4 / 0.7 and 0.4 / 0.9, less 0.4; of the compute, 0.5 would do at the best that matmuls reach.
    points = [row[f"{cause}_points"] for cause in ("memory_movement", "unfilled_hardware", "communication")]
    assert points == pytest.approx([17.14, 4.44, 4.44], abs=0.01)


def test_the_ledger_sets_what_a_run_cost_beside_what_the_plain_loop_would_have(
    rows: dict[str, dict[str, Any]],
) -> None:
    row = rows["savings"]
    names = ("gpu_hours", "cost", "saved_gpu_hours", "saved", "plain_gpu_hours", "plain_cost", "saved_share")
    assert [row[name] for name in names] == pytest.approx([1.0, 2.0, 1.0, 2.0, 2.0, 4.0, 0.5])
    assert (row["gain"], row["plain_mfu"], row["mfu"]) == (2.0, 0.2, 0.4)


def test_nothing_is_saved_where_no_plain_loop_was_measured() -> None:
    found = {"tokens_per_s": 10.0, "tokens": 100}
    assert gain(found, None) == found
    assert "saved_hours" not in gain({"tokens_per_s": None, "tokens": 0}, Baseline(5.0, None))


def test_the_artifact_of_a_run_shows_table_lever_and_savings_at_the_nodes_price(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    node = {"node": "n", "gpus": [0, 1], "gpu": "H100", "price_per_gpu_hour": 3.0}
    order = Order(storage, HOUR, "a", 1, 0, (node,), {}, None, HOUR, timedelta(0), timedelta(0))
    shown = run_figures(order, Outcome("completed", metrics=metrics()))
    assert json.loads(shown["step_ms"])["data"] == pytest.approx(30)
    assert shown["next_lever"] == "loader_workers: 1, prefetch_batches: 1"
    assert shown["saved_cost"] == pytest.approx(3.0)
    assert "breakdowns" not in shown
    free = Order(storage, HOUR, "a", 1, 0, ({**node, "price_per_gpu_hour": 0.0},), {}, None, HOUR,
                 timedelta(0), timedelta(0))  # fmt: skip
    assert "saved_cost" not in run_figures(free, Outcome("completed", metrics=metrics()))
