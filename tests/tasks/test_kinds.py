"""The programs of the three kinds as the runner starts them, one after another on the model just trained."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.storage import open_storage

TINY = {
    "model": "llama-tiny",
    "data": "shakespeare",
    "seq_len": 64,
    "micro_batch": 2,
    "steps": 4,
    "checkpoint_every": 2,
    "held_out_windows": 2,
}
MODULES = {
    "training": "tasks.train",
    "batch_inference": "tasks.inference",
    "quantization": "tasks.quantization",
}


def run(root: Path, job: str, kind: str, section: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
    """Run a kind's program; its exit code, what it wrote to stderr, and its metrics."""
    scratch = root.parent / f"scratch-{job}"
    scratch.mkdir(exist_ok=True)
    (scratch / "spec.yaml").write_text(yaml.safe_dump(section))
    environment = {
        **os.environ,
        "SLOTWISE_JOB": job,
        "SLOTWISE_ATTEMPT": "1",
        "SLOTWISE_KIND": kind,
        "SLOTWISE_STORAGE": str(root),
        "SLOTWISE_OUTPUT": f"outputs/{job}",
        "SLOTWISE_METRICS": str(scratch / "metrics.json"),
        "SLOTWISE_NODE": "node0",
        "SLOTWISE_NODE_RANK": "0",
        "SLOTWISE_NODE_COUNT": "1",
        "SLOTWISE_GPUS": "1",
        "SLOTWISE_GPU_TYPE": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", MODULES[kind], str(scratch / "spec.yaml")]
    done = subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True, timeout=300)
    metrics = scratch / "metrics.json"
    return done.returncode, done.stderr, json.loads(metrics.read_text()) if metrics.exists() else {}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Storage with a model that was trained in it, and the training's metrics."""
    root = tmp_path_factory.mktemp("kinds") / "storage"
    root.mkdir()
    code, stderr, metrics = run(root, "teach", "training", {"config": TINY})
    assert code == 0, stderr
    return root, metrics


def test_training_publishes_a_model_and_measures_its_mfu(trained: tuple[Path, dict[str, Any]]) -> None:
    root, metrics = trained
    keys = open_storage(str(root)).keys("outputs/teach/model/")
    assert any(key.endswith(".safetensors") for key in keys) and any(
        key.endswith("manifest.json") for key in keys
    )
    assert 0 < metrics["mfu"] < 1.5
    assert metrics["tokens_per_s"] > 0 and metrics["loss"] > 0
    assert metrics["steps"] == TINY["steps"]


def test_inference_answers_every_row_in_order_and_a_bad_row_is_an_error_row(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    root, _ = trained
    prompts = ["To be", "Friends, Romans", "Once more"]
    lines = [json.dumps({"prompt": text, "n": n}) for n, text in enumerate(prompts)] + ["{not json"]
    open_storage(str(root)).write("questions.jsonl", "\n".join(lines).encode())
    section = {"model": "outputs/teach/model", "input": "questions.jsonl", "max_new_tokens": 4}
    code, stderr, metrics = run(root, "answer", "batch_inference", section)
    assert code == 0, stderr
    text = open_storage(str(root)).read("outputs/answer/rows-00000.jsonl").decode()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row.get("n") for row in rows] == [0, 1, 2, None]
    assert [row["error"] is None for row in rows] == [True, True, True, False]
    assert metrics["rows_done"] == 4 and metrics["rows_failed"] == 1


def test_quantization_measures_before_and_after_and_its_model_can_be_used(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    root, _ = trained
    section = {"model": "outputs/teach/model", "windows": 2, "seq_len": 64, "max_perplexity_increase": 0.5}
    code, stderr, metrics = run(root, "shrink", "quantization", section)
    assert code == 0, stderr
    assert metrics["perplexity_before"] > 1 and metrics["perplexity_after"] > 1
    assert metrics["bytes_after"] < metrics["bytes_before"]
    open_storage(str(root)).write("one.jsonl", b'{"prompt": "To be"}\n')
    section = {"model": "outputs/shrink/model", "input": "one.jsonl", "max_new_tokens": 2}
    code, stderr, metrics = run(root, "use", "batch_inference", section)
    assert code == 0, stderr
    assert metrics["rows_done"] == 1


@pytest.mark.parametrize(
    ("kind", "section", "told"),
    [
        ("training", {"config": {**TINY, "stepps": 3}}, "stepps"),
        ("training", {"config": {**TINY, "model": "llama-none"}}, "llama-none"),
        ("training", {"config": "no/such.yaml"}, "no/such.yaml"),
        ("batch_inference", {"model": "outputs/nothing", "input": "../../etc/passwd"}, "../../etc/passwd"),
        ("quantization", {"model": "outputs/nothing"}, "outputs/nothing"),
    ],
)
def test_a_mistake_in_the_section_is_one_line_and_exit_code_2(
    tmp_path: Path, kind: str, section: dict[str, Any], told: str
) -> None:
    (tmp_path / "storage").mkdir()
    code, stderr, _ = run(tmp_path / "storage", "wrong", kind, section)
    assert code == 2
    assert "Traceback" not in stderr
    assert told in stderr.strip().splitlines()[-1]
