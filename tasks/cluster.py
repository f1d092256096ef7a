"""The cluster file: nodes, real-time services, how time is cut and where things lie.

Read once at the start of each flow run. Unknown keys are errors. Paths in it are relative to the file itself.
"""

import zoneinfo
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from tasks.specfile import SpecError, Strict, read_spec
from tasks.storage import S3_URL, Storage, open_storage

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=63)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Node(Strict):
    """One machine, one NVLink domain. `gpu: cpu` offers virtual GPUs: shares of the machine's processor."""

    name: Name
    gpus: Annotated[int, Field(ge=1, le=1024)]
    gpu: str = "cpu"
    domain: str | None = None
    price_per_gpu_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    address: str = "127.0.0.1"


class DemandSource(Strict):
    """Where a service's load is read: a growing file (columns `ts`, `y`), or a Prometheus range query."""

    file: str | None = None
    prometheus: str | None = None
    query: str | None = None
    unit: Literal["requests_per_s", "gpus"] = "requests_per_s"
    sample_minutes: Annotated[int, Field(ge=1, le=1440)] = 60

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.file is None) == (self.prometheus is None):
            raise ValueError("expected either file: or prometheus: (with query:)")
        if self.prometheus is not None and not self.query:
            raise ValueError("prometheus: needs query:")
        return self


class Target(Strict):
    """How a service hears of its GPUs and says what it holds.

    With `webhook` the target is also posted there, and the answer may carry the acknowledgement
    `{"version": …, "gpus": {…}}`. Either way the target is written to storage as
    `serving/<service>/target.json`, and the service may acknowledge with `serving/<service>/observed.json`.
    """

    webhook: str | None = None


class Latency(Strict):
    """What a service promises, from which its GPUs follow by queueing theory (`sizing`).

    `share` of the requests are answered within `target_s`; one takes `service_s` on average, as measured when
    a replica works on `at_once` requests at the same time.
    """

    target_s: Positive
    service_s: Positive
    at_once: Annotated[int, Field(ge=1)] = 1
    share: Annotated[float, Field(gt=0, lt=1)] = 0.95

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.target_s < self.service_s:
            raise ValueError(
                f"target_s: {self.target_s:g} is below service_s: {self.service_s:g}; expected more"
            )
        return self


class Service(Strict):
    """A real-time service. `ramp_per_hour` is in GPUs, `shortage_penalty` in multiples of batch work.

    Requests become GPUs by `requests_per_gpu_hour`, or by `latency`.
    """

    name: Name
    demand: DemandSource
    requests_per_gpu_hour: Positive = 1.0
    latency: Latency | None = None
    expected_gpus: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    ramp_per_hour: Positive
    priority: Positive
    shortage_penalty: Positive = 8.0
    gpus_per_replica: Annotated[int, Field(ge=1)] = 1
    target: Target = Target()

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.latency is not None and "requests_per_gpu_hour" in self.model_fields_set:
            raise ValueError("latency: expected either this or requests_per_gpu_hour")
        if self.latency is not None and self.demand.unit == "gpus":
            raise ValueError("latency: needs demand in requests; its unit is gpus")
        return self


class Cluster(Strict):
    """The whole file. `plan_slots` and `season_slots` default to 24 hours.

    `forecasters` adds to the built-in ones (`tournament`): a name, and its function as module:function.

    A job that has not begun `start_timeout_minutes` after its start goes back to the queue. Workers and
    runners renew a lease three times in `lease_seconds`; one that is four times as old counts as lost.

    `ageing_per_day` is the share by which plans see a queued job's worth rise for each day that it waits, so
    that work of low priority is not put off for ever: with 0.5, a job of priority 2 is worth as much as a new
    one of priority 4 after two days. 0 turns it off. The value that is recorded never changes.

    `move_cost` is what a plan must gain, in priority × GPU-hours, to start a queued job later than the
    latest hourly plan announced, or to leave it out. 0 lets starts that are not committed move freely.
    """

    name: Name
    storage: str = "file:.slotwise/storage"
    state: str = ".slotwise"
    time_zone: str = "UTC"
    slot_minutes: Annotated[int, Field(ge=1, le=60)] = 10
    plan_every_minutes: Annotated[int, Field(ge=1, le=1440)] = 60
    replan_every_seconds: Annotated[int, Field(ge=5, le=3600)] = 60
    plan_slots: Annotated[int, Field(ge=1, le=2016)] | None = None
    season_slots: Annotated[int, Field(ge=1, le=2016)] | None = None
    forecasters: dict[Name, Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]] = Field(default_factory=dict)
    full_mode_seconds: Annotated[float, Field(ge=0, le=3600)] = 5.0
    ageing_per_day: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.0
    move_cost: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0
    start_timeout_minutes: Annotated[float, Field(gt=0, le=1440)] = 10.0
    lease_seconds: Annotated[float, Field(ge=1, le=600)] = 10.0
    pack_after_days: Annotated[int, Field(ge=2, le=3650)] = 7
    keep_details_days: Annotated[int, Field(ge=2, le=3650)] = 60
    nodes: Annotated[tuple[Node, ...], Field(min_length=1)]
    services: tuple[Service, ...] = ()

    @field_validator("time_zone")
    @classmethod
    def _zone(cls, value: str) -> str:
        try:
            zoneinfo.ZoneInfo(value)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError("expected a time zone such as UTC or Europe/Berlin") from None
        return value

    @field_validator("storage")
    @classmethod
    def _storage(cls, value: str) -> str:
        path = value.removeprefix("file://").removeprefix("file:")
        if not path or ("://" in path and not S3_URL.fullmatch(value)):
            raise ValueError("expected file:DIRECTORY or s3://bucket/prefix")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.plan_every_minutes % self.slot_minutes and self.slot_minutes % self.plan_every_minutes:
            raise ValueError(
                f"plan_every_minutes: {self.plan_every_minutes} is neither a multiple nor a divisor of "
                f"slot_minutes: {self.slot_minutes}"
            )
        for what, names in (
            ("node", [n.name for n in self.nodes]),
            ("service", [s.name for s in self.services]),
        ):
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"two {what}s are named {name}; names are unique")
        return self


@dataclass(frozen=True)
class Site:
    """A cluster file that was read: the cluster, and its paths made absolute."""

    file: Path
    cluster: Cluster

    @property
    def storage_root(self) -> str:
        """The storage's root as `open_storage` takes it."""
        root = self.cluster.storage
        if S3_URL.fullmatch(root):
            return root
        return str((self.file.parent / root.removeprefix("file://").removeprefix("file:")).resolve())

    @property
    def state(self) -> Path:
        """Directory on this machine's own disk: the ledger, server data, process ids, logs."""
        return (self.file.parent / self.cluster.state).resolve()

    @property
    def storage(self) -> Storage:
        """The opened storage."""
        return open_storage(self.storage_root)

    @property
    def slot(self) -> timedelta:
        """Length of a slot."""
        return timedelta(minutes=self.cluster.slot_minutes)

    @property
    def plan_every(self) -> timedelta:
        """Time between two plans."""
        return timedelta(minutes=self.cluster.plan_every_minutes)

    @property
    def lost_after(self) -> timedelta:
        """Age of a lease at which its holder counts as lost. A runner ends its own work at half of it."""
        return timedelta(seconds=4 * self.cluster.lease_seconds)

    @property
    def plan_slots(self) -> int:
        """Slots in the horizon: as stated, or 24 hours' worth."""
        return self.cluster.plan_slots or 24 * 60 // self.cluster.slot_minutes

    @property
    def season_slots(self) -> int:
        """Slots after which the load repeats itself: as stated, or 24 hours' worth."""
        return self.cluster.season_slots or 24 * 60 // self.cluster.slot_minutes

    def gpu_numbers(self) -> Iterator[tuple[int, Node, int]]:
        """(number within a problem, node, index on the node) of every GPU, nodes in file order."""
        number = 0
        for node in self.cluster.nodes:
            for index in range(node.gpus):
                yield number, node, index
                number += 1


def load_site(file: str | Path) -> Site:
    """Read a cluster file. Raises SpecError with one line for each problem."""
    path = Path(file)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    return Site(path.absolute(), read_spec(Cluster, content, str(path), partial(_no_directory, path)))


def _no_directory(file: Path, cluster: Cluster) -> str | None:
    """Which path of the file is something else than a directory, in words."""
    site = Site(file.absolute(), cluster)
    for field, value, path in (
        ("storage", cluster.storage, Path(site.storage_root)),
        ("state", cluster.state, site.state),
    ):
        if not S3_URL.fullmatch(value) and path.exists() and not path.is_dir():
            return f"{field}: {value!r}: {path} is a file; expected a directory, or a name that is free"
    return None
