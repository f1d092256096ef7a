"""The plan: which job starts when on which GPUs, what each service holds, and what was left out and why.

A plan is a fact about a problem, not a promise about a solver: ``allocator.check`` says whether it keeps
the rules and what it is worth, whoever made it. It goes to JSON and back without loss.
"""

from __future__ import annotations  # no annotation is evaluated, so typing is never loaded: 8 ms of import

from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


@dataclass(frozen=True, slots=True)
class Placement:
    """A job, its start slot (negative for one already at work), its slots and its GPUs in rising order."""

    job: str
    start: int
    slots: int
    gpus: tuple[int, ...]

    @property
    def end(self) -> int:
        """The first slot after the job."""
        return self.start + self.slots


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """The GPUs that a service holds in each slot, and how many (with quantiles: are expected to) lack."""

    service: str
    gpus: tuple[tuple[int, ...], ...]
    shortage: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A job that the plan leaves out, why, and the earliest start it could get (None: none or not sought)."""

    job: str
    reason: str
    earliest_start: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole plan.

    Attributes:
        mode: what made it: fast, full, fifo, backfill or greedy.
        solve_ms: milliseconds it took, check included.
        objective: worth less shortage and move costs; what solvers maximise.
        bound: a proven upper bound of the objective, or None when none was asked for.
        value: recorded value of the jobs placed, without ageing.
        utilization: (job GPU-slots + served demand) over all GPU-slots of the horizon.
    """

    mode: str
    solve_ms: float
    objective: float
    bound: float | None
    value: float
    utilization: float
    placements: tuple[Placement, ...]
    realtime: tuple[ServicePlan, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def gap_percent(self) -> float | None:
        """How far below the best possible objective the plan may be at most; None without a bound."""
        if self.bound is None:
            return None
        gap = max(0.0, self.bound - self.objective)
        return 100 * gap / max(abs(self.bound), 1e-9) if gap > 1e-6 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON holds it."""
        return {
            "mode": self.mode,
            "solve_ms": round(self.solve_ms, 3),
            "objective": _plain(self.objective),
            "bound": None if self.bound is None else _plain(self.bound),
            "gap_percent": None if self.gap_percent is None else round(self.gap_percent, 4),
            "value": _plain(self.value),
            "utilization": round(self.utilization, 6),
            "placements": [
                {"job": p.job, "start": p.start, "slots": p.slots, "gpus": list(p.gpus)}
                for p in self.placements
            ],
            "realtime": [
                {
                    "service": s.service,
                    "gpus": [list(row) for row in s.gpus],
                    "shortage": [_plain(count) for count in s.shortage],
                }
                for s in self.realtime
            ],
            "unplaced": [
                {"job": u.job, "reason": u.reason, "earliest_start": u.earliest_start} for u in self.unplaced
            ],
            "warnings": list(self.warnings),
        }

    def to_json(self) -> str:
        import json

        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        return cls(
            mode=data["mode"],
            solve_ms=data["solve_ms"],
            objective=data["objective"],
            bound=data.get("bound"),
            value=data["value"],
            utilization=data["utilization"],
            placements=tuple(
                Placement(p["job"], p["start"], p["slots"], tuple(p["gpus"])) for p in data["placements"]
            ),
            realtime=tuple(
                ServicePlan(s["service"], tuple(map(tuple, s["gpus"])), tuple(s["shortage"]))
                for s in data.get("realtime") or ()
            ),
            unplaced=tuple(
                Unplaced(u["job"], u["reason"], u.get("earliest_start")) for u in data.get("unplaced") or ()
            ),
            warnings=tuple(data.get("warnings") or ()),
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        import json

        return cls.from_dict(json.loads(text))


def _plain(number: float) -> float:
    """A figure without the dust of floating point: 1052 and not 1052.0000000002."""
    rounded = round(number, 6)
    return int(rounded) if rounded == int(rounded) else rounded
