"""What each kind of fact becomes in the ledger: rows of its tables, as plain functions of the fact's payload.

Invariant: a row depends on its fact alone, so the order in which facts are taken in does not matter. A
payload that lacks something or holds the wrong type raises, and the fact is set aside as bad.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tasks.instants import parse

Rows = dict[str, list[dict[str, Any]]]
Payload = dict[str, Any]
FIGURES = ("value", "utilization", "slot_value", "slot_utilization")  # of the whole plan, and until the next
POLICIES = {"planned": "", "fifo": "fifo_", "backfill": "backfill_", "greedy": "greedy_"}  # in a plan's row


@dataclass(frozen=True)
class Projected:
    """When the fact was written, and its rows by table."""

    recorded_at: datetime
    tables: Rows


def _spec(key: str, fact: Payload) -> Rows:
    spec, work, predicted = fact["spec"], fact.get("work") or {}, fact.get("predicted") or {}
    row = {
        "job": str(fact["job"]),
        "template": _text(fact.get("template")),
        "schedule": _text(fact.get("schedule")),
        "kind": str(spec["kind"]),
        "gpus": int(spec["gpus"]),
        "priority": _number(spec["priority"]),
        "value": _number(fact["value"]),
        "duration_s": _number(fact["duration_s"]),
        "max_duration_s": _maybe(fact.get("max_duration_s")),
        "release_at": parse(fact["release"]),
        "deadline_at": _instant(fact.get("deadline")),
        "gpu_types": list(map(str, spec["gpu_types"])) if spec.get("gpu_types") else None,
        "tenant": _text(spec.get("tenant")),
        "max_attempts": int(spec["max_attempts"]),
        "submitted_at": parse(fact["at"]),
        "source": str(fact["source"]),
        "sha256": str(fact["sha256"]),
        "spec": json.dumps(spec),
        "key": key,
        "work": _maybe(work.get("amount")),
        "precision": _text(work.get("precision")),
        "widths": list(map(int, spec["widths"])) if spec.get("widths") else None,
        "predicted": json.dumps([_run(run) for run in predicted["runs"]]) if predicted else None,
        "unpredicted": list(map(str, predicted["problems"])) if predicted else None,
    }
    return {"specs": [row]}


def _run(run: Payload) -> Payload:
    """One prediction, checked."""
    figures = {name: _number(run[name]) for name in ("seconds", "low", "high", "mfu")}
    return {"gpu": str(run["gpu"]), "gpus": int(run["gpus"]), **figures, "reason": str(run["reason"])}


def _rejected(_: str, fact: Payload) -> Rows:
    return {"rejections": [{"source": str(fact["source"]), "error": str(fact["error"]), **_at(fact)}]}


def _cancel(_: str, fact: Payload) -> Rows:
    return {"cancels": [{"job": str(fact["job"]), **_at(fact)}]}


def _demand(_: str, fact: Payload) -> Rows:
    shared = {"service": str(fact["service"]), "origin": str(fact["origin"]), **_at(fact)}
    return {
        "demand_samples": [
            {**shared, "ts": parse(ts), "value": _number(value), "gpus": _number(gpus)}
            for ts, value, gpus in fact["samples"]
        ]
    }


def _node(_: str, fact: Payload) -> Rows:
    row = {"node": str(fact["node"]), "state": str(fact["state"]), **_reason(fact), **_at(fact)}
    return {"node_states": [row]}


def _forecast(_: str, fact: Payload) -> Rows:
    instant = parse(fact["instant"])
    return {
        "forecasts": [
            {
                "instant": instant,
                "service": str(service),
                "step": step,
                "ts": parse(ts),
                "quantiles": [_number(value) for value in quantiles],
                "method": str(made["method"]),
                "reason": str(made["reason"]),
                "forecaster": _text(made.get("forecaster")),
                "coverage": _maybe(made.get("coverage")),
            }
            for service, made in fact["services"].items()
            for step, (ts, quantiles) in enumerate(made["slots"])
        ],
        "tournament": [
            {
                "instant": instant,
                "service": str(service),
                "forecaster": str(forecaster),
                "ts": parse(ts),
                "until": parse(until),
                "quantiles": [_number(value) for value in quantiles],
            }
            for service, made in fact["services"].items()
            for forecaster, slots in made.get("rivals", {}).items()
            for ts, until, quantiles in slots
        ],
    }


def _plan(_: str, fact: Payload) -> Rows:
    instant = parse(fact["instant"])
    row = {
        "instant": instant,
        "trigger": str(fact["trigger"]),
        "mode": str(fact["mode"]),
        "slot_minutes": int(fact["slot_minutes"]),
        "slots": int(fact["slots"]),
        "bound": _maybe(fact.get("bound")),
        "placed": len(fact["placed"]),
        "unplaced": len(fact["unplaced"]),
        "considered": int(fact["considered"]),
        "warnings": list(map(str, fact["warnings"])),
        **{
            name: _number(fact[name])
            for name in ("objective", "value", "utilization", "shortage", "solve_ms")
        },
        **{
            f"{baseline}_{figure}": _maybe(fact["baselines"].get(baseline, {}).get(figure))
            for baseline in ("fifo", "backfill", "greedy")
            for figure in ("value", "utilization", "objective")
        },
        **{
            f"{prefix}slot_{figure}": _maybe(fact.get("slot", {}).get(policy, {}).get(figure))
            for policy, prefix in POLICIES.items()
            for figure in ("value", "utilization")
        },
    }
    placed = [
        {
            "instant": instant,
            "job": str(job["job"]),
            "start_at": parse(job["start"]),
            "end_at": parse(job["end"]),
            "gpus": list(map(int, job["gpus"])),
        }
        for job in fact["placed"]
    ]
    unplaced = [
        {
            "instant": instant,
            "job": str(job["job"]),
            "reason": str(job["reason"]),
            "earliest_start_at": _instant(job.get("earliest_start")),
        }
        for job in fact["unplaced"]
    ]
    return {"plans": [row], "planned_jobs": placed + unplaced}


def _commit(key: str, fact: Payload) -> Rows:
    instant = parse(fact["instant"])
    allocations = [
        {
            "instant": instant,
            "job": str(place["job"]),
            "attempt": int(place["attempt"]),
            "rank": rank,
            "ranks": len(place["nodes"]),
            "node": str(node["node"]),
            "gpus": list(map(int, node["gpus"])),
            "start_at": parse(place["start"]),
            "end_at": parse(place["end"]),
            "key": key,
        }
        for place in fact["placements"]
        for rank, node in enumerate(place["nodes"])
    ]
    serving = [
        {
            "instant": instant,
            "service": str(service),
            "from_at": parse(target["from"]),
            "node": str(node),
            "gpus": list(map(int, gpus)),
        }
        for service, targets in fact["targets"].items()
        for target in targets
        for node, gpus in (target["gpus"] or {"": []}).items()  # a service without GPUs has a row too
    ]
    return {"allocations": allocations, "serving": serving}


def _dispatch(_: str, fact: Payload) -> Rows:
    return {"dispatches": [{**_rank(fact), "flow_run": str(fact["flow_run"]), **_at(fact)}]}


def _started(key: str, fact: Payload) -> Rows:
    _check_name(key, fact)
    row = {"void": bool(fact["void"]), "pid": _whole(fact.get("pid")), **_reason(fact), **_at(fact)}
    return {"starts": [{**_rank(fact), **row}]}


def _outcome(key: str, fact: Payload) -> Rows:
    _check_name(key.replace("-again.json", ".json"), fact)
    metrics = dict(fact.get("metrics") or {})
    row = {
        **_rank(fact),
        "state": str(fact["state"]),
        "started_at": _instant(fact.get("started_at")),
        "ended_at": parse(fact["ended_at"]),
        "gpu_seconds": _number(fact["gpu_seconds"]),
        "cost": _number(fact["cost"]),
        "exit_code": _whole(fact.get("exit_code")),
        "error": _text(fact.get("error")),
        **{name: _measured(metrics.get(name)) for name in ("mfu", "tokens_per_s", "rows_per_s", "loss")},
        "metrics": json.dumps(metrics),
    }
    return {"outcomes": [row]}


def _slot(_: str, fact: Payload) -> Rows:
    row = {
        "instant": parse(fact["instant"]),
        "until": parse(fact["until"]),
        **{name: int(fact[name]) for name in ("gpus", "completed", "failed")},
        **{
            name: _number(fact[name])
            for name in (
                "busy_gpu_s",
                "serving_gpu_s",
                "utilization",
                "demand_gpu_s",
                "shortage_gpu_s",
                "value",
            )
        },
        **{
            name: _maybe(fact.get(name))
            for name in (
                "worked_value",
                *(f"{policy}_{figure}" for policy in POLICIES for figure in FIGURES),
            )
        },
        **_at(fact),
    }
    return {"slots": [row]}


def _missed(_: str, fact: Payload) -> Rows:
    return {"missed_slots": [{"instant": parse(fact["instant"]), "reason": str(fact["reason"]), **_at(fact)}]}


def _degraded(_: str, fact: Payload) -> Rows:
    row = {name: str(fact[name]) for name in ("step", "subject", "reason")}
    return {"degradations": [{"instant": parse(fact["instant"]), **row, **_at(fact)}]}


def _check_name(key: str, fact: Payload) -> None:
    """A fact of a rank speaks of the rank that its key names, and of no other."""
    name = f"/{fact['job']}/{fact['attempt']}/{fact['rank']}.json"
    if not key.endswith(name):
        raise ValueError(f"speaks of {name[1:-5]}")


def _at(fact: Payload) -> Payload:
    return {"recorded_at": parse(fact["at"])}


def _rank(fact: Payload) -> Payload:
    return {
        "job": str(fact["job"]),
        "attempt": int(fact["attempt"]),
        "rank": int(fact["rank"]),
        "node": str(fact["node"]),
    }


def _reason(fact: Payload) -> Payload:
    return {"reason": _text(fact.get("reason"))}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, found {value!r}")
    return number


def _maybe(value: Any) -> float | None:
    return None if value is None else _number(value)


def _measured(value: Any) -> float | None:
    """A figure that a program reported: anything but a finite number is left out, the row is kept."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def _instant(value: str | None) -> datetime | None:
    return None if value is None else parse(value)


_BY_KIND: dict[str, Callable[[str, Payload], Rows]] = {
    "spec": _spec,
    "rejected": _rejected,
    "cancel": _cancel,
    "demand": _demand,
    "node": _node,
    "forecast": _forecast,
    "plan": _plan,
    "commit": _commit,
    "dispatch": _dispatch,
    "started": _started,
    "outcome": _outcome,
    "slot": _slot,
    "missed": _missed,
    "degraded": _degraded,
}


def project(kind: str, key: str, fact: Payload) -> Projected:
    """The rows of a fact.

    Raises KeyError, TypeError or ValueError when the payload is not as its kind says.
    """
    return Projected(parse(fact["at"]), _BY_KIND[kind](key, fact))
