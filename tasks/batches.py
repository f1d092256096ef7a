"""Which prompts are generated together: the longest first, as many as memory holds.

Invariant: every prompt is in exactly one batch, and no batch of more than one is predicted to take more
memory than there is. Sorting by length is what keeps padding small; the cost is that rows finish out of
order within a shard.
"""

import contextlib
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SHARE_OF_FREE = {"cuda": 0.85, "cpu": 0.5}  # a processor's memory is shared with everything else
LEAST_ROWS = 8  # rows of a batch before it may refuse a shorter prompt
LEAST_ALIKE = 0.5  # of the longest row's tokens, new ones among them
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
CGROUP_USED = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


def batches(
    lengths: Sequence[int], new: int, most_rows: int, fits: Callable[[int, int], bool]
) -> list[list[int]]:
    """Places of prompts that run together. `fits(rows, prompt)` says whether so many rows padded to that
    length can; a prompt alone always runs. A batch of some size takes no prompt much shorter than its
    longest: the padding would cost more than another batch."""
    found: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        batch = found[-1] if found else []
        longest = lengths[batch[0]] if batch else 0
        alike = len(batch) < LEAST_ROWS or lengths[place] + new >= LEAST_ALIKE * (longest + new)
        if batch and alike and len(batch) < most_rows and fits(len(batch) + 1, longest):
            batch.append(place)
        else:
            found.append([place])
    return found


def free_bytes(device: "torch.device") -> int:
    """Memory that generation may use on the device, by its own word and any limit on this process."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free + kept) * SHARE_OF_FREE["cuda"])
    limits = [_available(), *_below_cgroup(), *_below_address_space()]
    return int(max(min(limits), 0) * SHARE_OF_FREE["cpu"])


def _available() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return 4 << 30


def _below_cgroup() -> list[int]:
    """What a container's limit leaves; nothing when there is none."""
    for limit, used in zip(CGROUP_LIMITS, CGROUP_USED, strict=True):
        with contextlib.suppress(OSError, ValueError):
            return [int(Path(limit).read_text()) - int(Path(used).read_text())]
    return []


def _below_address_space() -> list[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    with contextlib.suppress(OSError, ValueError, IndexError):
        return [limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()]
    return []
