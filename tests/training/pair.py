"""Steps of one of two gloo processes, with its collectives counted.

`python -m tests.training.pair ANSWER [LAYOUT...]` leaves a JSON object in a file: for each layout the losses
of its steps, and the collectives of the last one by kind.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.training.small_runs import SMALL
from training.config import TrainingConfig, plain_of

STEPS = 2
KINDS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::_allgather_base_": "all_gather",
}
BATCH = {"global_batch": 16, "micro_batch": 2}  # four passes of each process
FSDP = {"parallel": "fsdp", "layers_per_group": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": "ddp", "sync": "last"},
    "ddp, every pass": {"parallel": "ddp", "sync": "every"},
    "fsdp": {**FSDP, "sync": "last", "reshard": False},
    "fsdp, every pass": {**FSDP, "sync": "every", "reshard": True},
    "fsdp, both layers together": {**FSDP, "sync": "last", "reshard": False, "layers_per_group": 2},
}
ON_TWO_NODES: dict[str, dict[str, Any]] = {
    "hsdp": {**FSDP, "parallel": "hsdp", "sync": "last", "reshard": False},
    "fsdp, resharded": {**FSDP, "sync": "last", "reshard": True},
    "fsdp, recomputed": {**FSDP, "sync": "last", "reshard": False, "activation_checkpointing": "full"},
    "fsdp, bf16": {**FSDP, "sync": "last", "reshard": False, "precision": "bf16_master"},
}


def layout(name: str) -> TrainingConfig:
    """The small configuration laid out so; the rest is plain."""
    plain = plain_of(SMALL.model_copy(update={"global_batch": 16}), 2)
    return plain.model_copy(update={**BATCH, **{**LAYOUTS, **ON_TWO_NODES}[name]})


def counted_collectives(work: Any) -> dict[str, int]:
    """Do the work; how many collectives of each kind it made, as torch's profiler counts them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        work()
    counts = dict.fromkeys(KINDS.values(), 0)
    for event in profiled.events() or ():
        if event.name in KINDS:
            counts[KINDS[event.name]] += 1
    return counts


def _answer(name: str, world: Any, device: Any) -> dict[str, Any]:
    from training.checkpoints import LocalCheckpoints
    from training.corpus import load_text
    from training.feed import Feed
    from training.resolve import resolve
    from training.trainer import Run

    config, _ = resolve(layout(name), world, device)
    windows, _ = load_text(config)
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as scratch, Feed(windows, device) as feed:
        run = Run(config, Path(scratch), LocalCheckpoints(Path(scratch) / "none"), world, lambda line: None)
        run.build(device, windows, None)
        progress = run.start

        def step() -> None:
            nonlocal progress
            loss, _, problem = run.step(feed, progress, False)
            losses.append(loss)
            progress = run.after(progress, loss, problem, 1.0)

        for _ in range(STEPS - 1):
            step()
        counts = counted_collectives(step)
    return {"losses": losses, "collectives": counts, "passes": run.accumulation}


def main(answer: Path, names: Sequence[str]) -> None:
    """Make the steps of these layouts."""
    import torch

    from training.processes import joined, world_from_environment

    world, device = world_from_environment(), torch.device("cpu")
    with joined(world, device):
        found = {name: _answer(name, world, device) for name in names}
    if world.rank == 0:
        answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(LAYOUTS))
