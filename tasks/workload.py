"""The jobs of a replay under one policy: queued, committed, at work, done.

Invariant: a job is known from its submission on and is closed once; how long it takes shows by its end alone.
What the live loop would leave in the ledger of it goes to the journal as it happens, and what is over is
forgotten: memory grows with the jobs that wait or run, not with the trace.

The cost: a plan considers at most MOST_PLANNED queued jobs, those that its policy would take first.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tasks.account import Account
from tasks.allocate import Durations
from tasks.cluster import Site
from tasks.durations import LEAST_SECONDS, JobProfile, Lasted, estimates
from tasks.instants import text
from tasks.jobs import width_misfit
from tasks.journal import Journal
from tasks.policies import LearnedDurations, Policy, TrueDurations
from tasks.trace import Trace, TraceJob
from tasks.virtual_cluster import VirtualCluster

MOST_PLANNED = 300  # queued jobs that a plan considers
MOST_PAST = 3000  # completed runs that estimates are learned from
UNDECLARED_S = 3600.0  # stands for a declaration that nobody made; estimates learn what it means
MAX_ATTEMPTS = 3

Row = dict[str, Any]


@dataclass
class Attempt:
    """A committed start, later a run: its job's row of the queue, and its own of the view `holders`."""

    row: Row
    gpus: tuple[int, ...]
    start_s: float
    holder: Row
    started_s: float | None = None
    over: bool = False

    def ranks(self) -> list[Row]:
        """One for each node."""
        number = self.holder["attempts"]
        return [
            {"job": self.row["job"], "attempt": number, "rank": rank, "node": part["node"]}
            for rank, part in enumerate(self.holder["nodes"])
        ]

    @staticmethod
    def name(rank: Row) -> tuple[str, int, int]:
        """What a fact of a rank is called by."""
        return rank["job"], rank["attempt"], rank["rank"]


class Workload:
    """See above; seconds count from the window's begin."""

    def __init__(
        self,
        site: Site,
        trace: Trace,
        policy: Policy,
        cluster: VirtualCluster,
        account: Account,
        journal: Journal,
    ) -> None:
        self.site, self.trace, self.policy = site, trace, policy
        self.cluster, self.account, self.journal = cluster, account, journal
        self.slot_s = site.slot.total_seconds()
        self.queue: dict[str, Row] = {}  # rows of the view `jobs`, in the order of the queue
        self.live: dict[str, Attempt] = {}
        self.jobs: dict[str, TraceJob] = {}  # as the trace has them, of those queued or live
        self.past: deque[Row] = deque(maxlen=MOST_PAST)
        self.durations: Durations = TrueDurations(self.jobs)
        if not policy.knows:
            self.learn()
        self.facts = 0  # that make a plan out of date

    def submit(self, job: TraceJob) -> None:
        """Take a job in, or reject one that no empty cluster could hold."""
        at = self.trace.at
        submitted = at(job.submit_s)
        if misfit := width_misfit(job.gpus, self.site.cluster):
            self.journal.fact("rejected", submitted, {"source": job.job, "error": misfit}, job.job)
            self.account.close_job(job, "rejected", (None, None), 0, None)
            return
        deadline = None if job.deadline_s is None else at(job.deadline_s)
        declared = UNDECLARED_S if job.declared_s is None else job.declared_s
        spec = {name: getattr(job, name) for name in ("kind", "gpus", "priority", "tenant")}
        body = {
            "job": job.job,
            "spec": {**spec, "max_attempts": MAX_ATTEMPTS},
            "value": job.value,
            "duration_s": declared,
            "release": text(submitted),
            "deadline": None if deadline is None else text(deadline),
            "source": "trace",
            "sha256": "",
        }
        self.journal.fact("spec", submitted, body, job.job)
        self.jobs[job.job] = job
        row = {
            **spec,
            "job": job.job,
            "duration_s": declared,
            "submitted_at": submitted,
            "release_at": submitted,
            "deadline_at": deadline,
            "gpu_types": None,
            "attempts": 0,
            "failures": 0,
            "spec_key": "",
        }
        self._appraise(row)
        self.queue[job.job] = row
        self.facts += 1

    def _appraise(self, row: Row) -> None:
        """What a plan sees in a job: its priority × the GPU-hours declared or, if nobody did, expected."""
        profile = JobProfile(row["job"], row["kind"], row["gpus"], row["duration_s"])
        expected_s = self.durations.estimate_s(profile)
        row["expected_s"] = expected_s
        seconds = row["duration_s"]
        if self.policy.knows:
            seconds = expected_s
        elif self.jobs[row["job"]].declared_s is None:
            # In whole slots, which are what it will be planned for: else it seems worth less than its GPUs.
            seconds = math.ceil(expected_s / self.slot_s) * self.slot_s
        row["value"] = row["priority"] * row["gpus"] * seconds / 3600

    def learn(self) -> None:
        """Estimate durations from the runs that have completed."""
        if not self.policy.knows:
            longest_s = max((row["actual_s"] for row in self.past), default=UNDECLARED_S)
            now = self.cluster.now
            lasted = Lasted.of(
                ((row["gpus"], row["tenant"], row["actual_s"]) for row in self.past),
                (
                    (each.row["gpus"], each.row["tenant"], now - each.started_s)
                    for each in self.live.values()
                    if each.started_s is not None
                ),
            )
            self.durations = LearnedDurations(estimates(self.past), self.jobs, longest_s, lasted)
            for row in self.queue.values():
                self._appraise(row)

    def expire(self) -> None:
        """Close the queued jobs whose deadline has passed."""
        now = self.trace.at(self.cluster.now)
        for row in [row for row in self.queue.values() if row["deadline_at"] and row["deadline_at"] <= now]:
            del self.queue[row["job"]]
            self._close(row, "expired", None, None)

    def candidates(self) -> list[Row]:
        """The queued jobs that a plan considers, in the order of the queue."""
        rows = list(self.queue.values())
        if self.policy.mode != "fifo" and len(rows) > MOST_PLANNED:
            first = sorted(range(len(rows)), key=lambda at: -rows[at]["priority"])[:MOST_PLANNED]
            return [rows[at] for at in sorted(first)]
        return rows[:MOST_PLANNED]

    def commit(self, job: str, gpus: tuple[int, ...], span: tuple[float, float], nodes: list[Row]) -> Attempt:
        """Fix a queued job's start; `span` is when it begins and is expected to end."""
        row = self.queue.pop(job)
        row["attempts"] += 1
        holder = {
            **row,
            "last_attempt": "committed",
            "start_at": self.trace.at(span[0]),
            "started_at": None,
            "end_at": self.trace.at(span[1]),
            "over": False,
            "nodes": nodes,
        }
        self.live[job] = Attempt(row, gpus, span[0], holder)
        return self.live[job]

    def begin_due(self, begun: Callable[[float, Attempt], None]) -> None:
        """Begin what was committed for now, and say when it will end; what cannot begin in time goes back."""
        now, timeout_s = self.cluster.now, self.site.cluster.start_timeout_minutes * 60
        due = [each for each in self.live.values() if each.started_s is None and each.start_s <= now]
        for attempt in due:
            if self.cluster.can_start(attempt.gpus):
                job = self.jobs[attempt.row["job"]]
                self._begin(attempt)
                begun(now + max(job.duration_s, LEAST_SECONDS), attempt)
            elif now >= attempt.start_s + timeout_s:
                self.end(attempt, "not_started")

    def _begin(self, attempt: Attempt) -> None:
        now = self.trace.at(self.cluster.now)
        self.cluster.start(attempt.row["job"], attempt.gpus)
        attempt.started_s = self.cluster.now
        attempt.holder["started_at"] = now
        for rank in attempt.ranks():
            self.journal.fact("started", now, {**rank, "void": False}, *attempt.name(rank))

    def end(self, attempt: Attempt, state: str) -> None:
        """An attempt completed, was lost with its node or never began; only the first end counts."""
        if attempt.over:
            return
        attempt.over = True
        row, now, begun = attempt.row, self.trace.at(self.cluster.now), attempt.holder["started_at"]
        del self.live[row["job"]]
        ran_s = 0.0
        if attempt.started_s is not None:
            self.cluster.end(row["job"], attempt.gpus)
            ran_s = self.cluster.now - attempt.started_s
        self._record_end(attempt, state, begun, now, ran_s)
        self.facts += 1
        if state == "completed":
            self.past.append({**row, "declared_s": row["duration_s"], "actual_s": ran_s, "ended_at": now})
            self._close(row, state, attempt.started_s, self.cluster.now)
            return
        self.account.lost += state == "lost"
        row["failures"] += state == "lost"
        if row["failures"] >= MAX_ATTEMPTS:
            self._close(row, "failed", attempt.started_s, self.cluster.now)
        else:
            self._queue_again(row)

    def _queue_again(self, row: Row) -> None:
        """Back to where its submission puts it."""
        waiting = [*self.queue.values(), row]
        waiting.sort(key=lambda each: each["submitted_at"])
        self.queue = {each["job"]: each for each in waiting}

    def _record_end(
        self, attempt: Attempt, state: str, begun: datetime | None, now: datetime, ran_s: float
    ) -> None:
        for rank, node in zip(attempt.ranks(), attempt.holder["nodes"], strict=True):
            body = {
                **rank,
                "state": state,
                "started_at": None if begun is None else text(begun),
                "ended_at": text(now),
                "gpu_seconds": ran_s * len(node["gpus"]),
                "cost": 0.0,
            }
            self.journal.fact("outcome", now, body, *attempt.name(rank))

    def lose(self, node: str) -> None:
        """End what has GPUs of a node that is gone."""
        for attempt in list(self.live.values()):
            if any(self.cluster.places[gpu][0] == node for gpu in attempt.gpus):
                self.end(attempt, "lost" if attempt.started_s is not None else "not_started")

    def finish(self) -> None:
        """The window's end: what waits or runs earns nothing."""
        for attempt in self.live.values():
            state = "running" if attempt.started_s is not None else "queued"
            self._close(attempt.row, state, attempt.started_s, None)
        for row in self.queue.values():
            self._close(row, "queued", None, None)

    def _close(self, row: Row, state: str, begun: float | None, ended: float | None) -> None:
        job = self.jobs.pop(row["job"])
        self.account.close_job(job, state, (begun, ended), row["attempts"], row["expected_s"])
