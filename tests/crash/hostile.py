"""Storage and disks that fail, for a planner's process: by seed, so that the same seed fails the same way."""

import random
import resource
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

from tasks.storage import DirectoryStorage, StorageError

OPERATIONS = ("read", "write", "create", "keys", "delete", "upload")


def make_hostile(wanted: dict[str, Any]) -> None:
    """`errors`: share of storage operations that fail, chosen by `seed`; `disk`: bytes a file may have."""
    if wanted.get("errors"):
        _fail_at_random(int(wanted["seed"]), float(wanted["errors"]))
    if wanted.get("disk"):
        # As a full disk does, it fails a write after others have succeeded, the ledger's too.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(wanted["disk"]), resource.RLIM_INFINITY))


def _fail_at_random(seed: int, share: float) -> None:
    for name in OPERATIONS:
        setattr(DirectoryStorage, name, _failing(name, getattr(DirectoryStorage, name), seed, share))


def _failing(name: str, operation: Callable[..., Any], seed: int, share: float) -> Callable[..., Any]:
    """Fails by operation, key and how often that was tried: threads may come in any order."""
    tries: Counter[str] = Counter()

    def tried(self: DirectoryStorage, key: str = "", *arguments: Any, **named: Any) -> Any:
        tries[key] += 1
        chance = random.Random(f"{seed} {name} {key} {tries[key]}")
        if chance.random() < share:
            if chance.random() < 0.5:  # done, and the answer lost
                operation(self, key, *arguments, **named)
            raise StorageError(f"{self.root}: the server answered 503 SlowDown")
        return operation(self, key, *arguments, **named)

    return tried
