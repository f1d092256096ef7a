"""Facts: immutable JSON objects in storage, one for everything that was asked, observed, planned or done.

Invariant: a fact is created once and never changed; where several writers compete for a key, one wins and the
others learn that they lost. The key is `facts/<day>/<kind>/<name>.json`; its day comes from something all
writers of that key know (the instant of a plan, the day of the commitment of an attempt), never from their
clocks.
"""

import json
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Literal, get_args

from tasks.instants import text
from tasks.secrets import redacted_values
from tasks.storage import Storage, TooLargeError

FactKind = Literal[
    "spec",  # a job taken in, or one occurrence of a recurring job
    "rejected",  # a spec that was not
    "cancel",  # a request to end a job
    "demand",  # samples of a service's load
    "node",  # a node that became ready or lost
    "forecast",  # what an hour expected
    "plan",  # what an hour planned, and what the baselines would have got
    "commit",  # what starts before the next plan; one per instant
    "dispatch",  # a flow run that was created for a rank of an attempt
    "started",  # a rank's claim to begin, or its voiding
    "outcome",  # how a rank ended
    "slot",  # the account of a slot that has passed
    "missed",  # a slot that nobody planned in time
    "degraded",  # a step that did less than it should have
]
MOST_BYTES = 64 << 20  # of a fact: a plan of thousands of jobs has a few million
SAID = ("error", "reason", "metrics", "detail")  # what programs and machines say, who may say too much
KINDS: tuple[str, ...] = get_args(FactKind)


class FactError(Exception):
    """A stored fact that cannot be read; the message names its key."""


@dataclass(frozen=True)
class FactKey:
    """The parts of a fact's key."""

    day: date
    kind: str
    name: str

    def __str__(self) -> str:
        return f"facts/{self.day.isoformat()}/{self.kind}/{self.name}.json"


def fact_key(kind: FactKind, day: datetime | date, *name: str | int) -> str:
    """The key of a fact. `day` is an instant in UTC or a day; the parts of `name` are safe as file names."""
    return str(FactKey(day.date() if isinstance(day, datetime) else day, kind, "/".join(map(str, name))))


def parse_key(key: str) -> FactKey:
    """The parts of a key. Raises FactError when it is not one of a fact."""
    parts = key.removesuffix(".json").split("/", 3)
    try:
        day = date.fromisoformat(parts[1])
    except (IndexError, ValueError):
        raise FactError(f"{key}: expected facts/<day>/<kind>/<name>.json") from None
    if len(parts) != 4 or parts[0] != "facts" or parts[2] not in KINDS or not key.endswith(".json"):
        raise FactError(f"{key}: expected facts/<day>/<kind>/<name>.json with a known kind")
    found = FactKey(day, parts[2], parts[3])
    if str(found) != key:  # another way of writing the day, which nobody would find it by
        raise FactError(f"{key}: expected {found}")
    return found


def write_fact(storage: Storage, key: str, at: datetime, payload: dict[str, Any]) -> bool:
    """Create the fact with `at`, the writer's present; False when the key was taken already."""
    said = {name: redacted_values(payload[name]) for name in SAID if name in payload}
    return storage.create(key, _encoded({"at": text(at), **payload, **said}))


def read_json(storage: Storage, key: str) -> dict[str, Any]:
    """A JSON object in storage. Raises FactError for anything else, NotFoundError when the key is absent."""
    try:
        value = json.loads(storage.read(key, MOST_BYTES))
    except TooLargeError as error:
        raise FactError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise FactError(f"{key}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FactError(f"{key}: expected a JSON object, found {type(value).__name__}")
    return value


def write_json(storage: Storage, key: str, payload: dict[str, Any]) -> None:
    """Create or replace a JSON object that is not a fact: a lease, a target, an observation."""
    storage.write(key, _encoded(payload))


def fact_keys(storage: Storage, day: date | None = None) -> list[str]:
    """Keys of all facts of a day, or of every day."""
    return storage.keys(f"facts/{day.isoformat()}/" if day else "facts/")


def _encoded(payload: dict[str, Any]) -> bytes:
    """Halves of characters, which no database takes, become question marks."""
    text = json.dumps(payload, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="replace")
