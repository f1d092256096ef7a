"""Random problems: the same from the same seed, valid, as loaded as asked, with the features named."""

import subprocess
import sys
from typing import Any

import pytest
import yaml

from allocator import Problem, ProblemError
from allocator.families import FAMILIES
from allocator.generate import FEATURES, generate, to_yaml
from tests.allocator.scenarios import SCENARIOS


def load(problem: Problem) -> float:
    """Job GPU-slots asked for, over all GPU-slots."""
    asked = sum(
        job.choices[0].gpus * job.choices[0].first_slots for job in problem.jobs if job.running is None
    )
    return asked / (problem.total_gpus * problem.slots)


def test_a_seed_gives_the_same_problem_and_another_seed_another() -> None:
    assert generate(7) == generate(7)
    assert generate(7) != generate(8)


def test_a_seed_gives_the_same_problem_in_a_process_with_other_hashes() -> None:
    code = "from allocator.generate import generate, to_yaml; print(to_yaml(generate(7)), end='')"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "12345", "PYTHONPATH": str(SCENARIOS.parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == to_yaml(generate(7))


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_the_text_of_a_problem_is_the_problem(seed: int) -> None:
    problem = generate(seed)
    assert Problem.from_dict(yaml.safe_load(to_yaml(problem))) == problem


def test_there_is_a_family_for_each_shipped_scenario() -> None:
    assert {path.stem for path in SCENARIOS.glob("*.yaml")} == set(FAMILIES)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_family_asks_for_the_load_that_is_named(family: str) -> None:
    for seed, wanted in ((1, 0.8), (2, 1.5), (3, 2.5)):
        problem = generate(seed, family=family, load=wanted, features=())
        assert load(problem) == pytest.approx(wanted, rel=0.2)  # whole slots of wide jobs are coarse


def test_without_a_load_jobs_ask_for_more_than_there_is_but_for_light_load() -> None:
    for seed in range(30):
        assert 1.1 <= load(generate(seed, features=())) <= 3.3
        assert load(generate(seed, family="light_load", features=())) < 0.6


@pytest.mark.parametrize(
    ("gpus", "jobs", "slots"), [(16, 20, 24), (64, 30, 24), (64, 200, 288), (256, 300, 24)]
)
def test_size_is_as_asked(gpus: int, jobs: int, slots: int) -> None:
    problem = generate(4, gpus=gpus, jobs=jobs, slots=slots, load=1.6, features=())
    assert (problem.total_gpus, len(problem.jobs), problem.slots) == (gpus, jobs, slots)
    assert load(problem) == pytest.approx(1.6, rel=0.12)


SIGNS: dict[str, Any] = {
    "running": lambda p: any(job.running for job in p.jobs),
    "holes": lambda p: p.unavailable,
    "deadlines": lambda p: any(job.deadline is not None for job in p.jobs),
    "types": lambda p: len({node.gpu for node in p.nodes}) == 2,
    "tenants": lambda p: p.tenants and any(job.tenant for job in p.jobs),
    "services": lambda p: len(p.services) > 1,
    "elastic": lambda p: any(len(job.choices) > 1 for job in p.jobs),
    "gangs": lambda p: any(c.gpus > max(n.gpus for n in p.nodes) for job in p.jobs for c in job.choices),
    "reservations": lambda p: p.reservations,
    "ageing": lambda p: p.ageing_per_slot > 0 and any(job.waited for job in p.jobs),
    "announced": lambda p: p.move_cost > 0 and any(job.announced for job in p.jobs),
    "open_end": lambda p: p.open_end,
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_that_is_named_is_there_and_no_other(feature: str) -> None:
    kwargs: dict[str, Any] = {"gpus": 48, "family": "fragmentation", "node_gpus": 8}
    with_it = [generate(seed, features=(feature,), **kwargs) for seed in range(8)]
    assert any(SIGNS[feature](problem) for problem in with_it)
    for other in set(FEATURES) - {feature}:
        assert not any(SIGNS[other](problem) for problem in with_it)


@pytest.mark.parametrize("seed", range(20))
def test_all_features_together_still_make_a_valid_problem(seed: int) -> None:
    problem = generate(seed, features=FEATURES)
    assert Problem.from_dict(problem.to_dict()) == problem


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no gpus": ({"gpus": 0}, "generate: gpus: 0; expected"),
    "negative jobs": ({"jobs": -1}, "generate: jobs: -1; expected"),
    "no slots": ({"slots": 0}, "generate: slots: 0; expected"),
    "no load": ({"load": 0.0}, "generate: load: 0.0; expected"),
    "no node": ({"node_gpus": 0}, "generate: node-gpus: 0; expected"),
    "family": ({"family": "rush"}, "generate: family: rush; expected one of contention"),
    "feature": ({"features": ("gaps",)}, "generate: features: gaps; expected some of running"),
}


@pytest.mark.parametrize("name", sorted(MISTAKES))
def test_a_mistake_names_the_argument_and_what_was_expected(name: str) -> None:
    kwargs, message = MISTAKES[name]
    with pytest.raises(ProblemError) as caught:
        generate(1, **kwargs)
    assert str(caught.value).startswith(message)
