"""The work of a job: what can be told of it when it comes, and what is left to the declaration."""

import io
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.allocate import build_problem, read_state
from tasks.durations import JobProfile
from tasks.facts import read_json
from tasks.forecast import Forecast
from tasks.hour import scheduled_hour
from tasks.jobs import Job
from tasks.storage import Storage, open_storage
from tasks.work import Amount, amount_of, work_on
from tests.conftest import make_site
from tests.tasks.planned_hours import Runs, answer, ask, begin, end, plan_hour, submit
from tests.tasks.worked_hours import HOUR
from training.flops import flops_per_token
from training.manifest import Entry, manifest_bytes
from training.models import config_of, shape_of

CONFIG = {"model": "llama-3.1-8b", "seq_len": 4096, "micro_batch": 2, "accumulation": 4, "steps": 10}
CONFIG_FLOPS = 4096 * 2 * 4 * 8 * 10 * flops_per_token(shape_of("llama-3.1-8b"), 4096)


def job(kind: str, **fields: Any) -> Job:
    return Job.model_validate({"kind": kind, "gpus": 8, "priority": 1, "duration": "1h", **fields})


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """A training configuration, rows and a model."""
    (tmp_path / "storage").mkdir()
    storage = open_storage(str(tmp_path / "storage"))
    storage.write("runs/llama.yaml", json.dumps(CONFIG).encode())  # JSON is YAML
    storage.write("in/rows.jsonl", b'{"prompt": "a"}\n\n{"prompt": "b"}\n{"prompt": "c"}')
    parquet = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["a\n", "b", "c", "d"]}), parquet)
    storage.write("in/more.parquet", parquet.getvalue())
    storage.write("in/more.jsonl", b'{"prompt": "d"}\n')
    files = {"model.safetensors": Entry(5000, "0" * 64), "config.json": Entry(20, "0" * 64)}
    storage.write("models/m/manifest.json", manifest_bytes(files))
    storage.write("models/mine/config.json", json.dumps(config_of(str(CONFIG["model"]))).encode())
    return storage


KNOWN = {
    "training": (job("training", training={"config": CONFIG}), Amount(CONFIG_FLOPS, "fp32")),
    "a configuration in storage": (
        job("training", training={"config": "runs/llama.yaml"}),
        Amount(CONFIG_FLOPS, "fp32"),
    ),
    "a model in storage": (
        job("training", training={"config": {**CONFIG, "model": "models/mine/"}}),
        Amount(CONFIG_FLOPS, "fp32"),
    ),
    "batch inference": (
        job(
            "batch_inference", batch_inference={"input": "in/rows.jsonl", "model": "m", "max_new_tokens": 50}
        ),
        Amount(150.0),
    ),
    "files of a glob": (
        job("batch_inference", batch_inference={"input": ["in/*.jsonl"], "model": "m", "max_new_tokens": 50}),
        Amount(200.0),
    ),
    "rows of Parquet": (
        job(
            "batch_inference",
            batch_inference={"input": "in/more.parquet", "model": "m", "max_new_tokens": 50},
        ),
        Amount(200.0),
    ),
    "quantization": (job("quantization", quantization={"model": "models/m"}), Amount(5020.0)),
}


@pytest.mark.parametrize(("asked", "found"), KNOWN.values(), ids=KNOWN)
def test_what_there_is_to_do_is_told_by_the_spec_and_what_it_names(
    storage: Storage, asked: Job, found: Amount
) -> None:
    assert amount_of(asked, storage) == found


UNKNOWN = {
    "a command": job("training", command=["true"]),
    "a model that is not there yet": job("training", training={"config": {**CONFIG, "model": "models/no"}}),
    "a function's model": job("training", training={"config": {**CONFIG, "model": "module:own:build"}}),
    "a wrong configuration": job("training", training={"config": {**CONFIG, "steps": -1}}),
    "a configuration that is not there": job("training", training={"config": "runs/none.yaml"}),
    "a key outside": job("training", training={"config": "../../etc/passwd"}),
    "an empty section": job("quantization", quantization={}),
    "rows that are not there yet": job("batch_inference", batch_inference={"input": "no", "model": "m"}),
    "a model without a manifest": job("quantization", quantization={"model": "runs"}),
}


@pytest.mark.parametrize("asked", UNKNOWN.values(), ids=UNKNOWN)
def test_what_cannot_be_told_is_left_to_the_declaration(storage: Storage, asked: Job) -> None:
    assert amount_of(asked, storage) is None


def test_training_takes_the_peak_of_the_slowest_gpu_and_none_without_a_published_one() -> None:
    slowest = work_on(1e18, "bf16", ["H100", "A100"])
    assert slowest is not None
    assert slowest.peak_per_s == pytest.approx(312e12)
    assert work_on(1e18, "bf16", ["cpu"]) is None
    assert work_on(1e18, "bf16", []) is None
    other = work_on(150.0, None, ["cpu"])
    assert other is not None
    assert (other.amount, other.peak_per_s) == (150.0, 1.0)
    assert work_on(None, None, ["H100"]) is None


def test_a_queued_job_is_planned_by_its_work_once_runs_like_it_have_been_recorded(tmp_path: Path) -> None:
    """Two runs of a thousand tokens at a token a second; then one of four times as many, said to be short."""
    site = make_site(tmp_path, full_mode_seconds=0, services=[])
    section = {"input": "in/rows.jsonl", "model": "m", "max_new_tokens": 1000}
    fields = {"kind": "batch_inference", "command": None, "batch_inference": section}
    site.storage.write("in/rows.jsonl", b"{}\n")
    submit(site, "first", **fields)
    submit(site, "second", **fields)
    answer(site, HOUR)
    runs = Runs()
    plan_hour(site, HOUR, runs)
    later = HOUR + timedelta(seconds=1000)
    for rank in runs.made.values():
        begin(site, rank, HOUR)
        end(site, rank, later, started_at="2026-12-01T06:00:00Z", metrics={"tokens_per_s": 1.0})
    site.storage.write("in/rows.jsonl", b"{}\n" * 4)
    submit(site, "third", **{**fields, "duration": "10m"})
    answer(site, later)
    plan_hour(site, later, runs, trigger="replan")
    (row,) = ask(site, "SELECT work, precision, key FROM specs WHERE job = 'third'")
    assert (row["work"], row["precision"]) == (4000.0, None)
    assert read_json(site.storage, row["key"])["work"] == {"amount": 4000.0, "precision": None}
    learnt = ask(site, "SELECT job, work, speed, peak_per_s FROM durations ORDER BY job")
    assert [tuple(one.values()) for one in learnt] == [
        ("first", 1000.0, 1.0, None),
        ("second", 1000.0, 1.0, None),
    ]
    hour = scheduled_hour(site, later, later)
    state = read_state(site, later)
    estimate = state.estimates.estimate_s(
        JobProfile("x", "batch_inference", 1, 600.0, work=work_on(4000.0, None, []))
    )
    assert estimate == pytest.approx(4000, rel=0.05)
    none: dict[str, Forecast] = {}
    planned = {one.id: one for one in build_problem(site, hour, state, none, set(), []).jobs}
    slots = planned["third"].choices[0].slots
    assert isinstance(slots, int)
    assert 7 <= slots <= 9  # of ten minutes; its declaration says one
