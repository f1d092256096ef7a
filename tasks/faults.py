"""Named places in the program where tests make it die, as a power cut would: between two durable effects.

Invariant: nothing happens at a place unless a test's environment asks for it: SLOTWISE_FAULT names the place
and counts only where PYTEST_VERSION is set too, as pytest does for itself and its children. Off, a place
costs one call that compares with None. What is listed here is what the kill matrix goes through. With
SLOTWISE_FAULT_SIGNAL=SIGTERM the program is told to end there instead.
"""

import os
import signal

POINTS = {
    "inbox.recorded": "a spec's fact stands, its file is still in the inbox",
    "inbox.rejected": "a rejection stands, its file is still in the inbox",
    "collect.inbox": "all specs are taken in",
    "collect.recurring": "occurrences have been made",
    "collect.cancels": "cancel requests have their facts",
    "collect.demand": "samples of a service are a fact",
    "collect.nodes": "nodes that changed have their facts",
    "collect.voided": "a rank's claim is taken away, it has no outcome yet",
    "collect.settled": "ranks that are over have outcomes, the ledger does not know them",
    "ledger.inserted": "rows are in an open transaction",
    "ledger.committed": "the transaction is committed, the file is open",
    "ledger.checkpointed": "the log is in the file, no copy has been made",
    "ledger.copied": "the copy is whole, under its temporary name",
    "ledger.published": "the copy has its name",
    "storage.written": "an object lies under its temporary name",
    "storage.named": "an object has its name, its folder is not synced",
    "forecast.recorded": "the forecast is a fact",
    "allocate.solved": "the plan is made, nothing of it is written",
    "commit.solved": "the solved problem lies in storage, nothing is committed",
    "commit.committed": "the commitment stands, its plan is no fact yet",
    "commit.planned": "commitment and plan stand, the ledger does not know them",
    "dispatch.told": "services know their targets, no flow run has been made",
    "dispatch.created": "a flow run is made, its fact is not",
    "dispatch.recorded": "a flow run and its fact stand",
    "ledger.exported": "tables are files in a temporary folder, none is in storage",
    "record.closed": "a slot's account is a fact, the ledger does not know it",
    "record.taken": "the ledger knows the accounts, the copy is the old one",
    "record.published": "the copy is new, the snapshots are old",
}


def point(name: str) -> None:
    """Die here by SIGKILL, or get another signal, if a test asked for it."""
    if _armed is not None:
        _armed.reached(name)


class _Fault:
    """Where to die of which signal, the how manieth time it is reached, and where to note the way there."""

    def __init__(self, place: str, count: int, number: signal.Signals, trace: str | None) -> None:
        self.place, self.left, self.number, self.trace = place, count, number, trace

    def reached(self, name: str) -> None:
        if name not in POINTS:
            raise AssertionError(f"{name} is not listed in POINTS")
        if self.trace is not None:
            with open(self.trace, "a") as out:  # noqa: PTH123 - the least that can be done
                out.write(f"{name}\n")
        if self.place in (name, "*"):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), self.number)


def armed(environment: "os._Environ[str] | dict[str, str]") -> _Fault | None:
    """The fault that an environment asks for: `PLACE` or `PLACE#COUNT`, PLACE being * for any; or None."""
    wanted = environment.get("SLOTWISE_FAULT")
    if not wanted or "PYTEST_VERSION" not in environment:
        return None
    place, _, count = wanted.partition("#")
    number = signal.Signals[environment.get("SLOTWISE_FAULT_SIGNAL", "SIGKILL")]
    return _Fault(place, int(count or 1), number, environment.get("SLOTWISE_FAULT_TRACE"))


_armed = armed(os.environ)


def arm(environment: dict[str, str]) -> None:
    """Set the fault of this process anew, in a test's child that was forked with this module loaded."""
    global _armed
    _armed = armed(environment)
