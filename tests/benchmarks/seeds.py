"""Quality on many generated problems, in pieces: fast and full mode against proven optima.

    python -m tests.benchmarks.seeds prove 0 40 --results seeds.jsonl --seconds 10
    python -m tests.benchmarks.seeds fast 0 200 --results seeds.jsonl

``prove`` solves each seed in full mode and appends a line to the results file; seeds that are there already
are left, so it may be stopped and started, and run range by range. ``fast`` measures fast mode against the
best plans and bounds of that file. A problem whose optimum full mode did not prove counts against its bound;
one in which no plan is worth more than it costs (services that nothing can serve) is left out.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, process_time
from typing import Any

from rich.console import Console
from rich.table import Table

from allocator import Plan, Problem, solve
from allocator.generate import generate
from allocator.realtime import lacking

_PROVEN = 1e-4  # a gap in percent that is only rounding


@dataclass(frozen=True, slots=True)
class Best:
    """What full mode reached on a seed, and what no plan exceeds."""

    seed: int
    name: str
    best: float
    bound: float
    seconds: float

    @property
    def gap(self) -> float:
        """In percent of the bound."""
        return 100 * (self.bound - self.best) / self.bound if self.bound > 0 else 0.0

    @property
    def proven(self) -> bool:
        return self.gap < _PROVEN


@dataclass(frozen=True, slots=True)
class Fast:
    """Fast mode on a seed: its share of the optimum (or bound) in percent, and milliseconds."""

    best: Best
    objective: float
    share: float
    ms: float
    cpu_ms: float


def prove(seeds: range, results: Path, seconds: float) -> list[Best]:
    """Full mode on each seed that the file does not have."""
    known = read(results)
    for seed in seeds:
        if seed not in known:
            problem = generate(seed)
            began = perf_counter()
            plan = solve(problem, "full", time_limit=seconds)
            assert plan.bound is not None
            known[seed] = Best(seed, problem.name, plan.objective, plan.bound, perf_counter() - began)
            with results.open("a") as file:
                file.write(
                    json.dumps({field: getattr(known[seed], field) for field in Best.__slots__}) + "\n"
                )
    return [known[seed] for seed in seeds]


def read(results: Path) -> dict[int, Best]:
    """What a results file holds; of several lines for a seed, the best plan and the lowest bound."""
    found: dict[int, Best] = {}
    for line in results.read_text().splitlines() if results.exists() else []:
        new = Best(**json.loads(line))
        old = found.get(new.seed, new)
        best, bound = max(old.best, new.best), min(old.bound, new.bound)
        found[new.seed] = Best(new.seed, new.name, best, bound, old.seconds)
    return found


def solve_anew(data: Mapping[str, Any]) -> Plan:
    """The fast plan of a problem built from its data, with nothing kept from an earlier call."""
    lacking.cache_clear()
    return solve(Problem.from_dict(data))


def measure(known: list[Best], rounds: int = 3) -> list[Fast]:
    """Fast mode on freshly built problems, the median of some rounds each."""
    found = []
    for best in known:
        data = generate(best.seed).to_dict()
        times, cpu = [], []
        for _ in range(rounds):
            began, busy = perf_counter(), process_time()
            plan = solve_anew(data)
            times.append(1000 * (perf_counter() - began))
            cpu.append(1000 * (process_time() - busy))
        against = best.best if best.proven else best.bound
        share = 100 * plan.objective / against if against > 0 else 0.0
        found.append(Fast(best, plan.objective, share, median(times), median(cpu)))
    return found


def table(found: list[Fast], worst: int = 12) -> Table:
    """Both modes in figures, and the seeds where they are worst."""
    found = [fast for fast in found if fast.best.bound > 0]
    known = [fast.best for fast in found]
    shares, cpu = [fast.share for fast in found], [fast.cpu_ms for fast in found]
    proven = [fast.share for fast in found if fast.best.proven]
    gaps = [best.gap for best in known]
    made = Table("measured", "value", box=None)
    made.add_row("problems, and of them solved to the proven optimum", f"{len(found)}, {len(proven)}")
    made.add_row(
        "fast over the optimum (or bound): mean, worst", f"{fmean(shares):.2f} %, {min(shares):.2f} %"
    )
    if proven:
        made.add_row("  of those proven: mean, worst", f"{fmean(proven):.2f} %, {min(proven):.2f} %")
    seen = [100 * fast.objective / fast.best.best for fast in found if fast.best.best > 0]
    made.add_row(
        "fast over the best plan seen: mean, median, worst",
        f"{fmean(seen):.2f} %, {median(seen):.2f} %, {min(seen):.2f} %",
    )
    for limit in (95, 97, 99):
        made.add_row(f"fast below {limit} % of it", str(sum(share < limit for share in seen)))
    made.add_row(
        "fast, ms of processor: median, mean, most", f"{median(cpu):.2f}, {fmean(cpu):.2f}, {max(cpu):.1f}"
    )
    made.add_row("fast, ms by the clock: median", f"{median([fast.ms for fast in found]):.2f}")
    made.add_row("full within 0.5 % of the best, proven", f"{sum(gap <= 0.5 for gap in gaps)} of {len(gaps)}")
    made.add_row("full, gap: mean, worst", f"{fmean(gaps):.3f} %, {max(gaps):.2f} %")
    seconds = [best.seconds for best in known]
    made.add_row("full, seconds: median, most", f"{median(seconds):.2f}, {max(seconds):.1f}")
    for fast in sorted(found, key=lambda fast: fast.share)[:worst]:
        unproven = "" if fast.best.proven else " (of a bound)"
        made.add_row(
            f"  worst of fast: {fast.best.name}", f"{fast.share:.2f} %{unproven}, {fast.cpu_ms:.1f} ms"
        )
    for best in sorted(known, key=lambda best: -best.gap)[:worst]:
        if not best.proven:
            made.add_row(f"  worst of full: {best.name}", f"gap {best.gap:.2f} % after {best.seconds:.1f} s")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality on generated problems, in pieces.")
    parser.add_argument("what", choices=("prove", "fast"))
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, help="one after the last seed")
    parser.add_argument("--results", type=Path, required=True, help="a file of JSON lines, added to")
    parser.add_argument("--seconds", type=float, default=10, help="time limit of full mode")
    parser.add_argument("--rounds", type=int, default=3, help="fast solves of each seed")
    asked = parser.parse_args()
    seeds = range(asked.first, asked.last)
    if asked.what == "prove":
        known = prove(seeds, asked.results, asked.seconds)
    else:
        known = [best for seed, best in sorted(read(asked.results).items()) if seed in seeds]
    Console(width=120).print(table(measure(known, asked.rounds)))


if __name__ == "__main__":
    main()
