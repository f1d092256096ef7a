"""Durations: what completed runs teach, and what is left of one that runs."""

import math
from typing import Any

import numpy as np
import pytest

from tasks.durations import LEAST_SECONDS, JobProfile, Lasted, Work, estimates

HOUR = 3600.0
EIGHT = JobProfile("x", "training", 8, HOUR)  # a job that no past run is an occurrence of


def run(
    job: str, ratio: float, kind: str = "training", gpus: int = 8, declared: float = HOUR
) -> dict[str, Any]:
    """A completed run that took `ratio` times what it declared."""
    return {"job": job, "kind": kind, "gpus": gpus, "declared_s": declared, "actual_s": ratio * declared}


def test_without_a_past_the_declaration_is_believed() -> None:
    assert estimates([]).estimate_s(JobProfile("a", "training", 8, HOUR)) == pytest.approx(HOUR)


def test_a_few_runs_move_the_estimate_a_little_and_many_move_it_all_the_way() -> None:
    few = estimates([run(f"j{i}", 0.5) for i in range(3)]).estimate_s(JobProfile("new", "training", 8, HOUR))
    many = estimates([run(f"j{i}", 0.5) for i in range(300)]).estimate_s(
        JobProfile("new", "training", 8, HOUR)
    )
    assert 0.75 * HOUR < few < 0.95 * HOUR
    assert 0.49 * HOUR < many < 0.53 * HOUR


def test_occurrences_of_one_job_teach_quickly() -> None:
    past = [run(f"nightly@2026-11-{day:02}", 0.5) for day in range(1, 10)]
    learned = estimates(past)
    occurrence = learned.estimate_s(JobProfile("nightly@2026-11-10", "training", 8, HOUR))
    other = learned.estimate_s(JobProfile("weekly@2026-11-10", "training", 8, HOUR))
    assert occurrence < 0.62 * HOUR < other


def test_each_kind_and_size_has_its_own_ratio() -> None:
    past = [run(f"t{i}", 0.5) for i in range(100)] + [
        run(f"q{i}", 2.0, "quantization", 1) for i in range(100)
    ]
    learned = estimates(past)
    assert learned.estimate_s(EIGHT) < 0.7 * HOUR
    assert learned.estimate_s(JobProfile("x", "quantization", 1, HOUR)) > 1.5 * HOUR
    # A size never seen uses its kind, a kind never seen all jobs together.
    assert learned.estimate_s(JobProfile("x", "training", 64, HOUR)) < 0.8 * HOUR
    assert learned.estimate_s(JobProfile("x", "batch_inference", 1, HOUR)) == pytest.approx(HOUR, rel=0.1)


def test_a_higher_level_is_longer() -> None:
    learned = estimates([run(f"j{i}", 0.5 + i % 3) for i in range(60)])
    levels = [learned.estimate_s(EIGHT, level) for level in (0.1, 0.5, 0.9)]
    assert levels == sorted(levels)
    assert levels[2] > 1.3 * levels[1]


BROKEN: dict[str, tuple[float | None, float | None]] = {
    "no end": (HOUR, None),
    "no declaration": (None, HOUR),
    "zero": (HOUR, 0.0),
    "a clock that went back": (HOUR, -5.0),
    "not a number": (HOUR, math.nan),
    "endless": (HOUR, math.inf),
}


@pytest.mark.parametrize(("declared", "actual"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_row_teaches_nothing(declared: float | None, actual: float | None) -> None:
    broken = {"job": "a", "kind": "training", "gpus": 8, "declared_s": declared, "actual_s": actual}
    good = [run("b", 0.8)]
    assert estimates([*good, broken]) == estimates(good)


def test_an_absurd_run_counts_no_more_than_a_thousandfold() -> None:
    assert estimates([run("a", 1e9)]) == estimates([run("a", 1000.0)])


@pytest.mark.parametrize("elapsed", [0.0, 1.0, HOUR, 10 * HOUR, 1e4 * HOUR, 1e9])
@pytest.mark.parametrize("ratio", [None, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("declared", [1.0, HOUR, 365 * 24 * HOUR])
def test_something_finite_is_always_left(elapsed: float, ratio: float | None, declared: float) -> None:
    past = [] if ratio is None else [run("a", ratio)] * 500
    left = estimates(past).remaining_s(JobProfile("a", "training", 8, declared), elapsed)
    assert 0 < left < math.inf


def test_what_is_left_shrinks_towards_the_estimate_and_grows_once_it_is_overrun() -> None:
    learned = estimates([run(f"j{i}", 0.7 + 0.006 * i) for i in range(100)])
    left = [learned.remaining_s(EIGHT, part * HOUR) for part in (0.0, 0.5, 0.9)]
    assert left == sorted(left, reverse=True)
    late = [learned.remaining_s(EIGHT, part * HOUR) for part in (2, 4, 8, 16)]
    assert late == sorted(late)


def test_what_is_left_is_the_mean_of_the_runs_that_lasted_as_long() -> None:
    rng = np.random.default_rng(3)
    ratios = np.exp(rng.normal(-0.2, 0.6, 20_000))
    learned = estimates(run("j", float(ratio)) for ratio in ratios)
    for part in (0.3, 1.0, 2.0):
        survived = ratios[ratios > part]
        expected = (survived.mean() - part) * HOUR
        assert learned.remaining_s(JobProfile("j", "training", 8, HOUR), part * HOUR) == pytest.approx(
            expected, rel=0.05
        )


def test_each_tenants_declarations_are_believed_as_far_as_its_own_runs_bear_them_out() -> None:
    past = [run(f"a{i}", 0.3) | {"tenant": "hasty"} for i in range(100)]
    past += [run(f"b{i}", 2.0) | {"tenant": "slow"} for i in range(100)]
    learned = estimates(past)
    seconds = {
        tenant: learned.estimate_s(JobProfile("x", "training", 8, HOUR, tenant=tenant))
        for tenant in ("hasty", "slow", "new")
    }
    assert seconds["hasty"] < 0.5 * HOUR
    assert seconds["slow"] > 1.5 * HOUR
    assert seconds["hasty"] < seconds["new"] < seconds["slow"]


def test_a_job_that_runs_longer_than_any_before_teaches_that_its_like_do() -> None:
    past = [run(f"j{i}", 1.0) for i in range(10)]
    lasting = [run(f"r{i}", 3.0) for i in range(10)]  # three times the declaration, and still at it
    just_begun = [run(f"r{i}", 0.01) for i in range(10)]
    alone, taught, begun = (
        estimates(past, running).estimate_s(EIGHT) for running in ([], lasting, just_begun)
    )
    assert taught > 1.3 * alone
    assert begun == pytest.approx(alone, rel=0.1)
    ended = estimates(past + lasting).estimate_s(EIGHT)
    assert taught > ended  # they will take longer still


def test_running_jobs_correct_what_only_looking_at_ended_ones_gets_wrong() -> None:
    """Of long jobs that began at the same time, the short ones end first."""
    rng = np.random.default_rng(3)
    ratios = np.exp(rng.normal(0.5, 0.8, 400))
    now = 1.5
    ended = [run(f"e{i}", float(ratio)) for i, ratio in enumerate(ratios) if ratio <= now]
    lasting = [run(f"r{i}", now) for i, ratio in enumerate(ratios) if ratio > now]
    truth = math.exp(0.5) * HOUR
    blind = estimates(ended).estimate_s(EIGHT)
    seeing = estimates(ended, lasting).estimate_s(EIGHT)
    assert abs(seeing - truth) < 0.25 * abs(blind - truth)


def test_training_takes_its_flops_at_the_recorded_mfu_of_the_peak() -> None:
    peak = 1e15
    work = Work(0.4 * peak * 8 * HOUR, peak)  # an hour at an MFU of .4 on eight GPUs
    past = [
        run(f"t{i}", 1.1, declared=5 * HOUR) | {"work": work.amount * 5, "peak_per_s": peak, "speed": 0.4}
        for i in range(200)
    ]
    learned = estimates(past)
    assert learned.estimate_s(JobProfile("x", "training", 8, 9 * HOUR, work=work)) == pytest.approx(
        1.1 * HOUR, rel=0.05
    )
    # Twice the GPUs, half the time; a GPU with half the peak, twice the time. The declaration says nothing.
    wide = learned.estimate_s(JobProfile("x", "training", 16, 9 * HOUR, work=work))
    assert wide == pytest.approx(0.55 * HOUR, rel=0.1)
    slow = learned.estimate_s(JobProfile("x", "training", 8, 9 * HOUR, work=Work(work.amount, peak / 2)))
    assert slow == pytest.approx(2.2 * HOUR, rel=0.05)


def test_batch_inference_takes_its_tokens_at_the_recorded_speed_and_corrects_them() -> None:
    """Rows that stop early: half the tokens that they may take at most."""
    past = [
        run(f"b{i}", 0.5, "batch_inference", 1) | {"work": 1000 * HOUR, "speed": 1000.0} for i in range(300)
    ]
    learned = estimates(past)
    found = learned.estimate_s(JobProfile("x", "batch_inference", 1, 7 * HOUR, work=Work(2000 * HOUR)))
    assert found == pytest.approx(HOUR, rel=0.06)


def test_without_a_recorded_speed_the_declaration_stands() -> None:
    learned = estimates([run("a", 1.0)])
    with_work = learned.estimate_s(JobProfile("x", "training", 8, 3 * HOUR, work=Work(1e20, 1e15)))
    assert with_work == learned.estimate_s(JobProfile("x", "training", 8, 3 * HOUR))


def test_nothing_is_expected_to_outlast_the_longest() -> None:
    rng = np.random.default_rng(4)
    ratios = np.exp(rng.normal(-0.5, 2.5, 20_000))
    learned = estimates(run("j", float(ratio)) for ratio in ratios)
    seen = np.minimum(ratios, 24.0) * HOUR  # most of the mean of such runs lies beyond a day
    for elapsed in (0.0, HOUR, 10 * HOUR):
        left = learned.remaining_s(JobProfile("j", "training", 8, HOUR), elapsed, 24 * HOUR)
        assert left == pytest.approx((seen[seen > elapsed] - elapsed).mean(), rel=0.05)
    assert learned.remaining_s(EIGHT, 24 * HOUR, 24 * HOUR) == LEAST_SECONDS


def test_many_runs_of_a_width_say_what_is_left_and_none_leave_it_at_what_is_supposed() -> None:
    lasted = Lasted.of([(8, "a", 100.0)] * 500 + [(8, "a", 900.0)] * 500)
    everybody_s = (500 * 1000 + 5 * 1e6) / 1005
    assert lasted.remaining_s(8, "b", 0.0, 1e6) == pytest.approx((2 * everybody_s) / 2)
    assert lasted.remaining_s(8, "b", 100.0, 800.0) == pytest.approx(800.0)  # only the long ones are left
    assert lasted.remaining_s(8, "b", 900.0, 70.0) == 70.0  # nothing lasted longer
    assert lasted.remaining_s(4, "a", 0.0, 70.0) == 70.0  # nothing is known of this width


def test_a_tenants_few_runs_of_a_width_outweigh_many_of_others() -> None:
    lasted = Lasted.of([(8, "others", 1000.0)] * 995 + [(8, "short", 100.0)] * 8)
    everybody_s = (995 * 1000 + 8 * 100 + 5 * 1000.0) / 1008
    assert lasted.remaining_s(8, "short", 0.0, 1000.0) == pytest.approx((8 * 100 + 2 * everybody_s) / 10)
    assert lasted.remaining_s(8, None, 0.0, 1000.0) == pytest.approx(everybody_s)


def test_runs_that_have_not_ended_count_by_the_time_they_took_so_far() -> None:
    ended, running = [(8, None, 100.0)] * 10, [(8, None, 5000.0)] * 4
    lasted = Lasted.of(ended, running)
    everybody_s = (1000 + 20_000 + 5 * 100.0) / 15  # 21,000 seconds of work, and ten ends
    assert lasted.remaining_s(8, None, 0.0, 100.0) == pytest.approx((21_000 + 2 * everybody_s) / 12)
    assert lasted.remaining_s(8, None, 0.0, 100.0) > 10 * Lasted.of(ended).remaining_s(8, None, 0.0, 100.0)
    # Beyond 4000 seconds no run has ended, and four have gone on for 1000 each.
    everybody_s = (4 * 1000 + 5 * 60.0) / 5
    assert lasted.remaining_s(8, None, 4000.0, 60.0) == pytest.approx((4 * 1000 + 2 * everybody_s) / 2)
