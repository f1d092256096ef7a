"""The hourly loop on recorded load, with a virtual clock: one policy, from the window's begin to its end.

Invariant: nothing is known before its time. A job is known from its submission on and reveals how long it
takes by ending; demand is known when its sample has passed. Problems, commitments, re-plans and facts are
made by the functions of the live loop (`tasks.allocate`, `tasks.commit`, `tasks.replan`,
`tasks.projections`); what is virtual is the cluster. The same inputs and seed give the same ledger,
whatever the machine (but for full mode, which time ends).

The cost of the choice: services follow their targets, and jobs begin, at the very instant.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import perf_counter
from typing import Any

import numpy as np

import allocator
from allocator import Problem
from tasks.account import Account, HourPlan
from tasks.allocate import Planned, State, build_problem
from tasks.cluster import Site
from tasks.commit import commitment, plan_fact
from tasks.forecast import Forecast
from tasks.forecast_table import ForecastTable
from tasks.hour import Degradation, Hour, Trigger
from tasks.instants import text
from tasks.journal import Journal
from tasks.outages import NodeEvent
from tasks.policies import Policy, Rows
from tasks.replan import reasons
from tasks.trace import Trace
from tasks.virtual_cluster import VirtualCluster
from tasks.workload import Attempt, Workload

NODE, ENDS, SAMPLE, SERVE, HOUR, REPLAN, BEGIN = range(7)  # events of one instant, in their order


@dataclass(frozen=True)
class Inputs:
    """What every policy of a replay is given."""

    site: Site
    trace: Trace
    forecasts: ForecastTable
    nodes: tuple[NodeEvent, ...] = ()
    seed: int = 0


def replay(inputs: Inputs, policy: Policy, journal: Journal) -> dict[str, Any]:
    """Replay one policy; its account. What it did is left in the journal."""
    return _Course(inputs, policy, journal).run()


class _Course:
    """One policy's course through the window; seconds count from its begin."""

    def __init__(self, inputs: Inputs, policy: Policy, journal: Journal) -> None:
        site, trace = inputs.site, inputs.trace
        self.inputs, self.policy, self.journal = inputs, policy, journal
        self.cluster = VirtualCluster(site, trace.demand)
        self.account = Account(policy.name, trace, self.cluster, journal)
        self.work = Workload(site, trace, policy, self.cluster, self.account, journal)
        self.gpus = tuple((node, index) for _, node, index in site.gpu_numbers())
        self.units = {service.name: service.gpus_per_replica for service in site.cluster.services}
        self.slot_s, self.every_s = site.slot.total_seconds(), site.plan_every.total_seconds()
        self.committed_slots = max(round(self.every_s / self.slot_s), 1)
        # Events: (instant, sort, number, what it is about).
        self.events: list[tuple[float, int, int, Any]] = []
        self.numbers = itertools.count()
        self.seen: dict[str, float] = {}  # what services were last seen to want
        self.looked = True  # whether a plan has considered that
        self.considered = 0  # facts that a plan has considered
        # What the hour planned.
        self.hour = 0
        self.plan: HourPlan | None = None
        self.rows: dict[str, Rows] = {}  # what services are planned by, from the hour's begin on
        self.counts: dict[str, list[int]] = {}  # GPUs that the hour gives services, by slot
        self.serves: dict[str, int] = {}  # latest commitment that says what a service holds
        self.advised: dict[str, float] = {}  # planned starts after the next plan
        self.planned_s = -1.0  # when the latest plan was made
        self.replan_s: float | None = None

    # The course

    def run(self) -> dict[str, Any]:
        began = perf_counter()
        for event in self.inputs.nodes:
            self._at(event.at_s, NODE, event)
        for name, demand in self.inputs.trace.demand.items():
            for index, gpus in enumerate(demand.gpus):
                ended = demand.first_s + (index + 1) * demand.sample_s
                if not math.isnan(gpus) and ended <= self.inputs.trace.seconds:
                    self._at(ended, SAMPLE, (name, gpus))
        self._at(0.0, HOUR, None)
        arrivals = self.inputs.trace.each_job()
        coming = next(arrivals, None)
        while True:
            now = min(self.events[0][0], coming.submit_s if coming is not None else math.inf)
            if now >= self.inputs.trace.seconds:
                break
            self.cluster.advance(now)
            while coming is not None and coming.submit_s <= now:
                self.work.submit(coming)
                coming = next(arrivals, None)
            while self.events[0][0] <= now:
                _, sort, _, about = heapq.heappop(self.events)
                self._happens(sort, about)
            self.work.begin_due(self._ends)
            self._ask_for_replan()
        self._finish()
        return self.account.close(perf_counter() - began)

    def _at(self, seconds: float, sort: int, about: Any) -> None:
        heapq.heappush(self.events, (max(seconds, self.cluster.now), sort, next(self.numbers), about))

    def _ends(self, seconds: float, attempt: Attempt) -> None:
        self._at(seconds, ENDS, attempt)

    def _now(self) -> datetime:
        return self.inputs.trace.at(self.cluster.now)

    def _happens(self, sort: int, about: Any) -> None:
        if sort == NODE:
            self._change_node(about)
        elif sort == ENDS:
            self.work.end(about, "completed")
        elif sort == SAMPLE:
            service, gpus = about
            self.seen[service], self.looked = gpus, False
        elif sort == SERVE:
            service, gpus, number = about
            if self.serves[service] == number:
                self.cluster.serve(service, gpus)
        elif sort == HOUR:
            self._plan_hour()
        elif sort == REPLAN and about == self.replan_s:
            self._replan()

    def _finish(self) -> None:
        """The window's end: what waits or runs earns nothing."""
        self.cluster.advance(self.inputs.trace.seconds)
        self._close_hour()
        self.work.finish()

    def _change_node(self, event: NodeEvent) -> None:
        now, lost = self._now(), self.cluster.lost
        body = {"node": event.node, "state": "lost" if event.lost else "ready", "reason": "replayed"}
        self.journal.fact("node", now, body, event.node, text(now))
        if event.lost:
            self.work.lose(event.node)
        self.cluster.set_lost(lost | {event.node} if event.lost else lost - {event.node})
        self.work.facts += 1

    # Plans

    def _plan_hour(self) -> None:
        """Close the hour that has passed; forecast, allocate and commit the next."""
        now = self.cluster.now
        self._close_hour()
        self._at(now + self.every_s, HOUR, None)
        self.hour, self.replan_s = round(now / self.every_s), None
        self.work.learn()
        self.rows = {
            service.name: self.policy.expects(self.inputs.forecasts.view(service, self.hour))
            for service in self.inputs.site.cluster.services
        }
        waiting, running = len(self.work.queue), len(self.work.live)
        planned = self._allocate("hourly", self.rows)
        starts = {
            place.job: now + place.start * self.slot_s
            for place in planned.plan.placements
            if place.job in planned.queued
        }
        old = {job: start for job, start in self.advised.items() if job in self.work.queue}
        moved = sum(abs(starts.get(job, math.inf) - start) >= self.slot_s for job, start in old.items())
        self.advised = {job: start for job, start in starts.items() if start >= now + self.every_s}
        self.counts = {
            each.service: [len(gpus) for gpus in each.gpus[: self.committed_slots]]
            for each in planned.plan.realtime
        }
        self.plan = HourPlan(
            now, planned.plan.value, planned.plan.utilization, waiting, running, len(old) - moved, moved
        )
        self._commit(planned)
        self.journal.fact("plan", planned.hour.instant, plan_fact(planned), text(planned.hour.instant))

    def _close_hour(self) -> None:
        if self.plan is not None:
            self.account.close_hour(self.plan)

    def _ask_for_replan(self) -> None:
        """Plan again at the light flow's next turn, if something has happened that a plan can answer."""
        if self.replan_s is not None or not self._reasons():
            return
        step = self.inputs.site.cluster.replan_every_seconds
        turn = math.ceil(self.cluster.now / step - 1e-9) * step
        if turn <= self.planned_s:  # one commitment an instant
            turn += step
        if turn < (self.hour + 1) * self.every_s:  # else the hour's plan comes first
            self.replan_s = float(turn)
            self._at(self.replan_s, REPLAN, self.replan_s)

    def _reasons(self) -> list[str]:
        """Why the plan is out of date; none while all GPUs are taken, or too many for any queued job."""
        idle = self.cluster.idle()
        fits = any(row["gpus"] <= idle for row in self.work.queue.values())
        given = {name: len(target) for name, target in self.cluster.targets.items()}
        wanted = {} if self.looked or self.policy.knows or not idle else self.seen
        return reasons(self.work.facts - self.considered if fits else 0, wanted, given)

    def _replan(self) -> None:
        """The light re-plan: what now fits is committed. Services keep what the hour gave them."""
        self.replan_s = None
        if not self._reasons():
            return
        self.account.replans += 1
        begun = (self.cluster.now - self.hour * self.every_s) / self.slot_s
        first = int(begun + 1e-9)
        rows = {}
        for name, hourly in self.rows.items():
            kept = hourly.copy()
            for slot, count in enumerate(self.counts[name]):
                kept[slot] = count
            shifted = kept[first:]
            if begun - first > 1e-9:  # slots of this plan lie across two of the hour's
                shifted[:-1] = np.maximum(shifted[:-1], shifted[1:])
            rows[name] = shifted
        self._commit(self._allocate("replan", rows))

    def _allocate(self, trigger: Trigger, rows: Mapping[str, Rows]) -> Planned:
        """The problem as it is now, solved."""
        site, now = self.inputs.site, self._now()
        hour = Hour(now, now, self.inputs.trace.at((self.hour + 1) * self.every_s), trigger)
        self.work.expire()
        queued, facts = self.work.candidates(), self.work.facts
        announced = self.advised if site.cluster.move_cost else {}
        state = State(
            queued,
            [attempt.holder for attempt in self.work.live.values()],
            self.work.durations,
            {} if self.policy.knows else self.seen,
            {name: self.cluster.by_node(held) for name, held in self.cluster.held.items()},
            {name: self.cluster.held_at(name, self.cluster.now - self.slot_s) for name in self.cluster.held},
            facts,
            {job: self.inputs.trace.at(start) for job, start in announced.items()},
        )
        forecasts = {
            name: Forecast(tuple(map(tuple, each[: site.plan_slots].tolist())), self.policy.name, "replayed")
            for name, each in rows.items()
        }
        gaps: list[Degradation] = []
        problem = build_problem(site, hour, state, forecasts, self.cluster.lost, gaps)
        light = trigger == "replan" and self.policy.searches
        mode = light_mode(problem) if light else self.policy.mode
        limit = site.cluster.full_mode_seconds if mode == "full" else None
        plan = allocator.solve(problem, mode, seed=self.inputs.seed, time_limit=limit)
        self.considered, self.looked, self.planned_s = facts, True, self.cluster.now
        line = {"policy": self.policy.name, "instant": now, "trigger": trigger, "jobs": len(queued)}
        self.journal.add({"replayed_solves": [{**line, "solve_ms": plan.solve_ms}]})
        for number, gap in enumerate(gaps):
            body = {"instant": text(now), "step": gap.step, "subject": gap.subject, "reason": gap.reason}
            self.journal.fact("degraded", now, body, text(now), number)
        return Planned(hour, problem, plan, {}, self.gpus, {row["job"]: row for row in queued}, facts, gaps)

    def _commit(self, planned: Planned) -> None:
        """Fix what starts before the next plan, and what services hold until then."""
        now, timeout_s = self.cluster.now, self.inputs.site.cluster.start_timeout_minutes * 60
        body = commitment(planned)
        for each in planned.plan.realtime:
            body["targets"][each.service] = self._change_service(
                each.service, each.gpus, planned.hour.trigger
            )
        places = {place.job: place for place in planned.plan.placements}
        for fixed in body["placements"]:
            place = places[fixed["job"]]
            begin_s = now + place.start * self.slot_s
            span = begin_s, begin_s + place.slots * self.slot_s
            self.work.commit(place.job, place.gpus, span, fixed["nodes"])
            for due in (begin_s, begin_s + timeout_s):
                self._at(due, BEGIN, None)
        self.journal.fact("commit", planned.hour.instant, body, text(planned.hour.instant))

    def _change_service(
        self, service: str, gpus: Sequence[tuple[int, ...]], trigger: Trigger
    ) -> list[dict[str, Any]]:
        """Let a service hold what the plan gives it, and say so as a commitment does.

        In a re-plan it gets no more than the hour gave it, or it was last seen to want: more would only be
        held early, for the slots in which it is needed.
        """
        now, begin_s = self.cluster.now, self.hour * self.every_s
        until = begin_s + self.every_s
        edges = {now + slot * self.slot_s for slot in range(self.committed_slots + 1)}
        edges |= {begin_s + slot * self.slot_s for slot in range(self.committed_slots)}
        unit = self.units[service]
        seen = 0 if self.policy.knows else math.ceil(self.seen.get(service, 0.0) / unit) * unit
        number = self.serves[service] = next(self.numbers)
        holding, changes = self.cluster.held[service], []
        for edge in sorted(edge for edge in edges if now <= edge < until):
            at = min(int((edge - now) / self.slot_s + 1e-9), len(gpus) - 1)
            pool = gpus[at]
            if trigger == "replan":
                slot = min(int((edge - begin_s) / self.slot_s + 1e-9), len(self.counts[service]) - 1)
                pool = _some(pool, max(self.counts[service][slot], seen), holding, gpus[at + 1 :])
            if edge <= now:
                self.cluster.serve(service, pool)
            elif pool != holding:
                self._at(edge, SERVE, (service, pool, number))
            if edge <= now or pool != holding:
                places = self.cluster.by_node(pool)
                gpus_on = {node: sorted(indices) for node, indices in places.items()}
                changes.append({"from": text(self.inputs.trace.at(edge)), "gpus": gpus_on})
            holding = pool
        return changes


def light_mode(problem: Problem) -> str:
    """The mode of a re-plan between hours: by priority, on what the hour's plan left or what has ended since.

    The live loop takes fast mode, whose milliseconds nobody waits for. In replays, which plan thousands of
    times, it earned no more and took several times as long (`flows/README.md`). The order of priorities knows
    no deadlines, so where a job that waits has one, fast mode looks.
    """
    due = any(job.deadline is not None for job in problem.jobs if job.running is None)
    return "fast" if due else "greedy"


def _some(
    pool: tuple[int, ...], count: int, holding: tuple[int, ...], later: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """So many GPUs of a pool: those held first, then those that the plan keeps longest."""
    if count >= len(pool):
        return pool
    stays = Counter(gpu for row in later for gpu in row)
    ranked = sorted(pool, key=lambda gpu: (gpu not in holding, -stays[gpu], -gpu))
    return tuple(sorted(ranked[:count]))
