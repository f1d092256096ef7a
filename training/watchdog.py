"""Ends a run that hangs: a collective that one process never joins would hold its GPUs for ever.

Invariant: when nothing is heard for the configured time, the stacks of all threads are printed, one line
says where the run was, and the process ends with its own exit code, at once: a hung thread cannot be asked.
"""

import faulthandler
import os
import sys
import threading
import time
from types import TracebackType

EXIT_HUNG = 75


class Watchdog:
    """Hears `beat` at least every `seconds`, or ends the process."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.doing = "the first step"
        self.heard = time.monotonic()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, doing: str) -> None:
        """Still alive, and about to do this."""
        self.doing, self.heard = doing, time.monotonic()

    def __enter__(self) -> "Watchdog":
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over.set()

    def _watch(self) -> None:
        while not self.over.wait(min(self.seconds / 4, 10.0)):
            silent = time.monotonic() - self.heard
            if silent > self.seconds:
                faulthandler.dump_traceback(sys.stderr)
                line = f"training: hung for {silent:.0f} s in {self.doing}; ended (hang_seconds)"
                print(line, file=sys.stderr, flush=True)
                os._exit(EXIT_HUNG)
