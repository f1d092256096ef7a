"""How long jobs really take, learned from the ones that completed.

Invariant: every estimate is a positive finite number of seconds, whatever the past rows hold and however
long a job has overrun. What is learned is the mean and spread of log(actual / declared): for all jobs, for
each kind, for each kind and GPU count, and for the occurrences of one job, each drawn to the one before it
while it has few runs. The cost: a team whose declarations are far off is believed for its first tens of
runs.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scipy.special import log_ndtr, ndtri

Group = tuple[str, ...]

# Runs after which a group counts as much as its parent. Occurrences of one job are alike: few tell much.
SHRINKAGE, OCCURRENCE_SHRINKAGE = 30.0, 3.0
FIRST_SPREAD, LEAST_SPREAD = 0.5, 0.05  # standard deviations of the log-ratio
WIDEST_RATIO = 1000.0  # an outcome further from its declaration than this is a broken row or a broken clock
LEAST_SECONDS = 1.0


@dataclass(frozen=True)
class Ratio:
    """Actual over declared seconds, log-normal: mean and deviation of the log, and the runs behind them."""

    log_mean: float
    log_spread: float
    runs: int


@dataclass(frozen=True)
class Estimates:
    """Ratios by group; a job uses the narrowest group that has runs."""

    ratios: Mapping[Group, Ratio]

    def ratio(self, job: str, kind: str, gpus: int) -> Ratio:
        """What is known of jobs like this one; the declaration, with a wide spread, when nothing is."""
        found = (self.ratios.get(group) for group in reversed(_groups(job, kind, gpus)))
        return next((ratio for ratio in found if ratio is not None), Ratio(0.0, FIRST_SPREAD, 0))

    def estimate_s(self, job: str, kind: str, gpus: int, declared_s: float, level: float = 0.5) -> float:
        """Seconds that a run takes, at a level: .5, the median, for occupancy; .9 for deadlines."""
        ratio = self.ratio(job, kind, gpus)
        log_seconds = ratio.log_mean + ratio.log_spread * float(ndtri(level))
        return max(LEAST_SECONDS, declared_s * math.exp(log_seconds))

    def remaining_s(self, job: str, kind: str, gpus: int, declared_s: float, elapsed_s: float) -> float:
        """Expected seconds left to a run that has lasted `elapsed_s` so far, past its estimate or not."""
        ratio = self.ratio(job, kind, gpus)
        mean, spread = ratio.log_mean + math.log(declared_s), ratio.log_spread
        if elapsed_s <= 0:
            return max(LEAST_SECONDS, math.exp(mean + spread**2 / 2))
        # E[T | T > t] of a log-normal is e^(m + s²/2) Φ(s - a) / Φ(-a) for a = (ln t - m) / s. The
        # logarithms of Φ keep their digits far out in the tail, where both Φ vanish.
        distance = (math.log(elapsed_s) - mean) / spread
        log_expected = mean + spread**2 / 2 + float(log_ndtr(spread - distance)) - float(log_ndtr(-distance))
        return max(LEAST_SECONDS, math.exp(min(log_expected, 700.0)) - elapsed_s)


def estimates(past: Iterable[Mapping[str, Any]]) -> Estimates:
    """Learn from completed runs: rows with `job`, `kind`, `gpus`, `declared_s` and `actual_s`.

    Runs that failed or were cancelled say nothing of how long the work takes: the caller leaves them out.
    A row without two positive finite durations is passed over.
    """
    logs: dict[Group, list[float]] = defaultdict(list)
    for row in past:
        if (log_ratio := _log_ratio(row["declared_s"], row["actual_s"])) is not None:
            for group in _groups(row["job"], row["kind"], row["gpus"]):
                logs[group].append(log_ratio)
    learned: dict[Group, Ratio] = {}
    for group in sorted(logs, key=len):
        parent = learned[group[:-1]] if group else Ratio(0.0, FIRST_SPREAD, 0)
        learned[group] = _shrunk(logs[group], parent, OCCURRENCE_SHRINKAGE if len(group) == 3 else SHRINKAGE)
    return Estimates(learned)


def _groups(job: str, kind: str, gpus: int) -> tuple[Group, ...]:
    """All jobs, the kind, the kind at this size, and the occurrences (`stem@instant`) of this job."""
    stem, _, _ = job.partition("@")
    return (), (kind,), (kind, str(gpus)), (kind, str(gpus), stem)


def _log_ratio(declared: float | None, actual: float | None) -> float | None:
    if declared is None or actual is None or not (0 < declared < math.inf and 0 < actual < math.inf):
        return None
    most = math.log(WIDEST_RATIO)
    return min(max(math.log(actual) - math.log(declared), -most), most)


def _shrunk(logs: list[float], parent: Ratio, strength: float) -> Ratio:
    count = len(logs)
    own = sum(logs) / count
    share = count / (count + strength)
    mean = share * own + (1 - share) * parent.log_mean
    # Around the shrunk mean: what the shrinkage leaves wrong is part of the doubt.
    variance = sum((value - mean) ** 2 for value in logs) / count
    spread = math.sqrt(share * variance + (1 - share) * parent.log_spread**2)
    return Ratio(mean, max(LEAST_SPREAD, spread), count)
