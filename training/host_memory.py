"""Memory of this machine and of its GPU: how much there is, and keeping what was freed.

Invariant: keeping freed memory changes no result. glibc gives large blocks back to the system as soon as
they are freed, and a training step on a CPU frees and takes the same gigabyte over and over: each time the
system clears every page again. The cost of keeping it is that other processes do not get it meanwhile.
"""

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST = 1 << 30


def keep_freed_memory() -> bool:
    """Have this process keep the memory that it frees; False where its allocator cannot be told."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def available_bytes(device: "torch.device") -> int | None:
    """What a process may take on the device: a GPU's free memory, or what this machine can give."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes()


def available_host_bytes() -> int | None:
    """What this machine and its control group can still give; None where neither says."""
    found = [bytes_ for bytes_ in (_from_meminfo(), _from_cgroup()) if bytes_ is not None]
    return min(found) if found else None


def _from_meminfo() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _from_cgroup() -> int | None:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
        return None if limit == "max" else max(int(limit) - used, 0)
    except (OSError, ValueError):
        return None
