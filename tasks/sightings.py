"""How old leases are by control's own clock, from when it saw them change.

Leases are dated by the machines that write them, and clocks are wrong: behind, ahead, stepped, and control's
own may be stepped too. A lease that differs from the last look's was renewed in between, whatever its date
says; the part of its date that stays the same from one renewal to the next is the difference between two
clocks, not age. Invariant: ages are counted by a clock that nobody sets, within one boot of the control
machine; after another boot, or when the memory is lost, everything is seen for the first time, and a date is
all there is. The cost is one small file, read and written at each look.
"""

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.instants import boot
from tasks.notes import read_note, write_note


@dataclass(frozen=True)
class Seen:
    """A lease as it was last looked at; seconds. `offset`: its age by its date when it was seen to change."""

    token: str
    noticed: float
    age: float  # of the renewal, when it was noticed
    offset: float | None
    looked: float


class Sightings:
    """One look at the leases. Ask for each, then `keep` what was seen for the next look."""

    def __init__(self, file: Path, steady: float, lost_after_s: float) -> None:
        """`steady`: seconds by a clock that nobody sets."""
        self.file, self.steady, self.lost_after_s = file, steady, lost_after_s
        self.before: dict[str, Seen] = {}
        self.after: dict[str, Seen] = {}
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            kept = json.loads(read_note(file))
            if kept["boot"] == boot():
                found = {key: Seen(**seen) for key, seen in kept["seen"].items()}
                self.before = {key: seen for key, seen in found.items() if seen.looked <= steady}

    def age_s(self, key: str, token: str, dated_s: float, trusted: bool = True) -> float:
        """Seconds since the lease was renewed. `dated_s`: what its date says; `token`: what renewal changes.

        At first sight the date decides, if it is `trusted`; else the lease counts as renewed just now.
        """
        before = self.before.get(key)
        if before is None:
            age = dated_s if trusted else 0.0
            seen = Seen(
                token, self.steady, age, dated_s if abs(dated_s) <= self.lost_after_s else None, self.steady
            )
        elif before.token == token:
            seen = Seen(token, before.noticed, before.age, before.offset, self.steady)
        else:
            since_look = self.steady - before.looked
            # Its age by its date, or by the date less what the clocks differed by before; the younger, since
            # one clock or the other may have been set right. More than has passed since the last look cannot
            # be.
            possible = [dated_s] if dated_s >= 0.0 else []
            possible += [] if before.offset is None else [max(dated_s - before.offset, 0.0)]
            age = min((each for each in possible if each <= since_look + self.lost_after_s / 4), default=0.0)
            seen = Seen(token, self.steady, age, dated_s, self.steady)
        self.after[key] = seen
        return seen.age + self.steady - seen.noticed

    def clock_agrees(self, key: str) -> bool:
        """Whether the dates of whoever renews this lease can be compared with control's clock."""
        seen = self.after.get(key)
        return seen is not None and seen.offset is not None and abs(seen.offset) <= self.lost_after_s / 2

    def keep(self) -> None:
        """Remember what was asked for. A disk that does not take it costs one look's memory."""
        seen = {key: asdict(each) for key, each in self.after.items()}
        write_note(self.file, json.dumps({"boot": boot(), "seen": seen}).encode())
