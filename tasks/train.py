"""The program of `kind: training`: run the trainer on this node's GPUs, with its checkpoints in storage.

Invariant: whatever ends an attempt, the next one goes on from the newest checkpoint that is whole, and the
model appears under `<output>/model/` only when training is done. One process per GPU; on virtual GPUs one
per node, with the threads it was given. A gang trains with DDP.
"""

import contextlib
import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import field_validator

from tasks.program import (
    JobFailedError,
    Place,
    Program,
    Terminated,
    leave_out,
    local_directory,
    local_file,
    local_model,
    main,
    publish_directory,
    read_text,
)
from tasks.specfile import SpecError, Strict, read_spec
from tasks.storage import NotFoundError
from training.checkpoints import CheckpointError, name_of
from training.config import TrainingConfig, checked, parse_config
from training.manifest import MANIFEST, ManifestError
from training.models import SHIPPED
from training.processes import launch

WORKER = "SLOTWISE_WORKER"  # set in the processes that this one started, one per GPU


class TrainSpec(Strict):
    """The section `training:` of a job."""

    config: Any  # a training configuration, or the key of a YAML file that holds one

    @field_validator("config")
    @classmethod
    def _mapping_or_key(cls, value: Any) -> Any:
        if not isinstance(value, Mapping | str):
            raise ValueError("expected a training configuration, or the key of a YAML file")
        return value


def train_job(program: Program) -> None:
    """Train what the spec says and publish the model."""
    config = read_config(program)
    processes = 1 if program.virtual else program.gpus
    config.accumulation_for(processes * program.nodes)
    if processes > 1 and WORKER not in os.environ:
        _start_workers(program, processes)
        return
    if WORKER not in os.environ:
        os.environ |= {
            "RANK": str(program.node_rank),
            "WORLD_SIZE": str(program.nodes),
            "LOCAL_RANK": "0",
        }
    _train(program, _with_local_files(program, config))


def read_config(program: Program) -> TrainingConfig:
    """The configuration that the spec holds or names. Raises SpecError or ConfigError."""
    given = read_spec(TrainSpec, program.text, program.name).config
    if isinstance(given, str):
        return parse_config(read_text(program.place("config", given)), given)
    return checked(TrainingConfig, given, f"{program.name}: config")


class StorageCheckpoints:
    """Checkpoints under `<output>/checkpoints/` in storage; `scratch` holds copies of those fetched."""

    def __init__(self, program: Program) -> None:
        self.storage = program.storage
        self.prefix = f"{program.output}/checkpoints"
        self.scratch = program.scratch / "restored"

    def steps(self) -> list[int]:
        found = []
        for key in self.storage.keys(f"{self.prefix}/step-"):
            step, _, name = key.removeprefix(f"{self.prefix}/step-").partition("/")
            if name == MANIFEST and step.isdecimal():
                found.append(int(step))
        return found

    def fetch(self, step: int) -> Path:
        key = f"{self.prefix}/{name_of(step)}"
        try:
            return local_directory(Place(self.storage, key, key), self.scratch / name_of(step))
        except (ManifestError, NotFoundError) as error:
            raise CheckpointError(str(error)) from None

    def publish(self, step: int, directory: Path) -> None:
        publish_directory(self.storage, f"{self.prefix}/{name_of(step)}", directory)

    def remove(self, step: int) -> None:
        prefix = f"{self.prefix}/{name_of(step)}"
        self.storage.delete(f"{prefix}/{MANIFEST}")  # first, so that what is left is no checkpoint
        for key in self.storage.keys(f"{prefix}/"):
            self.storage.delete(key)


def _train(program: Program, config: TrainingConfig) -> None:
    if program.own_process:
        leave_out("torchao", "scipy")
    import torch

    from training.trainer import Stopped, TrainingError, train, write_curve

    if not program.virtual and not torch.cuda.is_available():
        raise JobFailedError(f"this node has GPUs of type {program.gpu_type}, but torch sees none")

    def report(metrics: dict[str, Any]) -> None:
        program.metrics.update(**metrics)
        if metrics["checkpoint_step"] == metrics["steps"]:
            print(
                f"step {metrics['steps']}/{metrics['steps_total']}: loss {metrics['loss']:.4f}, saved",
                flush=True,
            )

    with program.stop_deferred() as stopping:
        try:
            result = train(
                config,
                program.scratch / "training",
                StorageCheckpoints(program),
                report,
                stopping,
                lambda line: print(line, flush=True),
            )
        except Stopped as stopped:
            raise Terminated(str(stopped)) from None
        except TrainingError as error:
            raise JobFailedError(str(error)) from None
    program.metrics.update(**result.metrics)
    if os.environ["RANK"] != "0":
        return
    curve = program.scratch / "curve.jsonl"
    write_curve(curve, result.progress.losses)
    program.storage.upload(f"{program.output}/curve.jsonl", curve)
    publish_directory(program.storage, f"{program.output}/model", result.directory)
    with contextlib.suppress(OSError):
        curve.unlink()
    program.metrics.update(outputs=[f"{program.output}/model", f"{program.output}/curve.jsonl"])


def _with_local_files(program: Program, config: TrainingConfig) -> TrainingConfig:
    """The configuration with the files that it names in storage as files on this machine."""
    changed: dict[str, Any] = {}
    if config.model not in SHIPPED:
        try:
            changed["model"] = str(local_model(program.place("config: model", config.model), program.scratch))
        except SpecError as error:
            near = difflib.get_close_matches(config.model, SHIPPED, 1, 0.6)
            raise SpecError(f"{error}; did you mean {near[0]}?" if near else str(error)) from None
    if config.data != "shakespeare":
        keys = [config.data] if isinstance(config.data, str) else config.data
        changed["data"] = [
            str(local_file(program.place("config: data", key), program.scratch)) for key in keys
        ]
    return config.model_copy(update=changed)


def _start_workers(program: Program, processes: int) -> None:
    """One worker per GPU of this node; ends as they end."""
    command = [sys.executable, "-m", "tasks.train", *sys.argv[1:]]
    code = launch(command, processes, {**os.environ, WORKER: "1"}, program.node_rank, program.nodes)
    if code:
        sys.exit(code)  # the worker has said why
    program.metrics.path = None  # its metrics are the job's


if __name__ == "__main__":
    main(train_job, sys.argv[1:])
