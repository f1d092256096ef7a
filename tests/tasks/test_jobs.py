"""A job's spec: what its author is told, whether it fits, and when a recurring one is due."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from tasks.cluster import Site
from tasks.jobs import Job, misfit, occurrences, read_job
from tasks.specfile import SpecError
from tests.conftest import make_site

GOOD = """\
id: nightly
kind: training
gpus: 4
priority: 5
duration: 3h
training: {config: llama.yaml}
"""
PATTERN = "expected letters, digits, '.', '_' and '-', beginning with a letter or digit"
INSTANT = "expected an instant such as 2026-12-01T06:00Z"
ONE = "1: the file: expected one section, training: or command:, found "
DURATION = "expected a duration such as 45m, 3h or 1d12h"
CRON = "expected five cron fields such as '0 2 * * *'"


def test_a_good_spec_is_read_and_its_value_fixed(site: Site) -> None:
    job = read_job(GOOD, "jobs/nightly.yaml", site)
    assert (job.id, job.kind, job.gpus, job.training) == ("nightly", "training", 4, {"config": "llama.yaml"})
    assert job.seconds == 3 * 3600
    assert job.value == 5 * 4 * 3
    assert job.max_seconds is None
    assert job.max_attempts == 3


MISTAKES = [
    ("gpus: 4", "gpu: 4", "3: gpu: unknown key; did you mean gpus?"),
    ("gpus: 4", "gpus: 0", "3: gpus: 0: expected at least 1"),
    ("gpus: 4", "gpus: 2.5", "3: gpus: 2.5: expected a whole number"),
    ("gpus: 4", "gpus: four", "3: gpus: 'four': expected a whole number"),
    ("gpus: 4", "gpus: yes", "3: gpus: True: expected a number or a text; put yes, no, on and off in quotes"),
    ("gpus: 4", "gpus: 5", "3: gpus: 5 does not fit any node (the widest has 4 GPUs) nor whole nodes; "
     "use at most 4, or 8 for whole nodes"),
    ("gpus: 4", "gpus: 4\ngpu_types: [H100]", "4: gpu_types: no node has H100; the cluster has cpu"),
    ("gpus: 4", "gpus: 4\ngpu_types: H100", "4: gpu_types: 'H100': expected a list"),
    ("gpus: 4", "gpus: 4\ngpu_types: []", "4: gpu_types: []: expected at least 1 of them"),
    ("gpus: 4\n", "", "1: gpus: missing; it is required"),
    ("id: nightly", "id: -rf", f"1: id: '-rf': {PATTERN}"),
    ("id: nightly", "id: a/b", f"1: id: 'a/b': {PATTERN}"),
    ("id: nightly", "id: a@b", f"1: id: 'a@b': {PATTERN}"),
    ("id: nightly", "id: 2026", "1: id: 2026: expected a text; put it in quotes"),
    ("id: nightly", f"id: {'x' * 101}", f"1: id: 'xxxxxxxxxx{'x' * 69}: expected at most 100 characters"),
    ("kind: training", "kind: trainig", "2: kind: 'trainig': "
     "expected 'training', 'batch_inference' or 'quantization'"),
    ("priority: 5", "priority: 0", "4: priority: 0: expected more than 0"),
    ("priority: 5", "priority: .nan", "4: priority: nan: expected a finite number"),
    ("priority: 5", "priority: 1e9", "4: priority: '1e9': expected at most 1000"),
    ("duration: 3h", "duration: 3", "5: duration: 3: expected a text; put it in quotes"),
    ("duration: 3h", "duration: 3 hours", f"5: duration: '3 hours': {DURATION}"),
    ("duration: 3h", "duration: 0s", "5: duration: '0s': expected a duration above 0 and at most 365d"),
    ("duration: 3h", "duration: 366d", "5: duration: '366d': expected a duration above 0 and at most 365d"),
    ("duration: 3h", "duration: 99999999999d", "5: duration: '99999999999d': "
     "expected a duration of fewer days"),
    ("duration: 3h", "duration: 3h\nmax_duration: never", f"6: max_duration: 'never': {DURATION}"),
    ("duration: 3h", "duration: 3h\ndeadline: 2026-02-30", f"6: deadline: '2026-02-30': {INSTANT}"),
    ("duration: 3h", "duration: 3h\ndeadline: tomorrow", f"6: deadline: 'tomorrow': {INSTANT}"),
    ("duration: 3h", "duration: 3h\ndeadline: 1999-12-31", "6: deadline: '1999-12-31': "
     "expected an instant between the years 2000 and 2200"),
    ("duration: 3h", "duration: 3h\nnot_before: 0001-01-01T00:00+14:00", "6: not_before: "
     "'0001-01-01T00:00+14:00': expected an instant between the years 2000 and 2200"),
    ("duration: 3h", "duration: 3h\nschedule: hourly", f"6: schedule: 'hourly': {CRON}: "
     "Wrong number of fields"),
    ("duration: 3h", "duration: 3h\nschedule: 0 2 * * 9", f"6: schedule: '0 2 * * 9': {CRON}: "
     "Bad day-of-week"),
    ("duration: 3h", "duration: 3h\nschedule: 0 0 30 2 *", f"6: schedule: '0 0 30 2 *': {CRON}: "
     "Bad day-of-month"),
    ("duration: 3h", "duration: 3h\nschedule: '* * * * * *'", f"6: schedule: '* * * * * *': {CRON}"),
    ("duration: 3h", "duration: 3h\nschedule: 0 2 * * *\ndeadline: 2030-01-01", "7: deadline: "
     "is one instant, and a recurring job has many occurrences; leave it out"),
    ("duration: 3h", "duration: 3h\nnot_before: 2030-01-01\nschedule: 0 2 * * *", "6: not_before: "
     "is one instant, and a recurring job has many occurrences; leave it out"),
    ("id: nightly", "schedule: 0 2 * * *", "1: the file: a recurring job needs an id, "
     "from which its occurrences are named"),
    ("training: {config: llama.yaml}\n", "", f"{ONE}none"),
    ("training: {config", "quantization: {config", f"{ONE}quantization"),
    ("duration: 3h", "duration: 3h\ncommand: [ls]", f"{ONE}training and command"),
    ("training: {config: llama.yaml}", "training: llama.yaml", "6: training: 'llama.yaml': "
     "expected keys and values"),
    ("training: {config: llama.yaml}", "training: {lr: .nan}", "6: training: expected texts, finite numbers, "
     "lists and keys: Out of range float values are not JSON compliant"),
    ("training: {config: llama.yaml}", "training: {tags: !!set {a}}", "6: training: expected texts, finite "
     "numbers, lists and keys: Object of type set is not JSON serializable"),
    ("training: {config: llama.yaml}", "command: python train.py", "6: command: 'python train.py': "
     "expected a list"),
    ("training: {config: llama.yaml}", "command: []", "6: command: []: expected at least 1 of them"),
    ("training: {config: llama.yaml}", "command: [train, --steps, 100]", "6: command.2: 100: "
     "expected a text; put it in quotes"),
    ("training: {config: llama.yaml}", 'command: [ls, "\\0"]', "6: a text holds half a character "
     "(a surrogate) or NUL"),
    ("id: nightly", "id: nightly\nmax_attempts: 0", "2: max_attempts: 0: expected at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "line"), MISTAKES, ids=[new[:40] for _, new, _ in MISTAKES])
def test_a_mistake_is_named_with_its_line(site: Site, old: str, new: str, line: str) -> None:
    assert old in GOOD
    with pytest.raises(SpecError) as error:
        read_job(GOOD.replace(old, new), "jobs/nightly.yaml", site)
    assert str(error.value) == f"jobs/nightly.yaml:{line}"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("2026-12-01T06:00Z", datetime(2026, 12, 1, 6, tzinfo=UTC)),
        ("2026-12-01T08:00+02:00", datetime(2026, 12, 1, 6, tzinfo=UTC)),
        ("2026-12-01 06:00:00", datetime(2026, 12, 1, 6, tzinfo=UTC)),
        ("2026-12-01", datetime(2026, 12, 1, tzinfo=UTC)),
    ],
)
def test_a_deadline_may_be_written_in_several_ways(site: Site, written: str, read: datetime) -> None:
    assert read_job(f"{GOOD}deadline: {written}\n", "a", site).deadline == read


@pytest.mark.parametrize("when", ["deadline: 2026-12-01T06:00Z", "schedule: 0 2 * * *"])
def test_what_is_stored_of_a_spec_reads_the_same(site: Site, when: str) -> None:
    job = read_job(GOOD + f"gpu_types: [cpu]\n{when}\n", "a", site)
    assert Job.model_validate_json(job.model_dump_json()) == job


H100, A100 = {"gpus": 8, "gpu": "H100"}, {"gpus": 4, "gpu": "A100"}
MIXED = [
    {"name": "h0", "domain": "rack1", **H100},
    {"name": "h1", "domain": "rack1", **H100},
    {"name": "h2", "domain": "rack2", **H100},
    {"name": "a0", **A100},
    {"name": "a1", **A100},
    {"name": "a2", **A100},
]
FITS = [
    (1, None, None),
    (8, None, None),
    (9, None, "use at most 8, or 12, 16 for whole nodes"),
    (16, None, None),  # two H100 nodes of one rack
    (24, None, "use at most 8, or 12, 16"),  # three would span racks
    (12, None, None),  # three A100 nodes
    (12, ("H100",), "use at most 8, or 16 for whole nodes"),
    (5, ("A100",), "use at most 4, or 8, 12 for whole nodes"),
    (16, ("H100", "A100"), None),
]


@pytest.mark.parametrize(("gpus", "types", "said"), FITS)
def test_a_job_fits_a_node_or_whole_nodes_of_one_type_and_domain(
    tmp_path: Path, gpus: int, types: tuple[str, ...] | None, said: str | None
) -> None:
    cluster = make_site(tmp_path, nodes=MIXED).cluster
    job = Job(kind="training", gpus=gpus, gpu_types=types, priority=1, duration="1h", command=("ls",))
    found = misfit(job, cluster)
    assert (said is None and found is None) or (said is not None and said in str(found))


def test_one_large_node_offers_no_gang(tmp_path: Path) -> None:
    cluster = make_site(tmp_path, nodes=[{"name": "n", "gpus": 2}]).cluster
    job = Job(kind="training", gpus=3, priority=1, duration="1h", command=("ls",))
    assert str(misfit(job, cluster)).endswith("use at most 2")


def at(day: int, hour: int, minute: int = 0, month: int = 10) -> datetime:
    return datetime(2026, month, day, hour, minute, tzinfo=UTC)


def test_occurrences_are_after_the_last_and_until_the_horizon_inclusive() -> None:
    found = occurrences("0 2 * * *", at(1, 2), at(3, 2), "UTC")
    assert found == [at(2, 2), at(3, 2)]


def test_a_schedule_is_read_in_the_clusters_zone() -> None:
    assert occurrences("0 2 * * *", at(1, 12), at(2, 12), "Asia/Kolkata") == [at(1, 20, 30)]


# Berlin, 2026: 29 March 02:00 -> 03:00 (01:00 UTC) and 25 October 03:00 -> 02:00 (01:00 UTC).
CHANGES = {
    "an hour that does not exist, in spring": (
        "30 2 * * *", at(28, 0, month=3), at(30, 12, month=3),
        [at(28, 1, 30, month=3), at(29, 1, month=3), at(30, 0, 30, month=3)],
    ),
    "an hour that comes twice, in autumn": (
        "30 2 * * *", at(24, 0), at(26, 12),
        [at(24, 0, 30), at(25, 0, 30), at(26, 1, 30)],
    ),
    "every hour in spring": (
        "0 * * * *", at(28, 23, 30, month=3), at(29, 3, month=3),
        [at(29, hour, month=3) for hour in range(4)],
    ),
    "every hour in autumn": (
        "0 * * * *", at(24, 23, 30), at(25, 3),
        [at(25, hour) for hour in range(4)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_over_a_change_of_summer_time_each_occurrence_comes_once(case: str) -> None:
    schedule, after, until, expected = CHANGES[case]
    assert occurrences(schedule, after, until, "Europe/Berlin") == expected


@pytest.mark.parametrize("schedule", ["*/20 * * * *", "15 */2 * * *", "30 2 * * *", "0 0-4 * * 0"])
@pytest.mark.parametrize("month", [3, 10])
def test_asking_step_by_step_finds_what_asking_at_once_does(schedule: str, month: int) -> None:
    begin = at(24 if month == 10 else 28, 0, month=month)
    whole = occurrences(schedule, begin, begin + timedelta(hours=48), "Europe/Berlin")
    steps = [begin + timedelta(minutes=50 * step) for step in range(58)] + [begin + timedelta(hours=48)]
    pieces = [
        instant
        for after, until in pairwise(steps)
        for instant in occurrences(schedule, after, until, "Europe/Berlin")
    ]
    assert pieces == whole
    assert len(set(whole)) == len(whole)
