"""What if: a problem with jobs added, dropped or changed, and what moves between two plans.

Changes are made to the problem as a file would hold it and read again, so that a change is checked like a
file, and whatever a file can say a change can say. The cost: a problem of a thousand jobs is written and read
once for each what-if.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from allocator.fields import ProblemError
from allocator.plan import Placement, Plan
from allocator.problem import Problem

_SECTIONS = {"realtime": "service", "nodes": "name", "reservations": None, "unavailable": None}


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of a problem and its new value; ``None`` removes the field.

    Attributes:
        path: ``JOB.field``, ``realtime.SERVICE.field``, ``tenants.NAME.field``, ``nodes.NAME.field``,
            ``reservations.NUMBER.field``, ``unavailable.NUMBER.field``, or a field of the problem itself.
    """

    path: str
    value: Any

    def __str__(self) -> str:
        import yaml

        text = yaml.safe_dump(self.value, default_flow_style=True, width=10**9).strip()
        return f"{self.path}={text.removesuffix('...').strip()}"


@dataclass(frozen=True, slots=True)
class Move:
    """Where a job is in two plans; None where it is not placed."""

    job: str
    before: Placement | None
    after: Placement | None


def parse_setting(text: str) -> Setting:
    """A setting from ``t02.priority=9``; the value is YAML."""
    import yaml

    path, equals, value = text.partition("=")
    if not equals or not path:
        raise ProblemError(f"--set {text}: expected PATH=VALUE, such as t02.priority=9")
    try:
        return Setting(path.strip(), yaml.safe_load(value))
    except yaml.YAMLError as error:
        raise ProblemError(f"--set {text}: not YAML: {' '.join(str(error).split())}") from None


def change(
    problem: Problem,
    *,
    settings: Iterable[Setting] = (),
    drop: Iterable[str] = (),
    add: Iterable[Mapping[str, Any]] = (),
) -> Problem:
    """The problem with jobs dropped, jobs added (as in a file) and fields set, in this order.

    Raises:
        ProblemError: for a job that is not there, an unknown field, or a change that makes no sense.
    """
    data = problem.to_dict()
    jobs: list[dict[str, Any]] = data["jobs"]
    for job in drop:
        _find(jobs, "id", job, "--drop")
        data["jobs"] = jobs = [entry for entry in jobs if entry["id"] != job]
    for entry in add:
        if not isinstance(entry, Mapping):
            raise ProblemError(f"--add: {entry!r}; expected a job, or a list of jobs")
        jobs.append(dict(entry))
    for setting in settings:
        _apply(data, setting)
    return Problem.from_dict(data)


def moves(before: Plan, after: Plan) -> tuple[Move, ...]:
    """The jobs whose start, GPUs or length differ, those that come in or go out first."""
    old = {placement.job: placement for placement in before.placements}
    new = {placement.job: placement for placement in after.placements}
    found = [
        Move(job, old.get(job), new.get(job))
        for job in old.keys() | new.keys()
        if old.get(job) != new.get(job)
    ]
    return tuple(
        sorted(
            found, key=lambda move: (move.before is not None, move.after is not None, _start(move), move.job)
        )
    )


def _start(move: Move) -> int:
    placement = move.after or move.before
    assert placement is not None
    return placement.start


def _apply(data: dict[str, Any], setting: Setting) -> None:
    owner, _, field = setting.path.rpartition(".")
    target = _owner(data, owner, setting)
    if setting.value is None:
        target.pop(field, None)
    else:
        target[field] = setting.value


def _owner(data: dict[str, Any], owner: str, setting: Setting) -> dict[str, Any]:
    """The part of the problem that a path means."""
    if not owner:
        return data
    for job in data["jobs"]:
        if job["id"] == owner:
            found: dict[str, Any] = job
            return found
    section, _, name = owner.partition(".")
    if section == "tenants" and name:
        entry: dict[str, Any] = data.setdefault("tenants", {}).setdefault(name, {"gpus": 0})
        return entry
    if section in _SECTIONS and name:
        entries = data.get(section, [])
        key = _SECTIONS[section]
        if key is not None:
            return _find(entries, key, name, f"--set {setting.path}")
        if name.isdigit() and int(name) < len(entries):
            numbered: dict[str, Any] = entries[int(name)]
            return numbered
        raise ProblemError(f"--set {setting.path}: {name}; expected 0 to {len(entries) - 1}")
    return _find(data["jobs"], "id", owner, f"--set {setting.path}")


def _find(entries: list[dict[str, Any]], key: str, name: str, who: str) -> dict[str, Any]:
    for entry in entries:
        if entry[key] == name:
            return entry
    import difflib

    what = {"id": "job", "service": "service", "name": "node"}[key]
    near = difflib.get_close_matches(name, [str(entry[key]) for entry in entries], 1, 0.4)
    hint = f"did you mean {near[0]}?" if near else f"expected one of the {len(entries)} in the problem"
    raise ProblemError(f"{who}: no {what} {name!r}; {hint}")
