"""Batches on the device before they are needed: made by threads, page-locked, copied on their own stream.

Invariant: what a batch holds depends on its position alone, so reading ahead changes nothing that is
learned; a batch that was made for a plan that changed is dropped. On a GPU a batch is copied while the one
before it computes, and the computing stream waits for its copy and for nothing else. The cost is the memory
of the batches that are ahead.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.profiler import record_function

from training.data import Windows
from training.trace import WAITING


@dataclass(frozen=True)
class Ask:
    """Sequences from a position of the run's order."""

    position: int
    count: int


class Feed:
    """Batches of windows on a device. `ahead` batches are made before they are asked for."""

    def __init__(
        self, windows: Windows, device: torch.device, ahead: int = 1, workers: int = 0, pinned: bool = False
    ) -> None:
        self.windows = windows
        self.device = device
        self.ahead = ahead
        self.pinned = pinned and device.type == "cuda"
        stream: Any = torch.cuda.Stream
        self.stream = stream(device) if device.type == "cuda" and ahead else None
        self.pool = ThreadPoolExecutor(workers, "batches") if workers and ahead else None
        self.ready: dict[Ask, Future[Any] | Any] = {}

    def take(self, ask: Ask, following: Sequence[Ask] = ()) -> torch.Tensor:
        """The rows that are asked for; those that follow are begun."""
        found = self.ready.pop(ask, None)
        if isinstance(found, Future):
            with record_function(WAITING):
                found = found.result()
        rows, event = found or self._make(ask)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
            rows.record_stream(torch.cuda.current_stream(self.device))
        wanted = list(following[: self.ahead])
        self.ready = {known: made for known, made in self.ready.items() if known in wanted}
        for each in wanted:
            if each not in self.ready and (self.pool or self.stream):
                self.ready[each] = self.pool.submit(self._make, each) if self.pool else self._make(each)
        return rows

    def _make(self, ask: Ask) -> tuple[torch.Tensor, Any]:
        with record_function(WAITING):  # in a thread of its own nobody waits for it, as a trace shows
            rows = self.windows.at(ask.position, ask.count)
        if self.device.type != "cuda":
            return rows, None
        if self.pinned:
            rows = rows.pin_memory()
        if self.stream is None:
            return rows.to(self.device), None
        with torch.cuda.stream(self.stream):
            copied = rows.to(self.device, non_blocking=self.pinned)
            return copied, self.stream.record_event()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pool:
            self.pool.shutdown(wait=True, cancel_futures=True)
