"""The planning problem: what a cluster has, what it must serve and what it is asked to run.

Everything here is a frozen dataclass of tuples, so a problem can be hashed, compared, shared between
threads and never changes under a solver. A problem that exists is a problem that makes sense: every
dataclass validates itself when it is built, and the message names the job, the field, the value and what
was expected. What merely went wrong in the cluster (a running job on a failed GPU, a deadline that has
passed, a service whose GPU is taken) is not a mistake in the problem: it is planned around, and the plan
warns.

Where the format leaves room, this is how it is read:

* **Ageing.** The worth a plan sees is ``value × (1 + ageing_per_slot × waited)``. The value that is
  reported and recorded never changes.
* **Moving an announced start.** A job that was announced costs ``move_cost`` (in units of worth, once) when
  it starts later than announced or not at all. Starting earlier is free, so that a plan is never held back
  by its own promises; announced GPUs are a preference without a cost. An announcement beyond the horizon
  costs nothing.
* **Tenants.** A job no longer than its tenant's ``borrow_slots`` may take any idle GPU, because it gives it
  back in time. A longer one counts against the guarantee in every slot it runs, together with the tenant's
  longer running jobs. Jobs of tenants without an entry, or without a tenant, share the GPUs that nobody is
  guaranteed, and never borrow. Running jobs are counted and never refused. Without tenants there is no rule.
* **Reservations.** In each of its slots, the part of a reservation that its tenant does not use is held: a
  job of another tenant may run only if all that is used (running and planned jobs, services) plus all
  that is held for tenants other than its own fits in the GPUs in service. Running jobs and services do not
  yield.
* **Replicas.** A service holds whole replicas: ``gpus_per_replica`` consecutive GPUs of one node.
* **Running.** ``start`` is negative or 0 for a job at work. It may also lie in the future: then the start is
  committed and as fixed as if it had happened. A job at work holds its GPUs for slot 0 at least, even
  when its declared slots have run out.

The cost of the choice: a problem built in Python pays for its checks (about 2 µs a job) even when the
caller knows that it is right.
"""

from __future__ import annotations  # no annotation is evaluated, so typing is never loaded: 8 ms of import

from dataclasses import dataclass
from functools import cached_property

from allocator.fields import (
    ProblemError,
    as_tuple,
    distinct_gpus,
    in_cluster,
    number,
    quantile_row,
    text,
    unique,
    whole,
    window,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_INFINITE = float("inf")
_set = object.__setattr__  # the way into a frozen dataclass while it is being built


@dataclass(frozen=True, slots=True)
class Node:
    """One NVLink domain: ``gpus`` GPUs of one type, numbered after those of the nodes before it.

    Args:
        name: unique in the problem.
        gpus: at least 1.
        gpu: the GPU type, such as ``H100``; jobs may ask for it.
        domain: what the nodes of a gang must share, such as a rack.
    """

    name: str
    gpus: int
    gpu: str | None = None
    domain: str | None = None

    def __post_init__(self) -> None:
        text(f"node {self.name!r}", "name", self.name)
        whole(f"node {self.name}", "gpus", self.gpus, 1)


@dataclass(frozen=True, slots=True)
class Choice:
    """A width that a job accepts and how long it takes on it.

    Args:
        gpus: at least 1.
        slots: at least 1, the same on every type, or one number for each type that the job can use
            (a mapping, kept as pairs in its order; the first type sets the value of the job).
    """

    gpus: int
    slots: int | tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if type(self.gpus) is int and type(self.slots) is int and self.gpus > 0 and self.slots > 0:
            return
        whole("choice", "gpus", self.gpus, 1)
        if isinstance(self.slots, dict):
            _set(self, "slots", tuple(self.slots.items()))
        if isinstance(self.slots, tuple):
            if not self.slots:
                raise ProblemError("slots: {} is empty; expected a whole number for each GPU type")
            for gpu, slots in self.slots:
                whole("slots", str(gpu), slots, 1)
        else:
            whole("choice", "slots", self.slots, 1)

    def slots_on(self, gpu: str | None) -> int | None:
        """Slots on a node of type ``gpu``; None when the job does not run there."""
        if isinstance(self.slots, int):
            return self.slots
        for name, slots in self.slots:
            if name == gpu:
                return slots
        return None

    @property
    def first_slots(self) -> int:
        """Slots on the first type."""
        return self.slots if isinstance(self.slots, int) else self.slots[0][1]


@dataclass(frozen=True, slots=True)
class Running:
    """Where a started (or committed) job is: its start slot, counted from now, and its GPUs."""

    start: int
    gpus: tuple[int, ...]

    def __post_init__(self) -> None:
        _set(self, "gpus", as_tuple("running", "gpus", self.gpus))
        whole("running", "start", self.start)
        distinct_gpus("running", "gpus", self.gpus)
        if not self.gpus:
            raise ProblemError("running: gpus: [] is empty; expected the GPUs that the job holds")


@dataclass(frozen=True, slots=True)
class Announced:
    """The start, and if known the GPUs, that the last plan told people about."""

    start: int
    gpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _set(self, "gpus", as_tuple("announced", "gpus", self.gpus))
        whole("announced", "start", self.start)
        distinct_gpus("announced", "gpus", self.gpus)


@dataclass(frozen=True, slots=True)
class Job:
    """Work that holds GPUs for a number of slots without a gap and earns its value when it completes.

    Args:
        id: unique in the problem.
        choices: the widths it accepts, at least one; the first sets the value.
        kind: what it is, for people and colours.
        priority: worth of a GPU-slot, 0 or more.
        value: worth of the whole job, 0 or more; ``priority × gpus × slots`` of the first choice when absent.
        release: first slot it may start in.
        deadline: the slot by whose beginning it must have ended; may have passed, then it is not placed.
        gpu_types: the types it runs on; empty for any.
        tenant: whose guarantee or reservation it uses.
        running: set for started and committed jobs, which do not move.
        waited: slots it has waited so far, for ageing.
        announced: the start that people were told.
    """

    id: str
    choices: tuple[Choice, ...]
    kind: str = "training"
    priority: float = 1
    value: float | None = None
    release: int = 0
    deadline: int | None = None
    gpu_types: tuple[str, ...] = ()
    tenant: str | None = None
    running: Running | None = None
    waited: float = 0
    announced: Announced | None = None

    def __post_init__(self) -> None:
        # One test lets a sound job through in half a microsecond; only others are looked at field by field.
        value, priority = self.value, self.priority
        if not (
            type(self.id) is str
            and self.id
            and type(self.choices) is tuple
            and self.choices
            and (type(priority) is int or type(priority) is float)
            and 0 <= priority < _INFINITE
            and type(self.release) is int
            and self.release >= 0
            and (value is None or ((type(value) is int or type(value) is float) and 0 <= value < _INFINITE))
            and (self.deadline is None or type(self.deadline) is int)
            and type(self.gpu_types) is tuple
            and type(self.waited) is int
            and self.waited >= 0
        ):
            self._check_fields()
        if self.running is not None and not any(c.gpus == len(self.running.gpus) for c in self.choices):
            widths = " or ".join([str(c.gpus) for c in self.choices])
            raise ProblemError(
                f"job {self.id}: running: holds {len(self.running.gpus)} GPUs; expected {widths}"
            )

    def _check_fields(self) -> None:
        text("job", "id", self.id)
        who = f"job {self.id}"
        _set(self, "choices", as_tuple(who, "choices", self.choices))
        _set(self, "gpu_types", as_tuple(who, "gpu_types", self.gpu_types))
        if not self.choices:
            raise ProblemError(f"{who}: choices: [] is empty; expected at least one of {{gpus, slots}}")
        number(who, "priority", self.priority)
        number(who, "waited", self.waited)
        if self.value is not None:
            number(who, "value", self.value)
        whole(who, "release", self.release, 0)
        if self.deadline is not None:
            whole(who, "deadline", self.deadline)

    @property
    def full_value(self) -> float:
        """What it earns when it completes in time."""
        if self.value is not None:
            return self.value
        return self.priority * self.choices[0].gpus * self.choices[0].first_slots


@dataclass(frozen=True, slots=True)
class Service:
    """A real-time service: GPUs that follow a demand, no faster than a ramp.

    Args:
        service: its name, unique in the problem.
        ramp: most GPUs that its count changes by between slots.
        demand: GPUs wanted in each slot, or
        demand_quantiles: ten GPU counts for each slot, the quantiles .05, .15, … .95 of what may be wanted.
            The shortage is then the mean over the ten.
        priority, shortage_penalty: a missing GPU costs their product per slot.
        current: the GPUs it holds now; a number when only the count is known; None when nothing is known and
            it may take any count in slot 0.
        gpus_per_replica: consecutive GPUs that one replica needs; the count is a multiple of it.
        ramp_first: the ramp of slot 0, where the count has already changed within the slot that is under way
            and less may follow; the usual ramp when absent.
    """

    service: str
    ramp: int
    demand: tuple[int, ...] | None = None
    demand_quantiles: tuple[tuple[int, ...], ...] | None = None
    priority: float = 1
    shortage_penalty: float = 5
    current: tuple[int, ...] | int | None = None
    gpus_per_replica: int = 1
    ramp_first: int | None = None

    def __post_init__(self) -> None:
        text(f"service {self.service!r}", "service", self.service)
        who = f"service {self.service}"
        whole(who, "ramp", self.ramp, 0)
        whole(who, "gpus_per_replica", self.gpus_per_replica, 1)
        number(who, "priority", self.priority)
        number(who, "shortage_penalty", self.shortage_penalty)
        if 0 < self.ramp < self.gpus_per_replica:
            raise ProblemError(
                f"{who}: ramp: {self.ramp} is less than one replica; expected at least gpus_per_replica "
                f"({self.gpus_per_replica}), or 0 to keep the count as it is"
            )
        if self.ramp_first is not None:
            whole(who, "ramp_first", self.ramp_first, 0)
            if self.current is None:
                raise ProblemError(
                    f"{who}: ramp_first: {self.ramp_first} counts from current; expected current as well"
                )
        if (self.demand is None) == (self.demand_quantiles is None):
            raise ProblemError(f"{who}: expected either demand or demand_quantiles")
        if self.demand is not None:
            _set(self, "demand", as_tuple(who, "demand", self.demand))
            for slot, count in enumerate(self.demand):
                if type(count) is not int or count < 0:
                    whole(who, f"demand of slot {slot}", count, 0)
        else:
            rows = as_tuple(who, "demand_quantiles", self.demand_quantiles)
            _set(self, "demand_quantiles", tuple(quantile_row(who, t, row) for t, row in enumerate(rows)))
        if self.current is not None and type(self.current) is not int:
            _set(self, "current", as_tuple(who, "current", self.current))
            distinct_gpus(who, "current", self.current)  # type: ignore[arg-type]
        elif type(self.current) is int:
            whole(who, "current", self.current, 0)

    @property
    def penalty(self) -> float:
        """Cost of one missing GPU for one slot."""
        return self.priority * self.shortage_penalty

    def ramp_at(self, slot: int) -> int:
        """Most GPUs that its count changes by at the beginning of a slot."""
        return self.ramp if slot or self.ramp_first is None else self.ramp_first

    def wanted(self, slot: int) -> tuple[int, ...]:
        """The equally likely demands of a slot: one number, or ten quantiles."""
        if self.demand is not None:
            return (self.demand[slot],)
        assert self.demand_quantiles is not None
        return self.demand_quantiles[slot]

    def shortage(self, slot: int, gpus: int) -> float:
        """GPUs missing in a slot when it holds ``gpus``; with quantiles, the expected number."""
        if self.demand is not None:
            return max(0, self.demand[slot] - gpus)
        assert self.demand_quantiles is not None
        row = self.demand_quantiles[slot]
        if gpus >= row[-1]:
            return 0
        return sum(want - gpus for want in row if want > gpus) / len(row)


@dataclass(frozen=True, slots=True)
class Hole:
    """GPUs out of service from slot ``start`` to before ``end`` (``from`` and ``to`` in a file)."""

    gpus: tuple[int, ...]
    start: int
    end: int

    def __post_init__(self) -> None:
        _set(self, "gpus", as_tuple("unavailable", "gpus", self.gpus))
        distinct_gpus("unavailable", "gpus", self.gpus)
        window("unavailable", self.start, self.end)


@dataclass(frozen=True, slots=True)
class Reservation:
    """A number of GPUs held for a tenant's jobs from slot ``start`` up to, not including, slot ``end``."""

    gpus: int
    start: int
    end: int
    tenant: str

    def __post_init__(self) -> None:
        text("reservation", "tenant", self.tenant)
        whole(f"reservation for {self.tenant}", "gpus", self.gpus, 1)
        window(f"reservation for {self.tenant}", self.start, self.end)


@dataclass(frozen=True, slots=True)
class Tenant:
    """A guaranteed number of GPUs, and the longest job that may run beyond it on idle ones."""

    name: str
    gpus: int
    borrow_slots: int = 0

    def __post_init__(self) -> None:
        text(f"tenant {self.name!r}", "name", self.name)
        whole(f"tenant {self.name}", "gpus", self.gpus, 0)
        whole(f"tenant {self.name}", "borrow_slots", self.borrow_slots, 0)


@dataclass(frozen=True)
class Problem:
    """A planning problem: see the module docstring and each part.

    Args:
        slots: the horizon, at least 1.
        nodes: at least one; GPUs are numbered across them in order.
        open_end: a job may end after the horizon and then counts in proportion to its slots inside it.
        ageing_per_slot: share by which worth rises for each slot waited, 0 or more.
        move_cost: cost of starting a job later than announced, 0 or more.

    Raises:
        ProblemError: naming the part, the field, the value and what was expected.
    """

    slots: int
    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...] = ()
    services: tuple[Service, ...] = ()
    unavailable: tuple[Hole, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    open_end: bool = False
    ageing_per_slot: float = 0
    move_cost: float = 0
    slot_minutes: int = 10
    name: str = "problem"

    def __post_init__(self) -> None:
        for field in ("nodes", "jobs", "services", "unavailable", "reservations", "tenants"):
            if type(getattr(self, field)) is not tuple:
                _set(self, field, as_tuple("problem", field, getattr(self, field)))
        whole("problem", "slots", self.slots, 1)
        whole("problem", "slot_minutes", self.slot_minutes, 1, 60)
        number("problem", "ageing_per_slot", self.ageing_per_slot)
        number("problem", "move_cost", self.move_cost)
        if type(self.open_end) is not bool:
            raise ProblemError(f"problem: open_end: {self.open_end!r}; expected true or false")
        if not self.nodes:
            raise ProblemError("problem: nodes: [] is empty; expected at least one node")
        unique("node", "name", [node.name for node in self.nodes])
        unique("job", "id", [job.id for job in self.jobs])
        unique("service", "service", [service.service for service in self.services])
        unique("tenant", "name", [tenant.name for tenant in self.tenants])
        _check_jobs(self)
        _check_services(self)
        for hole in self.unavailable:
            in_cluster("unavailable", "gpus", hole.gpus, self.total_gpus)
        for reservation in self.reservations:
            if reservation.gpus > self.total_gpus:
                raise ProblemError(
                    f"reservation for {reservation.tenant}: gpus: {reservation.gpus}; "
                    f"expected at most the {self.total_gpus} of the cluster"
                )
        guaranteed = sum(tenant.gpus for tenant in self.tenants)
        if guaranteed > self.total_gpus:
            raise ProblemError(
                f"tenants: {guaranteed} GPUs are guaranteed; "
                f"expected at most the {self.total_gpus} of the cluster"
            )

    @cached_property
    def total_gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @cached_property
    def first_gpu(self) -> tuple[int, ...]:
        """Number of the first GPU of each node."""
        first, at = [], 0
        for node in self.nodes:
            first.append(at)
            at += node.gpus
        return tuple(first)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """Index of the node of each GPU."""
        return tuple(k for k, node in enumerate(self.nodes) for _ in range(node.gpus))

    @cached_property
    def gpu_types(self) -> tuple[str | None, ...]:
        """The types of the nodes, each once, in the order of the nodes."""
        return tuple(dict.fromkeys(node.gpu for node in self.nodes))

    @cached_property
    def job_by_id(self) -> dict[str, Job]:
        return {job.id: job for job in self.jobs}

    def worth(self, job: Job) -> float:
        """What a plan sees in a job that completes in time: its value, raised by its waiting."""
        if self.ageing_per_slot and job.waited:
            return job.full_value * (1 + self.ageing_per_slot * job.waited)
        return job.full_value

    def accepts(self, job: Job, node: Node) -> bool:
        """Whether the job runs on the node's type."""
        return not job.gpu_types or node.gpu in job.gpu_types

    def running_slots(self, job: Job) -> int:
        """Slots of a running job: those of the choice as wide as what it holds, on the type that it is on."""
        assert job.running is not None
        gpu = self.nodes[self.node_of[job.running.gpus[0]]].gpu
        for choice in job.choices:
            if choice.gpus == len(job.running.gpus):
                slots = choice.slots_on(gpu)
                if slots is not None:
                    return slots
        raise ProblemError(
            f"job {job.id}: running: on GPUs of type {gpu}; expected one of those in its slots"
        )

    def running_window(self, job: Job) -> tuple[int, int]:
        """Slots (from, to) in which a running job holds its GPUs, at least slot 0 when it has begun."""
        assert job.running is not None
        end = job.running.start + self.running_slots(job)
        return max(job.running.start, 0), max(end, 1)

    def move_cost_of(self, job: Job, start: int | None) -> float:
        """What a start (None: no start) costs against the one announced."""
        if not self.move_cost or job.announced is None or job.running is not None:
            return 0
        told = max(job.announced.start, 0)
        return self.move_cost if told < self.slots and (start is None or start > told) else 0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Problem:
        """Build a problem from what a YAML file holds; an unknown key is an error."""
        from allocator.reading import problem_from_dict

        return problem_from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """The problem as a YAML file would hold it; ``from_dict`` gives an equal problem back."""
        from allocator.reading import problem_to_dict

        return problem_to_dict(self)


# What must hold between the parts


def _check_jobs(problem: Problem) -> None:
    total = problem.total_gpus
    holders: dict[int, list[tuple[int, int, str]]] = {}
    for job in problem.jobs:
        if job.announced is not None:
            in_cluster(f"job {job.id}", "announced gpus", job.announced.gpus, total)
        if job.running is None:
            for choice in job.choices:
                if choice.gpus > total:
                    raise ProblemError(
                        f"job {job.id}: gpus: {choice.gpus}; expected at most the {total} of the cluster"
                    )
            continue
        in_cluster(f"job {job.id}", "running gpus", job.running.gpus, total)
        types = {problem.nodes[problem.node_of[gpu]].gpu for gpu in job.running.gpus}
        if len(types) > 1:
            raise ProblemError(
                f"job {job.id}: running: on GPUs of types {sorted(map(str, types))}; expected one type"
            )
        start, end = problem.running_window(job)
        for gpu in job.running.gpus:
            for other_start, other_end, other in holders.setdefault(gpu, []):
                if start < other_end and other_start < end:
                    raise ProblemError(
                        f"job {job.id}: running: GPU {gpu} is held by running job {other} too; expected one"
                    )
            holders[gpu].append((start, end, job.id))


def _check_services(problem: Problem) -> None:
    holder: dict[int, str] = {}
    for service in problem.services:
        who = f"service {service.service}"
        for field, rows in (("demand", service.demand), ("demand_quantiles", service.demand_quantiles)):
            if rows is not None and len(rows) != problem.slots:
                raise ProblemError(
                    f"{who}: {field}: has {len(rows)} entries; expected one for each of {problem.slots} slots"
                )
        if isinstance(service.current, tuple):
            in_cluster(who, "current", service.current, problem.total_gpus)
            for gpu in service.current:
                if gpu in holder:
                    raise ProblemError(
                        f"{who}: current: GPU {gpu} is current in service {holder[gpu]} too; expected one"
                    )
                holder[gpu] = service.service
