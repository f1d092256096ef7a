"""Run one rank of a committed job on its node, from waiting for its GPUs to its outcome.

Invariant: the program's first instruction comes after all of these: the GPUs are locked on this machine (by a
file lock that dies with the process), no service holds them, and the start is claimed in the facts by every
rank of the gang. The program never outlives its runner, and a runner that cannot renew its lease ends the
program before anyone may think it dead, even while storage does not answer at all: a thread of its own asks
storage. Whatever happens, at most one outcome is written; a runner that is told to end leaves it first, and
is gone within 30 s even where storage does not take it.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import yaml

from tasks.endings import gone_in_time
from tasks.facts import FactError, fact_key, parse_key, read_json, write_fact, write_json
from tasks.inbox import cancel_requested
from tasks.instants import now, parse, text
from tasks.packs import is_packed
from tasks.reconcile import GRACE_S, lease_age, lease_key, leave_outcome
from tasks.secrets import redacted, redacted_bytes, redacted_values
from tasks.serving import blockers
from tasks.storage import NotFoundError, Storage, StorageError, open_storage

PROGRAMS = {
    "training": "tasks.train",
    "batch_inference": "tasks.inference",
    "quantization": "tasks.quantization",
}
POLL_S = 0.5
SPEC_IS_WRONG = 2  # exit code of a program whose spec cannot work: not tried again
NICENESS = 15  # of programs on virtual GPUs, which share the processor with everything else
LEAVE_S = 3600.0  # how long an outcome is offered to a storage that does not take it
MOST_METRICS = 1 << 20  # bytes of a metrics file that are looked at


@dataclass(frozen=True)
class Order:
    """One rank's part of a committed attempt."""

    storage: Storage
    commit_day: datetime
    job: str
    attempt: int
    rank: int
    nodes: tuple[dict[str, Any], ...]
    spec: dict[str, Any]
    max_duration: timedelta | None
    start: datetime
    start_timeout: timedelta
    lease: timedelta

    @property
    def node(self) -> dict[str, Any]:
        """This rank's node: name, GPUs, type, price."""
        return self.nodes[self.rank]

    def key(self, kind: Any, rank: int | None = None) -> str:
        """Key of this attempt's fact of a kind, for this rank or another."""
        return fact_key(kind, self.commit_day, self.job, self.attempt, self.rank if rank is None else rank)


@dataclass(frozen=True)
class Outcome:
    """How the rank ended. `state` is one of the ledger's; None when someone else had taken the start."""

    state: str | None
    error: str | None = None
    started_at: datetime | None = None
    exit_code: int | None = None
    metrics: dict[str, Any] | None = None


class _Stop(Exception):
    """The rank is over; carries its state and reason."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state = state


def read_order(storage_root: str, commit: str, job: str, rank: int) -> Order:
    """What the commitment says of a rank. Raises FactError or NotFoundError when it says nothing."""
    storage = open_storage(storage_root)
    fact = read_json(storage, commit)
    place = next((place for place in fact["placements"] if place["job"] == job), None)
    if place is None or rank >= len(place["nodes"]):
        raise FactError(f"{commit}: has no rank {rank} of job {job}")
    spec = read_json(storage, place["spec"])
    limit = spec.get("max_duration_s")
    return Order(
        storage=storage,
        commit_day=datetime.combine(parse_key(commit).day, datetime.min.time()),
        job=job,
        attempt=place["attempt"],
        rank=rank,
        nodes=tuple(place["nodes"]),
        spec=spec["spec"],
        max_duration=None if limit is None else timedelta(seconds=limit),
        start=parse(place["start"]),
        start_timeout=timedelta(minutes=fact["start_timeout_minutes"]),
        lease=timedelta(seconds=fact["lease_seconds"]),
    )


def run_rank(
    order: Order,
    node_directory: Path,
    log: Callable[[str], None],
    cancelled_elsewhere: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run the rank and leave its outcome as a fact.

    `node_directory` holds this machine's GPU locks and scratch space; `log` gets the program's lines;
    `cancelled_elsewhere` says, when this process is asked to end, whether a person cancelled the run. Must be
    called from the main thread: it takes over SIGTERM meanwhile.
    """
    lease = _Lease(order)
    with _termination() as terminated:
        try:
            with _own_gpus(order, node_directory, lease, terminated) as locks:
                if not _claim(order):
                    return Outcome(None, "its start was taken before: by another run, or voided")
                outcome = _run_claimed(order, node_directory, lease, locks, log, terminated)
        except _Stop as stop:
            outcome = Outcome(stop.state, str(stop))
            if not _claim(order, void=str(stop)):
                return replace(outcome, state=None)
        if terminated() and outcome.state in ("crashed", "not_started") and cancelled_elsewhere():
            outcome = replace(outcome, state="cancelled", error="cancelled by a person")
        _leave(order, outcome)
        lease.drop()
    return outcome


def _run_claimed(
    order: Order,
    node_directory: Path,
    lease: "_Lease",
    locks: tuple[int, ...],
    log: Callable[[str], None],
    terminated: Callable[[], bool],
) -> Outcome:
    started = None
    metrics_file = _scratch(node_directory, order) / "metrics.json"
    metrics_file.unlink(missing_ok=True)
    try:
        port = _gather(order, lease, terminated)
        started = now()
        code, last_line = _run_program(
            order, node_directory, lease, locks, port, metrics_file, log, terminated
        )
        metrics = _metrics(metrics_file)
    except _Stop as stop:
        return Outcome(stop.state, str(stop), started, None, _metrics(metrics_file))
    except Exception as error:  # such as a full disk: the claim is taken, so there must be an outcome
        return Outcome("crashed", f"{type(error).__name__}: {error}", started, None, _metrics(metrics_file))
    finally:
        metrics_file.unlink(missing_ok=True)  # as its program wrote it, with what that should not have said
    if code == 0:
        return Outcome("completed", None, started, 0, metrics)
    said = redacted(" ".join(str(metrics.get("message") or last_line or "it said nothing").split()))[:500]
    what = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Outcome("crashed" if code < 0 else "failed", f"{what}: {said}", started, code, metrics)


@contextlib.contextmanager
def _own_gpus(
    order: Order, node_directory: Path, lease: "_Lease", terminated: Callable[[], bool]
) -> Iterator[tuple[int, ...]]:
    """Wait until the start has come and the GPUs are clear, and hold their locks: yields their descriptors.

    Raises _Stop when it takes too long or is not wanted any more.
    """
    deadline = max(order.start, now()) + order.start_timeout
    with contextlib.ExitStack() as stack:
        locks: list[TextIO] = []
        while True:
            if terminated():
                raise _Stop("not_started", "its runner was told to end before it began")
            try:
                if cancel_requested(order.storage, order.job):
                    raise _Stop("cancelled", "cancelled before it began")
                in_the_way = (
                    ["its start"] if now() < order.start else _in_the_way(order, node_directory, stack, locks)
                )
            except StorageError as error:
                in_the_way = [f"storage: {error}"]
            if now() > deadline:
                late = ", ".join(in_the_way) or "its turn: its process did not run meanwhile"
                raise _Stop("not_started", f"waited too long for {late}")
            if not in_the_way:
                break
            stack.close()
            locks.clear()
            lease.renew("waiting", ", ".join(in_the_way))
            time.sleep(POLL_S)
        yield tuple(lock.fileno() for lock in locks)


def _in_the_way(
    order: Order, node_directory: Path, stack: contextlib.ExitStack, locks: list[TextIO]
) -> list[str]:
    """Who still holds the GPUs; when nobody does, their locks are ours."""
    name, gpus = order.node["node"], order.node["gpus"]
    directory = node_directory / "gpus"
    directory.mkdir(parents=True, exist_ok=True)
    for gpu in gpus:
        lock = stack.enter_context((directory / f"{gpu}.lock").open("a+"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            return [f"GPU {gpu} of {name}, held by {lock.read().strip() or 'another run'}"]
        lock.truncate(0)
        lock.write(f"{order.job} attempt {order.attempt} (process {os.getpid()})")
        lock.flush()
        locks.append(lock)
    return blockers(order.storage, name, gpus)


def _claim(order: Order, void: str | None = None) -> bool:
    """Take the rank's one start, or give it up with a reason; False when it was taken or voided before.

    Days later, when a machine that slept goes on, the claim of back then may be in a pack.
    """
    body = {
        "job": order.job,
        "attempt": order.attempt,
        "rank": order.rank,
        "node": order.node["node"],
        "void": void is not None,
        "reason": void,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "port": _free_port(),
        "nonce": uuid.uuid4().hex,
    }
    key = order.key("started")
    return write_fact(order.storage, key, now(), body) and not is_packed(order.storage, key)


def _gather(order: Order, lease: "_Lease", terminated: Callable[[], bool]) -> int:
    """Wait for the claims of the whole gang; rank 0's port. Raises _Stop when it does not come together."""
    deadline = now() + order.start_timeout
    missing = list(range(len(order.nodes)))
    port = 0
    while missing:
        lease.renew("starting", f"waiting for rank {missing[0]}")
        try:
            _watch_gang(order)
            claim = read_json(order.storage, order.key("started", missing[0]))
        except StorageError:  # not there yet, or storage does not answer
            if terminated():
                raise _Stop("not_started", "its runner was told to end before it began") from None
            if now() > deadline:
                node = order.nodes[missing[0]]["node"]
                raise _Stop("not_started", f"rank {missing[0]} on {node} did not come") from None
            time.sleep(POLL_S)
            continue
        if claim["void"]:
            raise _Stop("not_started", f"rank {missing[0]} was voided: {claim.get('reason')}")
        if missing[0] == 0:
            port = int(claim["port"])
        missing.pop(0)
    return port


def _run_program(
    order: Order,
    node_directory: Path,
    lease: "_Lease",
    locks: tuple[int, ...],
    port: int,
    metrics_file: Path,
    log: Callable[[str], None],
    terminated: Callable[[], bool],
) -> tuple[int, str]:
    """Run the program to its end; its exit code and its last line.

    Raises _Stop when it was ended from outside.
    """
    scratch = _scratch(node_directory, order)
    log_file = scratch / f"{order.attempt}-{order.rank}.log"
    began = time.monotonic()
    with log_file.open("wb") as out, log_file.open(errors="replace") as written:
        program = _argv(order, scratch)
        guard = [sys.executable, "-S", "-E", str(Path(__file__).with_name("die_with_parent.py"))]
        niceness = NICENESS if order.node["gpu"] == "cpu" else 0
        child = subprocess.Popen(
            [*guard, str(os.getpid()), str(niceness), *program],
            cwd=scratch,
            env=_environment(order, port, metrics_file),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=locks,  # the GPUs stay locked until the program is really gone
        )
        tail = _Tail(written, log)
        try:
            with _watching(order, lease, metrics_file) as found:
                try:
                    while child.poll() is None:
                        time.sleep(POLL_S)
                        tail.read()
                        if reason := found() or _reason_to_end(order, lease, began, terminated):
                            raise reason
                finally:
                    _end(child, lease)
        finally:
            tail.read()
            with contextlib.suppress(StorageError, OSError):  # a log that is not kept undoes no work
                _hide_secrets(log_file)
                order.storage.upload(f"logs/{order.job}/{order.attempt}-{order.rank}.log", log_file)
    return child.returncode, tail.last


def _reason_to_end(
    order: Order, lease: "_Lease", began: float, terminated: Callable[[], bool]
) -> _Stop | None:
    if terminated():
        return _Stop("crashed", "its runner was told to end")
    if order.max_duration is not None and time.monotonic() - began > order.max_duration.total_seconds():
        return _Stop("timed_out", f"ended at its max_duration of {order.max_duration}")
    if lease.unrenewed() > 2 * order.lease:
        return _Stop("crashed", f"storage could not be reached for {lease.unrenewed().seconds} s")
    return None


@contextlib.contextmanager
def _watching(order: Order, lease: "_Lease", metrics_file: Path) -> Iterator[Callable[[], _Stop | None]]:
    """Renew the lease, and look in storage for reasons to end, which the yielded function tells.

    In a thread: a storage that does not answer must not keep the runner from ending the program in time.
    """
    found: list[_Stop] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(order.lease.total_seconds() / 3):
            lease.renew("running", "", _metrics(metrics_file))
            with contextlib.suppress(StorageError, FactError):
                try:
                    if cancel_requested(order.storage, order.job):
                        found.append(_Stop("cancelled", "cancelled"))
                    _watch_gang(order)
                except _Stop as stop:
                    found.append(stop)

    thread = threading.Thread(target=watch, name="lease", daemon=True)
    thread.start()
    try:
        yield lambda: found[0] if found else None
    finally:
        over.set()
        thread.join(order.lease.total_seconds())  # if storage hangs, the thread ends with the process


def _watch_gang(order: Order) -> None:
    """Raise _Stop when another rank of the gang ended without having completed, or is lost.

    So does an outcome of this very rank: then someone thought it dead.
    """
    for rank in range(len(order.nodes)):
        try:
            state = read_json(order.storage, order.key("outcome", rank)).get("state")
            if rank == order.rank:
                raise _Stop("crashed", f"it was thought dead: {state}")
        except NotFoundError:
            if rank == order.rank:
                continue
            age = lease_age(order.storage, order.job, order.attempt, rank, now())
            if age is not None and age > 4 * order.lease:
                raise _Stop("stopped", f"rank {rank} on {order.nodes[rank]['node']} is lost") from None
            continue
        if state != "completed":
            raise _Stop("stopped", f"rank {rank} on {order.nodes[rank]['node']} ended: {state}")


def _leave(order: Order, outcome: Outcome) -> None:
    """Write the outcome, if no one has; a storage that is away is waited for."""
    ended = now()
    seconds = (ended - outcome.started_at).total_seconds() if outcome.started_at else 0.0
    gpu_seconds = seconds * len(order.node["gpus"])
    body = {
        "job": order.job,
        "attempt": order.attempt,
        "rank": order.rank,
        "node": order.node["node"],
        "state": outcome.state,
        "started_at": text(outcome.started_at) if outcome.started_at else None,
        "ended_at": text(ended),
        "gpu_seconds": gpu_seconds,
        "cost": gpu_seconds / 3600 * order.node["price_per_gpu_hour"],
        "exit_code": outcome.exit_code,
        "error": outcome.error,
        "metrics": outcome.metrics or {},
    }
    deadline = time.monotonic() + LEAVE_S
    while True:
        try:
            leave_outcome(order.storage, order.key("outcome"), ended, body)
            return
        except StorageError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


class _Lease:
    """The sign of life of this rank, renewed three times in its length."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.renewed = time.monotonic()
        self.tried = 0.0

    def due(self) -> bool:
        return time.monotonic() - self.tried > self.order.lease.total_seconds() / 3

    def unrenewed(self) -> timedelta:
        return timedelta(seconds=time.monotonic() - self.renewed)

    def renew(self, doing: str, detail: str, metrics: dict[str, Any] | None = None) -> None:
        """Write the lease if it is due. A storage that fails is tried again at the next turn."""
        if not self.due():
            return
        self.tried = began = time.monotonic()
        order = self.order
        body = {
            "job": order.job,
            "attempt": order.attempt,
            "rank": order.rank,
            "node": order.node["node"],
            "at": text(now()),
            "pid": os.getpid(),
            "doing": doing,
            "detail": detail,
            "metrics": metrics or {},
        }
        with contextlib.suppress(StorageError):
            write_json(order.storage, lease_key(order.job, order.attempt, order.rank), body)
            self.renewed = began  # when it was dated, however long storage took

    def drop(self) -> None:
        with contextlib.suppress(StorageError):
            self.order.storage.delete(lease_key(self.order.job, self.order.attempt, self.order.rank))


class _Tail:
    """Hands new lines of a growing log on, at most 20 at a time: the whole log is kept in storage."""

    def __init__(self, file: TextIO, log: Callable[[str], None]) -> None:
        self.file = file
        self.log = log
        self.last = ""

    def read(self) -> None:
        lines = [line.rstrip() for line in self.file.readlines() if line.strip()]
        for line in lines[-20:]:
            self.log(redacted(line)[:1000])
        if lines:
            self.last = lines[-1]


def _hide_secrets(log: Path) -> None:
    """Rewrite a log that shows what its program found in the environment."""
    with log.open("rb") as written:
        clean = all(redacted_bytes(block) == block for block in iter(lambda: written.readline(1 << 20), b""))
    if not clean:
        hidden = log.with_suffix(".hidden")
        with log.open("rb") as written, hidden.open("wb") as out:
            out.writelines(redacted_bytes(line) for line in iter(lambda: written.readline(1 << 20), b""))
        hidden.replace(log)


def _argv(order: Order, scratch: Path) -> list[str]:
    if order.spec.get("command"):
        return list(order.spec["command"])
    kind = order.spec["kind"]
    spec_file = scratch / "spec.yaml"
    spec_file.write_text(yaml.safe_dump(order.spec[kind]))
    return [sys.executable, "-m", PROGRAMS[kind], str(spec_file)]


def _environment(order: Order, port: int, metrics_file: Path) -> dict[str, str]:
    """What the program finds in its environment. Prefect's own settings, keys among them, stay out."""
    node = order.node
    gpus = node["gpus"]
    virtual = node["gpu"] == "cpu"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    devices = "" if virtual else ",".join(map(str, gpus))
    own = {
        "SLOTWISE_JOB": order.job,
        "SLOTWISE_ATTEMPT": str(order.attempt),
        "SLOTWISE_KIND": order.spec["kind"],
        "SLOTWISE_STORAGE": order.storage.root,
        "SLOTWISE_OUTPUT": f"outputs/{order.job}",
        "SLOTWISE_METRICS": str(metrics_file),
        "SLOTWISE_NODE": node["node"],
        "SLOTWISE_NODE_RANK": str(order.rank),
        "SLOTWISE_NODE_COUNT": str(len(order.nodes)),
        "SLOTWISE_GPUS": str(len(gpus)),
        "SLOTWISE_GPU_TYPE": node["gpu"],
        "SLOTWISE_GPU_INDICES": ",".join(map(str, gpus)),
        "MASTER_ADDR": order.nodes[0]["address"],
        "MASTER_PORT": str(port),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": devices,
        "PYTHONUNBUFFERED": "1",
    }
    if virtual:  # a fair share of the processor's threads
        share = max((os.cpu_count() or 1) * len(gpus) // node["node_gpus"], 1)
        own |= {"OMP_NUM_THREADS": str(share), "MKL_NUM_THREADS": str(share)}
        own["OMP_WAIT_POLICY"] = "PASSIVE"  # spinning for a thread without a core: 7 times slower
    return {**kept, **own}


def _end(child: "subprocess.Popen[bytes]", lease: "_Lease") -> None:
    """End the program and all it started: SIGTERM, a grace period (less when the lease runs out), SIGKILL."""
    deadline = time.monotonic() + GRACE_S
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        while (
            child.poll() is None
            and time.monotonic() < deadline
            and lease.unrenewed() < 3.5 * lease.order.lease
        ):
            time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):  # also what the program left behind in its session
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@contextlib.contextmanager
def _termination() -> Iterator[Callable[[], bool]]:
    """Note SIGTERM and SIGINT instead of dying at once; yields whether one has come."""
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        gone_in_time()

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _scratch(node_directory: Path, order: Order) -> Path:
    directory = node_directory / "scratch" / order.job / str(order.rank)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _metrics(file: Path) -> dict[str, Any]:
    """What the program has reported so far; nothing when the file is absent or not a JSON object.

    Numbers that are none become null, halves of characters question marks: facts hold neither. Secrets are
    hidden: leases and what the server shows of a run hold them as well.
    """
    try:
        with file.open("rb") as reported:
            found = json.loads(reported.read(MOST_METRICS))
        plain = json.dumps(found, ensure_ascii=False).encode(errors="replace")
        found = json.loads(plain, parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError):
        return {}
    shown: dict[str, Any] = redacted_values(found) if isinstance(found, dict) else {}
    return shown


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
