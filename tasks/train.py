"""The program of `kind: training`: run the trainer on this node's GPUs, with its checkpoints in storage.

Invariant: whatever ends an attempt, the next one goes on from the newest checkpoint that is whole, and the
model appears under `<output>/model/` only when training is done. One process per GPU; on virtual GPUs one
per node, with the threads it was given. Levers that say `auto` are measured on the node before the job's
processes start, once for all jobs alike (see tuned); the processes of a gang over several nodes measure
together, and leave there what they found.
"""

import contextlib
import difflib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import field_validator

from tasks.program import (
    VIRTUAL,
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
from tasks.tuned import Circumstances, Remembered, forget, keep, measured_together, tuned
from training.checkpoints import CheckpointError, name_of
from training.config import TrainingConfig, checked, load_config, parse_config
from training.launching import gain
from training.manifest import MANIFEST, Entry, ManifestError, manifest_bytes
from training.models import SHIPPED
from training.processes import launch
from training.record import versions
from training.trainer import OutOfMemory, Stopped, TrainingError, train, write_curve
from training.tuner import open_levers

TUNING_HOURS = "SLOTWISE_TUNING_HOURS"  # what measuring the levers took of this attempt
WORKER = "SLOTWISE_WORKER"  # set in the processes that this one started, one per GPU


class TrainSpec(Strict):
    """The section `training:` of a job."""

    config: Any  # a training configuration, or the key of a YAML file that holds one
    compare: bool = False  # measure the plain loop though no lever is open: what do those that are set save

    @field_validator("config")
    @classmethod
    def _mapping_or_key(cls, value: Any) -> Any:
        if not isinstance(value, Mapping | str):
            raise ValueError("expected a training configuration, or the key of a YAML file")
        return value


def train_job(program: Program) -> None:
    """Train what the spec says and publish the model."""
    spec = read_spec(TrainSpec, program.text, program.name)
    config = read_config(program, spec)
    processes = 1 if program.virtual else program.gpus
    config.accumulation_for(processes * program.nodes)
    model, config = config.model, _with_local_files(program, config)
    started = WORKER in os.environ
    may_measure = not started and program.nodes == 1
    if may_measure and (spec.compare or open_levers(config)):
        _check_gpus(program)
    began = time.monotonic()
    config, known, alike = tuned(
        program.storage,
        config,
        program.gpu_type or VIRTUAL,
        processes * program.nodes,
        program.output,
        may_measure,
        _say,
        spec.compare,
    )
    if not started:
        measured = known is not None and known.job == program.output
        os.environ[TUNING_HOURS] = str((time.monotonic() - began) / 3600 if measured else 0.0)
    if processes > 1 and not started:
        _start_workers(program, processes)
        return
    if not started:
        os.environ |= {
            "RANK": str(program.node_rank),
            "WORLD_SIZE": str(program.nodes),
            "LOCAL_RANK": "0",
        }
    try:
        _train(program, config, model, known, alike)
    except OutOfMemory as error:
        if alike is not None:  # the next attempt measures again
            forget(program.storage, alike.key)
        raise JobFailedError(str(error)) from None


def read_config(program: Program, spec: TrainSpec) -> TrainingConfig:
    """The configuration that the spec holds or names. Raises SpecError or ConfigError."""
    given = spec.config
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

    def begin(self, step: int) -> None:
        self.remove(step)

    def add(self, step: int, name: str, file: Path) -> None:
        self.storage.upload(f"{self.prefix}/{name_of(step)}/{name}", file)

    def complete(self, step: int, entries: dict[str, Entry]) -> None:
        self.storage.write(f"{self.prefix}/{name_of(step)}/{MANIFEST}", manifest_bytes(entries))

    def remove(self, step: int) -> None:
        prefix = f"{self.prefix}/{name_of(step)}"
        self.storage.delete(f"{prefix}/{MANIFEST}")  # first, so that what is left is no checkpoint
        for key in self.storage.keys(f"{prefix}/"):
            self.storage.delete(key)


def _train(
    program: Program,
    config: TrainingConfig,
    model: str,
    known: Remembered | None,
    alike: Circumstances | None,
) -> None:
    if program.own_process:
        leave_out("scipy", *(() if config.precision == "fp8" else ("torchao",)))
    _check_gpus(program)
    together = alike if known is None and program.nodes > 1 else None  # what the gang is to measure

    def told(metrics: dict[str, Any]) -> dict[str, Any]:
        about = {"model": model, "seq_len": config.seq_len, **_surroundings(program, known)}
        return {**_saved(program, gain(metrics, known.plain if known else None)), **about}

    def report(metrics: dict[str, Any]) -> None:
        nonlocal known, together
        if together is not None and os.environ["RANK"] == "0":
            known, together = _learned(program, together), None
        program.metrics.update(**told(metrics))
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
                _say,
                compare=together is not None,
            )
        except Stopped as stopped:
            raise Terminated(str(stopped)) from None
        except OutOfMemory:
            raise
        except TrainingError as error:
            raise JobFailedError(str(error)) from None
    if os.environ["RANK"] != "0":
        return  # the first speaks for the gang
    program.metrics.update(**told(result.metrics))
    curve = program.scratch / "curve.jsonl"
    write_curve(curve, result.progress.losses)
    program.storage.upload(f"{program.output}/curve.jsonl", curve)
    program.storage.upload(f"{program.output}/resolved.yaml", program.scratch / "training/resolved.yaml")
    publish_directory(program.storage, f"{program.output}/model", result.directory)
    with contextlib.suppress(OSError):
        curve.unlink()
    program.metrics.update(outputs=[f"{program.output}/model", f"{program.output}/curve.jsonl"])


def _learned(program: Program, alike: Circumstances) -> Remembered | None:
    """What the gang has measured, kept for the next job alike."""
    record = load_config(program.scratch / "training/resolved.yaml").record or {}
    found = measured_together(record, program.output)
    if found is not None:
        os.environ[TUNING_HOURS] = str(record["measuring_s"] / 3600)
        keep(program.storage, alike, found, _say)
    return found


def _saved(program: Program, metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics, with the GPU-hours that the plain loop would have taken more, less those of measuring."""
    if "saved_hours" not in metrics:
        return metrics
    hours = metrics["saved_hours"] - float(os.environ.get(TUNING_HOURS, "0"))
    return {**metrics, "saved_gpu_hours": hours * program.gpus * program.nodes}


def _check_gpus(program: Program) -> None:
    """Rather fail than train for days on a processor."""
    import torch

    if not program.virtual and not torch.cuda.is_available():
        raise JobFailedError(f"this node has GPUs of type {program.gpu_type}, but torch sees none")


def _surroundings(program: Program, known: Remembered | None) -> dict[str, Any]:
    """What the ledger knows a tuned setting by, and where this one is from."""
    own = known is not None and known.job == program.output
    return {
        "gpu_type": program.gpu_type or VIRTUAL,
        "versions": json.dumps(versions()),
        "tuned": "no" if known is None else "measured" if own else f"as {known.job} measured",
    }


def _say(line: str) -> None:
    print(line, flush=True)


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
