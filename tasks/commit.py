"""Commit: fix what starts before the next plan, at once or not at all.

Invariant: the commitment is one fact, created only if no one has committed this instant. The plan itself, the
rest of the horizon included, is recorded beside it as advice. It lies in storage before the commitment, which
names it: whoever finds a commitment whose planner died can record its plan.
"""

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import fmean
from typing import Any

from allocator import Placement, Plan, Problem
from tasks import faults, ledger
from tasks.allocate import Planned
from tasks.cluster import Node, Site
from tasks.collect import ledger_directory
from tasks.facts import fact_key, read_json, write_fact, write_json
from tasks.instants import text
from tasks.storage import Storage

MENDED = timedelta(days=3)  # commitments that are looked at for a missing plan


@dataclass(frozen=True)
class Committed:
    """Key of the commitment, whether it is ours, and the jobs whose start it fixes."""

    key: str
    ours: bool
    jobs: tuple[str, ...]


def commit(site: Site, planned: Planned, now: datetime) -> Committed:
    """Record the plan and commit its first slots. When another planner was first, its commitment stands."""
    hour, storage = planned.hour, site.storage
    faults.point("allocate.solved")
    fact = plan_fact(planned)
    solved = {"fact": fact, "problem": planned.problem.to_dict(), "plan": planned.plan.to_dict()}
    solved_key = _solved_key(hour.instant, solved)
    write_json(storage, solved_key, solved)
    faults.point("commit.solved")
    body = {
        **commitment(planned),
        "lease_seconds": site.cluster.lease_seconds,
        "start_timeout_minutes": site.cluster.start_timeout_minutes,
        "plan": solved_key,
    }
    ours = write_fact(storage, hour.commit_key, now, body) or _same(storage, hour.commit_key, body)
    faults.point("commit.committed")
    if ours:
        write_fact(storage, fact_key("plan", hour.instant, text(hour.instant)), now, fact)
    else:
        storage.delete(solved_key)
    faults.point("commit.planned")
    jobs = tuple(place["job"] for place in body["placements"]) if ours else ()
    return Committed(hour.commit_key, ours, jobs)


def commitment(planned: Planned) -> dict[str, Any]:
    """What a plan fixes: the starts and the services' changes before the next plan."""
    return {
        "instant": text(planned.hour.instant),
        "until": text(planned.hour.until),
        "placements": [
            _placement(planned, place) for place in planned.plan.placements if _binds(planned, place)
        ],
        "targets": _targets(planned),
    }


def _same(storage: Storage, key: str, body: dict[str, Any]) -> bool:
    """Whether what was committed is this: then an earlier try got so far, and its plan may be missing."""
    found = read_json(storage, key)
    return all(found.get(name) == value for name, value in body.items())


def mend_plans(site: Site, now: datetime) -> list[str]:
    """Record the plans of commitments whose planner died before it could; the keys of those facts."""
    with ledger.open_ledger(ledger_directory(site)) as connection:
        committed = ledger.rows(
            connection,
            "WITH c AS (SELECT key, replace(key, '/commit/', '/plan/') AS plan FROM facts "
            "WHERE kind = 'commit' AND day >= ?) "
            "FROM c WHERE plan NOT IN (SELECT key FROM facts WHERE kind = 'plan') ORDER BY key",
            [now.date() - MENDED],
        )
    mended = []
    for row in committed:
        solved = read_json(site.storage, row["key"]).get("plan")
        if solved is not None:  # commitments of the first version did not say
            write_fact(site.storage, row["plan"], now, read_json(site.storage, str(solved))["fact"])
            mended.append(row["plan"])
    return mended


def read_plan(storage: Storage, instant: datetime) -> tuple[Problem, Plan]:
    """The problem of an instant and its plan, as they were solved.

    Raises NotFoundError when there was none.
    """
    keys = storage.keys(_solved_prefix(instant))
    if len(keys) != 1:  # of several, which a planner that died may leave, the commitment names the one
        keys = [str(read_json(storage, fact_key("commit", instant, text(instant)))["plan"])]
    solved = read_json(storage, keys[0])
    return Problem.from_dict(solved["problem"]), Plan.from_dict(solved["plan"])


def plan_fact(planned: Planned) -> dict[str, Any]:
    """What is recorded of a plan: its figures, the baselines', and its word on every job."""
    plan, problem = planned.plan, planned.problem
    return {
        "instant": text(planned.hour.instant),
        "trigger": planned.hour.trigger,
        "mode": plan.mode,
        "slot_minutes": problem.slot_minutes,
        "slots": problem.slots,
        "objective": plan.objective,
        "bound": plan.bound,
        "value": plan.value,
        "utilization": plan.utilization,
        "shortage": sum(sum(service.shortage) for service in plan.realtime),
        "solve_ms": plan.solve_ms,
        "considered": planned.considered,
        "placed": [
            {"job": p.job, "start": _at(planned, p.start), "end": _at(planned, p.end), "gpus": list(p.gpus)}
            for p in plan.placements
        ],
        "unplaced": [
            {
                "job": u.job,
                "reason": u.reason,
                "earliest_start": None if u.earliest_start is None else _at(planned, u.earliest_start),
            }
            for u in plan.unplaced
        ],
        "realtime": [
            {"service": s.service, "gpus": [list(row) for row in s.gpus], "shortage": list(s.shortage)}
            for s in plan.realtime
        ],
        "baselines": {
            name: {"value": b.value, "utilization": b.utilization, "objective": b.objective}
            for name, b in planned.baselines.items()
        },
        "slot": {
            name: slot_figures(problem, made, committed_slots(planned))
            for name, made in {"planned": plan, **planned.baselines}.items()
        },
        "warnings": list(plan.warnings),
    }


def _solved_key(instant: datetime, solved: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(solved, sort_keys=True).encode(errors="replace")).hexdigest()
    return f"{_solved_prefix(instant)}{digest[:12]}.json"


def _solved_prefix(instant: datetime) -> str:
    return f"plans/{instant.date().isoformat()}/{text(instant)}."


def committed_slots(planned: Planned) -> int:
    """How many slots of the problem begin before the next plan."""
    return min(-((planned.hour.begin - planned.hour.until) // planned.slot), planned.problem.slots)


def slot_figures(problem: Problem, plan: Plan, slots: int) -> dict[str, float]:
    """What a plan has in its first slots: `value`, each job's in proportion to its time there; `utilization`.

    The one is worth done, not yet earned; the other (job GPU-slots + expected demand served) / all GPU-slots.
    """
    jobs = problem.job_by_id
    value = used = 0.0
    for place in plan.placements:
        inside = max(min(place.end, slots) - max(place.start, 0), 0)
        value += jobs[place.job].full_value * inside / place.slots
        used += len(place.gpus) * inside
    shortage = {row.service: row.shortage for row in plan.realtime}
    for service in problem.services:
        missing = shortage[service.service]
        used += sum(fmean(service.wanted(slot)) - missing[slot] for slot in range(slots))
    return {"value": value, "utilization": used / (problem.total_gpus * slots)}


def _binds(planned: Planned, place: Placement) -> bool:
    begins = planned.hour.begin + place.start * planned.slot
    return place.job in planned.queued and begins < planned.hour.until


def _placement(planned: Planned, place: Placement) -> dict[str, Any]:
    """A committed start: everything that the nodes which run it need to know."""
    row = planned.queued[place.job]
    nodes: dict[str, tuple[Node, list[int]]] = {}
    for number in place.gpus:
        node, index = planned.gpus[number]
        nodes.setdefault(node.name, (node, []))[1].append(index)
    return {
        "job": place.job,
        "attempt": row["attempts"] + 1,
        "spec": row["spec_key"],
        "start": _at(planned, place.start),
        "end": _at(planned, place.end),
        "nodes": [
            {
                "node": node.name,
                "gpus": gpus,
                "gpu": node.gpu,
                "node_gpus": node.gpus,
                "address": node.address,
                "price_per_gpu_hour": node.price_per_gpu_hour,
            }
            for node, gpus in nodes.values()
        ],
    }


def _targets(planned: Planned) -> dict[str, list[dict[str, Any]]]:
    """Per service, the GPUs by node from each slot on in which they change, until the next plan."""
    targets: dict[str, list[dict[str, Any]]] = {}
    for service in planned.plan.realtime:
        changes: list[dict[str, Any]] = []
        before = None
        for slot, numbers in enumerate(service.gpus):
            if slot and planned.hour.begin + slot * planned.slot >= planned.hour.until:
                break
            if numbers != before:
                gpus: dict[str, list[int]] = {}
                for number in numbers:
                    node, index = planned.gpus[number]
                    gpus.setdefault(node.name, []).append(index)
                changes.append({"from": _at(planned, slot), "gpus": gpus})
            before = numbers
        targets[service.service] = changes
    return targets


def _at(planned: Planned, slot: int) -> str:
    return text(planned.hour.begin + slot * planned.slot)
