"""A process that was told to end is gone in time, whatever it waits for meanwhile.

Invariant: `gone_in_time` may be called in a signal's handler: the kernel ends the process when its time is
over, also while its only thread waits for a storage that does not answer. What it could not save by then is
lost as with `kill -9`, which everything here survives. Costs nothing until it is called.
"""

import signal

ENDS_S = 27  # from SIGTERM to the end at the latest; a program's grace of 15 s is within it


def gone_in_time() -> None:
    """Let the kernel end this process in ENDS_S seconds, counted from the first call."""
    left_s = signal.alarm(ENDS_S)  # of an earlier call, which counts
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if left_s:
        signal.alarm(left_s)
