"""A cluster in virtual time around the real planner: nodes, runs, services and the orchestrator's memory.

The planner's hour runs in a process of its own, which really dies when it is to. Everything else is here:
what a node's worker, a runner and a service do with storage, by the same protocol and where possible by the
same functions, at the speed of the virtual clock. What happens is noted for the checker as it happens.
"""

import copy
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from tasks import faults, serving
from tasks.cluster import Site, load_site
from tasks.collect import collect_missed
from tasks.dispatch import FlowRun
from tasks.facts import fact_key, parse_key, read_json, write_fact, write_json
from tasks.hour import StaleHourError, Trigger, planning
from tasks.inbox import cancel_requested, request_cancel
from tasks.instants import text
from tasks.nodes import renew_lease
from tasks.reconcile import lease_key, leave_outcome
from tasks.storage import NotFoundError
from tasks.virtual_service import Deployment
from tests.conftest import make_site
from tests.invariants import Asked, note, unfinished, violations

MINUTE = timedelta(minutes=1)
LEASE_S = 60.0  # a node or run counts as lost after four of them
DRAIN_S = 120.0
CHAT: dict[str, Any] = {
    "name": "chat",
    "demand": {"file": "chat.csv", "unit": "gpus", "sample_minutes": 10},
    "expected_gpus": 1,
    "ramp_per_hour": 60,
    "priority": 8,
}
_processes = multiprocessing.get_context("forkserver")
# DuckDB brings pandas in when it is given a parameter.
_processes.set_forkserver_preload(["tests.crash.world", "tests.tasks.planned_hours", "pandas"])


@dataclass
class FlowRuns:
    """What the orchestrator was asked for, in a directory: it outlives the planner that asked."""

    directory: Path

    def __call__(self, rank: dict[str, Any]) -> FlowRun:
        key = f"{rank['job']}~{rank['attempt']}~{rank['rank']}"
        path = self.directory / f"{key}.json"
        if not path.exists():
            wanted = {name: rank[name] for name in ("job", "attempt", "rank", "node", "key")}
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(wanted))
            temporary.rename(path)
        return FlowRun(key, False)


@dataclass
class Run:
    """One rank as its node runs it."""

    job: str
    attempt: int
    rank: int
    node: str
    gpus: tuple[int, ...]
    ranks: int
    day: datetime
    start: datetime
    gives_up: datetime
    seconds: float
    state: str = "waiting"  # waiting, gathering, running, over
    began: datetime | None = None
    ended: dict[str, Any] | None = None  # an outcome that storage has not taken yet
    heard: datetime | None = None  # when storage last took its lease

    @property
    def name(self) -> dict[str, Any]:
        return {"job": self.job, "attempt": self.attempt, "rank": self.rank}

    def key(self, kind: Any, rank: int | None = None) -> str:
        return fact_key(kind, self.day, self.job, self.attempt, self.rank if rank is None else rank)


@dataclass
class World:
    """The cluster. `now` is the control machine's clock; `hours` what each hour ended with."""

    directory: Path
    now: datetime
    seed: int = 0
    cluster: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes = [{"name": f"node{number}", "gpus": 4} for number in range(3)]
        fields = {
            "nodes": nodes,
            "full_mode_seconds": 0,
            "lease_seconds": LEASE_S,
            "services": [CHAT],
        } | self.cluster
        self.site: Site = make_site(self.directory, **fields)
        self.storage = self.site.storage
        self.witness = self.directory / "witness.jsonl"
        self.flow_runs = self.directory / "flow-runs"
        self.flow_runs.mkdir()
        self.asked = Asked()
        self.random = random.Random(self.seed)
        self.down: set[str] = set()  # nodes without power
        self.cut: set[str] = set()  # nodes that storage cannot be reached from
        self.runs: dict[str, Run] = {}
        self.services = {service.name: Deployment(DRAIN_S) for service in self.site.cluster.services}
        self.lengths: dict[str, float] = {}
        self.fails: Callable[[Run], bool] = lambda run: False
        self.elapsed = 0.0
        self.control_is_ahead = timedelta(0)
        self.ahead: dict[str, timedelta] = {}  # clocks of nodes
        for service in self.site.cluster.services:
            (self.directory / str(service.demand.file)).write_text("ts,y\n")
        self.tick(0)

    def copied(self, directory: Path) -> "World":
        """The same world, as it stands, in a directory of its own."""
        shutil.copytree(self.directory, directory, dirs_exist_ok=True)
        world = copy.copy(self)
        for name in ("asked", "random", "down", "cut", "runs", "services", "lengths"):
            setattr(world, name, copy.deepcopy(getattr(self, name)))
        world.directory, world.site = directory, load_site(directory / "cluster.yaml")
        world.storage = world.site.storage
        world.witness, world.flow_runs = directory / "witness.jsonl", directory / "flow-runs"
        return world

    def submit(self, job: str, minutes: float = 10, **fields: Any) -> None:
        """Leave a good spec, whose work takes so long."""
        spec = {
            "id": job,
            "kind": "training",
            "gpus": 1,
            "priority": 5,
            "duration": f"{max(round(minutes), 1)}m",
            "max_attempts": 100,
            "command": ["true"],
        }
        self.leave(f"{job}.yaml", yaml.safe_dump({**spec, **fields}).encode())
        self.asked.jobs.add(job)
        self.lengths[job] = minutes * 60

    def leave(self, name: str, content: bytes) -> None:
        """Leave a file in the inbox."""
        self.storage.write(f"inbox/{name}", content)
        self.asked.specs[name] = content

    def cancel(self, job: str) -> None:
        """Ask for a job to end."""
        request_cancel(self.storage, job, "a person", self.now)
        self.asked.cancelled.add(job)

    def demand(self, service: str, gpus: float, at: datetime | None = None) -> None:
        """Let the service's source have a sample."""
        ts = at or self.now
        with (self.directory / f"{service}.csv").open("a") as out:
            out.write(f"{text(ts)},{gpus}\n")
        self.asked.demand[service, text(ts)] = gpus

    def hour(self, trigger: Trigger = "hourly", **how: Any) -> int:
        """Run the planner now, in a process; its exit code: 0, -9 when it died, 143 when it was told to end,
        3 for a stale hour."""
        return self.hours([how], trigger)[0]

    def hours(self, each: list[dict[str, Any]], trigger: Trigger = "hourly") -> list[int]:
        """Run planners at the same moment.

        Each may have a `fault` at which it dies, a `scheduled` instant, an `environment`, a `jump` of the
        clock (from the how manieth step on, by how much), and what `make_hostile` takes.
        """
        present = self.now + self.control_is_ahead
        places = (str(self.site.file), str(self.flow_runs))
        processes = [
            _processes.Process(target=_plan, args=(*places, present, self.elapsed, trigger, how))
            for how in each
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
            assert process.exitcode is not None, "the planner does not end"
        return [process.exitcode or 0 for process in processes]

    def tick(self, seconds: float = 60) -> None:
        """Let time pass, and everything but the planner act once."""
        self.now += timedelta(seconds=seconds)
        self.elapsed += seconds
        for node in self.site.cluster.nodes:
            if node.name not in self.down | self.cut:
                renew_lease(self.storage, node.name, self._clock(node.name), pid=1)
        for name, deployment in self.services.items():
            said = deployment.step(serving.target(self.storage, name), self.elapsed)
            held = sorted([node, gpu] for node, gpus in said.gpus.items() for gpu in gpus)
            note(self.witness, what="hold", service=name, gpus=held)
            serving.write_observed(self.storage, name, self.now, said)
        self._take_up()
        for _ in range(2):  # a gang sees in the second round what all claimed in the first
            for run in self.runs.values():
                if run.state != "over" and run.node not in self.down:
                    self._act(run)

    def pass_minutes(self, minutes: int) -> None:
        """So many ticks of a minute."""
        while minutes > 0:  # in steps of two minutes where many pass: half of a lease's time
            step = 2 if minutes > 8 else 1
            self.tick(60 * step)
            minutes -= step

    def lose(self, node: str) -> None:
        """The node loses its power, and all that runs on it."""
        self.down.add(node)
        for run in self.runs.values():
            if run.node == node and run.state != "over":
                self._die(run)

    def crash(self, run: Run) -> None:
        """A run's processes are killed, runner and program at once."""
        self._die(run)

    def check(self, settled: bool = True) -> None:
        """The invariants hold."""
        found = violations(self.storage, self.witness, self.asked, settled)
        assert not found, "\n".join(found)

    def unfinished(self) -> list[str]:
        """Jobs that have not completed."""
        return unfinished(self.storage, self.asked)

    def finish(self, hours: int = 12) -> None:
        """Go on without troubles until all is done; the invariants hold after every hour."""
        self.down.clear()
        self.cut.clear()
        for _ in range(hours):
            self.to_next_hour()
            assert self.hour() == 0
            self.check()
            self.pass_minutes(10)
            if not self.unfinished():
                return
        raise AssertionError(f"not finished: {self.unfinished()}")

    def to_next_hour(self) -> None:
        """Tick until the next plan is due."""
        every = self.site.cluster.plan_every_minutes
        minute = self.now.hour * 60 + self.now.minute
        self.pass_minutes(every - minute % every)

    def _clock(self, node: str) -> datetime:
        return self.now + self.ahead.get(node, timedelta(0))

    def _take_up(self) -> None:
        """Workers that can be reached take their flow runs."""
        for path in sorted(self.flow_runs.glob("*.json")):
            asked = json.loads(path.read_text())
            if path.stem in self.runs or asked["node"] in self.down | self.cut:
                continue
            commit = read_json(self.storage, asked["key"])
            place = next(each for each in commit["placements"] if each["job"] == asked["job"])
            start = datetime.fromisoformat(place["start"])
            self.runs[path.stem] = Run(
                job=asked["job"],
                attempt=place["attempt"],
                rank=asked["rank"],
                node=asked["node"],
                gpus=tuple(place["nodes"][asked["rank"]]["gpus"]),
                ranks=len(place["nodes"]),
                day=datetime.combine(parse_key(asked["key"]).day, datetime.min.time()),
                start=start,
                gives_up=max(start, self.now) + timedelta(minutes=commit["start_timeout_minutes"]),
                seconds=self.lengths.get(asked["job"], 600.0),
            )

    def _act(self, run: Run) -> None:
        """What the runner does in this tick."""
        if run.node in self.cut:
            heard = run.heard or self.now
            if run.state in ("gathering", "running") and self.now - heard > timedelta(seconds=2 * LEASE_S):
                self._end(run, "crashed", ok=False)  # it ends its program before anyone may think it dead
            return
        if run.ended is not None:
            leave_outcome(self.storage, run.key("outcome"), self.now, run.ended)
            run.state = "over"
            return
        write_json(
            self.storage,
            lease_key(run.job, run.attempt, run.rank),
            {"at": text(self._clock(run.node)), **run.name},
        )
        run.heard = self.now
        {"waiting": self._wait, "gathering": self._gather, "running": self._run}[run.state](run)

    def _wait(self, run: Run) -> None:
        if cancel_requested(self.storage, run.job):
            self._void(run, "cancelled")
        elif self.now > run.gives_up:
            self._void(run, "not_started")
        elif self.now >= run.start and not self._in_the_way(run):
            if self._claim(run, void=False):
                run.state = "gathering"
            else:
                run.state = "over"

    def _in_the_way(self, run: Run) -> bool:
        """Whether a process of this node still has the GPUs' locks, or a service may hold them."""
        locked = {
            gpu
            for other in self.runs.values()
            if other.node == run.node and other.state in ("gathering", "running") and other.ended is None
            for gpu in other.gpus
        }
        return bool(locked & set(run.gpus)) or bool(serving.blockers(self.storage, run.node, run.gpus))

    def _gather(self, run: Run) -> None:
        for rank in range(run.ranks):
            try:
                claim = read_json(self.storage, run.key("started", rank))
            except NotFoundError:
                if self.now > run.gives_up:
                    self._end(run, "not_started", ok=None)
                return
            if claim["void"]:
                self._end(run, "not_started", ok=None)
                return
        run.state, run.began = "running", self.now
        note(self.witness, what="begin", **run.name, node=run.node, gpus=list(run.gpus), pid=os.getpid())

    def _run(self, run: Run) -> None:
        assert run.began is not None
        try:
            read_json(self.storage, run.key("outcome"))
        except NotFoundError:
            pass
        else:  # someone thought it dead
            self._end(run, "crashed", ok=False)
            return
        peers = [rank for rank in range(run.ranks) if rank != run.rank and self._ended_badly(run, rank)]
        if cancel_requested(self.storage, run.job):
            self._end(run, "cancelled", ok=False)
        elif peers:
            self._end(run, "stopped", ok=False)
        elif (self.now - run.began).total_seconds() >= run.seconds:
            good = not self.fails(run)
            self._end(run, "completed" if good else "failed", ok=good)

    def _ended_badly(self, run: Run, rank: int) -> bool:
        try:
            return bool(read_json(self.storage, run.key("outcome", rank))["state"] != "completed")
        except NotFoundError:
            return False

    def _claim(self, run: Run, void: bool) -> bool:
        body = {**run.name, "node": run.node, "void": void, "reason": None, "pid": 1, "port": 1}
        return write_fact(
            self.storage, run.key("started"), self._clock(run.node), {**body, "nonce": self.random.random()}
        )

    def _void(self, run: Run, state: str) -> None:
        if self._claim(run, void=True):
            self._end(run, state, ok=None)
        run.state = "over"

    def _end(self, run: Run, state: str, ok: bool | None) -> None:
        """The program is gone (if it had begun); leave the outcome, now or when storage takes it."""
        if ok is not None and run.began is not None:
            note(self.witness, what="end", **run.name, ok=ok)
        seconds = (self.now - run.began).total_seconds() if run.began else 0.0
        run.ended = {
            **run.name,
            "node": run.node,
            "state": state,
            "started_at": text(run.began) if run.began else None,
            "ended_at": text(self.now),
            "gpu_seconds": seconds * len(run.gpus),
            "cost": 0.0,
            "exit_code": 0 if state == "completed" else 1,
            "error": None if state == "completed" else state,
            "metrics": {},
        }
        if run.node not in self.cut:
            leave_outcome(self.storage, run.key("outcome"), self.now, run.ended)
            run.state = "over"

    def _die(self, run: Run) -> None:
        if run.state == "running" and run.ended is None:
            note(self.witness, what="dead", **run.name)
        run.state = "over"


def _plan(
    file: str, flow_runs: str, now: datetime, steady: float, trigger: Trigger, how: dict[str, Any]
) -> None:
    """One hour in this process, as the flows run it."""
    from tasks.record import record
    from tests.crash.hostile import make_hostile
    from tests.tasks.planned_hours import plan_hour

    environment = how.get("environment", {})
    os.environ.update(environment)
    # As in a flow: what was begun is left by way of an exception.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    faults.arm({"SLOTWISE_FAULT": how.get("fault", ""), "PYTEST_VERSION": "any", **environment})
    site = load_site(file)
    os.fsync = lambda fd: None  # see conftest
    make_hostile(how)
    scheduled = how.get("scheduled")
    from_step, jump = how.get("jump", (0, timedelta(0)))
    steps = itertools.count(1)

    def clock() -> datetime:
        return now + jump if next(steps) >= from_step else now

    with planning(site, wait=trigger == "hourly") as alone:
        if alone:
            try:
                plan_hour(site, now, FlowRuns(Path(flow_runs)), trigger, scheduled, steady, clock)
            except StaleHourError as stale:
                collect_missed(site, scheduled or now, str(stale), now)
                record(site, now)
                os._exit(3)
    os._exit(0)
