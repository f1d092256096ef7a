"""What may never happen, checked from outside: from the facts, and from what the runs themselves noted down.

It shares no code with the product: keys are taken apart and bodies read here, so that a mistake in how the
product reads its own facts does not hide. A witness file is a sequence of JSON lines, in the order in which
things really happened (each appended in one write by the process that it happened to):

    {"what": "begin", "job": …, "attempt": …, "rank": …, "node": …, "gpus": […], "pid": …}   first instruction
    {"what": "end", …the same…, "ok": true}                                                  last one
    {"what": "dead", "job": …, "attempt": …, "rank": …}      seen to be gone without having ended
    {"what": "shared", "job": …, "node": …, "gpu": …}        its lock in the operating system was another's
    {"what": "hold", "service": …, "gpus": [[node, gpu], …]} all that a service holds from now on
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.storage import Storage

Rank = tuple[str, int, int]
Gpu = tuple[str, int]
# What a rank that has begun may be said to have ended as; a cancelled or stopped one is looked at further.
BEGUN_ENDS = {"completed", "failed", "crashed", "lost", "timed_out", "cancelled", "stopped"}


@dataclass
class Asked:
    """What people and services left: specs by file name, (service, instant) -> load; what the jobs are."""

    specs: dict[str, bytes] = field(default_factory=dict)
    jobs: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    demand: dict[tuple[str, str], float] = field(default_factory=dict)


class Facts:
    """All facts of a storage by kind, and within it by the rest of their key."""

    def __init__(self, storage: Storage) -> None:
        self.by_kind: dict[str, dict[str, dict[str, Any]]] = {}
        self.other = [key for key in storage.keys("") if not key.startswith("facts/")]
        for key in storage.keys("facts/"):
            _, _, kind, name = key.split("/", 3)
            try:
                body = json.loads(storage.read(key))
            except ValueError:
                continue  # hostile files are other tests' business
            if isinstance(body, dict):
                self.by_kind.setdefault(kind, {})[f"{key.split('/')[1]}/{name}"] = body

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Bodies of all facts of a kind."""
        return list(self.by_kind.get(kind, {}).values())

    def ranks(self, kind: str) -> dict[Rank, dict[str, Any]]:
        """Facts of a kind that speak of one rank, by it."""
        return {(body["job"], body["attempt"], body["rank"]): body for body in self.of(kind)}

    def committed(self) -> dict[Rank, tuple[str, tuple[int, ...]]]:
        """Node and GPUs of every committed rank."""
        return {
            (place["job"], place["attempt"], rank): (node["node"], tuple(node["gpus"]))
            for body in self.of("commit")
            for place in body["placements"]
            for rank, node in enumerate(place["nodes"])
        }


def violations(storage: Storage, witness: Path, asked: Asked, settled: bool = True) -> list[str]:
    """What has happened that never may; nothing when all is well.

    `settled`: an hour has run to its end since the last crash, so what it repairs must be whole.
    """
    facts = Facts(storage)
    events = read_witness(witness)
    found = [
        *_shared_gpus(events),
        *_runs(facts, events, asked),
        *_attempts(facts),
        *_specs(facts, storage, asked, settled),
        *_outcomes(facts, events, settled),
    ]
    if settled:
        found += [*_plans(facts), *_demand(facts, asked)]
    return found


def unfinished(storage: Storage, asked: Asked) -> list[str]:
    """Jobs that were asked for and did not complete."""
    facts = Facts(storage)
    outcomes, committed = facts.ranks("outcome"), facts.committed()
    done = {
        job
        for job, attempt in {rank[:2] for rank in committed}
        if all(
            outcomes.get(rank, {}).get("state") == "completed"
            for rank in committed
            if rank[:2] == (job, attempt)
        )
    }
    return sorted(asked.jobs - done - asked.cancelled)


def read_witness(witness: Path) -> list[dict[str, Any]]:
    """The events in their order; a last line that a dying process cut short is passed over."""
    lines = witness.read_text().splitlines() if witness.exists() else []
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events


def _shared_gpus(events: list[dict[str, Any]]) -> Iterator[str]:
    """A GPU is held by one job or service at a time."""
    holders: dict[Gpu, str] = {}
    for event in events:
        if event["what"] == "shared":
            yield f"{event['job']} began on {event['node']} GPU {event['gpu']}, which was locked"
        elif event["what"] == "hold":
            name = f"service {event['service']}"
            gpus = {(node, gpu) for node, gpu in event["gpus"]}
            for gpu in gpus:
                if holders.get(gpu, name) != name:
                    yield f"{name} took {gpu}, which {holders[gpu]} holds"
            holders = {gpu: holder for gpu, holder in holders.items() if holder != name}
            holders |= {gpu: name for gpu in gpus if gpu not in holders}
        elif event["what"] == "begin":
            name = _name(event)
            for number in event["gpus"]:
                gpu = (event["node"], number)
                if gpu in holders:
                    yield f"{name} began on {gpu}, which {holders[gpu]} holds"
                holders[gpu] = name
        else:
            holders = {gpu: holder for gpu, holder in holders.items() if holder != _name(event)}


def _runs(facts: Facts, events: list[dict[str, Any]], asked: Asked) -> Iterator[str]:
    """Each attempt begins once, as committed; a job never is in two attempts at a time."""
    committed, starts, outcomes = facts.committed(), facts.ranks("started"), facts.ranks("outcome")
    begun: set[Rank] = set()
    living: dict[str, int] = {}
    whole: dict[tuple[str, int], set[int]] = {}
    for event in events:
        if event["what"] not in ("begin", "end", "dead"):
            continue
        job, attempt, rank = key = _rank(event)
        if event["what"] == "end" and event.get("ok"):
            whole.setdefault((job, attempt), set()).add(rank)
        if event["what"] != "begin":
            alone = not any(other[:2] == (job, attempt) and other != key for other in begun)
            if alone and living.get(job) == attempt:
                del living[job]
            continue
        if key in begun:
            yield f"{_name(event)} began twice"
        begun.add(key)
        if living.setdefault(job, attempt) != attempt and _alive(events, event, living[job]):
            yield f"{_name(event)} began while attempt {living[job]} was still at work"
        living[job] = attempt
        if committed.get(key) != (event["node"], tuple(event["gpus"])):
            yield f"{_name(event)} ran on {event['node']} {event['gpus']}; committed: {committed.get(key)}"
        claim = starts.get(key)
        if claim is None or claim["void"]:
            yield f"{_name(event)} began; its claim: {claim}"
    for key in begun:
        state = outcomes.get(key, {}).get("state")
        if state is not None and state not in BEGUN_ENDS:
            yield f"{key} began and is recorded as {state}"
        if state == "cancelled" and key[0] not in asked.cancelled:
            yield f"{key} was ended as cancelled; nobody asked for it"


def _alive(events: list[dict[str, Any]], begin: dict[str, Any], attempt: int) -> bool:
    """Whether a rank of the job's earlier attempt had neither ended nor died when this one began."""
    before = events[: events.index(begin)]
    count = 0
    for event in before:
        if event.get("job") == begin["job"] and event.get("attempt") == attempt:
            count += 1 if event["what"] == "begin" else -1 if event["what"] in ("end", "dead") else 0
    return count > 0


def _attempts(facts: Facts) -> Iterator[str]:
    """Attempts are committed once each and in order, each when the one before is over and failed."""
    seen: set[tuple[str, int]] = set()
    for body in facts.of("commit"):
        held: set[Gpu] = set()
        for place in body["placements"]:
            name = (place["job"], place["attempt"])
            if name in seen:
                yield f"{name} is committed twice"
            seen.add(name)
            gpus = {(node["node"], gpu) for node in place["nodes"] for gpu in node["gpus"]}
            if place["start"] == body["instant"] and held & gpus:
                yield f"{body['instant']} commits {held & gpus} twice from its start on"
            held |= gpus if place["start"] == body["instant"] else set()
    outcomes, committed = facts.ranks("outcome"), facts.committed()
    for job, attempt in seen:
        if attempt == 1:
            continue
        before = [rank for rank in committed if rank[:2] == (job, attempt - 1)]
        states = [outcomes[rank]["state"] if rank in outcomes else None for rank in before]
        if not before or None in states:
            yield f"{job}: attempt {attempt} is committed, attempt {attempt - 1} is not over: {states}"
        elif set(states) == {"completed"}:
            yield f"{job}: attempt {attempt} is committed after one that completed"


def _specs(facts: Facts, storage: Storage, asked: Asked, settled: bool) -> Iterator[str]:
    """Every spec lies in the inbox, or is a job once, or is rejected beside its text."""
    inbox = {key.removeprefix("inbox/") for key in facts.other if key.startswith("inbox/")}
    taken = [body["source"] for body in facts.of("spec") if body.get("template") is None]
    rejected = [body["source"] for body in facts.of("rejected")]
    kept = [storage.read(key) for key in facts.other if key.startswith("rejected/")]
    for name, content in asked.specs.items():
        places = (name in inbox) + (name in taken) + (name in rejected)
        if places == 0:
            yield f"spec {name} is lost"
        if settled and places > 1:
            yield f"spec {name} is in {places} places"
        if taken.count(name) > 1:
            yield f"spec {name} became {taken.count(name)} jobs"
        if name in rejected and content not in kept:
            yield f"spec {name} was rejected and its text is not kept"


def _outcomes(facts: Facts, events: list[dict[str, Any]], settled: bool) -> Iterator[str]:
    """What ended has one outcome; one that completed is recorded so, unless it was given up before."""
    outcomes = facts.ranks("outcome")
    if len(outcomes) != len(facts.of("outcome")):
        yield "a rank has two outcomes"
    for event in events:
        if event["what"] != "end":
            continue
        state = outcomes.get(_rank(event), {}).get("state")
        if state is None and settled:
            yield f"{_name(event)} ended and has no outcome"
        if state not in (None, "crashed", "lost") and (state == "completed") != bool(event["ok"]):
            yield f"{_name(event)} ended with ok={event['ok']} and is recorded as {state}"


def _plans(facts: Facts) -> Iterator[str]:
    """A commitment has its plan beside it."""
    for name in facts.by_kind.get("commit", {}).keys() - facts.by_kind.get("plan", {}).keys():
        yield f"the commitment {name} has no plan"


def _demand(facts: Facts, asked: Asked) -> Iterator[str]:
    """Every sample was recorded, and the latest record says what was last seen."""
    latest: dict[tuple[str, str], tuple[str, float]] = {}
    for body in facts.of("demand"):
        for ts, value, _ in body["samples"]:
            key = (body["service"], ts)
            latest[key] = max(latest.get(key, ("", 0.0)), (body["at"], value))
    for key, value in asked.demand.items():
        if key not in latest:
            yield f"the sample {key} is lost"
        elif latest[key][1] != value:
            yield f"the sample {key} is recorded as {latest[key][1]}, last seen as {value}"


def _rank(event: dict[str, Any]) -> Rank:
    return event["job"], event["attempt"], event["rank"]


def _name(event: dict[str, Any]) -> str:
    return f"{event['job']} attempt {event['attempt']} rank {event['rank']}"


def note(witness: Path, **event: Any) -> None:
    """Append one event in one write."""
    with witness.open("a") as out:
        out.write(json.dumps(event) + "\n")


def told(found: Iterable[str]) -> str:
    """Violations, one a line."""
    return "\n".join(found)
