"""Processes that were started elsewhere, as on two nodes, find their levers together."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.conftest import wait_for
from tests.training.small_runs import SMALL
from training.config import TrainingConfig
from training.processes import free_port
from training.trainer import train

pytestmark = pytest.mark.long
OPEN = {
    **SMALL.model_dump(exclude_unset=True),
    "micro_batch": "auto",
    "activation_checkpointing": "auto",
    "global_batch": 8,
    "steps": 6,
    "tune_probes": 2,
    "tune_steps": 1,
}


def fails_on_one() -> torch.nn.Module:
    """A module that only the first process can make."""
    if os.environ["RANK"] == "1":
        raise RuntimeError("the second node lacks a file")
    return torch.nn.Linear(2, 2)


def on_two_nodes(
    tmp_path: Path,
    config: dict[str, Any],
    *,
    second: dict[str, Any] | None = None,
    meanwhile: Callable[[list["subprocess.Popen[str]"]], None] = lambda processes: None,
) -> list[tuple[int, str, str]]:
    """Run one process as if on each of two nodes, `second` being the other's configuration if it differs;
    exit code, output and errors of each."""
    files = tmp_path / "0.yaml", tmp_path / "1.yaml"
    for file, given in zip(files, (config, second or config), strict=True):
        file.write_text(yaml.safe_dump(given))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    shared |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "training", "run", "--output", str(tmp_path / "out")]
    processes = [
        subprocess.Popen(
            [*command, str(file)],
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    try:
        meanwhile(processes)
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, out, errors) for process, (out, errors) in zip(processes, said, strict=True)]


def test_two_nodes_measure_together_and_learn_what_one_process_learns(tmp_path: Path) -> None:
    first, second = on_two_nodes(tmp_path, OPEN)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    record = yaml.safe_load((tmp_path / "out/resolved.yaml").read_text())["record"]
    assert len(record["probes"]) == 2
    assert all(probe["tokens_per_s"] > 0 for probe in record["probes"])
    fastest = max(record["probes"], key=lambda probe: probe["tokens_per_s"])
    assert record["chosen"] == {name: fastest[name] for name in record["chosen"]}
    assert first[1].count("probe micro_batch") == 2 and "probe" not in second[1]
    curve = [json.loads(line)["loss"] for line in (tmp_path / "out/curve.jsonl").read_text().splitlines()]
    alone = train(TrainingConfig(**{**OPEN, "micro_batch": 8, "activation_checkpointing": "none"}), tmp_path)
    assert curve == pytest.approx(alone.progress.losses, rel=1e-4)

    again = on_two_nodes(tmp_path, {**OPEN, "steps": 8})  # from where it stopped, as it was decided
    assert [code for code, _, _ in again] == [0, 0]
    assert "resumed after step 6" in again[0][1] and "probe" not in again[0][1]


def test_a_node_that_does_not_know_what_the_first_knows_follows_it(tmp_path: Path) -> None:
    """Another gang may leave what it measured between the moments at which two nodes look."""
    known = {**OPEN, "micro_batch": 2, "activation_checkpointing": "selective"}
    for name, first, second in (("open", known, OPEN), ("set", OPEN, known)):
        place = tmp_path / name
        place.mkdir()
        ends = on_two_nodes(place, first, second=second)
        assert [code for code, _, _ in ends] == [0, 0], ends
        assert ends[0][1].count("probe micro_batch") == (0 if name == "open" else 2)


def test_nodes_that_are_told_to_stop_while_they_measure_end_and_leave_nothing_running(tmp_path: Path) -> None:
    probing: list[Path] = []

    def stop(processes: list["subprocess.Popen[str]"]) -> None:
        def children() -> list[str]:
            lists = [Path(f"/proc/{one.pid}/task/{one.pid}/children") for one in processes]
            return [each for found in lists for each in found.read_text().split()]

        wait_for(lambda: len(children()) == 2, "a probe on both")
        probing.extend(Path("/proc") / child for child in children())
        processes[1].send_signal(signal.SIGTERM)

    first, second = on_two_nodes(tmp_path, {**OPEN, "tune_steps": 100_000}, meanwhile=stop)
    assert (first[0], second[0]) == (143, 143), first[2] + second[2]
    assert "stopped before the first step" in first[1]
    assert not any(child.exists() for child in probing)


def test_a_probe_that_fails_on_one_node_ends_on_all(tmp_path: Path) -> None:
    broken = {**OPEN, "model": "module:tests.training.test_gang:fails_on_one"}
    first, second = on_two_nodes(tmp_path, broken)
    assert (first[0], second[0]) == (2, 2)
    for _, _, errors in (first, second):
        assert "none of 2 probed settings ran" in errors and "the second node lacks a file" in errors
        assert errors.count("\n") == 1
    assert not list((tmp_path / "out").glob("**/step-*"))
