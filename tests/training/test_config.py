"""Configurations: what is wrong is said in one line that names the key."""

from pathlib import Path
from typing import Any

import pytest

from training.config import (
    LEVERS,
    ConfigError,
    TrainingConfig,
    checked,
    lever_table,
    levers_on,
    load_config,
    plain_of,
    preserving_of,
)

WRONG = [
    ({"modle": "llama-tiny"}, "c: modle: unknown key; did you mean model?"),
    ({"zzz": 1}, "c: zzz: unknown key; expected one of model, data"),
    ({"steps": 0}, "c: steps: 0: expected at least 1"),
    ({"lr": "fast"}, "c: lr: 'fast': expected a number"),
    ({"precision": "fp64"}, "c: precision: 'fp64': expected 'fp32', 'bf16', 'bf16_master', 'fp8' or 'auto'"),
    ({"lr": float("inf")}, "c: lr: inf: expected a finite number"),
    ({"held_out": 0.5}, "c: held_out: 0.5: expected less than 0.5"),
    ({"accumulation": 2, "global_batch": 8}, "c: expected accumulation or global_batch, not both"),
    ({"micro_batch": 3, "global_batch": 8}, "c: global_batch 8: expected a multiple of micro_batch 3"),
    ({"micro_batch": 0}, "c: micro_batch: 0: expected at least 1, or auto"),
    ({"compile": "sometimes"}, "c: compile: 'sometimes': expected true or false, or auto"),
    ({"micro_batch": "auto"}, "c: micro_batch: auto; expected global_batch beside it"),
    (
        {"tune": ["lr"]},
        "c: tune: lr: expected some of attention, parallel, reshard, layers_per_group",
    ),
    ({"nccl": {"PATH": "x"}}, "c: nccl: PATH: expected names that begin with NCCL_"),
    ([1], r"c: \[1\]; expected a mapping with model, data"),
]


@pytest.mark.parametrize(("data", "message"), WRONG)
def test_a_mistake_is_one_line_that_names_the_key(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}".replace("?", r"\?")) as caught:
        checked(TrainingConfig, data, "c")
    assert "\n" not in str(caught.value)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("")
    assert load_config(tmp_path / "c.yaml") == TrainingConfig()


def test_a_file_that_is_not_yaml_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"c\.yaml: not YAML") as caught:
        load_config(tmp_path / "c.yaml")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: No such file"):
        load_config(tmp_path / "gone.yaml")


@pytest.mark.parametrize(("processes", "passes"), [(1, 8), (2, 4), (8, 1)])
def test_the_global_batch_stays_the_same_on_more_processes(processes: int, passes: int) -> None:
    config = TrainingConfig(micro_batch=4, global_batch=32)
    assert config.accumulation_for(processes) == passes


def test_a_global_batch_that_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of micro_batch 4 times 3 processes"):
        TrainingConfig(micro_batch=4, global_batch=32).accumulation_for(3)


def test_every_lever_is_a_key_with_a_default_and_says_what_it_does_to_the_numbers() -> None:
    rows = {name: rest for name, *rest in lever_table()}
    assert rows.keys() == LEVERS.keys() <= TrainingConfig.model_fields.keys()
    assert rows["compile"] == ["false", "false", "preserved, to rounding", LEVERS["compile"].what]
    assert rows["precision"][2] == "changed"


def test_the_plain_baseline_keeps_the_batch_and_what_is_learned() -> None:
    config = TrainingConfig(micro_batch=4, accumulation=3, precision="bf16", compile=True, lr=0.5)
    plain = plain_of(config, 2)
    assert (plain.global_batch, plain.micro_batch, plain.precision, plain.sync) == (24, 1, "fp32", "every")
    assert plain.lr == 0.5
    assert levers_on(plain) == {}
    assert levers_on(config)["precision"] == "bf16"


def test_numerics_preserving_levers_leave_the_precision_plain() -> None:
    config = TrainingConfig(micro_batch=4, precision="bf16", reduce_precision="bf16", compile=True)
    kept = preserving_of(config)
    assert (kept.precision, kept.reduce_precision, kept.compile) == ("fp32", "fp32", True)
