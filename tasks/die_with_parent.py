"""Run a program that the kernel ends when its parent dies: no job outlives its runner and holds GPUs unseen.

    python die_with_parent.py PARENT_PID NICENESS PROGRAM [ARGUMENT ...]

Linux only (PR_SET_PDEATHSIG survives exec). Costs one Python start without site packages, about 20 ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the program."""
    parent, niceness, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was told
        sys.exit("the runner is gone")
    os.nice(niceness)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"command: {program[0]!r} cannot be run: {error.strerror}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
