"""The tuner: what fits is predicted, what is fastest is measured, and few probes find it."""

import math
import random
from collections.abc import Callable

import pytest

from training.config import ConfigError, TrainingConfig
from training.probe import Probe
from training.tuner import Machine, best_predicted, candidates, open_levers, tune

CPU = Machine("cpu", {"fp32": 1e11, "bf16": 2e11}, 64e9, 2e10, 64, 2e-4, True, False)
GPU = Machine("cuda", {"bf16": 989e12, "fp8": 1979e12, "fp32": 67e12}, 80e9, 3.35e12, 1024, 1e-4, True, True)
OPEN = TrainingConfig(
    model="llama-30m",
    seq_len=512,
    global_batch=32,
    micro_batch="auto",
    activation_checkpointing="auto",
    compile="auto",
    precision="auto",
)


def device(seed: int) -> Callable[[TrainingConfig], float]:
    """Tokens/s on a device of the test's own: each value of each lever has an effect that nobody predicts."""
    effects: dict[tuple[str, object], float] = {}
    draw = random.Random(seed)

    def tokens_per_s(config: TrainingConfig) -> float:
        log = 7.0 + 0.4 * math.log2(int(config.micro_batch)) / 5  # larger passes are faster, up to a point
        log -= {"none": 0.0, "selective": 0.1, "full": 0.25}[config.activation_checkpointing]
        log += {"fp32": 0.0, "bf16": 0.5, "bf16_master": 0.5, "fp8": 0.6}[config.precision]
        for name in open_levers(OPEN):
            key = (name, getattr(config, name))
            if key not in effects:
                effects[key] = draw.gauss(0, 0.08)
            log += effects[key]
        return math.exp(log)

    return tokens_per_s


def test_a_tenth_of_the_probes_finds_a_setting_within_five_percent_of_the_best() -> None:
    shares = []
    for seed in range(12):
        rate = device(seed)
        found = candidates(OPEN, 1, CPU)
        best = max(rate(OPEN.model_copy(update=each.setting)) for each in found)
        asked: list[TrainingConfig] = []

        def probe(config: TrainingConfig, rate: Callable[[TrainingConfig], float] = rate) -> Probe:
            asked.append(config)  # noqa: B023
            return Probe(rate(config))

        tuned = tune(OPEN, 1, CPU, probe, probes=len(found) // 10)
        assert len(asked) == len(tuned.probes) == len(found) // 10
        assert tuned.config.global_batch == OPEN.global_batch
        shares.append(rate(tuned.config) / best)
    assert len(found) == 108
    assert sum(share > 0.95 for share in shares) >= 11, shares
    assert min(shares) > 0.9, shares


def test_what_ran_out_of_memory_rules_out_what_needs_more() -> None:
    asked: list[int] = []

    def probe(config: TrainingConfig) -> Probe:
        size = int(config.micro_batch)
        asked.append(size)
        return Probe(None, problem="out of memory", out_of_memory=True) if size > 4 else Probe(100.0 * size)

    config = OPEN.model_copy(
        update={"activation_checkpointing": "none", "compile": False, "precision": "fp32"}
    )
    heard: list[str] = []
    tuned = tune(config, 1, CPU, probe, heard.append, probes=6)
    assert tuned.chosen == {"micro_batch": 4}
    failed = [size for size in asked if size > 4]
    assert failed == sorted(failed, reverse=True)  # none larger is tried after one that did not fit
    assert any("out of memory" in line for line in heard)


def test_what_is_not_expected_to_fit_is_never_a_candidate() -> None:
    config = TrainingConfig(
        model="llama-3.1-8b",
        layers=8,
        seq_len=8192,
        global_batch=32,
        micro_batch="auto",
        precision="bf16",
        activation_checkpointing="auto",
    )
    found = candidates(config, 1, GPU)
    assert all(each.memory_bytes is not None and each.memory_bytes < 0.92 * 80e9 for each in found)
    modes = {each.setting["activation_checkpointing"] for each in found if each.setting["micro_batch"] == 4}
    assert "none" not in modes and "full" in modes


def test_when_nothing_fits_the_error_says_what_the_smallest_needs() -> None:
    config = TrainingConfig(model="llama-3.1-70b", seq_len=8192, global_batch=8, micro_batch="auto")
    with pytest.raises(ConfigError, match=r"no setting fits: the smallest needs \d+\.\d GiB, 74\.5 GiB are"):
        candidates(config, 1, GPU)


def test_when_no_probe_runs_there_is_no_choice() -> None:
    with pytest.raises(ConfigError, match="none of 2 probed settings ran"):
        tune(OPEN, 1, CPU, lambda config: Probe(None, problem="it broke"), probes=2)


def test_without_probes_the_prediction_decides_and_says_so() -> None:
    setting, why = best_predicted(OPEN, 1, CPU)
    assert why == "predicted best of 108, not measured"
    assert setting["activation_checkpointing"] == "none"
    assert tune(OPEN, 1, CPU, lambda config: Probe(1.0), probes=0).chosen == setting


def test_every_candidate_divides_the_global_batch_among_the_processes() -> None:
    config = OPEN.model_copy(update={"global_batch": 24})
    sizes = {each.setting["micro_batch"] for each in candidates(config, 2, CPU)}
    assert sizes == {1, 2, 4}


def test_levers_that_a_rule_would_decide_are_measured_when_they_are_named() -> None:
    named = ["parallel", "reshard", "bucket_mb"]
    config = TrainingConfig(model="llama-30m", global_batch=8, micro_batch=4, tune=named)
    assert open_levers(config) == named
    assert open_levers(config.model_copy(update={"tune": []})) == []
    settings = [each.setting for each in candidates(config, 2, CPU)]
    assert len(settings) == 3 + 2  # three buckets with ddp; with fsdp resharded or not
    assert len(candidates(config, 1, CPU)) == 1  # alone they make no difference

    def probe(tried: TrainingConfig) -> Probe:
        return Probe(300.0 if tried.parallel == "fsdp" and tried.reshard is True else 200.0)

    assert tune(config, 2, CPU, probe, probes=5).chosen["parallel"] == "fsdp"


def test_a_processor_without_bf16_is_offered_fp32_alone() -> None:
    from dataclasses import replace

    found = candidates(OPEN, 1, replace(CPU, bf16=False))
    assert {each.setting["precision"] for each in found} == {"fp32"}
