"""A job spec as its author writes it, checked.

Invariant: what passes `read_job` can be planned and run by this cluster: its id is safe as a file name, it
fits some node or whole nodes, its numbers are finite, and its value is fixed from now on.
"""

import json
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from pydantic import Field, field_validator, model_validator

from tasks.cluster import Cluster, Site
from tasks.instants import parse_duration
from tasks.specfile import Strict, read_spec

Kind = Literal["training", "batch_inference", "quantization"]
JobId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
Duration = Annotated[str, Field(max_length=40)]
MOST_WIDTHS = 16
EARLIEST, LATEST = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


class Job(Strict):
    """One spec (design: "A job"). Exactly one of the kind's own section and `command` says what to run."""

    id: JobId | None = None
    kind: Kind
    gpus: Annotated[int, Field(ge=1)]  # or a list of widths, the first of which sets the value
    widths: tuple[int, ...] | None = None  # that list, where it has several
    priority: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]
    duration: Duration
    max_duration: Duration | None = None
    deadline: datetime | None = None
    not_before: datetime | None = None
    schedule: str | None = None
    gpu_types: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    tenant: str | None = None
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    training: dict[str, Any] | None = None
    batch_inference: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _elastic(cls, data: Any) -> Any:
        """`gpus: [8, 16, 32]` is the width 8, and the choice of all three."""
        if not isinstance(data, dict) or not isinstance(data.get("gpus"), list):
            return data
        widths = data["gpus"]
        whole = all(isinstance(width, int) and not isinstance(width, bool) and width >= 1 for width in widths)
        if not whole or not 1 <= len(set(widths)) == len(widths) <= MOST_WIDTHS:
            expected = f"expected a whole number, or up to {MOST_WIDTHS} different ones such as [8, 16]"
            raise ValueError(f"gpus: {widths!r:.80}: {expected}")
        return {**data, "gpus": widths[0], **({"widths": widths} if len(widths) > 1 else {})}

    @model_validator(mode="after")
    def _first_width(self) -> Self:
        if self.widths is not None and (
            not self.widths or self.widths[0] != self.gpus or min(self.widths) < 1
        ):
            raise ValueError("widths: expected those that gpus lists; write gpus: [8, 16, 32]")
        return self

    @field_validator("duration", "max_duration")
    @classmethod
    def _duration(cls, value: str | None) -> str | None:
        if value is not None and not timedelta(0) < parse_duration(value) <= timedelta(days=365):
            raise ValueError("expected a duration above 0 and at most 365d")
        return value

    @field_validator("deadline", "not_before")
    @classmethod
    def _instant(cls, value: datetime | None) -> datetime | None:
        if value is None:
            return None
        value = value.replace(tzinfo=UTC) if value.tzinfo is None else value
        if not EARLIEST <= value <= LATEST:
            raise ValueError("expected an instant between the years 2000 and 2200")
        return value.astimezone(UTC)

    @field_validator("schedule")
    @classmethod
    def _schedule(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                CronSim(value, EARLIEST)
            except CronSimError as error:
                raise ValueError(f"expected five cron fields such as '0 2 * * *': {error}") from None
            if len(value.split()) != 5:  # a sixth would be seconds
                raise ValueError("expected five cron fields such as '0 2 * * *'")
        return value

    @field_validator("training", "batch_inference", "quantization")
    @classmethod
    def _plain(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError) as error:
            raise ValueError(f"expected texts, finite numbers, lists and keys: {error}") from None
        return value

    @model_validator(mode="after")
    def _one_program(self) -> Self:
        given = [name for name in (*KIND_SECTIONS, "command") if getattr(self, name) is not None]
        if given not in ([self.kind], ["command"]):
            found = " and ".join(given) or "none"
            raise ValueError(f"expected one section, {self.kind}: or command:, found {found}")
        if self.schedule is not None and self.id is None:
            raise ValueError("a recurring job needs an id, from which its occurrences are named")
        return self

    @property
    def seconds(self) -> float:
        """Declared duration."""
        return parse_duration(self.duration).total_seconds()

    @property
    def max_seconds(self) -> float | None:
        """Where the runner ends the job, if anywhere."""
        return parse_duration(self.max_duration).total_seconds() if self.max_duration else None

    @property
    def value(self) -> float:
        """Worth when done: priority × declared GPU-hours (design: "Worth")."""
        return self.priority * self.gpus * self.seconds / 3600


KIND_SECTIONS: tuple[Kind, ...] = ("training", "batch_inference", "quantization")


def read_job(content: str | bytes, name: str, site: Site) -> Job:
    """The job in a spec file. Raises SpecError with one line for each problem."""
    return read_spec(Job, content, name, lambda job: misfit(job, site.cluster))


def misfit(job: Job, cluster: Cluster) -> str | None:
    """Why no empty cluster could hold the job as it is asked for, or None. Says what would fit."""
    for field in ("deadline", "not_before"):
        if job.schedule is not None and getattr(job, field) is not None:
            return f"{field}: is one instant, and a recurring job has many occurrences; leave it out"
    known = {node.gpu for node in cluster.nodes}
    for gpu in job.gpu_types or ():
        if gpu not in known:
            return f"gpu_types: no node has {gpu}; the cluster has {', '.join(sorted(known))}"
    found = (width_misfit(width, cluster, job.gpu_types or ()) for width in job.widths or (job.gpus,))
    return next(filter(None, found), None)


def width_misfit(gpus: int, cluster: Cluster, gpu_types: Collection[str] = ()) -> str | None:
    """Why so many GPUs (of these types, if any) fit neither a node nor a gang of whole ones, or None."""
    nodes = [node for node in cluster.nodes if not gpu_types or node.gpu in gpu_types]
    widest = max(node.gpus for node in nodes)
    if gpus <= widest:
        return None
    groups: dict[tuple[str, str | None], list[int]] = {}
    for node in nodes:
        groups.setdefault((node.gpu, node.domain), []).append(node.gpus)
    # A gang takes whole nodes: the sums that whole nodes of one type and domain can make.
    sums: set[int] = set()
    for sizes in groups.values():
        reachable = {0}
        for size in sizes:
            reachable |= {total + size for total in reachable}
        sums |= reachable
    if gpus in sums:
        return None
    wider = sorted(total for total in sums if total > widest)
    use = f"at most {widest}" + (f", or {', '.join(map(str, wider[:8]))} for whole nodes" if wider else "")
    return f"gpus: {gpus} does not fit any node (the widest has {widest} GPUs) nor whole nodes; use {use}"


def occurrences(schedule: str, after: datetime, until: datetime, zone: str) -> list[datetime]:
    """The instants of a cron schedule in (after, until]; its fields are read in `zone`."""
    found: list[datetime] = []
    for local in CronSim(schedule, after.astimezone(ZoneInfo(zone))):
        instant = local.astimezone(UTC)
        if instant > until:
            break
        # From within the hour that autumn repeats, CronSim gives what has been a second time.
        if instant > (found[-1] if found else after):
            found.append(instant)
    return found
