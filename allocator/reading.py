"""Planning problems in files: from YAML or plain dictionaries to dataclasses, and back.

An unknown key is an error that names the nearest known one, so a misspelt ``deadlin`` never becomes a job
without a deadline. The cost is that a file cannot carry notes of its own; YAML comments can.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allocator.fields import ProblemError
from allocator.problem import (
    Announced,
    Choice,
    Hole,
    Job,
    Node,
    Problem,
    Reservation,
    Running,
    Service,
    Tenant,
)


def read_problem(path: str | Path) -> Problem:
    """Read a problem from a YAML (or JSON) file; every error begins with the file's name."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=loader)
    except OSError as error:
        raise ProblemError(f"{path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProblemError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    try:
        return problem_from_dict(data)
    except ProblemError as error:
        raise ProblemError(f"{path}: {error}") from None


def problem_from_dict(data: Mapping[str, Any]) -> Problem:
    """Build a problem from what a YAML file holds."""
    _keys("problem", data, _PROBLEM_KEYS, ("slots", "nodes"))
    tenants = data.get("tenants") or {}
    if not isinstance(tenants, Mapping):
        raise ProblemError(
            f"problem: tenants: {tenants!r}; expected a mapping from tenant to {{gpus, borrow_slots}}"
        )
    return Problem(
        slots=data["slots"],
        nodes=tuple([_node(entry) for entry in _list(data, "nodes")]),
        jobs=tuple([_job(entry) for entry in _list(data, "jobs")]),
        services=tuple([_service(entry) for entry in _list(data, "realtime")]),
        unavailable=tuple([_hole(entry) for entry in _list(data, "unavailable")]),
        reservations=tuple([_reservation(entry) for entry in _list(data, "reservations")]),
        tenants=tuple([_tenant(name, entry) for name, entry in tenants.items()]),
        open_end=data.get("open_end", False),
        ageing_per_slot=data.get("ageing_per_slot", 0),
        move_cost=data.get("move_cost", 0),
        slot_minutes=data.get("slot_minutes", 10),
        name=str(data.get("name", "problem")),
    )


def problem_to_dict(problem: Problem) -> dict[str, Any]:
    """The problem as a YAML file would hold it; ``from_dict`` gives an equal problem back."""
    out: dict[str, Any] = {
        "name": problem.name,
        "slot_minutes": problem.slot_minutes,
        "slots": problem.slots,
        "nodes": [_given(name=n.name, gpus=n.gpus, gpu=n.gpu, domain=n.domain) for n in problem.nodes],
        "realtime": [_service_dict(service) for service in problem.services],
        "jobs": [_job_dict(job) for job in problem.jobs],
    }
    out |= {k: v for k in ("open_end", "ageing_per_slot", "move_cost") if (v := getattr(problem, k))}
    if problem.unavailable:
        out["unavailable"] = [
            {"gpus": list(h.gpus), "from": h.start, "to": h.end} for h in problem.unavailable
        ]
    if problem.reservations:
        out["reservations"] = [
            {"gpus": r.gpus, "from": r.start, "to": r.end, "tenant": r.tenant} for r in problem.reservations
        ]
    if problem.tenants:
        out["tenants"] = {t.name: {"gpus": t.gpus, "borrow_slots": t.borrow_slots} for t in problem.tenants}
    return out


_PROBLEM_KEYS = frozenset(
    {"name", "slot_minutes", "slots", "open_end", "nodes", "realtime", "jobs", "unavailable", "reservations"}
    | {"tenants", "ageing_per_slot", "move_cost"}
)
_NODE_KEYS = frozenset(("name", "gpus", "gpu", "domain"))
_SERVICE_KEYS = frozenset(
    {"service", "demand", "demand_quantiles", "ramp", "priority", "shortage_penalty", "current"}
    | {"gpus_per_replica", "ramp_first"}
)
_JOB_KEYS = frozenset(
    {"id", "kind", "gpus", "slots", "choices", "priority", "value", "release", "deadline", "tenant"}
    | {"gpu_types", "running", "waited", "announced"}
)
_CHOICE_KEYS = frozenset(("gpus", "slots"))
_PLACE_KEYS = frozenset(("start", "gpus"))
_HOLE_KEYS = frozenset(("gpus", "from", "to"))
_RESERVATION_KEYS = frozenset(("gpus", "from", "to", "tenant"))
_TENANT_KEYS = frozenset(("gpus", "borrow_slots"))


def _node(entry: Any) -> Node:
    _keys("node", entry, _NODE_KEYS, ("name", "gpus"))
    return Node(entry["name"], entry["gpus"], entry.get("gpu"), entry.get("domain"))


def _service(entry: Any) -> Service:
    _keys("service", entry, _SERVICE_KEYS, ("service", "ramp"))
    return Service(**entry)


def _job(entry: Any) -> Job:
    if not (type(entry) is dict and entry.keys() <= _JOB_KEYS and "id" in entry):
        who = f"job {entry.get('id', '?')}" if isinstance(entry, Mapping) else "job"
        _keys(who, entry, _JOB_KEYS, ("id",))
    get = entry.get
    types, running, announced = get("gpu_types", ()), get("running"), get("announced")
    try:
        if "choices" not in entry and "gpus" in entry and "slots" in entry:
            choices: tuple[Choice, ...] = (Choice(entry["gpus"], entry["slots"]),)
        else:
            choices = _choices(entry)
        if running is not None:
            _keys("running", running, _PLACE_KEYS, ("start", "gpus"))
            running = Running(running["start"], running["gpus"])
        if announced is not None:
            _keys("announced", announced, _PLACE_KEYS, ("start",))
            announced = Announced(announced["start"], announced.get("gpus", ()))
    except ProblemError as error:
        raise ProblemError(f"job {entry['id']}: {str(error).removeprefix('choice: ')}") from None
    return Job(
        entry["id"],
        choices,
        get("kind", "training"),
        get("priority", 1),
        get("value"),
        get("release", 0),
        get("deadline"),
        tuple(types) if type(types) is list else types,
        get("tenant"),
        running,
        get("waited", 0),
        announced,
    )


def _choices(entry: Mapping[str, Any]) -> tuple[Choice, ...]:
    if "choices" not in entry:
        raise ProblemError("expected gpus and slots, or choices")
    if "gpus" in entry or "slots" in entry:
        raise ProblemError("expected either choices or gpus and slots, not both")
    choices = entry["choices"]
    if not isinstance(choices, list | tuple):
        raise ProblemError(f"choices: {choices!r}; expected a list of {{gpus, slots}}")
    return tuple([_choice(choice) for choice in choices])


def _choice(entry: Any) -> Choice:
    _keys("choices", entry, _CHOICE_KEYS, ("gpus", "slots"))
    return Choice(entry["gpus"], entry["slots"])


def _hole(entry: Any) -> Hole:
    _keys("unavailable", entry, _HOLE_KEYS, ("gpus", "from", "to"))
    return Hole(entry["gpus"], entry["from"], entry["to"])


def _reservation(entry: Any) -> Reservation:
    _keys("reservation", entry, _RESERVATION_KEYS, ("gpus", "from", "to", "tenant"))
    return Reservation(entry["gpus"], entry["from"], entry["to"], entry["tenant"])


def _tenant(name: str, entry: Any) -> Tenant:
    _keys(f"tenant {name}", entry, _TENANT_KEYS, ("gpus",))
    return Tenant(name, entry["gpus"], entry.get("borrow_slots", 0))


def _list(data: Mapping[str, Any], key: str) -> Sequence[Any]:
    entries = data.get(key)
    if entries is None:
        return ()
    if not isinstance(entries, list | tuple):
        raise ProblemError(f"problem: {key}: {entries!r}; expected a list")
    return entries


def _given(**fields: Any) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _service_dict(service: Service) -> dict[str, Any]:
    rows = service.demand_quantiles
    current = service.current
    return _given(
        service=service.service,
        demand=None if service.demand is None else list(service.demand),
        demand_quantiles=None if rows is None else [list(row) for row in rows],
        ramp=service.ramp,
        priority=service.priority,
        shortage_penalty=service.shortage_penalty,
        current=list(current) if isinstance(current, tuple) else current,
        gpus_per_replica=service.gpus_per_replica,
        ramp_first=service.ramp_first,
    )


def _job_dict(job: Job) -> dict[str, Any]:
    choices = [
        {"gpus": c.gpus, "slots": c.slots if isinstance(c.slots, int) else dict(c.slots)} for c in job.choices
    ]
    out: dict[str, Any] = {"id": job.id, "kind": job.kind}
    out |= choices[0] if len(choices) == 1 else {"choices": choices}
    out |= _given(priority=job.priority, value=job.value, release=job.release or None, deadline=job.deadline)
    out |= _given(gpu_types=list(job.gpu_types) or None, tenant=job.tenant, waited=job.waited or None)
    for key, place in (("running", job.running), ("announced", job.announced)):
        if place is not None:
            out[key] = {"start": place.start, "gpus": list(place.gpus)}
    return out


def _keys(who: str, entry: Any, known: frozenset[str], needed: tuple[str, ...]) -> None:
    if not isinstance(entry, Mapping):
        raise ProblemError(f"{who}: {entry!r}; expected a mapping with {', '.join(needed)}")
    if not entry.keys() <= known:
        import difflib

        key = next(key for key in entry if key not in known)
        near = difflib.get_close_matches(str(key), sorted(known), 1, 0.4)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(sorted(known))}"
        raise ProblemError(f"{who}: {key}: unknown key; {hint}")
    for key in needed:
        if key not in entry:
            raise ProblemError(f"{who}: {key}: missing; expected {', '.join(needed)}")
