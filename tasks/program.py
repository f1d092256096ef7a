"""What the programs of the three kinds share: where they run, what they read and publish, and how they end.

Invariant: what no second attempt can cure, such as a mistake in a spec, is one line and exit code 2;
anything else that fails is 1 and may be tried again, and SIGTERM is 143. A directory that this module
publishes is seen whole or as incomplete, never half, and another one never takes its place. Metrics are a
file that is replaced, at most once a second until the program ends.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tasks.object_cache import cached
from tasks.s3 import S3Storage
from tasks.specfile import SpecError
from tasks.storage import (
    DirectoryStorage,
    NotFoundError,
    Storage,
    StorageError,
    located,
    open_storage,
)
from training.checkpoints import CheckpointError
from training.config import ConfigError
from training.data import DataError
from training.from_checkpoint import is_checkpoint, write_checkpoint_as_model
from training.manifest import MANIFEST, Entry, ManifestError, manifest_bytes, parse_manifest, verify
from training.models import ModelError
from training.tokenizer import TokenizerError

EXIT_FAILED, EXIT_WRONG, EXIT_STOPPED = 1, 2, 143
VIRTUAL = "cpu"  # the GPU type of virtual GPUs
METRICS_EVERY_S = 1.0
TAKEN = "something else lies there already, which a reader may be at; use another output, or remove it"


class JobFailedError(Exception):
    """The work was done and did not succeed; the message is for people."""


class FinalError(JobFailedError):
    """As above, and another attempt would end the same way: too many rows failed, a gate was not passed."""


# Errors that no second attempt will cure, and errors whose text says all there is to say.
WRONG: tuple[type[Exception], ...] = (
    SpecError,
    ConfigError,
    DataError,
    ModelError,
    TokenizerError,
    FinalError,
)
PLAIN: tuple[type[Exception], ...] = (StorageError, CheckpointError, ManifestError, JobFailedError)


class Terminated(BaseException):
    """SIGTERM came. Not an Exception, so that nothing on the way takes it for a failure."""


@dataclass(frozen=True)
class Place:
    """An object or a prefix that a spec names."""

    storage: Storage
    key: str
    where: str  # what messages call it: the field and the text it holds


@dataclass
class Metrics:
    """The flat object that people see while the program runs, and after."""

    path: Path | None
    known: dict[str, Any] = field(default_factory=dict)
    written: float = -math.inf

    def update(self, **news: Any) -> None:
        """Take in the news, and write the file if the last time is long enough ago."""
        self.known |= {key: _finite(value) for key, value in news.items()}
        if time.monotonic() - self.written >= METRICS_EVERY_S:
            self.write()

    def write(self) -> None:
        """Replace the file."""
        if self.path is None:
            return
        self.written = time.monotonic()
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self.known), encoding="utf-8")
        temporary.replace(self.path)


@dataclass
class Program:
    """One process of a job: its spec, its storage and its place among the job's nodes."""

    name: str  # the spec file, as messages call it
    text: str  # what it holds
    by_hand: bool  # started by a person, without a runner
    storage: Storage
    output: str  # key prefix of what the job leaves
    scratch: Path
    metrics: Metrics
    node_rank: int
    nodes: int
    gpus: int
    gpu_type: str | None
    own_process: bool = True  # nothing but this job runs in it
    stop_asked: bool = False
    deferred: bool = False

    @property
    def virtual(self) -> bool:
        """Whether its GPUs are shares of the processor."""
        return self.gpu_type in (None, VIRTUAL)

    @property
    def another_output(self) -> str:
        """What to do about an output that holds something else."""
        other = "give the spec file another name" if self.by_hand else "use another job"
        return f"{other}, or remove {self.output}"

    @contextlib.contextmanager
    def stop_deferred(self) -> Iterator[Callable[[], bool]]:
        """For work that looks itself whether it was asked to stop; else SIGTERM ends the program at once."""
        self.deferred = True
        try:
            yield lambda: self.stop_asked
        finally:
            self.deferred = False

    def place(self, field_name: str, reference: str) -> Place:
        """What a spec's field names: a key in the storage root, or s3://bucket/key. Raises SpecError."""
        where = f"{self.name}: {field_name}: {reference!r}"
        try:
            return Place(*located(self.storage, reference), where)
        except StorageError:
            raise SpecError(
                f"{where}; expected a key inside the storage root {self.storage.root}, or s3://bucket/key"
            ) from None


def main(work: Callable[[Program], None], arguments: Sequence[str]) -> NoReturn:
    """Run a kind's work on the spec file that the arguments name, and end the process."""
    quiet_libraries()
    sys.exit(_run(work, arguments))


def _run(work: Callable[[Program], None], arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        asked = len(arguments) == 1
        usage = "expected one argument: the spec file; tasks/README.md says what it may hold"
        print(usage, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else EXIT_WRONG
    metrics = Metrics(_metrics_path())
    try:
        with _program(Path(arguments[0]), metrics) as program, _sigterm(program):
            work(program)
            metrics.write()
            if program.by_hand:
                print(json.dumps(metrics.known, indent=1))
            return 0
    except Terminated as stopped:
        return _end(metrics, EXIT_STOPPED, str(stopped) or "stopped before its work was done")
    except WRONG as error:
        return _end(metrics, EXIT_WRONG, _with_file(Path(arguments[0]).name, str(error)))
    except PLAIN as error:
        return _end(metrics, EXIT_FAILED, str(error))
    except Exception as error:  # ours to mend: the trace is wanted, its last line is what people see
        traceback.print_exc()
        return _end(metrics, EXIT_FAILED, f"{type(error).__name__}: {error}")


def _with_file(name: str, said: str) -> str:
    """What went wrong, after the name of the spec file."""
    return said if name in said.partition(": ")[0] else f"{name}: {said}"


@contextlib.contextmanager
def reading(place: Place) -> Iterator[None]:
    """Have storage's errors name the field and its text. Raises SpecError when there is no such object."""
    try:
        yield
    except NotFoundError:
        raise SpecError(f"{place.where}: no such object in {place.storage.root}") from None
    except StorageError as error:
        raise StorageError(f"{place.where}: {error}") from error


def read_text(place: Place) -> str:
    """The text of an object that a spec names. Raises SpecError when it is not there or not text."""
    try:
        with reading(place):
            return place.storage.read(place.key).decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{place.where}: not text in UTF-8: {error}") from None


def local_file(place: Place, scratch: Path) -> Path:
    """A file on this machine with the object's bytes, in place or a copy. Raises SpecError."""
    with reading(place):
        if isinstance(place.storage, DirectoryStorage):
            path = _inside(place, place.storage.directory)
            if not path.is_file():
                raise NotFoundError(place.key)
            return path
        path = scratch / "inputs" / _digest(place) / place.key.rpartition("/")[2]
        _get(place.storage, place.key, path)
    return path


def local_model(place: Place, scratch: Path) -> Path:
    """A model's directory on this machine, checked against its manifest.

    A directory that somebody put there without a manifest is taken as it is; one that is being published
    has a manifest that says so; a training's checkpoint is written anew as a model. Raises SpecError when
    there is no model, ManifestError when it is not whole.
    """
    with reading(place):
        keys = place.storage.keys(f"{place.key}/")
        if f"{place.key}/config.json" not in keys and f"{place.key}/{MANIFEST}" not in keys:
            hint = f" in {place.storage.root}; expected a Hugging Face directory"
            if f"{place.key}/model/{MANIFEST}" in keys:
                hint = f"; did you mean {place.key}/model?"
            raise SpecError(f"{place.where}: no model lies there{hint}")
        directory = _local_directory(place, keys, scratch / "models" / _digest(place))
    if (directory / "config.json").is_file():
        return directory
    if not is_checkpoint(directory):
        raise SpecError(
            f"{place.where}: has no config.json; expected a Hugging Face directory, or a checkpoint"
        )
    model = scratch / "models" / f"{_digest(place)}-model"
    try:
        write_checkpoint_as_model(directory, model, place.where)
    except CheckpointError as error:
        raise SpecError(str(error)) from error
    return model


@contextlib.contextmanager
def said_of(place: Place, directory: Path) -> Iterator[None]:
    """Have errors about a model's directory name what the spec calls it, which is what people can mend."""
    try:
        yield
    except (ModelError, TokenizerError) as error:
        raise type(error)(str(error).replace(str(directory), place.where)) from error


def local_directory(place: Place, scratch: Path) -> Path:
    """A published directory on this machine. Raises ManifestError when it is not whole."""
    keys = place.storage.keys(f"{place.key}/")
    if f"{place.key}/{MANIFEST}" not in keys:
        raise ManifestError(f"{place.where}: has no {MANIFEST}; it is not complete")
    return _local_directory(place, keys, scratch)


def publish_directory(storage: Storage, prefix: str, directory: Path) -> list[str]:
    """Put a directory that has a manifest under a prefix, and give its keys.

    In a directory it appears in one step. In S3 the manifest is first one that says that it is not complete,
    and what loaders look for, config.json, comes last but for the whole manifest: whoever knows only the one
    or only the other takes nothing of a half for a model. Raises FinalError where something else lies that
    is complete: a reader may be at it, and would get files of both.
    """
    entries = verify(directory)
    names = [*sorted(entries, key=lambda name: name == "config.json"), MANIFEST]
    keys = [f"{prefix}/{name}" for name in names]
    there, known = set(storage.keys(f"{prefix}/")), _complete(storage, prefix)
    if known != entries:
        if known is not None or (there and keys[-1] not in there):
            raise FinalError(f"{prefix}: {TAKEN}")
        for key in there.difference(keys[-1:]):  # its writer died
            storage.delete(key)
        if isinstance(storage, DirectoryStorage):
            storage.delete(keys[-1])
            if not storage.place(prefix, directory, names):
                raise FinalError(f"{prefix}: {TAKEN}")
            return keys
        storage.write(keys[-1], manifest_bytes({}, complete=False))
        there = set()
    for name, key in zip(names, keys, strict=True):
        if key not in there:
            storage.upload(key, directory / name)
    return keys


def is_published(storage: Storage, prefix: str) -> bool:
    """Whether a whole directory lies under the prefix."""
    return _complete(storage, prefix) is not None


def _complete(storage: Storage, prefix: str) -> dict[str, Entry] | None:
    """The files of the whole directory under a prefix; None when there is none."""
    try:
        return parse_manifest(storage.read(f"{prefix}/{MANIFEST}"), prefix)
    except (NotFoundError, ManifestError):
        return None


def quiet_libraries() -> None:
    """Keep libraries from looking for a network and from filling the log with what nobody can act on."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def leave_out(*modules: str) -> None:
    """Have this process do without optional libraries that transformers would load for nothing.

    About 1.5 s of processor time less at the start of a training run. Only for a process of one's own:
    whoever imports one of them afterwards is told that it is not there.
    """
    for name in modules:
        if name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]


def _local_directory(place: Place, keys: Sequence[str], copy: Path) -> Path:
    managed = f"{place.key}/{MANIFEST}" in keys
    if isinstance(place.storage, DirectoryStorage):
        directory = _inside(place, place.storage.directory)
        if managed:
            verify(directory, place.where)
        return directory
    if managed:
        wanted = place.storage.read(f"{place.key}/{MANIFEST}")
        entries = parse_manifest(wanted, place.where)
        with contextlib.suppress(OSError, ManifestError):
            links = any(path.is_symlink() for path in copy.rglob("*"))  # to what this process must hold
            if not links and (copy / MANIFEST).read_bytes() == wanted:
                verify(copy)
                return copy
        names = list(entries)
    else:
        wanted, names = b"", [key.removeprefix(f"{place.key}/") for key in keys]
    shutil.rmtree(copy, ignore_errors=True)
    for name in names:
        try:
            _get(place.storage, f"{place.key}/{name}", copy / name)
        except NotFoundError:
            raise ManifestError(f"{place.where}: {name} is missing") from None
    if managed:
        (copy / MANIFEST).write_bytes(wanted)
        verify(copy, place.where)
    return copy


def _get(storage: Storage, key: str, path: Path) -> None:
    """Have the object at a path: a link to where the machine's jobs share it, or a copy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(storage, S3Storage) and (shared := cached(storage, key)) is not None:
        path.unlink(missing_ok=True)
        path.symlink_to(shared)
    else:
        storage.download(key, path)


@contextlib.contextmanager
def _program(spec: Path, metrics: Metrics) -> Iterator[Program]:
    """What the environment says; by hand, the current directory is the storage root."""
    given = os.environ
    try:
        text = spec.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"{spec}: {getattr(error, 'strerror', None) or error}; expected a spec file"
        ) from None
    by_hand = "SLOTWISE_JOB" not in given
    with contextlib.ExitStack() as stack:
        # A runner keeps its directory from attempt to attempt; by hand the current one holds people's files.
        scratch = stack.enter_context(tempfile.TemporaryDirectory()) if by_hand else str(Path.cwd() / "work")
        yield Program(
            name=spec.name,
            text=text,
            by_hand=by_hand,
            storage=open_storage(given.get("SLOTWISE_STORAGE") or str(Path.cwd())),
            output=given.get("SLOTWISE_OUTPUT") or f"outputs/{spec.stem}",
            scratch=Path(scratch),
            metrics=metrics,
            node_rank=int(given.get("SLOTWISE_NODE_RANK", 0)),
            nodes=int(given.get("SLOTWISE_NODE_COUNT", 1)),
            gpus=int(given.get("SLOTWISE_GPUS", 1)),
            gpu_type=given.get("SLOTWISE_GPU_TYPE"),
        )


@contextlib.contextmanager
def _sigterm(program: Program) -> Iterator[None]:
    def note(number: int, frame: FrameType | None) -> None:
        program.stop_asked = True
        if not program.deferred:
            raise Terminated

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(metrics: Metrics, code: int, message: str) -> int:
    line = "; ".join(part.strip() for part in message.splitlines() if part.strip())
    metrics.update(message=line)
    metrics.write()
    print(line, file=sys.stderr, flush=True)
    return code


def _metrics_path() -> Path | None:
    """Where metrics go; of several processes on a node only the first writes them."""
    path = os.environ.get("SLOTWISE_METRICS")
    return Path(path) if path and os.environ.get("LOCAL_RANK", "0") == "0" else None


def _inside(place: Place, directory: Path) -> Path:
    path = directory / place.key
    if not path.resolve().is_relative_to(directory.resolve()):
        raise SpecError(f"{place.where}: a link leads out of the storage root {directory}")
    return path


def _digest(place: Place) -> str:
    return hashlib.sha256(f"{place.storage.root}\n{place.key}".encode()).hexdigest()[:16]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
