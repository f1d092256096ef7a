"""Training that never ran is planned by the performance model, and elastic jobs get their widths from it."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from allocator import Choice
from tasks.allocate import build_problem, read_state
from tasks.cluster import Site
from tasks.durations import JobProfile, declared_at, estimates
from tasks.hour import scheduled_hour
from tasks.jobs import Job, read_job
from tasks.predicted import predicted_s, predictions_of
from tasks.specfile import SpecError
from tests.conftest import make_site
from tests.tasks.planned_hours import Runs, answer, ask, begin, end, plan_hour, submit
from tests.tasks.worked_hours import HOUR
from training.models import config_of
from training.performance import duration

CONFIG = {
    "model": "llama-3.1-8b",
    "seq_len": 8192,
    "micro_batch": 1,
    "global_batch": 128,
    "steps": 100,
    "precision": "bf16",
}
TRAINING = {"command": None, "training": {"config": CONFIG}}
SPEC = {"id": "a", "kind": "training", "priority": 2, "duration": "1h", "training": {"config": CONFIG}}


def gpu_site(directory: Path, *types: str, **fields: Any) -> Site:
    """Two nodes of eight GPUs of each type."""
    nodes = [{"name": f"{gpu}-{n}".lower(), "gpus": 8, "gpu": gpu} for gpu in types for n in (0, 1)]
    return make_site(directory, full_mode_seconds=0, services=[], nodes=nodes, **fields)


def planned_jobs(site: Site, at: Any = HOUR) -> dict[str, Any]:
    """The jobs of the problem that would be solved now."""
    state = read_state(site, at)
    return {
        job.id: job for job in build_problem(site, scheduled_hour(site, at, at), state, {}, set(), []).jobs
    }


def slots(seconds: float) -> int:
    """Of ten minutes."""
    return -int(-seconds // 600)


def test_a_list_of_gpus_is_enough_and_widths_and_durations_come_from_the_performance_model(
    tmp_path: Path,
) -> None:
    site = gpu_site(tmp_path, "H100")
    submit(site, "wide", gpus=[8, 16], **TRAINING)
    answer(site, HOUR)
    runs = Runs()
    plan_hour(site, HOUR, runs)
    tokens = 128 * 8192 * 100
    expected = {
        gpus: duration("llama-3.1-8b", tokens, "H100", gpus, "bf16", 8192, 128).seconds for gpus in (8, 16)
    }
    said = ask(site, "SELECT gpus, seconds FROM predictions ORDER BY gpus")
    assert {row["gpus"]: row["seconds"] for row in said} == pytest.approx(expected)
    (row,) = ask(site, "SELECT value, gpus, widths FROM specs")
    assert (row["value"], row["gpus"], row["widths"]) == (5 * 8 * 1, 8, [8, 16])
    # Both nodes were free: the wider choice ends sooner, and all of its ranks are to run.
    assert sorted(rank["node"] for rank in runs.made.values()) == ["h100-0", "h100-1"]


def test_each_gpu_type_has_a_duration_of_its_own_and_widths_that_do_not_fit_are_not_offered(
    tmp_path: Path,
) -> None:
    site = gpu_site(tmp_path, "H100", "A100")
    submit(site, "small", gpus=[1, 8, 16], **TRAINING)
    plan_hour(site, HOUR, Runs())  # no node answers: it stays in the queue
    job = planned_jobs(site)["small"]
    assert [choice.gpus for choice in job.choices] == [8, 16], "8B does not fit on one GPU"
    usual = dict(job.choices[0].slots)
    assert list(usual) == ["H100", "A100"]
    assert usual["A100"] > usual["H100"]
    (row,) = ask(site, "SELECT unpredicted FROM specs")
    assert any(problem.startswith("1 × H100: ") for problem in row["unpredicted"])


def test_a_model_in_storage_and_a_slice_of_one_are_predicted_by_their_sizes(tmp_path: Path) -> None:
    site = gpu_site(tmp_path, "H100")
    site.storage.write("models/mine/config.json", json.dumps(config_of("llama-3.1-8b")).encode())

    def seconds(**changed: Any) -> dict[int, float]:
        job = Job.model_validate({**SPEC, "gpus": [8, 16], "training": {"config": {**CONFIG, **changed}}})
        found = predictions_of(job, site.cluster, site.storage)
        assert found is not None
        assert not found.problems
        return {run.gpus: run.seconds for run in found.runs}

    shipped = seconds()
    assert seconds(model="models/mine") == shipped
    half = seconds(layers=16)
    assert all(0.4 * shipped[gpus] < half[gpus] < 0.7 * shipped[gpus] for gpus in (8, 16))


WITHOUT = {
    "a configuration that is not there": ({"training": {"config": "runs/none.yaml"}}, "runs/none.yaml"),
    "a wrong configuration": ({"training": {"config": {**CONFIG, "steps": -1}}}, "steps"),
    "a model that is not there": ({"training": {"config": {**CONFIG, "model": "models/m"}}}, "models/m"),
    "a model whose sizes are not told": (
        {"training": {"config": {**CONFIG, "model": "models/odd"}}},
        "models/odd: model_type 'gpt2'",
    ),
    "a model that a function makes": (
        {"training": {"config": {**CONFIG, "model": "module:own:build"}}},
        "module:own:build",
    ),
    "a batch that nobody can share": (
        {"training": {"config": {**CONFIG, "global_batch": 9}}},
        "global_batch",
    ),
}


@pytest.mark.parametrize(("fields", "why"), WITHOUT.values(), ids=WITHOUT)
def test_what_cannot_be_predicted_says_why_and_is_planned_by_its_declaration(
    tmp_path: Path, fields: dict[str, Any], why: str
) -> None:
    site = gpu_site(tmp_path, "H100")
    site.storage.write("models/odd/config.json", b'{"model_type": "gpt2"}')
    submit(site, "odd", gpus=[8, 16], **{**TRAINING, **fields})
    done = plan_hour(site, HOUR, Runs())
    assert done.planned
    (row,) = ask(site, "SELECT predicted, unpredicted FROM specs")
    assert row["predicted"] == "[]"
    assert why in " ".join(row["unpredicted"])
    assert planned_jobs(site)["odd"].choices == (Choice(8, 6), Choice(16, slots(declared_at(3600, 8, 16))))


def test_any_job_may_be_elastic_and_twice_the_gpus_are_expected_to_be_somewhat_less_than_twice_as_fast(
    tmp_path: Path,
) -> None:
    site = gpu_site(tmp_path, "cpu")
    submit(site, "own", gpus=[4, 8, 2], duration="2h")
    plan_hour(site, HOUR, Runs())
    choices = planned_jobs(site)["own"].choices
    assert choices == (Choice(4, 12), Choice(8, 7), Choice(2, 23))  # 2 h, 64 min, 3 h 44 min
    (row,) = ask(site, "SELECT predicted FROM specs")
    assert row["predicted"] is None, "nothing was asked of the performance model"


def test_outcomes_correct_predictions(tmp_path: Path) -> None:
    """Two runs took twice as long as was predicted; so will the third, by and by."""
    site = gpu_site(tmp_path, "H100")
    for name in ("first", "second"):
        submit(site, name, gpus=8, **TRAINING)
    answer(site, HOUR)
    runs = Runs()
    plan_hour(site, HOUR, runs)
    said = ask(site, "SELECT DISTINCT seconds FROM predictions")[0]["seconds"]
    later = HOUR + timedelta(seconds=2 * said)
    for rank in runs.made.values():
        begin(site, rank, HOUR)
        end(site, rank, later, started_at="2026-12-01T06:00:00Z", metrics={"gpu_type": "H100"})
    submit(site, "third", gpus=8, **TRAINING)
    plan_hour(site, later, runs, trigger="replan")
    learnt = ask(site, "SELECT predicted_s, actual_s FROM durations")
    assert learnt == [{"predicted_s": pytest.approx(said), "actual_s": pytest.approx(2 * said, abs=1)}] * 2
    assert ask(site, "SELECT count(*) AS n FROM predictions WHERE actual_s > 1.9 * seconds")[0]["n"] == 2
    estimate = read_state(site, later).estimates.estimate_s(
        JobProfile("x", "training", 8, 600.0, predicted_s=1000.0)
    )
    assert 1300 < estimate < 2000


def test_a_prediction_stands_before_recorded_speeds_and_declarations_and_is_believed_until_runs_differ() -> (
    None
):
    known = estimates([])
    assert known.estimate_s(JobProfile("x", "training", 8, 60.0, predicted_s=1000.0)) == pytest.approx(1000)
    row = {"job": "a", "kind": "training", "gpus": 8, "declared_s": 60.0, "actual_s": 500.0}
    known = estimates([{**row, "predicted_s": 1000.0}] * 40)
    halved = known.estimate_s(JobProfile("x", "training", 8, 60.0, predicted_s=1000.0))
    assert halved == pytest.approx(500, rel=0.05)
    broken = known.estimate_s(JobProfile("x", "training", 8, 60.0, predicted_s=float("nan")))
    assert broken > 60


def test_the_slowest_of_mixed_types_counts_and_an_unknown_one_leaves_no_prediction() -> None:
    recorded = '[{"gpu": "H100", "gpus": 8, "seconds": 10}, {"gpu": "A100", "gpus": 8, "seconds": 30}]'
    assert predicted_s(recorded, ["H100", "A100"], 8) == 30
    assert predicted_s(recorded, ["H100", "L40S"], 8) is None
    assert predicted_s(recorded, ["H100"], 16) is None
    assert predicted_s(None, ["H100"], 8) is None


def test_only_training_by_configuration_on_real_gpus_is_predicted(tmp_path: Path) -> None:
    virtual, real = gpu_site(tmp_path / "v", "cpu"), gpu_site(tmp_path / "r", "H100")
    asked = Job.model_validate({**SPEC, "gpus": 8})
    assert predictions_of(asked, virtual.cluster, virtual.storage) is None
    own = Job.model_validate({**SPEC, "gpus": 8, "training": None, "command": ["true"]})
    assert predictions_of(own, real.cluster, real.storage) is None


WRONG = {
    "none": ([], "expected a whole number, or up to 16 different ones"),
    "twice the same": ([8, 8], "different ones"),
    "a word": ([8, "x"], "gpus: [8, 'x']: expected a whole number"),
    "zero": ([8, 0], "gpus: [8, 0]: expected"),
    "a flag": ([True], "expected a whole number"),
    "one that does not fit": ([8, 12], "gpus: 12 does not fit any node"),
}


@pytest.mark.parametrize(("gpus", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_list_of_widths_is_refused_in_a_line(tmp_path: Path, gpus: Any, said: str) -> None:
    site = gpu_site(tmp_path, "H100")
    text = f"id: a\nkind: training\ngpus: {gpus!r}\npriority: 2\nduration: 1h\ncommand: [x]\n"
    with pytest.raises(SpecError, match=r"a\.yaml:3: gpus: ") as error:
        read_job(text, "a.yaml", site)
    assert said in str(error.value)


def test_a_spec_keeps_its_widths_when_it_is_read_again_from_its_fact() -> None:
    job = Job.model_validate({**SPEC, "gpus": [8, 16]})
    assert (job.gpus, job.widths, job.value) == (8, (8, 16), 16.0)
    assert Job.model_validate_json(job.model_dump_json()) == job
    assert Job.model_validate({**SPEC, "gpus": [8]}) == Job.model_validate({**SPEC, "gpus": 8})
