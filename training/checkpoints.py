"""Checkpoints: everything a run needs to go on exactly, in one directory per step.

Invariant: a checkpoint is whole or it is not there, and the newest whole one is found after any crash.
Tensors are written by torch's distributed checkpoint, each process its own part, so that another number of
processes can read them; the manifest comes last. Where they are kept is the caller's: anything with the
methods of `Checkpoints`. The cost of exactness is three times the fp32 model's size per checkpoint (weights
and both of Adam's moments), and the same again in host memory while it is written.
"""

import contextlib
import json
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from training import objects
from training.config import ConfigError
from training.manifest import MANIFEST, Entry, ManifestError, entries_of, manifest_bytes, verify
from training.processes import World

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
STATE = "state.json"
CLOSING_S = 60.0
_NAME = re.compile(r"step-(\d+)")


class CheckpointError(Exception):
    """A checkpoint that cannot be used or written; the message names it and why."""


class Checkpoints(Protocol):
    """A place that keeps checkpoints by step. Every process adds its files; the first one completes."""

    def steps(self) -> list[int]:
        """Steps of the checkpoints that were completed."""

    def fetch(self, step: int) -> Path:
        """The checkpoint's directory on this machine. Raises CheckpointError when it is damaged."""

    def begin(self, step: int) -> None:
        """Make room for the step's checkpoint: what lies there is no checkpoint from now on."""

    def add(self, step: int, name: str, file: Path) -> None:
        """Keep one file of it; the file may be moved."""

    def complete(self, step: int, entries: dict[str, Entry]) -> None:
        """All files are there: from now on it is a checkpoint."""

    def remove(self, step: int) -> None:
        """Drop the step's checkpoint."""


class LocalCheckpoints:
    """Checkpoints as `step-N` below one directory, which all processes see."""

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

    def begin(self, step: int) -> None:
        self.remove(step)
        for left in self.directory.glob(".writing-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._writing(step).mkdir(parents=True)

    def add(self, step: int, name: str, file: Path) -> None:
        target = self._writing(step) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(file, target)

    def complete(self, step: int, entries: dict[str, Entry]) -> None:
        writing = self._writing(step)
        (writing / MANIFEST).write_bytes(manifest_bytes(entries))
        writing.replace(self.directory / name_of(step))

    def remove(self, step: int) -> None:
        target = self.directory / name_of(step)
        with contextlib.suppress(FileNotFoundError):
            (target / MANIFEST).unlink()
        shutil.rmtree(target, ignore_errors=True)

    def _writing(self, step: int) -> Path:
        return self.directory / f".writing-{name_of(step)}"


class ObjectCheckpoints:
    """Checkpoints under an S3 prefix; `scratch` holds copies of those fetched."""

    def __init__(self, url: str, scratch: Path) -> None:
        self.url = url.rstrip("/")
        self.scratch = scratch

    def steps(self) -> list[int]:
        found = []
        for key in _ask(lambda: objects.keys(f"{self.url}/step-")):
            step, _, name = key.partition("/")
            if name == MANIFEST and step.isdecimal():
                found.append(int(step))
        return sorted(found)

    def fetch(self, step: int) -> Path:
        return _ask(lambda: objects.fetched(self._place(step), self.scratch))

    def begin(self, step: int) -> None:
        self.remove(step)

    def add(self, step: int, name: str, file: Path) -> None:
        _ask(lambda: objects.put(f"{self._place(step)}/{name}", file))

    def complete(self, step: int, entries: dict[str, Entry]) -> None:
        self.scratch.mkdir(parents=True, exist_ok=True)
        file = self.scratch / f".{name_of(step)}.manifest"
        file.write_bytes(manifest_bytes(entries))
        _ask(lambda: objects.put(f"{self._place(step)}/{MANIFEST}", file))
        file.unlink()

    def remove(self, step: int) -> None:
        place = self._place(step)
        _ask(lambda: objects.delete(f"{place}/{MANIFEST}"))  # first: what is left is no checkpoint
        for name in _ask(lambda: objects.keys(f"{place}/")):
            _ask(partial(objects.delete, f"{place}/{name}"))

    def _place(self, step: int) -> str:
        return f"{self.url}/{name_of(step)}"


def name_of(step: int) -> str:
    """The directory of a step's checkpoint."""
    return f"step-{step}"


def _ask(operation: Callable[[], T]) -> T:
    """Do something in S3, with its errors as ours."""
    try:
        return operation()
    except (objects.ObjectError, ManifestError) as error:
        raise CheckpointError(str(error)) from None


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


class Writer:
    """Writes checkpoints of a run, one after the other, while training goes on.

    `sharded`: every process holds a part of the tensors; else the first holds them all.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        scratch: Path,
        world: World,
        sharded: bool,
        keep: int,
        background: bool,
    ) -> None:
        self.checkpoints = checkpoints
        self.scratch = scratch / f".checkpoint-{world.rank}"
        self.world = world
        self.sharded = sharded
        self.keep = keep
        self.background = background
        self.thread: threading.Thread | None = None
        self.problem: Exception | None = None
        self.saved = 0  # the step of the newest that is complete
        self.failed = ""
        self.entries: dict[str, Entry] = {}
        self.group: Any = None
        if world.size > 1:
            import torch.distributed as dist

            self.group = dist.new_group(backend="gloo")  # its own: the training's collectives go on

    def write(self, step: int, state: dict[str, Any], tensors: dict[str, Any], random: Any) -> None:
        """Copy the tensors and write them behind the run's back. Raises what the one before met."""
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        self.wait()
        if self.sharded or self.world.rank == 0:
            tensors = BlockingAsyncStager().stage(tensors)
        self.thread = threading.Thread(
            target=self._write, args=(step, state, tensors, random), name="checkpoint"
        )
        self.thread.start()
        if not self.background:
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. Raises CheckpointError if it could not be."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.problem is not None:
            problem, self.problem = self.problem, None
            raise CheckpointError(f"checkpoint not written: {problem}") from problem

    def close(self) -> None:
        """Let what is being written end, for a run that ends by an error of its own."""
        if self.thread is not None:
            self.thread.join(CLOSING_S)  # in vain where another process is gone that it waits for
            self.thread = None

    def _write(self, step: int, state: dict[str, Any], tensors: dict[str, Any], random: Any) -> None:
        try:
            if self.world.rank == 0:
                self._trying(lambda: self.checkpoints.begin(step))
            self._agree()
            self._trying(lambda: self._parts(step, state, tensors, random))
            parts = self._agree()
            if self.world.rank == 0:
                entries = {name: entry for part in parts for name, entry in part.items()}
                self.checkpoints.complete(step, entries)
                for old in sorted(self.checkpoints.steps())[: -self.keep]:
                    self.checkpoints.remove(old)
            self.saved = step
        except Exception as error:  # whatever it is, the run hears of it at its next save
            self.problem = error
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _parts(self, step: int, state: dict[str, Any], tensors: dict[str, Any], random: Any) -> None:
        """Write this process's files and hand them over."""
        import torch

        dcp = _dcp()

        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        writer = dcp.FileSystemWriter(self.scratch)
        with _alone(), _plain_errors():
            if self.sharded:
                dcp.save(tensors, storage_writer=writer, process_group=self.group)
            elif self.world.rank == 0:
                dcp.save(tensors, storage_writer=writer, no_dist=True)
        torch.save(random, self.scratch / f"random-{self.world.rank}.pt")
        if self.world.rank == 0:
            (self.scratch / STATE).write_text(json.dumps(state), encoding="utf-8")
        self.entries = entries_of(self.scratch)
        for name in self.entries:
            self.checkpoints.add(step, name, self.scratch / name)

    def _trying(self, work: Callable[[], None]) -> None:
        """Do this process's share; what goes wrong is told to the others, who wait for it."""
        self.failed, self.entries = "", {}
        try:
            work()
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"

    def _agree(self) -> list[dict[str, Entry]]:
        """The files of all processes. Raises CheckpointError in all when one has failed."""
        told: list[Any] = [(self.failed, {name: asdict(entry) for name, entry in self.entries.items()})]
        if self.world.size > 1:
            import torch.distributed as dist

            mine = told[0]
            told = [None] * self.world.size
            dist.all_gather_object(told, mine, group=self.group)
        self.failed, self.entries = "", {}
        for failed, _ in told:
            if failed:
                raise CheckpointError(failed)
        return [{name: Entry(**entry) for name, entry in entries.items()} for _, entries in told]


_STATE: dict[str, tuple[type, ...]] = {
    "identity": (dict,),
    "losses": (list,),
    "step": (int,),
    "position": (int,),
    "seconds": (int, float),
    "tokens": (int,),
    "tokens_timed": (int,),
    "micro_batch": (int,),
}


def read_state(directory: Path) -> dict[str, Any]:
    """What a checkpoint says of its run. Raises CheckpointError."""
    try:
        found = json.loads((directory / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{directory}: {STATE}: expected an object")
    for key, kinds in _STATE.items():
        if not isinstance(found.get(key), kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise CheckpointError(f"{directory}: {STATE}: {key}: {found.get(key)!r}; expected {expected}")
    return found


def check_same_run(state: dict[str, Any], identity: dict[str, Any], steps: int) -> None:
    """Refuse a checkpoint of another model or text, or one that is further than asked. Raises ConfigError."""
    for key, value in identity.items():
        if state["identity"].get(key) != value:
            raise ConfigError(
                f"{key}: the checkpoint after step {state['step']} was made with "
                f"{state['identity'].get(key)}, this run has {value}; use another output, "
                "or remove the checkpoints"
            )
    if state["step"] > steps:
        raise ConfigError(
            f"steps: {steps}; the checkpoint after step {state['step']} is beyond them; use another output, "
            "or remove the checkpoints"
        )


def read_tensors(directory: Path, tensors: dict[str, Any], world: World) -> None:
    """Fill tensors, each process its own part, from a checkpoint. Raises CheckpointError."""
    dcp = _dcp()

    try:
        reader = dcp.FileSystemReader(directory)
        reader.read_metadata()  # torch says at length what is wrong with it, and goes on to look for others
        with _alone(), _plain_errors():
            dcp.load(tensors, storage_reader=reader, no_dist=world.size == 1)
    except Exception as error:  # torch raises almost anything for a file it cannot read
        raise CheckpointError(f"{directory}: cannot be read: {' '.join(str(error).split())[:300]}") from error


def read_random(directory: Path, rank: int) -> "dict[str, torch.Tensor] | None":
    """The random state that a process of this rank had; None when there was none. Raises CheckpointError."""
    import torch

    file = directory / f"random-{rank}.pt"
    if not file.is_file():
        return None
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
        torch.Generator().set_state(found["cpu"])
    except Exception as error:  # torch raises almost anything for a file it cannot read
        raise CheckpointError(f"{file}: is no random state: {type(error).__name__}") from error
    return found  # type: ignore[no-any-return]


def _dcp() -> Any:
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process is what we mean: torch need not warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """The first error of any process in place of torch's collection of them, which is no Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise CheckpointError(f"{type(first).__name__}: {first}") from error
