"""Training as the runner starts it: killed, stopped, in a gang, and with a spec that cannot work."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tasks.program import is_published
from tasks.storage import open_storage
from tests.conftest import wait_for
from tests.tasks.kind_programs import Job
from training.processes import free_port

CONFIG = {
    "model": "llama-micro",
    "seq_len": 64,
    "micro_batch": 4,
    "global_batch": 8,
    "steps": 40,
    "warmup": 4,
    "lr": 4e-3,
    "checkpoint_every": 8,
    "held_out_windows": 4,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "storage").mkdir()
    return tmp_path / "storage"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run that nothing interrupted."""
    root = tmp_path_factory.mktemp("whole") / "storage"
    root.mkdir()
    job = Job("tasks.train", root, "whole", {"config": CONFIG})
    assert job.run() == 0, job.said
    return job


def curve(job: Job) -> list[float]:
    """The loss of each step, as the job left it."""
    return [json.loads(line)["loss"] for line in (job.output / "curve.jsonl").read_text().splitlines()]


def test_a_run_reports_what_it_did_and_what_it_is_measured_by(whole: Job) -> None:
    metrics = whole.metrics
    assert metrics["steps"] == metrics["steps_total"] == 40
    assert metrics["progress"] == 1
    assert 0 < metrics["mfu"] <= 1
    assert metrics["mfu_convention"] == "matmul"
    assert "1 thread" in metrics["peak_source"]
    assert metrics["loss"] == curve(whole)[-1] < 4.2 < curve(whole)[0]
    assert metrics["outputs"] == ["outputs/whole/model", "outputs/whole/curve.jsonl"]


def test_a_killed_run_goes_on_to_the_very_same_curve(whole: Job, root: Path) -> None:
    job = Job("tasks.train", root, "killed", {"config": CONFIG})
    process = job.start()
    try:
        storage = open_storage(str(root))
        wait_for(lambda: is_published(storage, "outputs/killed/checkpoints/step-8"), "a checkpoint")
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not is_published(storage, "outputs/killed/model")
    assert job.run() == 0, job.said
    assert "resumed after step" in job.said
    assert curve(job) == curve(whole)
    weights = "model/model.safetensors"
    assert (job.output / weights).read_bytes() == (whole.output / weights).read_bytes()


def test_a_run_that_is_told_to_stop_saves_its_step_and_leaves(root: Path) -> None:
    long = {**CONFIG, "steps": 100_000, "checkpoint_every": 100_000}  # far from its end, however fast
    job = Job("tasks.train", root, "stopped", {"config": long})
    process = job.start()
    try:
        wait_for(lambda: job.metrics.get("steps", 0) >= 3, "a few steps")
        process.terminate()
        assert process.wait(60) == 143
    finally:
        process.kill()
        process.wait()
    (checkpoint,) = (job.output / "checkpoints").iterdir()
    state = json.loads((checkpoint / "state.json").read_text())
    assert job.metrics["message"] == f"stopped after step {state['step']}, which is saved"
    assert len(state["losses"]) == state["step"] >= 3


def ranks_of_a_gang(root: Path, name: str, section: dict[str, Any]) -> list[Job]:
    """One process on each of two nodes."""
    around = {"SLOTWISE_NODE_COUNT": "2", "MASTER_PORT": str(free_port())}
    return [Job("tasks.train", root, name, section, rank, **around) for rank in (0, 1)]


def run_together(gang: list[Job]) -> list[int]:
    """The exit code of each rank."""
    processes = [job.start() for job in gang]
    try:
        return [process.wait(300) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_gang_of_two_learns_what_one_process_learns(whole: Job, root: Path) -> None:
    gang = ranks_of_a_gang(root, "gang", {"config": CONFIG})
    assert run_together(gang) == [0, 0], [job.said for job in gang]
    assert gang[0].metrics["processes"] == 2
    assert curve(gang[0]) == pytest.approx(curve(whole), rel=1e-3)
    assert is_published(open_storage(str(root)), "outputs/gang/model")


@pytest.mark.long
def test_a_gang_measures_together_and_the_next_one_starts_with_what_it_found(root: Path) -> None:
    levers = {"micro_batch": "auto", "activation_checkpointing": "auto", "tune_probes": 2, "tune_steps": 1}
    section = {"config": {**CONFIG, **levers, "global_batch": 4}}
    first, second = ranks_of_a_gang(root, "measures", section), ranks_of_a_gang(root, "takes", section)
    for gang in (first, second):
        assert run_together(gang) == [0, 0], [job.said for job in gang]
    assert first[0].said.count("probe micro_batch") == 2
    assert first[0].said.count("plain baseline: ") == 1
    assert "probe micro_batch" not in second[0].said
    assert "levers as outputs/measures measured them: fastest of 2 probed" in second[0].said
    found, taken = first[0].metrics, second[0].metrics
    assert (found["tuned"], taken["tuned"]) == ("measured", "as outputs/measures measured")
    assert taken["levers"] == found["levers"]
    assert taken["plain_tokens_per_s"] == found["plain_tokens_per_s"] > 0
    for outcome in (found, taken):
        assert outcome["gain"] == pytest.approx(outcome["tokens_per_s"] / outcome["plain_tokens_per_s"])
    hours = found["tokens"] * (1 / found["plain_tokens_per_s"] - 1 / found["tokens_per_s"]) / 3600
    assert found["saved_gpu_hours"] < 2 * hours, "measuring took GPU-hours too"
    assert taken["saved_gpu_hours"] == pytest.approx(2 * taken["saved_hours"])


def test_a_gpu_that_torch_does_not_see_is_a_failure_and_not_a_slow_run(root: Path) -> None:
    section = {"config": CONFIG}
    job = Job(
        "tasks.train", root, "blind", section, SLOTWISE_GPU_TYPE="H100", SLOTWISE_GPUS="2", MASTER_PORT="1"
    )
    assert job.run() == 1
    assert job.metrics["message"] == "this node has GPUs of type H100, but torch sees none"


WRONG: list[tuple[Any, str]] = [
    ({"config": {**CONFIG, "model": "llama-tinny"}}, "did you mean llama-tiny?"),
    ({"config": {**CONFIG, "model": "../model"}}, "expected a key inside the storage root"),
    ({"config": {**CONFIG, "data": "/etc/hostname"}}, "expected a key inside the storage root"),
    ({"config": {**CONFIG, "data": "gone.txt"}}, "data: 'gone.txt': no such object in"),
    ({"config": {**CONFIG, "warm_up": 3}}, "spec.yaml: config: warm_up: unknown key; did you mean warmup?"),
    ({"config": {**CONFIG, "steps": -1}}, "config: steps: -1: expected at least 1"),
    ({"config": "gone.yaml"}, "config: 'gone.yaml': no such object in"),
    ({"config": 5}, "config: 5: expected a training configuration, or the key of a YAML file"),
    ({"confg": {}}, "confg: unknown key; did you mean config?"),
]


@pytest.mark.parametrize(("section", "message"), WRONG)
def test_a_spec_that_cannot_work_is_one_line_and_is_not_tried_again(
    root: Path, section: Any, message: str
) -> None:
    job = Job("tasks.train", root, "wrong", section)
    assert job.run() == 2
    assert message in job.said
    assert "Traceback" not in job.said
    assert job.metrics["message"] in job.said
    assert not job.output.exists()


def test_a_config_in_storage_and_text_in_storage_are_used(root: Path) -> None:
    (root / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    (root / "c.yaml").write_text(
        "{model: llama-micro, data: text.txt, seq_len: 16, steps: 2, micro_batch: 1}"
    )
    job = Job("tasks.train", root, "own", {"config": "c.yaml"})
    assert job.run() == 0, job.said
    assert job.metrics["flops"] > 0
