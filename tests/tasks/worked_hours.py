"""Facts as the steps write them, for tests of what is made of facts."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tasks.facts import FactKind, fact_key, write_fact
from tasks.instants import text
from tasks.storage import Storage

HOUR = datetime(2026, 12, 1, 6, tzinfo=UTC)


def minutes(count: float) -> datetime:
    """An instant so many minutes into the hour."""
    return HOUR + timedelta(minutes=count)


@dataclass(frozen=True)
class Facts:
    """Writes facts; each method returns its key."""

    storage: Storage

    def write(self, kind: FactKind, name: str, at: datetime, body: dict[str, Any]) -> str:
        """Any fact of the hour's day."""
        key = fact_key(kind, HOUR, name)
        assert write_fact(self.storage, key, at, body), f"{key} was there before"
        return key

    def spec(self, job: str = "a", **fields: Any) -> str:
        """A job taken in; `fields` replace those of the fact, or of the spec in it."""
        spec = {"kind": "training", "gpus": 2, "priority": 5.0, "max_attempts": 3, "tenant": None}
        spec |= {name: fields.pop(name) for name in list(fields) if name in spec}
        body = {
            "job": job,
            "template": None,
            "schedule": None,
            "spec": spec,
            "value": 10.0,
            "duration_s": 3600.0,
            "max_duration_s": None,
            "release": text(HOUR),
            "deadline": None,
            "source": f"{job}.yaml",
            "sha256": "0" * 64,
        }
        return self.write("spec", job, HOUR, body | fields)

    def commit(self, job: str = "a", attempt: int = 1, nodes: int = 1, at: float = 0, **fields: Any) -> str:
        """A commitment of one attempt, two GPUs on each node, from the minute `at` on."""
        place = {
            "job": job,
            "attempt": attempt,
            "spec": fact_key("spec", HOUR, job),
            "start": text(minutes(at)),
            "end": text(minutes(at + 60)),
            "nodes": [{"node": f"node{rank}", "gpus": [0, 1]} for rank in range(nodes)],
        }
        body = {"instant": text(minutes(at)), "until": text(minutes(60)), "placements": [place]}
        body |= {"targets": {}} | fields
        return self.write("commit", text(minutes(at)), minutes(at), body)

    def started(self, job: str = "a", attempt: int = 1, rank: int = 0, void: bool = False) -> str:
        """A claim to begin, or its voiding."""
        body = self._rank(job, attempt, rank) | {"void": void, "reason": "late" if void else None, "pid": 7}
        return self.write("started", f"{job}/{attempt}/{rank}", minutes(1), body)

    def outcome(
        self,
        state: str,
        job: str = "a",
        attempt: int = 1,
        rank: int = 0,
        exit_code: int | None = None,
        **fields: Any,
    ) -> str:
        """The end of a rank, half an hour into the hour."""
        body = self._rank(job, attempt, rank) | {
            "state": state,
            "started_at": text(minutes(1)),
            "ended_at": text(minutes(31)),
            "gpu_seconds": 3600.0,
            "cost": 2.0,
            "exit_code": exit_code,
            "error": None if state == "completed" else "it broke",
            "metrics": {"mfu": 0.4, "tokens_per_s": 1000, "steps": 10},
        }
        return self.write("outcome", f"{job}/{attempt}/{rank}", minutes(31), body | fields)

    def attempt(
        self, state: str, job: str = "a", attempt: int = 1, exit_code: int | None = None
    ) -> list[str]:
        """A whole attempt on one node."""
        return [
            self.commit(job, attempt, at=attempt),
            self.started(job, attempt),
            self.outcome(state, job, attempt, exit_code=exit_code),
        ]

    def cancel(self, job: str = "a") -> str:
        """A request to end a job."""
        return self.write("cancel", job, minutes(20), {"job": job})

    def plan(self, instant: datetime = HOUR, **fields: Any) -> str:
        """A plan with a job that is placed and one that is not."""
        body = {
            "instant": text(instant),
            "trigger": "hourly",
            "mode": "fast",
            "slot_minutes": 10,
            "slots": 144,
            "bound": None,
            "considered": 3,
            "warnings": [],
            "placed": [{"job": "a", "start": text(instant), "end": text(minutes(60)), "gpus": [0, 1]}],
            "unplaced": [{"job": "b", "reason": "no GPU is free", "earliest_start": text(minutes(60))}],
            "baselines": {"fifo": {"value": 1.0, "utilization": 0.5, "objective": 1.0}},
        }
        body |= dict.fromkeys(("objective", "value", "utilization", "shortage", "solve_ms"), 1.0)
        return self.write("plan", text(instant), instant, body | fields)

    def every_kind(self) -> None:
        """A little of everything: jobs that ran, failed and wait, demand, plans, slots, what went wrong."""
        self.spec("a")
        self.spec("b", gpus=4, tenant="eval", deadline=text(minutes(600)))
        self.spec("series", schedule="0 2 * * *")
        self.spec("series@2026-12-01T02:00Z", template="series")
        self.attempt("failed", "a", exit_code=1)
        self.attempt("completed", "a", attempt=2, exit_code=0)
        targets = {
            "chat": [
                {"from": text(minutes(3)), "gpus": {"node0": [3]}},
                {"from": text(minutes(9)), "gpus": {}},
            ]
        }
        self.commit("b", nodes=2, at=3, targets=targets)
        self.started("b", rank=1)
        self.started("b", rank=0, void=True)
        self.plan()
        rank = self._rank("b", 1, 0) | {"flow_run": "some-id"}
        self.write("dispatch", "b/1/0", minutes(3), rank)
        self.cancel("b")
        self.write("rejected", "x", minutes(1), {"source": "x.yaml", "error": "x.yaml:1: no"})
        for minute, gpus in ((0, 1.5), (5, 2)):
            samples = [[text(minutes(-60)), gpus * 10, gpus], [text(minutes(-30)), 7, 0.5]]
            body = {"service": "chat", "origin": "observed", "samples": samples}
            self.write("demand", f"chat.{minute}", minutes(minute), body)
        for minute, state in ((1, "ready"), (9, "lost")):
            self.write(
                "node",
                f"node0.{minute}",
                minutes(minute),
                {"node": "node0", "state": state, "reason": "seen"},
            )
        slots = [[text(minutes(-60)), [0.1 * level for level in range(10)]]]
        made: dict[str, Any] = {
            "chat": {"method": "seasonal", "reason": "enough history", "slots": slots, "coverage": 0.9}
        }
        made["chat"]["rivals"] = {"mine": [[text(minutes(-60)), text(minutes(0)), slots[0][1]]]}
        self.write("forecast", "x", HOUR, {"instant": text(HOUR), "services": made})
        figures = dict.fromkeys(
            ("busy_gpu_s", "serving_gpu_s", "utilization", "demand_gpu_s", "shortage_gpu_s", "value"), 0.5
        )
        slot = {"instant": text(HOUR), "until": text(minutes(60)), "gpus": 8, "completed": 1, "failed": 1}
        self.write("slot", "x", minutes(60), slot | figures)
        self.write("missed", "x", minutes(60), {"instant": text(minutes(-60)), "reason": "too late"})
        trouble = {"instant": text(HOUR), "step": "collect", "subject": "chat", "reason": "no answer"}
        self.write("degraded", "x", HOUR, trouble)

    def _rank(self, job: str, attempt: int, rank: int) -> dict[str, Any]:
        return {"job": job, "attempt": attempt, "rank": rank, "node": f"node{rank}"}
