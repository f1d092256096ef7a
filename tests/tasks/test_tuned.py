"""What a job measured about its levers, the next one like it starts with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks import ledger, tuned
from tasks.storage import Storage, open_storage
from tasks.train import train_job
from tests.tasks.kind_programs import Job, program
from tests.tasks.worked_hours import Facts
from training import launching
from training.config import TrainingConfig
from training.probe import Probe

CONFIG: dict[str, Any] = {
    "model": "llama-micro",
    "seq_len": 32,
    "global_batch": 8,
    "micro_batch": "auto",
    "activation_checkpointing": "auto",
    "tune_probes": 3,
    "steps": 4,
    "warmup": 1,
    "held_out_windows": 2,
}


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    (tmp_path / "storage").mkdir()
    return open_storage(str(tmp_path / "storage"))


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[TrainingConfig]:
    """Probes that answer at once: 100 tokens/s for each sequence of a pass. Here is what was probed."""
    found: list[TrainingConfig] = []

    def probe(config: TrainingConfig, processes: int) -> Probe:
        found.append(config)
        return Probe(100.0 * int(config.micro_batch), flops_per_token=1e6)

    monkeypatch.setattr(launching, "probe", probe)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")  # a job sets them for itself; put back when the test is over
        monkeypatch.delenv(name)
    return found


def test_the_second_job_starts_at_once_with_what_the_first_found(
    storage: Storage, probed: list[TrainingConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = []
    for name in ("first", "second"):
        job = program(storage, tmp_path / name, {"config": CONFIG}, name)
        train_job(job)
        outcomes.append(job.metrics.known)
        if name == "first":
            assert len(probed) == 4  # the plain loop, and three candidates
            assert probed[0].micro_batch == 1
    assert len(probed) == 4
    first, second = outcomes
    assert (first["tuned"], second["tuned"]) == ("measured", "as outputs/first measured")
    assert second["micro_batch"] == first["micro_batch"] == 8
    assert "levers as outputs/first measured them: fastest of 3 probed" in capsys.readouterr().out
    for outcome in outcomes:
        assert outcome["plain_tokens_per_s"] == 100.0
        assert outcome["gain"] == pytest.approx(outcome["tokens_per_s"] / 100.0)
        assert outcome["plain_mfu"] > 0 and 0 < outcome["mfu"] <= 1
        assert json.loads(outcome["levers"])["micro_batch"] == 8
        assert (outcome["model"], outcome["gpu_type"], outcome["processes"]) == ("llama-micro", "cpu", 1)
        assert "torch" in json.loads(outcome["versions"])


def test_a_job_whose_levers_are_all_set_learns_what_they_save_where_it_asks(
    storage: Storage, probed: list[TrainingConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plain loop is measured once for jobs alike, and nothing beside it."""
    fixed = {**CONFIG, "micro_batch": 4, "activation_checkpointing": "none"}
    outcomes = []
    for name, compare in (("first", True), ("second", True), ("third", False)):
        job = program(storage, tmp_path / name, {"config": fixed, "compare": compare}, name)
        train_job(job)
        outcomes.append(job.metrics.known)
    (plain,) = probed
    assert plain.micro_batch == 1
    assert "plain loop as outputs/first measured it" in capsys.readouterr().out
    *compared, alone = outcomes
    for outcome in compared:
        assert outcome["plain_tokens_per_s"] == 100.0
        assert outcome["gain"] == pytest.approx(outcome["tokens_per_s"] / 100.0)
        assert "saved_gpu_hours" in outcome
        assert outcome["micro_batch"] == 4
    assert [outcome["tuned"] for outcome in outcomes] == ["measured", "as outputs/first measured", "no"]
    assert "gain" not in alone


def test_a_plain_loop_that_does_not_run_is_said_and_stops_nothing(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(config: TrainingConfig, processes: int) -> Probe:
        size = int(config.micro_batch)
        return Probe(100.0) if size > 1 else Probe(None, problem="out of memory", out_of_memory=True)

    monkeypatch.setattr(launching, "probe", probe)
    said: list[str] = []
    config = TrainingConfig(**CONFIG)
    found = tuned.circumstances(config, "H100", 8)
    known = tuned.measure(storage, found, config, 1, "outputs/a", said.append)
    assert known.plain is None
    assert tuned.remembered(storage, found.key) == known
    assert "plain baseline: it does not run: out of memory" in said


def looked_up(storage: Storage, gpu_type: str = "H100", gpus: int = 8, **changes: Any) -> tuple[Any, str]:
    """What a job finds that may not measure, and says."""
    said: list[str] = []
    config = TrainingConfig(**{**CONFIG, **changes})
    _, known, _ = tuned.tuned(storage, config, gpu_type, gpus, "outputs/b", False, said.append)
    return known, "".join(said)


def measured(storage: Storage) -> str:
    """Have a job measure on 8 H100; the key."""
    config = TrainingConfig(**CONFIG)
    found = tuned.circumstances(config, "H100", 8)
    tuned.measure(storage, found, config, 1, "outputs/a", lambda line: None)
    return found.key


@pytest.mark.parametrize(
    "other",
    [
        {"gpu_type": "A100"},
        {"gpus": 4},
        {"seq_len": 64},
        {"global_batch": 16},
        {"model": "llama-tiny"},
        {"precision": "bf16"},
        {"memory_gb": 40.0},
    ],
)
def test_a_job_that_differs_in_what_speed_depends_on_measures_for_itself(
    storage: Storage, probed: list[TrainingConfig], other: dict[str, Any]
) -> None:
    measured(storage)
    assert looked_up(storage)[0].job == "outputs/a"
    assert looked_up(storage, lr=0.1, steps=999)[0].job == "outputs/a"  # of no matter for speed
    assert looked_up(storage, **other)[0] is None


def test_other_versions_are_other_circumstances(
    storage: Storage, probed: list[TrainingConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(storage)
    from dataclasses import replace

    found = tuned.circumstances(TrainingConfig(**CONFIG), "H100", 8)
    assert replace(found, versions={**found.versions, "torch": "9.9"}).key != found.key


DAMAGE: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "torn": lambda body: json.dumps(body).encode()[:40],
    "without what it needs": lambda body: b"{}",
    "of the wrong type": lambda body: json.dumps({**body, "chosen": 5}).encode(),
    "with a lever that is none": lambda body: json.dumps({**body, "chosen": {"speed": 9}}).encode(),
    "that does not divide the batch": lambda body: json.dumps(
        {**body, "chosen": {**body["chosen"], "micro_batch": 3}}
    ).encode(),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_setting_that_cannot_be_used_is_as_if_it_were_not_there(
    storage: Storage, probed: list[TrainingConfig], how: str
) -> None:
    key = measured(storage)
    storage.write(key, DAMAGE[how](json.loads(storage.read(key))))
    assert looked_up(storage)[0] is None


def test_a_setting_that_ran_out_of_memory_is_forgotten(
    storage: Storage, probed: list[TrainingConfig]
) -> None:
    tuned.forget(storage, measured(storage))
    assert looked_up(storage)[0] is None


def test_what_a_gang_measured_is_in_the_record_of_its_configuration(storage: Storage) -> None:
    record = {
        "chosen": {"micro_batch": 2},
        "probes": [{"micro_batch": 2, "tokens_per_s": 300.0}],
        "auto": {"micro_batch": "fastest of 1", "sync": "once a step"},
        "plain": {"tokens_per_s": 100.0, "mfu": None},
        "measuring_s": 9.0,
    }
    found = tuned.measured_together(record, "outputs/gang")
    assert found is not None
    assert (found.chosen, found.why) == ({"micro_batch": 2}, "fastest of 1")
    assert found.plain == launching.Baseline(100.0, None)
    alike = tuned.circumstances(TrainingConfig(**CONFIG), "H100", 16)
    tuned.keep(storage, alike, found, lambda line: None)
    assert tuned.remembered(storage, alike.key) == found
    compared = tuned.measured_together({"auto": {"sync": "once a step"}, "plain": None}, "outputs/gang")
    assert compared is not None and (compared.why, compared.plain) == ("none is open", None)
    assert tuned.measured_together({"auto": record["auto"]}, "outputs/gang") is None, "it measured nothing"


def test_the_ledger_shows_what_was_found(tmp_path: Path) -> None:
    facts = Facts(open_storage(str(tmp_path / "storage")))
    facts.spec()
    facts.commit()
    facts.started()
    metrics = {
        "model": "llama-micro", "gpu_type": "H100", "processes": 8, "tuned": "measured", "mfu": 0.5,
        "plain_mfu": 0.2, "tokens_per_s": 500.0, "plain_tokens_per_s": 200.0, "gain": 2.5, "levers": "{}",
    }  # fmt: skip
    facts.outcome("completed", metrics=metrics)
    ledger.take_in(tmp_path / "ledger", facts.storage)
    with ledger.open_ledger(tmp_path / "ledger") as connection:
        (row,) = ledger.rows(connection, "FROM tuned")
    assert {name: row[name] for name in metrics if name != "tuned"} == {
        name: value for name, value in metrics.items() if name != "tuned"
    }
    assert (row["origin"], row["gpu_seconds"], row["cost"]) == ("measured", 3600.0, 2.0)


@pytest.mark.long
def test_a_real_job_twice(tmp_path: Path) -> None:
    root = tmp_path / "storage"
    root.mkdir()
    jobs = [Job("tasks.train", root, name, {"config": CONFIG}) for name in ("first", "second")]
    for job in jobs:
        assert job.run() == 0, job.said
    assert "plain baseline: " in jobs[0].said and jobs[0].said.count("probe micro_batch") == 3
    assert "plain baseline: " not in jobs[1].said and "probe" not in jobs[1].said.replace("probed", "")
    assert jobs[1].metrics["tuned"] == "as outputs/first measured"
    assert jobs[1].metrics["levers"] == jobs[0].metrics["levers"]
    assert 0 < jobs[1].metrics["plain_mfu"] <= 1
