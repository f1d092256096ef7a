"""Two gloo processes: the curve of one, with as few collectives as a step needs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import wait_for
from tests.training.pair import LAYOUTS, ON_TWO_NODES, STEPS
from tests.training.small_runs import SMALL
from training import models
from training.__main__ import main
from training.config import TrainingConfig, plain_of
from training.output import write_model
from training.processes import free_port, run_quietly
from training.trainer import train

RUN = {
    **SMALL.model_dump(exclude_unset=True),
    "global_batch": 8,
    "steps": 8,
    "checkpoint_every": 4,
    "eval_every": 3,
}
GROUPS = 3  # of weights: two layers, and the rest


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes did in each layout."""
    answer = tmp_path_factory.mktemp("pair") / "answer.json"
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.training.pair", str(answer)]
    code, said = run_quietly(command, 2, environment)
    assert code == 0, said
    found = json.loads(answer.read_text())
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[float | None, ...]:
    """The same steps of one process, plain."""
    config = plain_of(SMALL.model_copy(update={"global_batch": 16}), 1)
    directory = tmp_path_factory.mktemp("alone")
    found = train(config.model_copy(update={"checkpoint_every": 99}), directory)
    return found.progress.losses[:STEPS]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_what_one_process_learns(
    pair: dict[str, Any], alone: tuple[float, ...], layout: str
) -> None:
    assert pair[layout]["losses"] == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(
    ("layout", "reduce_scatters", "all_gathers"),
    [
        ("fsdp", GROUPS, GROUPS),
        ("fsdp, every pass", 4 * GROUPS, None),
        ("fsdp, both layers together", 2, 2),
    ],
)
def test_four_passes_need_one_reduce_scatter_for_each_group(
    pair: dict[str, Any], layout: str, reduce_scatters: int, all_gathers: int | None
) -> None:
    assert pair[layout]["passes"] == 4
    found = pair[layout]["collectives"]
    assert found["reduce_scatter"] == reduce_scatters
    if all_gathers is None:  # given back after each pass: gathered again in the next
        assert found["all_gather"] >= 4 * GROUPS
    else:
        assert found["all_gather"] == all_gathers


def test_ddp_exchanges_gradients_once_a_step(pair: dict[str, Any]) -> None:
    once, often = (pair[name]["collectives"]["all_reduce"] for name in ("ddp", "ddp, every pass"))
    buckets = (often - once) // 3
    assert often - once == 3 * buckets > 0  # three passes less
    assert once == buckets + 1  # and the loss, with what else is summed, in one


@pytest.mark.long
def test_two_nodes_of_two_shard_inside_and_replicate_across(tmp_path: Path, alone: tuple[float, ...]) -> None:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2"}
    shared |= {"WORLD_SIZE": "4"}
    command = [sys.executable, "-m", "tests.training.pair", str(tmp_path / "answer.json"), *ON_TWO_NODES]
    processes = [
        subprocess.Popen(
            command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)}
        )
        for rank in range(4)
    ]
    try:
        assert [process.wait(240) for process in processes] == [0] * 4
    finally:
        for process in processes:
            process.kill()
            process.wait()
    answer = json.loads((tmp_path / "answer.json").read_text())
    for name, found in answer.items():
        assert found["losses"] == pytest.approx(alone, rel=0.02 if "bf16" in name else 1e-4), name
        assert found["passes"] == 2
        assert found["collectives"]["reduce_scatter"] == GROUPS
    assert answer["fsdp, recomputed"]["collectives"]["all_gather"] == GROUPS
    found = answer["hsdp"]
    assert found["collectives"]["all_reduce"] == GROUPS + 2  # across nodes; the norm, the loss


def run_file(tmp_path: Path, **changes: Any) -> Path:
    """The configuration of a small run as a file."""
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({**RUN, **changes}))
    return file


def curve(output: Path) -> list[float]:
    """The losses that a run left."""
    return [json.loads(line)["loss"] for line in (output / "curve.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)], ids=["narrower", "wider"])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path, first: int, then: int) -> None:
    shared: dict[str, Any] = {"schedule": "constant"}
    whole = train(TrainingConfig(**RUN, **shared), tmp_path / "whole").progress.losses
    output = tmp_path / "out"
    for processes, steps in ((first, 4), (then, 8)):
        file = run_file(tmp_path, **shared, parallel="fsdp", steps=steps)
        assert main(["run", str(file), "--output", str(output), "--processes", str(processes)]) == 0
    assert curve(output) == pytest.approx(whole, rel=1e-4)
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["steps"] for line in metrics] == list(range(1, 9))
    assert [line["processes"] for line in metrics] == [first] * 4 + [then] * 4


@pytest.mark.long
@pytest.mark.parametrize("source", ["fresh", "a directory"])
def test_fifty_sharded_steps_are_those_of_one_process(tmp_path: Path, source: str) -> None:
    import torch

    changes: dict[str, Any] = {"steps": 50, "checkpoint_every": 25}
    if source == "a directory":
        given = models.build("llama-micro", seed=9).to(torch.bfloat16)
        write_model(given, tmp_path / "given", None)
        changes["model"] = str(tmp_path / "given")
    alone = train(TrainingConfig(**{**RUN, **changes}), tmp_path / "alone")
    file, output = run_file(tmp_path, **changes, parallel="fsdp"), tmp_path / "out"
    assert main(["run", str(file), "--output", str(output), "--processes", "2"]) == 0
    assert curve(output) == pytest.approx(alone.progress.losses, rel=1e-3)
    one, two = (models.load(str(place / "model")) for place in (tmp_path / "alone", output))
    for name, weight in one.named_parameters():
        assert torch.allclose(weight, two.get_parameter(name), atol=1e-3), name


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_torchrun_starts_a_run_that_learns_the_same_and_says_nothing_else(
    tmp_path: Path, parallel: str
) -> None:
    shared: dict[str, Any] = {"schedule": "constant"}
    whole = train(TrainingConfig(**RUN, **shared), tmp_path / "whole").progress.losses
    file, output = run_file(tmp_path, **shared, parallel=parallel), tmp_path / "out"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "training", "run", str(file), "--output", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert curve(output) == pytest.approx(whole, rel=1e-4)


@pytest.mark.long
def test_sigterm_saves_and_leaves(tmp_path: Path) -> None:
    file = run_file(tmp_path, steps=100_000, checkpoint_every=100_000)
    output = tmp_path / "out"
    command = [sys.executable, "-m", "training", "run", str(file), "--output", str(output)]
    run = subprocess.Popen([*command, "--processes", "2"], stdout=subprocess.PIPE, text=True)
    metrics = output / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 3, "a few steps")
        run.send_signal(signal.SIGTERM)
        said, _ = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 143
    (checkpoint,) = (output / "checkpoints").iterdir()
    step = json.loads((checkpoint / "state.json").read_text())["step"]
    assert f"stopped after step {step}, which is saved" in said
