"""Allocate: turn the state in the ledger into a planning problem, solve it, and set the baselines beside it.

Invariant: what runs, what is committed and what a service holds enters the problem as fixed; the value of a
job is the one recorded when it was taken in. Whatever becomes of full mode, there is a plan: the fast one.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

import allocator
from allocator import Announced, Choice, Hole, Plan, Problem, ProblemError, Running
from allocator.explain import with_reasons
from tasks import ledger
from tasks.cluster import Node, Service, Site
from tasks.collect import ledger_directory
from tasks.durations import JobProfile, declared_at, estimates
from tasks.forecast import Forecast, gpu_demand_quantiles
from tasks.full_mode import FullModeError, plan_in_full_mode
from tasks.hour import Degradation, Hour
from tasks.predicted import predicted_s, seconds_by_place
from tasks.serving import Held, target
from tasks.work import work_on

# Facts that make a plan out of date: what was profile, what ended, which node came or went.
CONSIDERED = "SELECT count(*) AS count FROM facts WHERE kind IN ('spec', 'cancel', 'outcome', 'node')"
# What services had by the commitments of a time.
SERVED = (
    "SELECT service, sum(len(gpus))::INTEGER AS gpus FROM (FROM serving WHERE from_at <= ? "
    "QUALIFY rank() OVER (PARTITION BY service ORDER BY instant DESC, from_at DESC) = 1) GROUP BY service"
)
# How long those that run have lasted: they say that jobs like them take at least as long. What training has
# to do is left out: as a duration it would need the peak of the GPUs as well.
RUNNING = (
    "SELECT h.job, h.kind, s.tenant, s.gpus, h.nodes, s.predicted, h.duration_s AS declared_s, "
    "CASE WHEN s.precision IS NULL THEN s.work END AS work, "
    "date_diff('millisecond', h.started_at, ?) / 1000 AS actual_s "
    "FROM holders h JOIN specs s USING (job) WHERE NOT h.over AND h.started_at < ?"
)
# The starts that the latest hourly plan told people; a later one is dearer where the cluster file says so.
ANNOUNCED = (
    "SELECT job, start_at FROM planned_jobs WHERE start_at IS NOT NULL "
    "AND instant = (SELECT max(instant) FROM plans WHERE trigger = 'hourly' AND instant < ?)"
)
OBSERVED_LATELY = timedelta(days=1)  # what was seen before says nothing of now
OCCUPANCY_LEVEL, DEADLINE_LEVEL = 0.5, 0.9  # of how long a job may take, for its GPUs and for its deadline
BASELINES = ("fifo", "backfill", "greedy")
LEARNT_FROM = 10_000  # runs from which durations are estimated, the latest
RETRIED = ("failed", "crashed", "stopped")  # states after which a job may go on where it was


@dataclass(frozen=True)
class Fixed:
    """An attempt that holds GPUs, or soon will, or a failed one whose retry keeps them."""

    job: str
    kind: str
    gpus: tuple[int, ...]  # numbers within the problem
    begins: datetime
    ends: datetime  # expected
    value: float
    priority: float
    retry: bool


@dataclass(frozen=True)
class Planned:
    """A solved problem, the numbers of its GPUs, what each baseline makes of it, and what had to give."""

    hour: Hour
    problem: Problem
    plan: Plan
    baselines: dict[str, Plan]
    gpus: tuple[tuple[Node, int], ...]
    queued: dict[str, dict[str, Any]]  # rows of the view `jobs`, retries among them
    considered: int  # facts that the plan knew of jobs, runs and nodes
    problems: list[Degradation]

    @property
    def slot(self) -> timedelta:
        """Length of a slot."""
        return timedelta(minutes=self.problem.slot_minutes)


def allocate(site: Site, hour: Hour, forecasts: Mapping[str, Forecast], lost: Iterable[str]) -> Planned:
    """Plan the horizon from `hour.begin` on; on the nodes in `lost` nothing may start.

    A replan is light: fast mode alone, and no baselines. Every job without a place is told why.
    """
    full_seconds = site.cluster.full_mode_seconds if hour.trigger == "hourly" else 0.0
    problems: list[Degradation] = []
    state = read_state(site, hour.begin)
    problem = build_problem(site, hour, state, forecasts, set(lost), problems)
    plan = allocator.solve(problem, mode="fast")
    if full_seconds > 0 and any(job.running is None for job in problem.jobs):
        try:
            plan = plan_in_full_mode(problem, full_seconds)
        except FullModeError as error:
            problems.append(Degradation("allocate", "full mode", f"{error}; the fast plan stands"))
    baselines = _baselines(problem, problems) if hour.trigger == "hourly" else {}
    if plan.mode == "fast":  # those of full mode came with it
        try:
            plan = with_reasons(problem, plan)
        except Exception as error:  # a plan without explanations is a plan
            problems.append(Degradation("allocate", "explanations", f"{type(error).__name__}: {error}"))
    gpus = tuple((node, index) for _, node, index in site.gpu_numbers())
    queued = {row["job"]: row for row in state.queued}
    return Planned(hour, problem, plan, baselines, gpus, queued, state.considered, problems)


def _baselines(problem: Problem, problems: list[Degradation]) -> dict[str, Plan]:
    """What each baseline makes of the problem; one that fails is left out."""
    plans = {}
    for mode in BASELINES:
        try:
            plans[mode] = allocator.solve(problem, mode=mode)
        except Exception as error:
            problems.append(Degradation("allocate", mode, f"{type(error).__name__}: {error}"))
    return plans


class Durations(Protocol):
    """Who says how long jobs take: `tasks.durations.Estimates`, or in a replay one who knows."""

    def estimate_s(self, profile: JobProfile, level: float = 0.5) -> float:
        """Seconds that a run takes."""

    def remaining_s(self, profile: JobProfile, elapsed_s: float) -> float:
        """Seconds left to one that has lasted `elapsed_s`."""


@dataclass(frozen=True)
class State:
    """What a plan needs to know: queued jobs (rows of the view `jobs`) in the order of the queue, live
    attempts (of `holders`), how long jobs take, what services were last seen to want, what they hold by node,
    how many GPUs they had one slot ago, and the starts that the latest hourly plan announced.
    """

    queued: list[dict[str, Any]]
    attempts: list[dict[str, Any]]
    estimates: Durations
    observed: Mapping[str, float]
    targets: Mapping[str, Held]
    before: Mapping[str, int]
    considered: int
    announced: Mapping[str, datetime]

    @property
    def live(self) -> set[str]:
        """Jobs with an attempt that has not ended."""
        return {row["job"] for row in self.attempts if not row["over"]}


def read_state(site: Site, at: datetime) -> State:
    """Read the ledger, in one short transaction."""
    with ledger.open_ledger(ledger_directory(site)) as connection:
        queued = ledger.rows(
            connection,
            "SELECT j.*, s.work, s.precision, s.widths, s.predicted FROM jobs j JOIN specs s USING (job) "
            "WHERE j.state = 'queued' ORDER BY j.submitted_at, j.release_at, j.job",
        )
        attempts = ledger.rows(
            connection,
            "SELECT h.*, s.tenant, s.gpus, s.work, s.precision, s.predicted FROM holders h "
            "JOIN specs s USING (job) WHERE NOT over OR end_at > ?",
            [at],
        )
        latest = "(FROM durations ORDER BY ended_at DESC LIMIT ?)"  # bounded, however long the history
        past = [
            {**row, "declared_s": declared_at(row["declared_s"], row["asked_gpus"], row["gpus"])}
            for row in ledger.rows(connection, f"FROM {latest} ORDER BY ended_at", [LEARNT_FROM])
        ]
        running = [_lasting(site, row) for row in ledger.rows(connection, RUNNING, [at, at])]
        observed = ledger.rows(
            connection,
            "SELECT service, arg_max(gpus, ts) AS gpus FROM demand WHERE ts > ? GROUP BY ALL",
            [at - OBSERVED_LATELY],
        )
        served = ledger.rows(connection, SERVED, [at - site.slot])
        told = ledger.rows(connection, ANNOUNCED, [at]) if site.cluster.move_cost else []
        considered = ledger.rows(connection, CONSIDERED)[0]["count"]
    demand = {row["service"]: row["gpus"] for row in observed}
    targets = {each.name: target(site.storage, each.name).gpus for each in site.cluster.services}
    before = {row["service"]: row["gpus"] for row in served}
    announced = {row["job"]: row["start_at"] for row in told}
    return State(queued, attempts, estimates(past, running), demand, targets, before, considered, announced)


def build_problem(
    site: Site,
    hour: Hour,
    state: State,
    forecasts: Mapping[str, Forecast],
    lost: set[str],
    problems: list[Degradation],
) -> Problem:
    """The planning problem of a state; what had to give is added to `problems`. Reads nothing but its
    arguments.

    Raises RuntimeError when the state makes no sound problem.
    """
    numbers = {(node.name, index): number for number, node, index in site.gpu_numbers()}
    fixed = _fixed(site, hour, state, numbers, lost, problems)
    windows = _windows(site, hour, fixed, problems)
    jobs = [
        allocator.Job(
            id=fix.job,
            kind=fix.kind,
            choices=(Choice(len(fix.gpus), end - start),),
            priority=fix.priority,
            value=fix.value,
            running=Running(start, fix.gpus),
        )
        for fix, (start, end) in windows
    ]
    held_jobs = {job.id for job in jobs}
    jobs += [
        _queued(site, hour, state, row) for row in state.queued if row["job"] not in held_jobs | state.live
    ]
    busy = {gpu for fix, (start, _) in windows if start <= 0 for gpu in fix.gpus}
    services = [
        _service(site, hour, service, forecasts, state, numbers, busy) for service in site.cluster.services
    ]
    gone = tuple(number for (node, _), number in numbers.items() if node in lost)
    holes = [Hole(gone, 0, 10 * site.plan_slots)] if gone else []  # beyond the horizon: jobs may end after it
    try:
        return Problem(
            name=hour.instant.isoformat(),
            slots=site.plan_slots,
            slot_minutes=site.cluster.slot_minutes,
            nodes=tuple(allocator.Node(n.name, n.gpus, n.gpu, n.domain) for n in site.cluster.nodes),
            jobs=tuple(jobs),
            services=tuple(services),
            unavailable=tuple(holes),
            open_end=True,
            ageing_per_slot=site.cluster.ageing_per_day * (site.slot / timedelta(days=1)),
            move_cost=site.cluster.move_cost,
        )
    except ProblemError as error:
        raise RuntimeError(f"the ledger's state makes no sound problem: {error}") from error


def _fixed(
    site: Site,
    hour: Hour,
    state: State,
    numbers: dict[tuple[str, int], int],
    lost: set[str],
    problems: list[Degradation],
) -> list[Fixed]:
    fixed = []
    for row in state.attempts:
        places, types = _places(site, row)
        retry = bool(row["over"])
        if retry and (row["last_attempt"] not in RETRIED or lost & {node for node, _ in places}):
            continue
        if any(place not in numbers for place in places):
            problems.append(Degradation("allocate", row["job"], "holds GPUs that the cluster file lacks"))
            continue
        begins = hour.begin if retry else row["started_at"] or max(row["start_at"], hour.begin)
        elapsed = max((hour.begin - begins).total_seconds(), 0.0)
        left = state.estimates.remaining_s(_profile(row, len(places), types), elapsed)
        ends = row["end_at"] if retry else max(begins, hour.begin) + timedelta(seconds=left)
        gpus = tuple(sorted(numbers[place] for place in places))
        fixed.append(Fixed(row["job"], row["kind"], gpus, begins, ends, row["value"], row["priority"], retry))
    return fixed


def _windows(
    site: Site, hour: Hour, fixed: list[Fixed], problems: list[Degradation]
) -> list[tuple[Fixed, tuple[int, int]]]:
    """Slots of each fixed attempt, (start, end).

    One whose GPUs an overrunning other still holds begins after it.
    """
    free_from: dict[int, int] = {}
    windows = []
    for fix in sorted(fixed, key=lambda fix: (fix.retry, fix.begins > hour.begin, fix.begins)):
        # Towards slot 0: a GPU promised within a slot is taken from that slot's begin on.
        start = int((fix.begins - hour.begin) / site.slot)
        length = max(math.ceil((fix.ends - hour.begin) / site.slot) - max(start, 0), 1)
        earliest = max(free_from.get(gpu, start) for gpu in fix.gpus)
        if earliest > start:
            if fix.retry or earliest >= site.plan_slots:
                problems.append(Degradation("allocate", fix.job, "its GPUs are taken; it waits for others"))
                continue
            start = max(earliest, 0)
        end = max(start, 0) + length
        for gpu in fix.gpus:
            free_from[gpu] = end
        windows.append((fix, (start, end)))
    return windows


def _places(site: Site, row: dict[str, Any]) -> tuple[list[tuple[str, int]], set[str]]:
    """The GPUs that an attempt holds, and of which types they are."""
    places = [(part["node"], gpu) for part in row["nodes"] for gpu in part["gpus"]]
    names = {name for name, _ in places}
    return places, {node.gpu for node in site.cluster.nodes if node.name in names}


def _lasting(site: Site, row: dict[str, Any]) -> dict[str, Any]:
    """A running attempt's row by the GPUs that it has, which an elastic job did not ask for first."""
    places, types = _places(site, row)
    gpus = len(places)
    declared = declared_at(row["declared_s"], row["gpus"], gpus)
    predicted = predicted_s(row["predicted"], types, gpus)
    return {**row, "gpus": gpus, "declared_s": declared, "predicted_s": predicted}


def _profile(row: dict[str, Any], gpus: int, gpu_types: Iterable[str]) -> JobProfile:
    """What an estimate may use of a job's row; a replayed job has neither tenant, work nor prediction."""
    work = work_on(row.get("work"), row.get("precision"), gpu_types)
    predicted = predicted_s(row.get("predicted"), gpu_types, gpus)
    declared = declared_at(row["duration_s"], row.get("gpus", gpus), gpus)
    return JobProfile(row["job"], row["kind"], gpus, declared, row.get("tenant"), work, predicted)


def _slots(site: Site, seconds: float) -> int:
    return max(math.ceil(timedelta(seconds=seconds) / site.slot), 1)


def _choices(site: Site, state: State, row: dict[str, Any]) -> list[tuple[Choice, int, int]]:
    """The widths that a job may have; of each, how many slots it usually takes, on the fastest type, and how
    many more a long run does.

    Where the performance model knows some widths, those that it could not fit are not offered. What it
    predicts differs by type; other estimates are those of the slowest type.
    """
    types = row["gpu_types"] or list(dict.fromkeys(node.gpu for node in site.cluster.nodes))
    known = seconds_by_place(row.get("predicted"))
    widths = row.get("widths") or [row["gpus"]]
    fitting = [width for width in widths if any((gpu, width) in known for gpu in types)]
    found = []
    for width in fitting or widths:
        apart = len(types) > 1 and all((gpu, width) in known for gpu in types)
        usual, more = {}, 0
        for group in [[gpu] for gpu in types] if apart else [types]:
            profile = _profile(row, width, group)
            usual[group[0]], long = (
                _slots(site, state.estimates.estimate_s(profile, level))
                for level in (OCCUPANCY_LEVEL, DEADLINE_LEVEL)
            )
            more = max(more, long - usual[group[0]])
        shortest = min(usual.values())
        found.append((Choice(width, tuple(usual.items()) if apart else shortest), shortest, more))
    return found


def _queued(site: Site, hour: Hour, state: State, row: dict[str, Any]) -> allocator.Job:
    choices = _choices(site, state, row)
    deadline = row["deadline_at"]
    # Submitted while this plan is being made: after its begin by the clock, and yet known to it.
    waits = row["release_at"] - hour.begin if row["release_at"] > row["submitted_at"] else timedelta(0)
    release = max(math.ceil(waits / site.slot), 0)
    if deadline is not None:
        last = math.floor((deadline - hour.begin) / site.slot)
        # Early enough for a long run, if there is time for one; else at once.
        quickest, more = min(usual for _, usual, _ in choices), max(more for _, _, more in choices)
        end = min(last, max(last - more, release + quickest))
    return allocator.Job(
        id=row["job"],
        kind=row["kind"],
        choices=tuple(choice for choice, _, _ in choices),
        priority=row["priority"],
        value=row["value"],
        release=release,
        deadline=None if deadline is None else end,
        gpu_types=tuple(row["gpu_types"] or ()),
        waited=_waited(site, hour, row),
        announced=_announced(site, hour, state.announced.get(row["job"])),
    )


def _waited(site: Site, hour: Hour, row: dict[str, Any]) -> int:
    """Slots since a job could have begun; where nothing ages, none, so that like jobs stay alike."""
    if not site.cluster.ageing_per_day:
        return 0
    waited: timedelta = hour.begin - max(row["submitted_at"], row["release_at"])
    return max(waited // site.slot, 0)


def _announced(site: Site, hour: Hour, start: datetime | None) -> Announced | None:
    """In slots of this plan, rounded up: the grid of a replan lies between those of the hours."""
    return None if start is None else Announced(max(math.ceil((start - hour.begin) / site.slot), 0))


def _service(
    site: Site,
    hour: Hour,
    service: Service,
    forecasts: Mapping[str, Forecast],
    state: State,
    numbers: dict[tuple[str, int], int],
    busy: set[int],
) -> allocator.Service:
    rows = gpu_demand_quantiles(forecasts[service.name], service.gpus_per_replica)
    # What is committed never goes below what was last observed: a forecast alone takes no GPU away.
    seen = (
        math.ceil(state.observed.get(service.name, 0.0) / service.gpus_per_replica) * service.gpus_per_replica
    )
    committed = math.ceil((hour.until - hour.begin) / site.slot)
    rows = [[max(count, seen) if at < committed else count for count in row] for at, row in enumerate(rows)]
    told = state.targets.get(service.name, {})
    current = sorted(
        numbers[node, gpu]
        for node, gpus in told.items()
        for gpu in gpus
        if (node, gpu) in numbers and numbers[node, gpu] not in busy
    )
    per_slot = math.ceil(service.ramp_per_hour * site.cluster.slot_minutes / 60)
    ramp = max(per_slot, service.gpus_per_replica)
    changed = abs(sum(map(len, told.values())) - state.before.get(service.name, 0))
    return allocator.Service(
        service=service.name,
        ramp=ramp,
        demand_quantiles=tuple(tuple(row) for row in rows),
        priority=service.priority,
        # Values are in priority × GPU-hours here, so what a GPU lacks for one slot is counted in hours too.
        shortage_penalty=service.shortage_penalty * site.cluster.slot_minutes / 60,
        current=tuple(current),
        gpus_per_replica=service.gpus_per_replica,
        # A slot's ramp is not to be had once more by each replan in it.
        ramp_first=max(ramp - changed, 0) if changed else None,
    )
