"""What removing a fault gains between two gloo processes, by steps that take turns, apart from the diagnosis.

`python -m tests.training.gained ANSWER FAULTY CLEAN` leaves a JSON number in a file: how many times as
long a step of the faulty configuration takes as one of the clean one.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from training import communication
from training.config import TrainingConfig, load_config

STEPS, WARM_UP = 11, 2
COMPUTE, LATENCY = 0.1, 0.008  # seconds
_DDP, _PASSING = communication._ddp, communication.Exchange.passing
_UNDER_WAY: list[float] = []  # seconds that each exchange of a pass takes


def far_apart() -> Any:
    """A model of some small weights; its processes are COMPUTE seconds of a pass busy, and LATENCY seconds
    apart in each exchange, however loaded the machine is."""
    import torch
    from torch import nn

    vars(communication)["_ddp"] = _over_a_slow_network
    setattr(communication.Exchange, "passing", _waiting_for_it)  # noqa: B010

    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.next = nn.Embedding(264, 512)
            self.shifts = nn.ParameterList(torch.zeros(512) for _ in range(30))

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            time.sleep(COMPUTE)
            found = self.next(inputs)
            for shift in self.shifts:
                found = found + shift
            return nn.functional.cross_entropy(found.flatten(0, 1), labels.flatten())

    return Shifts()


def _over_a_slow_network(*arguments: Any) -> Any:
    import torch
    from torch._C._distributed_c10d import GradBucket
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def noted(group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        _UNDER_WAY.append(LATENCY)
        return allreduce_hook(group, bucket)

    spread: Any = _DDP(*arguments)
    spread.register_comm_hook(None, noted)
    return spread


@contextlib.contextmanager
def _waiting_for_it(exchange: communication.Exchange, last: bool) -> Iterator[None]:
    """A pass, at whose end its exchanges are waited for."""
    from torch.profiler import record_function

    with _PASSING(exchange, last):
        yield
    with record_function("gloo:all_reduce over a slow network"):
        time.sleep(sum(_UNDER_WAY))
    _UNDER_WAY.clear()


class Turns:
    """A run whose steps are made one at a time."""

    def __init__(self, config: TrainingConfig, place: Path, world: Any, device: Any) -> None:
        from training.checkpoints import LocalCheckpoints
        from training.corpus import load_text
        from training.feed import Feed
        from training.resolve import resolve
        from training.trainer import Run

        config, _ = resolve(config, world, device)
        windows, _ = load_text(config)
        self.run = Run(config, place, LocalCheckpoints(place / "none"), world, lambda line: None)
        self.run.build(device, windows, None)
        self.feed = Feed(windows, device)
        self.seconds: list[float] = []

    def step(self) -> None:
        """One more, of the same batch."""
        began = time.perf_counter()
        self.run.step(self.feed, self.run.start, False)
        self.seconds.append(time.perf_counter() - began)


def in_turns(runs: Sequence[Turns]) -> float:
    """How many times as long a step of the first takes as one of the second, as they take turns."""
    for _ in range(STEPS):
        for run in runs:
            run.step()
    faulty, clean = (run.seconds[WARM_UP:] for run in runs)
    return median(slow / fast for slow, fast in zip(faulty, clean, strict=True))


def main(answer: Path, *files: Path) -> None:
    """Measure."""
    import torch

    from training.processes import joined, world_from_environment

    world, device = world_from_environment(), torch.device("cpu")
    with joined(world, device):
        times = in_turns([Turns(load_config(file), answer.parent, world, device) for file in files])
    if world.rank == 0:
        answer.write_text(json.dumps(times))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
