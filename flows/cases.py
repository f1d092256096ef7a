"""Inputs of the replays that the README names, made from the recorded data in `deployments/replay`.

    python -m flows.cases narrow --seed 0 --out /tmp/narrow

Invariant: a case, a seed and this version give the same files. Jobs, widths and durations are recorded ones;
what the records lack is drawn by a stated rule: priorities by the seed, and for openb, whose cluster was
nearly idle, which of its tasks arrive when.
"""

import argparse
import csv
import gzip
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).parent.parent / "deployments"
DAY_S = 86_400
FIRST_S = 60 * DAY_S  # of the Philly trace
PRIORITIES, WEIGHTS = (1, 2, 3, 5, 8), (0.35, 0.25, 0.20, 0.13, 0.07)
QOS_PRIORITY = {"LS": 5, "Guaranteed": 3, "Burstable": 3, "BE": 1}
# The Philly window begins on a Friday at half past ten, local time; the load is that of the same weekday.
LOAD_BEGINS = datetime(2024, 5, 10, 10)
OPENB_LOAD = 0.8  # GPU-hours offered over those that the service leaves

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A cluster and what it is given: `jobs` draws them by a random source, `days` is how long the load
    lasts.
    """

    nodes: int
    days: int
    peak_gpus: int
    ramp_per_hour: int
    jobs: Callable[["Case", random.Random], Iterator[Row]]


def prepare(name: str, seed: int, folder: Path) -> tuple[Path, Path, Path]:
    """Write the cluster file, the jobs and the demand of a case; their paths."""
    case = CASES[name]
    folder.mkdir(parents=True, exist_ok=True)
    cluster, jobs, demand = folder / "cluster.yaml", folder / "jobs.csv", folder / "demand.csv"
    load = _load(case)
    cluster.write_text(yaml.safe_dump(_cluster(name, case, sum(load) / len(load)), sort_keys=False))
    with jobs.open("w", newline="") as out:
        rows = csv.DictWriter(out, ["job_id", "submit_s", "gpus", "duration_s", "priority", "tenant"])
        rows.writeheader()
        rows.writerows(case.jobs(case, random.Random(seed)))
    with demand.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["ts", "assistant"])
        for hour, gpus in enumerate(load):
            writer.writerow([f"{LOAD_BEGINS + timedelta(hours=hour):%Y-%m-%d %H:%M:%S}", f"{gpus:.3f}"])
    return cluster, jobs, demand


def _cluster(name: str, case: Case, mean: float) -> Row:
    return {
        "name": name,
        "slot_minutes": 60,
        "full_mode_seconds": 2,
        "nodes": [{"name": f"node{at}", "gpus": 8, "gpu": "A100"} for at in range(case.nodes)],
        "services": [
            {
                "name": "assistant",
                "demand": {"file": "demand.csv", "unit": "gpus", "sample_minutes": 60},
                "expected_gpus": round(mean),
                "ramp_per_hour": case.ramp_per_hour,
                "priority": 3,  # near the mean of the jobs'
                "shortage_penalty": 8,
            }
        ],
    }


def _load(case: Case) -> list[float]:
    """GPUs that the two services want together, hour by hour, scaled to the peak."""
    weeks = []
    for file in (DATA / "demo/azure_code_2024.csv", DATA / "replay/azure_conv_2024.csv"):
        with file.open(newline="") as lines:
            found = [(datetime.fromisoformat(row["ts"]), float(row["y"])) for row in csv.DictReader(lines)]
        by_hour = {(ts.weekday(), ts.hour): y for ts, y in found}
        hours = [LOAD_BEGINS + timedelta(hours=hour) for hour in range(24 * case.days)]
        weeks.append([by_hour[ts.weekday(), ts.hour] for ts in hours])
    both = [code + conversation for code, conversation in zip(*weeks, strict=True)]
    return [case.peak_gpus * y / max(both) for y in both]


def _recorded(file: Path) -> Iterator[dict[str, str]]:
    with gzip.open(file, "rt", newline="") as lines:
        yield from csv.DictReader(lines)


def _philly(share: Callable[[int], float]) -> Callable[[Case, random.Random], Iterator[Row]]:
    """Jobs of the Philly trace up to 32 GPUs, thinned by a hash of their ids."""

    def draw(case: Case, chance: random.Random) -> Iterator[Row]:
        for row in _recorded(DATA / "replay/jobs_philly_day60.csv.gz"):
            gpus = int(row["gpus"])
            if gpus <= 32 and zlib.crc32(row["job_id"].encode()) / 2**32 <= share(gpus):
                yield {
                    "job_id": row["job_id"],
                    "submit_s": int(row["submit_s"]) - FIRST_S,
                    "gpus": gpus,
                    "duration_s": min(int(row["duration_s"]), DAY_S),
                    "priority": chance.choices(PRIORITIES, WEIGHTS)[0],
                    "tenant": row["tenant"],
                }

    return draw


def _openb(case: Case, chance: random.Random) -> Iterator[Row]:
    """Tasks drawn from the trace, each as often as another, at its own time of the day, until the load is
    there.
    """
    tasks = list(_recorded(DATA / "replay/tasks_openb.csv.gz"))
    free = 24 * case.days * 8 * case.nodes - sum(_load(case))
    left, drawn = OPENB_LOAD * free, []
    while left > 0:
        task = chance.choice(tasks)
        gpus, seconds = int(task["gpus"]), min(int(task["duration_s"]), DAY_S)
        left -= gpus * seconds / 3600
        submit_s = chance.randrange(case.days) * DAY_S + int(task["create_s"]) % DAY_S
        drawn.append((submit_s, gpus, seconds, QOS_PRIORITY[task["qos"]], task["qos"]))
    for number, (submit_s, gpus, seconds, priority, qos) in enumerate(sorted(drawn)):
        yield {
            "job_id": f"o{number:06d}",
            "submit_s": submit_s,
            "gpus": gpus,
            "duration_s": seconds,
            "priority": priority,
            "tenant": qos,
        }


CASES = {
    "narrow": Case(8, 14, 32, 8, _philly(lambda gpus: 0.25)),
    "wide": Case(8, 14, 32, 8, _philly(lambda gpus: 0.06 if gpus < 8 else 0.5)),
    "openb": Case(32, 7, 128, 32, _openb),
}


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.cases", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--seed", type=int, default=0, help="of what the records lack (0)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the three files go")
    chosen = parser.parse_args(arguments)
    for file in prepare(chosen.case, chosen.seed, chosen.out):
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
