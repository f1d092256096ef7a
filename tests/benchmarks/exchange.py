"""How long two gloo processes wait for each other: `python -m tests.benchmarks.exchange ANSWER`.

Exposed communication is the time of a step less the time of the same step in which nothing is exchanged; both
are the fastest of a few, taken in turns. The answer is a JSON object of seconds for each layout.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from training.config import TrainingConfig, plain_of

TURNS = 5
SHAPE = TrainingConfig(model="llama-tiny", seq_len=64, micro_batch=1, global_batch=8, held_out_windows=1)
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain: ddp, after every pass": {},
    "tuned: ddp, after the last pass": {"sync": "last", "bucket_mb": "auto"},
    "tuned: fsdp, weights kept between passes": {
        "parallel": "fsdp",
        "sync": "last",
        "reshard": False,
        "layers_per_group": "auto",
        "prefetch_layers": 1,
    },
}


def _seconds(levers: dict[str, Any], world: Any, device: Any) -> dict[str, float]:
    from training.checkpoints import LocalCheckpoints
    from training.communication import Exchange
    from training.corpus import load_text
    from training.feed import Feed
    from training.resolve import resolve
    from training.step import forward_backward
    from training.trainer import Run

    config, _ = resolve(plain_of(SHAPE, 2).model_copy(update=levers), world, device)
    windows, _ = load_text(config)
    times: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as scratch, Feed(windows, device) as feed:
        run = Run(config, Path(scratch), LocalCheckpoints(Path(scratch) / "none"), world, lambda line: None)
        run.build(device, windows, None)
        honest, sync = Exchange.passing, run.parts.exchange.sync
        asks, following = run.asks(0)

        @contextmanager
        def never(exchange: Exchange, last: bool) -> Iterator[None]:
            with honest(exchange, False):
                yield

        for turn in range(TURNS + 1):
            for kind in times:
                Exchange.passing = honest if kind == "with" else never  # type: ignore[assignment,method-assign]
                run.parts.exchange.sync = sync if kind == "with" else "last"
                run.parts.optimizer.zero_grad()
                began = time.perf_counter()
                forward_backward(run.parts, feed, asks, following, 1)
                if turn:
                    times[kind].append(time.perf_counter() - began)
        Exchange.passing = honest  # type: ignore[method-assign]
    return {kind: min(found) for kind, found in times.items()}


def main(answer: Path) -> None:
    """Measure every layout."""
    import torch

    from training.processes import joined, world_from_environment

    world, device = world_from_environment(), torch.device("cpu")
    with joined(world, device):
        found = {name: _seconds(levers, world, device) for name, levers in LAYOUTS.items()}
    if world.rank == 0:
        answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
