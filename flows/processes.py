"""The processes that belong to one running site: start, recognise and end them, by id and never by name.

Invariant: a process is signalled only while its start time is the one noted; a reused id is never hit.
What is ours is known by records and by a random mark in the environment, which children inherit: that is how
they are found after a crash, when nobody's records are complete. Linux only: it reads /proc.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

MARK = "SLOTWISE_INSTANCE"
PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A process as it was when it was started: `started` is its start time in clock ticks of this boot."""

    name: str
    pid: int
    started: str


def spawn(
    name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, records: Path
) -> Process:
    """Start a command in a session of its own, its output appended to `log`, and record it in `records`.

    Nothing waits for it: the starter may end, and `alive` reaps it if the starter is still there.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    records.mkdir(parents=True, exist_ok=True)
    pid = os.posix_spawn(
        command[0],
        list(command),
        dict(environment),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=(),
        setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE),
    )
    process = Process(name, pid, _started(pid) or "ended at once")
    temporary = records / f".{name}.json"
    temporary.write_text(json.dumps(asdict(process)))
    temporary.replace(records / f"{name}.json")
    return process


def recorded(records: Path) -> dict[str, Process]:
    """The processes that `spawn` recorded there, by name; a file that cannot be read is passed over."""
    found = {}
    for path in sorted(records.glob("*.json")) if records.is_dir() else ():
        with contextlib.suppress(ValueError, TypeError, OSError):
            found[path.stem] = Process(**json.loads(path.read_text()))
    return found


def alive(process: Process) -> bool:
    """Whether this very process still runs; one that ended and was not waited for does not."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)
    return _started(process.pid) == process.started


def marked(mark: str) -> list[Process]:
    """Every process of ours that was started with the mark, or descends from one, except the caller."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in PROC.iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        started = _started(int(folder.name))
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if started is not None and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(Process(folder.name, int(folder.name), started))
    return found


def end(processes: Iterable[Process], grace_s: float) -> None:
    """Ask each to end, and kill those that still run after the grace."""
    remaining = list(processes)
    for number, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for process in remaining:
            _signal(process, number)
            _signal(process, signal.SIGCONT)  # one that was paused hears of it too
        remaining = wait(remaining, lambda process: not alive(process), patience)


def pause(processes: Iterable[Process]) -> None:
    """Let each do nothing more, until it is ended."""
    for process in processes:
        _signal(process, signal.SIGSTOP)


def resume(processes: Iterable[Process]) -> None:
    """Let each go on: one who paused them may have died before it ended them."""
    for process in processes:
        _signal(process, signal.SIGCONT)


@contextlib.contextmanager
def exit_when_told() -> Iterator[None]:
    """SIGTERM raises SystemExit meanwhile, so that what was begun is put back; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command(process: Process) -> list[str]:
    """Its command line; nothing when it has ended."""
    try:
        return (PROC / str(process.pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def wait(
    processes: Iterable[Process], until: Callable[[Process], bool], seconds: float, every: float = 0.05
) -> list[Process]:
    """Wait until the condition holds for each; those for which it did not in time."""
    deadline = time.monotonic() + seconds
    remaining = list(processes)
    while (
        remaining := [process for process in remaining if not until(process)]
    ) and time.monotonic() < deadline:
        time.sleep(every)
    return remaining


def _signal(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        try:
            # The handle stands for one process; once its start time matches, the signal cannot go astray.
            if _started(process.pid) == process.started:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def _started(pid: int) -> str | None:
    """When a process started, in ticks of this boot; None when there is none, or only its remains."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"
