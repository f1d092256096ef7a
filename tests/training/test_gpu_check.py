"""The table of one GPU: the rows that it has, each beside the plain loop, whatever fails in between."""

from typing import Any

import pytest

from training.config import TrainingConfig
from training.gpu_check import measured_rows, print_rows
from training.probe import Probe

TUNED = TrainingConfig(model="llama-micro", seq_len=16, global_batch=4, micro_batch=4, tune_steps=1)


def device(config: TrainingConfig, *others: Any) -> Probe:
    """A device on which a pass of four sequences is twice as fast, and recomputing everything fails."""
    if config.activation_checkpointing == "full":
        return Probe(None, problem="out of memory", out_of_memory=True)
    rate = 200.0 if int(config.micro_batch) == 4 else 100.0
    return Probe(rate, memory_bytes=1e9, flops_per_token=1e6, occupancy=0.5, occupancy_source="counted")


def test_every_lever_is_taken_away_once_and_compared_with_the_plain_loop(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = {row["row"]: row for row in measured_rows(TUNED, True, device)}
    assert rows["plain: fp32, micro-batch 1, nothing on"]["gain"] == 1
    (tuned,) = (row for name, row in rows.items() if name in ("tuned, fp32", "tuned, bf16"))
    assert tuned["gain"] == 2
    assert tuned["memory_gb"] == 1 and tuned["predicted_gb"] > 0 and tuned["mfu"] > 0
    assert rows["tuned without micro_batch"]["gain"] == 1
    assert {"tuned without fused_optimizer", "tuned without keep_host_memory"} <= rows.keys()
    assert rows["tuned with activation_checkpointing full"]["note"] == "out of memory"
    assert "fastest of" in rows["tuner"]["note"]
    print_rows("a device", list(rows.values()))
    said = capsys.readouterr().out
    assert all(name.split()[0] in said for name in rows)


def test_a_row_that_would_come_too_late_is_left_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from training import gpu_check

    monkeypatch.setattr(gpu_check, "BUDGET_S", 0.0)
    rows = measured_rows(TUNED, True, device)
    assert rows[0]["tokens_per_s"] == 100.0
    assert {row["note"] for row in rows[1:-1]} == {"left out: ten minutes are over"}
    assert rows[-1]["row"] == "tuner"


def test_what_counts_most_is_measured_before_the_levers_one_by_one() -> None:
    asked: list[TrainingConfig] = []

    def run(config: TrainingConfig) -> Probe:
        asked.append(config)
        return device(config)

    measured_rows(TUNED, True, run)
    tuner = [place for place, config in enumerate(asked) if place > 1 and config.micro_batch != 1]
    without = next(place for place, config in enumerate(asked) if place and config.micro_batch == 1)
    assert min(tuner) < without


@pytest.mark.long
def test_the_whole_table_on_a_processor(capsys: pytest.CaptureFixture[str]) -> None:
    from training.__main__ import main

    assert main(["gpu-check", "--cpu"]) == 0
    assert "tuned without keep_host_memory" in capsys.readouterr().out
