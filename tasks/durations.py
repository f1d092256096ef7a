"""How long jobs really take, learned from the ones that completed and the ones still running.

Invariant: every estimate is a positive finite number of seconds, whatever the past rows hold and however
long a job has overrun. What is learned is the mean and spread of log(actual / expected): for all jobs, each
kind, each tenant's of it, each GPU count of those, and the occurrences of one job, each drawn to the one
before it while it has few runs. Expected is what the performance model predicted for a training run of this
width on these GPUs; else what the amount of work takes at the speed recorded for such jobs, where both are
known (FLOPs at the recorded MFU, tokens, bytes); else what was declared. The cost: a team whose declarations
are far off is believed for its first tens of runs.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeGuard

from scipy.special import log_ndtr, ndtri

Group = tuple[str, ...]
Row = Mapping[str, Any]

# Runs after which a group counts as much as its parent. Occurrences of one job are alike: few tell much; so
# do few how far predictions are off here, as what they do not know is the same for all runs.
SHRINKAGE, OCCURRENCE_SHRINKAGE = 30.0, 3.0
FIRST_SPREAD, LEAST_SPREAD = 0.5, 0.05  # standard deviations of the log-ratio
WIDEST_RATIO = 1000.0  # an outcome further from its declaration than this is a broken row or a broken clock
LEAST_SECONDS = 1.0
WIDTH_EXPONENT = 0.9  # twice the GPUs, 1.87 times as fast: where only the declared width's duration is known
CENSORED_ROUNDS = 4  # of guessing how long the running ones take, and learning from the guess


@dataclass(frozen=True)
class Ratio:
    """Actual over expected seconds, log-normal: mean and deviation of the log, and the runs behind them."""

    log_mean: float
    log_spread: float
    runs: int


@dataclass(frozen=True)
class Work:
    """What a job has to do, in the unit of its kind: FLOPs, tokens, bytes.

    `peak_per_s` is what one GPU could do at best, where speeds are shares of it (MFU), else 1.
    """

    amount: float
    peak_per_s: float = 1.0


@dataclass(frozen=True)
class JobProfile:
    """What is known of a job before it ends."""

    job: str
    kind: str
    gpus: int
    declared_s: float
    tenant: str | None = None
    work: Work | None = None
    predicted_s: float | None = None  # by the performance model, on the GPUs that it is to have


@dataclass(frozen=True)
class Estimates:
    """Ratios and speeds by group; a job uses the narrowest group that has runs."""

    ratios: Mapping[Group, Ratio]
    log_speeds: Mapping[Group, float] = field(
        default_factory=dict
    )  # per GPU, shares of the peak if it is known

    def ratio(self, profile: JobProfile, by: str = "declared") -> Ratio:
        """What is known of jobs like this one; the declaration, with a wide spread, when nothing is."""
        groups = _groups(profile.job, profile.kind, profile.gpus, profile.tenant, by)
        found = (self.ratios.get(group) for group in reversed(groups))
        return next((ratio for ratio in found if ratio is not None), Ratio(0.0, FIRST_SPREAD, 0))

    def estimate_s(self, profile: JobProfile, level: float = 0.5) -> float:
        """Seconds that a run takes, at a level: .5, the median, for occupancy; .9 for deadlines."""
        expected_s, ratio = self._expected(profile)
        log_seconds = ratio.log_mean + ratio.log_spread * float(ndtri(level))
        return max(LEAST_SECONDS, expected_s * math.exp(log_seconds))

    def remaining_s(self, profile: JobProfile, elapsed_s: float, longest_s: float = math.inf) -> float:
        """Expected seconds left to a run that has lasted `elapsed_s` so far, past its estimate or not; none
        lasts longer than `longest_s`.
        """
        expected_s, ratio = self._expected(profile)
        mean, spread = ratio.log_mean + math.log(expected_s), ratio.log_spread
        if elapsed_s >= longest_s:
            return LEAST_SECONDS
        # E[T; T > t] of a log-normal is e^(m + s²/2) Φ(s - a) for a = (ln t - m) / s, and P(T > t) = Φ(-a).
        # The logarithms of Φ keep their digits far out in the tail, where both vanish.
        distance = (math.log(elapsed_s) - mean) / spread if elapsed_s > 0 else -math.inf
        survival = float(log_ndtr(-distance))
        whole = mean + spread**2 / 2
        expected = math.exp(min(whole + float(log_ndtr(spread - distance)) - survival, 700.0))
        if longest_s < math.inf:
            end = (math.log(longest_s) - mean) / spread
            expected -= math.exp(min(whole + float(log_ndtr(spread - end)) - survival, 700.0))
            expected += longest_s * math.exp(float(log_ndtr(-end)) - survival)
        return max(LEAST_SECONDS, expected - max(elapsed_s, 0.0))

    def _expected(self, profile: JobProfile) -> tuple[float, Ratio]:
        """Seconds as predicted, by the work or as declared, and how far from it jobs like this one end."""
        if _positive(profile.predicted_s):
            return profile.predicted_s, self.ratio(profile, "predicted")
        by_work = _work_seconds(self.log_speeds, profile.kind, profile.gpus, profile.tenant, profile.work)
        if by_work is not None:
            return by_work, self.ratio(profile, "work")
        return profile.declared_s, self.ratio(profile)


SUPPOSED_RUNS = 5.0  # what is supposed of how long a job lasts counts as so many runs
# A tenant's jobs of one width are alike: after so many of its runs, they count as much as everybody's.
TENANT_RUNS = 2.0


@dataclass(frozen=True)
class Lengths:
    """Seconds in rising order, and the sums of these from each one on."""

    seconds: list[float]
    sums: list[float]

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Lengths":
        """From seconds in any order."""
        rising = sorted(seconds)
        return cls(rising, [*accumulate(reversed(rising))][::-1])

    def beyond(self, least_s: float) -> tuple[int, float]:
        """How many are longer than that, and by how many seconds in all."""
        first = bisect_right(self.seconds, least_s)
        count = len(self.seconds) - first
        return count, self.sums[first] - count * least_s if count else 0.0


@dataclass(frozen=True)
class Lasted:
    """How long jobs lasted that ended, and those that run so far: of each width, and of a tenant's of it."""

    ended: Mapping[tuple[Any, ...], Lengths]
    running: Mapping[tuple[Any, ...], Lengths]

    @classmethod
    def of(
        cls,
        ended: Iterable[tuple[int, str | None, float]],
        running: Iterable[tuple[int, str | None, float]] = (),
    ) -> "Lasted":
        """From GPUs, tenant and seconds of each run."""
        return cls(_lengths(ended), _lengths(running))

    def remaining_s(self, gpus: int, tenant: str | None, elapsed_s: float, supposed_s: float) -> float:
        """Mean seconds left to those that lasted longer than `elapsed_s`: all of this width, drawn to what is
        supposed, and the tenant's, drawn to all.

        The mean is the time that runs spent beyond `elapsed_s`, over the ends that came there. What runs adds
        its time though its end is not known: were it left out, only short jobs would count at first.
        """
        mean_s = supposed_s
        for group, strength in (((gpus,), SUPPOSED_RUNS), ((gpus, tenant), TENANT_RUNS)):
            ends, spent_s = self.ended.get(group, NO_LENGTHS).beyond(elapsed_s)
            _, running_s = self.running.get(group, NO_LENGTHS).beyond(elapsed_s)
            mean_s = (spent_s + running_s + strength * mean_s) / (ends + strength)
        return mean_s


NO_LENGTHS = Lengths([], [])


def _lengths(runs: Iterable[tuple[int, str | None, float]]) -> dict[tuple[Any, ...], Lengths]:
    found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for gpus, tenant, seconds in runs:
        found[gpus,].append(seconds)
        found[gpus, tenant].append(seconds)
    return {group: Lengths.of(seconds) for group, seconds in found.items()}


def estimates(past: Iterable[Row], running: Iterable[Row] = ()) -> Estimates:
    """Learn from completed runs, and from those that run: rows with `job`, `kind`, `gpus`, `declared_s` and
    `actual_s`, which for a running one is how long it has lasted.

    They may also have `tenant`, and what work estimates need: `work` and `speed`, the amount per second and
    GPU, as a share of `peak_per_s` if that is given. Runs that failed or were cancelled say nothing of how
    long the work takes: the caller leaves them out. `predicted_s` is what was predicted before the run, if
    anything was. A row without two positive finite durations is passed over.
    """
    past, running = list(past), list(running)
    speeds = _speeds(past)
    ended, lasting = _by_group(past, speeds), _by_group(running, speeds)
    learned: dict[Group, Ratio] = {}
    for group in sorted(ended.keys() | lasting.keys(), key=len):
        parent = learned[group[:-1]] if group[:-1] in learned else Ratio(0.0, FIRST_SPREAD, 0)
        alike = len(group) == OCCURRENCE_DEPTH or group[0] == "predicted"
        strength = OCCURRENCE_SHRINKAGE if alike else SHRINKAGE
        learned[group] = _shrunk(ended.get(group, []), lasting.get(group, []), parent, strength)
    return Estimates(learned, speeds)


def declared_at(declared_s: float, asked: int, gpus: int) -> float:
    """The declared duration on another number of GPUs than was asked for first."""
    return declared_s * math.pow(asked / gpus, WIDTH_EXPONENT)


OCCURRENCE_DEPTH = 5  # length of the groups that hold occurrences of one job


def _groups(job: str, kind: str, gpus: int, tenant: str | None, by: str) -> tuple[Group, ...]:
    """All jobs, the kind, the tenant's, those of this size, and the occurrences (`stem@instant`) of it."""
    groups = _kin(kind, gpus, tenant or "", by)
    stem, occurs, _ = job.partition("@")
    return (*groups, (*groups[-1], stem)) if occurs else groups


@lru_cache(maxsize=1024)
def _kin(kind: str, gpus: int, tenant: str, by: str) -> tuple[Group, ...]:
    return (by,), (by, kind), (by, kind, tenant), (by, kind, tenant, str(gpus))


def _by_group(rows: list[Row], speeds: Mapping[Group, float]) -> dict[Group, list[float]]:
    """Logarithms of actual over expected."""
    logs: dict[Group, list[float]] = defaultdict(list)
    for row in rows:
        kind, gpus, tenant = row["kind"], row["gpus"], row.get("tenant")
        pairs = {
            "declared": row["declared_s"],
            "work": _work_seconds(speeds, kind, gpus, tenant, _work(row)) if row.get("work") else None,
            "predicted": row.get("predicted_s"),
        }
        for by, expected_s in pairs.items():
            if expected_s is not None and (log_ratio := _log_ratio(expected_s, row["actual_s"])) is not None:
                for group in _groups(row["job"], kind, gpus, tenant, by):
                    logs[group].append(log_ratio)
    return logs


def _speeds(past: list[Row]) -> dict[Group, float]:
    """Mean log-speed of a kind, of a tenant's jobs of it, of those of one size; drawn to the one before."""
    logs: dict[Group, list[float]] = defaultdict(list)
    for row in past:
        if _positive(speed := row.get("speed")):
            for group in _speed_groups(row["kind"], row["gpus"], row.get("tenant")):
                logs[group].append(math.log(speed))
    learned: dict[Group, float] = {}
    for group in sorted(logs, key=len):
        count, own = len(logs[group]), sum(logs[group]) / len(logs[group])
        share = count / (count + SHRINKAGE) if len(group) > 1 else 1.0
        learned[group] = share * own + (1 - share) * learned.get(group[:-1], own)
    return learned


def _speed_groups(kind: str, gpus: int, tenant: str | None) -> tuple[Group, ...]:
    return (kind,), (kind, tenant or ""), (kind, tenant or "", str(gpus))


def _work(row: Row) -> Work | None:
    amount, peak = row.get("work"), row.get("peak_per_s")
    return Work(amount, peak if _positive(peak) else 1.0) if _positive(amount) else None


def _work_seconds(
    log_speeds: Mapping[Group, float], kind: str, gpus: int, tenant: str | None, work: Work | None
) -> float | None:
    """What the work takes at the speed of such jobs, or None when either is unknown."""
    if work is None:
        return None
    groups = reversed(_speed_groups(kind, gpus, tenant))
    speed = next((log_speeds[group] for group in groups if group in log_speeds), None)
    if speed is None:
        return None
    seconds = work.amount / (math.exp(speed) * work.peak_per_s * gpus)
    return seconds if _positive(seconds) else None


def _positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 < value < math.inf


def _log_ratio(expected: float | None, actual: float | None) -> float | None:
    if not (_positive(expected) and _positive(actual)):
        return None
    most = math.log(WIDEST_RATIO)
    return min(max(math.log(actual) - math.log(expected), -most), most)


def _shrunk(ended: list[float], lasting: list[float], parent: Ratio, strength: float) -> Ratio:
    """Mean and spread of a group, drawn to its parent's.

    A running job is known to end later than now (`lasting`): it counts as what such jobs end at, given the
    mean and spread so far, and these are learned again (expectation and maximisation).
    """
    found = _drawn([(value, 0.0) for value in ended], parent, strength) if ended else parent
    for _ in range(CENSORED_ROUNDS if lasting else 0):
        guesses = [_beyond(value, found) for value in lasting]
        found = _drawn([(value, 0.0) for value in ended] + guesses, parent, strength)
    return Ratio(found.log_mean, found.log_spread, len(ended))


def _drawn(values: list[tuple[float, float]], parent: Ratio, strength: float) -> Ratio:
    """From (value, variance of it) pairs."""
    count = len(values)
    share = count / (count + strength)
    mean = share * sum(value for value, _ in values) / count + (1 - share) * parent.log_mean
    # Around the shrunk mean: what the shrinkage leaves wrong is part of the doubt.
    variance = sum((value - mean) ** 2 + doubt for value, doubt in values) / count
    spread = math.sqrt(share * variance + (1 - share) * parent.log_spread**2)
    return Ratio(mean, max(LEAST_SPREAD, spread), count)


def _beyond(least: float, ratio: Ratio) -> tuple[float, float]:
    """Mean and variance of a normal value that is known to lie above `least`."""
    distance = (least - ratio.log_mean) / ratio.log_spread
    # The normal density over its upper tail; far out it nears the distance itself.
    hazard = math.exp(-(distance**2) / 2 - 0.5 * math.log(2 * math.pi) - float(log_ndtr(-distance)))
    mean = max(ratio.log_mean + ratio.log_spread * hazard, least)
    return mean, ratio.log_spread**2 * max(1 + distance * hazard - hazard**2, 0.0)
