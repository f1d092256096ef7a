"""A kind's program for tests: as a process, the way the runner starts it, or in the test's own process."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks import program as programs
from tasks.program import Metrics, Program, publish_directory
from tasks.storage import Storage, open_storage

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch loads, which no test module does at import

# A batch job of a few rows.
ROWS: dict[str, Any] = {
    "input": "in/rows.jsonl",
    "model": "models/small",
    "max_new_tokens": 6,
    "batch": 4,
    "shard_rows": 5,
}


class Job:
    """A job's section and the place of one of its ranks; each `start` is an attempt."""

    def __init__(
        self, module: str, root: Path, name: str, section: dict[str, Any], rank: int = 0, **surroundings: str
    ) -> None:
        self.module = module
        self.scratch = root.parent / "scratch" / name / str(rank)
        self.scratch.mkdir(parents=True, exist_ok=True)
        (self.scratch / "spec.yaml").write_text(yaml.safe_dump(section))
        self.output = root / "outputs" / name
        self.environment = {
            **os.environ,
            "SLOTWISE_JOB": name,
            "SLOTWISE_STORAGE": str(root),
            "SLOTWISE_OUTPUT": f"outputs/{name}",
            "SLOTWISE_METRICS": str(self.scratch / "metrics.json"),
            "SLOTWISE_NODE_RANK": str(rank),
            "SLOTWISE_NODE_COUNT": "1",
            "SLOTWISE_GPUS": "1",
            "SLOTWISE_GPU_TYPE": "cpu",
            "MASTER_ADDR": "127.0.0.1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(root.parent / "cache"),
            **surroundings,
        }

    def start(self) -> "subprocess.Popen[str]":
        """Start the program; what it says goes to a file."""
        with (self.scratch / "said").open("w") as said:
            command = [sys.executable, "-m", self.module, "spec.yaml"]
            return subprocess.Popen(
                command, cwd=self.scratch, env=self.environment, stdout=said, stderr=said, text=True
            )

    def run_here(self, work: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch) -> int:
        """The same in the test's own process; for jobs that end before a model is loaded."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(self.scratch)
        with (self.scratch / "said").open("w") as said, redirect_stdout(said), redirect_stderr(said):
            return programs._run(work, ["spec.yaml"])

    def run(self) -> int:
        """Run the program to its end; its exit code."""
        process = self.start()
        try:
            return process.wait(300)
        finally:
            process.kill()
            process.wait()

    @property
    def said(self) -> str:
        """What the last attempt wrote to stdout and stderr."""
        return (self.scratch / "said").read_text()

    @property
    def metrics(self) -> dict[str, Any]:
        """What the last attempt reported so far; nothing before it did."""
        try:
            found = json.loads((self.scratch / "metrics.json").read_text())
        except FileNotFoundError:
            return {}
        assert isinstance(found, dict)
        return found


def program(storage: Storage, scratch: Path, section: dict[str, Any], name: str = "job") -> Program:
    """A program in the test's own process."""
    return Program(
        name="spec.yaml",
        text=yaml.safe_dump(section),
        by_hand=False,
        storage=storage,
        output=f"outputs/{name}",
        scratch=scratch,
        metrics=Metrics(None),
        node_rank=0,
        nodes=1,
        gpus=1,
        gpu_type="cpu",
        own_process=False,
    )


def small_model(directory: Path, steps: int = 15) -> Path:
    """The directory of a model of 0.1 M parameters, trained for a moment on the plays."""
    from training.config import TrainingConfig
    from training.trainer import train

    config = TrainingConfig(
        model="llama-micro",
        seq_len=32,
        steps=steps,
        warmup=2,
        lr=5e-3,
        held_out_windows=1,
        checkpoint_every=1000,
    )
    return train(config, directory).directory


def stocked(directory: Path, model: Path) -> Path:
    """A storage directory with the model in it."""
    root = directory / "storage"
    root.mkdir()
    publish_directory(open_storage(str(root)), "models/small", model)
    return root


def put(storage: Storage, *lines: object) -> None:
    """Leave the input; what is not bytes becomes a line of JSON."""
    data = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    storage.write("in/rows.jsonl", b"\n".join(data) + b"\n")


def rows(storage: Storage, name: str = "job") -> list[dict[str, Any]]:
    """All output rows, in the order of their shards."""
    shards = storage.keys(f"outputs/{name}/rows-")
    return [json.loads(line) for key in shards for line in storage.read(key).splitlines()]


def by_hand(module: str, root: Path, section: dict[str, Any], name: str) -> str:
    """What `python -m MODULE NAME.yaml` says in the storage's directory, where there is no Prefect."""
    (root / f"{name}.yaml").write_text(yaml.safe_dump(section))
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith("SLOTWISE_")}
    code = (
        "import runpy, sys\nsys.modules['prefect'] = None\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", code, f"{name}.yaml"]
    done = subprocess.run(command, cwd=root, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
