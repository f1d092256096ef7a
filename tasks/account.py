"""The account of a replayed policy: what its jobs earned and waited for, hour by hour and in all.

Invariant: a job is closed once; value is earned only by a job that completed in time within the window. Lines
go to the journal as jobs end, so nothing here grows with the trace.
"""

from dataclasses import dataclass, field
from typing import Any

from tasks.instants import text
from tasks.journal import Journal
from tasks.trace import Trace, TraceJob
from tasks.virtual_cluster import VirtualCluster


@dataclass(frozen=True)
class HourPlan:
    """What is kept of an hour's plan until the hour is closed."""

    begin_s: float
    value: float
    utilization: float
    queued: int
    running: int
    kept: int
    moved: int


@dataclass
class Account:
    """Sums over the window, and since the hour began."""

    policy: str
    trace: Trace
    cluster: VirtualCluster
    journal: Journal
    jobs: int = 0
    started: int = 0
    completed: int = 0
    lost: int = 0
    rejected: int = 0
    value: float = 0.0
    offered: float = 0.0
    wait_s: float = 0.0
    wait_started_s: float = 0.0
    replans: int = 0
    _before: dict[str, float] = field(default_factory=dict)

    def close_job(
        self,
        job: TraceJob,
        state: str,
        span: tuple[float | None, float | None],
        attempts: int,
        estimate_s: float | None,
    ) -> None:
        """Write the line of a job that ended, or that the window's end left waiting or at work.

        `span`: when its last attempt began and when the job ended.
        """
        begun, ended = span
        in_time = job.deadline_s is None or (ended is not None and ended <= job.deadline_s)
        earned = job.value if state == "completed" and in_time else 0.0
        wait_s = (self.trace.seconds if begun is None else begun) - job.submit_s
        self.jobs += 1
        self.rejected += state == "rejected"
        if state != "rejected":
            self.offered += job.value
            self.value += earned
            self.completed += state == "completed"
            self.wait_s += wait_s
            if begun is not None:
                self.started += 1
                self.wait_started_s += wait_s
        at = self.trace.at
        line = {
            "policy": self.policy,
            "job": job.job,
            "kind": job.kind,
            "tenant": job.tenant,
            "gpus": job.gpus,
            "priority": job.priority,
            "value": job.value,
            "declared_s": job.declared_s,
            "duration_s": job.duration_s,
            "estimate_s": estimate_s,
            "submitted_at": at(job.submit_s),
            "started_at": None if begun is None else at(begun),
            "ended_at": None if ended is None else at(ended),
            "attempts": attempts,
            "state": state,
            "earned": earned,
            "wait_s": wait_s,
        }
        self.journal.add({"replayed_jobs": [line]})

    def close_hour(self, plan: HourPlan) -> None:
        """The account since the plan, as `tasks.record` gives it, and what only a replay knows."""
        now, figures = self.cluster.now, self._figures()
        since = {name: figures[name] - self._before.get(name, 0.0) for name in figures}
        self._before = figures
        instant, until = self.trace.at(plan.begin_s), self.trace.at(now)
        gpus = len(self.cluster.places)
        utilization = (since["busy"] + since["served"]) / (gpus * (now - plan.begin_s))
        shortage = since["wanted"] - since["served"]
        body = {
            "instant": text(instant),
            "until": text(until),
            "planned_value": plan.value,
            "planned_utilization": plan.utilization,
            "gpus": gpus,
            "busy_gpu_s": since["busy"],
            "serving_gpu_s": since["served"],
            "utilization": utilization,
            "demand_gpu_s": since["wanted"],
            "shortage_gpu_s": shortage,
            "value": since["value"],
            "completed": int(since["completed"]),
            "failed": int(since["lost"]),
        }
        self.journal.fact("slot", instant, body, text(instant))
        line = {
            "policy": self.policy,
            "instant": instant,
            "queued": plan.queued,
            "running": plan.running,
            "kept": plan.kept,
            "moved": plan.moved,
            "replans": int(since["replans"]),
            "utilization": utilization,
            "value": since["value"],
            "completed": int(since["completed"]),
            "demand_gpu_s": since["wanted"],
            "shortage_gpu_s": shortage,
            "serving_gpus": sum(len(held) for held in self.cluster.held.values()),
        }
        self.journal.add({"replayed_hours": [line]})

    def close(self, seconds: float) -> dict[str, Any]:
        """The whole window; `seconds` is what the replay took."""
        totals, slot_s, window_s = self.cluster.totals, self.cluster.slot_s, self.trace.seconds
        gpu_s = len(self.cluster.places) * window_s
        wanted, served = sum(totals.wanted.values()), sum(totals.served.values())
        known_slots = sum(totals.known_s.values()) / slot_s
        short = sum(len(slots) for slots in totals.short_slots.values())
        cost = sum(
            price * (totals.wanted[name] - totals.served[name]) / 3600
            for name, price in self.cluster.prices.items()
        )
        planned = self.jobs - self.rejected
        line = {
            "policy": self.policy,
            "value": self.value,
            "utilization": (totals.busy + served) / gpu_s,
            "completed": self.completed,
            "shortage_gpu_slots": (wanted - served) / slot_s,
            "demand_gpu_slots": wanted / slot_s,
            "mean_wait_s": self.wait_s / planned if planned else 0.0,
            "seconds": seconds,
            "jobs": self.jobs,
            "rejected": self.rejected,
            "started": self.started,
            "offered_value": self.offered,
            "net_value": self.value - cost,
            "mean_wait_started_s": self.wait_started_s / self.started if self.started else 0.0,
            "short_share": short / known_slots if known_slots else 0.0,
            "served_share": served / wanted if wanted else 1.0,
            "batch_utilization": totals.busy / gpu_s,
            "lost_attempts": self.lost,
        }
        self.journal.add({"replayed_policies": [line]})
        return line

    def _figures(self) -> dict[str, float]:
        totals = self.cluster.totals
        return {
            "busy": totals.busy,
            "wanted": sum(totals.wanted.values()),
            "served": sum(totals.served.values()),
            "value": self.value,
            "completed": self.completed,
            "lost": self.lost,
            "replans": self.replans,
        }
