"""Runs of a model of 0.1 M parameters, in the test's own process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.config import TrainingConfig
from training.trainer import Result, train

SMALL = TrainingConfig(
    model="llama-micro",
    seq_len=32,
    micro_batch=4,
    steps=12,
    warmup=2,
    lr=3e-3,
    checkpoint_every=5,
    held_out_windows=8,
)


def trained(
    directory: Path,
    stop_after: int | None = None,
    log: Callable[[str], None] = lambda line: None,
    **changes: Any,
) -> Result:
    """Train the small configuration, with some keys changed."""
    seen: list[int] = []

    def report(metrics: dict[str, Any]) -> None:
        seen.append(metrics["steps"])

    def stopping() -> bool:
        return bool(seen) and seen[-1] + 1 == stop_after

    return train(SMALL.model_copy(update=changes), directory, report=report, stopping=stopping, log=log)
