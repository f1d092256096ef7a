"""The policies that a replay compares: what each knows of demand and durations, and how it plans.

All see the same events and keep the same rules. They differ in two ways only: what they expect, and the mode
of the allocator. So the distance from greedy to slotwise is what optimisation is worth, from backfill to
greedy what the forecast is, and from slotwise to the oracle what nobody can know.

* ``fifo`` and ``backfill`` reserve the highest demand of the week before, the operator's stated peak while
  they have seen less than a week;
* ``greedy`` reserves one quantile of our forecast, the one at which a missing GPU and an idle one cost the
  same;
* ``slotwise`` and ``full`` give the allocator all ten quantiles, which it prices;
* ``oracle`` is slotwise that knows demand and durations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tasks.cluster import Service
from tasks.durations import LEAST_SECONDS, Estimates, JobProfile, Lasted
from tasks.forecast import LEVELS, STATED_LEVELS, STATED_MULTIPLIERS
from tasks.trace import TraceJob

Rows = NDArray[np.float64]  # slots × LEVELS, GPUs
WEEK_S = 7 * 86400.0


@dataclass(frozen=True)
class View:
    """What can be known of a service when an hour is planned.

    Attributes:
        forecast: our quantiles for each slot from the hour on.
        past: GPUs wanted in the samples of the week before, nan for unknown.
        known_s: how far back the record goes.
        truth: what will be wanted at most in each slot; for the oracle alone.
    """

    service: Service
    forecast: Rows
    past: NDArray[np.float64]
    known_s: float
    truth: NDArray[np.float64]


@dataclass(frozen=True)
class Policy:
    """A way to run a cluster.

    Attributes:
        mode: of the allocator. Those that search have `replay.light_mode` between hours.
        expects: the rows that it plans a service by.
        knows: whether it knows demand and durations.
    """

    name: str
    mode: Literal["fifo", "backfill", "greedy", "fast", "full"]
    expects: Callable[[View], Rows]
    knows: bool = False

    @property
    def searches(self) -> bool:
        """Whether its hourly plan is searched for, and its re-plans are light ones."""
        return self.mode in ("fast", "full")


def weekly_peak(view: View) -> Rows:
    """The highest demand of the week before in every slot."""
    seen = float(np.nanmax(view.past)) if np.isfinite(view.past).any() else 0.0
    if view.known_s < WEEK_S:
        seen = max(
            seen, view.service.expected_gpus * float(np.interp(0.95, STATED_LEVELS, STATED_MULTIPLIERS))
        )
    return np.full_like(view.forecast, seen)


def priced_quantile(view: View) -> Rows:
    """Our forecast at c / (1 + c), where c is what a missing GPU costs against an idle one."""
    cost = view.service.shortage_penalty
    level = cost / (1 + cost)
    rows = [np.interp(level, LEVELS, row) for row in view.forecast]
    return np.repeat(np.array(rows)[:, None], len(LEVELS), axis=1)


def quantiles(view: View) -> Rows:
    """Our forecast, whole."""
    return view.forecast


def truth(view: View) -> Rows:
    """What will be wanted; the forecast where nobody recorded it."""
    known = np.repeat(view.truth[:, None], len(LEVELS), axis=1)
    return np.where(np.isnan(known), view.forecast, known)


POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("fifo", "fifo", weekly_peak),
        Policy("backfill", "backfill", weekly_peak),
        Policy("greedy", "greedy", priced_quantile),
        Policy("slotwise", "fast", quantiles),
        Policy("full", "full", quantiles),
        Policy("oracle", "fast", truth, knows=True),
    )
}


@dataclass(frozen=True)
class LearnedDurations:
    """Estimates of one who has seen the runs that completed, the longest of which took `longest_s`, and how
    long those lasted so far that run.

    Where nobody declared a duration, most runs last minutes, and most GPU-hours go to the few that last for
    days. At the median every job would seem short, and wide ones would wait for nodes that never empty; such
    a job is planned at the mean of its tenant's runs of its width, of all of that width while the tenant had
    few, and of the log-normal cut at the longest run while these are few. Declarations of tenants are not
    told apart, and a trace knows no work.
    """

    past: Estimates
    jobs: Mapping[str, TraceJob]
    longest_s: float
    lasted: Lasted
    said: dict[tuple[str, float], float] = field(default_factory=dict)  # each plan of an hour asks again

    def estimate_s(self, profile: JobProfile, level: float = 0.5) -> float:
        """Seconds that a run takes."""
        if (seconds := self.said.get((profile.job, level))) is None:
            if self.jobs[profile.job].declared_s is not None:
                seconds = self.past.estimate_s(replace(profile, tenant=None), level)
            else:
                seconds = self.remaining_s(profile, 0.0)
            self.said[profile.job, level] = seconds
        return seconds

    def remaining_s(self, profile: JobProfile, elapsed_s: float) -> float:
        """Seconds left."""
        if self.jobs[profile.job].declared_s is not None:
            return self.past.remaining_s(replace(profile, tenant=None), elapsed_s)
        supposed_s = self.past.remaining_s(replace(profile, tenant=None), elapsed_s, self.longest_s)
        return self.lasted.remaining_s(profile.gpus, self.jobs[profile.job].tenant, elapsed_s, supposed_s)


@dataclass(frozen=True)
class TrueDurations:
    """Estimates of one who knows the trace."""

    jobs: Mapping[str, TraceJob]

    def estimate_s(self, profile: JobProfile, level: float = 0.5) -> float:
        """Seconds that the job takes, whatever was declared."""
        return max(self.jobs[profile.job].duration_s, LEAST_SECONDS)

    def remaining_s(self, profile: JobProfile, elapsed_s: float) -> float:
        """Seconds left."""
        return max(self.jobs[profile.job].duration_s - elapsed_s, LEAST_SECONDS)
