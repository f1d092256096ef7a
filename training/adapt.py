"""While training: a larger micro-batch when the Tensor Cores idle and memory allows, a smaller one when full.

Invariant: a change happens between two steps, in all processes at once, from the same numbers (sums over all
of them), and keeps the global batch: nothing of a step is lost, and the curve is the same but for rounding.
A larger micro-batch that is not faster is taken back and not tried again. The cost: one small exchange per
window of steps.
"""

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.communication import flat_sum
from training.hardware import measured_peak
from training.host_memory import available_bytes
from training.occupancy import FULL, occupancy_meter

if TYPE_CHECKING:
    from training.trainer import Run

WINDOW = 20  # steps between two looks
WORTH = 1.02  # a larger micro-batch must be this much faster to stay
ROOM = 0.9  # of the memory may be used
TIGHT = 0.97  # of the memory in use: the micro-batch shrinks before it runs out


@dataclass(frozen=True)
class Look:
    """One window as all processes agree on it."""

    micro_batch: int
    occupancy: float  # mean over processes
    seconds: float  # of the median step, mean over processes
    memory_share: float  # of the fullest process, or an upper bound of it


@dataclass(frozen=True)
class Change:
    """Another micro-batch, and why."""

    micro_batch: int
    why: str


def decide(look: Look, before: Look | None, own_batch: int, ceiling: int) -> Change | None:
    """What to do after a window. `before` is the last one at another size, `ceiling` the largest allowed."""
    size = look.micro_batch
    if look.memory_share > TIGHT and size > 1 and own_batch % (size // 2) == 0:
        return Change(size // 2, f"{look.memory_share:.0%} of the memory is in use")
    if before is not None and before.micro_batch < size and look.seconds * WORTH > before.seconds:
        return Change(before.micro_batch, f"{size} is no faster than {before.micro_batch}")
    doubled = 2 * size
    allowed = doubled <= ceiling and own_batch % doubled == 0
    # As if all of the memory grew with the micro-batch: never too much.
    if look.occupancy < FULL and allowed and look.memory_share * 2 <= ROOM:
        return Change(doubled, f"occupancy {look.occupancy:.0%}, memory {look.memory_share:.0%}")
    return None


class Adaptation:
    """Looks at a run after each window of steps, and changes its micro-batch."""

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.seconds: list[float] = []
        self.before: Look | None = None
        self.ceiling = run.own_batch
        self.read = occupancy_meter(run.device, self._achieved, self._achievable)
        self.source = ""

    def after(self, seconds: float) -> None:
        """A step took so long."""
        self.seconds.append(seconds)
        if len(self.seconds) < WINDOW:
            return
        run, found = self.run, self.read()
        self.source = found.source
        size = run.world.size
        mine = (found.share, statistics.median(self.seconds))  # the first after a change warms up
        sums = flat_sum((*mine, *self._shares()), run.device, run.world)
        look = Look(run.micro_batch, sums[0] / size, sums[1] / size, max(sums[2:]))
        self.seconds = []
        change = decide(look, self.before, run.own_batch, self.ceiling)
        if change is None:
            return
        if change.micro_batch < look.micro_batch:
            self.ceiling = change.micro_batch
        self.before = look
        run.change_micro_batch(change.micro_batch, f"{change.why} ({found.source})")

    def _shares(self) -> list[float]:
        """This process's share of memory at its own place in a row of zeros: summed, each one's is known."""
        shares = [0.0] * self.run.world.size
        shares[self.run.world.rank] = memory_share(self.run.device, self.run.config.memory_gb)
        return shares

    def _achieved(self) -> float:
        run: Any = self.run
        own_tokens = run.own_batch * run.config.seq_len
        return float(run.flops_per_token * own_tokens * len(self.seconds) / sum(self.seconds))

    def _achievable(self) -> float:
        return measured_peak(self.run.device, self.run.parts.peak_precision).flops_per_s


def memory_share(device: Any, limit_gb: float | None) -> float:
    """The share of its memory that this process has used at its fullest."""
    import resource

    if device.type == "cuda":
        import torch

        used = torch.cuda.max_memory_reserved(device)
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.reset_peak_memory_stats(device)
    else:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        total = used + (available_bytes(device) or used)
    limit = limit_gb * 1e9 if limit_gb else total
    return float(used / limit)
