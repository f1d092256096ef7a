"""How a run looks while it runs: a bar on a terminal, a line per step elsewhere."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any


class Shown:
    """Shows steps and lines. On a terminal lines scroll above a bar; `say` prints elsewhere."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.bar: Any = None
        self.task: Any = None

    def step(self, metrics: dict[str, Any]) -> None:
        """A step was made."""
        text = told(metrics)
        if self.bar is None:
            self.say(f"step {metrics['steps']}/{metrics['steps_total']}: {text}")
            return
        if self.task is None:
            self.task = self.bar.add_task("", total=metrics["steps_total"])
        self.bar.update(self.task, completed=metrics["steps"], description=text)

    def line(self, text: str) -> None:
        """Something people should know."""
        if self.bar is None:
            self.say(text)
        else:
            self.bar.console.print(text, highlight=False, markup=False)

    def __enter__(self) -> "Shown":
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
            )
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()


def told(metrics: dict[str, Any]) -> str:
    """A step's metrics in one short line."""
    parts = ["left out" if metrics["loss"] is None else f"loss {metrics['loss']:.4f}"]
    if "tokens_per_s" in metrics:
        parts.append(f"{metrics['tokens_per_s']:.0f} tokens/s")
    if "mfu" in metrics:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    return ", ".join(parts)
