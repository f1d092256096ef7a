"""Checkpoints: everything a run needs to go on exactly, in one directory per step.

Invariant: a checkpoint is whole or it is not there, and the newest whole one is found after any crash.
Where they are kept is the caller's: anything with the four methods of `Checkpoints`. The cost of exactness
is three times the model's size per checkpoint (weights and both of Adam's moments).
"""

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from training.manifest import ManifestError, verify, write_manifest

STATE, TENSORS = "state.json", "state.pt"
_NAME = re.compile(r"step-(\d+)")


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the message names it and why."""


class Checkpoints(Protocol):
    """A place that keeps checkpoints by step."""

    def steps(self) -> list[int]:
        """Steps of the checkpoints that were published whole."""

    def fetch(self, step: int) -> Path:
        """The checkpoint's directory on this machine. Raises CheckpointError when it is damaged."""

    def publish(self, step: int, directory: Path) -> None:
        """Keep a whole directory as the step's checkpoint; the directory may be moved."""

    def remove(self, step: int) -> None:
        """Drop the step's checkpoint."""


class LocalCheckpoints:
    """Checkpoints as `step-N` below one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def steps(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        return sorted(
            int(match[1]) for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name))
        )

    def fetch(self, step: int) -> Path:
        path = self.directory / name_of(step)
        try:
            verify(path)
        except ManifestError as error:
            raise CheckpointError(str(error)) from None
        return path

    def publish(self, step: int, directory: Path) -> None:
        target = self.directory / name_of(step)
        self.directory.mkdir(parents=True, exist_ok=True)
        if target.exists():  # a damaged one, or the same step again
            shutil.rmtree(target)
        directory.replace(target)

    def remove(self, step: int) -> None:
        target = self.directory / name_of(step)
        with contextlib.suppress(FileNotFoundError):
            (target / "manifest.json").unlink()
        shutil.rmtree(target, ignore_errors=True)


def name_of(step: int) -> str:
    """The directory of a step's checkpoint."""
    return f"step-{step}"


def write_checkpoint(directory: Path, state: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Write a whole checkpoint into a directory, which is emptied first."""
    import torch

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    torch.save(tensors, directory / TENSORS)
    (directory / STATE).write_text(json.dumps(state), encoding="utf-8")
    write_manifest(directory)


def read_checkpoint(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint's state and its tensors. Raises CheckpointError."""
    import torch

    try:
        state = json.loads((directory / STATE).read_text(encoding="utf-8"))
        tensors = torch.load(directory / TENSORS, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises almost anything for a file it cannot read
        raise CheckpointError(f"{directory}: cannot be read: {error}") from error
    return state, tensors


def newest(checkpoints: Checkpoints, warn: Callable[[str], None]) -> tuple[int, Path] | None:
    """The newest undamaged one; `warn` hears of the others. Raises CheckpointError if all are damaged."""
    problem = ""
    for step in sorted(checkpoints.steps(), reverse=True):
        try:
            return step, checkpoints.fetch(step)
        except CheckpointError as error:
            problem = str(error)
            warn(f"checkpoint passed over: {problem}")
    if problem:
        raise CheckpointError(f"no checkpoint is undamaged: {problem}")
    return None
