"""Run a program that the kernel ends when its parent dies: no job outlives its runner and holds GPUs unseen.

    python die_with_parent.py PARENT_PID NICENESS PROGRAM [ARGUMENT ...]

Invariant: the program is killed when its parent dies (PR_SET_PDEATHSIG survives exec), and what it started in
its process group is killed when the program itself is gone: a small process beside it waits for that. Linux
only. Costs one Python start without site packages, about 20 ms, and the small process's 10 MB.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the program."""
    parent, niceness, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was told
        sys.exit("the runner is gone")
    if os.getpgrp() == os.getpid():
        _clear_up_after(os.getpid())
    _give_way(niceness)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"command: {program[0]!r} cannot be run: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _give_way(niceness: int) -> None:
    """Be nice; where the kernel weighs whole sessions (autogroups), it is the session that must be nice."""
    os.nice(niceness)
    if niceness == 0 or os.getsid(0) != os.getpid():
        return
    for _ in range(20):
        try:
            with open("/proc/self/autogroup", "w") as own:  # noqa: PTH123 - pathlib costs a third of our start
                own.write(str(niceness))
            return
        except BlockingIOError:  # the kernel takes one such change in a tenth of a second, of all processes
            time.sleep(0.1)
        except OSError:  # it has no autogroups
            return


def _clear_up_after(group: int) -> None:
    """Leave a process, no child of the program's, that kills its group once the program is gone."""
    leader = os.pidfd_open(group)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os.close(leader)
        return
    if os.fork():
        os._exit(0)
    os.setsid()
    opened = [int(entry.name) for entry in os.scandir("/proc/self/fd")]
    for other in opened:  # the GPUs' locks are the program's to hold
        if other != leader:
            with contextlib.suppress(OSError):
                os.close(other)
    poll = select.poll()
    poll.register(leader, select.POLLIN)
    poll.poll()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
