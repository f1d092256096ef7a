"""What a real-time service is told to hold, and what it must be assumed to hold.

Invariant: a GPU that a target ever gave a service counts as held until a later target leaves it out and the
service, having acted on that target, is seen without it. Control alone writes targets; their versions only
grow. Whatever cannot be read counts against clearing a GPU, never for it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tasks import instants, web
from tasks.storage import UNUSABLE, NotFoundError, Storage

Held = dict[str, frozenset[int]]  # GPUs by node, no node without any
WEBHOOK_LIMIT_S = 10.0
MOST_BYTES = 4 << 20  # of a target or an observation, which name GPUs
SLOW_MINUTES = 10.0  # after which people are told that a service does not leave
KNOWN_NAMES = ("target.json", "observed.json")
UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    *UNUSABLE,
)  # of an object that is not ours


class ServingError(Exception):
    """A service that could not be told its target; the message is one line that says which and why."""


@dataclass(frozen=True)
class Target:
    """The latest target. `leaving`: GPUs that it took away, or an earlier one did, not yet seen to be left.

    Version 0 stands for none. `unsure`: an earlier target was lost, so until this one is acknowledged the
    service may hold GPUs that nobody knows of.
    """

    version: int
    gpus: Held
    leaving: Held
    unsure: bool = False


@dataclass(frozen=True)
class Observed:
    """What the service said that it holds, having acted on the target of that version; 0 for nothing said."""

    version: int
    gpus: Held


NO_TARGET = Target(0, {}, {})
NOTHING_OBSERVED = Observed(0, {})


def publish_target(
    storage: Storage,
    service: str,
    gpus: Mapping[str, Iterable[int]],
    now: datetime,
    webhook: str | None = None,
) -> int:
    """Give the service exactly these GPUs; the version of the target that says so.

    A target that says the same is not written again. A webhook is called until the service has acknowledged
    the target and left what it takes away. Raises ServingError when the webhook fails: the target then stands
    in storage, and the next call tries the webhook again.
    """
    wanted = _gpus(gpus)
    seen = observed(storage, service)
    before = _read_target(storage, service)
    if before is None or before.gpus != wanted or before.version == 0 or before.version < seen.version:
        if before is None:  # lost: a version above any that was counted, and nothing taken for granted
            version = max(int(now.timestamp()), seen.version + 1)
            after = Target(version, wanted, _without(seen.gpus, wanted), unsure=True)
        else:
            version = max(before.version, seen.version) + 1
            held_now = _union(_held(before, seen), wanted)
            after = Target(
                version, wanted, _without(held_now, wanted), before.unsure and _pending(before, seen)
            )
        storage.write(target_key(service), _encoded(service, after, now))
    else:
        after = before
    if webhook and (_pending(after, seen) or _overlaps(after.leaving, seen.gpus)):
        _tell(storage, service, webhook, after, seen, now)
    return after.version


def target(storage: Storage, service_name: str) -> Target:
    """The latest target; NO_TARGET when there is none, or none that can be read."""
    return _read_target(storage, service_name) or NO_TARGET


def observed(storage: Storage, service_name: str) -> Observed:
    """What the service last said; NOTHING_OBSERVED when it said nothing, or nothing that can be read."""
    try:
        data = json.loads(storage.read(observed_key(service_name), MOST_BYTES))
        return _observed(data)
    except (NotFoundError, *UNREADABLE):
        return NOTHING_OBSERVED


def held(storage: Storage, service_name: str) -> dict[str, set[int]]:
    """GPUs by node that the service must be assumed to hold, as far as is known; see `blockers`."""
    found = _held(target(storage, service_name), observed(storage, service_name))
    return {node: set(gpus) for node, gpus in found.items()}


def blockers(storage: Storage, node: str, gpus: Iterable[int]) -> list[str]:
    """Which services may still hold which of these GPUs, in words; empty when all are clear.

    Raises StorageError when storage cannot be read: then nothing is known to be clear.
    """
    asked = frozenset(gpus)
    found = []
    for name in service_names(storage):
        before, seen = _read_target(storage, name), observed(storage, name)
        if before is None:
            found.append(f"{name}: its target cannot be read, it may hold any GPU until it is told anew")
            continue
        if before.unsure and _pending(before, seen):
            found.append(
                f"{name}: an earlier target was lost; it may hold any GPU until it acts on {before.version}"
            )
            continue
        wanted = asked & before.gpus.get(node, frozenset())
        late = (asked & _held(before, seen).get(node, frozenset())) - wanted
        if wanted:
            found.append(f"{name}: {_words(node, wanted)} given to it")
        if late:
            found.append(f"{name}: {_words(node, late)} not left yet ({_progress(before, seen)})")
    return found


def slow_to_leave(storage: Storage, name: str, now: datetime) -> str | None:
    """Which GPUs the service was told to leave some time ago and has not, in words; None when all is well.

    Nothing starts there before it has: somebody has to look at the service.
    """
    before, seen = _read_target(storage, name), observed(storage, name)
    if before is None or before.version == 0:
        return None
    late = before.leaving if _pending(before, seen) else _common(before.leaving, seen.gpus)
    try:
        told = instants.parse(json.loads(storage.read(target_key(name), MOST_BYTES))["at"])
    except (NotFoundError, *UNREADABLE):
        return None
    minutes = (now - told).total_seconds() / 60
    if minutes < SLOW_MINUTES or not (late or before.unsure):
        return None
    which = "; ".join(_words(node, gpus) for node, gpus in sorted(late.items())) or "unknown GPUs"
    return f"has not left {which} in {minutes:.0f} min ({_progress(before, seen)}); nothing starts there"


def service_names(storage: Storage) -> list[str]:
    """Every service that was ever given a target or said what it holds."""
    parts = [key.split("/") for key in storage.keys("serving/")]
    return sorted({part[1] for part in parts if len(part) == 3 and part[2] in KNOWN_NAMES})


def write_observed(storage: Storage, service_name: str, now: datetime, found: Observed) -> None:
    """Say what the service holds, on its behalf."""
    body = {"version": found.version, "gpus": _lists(found.gpus), "at": instants.text(now)}
    storage.write(observed_key(service_name), json.dumps(body).encode())


def target_key(service_name: str) -> str:
    """Where the service's target lies."""
    return f"serving/{service_name}/target.json"


def observed_key(service_name: str) -> str:
    """Where the service says what it holds."""
    return f"serving/{service_name}/observed.json"


def _pending(last: Target, seen: Observed) -> bool:
    """Whether the service has yet to act on this target; a version never given counts for nothing."""
    return seen.version != last.version


def _held(last: Target, seen: Observed) -> Held:
    """All that it was given, all that it says, and what it was to leave but has not been seen to act on."""
    known = _union(last.gpus, seen.gpus)
    return _union(known, last.leaving) if _pending(last, seen) else known


def _tell(storage: Storage, name: str, webhook: str, last: Target, seen: Observed, now: datetime) -> None:
    """Post the target; an acknowledgement in the answer is as good as an observation."""
    try:
        answer = web.call(
            "POST", webhook, json=json.loads(_encoded(name, last, now)), limit_s=WEBHOOK_LIMIT_S
        )
    except web.WebError as error:
        raise ServingError(f"{name}: target {last.version} could not be posted: {error}") from None
    if not answer.ok:
        raise ServingError(
            f"{name}: target {last.version} was not taken: {web.shown(webhook)}: {answer.said}"
        )
    try:
        said = _observed(json.loads(answer.body))
    except UNREADABLE:
        return  # an answer without an acknowledgement; the service may write its observation itself
    if seen.version <= said.version <= last.version and said != seen:
        write_observed(storage, name, now, said)


def _read_target(storage: Storage, name: str) -> Target | None:
    """The target; NO_TARGET when there is none, None when it cannot be read."""
    try:
        data = json.loads(storage.read(target_key(name), MOST_BYTES))
        version = _version(data)
        return Target(version, _gpus(data["gpus"]), _gpus(data["leaving"]), data.get("unsure", False) is True)
    except NotFoundError:
        return NO_TARGET
    except UNREADABLE:
        return None


def _observed(data: Any) -> Observed:
    return Observed(_version(data), _gpus(data["gpus"]))


def _version(data: Any) -> int:
    version = data["version"]
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ValueError("version")
    return version


def _gpus(data: Mapping[str, Iterable[int]]) -> Held:
    """GPUs by node. Raises one of UNREADABLE for anything else."""
    found = {}
    for node, gpus in data.items():
        indices = frozenset(gpus)
        if any(isinstance(gpu, bool) or not isinstance(gpu, int) or gpu < 0 for gpu in indices):
            raise ValueError("gpus")
        if indices:
            found[node] = indices
    return found


def _union(first: Held, second: Held) -> Held:
    return {node: first.get(node, frozenset()) | second.get(node, frozenset()) for node in first | second}


def _without(all_of: Held, taken: Held) -> Held:
    left = {node: gpus - taken.get(node, frozenset()) for node, gpus in all_of.items()}
    return {node: gpus for node, gpus in left.items() if gpus}


def _common(first: Held, second: Held) -> Held:
    both = {node: gpus & second.get(node, frozenset()) for node, gpus in first.items()}
    return {node: gpus for node, gpus in both.items() if gpus}


def _overlaps(first: Held, second: Held) -> bool:
    return bool(_common(first, second))


def _lists(gpus: Held) -> dict[str, list[int]]:
    return {node: sorted(gpus[node]) for node in sorted(gpus)}


def _encoded(name: str, last: Target, now: datetime) -> bytes:
    body = {
        "service": name,
        "version": last.version,
        "gpus": _lists(last.gpus),
        "leaving": _lists(last.leaving),
        "at": instants.text(now),
    }
    return json.dumps(body | ({"unsure": True} if last.unsure else {})).encode()


def _words(node: str, gpus: Iterable[int]) -> str:
    return f"{node} GPU {', '.join(map(str, sorted(gpus)))}"


def _progress(last: Target, seen: Observed) -> str:
    if not seen.version:
        return f"target {last.version}, nothing observed"
    return f"target {last.version}, acted on {seen.version}"
