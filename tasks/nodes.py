"""Which nodes answer: a lease in storage for each, which its worker renews every few seconds.

Invariant: a node is ready only while a readable lease of its own is younger than `lost_after`. Workers date
their leases themselves. Control counts their age from when it saw them change (`Sightings`), so that a node
whose clock is wrong is used all the same; whoever looks once has only the date, and one from the future
counts as lost, because such a lease would outlive its node.
"""

import json
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from tasks import instants
from tasks.sightings import Sightings
from tasks.storage import UNUSABLE, NotFoundError, Storage

MOST_BYTES = 1 << 16  # of a lease


@dataclass(frozen=True)
class NodeState:
    """Whether a node can be given work, why, and when it last answered."""

    state: Literal["ready", "lost"]
    reason: str
    last_seen: datetime | None
    clock_agrees: bool = True  # its dates can be compared with control's


def renew_lease(storage: Storage, node: str, now: datetime | None = None, pid: int | None = None) -> None:
    """Say that this node's worker is alive. Raises StorageError when storage does not take it."""
    lease = {
        "node": node,
        "at": instants.text(now or instants.now()),
        "pid": os.getpid() if pid is None else pid,
        "host": socket.gethostname(),
    }
    storage.write(lease_key(node), json.dumps(lease).encode())


def node_states(
    storage: Storage,
    names: Iterable[str],
    now: datetime,
    lost_after: timedelta,
    sightings: Sightings | None = None,
) -> dict[str, NodeState]:
    """The state of each node by its lease. Raises StorageError when storage cannot be read at all."""
    return {name: _state(storage, name, now, lost_after, sightings) for name in names}


def lease_key(node: str) -> str:
    """Where a node's lease lies."""
    return f"leases/nodes/{node}.json"


def _state(
    storage: Storage, name: str, now: datetime, lost_after: timedelta, sightings: Sightings | None
) -> NodeState:
    try:
        lease = json.loads(storage.read(lease_key(name), MOST_BYTES))
        if lease["node"] != name:
            return NodeState("lost", f"its lease speaks of {lease['node']!r:.80}", None)
        seen = instants.parse(lease["at"])
        age = now - seen
    except NotFoundError:
        return NodeState("lost", "never seen: no worker has renewed its lease", None)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, *UNUSABLE):
        return NodeState("lost", "its lease cannot be read", None)
    if sightings is not None:
        dated, key = age, lease_key(name)
        age = timedelta(seconds=sightings.age_s(key, lease["at"], dated.total_seconds()))
        if not sightings.clock_agrees(key):
            seconds = _seconds(abs(dated - age))
            clock = f"its clock and this one differ by {seconds}"
            state: Literal["ready", "lost"] = "ready" if timedelta() <= age <= lost_after else "lost"
            return NodeState(state, f"seen {_seconds(max(age, timedelta()))} ago; {clock}", seen, False)
    if age > lost_after:
        return NodeState("lost", f"not seen for {_seconds(age)}", seen)
    if age < -lost_after:
        return NodeState("lost", f"its clock is {_seconds(-age)} ahead of this one", seen)
    return NodeState("ready", f"seen {_seconds(max(age, timedelta()))} ago", seen)


def _seconds(span: timedelta) -> str:
    return f"{span.total_seconds():.0f} s"
