"""Batch inference and quantization through the runner, and what the ledger says of it."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tasks import ledger
from tasks.facts import fact_key, write_fact
from tasks.instants import now, text
from tasks.runner import read_order, run_rank
from tasks.storage import Storage, open_storage
from tests.tasks.kind_programs import ROWS, put, small_model, stocked

pytestmark = pytest.mark.xdist_group("kind-runs")  # they share a model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture
def root(tmp_path: Path, model: Path) -> Path:
    """A storage directory with the model and two rows in it."""
    root = stocked(tmp_path, model)
    put(open_storage(str(root)), {"prompt": "What"}, {"prompt": "Who"})
    return root


def run(root: Path, kind: str, section: dict[str, Any]) -> dict[str, Any]:
    """Commit a job, run it as a node does, and give the ledger's row of the run."""
    storage: Storage = open_storage(str(root))
    at = now().replace(microsecond=0)
    spec = {"kind": kind, "gpus": 1, "priority": 5.0, "max_attempts": 1, "tenant": None, kind: section}
    body: dict[str, Any] = {"job": "a", "spec": spec, "value": 1.0, "duration_s": 60.0, "release": text(at)}
    body |= {"source": "a.yaml", "sha256": "0" * 64}
    write_fact(storage, fact_key("spec", at, "a"), at, body)
    node: dict[str, Any] = {
        "node": "node0",
        "gpus": [0],
        "gpu": "cpu",
        "node_gpus": 4,
        "address": "127.0.0.1",
    }
    place: dict[str, Any] = {"job": "a", "attempt": 1, "spec": fact_key("spec", at, "a"), "start": text(at)}
    place |= {"end": text(at + timedelta(hours=1)), "nodes": [{**node, "price_per_gpu_hour": 3600.0}]}
    commit: dict[str, Any] = {
        "instant": text(at),
        "until": text(at + timedelta(hours=1)),
        "placements": [place],
    }
    commit |= {"targets": {}, "lease_seconds": 5, "start_timeout_minutes": 1}
    write_fact(storage, fact_key("commit", at, "a"), at, commit)
    run_rank(
        read_order(str(root), fact_key("commit", at, "a"), "a", 0),
        root.parent / "node",
        lambda line: None,
    )
    ledger.take_in(root.parent / "ledger", storage)
    with ledger.open_ledger(root.parent / "ledger") as connection:
        (row,) = ledger.rows(
            connection,
            "SELECT *, TRY_CAST(metrics ->> 'prefill_mfu' AS DOUBLE) AS prefill_mfu, "
            "TRY_CAST(metrics ->> 'peak_flops_per_s' AS DOUBLE) AS peak_flops_per_s, "
            "TRY_CAST(metrics ->> 'decode_bandwidth_utilization' AS DOUBLE) AS decode_bandwidth, "
            "TRY_CAST(metrics ->> 'padding_waste' AS DOUBLE) AS padding_waste, "
            "TRY_CAST(metrics ->> 'rows_done' AS INTEGER) AS rows_done FROM runs",
        )
    return row


def test_the_ledger_has_what_a_batch_made_of_its_device(root: Path) -> None:
    row = run(root, "batch_inference", ROWS)
    assert (row["state"], row["error"], row["rows_done"]) == ("completed", None, 2)
    assert 0 < row["mfu"] == row["prefill_mfu"] <= 1
    assert row["peak_flops_per_s"] > 0
    assert 0 < row["decode_bandwidth"] <= 1
    assert 0 <= row["padding_waste"] < 1
    assert row["tokens_per_s"] > row["rows_per_s"] > 0
    assert row["gpu_seconds"] == pytest.approx(row["cost"]) and row["cost"] > 0


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "no input": ("batch_inference", {**ROWS, "input": "gone.jsonl"}, "input: 'gone.jsonl': no such object"),
    "every row": (
        "batch_inference",
        {**ROWS, "prompt": "q"},
        "spec.yaml: max_error_share: 0.5: 2 of 2 rows failed",
    ),
    "no chat template": (
        "batch_inference",
        {**{k: v for k, v in ROWS.items() if k != "prompt"}, "messages": "talk"},
        "messages: 'talk': model 'models/small' has no chat template",
    ),
    "no such kernel": (
        "quantization",
        {"model": "models/small", "scheme": "fp8"},
        "scheme: 'fp8': it needs a GPU",
    ),
    "the gate": (
        "quantization",
        {"model": "models/small", "scheme": "int8_dynamic", "max_perplexity_increase": 0, "min_agreement": 1}
        | {"seq_len": 64, "windows": 4, "measure_speed": False},
        "not published: ",
    ),
}


@pytest.mark.parametrize(
    "case",
    ["no input", "no such kernel"]
    + [pytest.param(case, marks=pytest.mark.long) for case in ("every row", "no chat template", "the gate")],
)
def test_what_cannot_work_is_a_failed_outcome_that_names_the_cause_and_leaves_nothing_to_take_for_a_result(
    root: Path, case: str
) -> None:
    kind, section, message = BAD[case]
    row = run(root, kind, section)
    assert row["state"] == "failed"
    assert message in row["error"] and "\n" not in row["error"]
    storage = open_storage(str(root))
    assert not [key for key in storage.keys("outputs/") if key.endswith("manifest.json")]
