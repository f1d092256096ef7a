"""Commands about jobs: submit, cancel, jobs, why."""

import difflib
import getpass
import hashlib
import json
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from flows.cli_answers import MistakeError, at, print_json, print_table, published, terminal
from tasks import instants
from tasks.cluster import Site
from tasks.inbox import FINAL_STATES, request_cancel
from tasks.jobs import Job, read_job
from tasks.reconcile import lease_key
from tasks.specfile import SpecError
from tasks.storage import NotFoundError

STATES = ("inbox", "invalid", "queued", "committed", "starting", "running", "ending", *FINAL_STATES)
STANDARD_INPUT = Path("-")
COLUMNS = {
    "job": "job",
    "kind": "kind",
    "state": "state",
    "gpus": "GPUs",
    "priority": "priority",
    "value": "value",
    "attempts": "attempts",
    "wait_s": "waited s",
    "start_at": "start",
    "end_at": "end",
    "nodes": "on",
}


@dataclass(frozen=True)
class Waiting:
    """A file in the inbox that nobody has taken in: its job, or what is wrong with it."""

    name: str
    id: str | None
    job: Job | None
    error: str | None


def submit(site: Site, files: Sequence[Path], as_json: bool) -> None:
    """Leave specs in the inbox: all of them, or none when one is wrong."""
    taken = {waiting.id for waiting in inbox(site) if waiting.id} | set(known_states(site))
    specs: list[tuple[str, str, bytes]] = []
    problems: list[str] = []
    for file in files:
        content = _read(file)
        name = f"{'stdin' if file == STANDARD_INPUT else file.stem}-{uuid.uuid4().hex[:12]}.yaml"
        try:
            job = read_job(content, str(file), site)
        except SpecError as error:
            problems.append(str(error))
            continue
        identity = job_id(job, name, content)
        if identity in taken:
            problems.append(f"{file}: id: {identity} is taken by another job; use another id")
        taken.add(identity)
        specs.append((identity, name, content))
    if problems:
        nothing = "" if len(files) == 1 else "\nnothing was submitted"
        raise MistakeError("\n".join(problems) + nothing)
    for _, name, content in specs:
        site.storage.write(f"inbox/{name}", content)
    if as_json:
        print_json([{"job": identity, "file": f"inbox/{name}"} for identity, name, _ in specs])
    else:
        for identity, _, _ in specs:
            print(identity)


def cancel(site: Site, job: str, as_json: bool) -> None:
    """Ask for a job to end, or for a recurring one to recur no more."""
    states = {waiting.id: "in the inbox" for waiting in inbox(site) if waiting.id} | known_states(site)
    if job not in states:
        raise MistakeError(f"there is no job {job}{_nearest(job, states)}")
    if states[job] in FINAL_STATES:
        raise MistakeError(f"{job} is {states[job]} already")
    new = request_cancel(site.storage, job, getpass.getuser(), instants.now())
    if as_json:
        print_json({"job": job, "state": states[job], "requested": new})
    else:
        print(f"{job} will be cancelled" if new else f"{job}: a request to cancel it is there already")


def jobs(site: Site, states: Sequence[str], limit: int, as_json: bool) -> None:
    """Every job in one of these states, or in any, the latest first; those still in the inbox before all."""
    from tasks.ledger import rows

    if wrong := [state for state in states if state not in STATES]:
        raise MistakeError(f"--state: {wrong[0]!r}: expected one of {', '.join(STATES)}")
    found = [_inbox_row(waiting) for waiting in inbox(site)]
    if _has_ledger(site):
        with published(site) as connection:
            known = rows(connection, "FROM jobs ORDER BY submitted_at DESC, job")
        taken = {row["source"] for row in known}
        found = [row for row in found if row["source"] not in taken] + known
    if states:
        found = [row for row in found if row["state"] in states]
    if as_json:
        print_json(found[:limit])
        return
    shown = [row | _what_was(row) for row in found[:limit]]
    print_table(site, list(COLUMNS.values()), [[row.get(key) for key in COLUMNS] for row in shown])
    for row in found[:limit]:
        if row.get("error"):
            print(f"{row['source']}: {row['error']}")
    if len(found) > limit:
        print(f"and {len(found) - limit} more; see --limit")


def _what_was(row: dict[str, Any]) -> dict[str, Any]:
    """When a job really began and ended, as far as that is known, in place of when it was to."""
    real = {"start_at": row.get("started_at"), "end_at": row.get("ended_at")}
    return {name: at for name, at in real.items() if at is not None}


def why(site: Site, job: str, as_json: bool) -> None:
    """What has become of a job, and why it is where it is."""
    zone = ZoneInfo(site.cluster.time_zone)
    found = next((waiting for waiting in inbox(site) if waiting.id == job), None)
    answer: dict[str, Any]
    if _has_ledger(site) and job in known_states(site):
        with published(site) as connection:
            answer = _history(site, connection, job, zone)
    elif found is not None:
        answer = {"job": job, "state": "inbox", "reason": _inbox_reason(site, found, zone), "events": []}
    else:
        answer = _refused(site, job)
    if as_json:
        print_json(answer)
        return
    console = terminal()
    console.print(f"{answer['job']}: {answer['state']}")
    console.print(answer["reason"], soft_wrap=True)
    for event in answer["events"]:
        console.print(f"  {at(event['at'], zone)}  {event['what']}", soft_wrap=True)


def inbox(site: Site) -> list[Waiting]:
    """What lies in the inbox."""
    found = []
    for key in site.storage.keys("inbox/"):
        name = key.removeprefix("inbox/")
        try:
            content = site.storage.read(key)
        except NotFoundError:  # taken in meanwhile
            continue
        try:
            job = read_job(content, name, site)
        except SpecError as error:
            found.append(Waiting(name, None, None, str(error)))
            continue
        found.append(Waiting(name, job_id(job, name, content), job, None))
    return found


def job_id(job: Job, name: str, content: bytes) -> str:
    """The id under which the inbox takes this file in: its own, or one made from kind, name and content."""
    digest = hashlib.sha256(name.encode() + b"\0" + content).hexdigest()
    return job.id or f"{job.kind.replace('_', '-')}-{digest[:8]}"


def known_states(site: Site) -> dict[str, str]:
    """The state of each job that the published ledger knows, recurring templates among them."""
    if not _has_ledger(site):
        return {}
    with published(site) as connection:
        query = (
            "SELECT job, state FROM jobs UNION SELECT job, 'recurring' FROM specs WHERE schedule IS NOT NULL"
        )
        return dict(connection.execute(query).fetchall())


def _has_ledger(site: Site) -> bool:
    from tasks.collect import ledger_directory
    from tasks.ledger import published_file

    return published_file(ledger_directory(site)).exists()


def _read(file: Path) -> bytes:
    if file == STANDARD_INPUT:
        return sys.stdin.buffer.read()
    try:
        return file.read_bytes()
    except OSError as error:
        raise MistakeError(f"{file}: cannot be read: {error.strerror}") from None


def _nearest(job: str, states: dict[str, str]) -> str:
    near = difflib.get_close_matches(job, states, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _inbox_row(waiting: Waiting) -> dict[str, Any]:
    if waiting.job is None:
        return {"job": None, "state": "invalid", "source": waiting.name, "error": waiting.error}
    job = waiting.job
    return {
        "job": waiting.id,
        "kind": job.kind,
        "state": "inbox",
        "gpus": job.gpus,
        "priority": job.priority,
        "value": job.value,
        "source": waiting.name,
    }


def _inbox_reason(site: Site, waiting: Waiting, zone: ZoneInfo) -> str:
    return (
        f"it lies in the inbox as {waiting.name}; the next plan takes it in, at {at(next_plan(site), zone)} "
        "or sooner when something else happens"
    )


def next_plan(site: Site) -> datetime:
    """When the next scheduled plan is due."""
    return instants.floor(instants.now(), site.cluster.plan_every_minutes) + site.plan_every


def _refused(site: Site, job: str) -> dict[str, Any]:
    """A spec that was rejected, known by its file's name or the id in its error. Raises MistakeError."""
    if _has_ledger(site):
        from tasks.ledger import rows

        with published(site) as connection:
            query = "FROM rejections WHERE source IN ($1, $1 || '.yaml') OR starts_with(source, $1 || '-') "
            query += "OR regexp_matches(error, 'id: ' || regexp_escape($1) || '( |$)') "
            refused = rows(connection, query + "ORDER BY recorded_at DESC", [job])
        if refused:
            events = [{"at": each["recorded_at"], "what": each["error"]} for each in refused]
            return {"job": job, "state": "rejected", "reason": refused[0]["error"], "events": events}
    raise MistakeError(f"there is no job {job}{_nearest(job, known_states(site))}")


def _history(site: Site, connection: Any, job: str, zone: ZoneInfo) -> dict[str, Any]:
    from tasks.ledger import rows

    def ask(query: str) -> list[dict[str, Any]]:
        return rows(connection, query, [job])

    spec = ask("FROM specs WHERE job = ?")[0]
    if spec["schedule"] is not None:
        made = ask("SELECT job, state, submitted_at AS at FROM jobs WHERE template = ? ORDER BY release_at")
        events = [{"at": each["at"], "what": f"{each['job']}: {each['state']}"} for each in made]
        reason = (
            f"it recurs at {spec['schedule']!r} ({site.cluster.time_zone}); {len(made)} occurrences so far"
        )
        return {"job": job, "state": "recurring", "reason": reason, "events": events}
    row = ask("FROM jobs WHERE job = ?")[0]
    said = ask("FROM planned_jobs WHERE job = ? ORDER BY instant DESC LIMIT 1")
    attempts = ask("FROM ranks WHERE job = ? ORDER BY attempt, rank")
    ends = ask("FROM outcomes WHERE job = ? ORDER BY attempt, rank")
    events = _events(spec, row, attempts, ends, zone)
    reason = _reason(site, row, said[0] if said else None, attempts, ends, zone)
    return {"job": job, "state": row["state"], "reason": reason, "events": events, "row": row}


def _events(
    spec: dict[str, Any],
    row: dict[str, Any],
    attempts: list[dict[str, Any]],
    ends: list[dict[str, Any]],
    zone: ZoneInfo,
) -> list[dict[str, Any]]:
    """What happened, in order."""
    taken = (
        f"taken in from {spec['source']}: {spec['kind']} on "
        f"{' or '.join(map(str, spec['widths'] or [spec['gpus']]))} GPUs, worth {spec['value']:.4g}"
    )
    events = [{"at": spec["submitted_at"], "what": taken}]
    said = [f"predicted: {run['reason']}" for run in json.loads(spec["predicted"] or "[]")]
    said += [f"not predicted: {problem}" for problem in spec["unpredicted"] or ()]
    events += [{"at": spec["submitted_at"], "what": what} for what in said]
    if row["cancel_at"] is not None:
        events.append({"at": row["cancel_at"], "what": "its cancellation was asked for"})
    for rank in attempts:
        who = f"attempt {rank['attempt']}" + (f" rank {rank['rank']}" if rank["ranks"] > 1 else "")
        what = f"{who} committed: from {at(rank['start_at'], zone)} on {_place(rank)}"
        # A plan is named by the whole second in which it began; what it took in is a little younger.
        events.append({"at": max(rank["instant"], spec["submitted_at"]), "what": what})
        if rank["started_at"] is not None:
            what = f"{who} was called off" if rank["void"] else f"{who} began"
            events.append({"at": rank["started_at"], "what": what})
    for end in ends:
        what = f"attempt {end['attempt']} on {end['node']}: {end['state']}"
        events.append({"at": end["ended_at"], "what": what + (f": {end['error']}" if end["error"] else "")})
    return sorted(events, key=lambda event: event["at"])


def _reason(
    site: Site,
    row: dict[str, Any],
    said: dict[str, Any] | None,
    attempts: list[dict[str, Any]],
    ends: list[dict[str, Any]],
    zone: ZoneInfo,
) -> str:
    """Why the job is in its state."""
    live = [rank for rank in attempts if rank["outcome"] is None]
    where = " and ".join(_place(rank) for rank in live)
    match row["state"]:
        case "queued":
            return _why_queued(site, row, said, ends, zone)
        case "committed":
            detail = "; ".join(filter(None, (_doing(site, rank) for rank in live)))
            return f"it starts at {at(row['start_at'], zone)} on {where}" + (f" ({detail})" if detail else "")
        case "starting" | "running" | "ending":
            detail = "; ".join(filter(None, (_doing(site, rank) for rank in live)))
            expected = f"it runs on {where}, until about {at(row['end_at'], zone)}"
            return expected + (f" ({detail})" if detail else "")
        case "completed":
            late = " after its deadline" if row["earned"] == 0 else ""
            return f"it completed at {at(row['ended_at'], zone)}{late} and earned {row['earned']:.4g}"
        case "expired":
            return f"its deadline, {at(row['deadline_at'], zone)}, passed before it could run"
        case "failed":
            last = ends[-1]["error"] if ends else None
            return f"it failed {row['failures']} of {row['max_attempts']} times; the last time: {last}"
    return (
        f"its cancellation was asked for at {at(row['cancel_at'], zone)}"
        if row["cancel_at"]
        else row["state"]
    )


def _why_queued(
    site: Site, row: dict[str, Any], said: dict[str, Any] | None, ends: list[dict[str, Any]], zone: ZoneInfo
) -> str:
    again = f"attempt {row['attempts']} ended ({ends[-1]['error']}); " if ends else ""
    if row["release_at"] > instants.now():
        again += f"it may not start before {at(row['release_at'], zone)}; "
    if said is None:
        return f"{again}no plan has seen it yet; the next is due at {at(next_plan(site), zone)}"
    when = at(said["instant"], zone)
    if said["start_at"] is not None:
        return (
            f"{again}the plan of {when} has it start at {at(said['start_at'], zone)}, which may still change"
        )
    earliest = said["earliest_start_at"]
    could = f"; it could start at {at(earliest, zone)}" if earliest is not None else ""
    return f"{again}the plan of {when} leaves it out: {said['reason']}{could}"


def _doing(site: Site, rank: dict[str, Any]) -> str:
    """What the rank's runner last said of itself."""
    key = lease_key(rank["job"], rank["attempt"], rank["rank"])
    try:
        lease = json.loads(site.storage.read(key))
        detail = lease["detail"] or ", ".join(
            f"{k} {v:.4g}" for k, v in lease["metrics"].items() if _figure(v)
        )
        return f"{rank['node']} {lease['doing']}" + (f": {detail}" if detail else "")
    except (NotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def _figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _place(rank: dict[str, Any]) -> str:
    gpus = rank["gpus"]
    whole = f"{gpus[0]}–{gpus[-1]}" if len(gpus) > 2 and gpus == list(range(gpus[0], gpus[-1] + 1)) else None
    return f"{rank['node']} GPU{'s' if len(gpus) > 1 else ''} {whole or ', '.join(map(str, gpus))}"
