"""Take in what people left: job specs, recurring jobs that are due, cancel requests.

Invariant: a file leaves the inbox only after its fact, or its rejection, stands in storage; a process that
dies in between leaves the file, and the next one finds that the fact is there. One bad file never stops the
others.
"""

import contextlib
import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from tasks import faults
from tasks.cluster import Site
from tasks.facts import FactError, fact_key, read_json, write_fact
from tasks.instants import text
from tasks.jobs import Job, occurrences, read_job
from tasks.predicted import Predictions, predictions_of
from tasks.specfile import SpecError
from tasks.storage import UNUSABLE, NotFoundError, Storage, StorageError, written_together
from tasks.work import Amount, amount_of

MOST_KEPT = 16 << 20  # bytes of a bad spec that are kept beside their rejection
FINAL_STATES = ("completed", "failed", "cancelled", "expired")


@dataclass(frozen=True)
class Received:
    """Ids of the jobs taken in, names of files refused, (name, reason) of files that could not be read."""

    jobs: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()


def take_specs(site: Site, known: dict[str, str], now: datetime) -> Received:
    """Turn every file in the inbox into a fact or a rejection.

    `known` maps the ids that are taken to the hash of the file each came from.
    """
    storage = site.storage
    known = dict(known)
    jobs, rejected, unread, taken = [], [], [], []
    with written_together():
        for key in storage.keys("inbox/"):
            name = key.removeprefix("inbox/")
            try:
                content = storage.read(key, MOST_KEPT)
                if not content.strip() and not storage.settled(key):
                    continue  # opened by whoever writes it, and not written yet
                try:
                    identity, digest = _take_spec(site, name, content, known, now)
                    known[identity] = digest
                    jobs.append(identity)
                except SpecError as error:
                    _reject(storage, name, content, str(error), now)
                    rejected.append(name)
                taken.append((key, _digest(name, content)))
            except NotFoundError:  # whoever left it took it back
                continue
            except Exception as error:  # whatever is wrong with one file, the others go on
                unread.append((name, _said(error)))
    for key, digest in taken:
        name = key.removeprefix("inbox/")
        try:
            if _digest(name, storage.read(key, MOST_KEPT)) == digest:  # else another file came in its place
                storage.delete(key)
        except NotFoundError:
            continue
        except StorageError as error:
            unread.append((name, _said(error)))
    return Received(tuple(jobs), tuple(rejected), tuple(unread))


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"


def _digest(name: str, content: bytes) -> str:
    return hashlib.sha256(name.encode() + b"\0" + content).hexdigest()


def _take_spec(
    site: Site, name: str, content: bytes, known: dict[str, str], now: datetime
) -> tuple[str, str]:
    """Record one spec; its id and the hash of its file. Raises SpecError."""
    job = read_job(content, name, site)
    digest = _digest(name, content)
    identity = job.id or f"{job.kind.replace('_', '-')}-{digest[:8]}"
    fact = fact_key("spec", now, identity)
    work = predicted = None
    if not job.schedule and identity not in known:
        work, predicted = amount_of(job, site.storage), predictions_of(job, site.cluster, site.storage)
    body = spec_fact(job, identity, name, digest, now, work=work, predicted=predicted)
    if identity in known:
        taken = known[identity]
    elif write_fact(site.storage, fact, now, body):
        taken = digest
    else:
        taken = str(read_json(site.storage, fact)["sha256"])
    if taken != digest:  # the same digest: this very file, and its taker died before deleting it
        raise SpecError(f"{name}: id: {identity} is taken by an earlier job; use another id")
    faults.point("inbox.recorded")
    return identity, digest


def spec_fact(
    job: Job,
    identity: str,
    source: str,
    digest: str,
    now: datetime,
    occurrence: datetime | None = None,
    work: Amount | None = None,
    predicted: Predictions | None = None,
) -> dict[str, Any]:
    """What is recorded of a job that is taken in; `occurrence` is set for one of a recurring job."""
    release = occurrence or max(job.not_before or now, now)
    return {
        "job": identity,
        "template": job.id if occurrence else None,
        "schedule": None if occurrence else job.schedule,
        "spec": job.model_dump(mode="json"),
        "value": job.value,
        "duration_s": job.seconds,
        "max_duration_s": job.max_seconds,
        "release": text(release),
        "deadline": text(job.deadline) if job.deadline else None,
        "source": source,
        "sha256": digest,
        "work": None if work is None else asdict(work),
        "predicted": None if predicted is None else asdict(predicted),
    }


def take_recurring(site: Site, templates: Iterable[dict[str, Any]], now: datetime) -> tuple[str, ...]:
    """One job for each occurrence up to a day ahead; its key carries the instant, so it is made once.

    Each template row has job, spec (a Job's JSON), schedule, sha256, source and `last`, the latest occurrence
    so far or the time of submission. An occurrence may start from its instant on, but is planned before.
    Raises SpecError, once the others are done, for templates that cannot be read any more.
    """
    storage = site.storage
    horizon = now + min(timedelta(days=1), site.plan_slots * site.slot)
    made = []
    broken = []
    for row in templates:
        try:
            job = Job.model_validate_json(row["spec"])
        except ValidationError as error:  # taken in by an earlier version, which had other rules
            broken.append(f"{row['job']}: its spec cannot be read: {error.errors()[0]['msg']}")
            continue
        for instant in occurrences(row["schedule"], row["last"], horizon, site.cluster.time_zone):
            identity = f"{row['job']}@{instant:%Y-%m-%dT%H:%MZ}"
            work, predicted = amount_of(job, storage), predictions_of(job, site.cluster, storage)
            body = spec_fact(job, identity, row["source"], row["sha256"], now, instant, work, predicted)
            if write_fact(storage, fact_key("spec", instant, identity), now, body):
                made.append(identity)
    if broken:
        raise SpecError("; ".join(broken))
    return tuple(made)


def take_cancels(site: Site, states: dict[str, str], requested: set[str], now: datetime) -> tuple[str, ...]:
    """Turn cancel requests into facts. `states` maps known jobs (templates too) to their state.

    The request stays where the job's runner sees it, until the job has ended. Raises StorageError, once the
    others are done, for requests that cannot be handled.
    """
    storage = site.storage
    taken: list[str] = []
    broken = []
    for key in storage.keys("cancel/"):
        job = key.removeprefix("cancel/").removesuffix(".json")
        try:
            _take_cancel(storage, key, job, states.get(job), job in requested, taken, now)
        except UNUSABLE as error:  # a link, a gigabyte: the others go on
            broken.append(str(error))
    if broken:
        raise StorageError("; ".join(broken))
    return tuple(taken)


def _take_cancel(
    storage: Storage, key: str, job: str, state: str | None, requested: bool, taken: list[str], now: datetime
) -> None:
    if state is None:
        with contextlib.suppress(NotFoundError):  # taken back meanwhile
            content = storage.read(key, MOST_KEPT)
            _reject(storage, f"cancel-{job}.json", content, f"cancel: there is no job {job}", now)
        storage.delete(key)
        return
    if not requested:
        write_fact(storage, fact_key("cancel", now, job), now, {"job": job})
        taken.append(job)
    if state in (*FINAL_STATES, "recurring"):
        storage.delete(key)


def request_cancel(storage: Storage, job: str, by: str, now: datetime) -> bool:
    """Leave a cancel request; False when there is one already."""
    return write_fact(storage, f"cancel/{job}.json", now, {"job": job, "by": by})


def cancel_requested(storage: Storage, job: str) -> bool:
    """Whether someone wants the job to end."""
    try:
        read_json(storage, f"cancel/{job}.json")
    except NotFoundError:
        return False
    except FactError:  # somebody's empty file says it as well
        return True
    return True


def _reject(storage: Storage, name: str, content: bytes, error: str, now: datetime) -> None:
    digest = _digest(name, content)[:8]
    short = f"{digest}-{name.replace('/', '-')[:50]}"
    target = f"rejected/{name}" if len(name.encode()) <= 200 else f"rejected/{short}"
    if not storage.create(target, content) and storage.read(target) != content:
        target = f"rejected/{short}"
        storage.write(target, content)
    storage.write(f"{target}.error.txt", (error + "\n").encode())
    fact = fact_key("rejected", now, short)
    write_fact(storage, fact, now, {"source": name, "error": error})
    faults.point("inbox.rejected")
