"""A configuration is diagnosed by running it: planted faults are found, and nothing of the run is touched."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from training.__main__ import main
from training.capture import Captured, Gain, captured
from training.config import TrainingConfig
from training.data import Windows
from training.diagnosis import words
from training.remedies import candidates
from training.trace import CAUSES, Breakdown

SMALL = TrainingConfig(model="llama-micro", seq_len=16, micro_batch=1, global_batch=2, held_out_windows=1)


def test_a_slow_loader_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Windows.at

    def slow(self: Windows, position: int, count: int) -> Any:
        time.sleep(0.2)
        return made(self, position, count)

    monkeypatch.setattr(Windows, "at", slow)
    seen = captured(SMALL, steps=2)
    (found,) = seen.ranks
    assert found.steps == 2
    assert seen.mfu is not None
    assert found.seconds["data"] >= 2 * 0.2
    assert any(line.startswith("waiting for data takes") for line in words([found]))


def test_each_candidate_changes_one_lever_and_keeps_the_global_batch() -> None:
    config = SMALL.model_copy(update={"global_batch": 8, "micro_batch": 2})
    found = {one.line: one.config for one in candidates(config)}
    assert {"micro_batch: 4", "micro_batch: 8", "precision: bf16"} <= found.keys()
    for changed in found.values():
        batch = changed.accumulation_for(1) * int(changed.micro_batch)
        assert batch == 8
        different = [
            name for name in type(config).model_fields if getattr(changed, name) != getattr(config, name)
        ]
        assert len(different) <= 2  # two that only work together


def test_a_configuration_that_is_wrong_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("micro_bach: 1")
    assert main(["diagnose", str(tmp_path / "c.yaml")]) == 2
    assert main(["diagnose"]) == 2
    assert main(["diagnose", str(tmp_path / "c.yaml"), "--processes", "0"]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert "micro_bach: unknown key; did you mean micro_batch?" in first
    assert "expected either a configuration or --trace" in second
    assert "--processes: 0; expected 1 or more" in third


def test_a_lever_that_changes_the_numbers_is_labelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from training import capture

    (tmp_path / "c.yaml").write_text("model: llama-micro")
    ranks = [Breakdown(0, 1, dict.fromkeys(CAUSES, 0.0) | {"compute": 1.0}, 0.0, "cpu")]
    won = [
        Gain("precision: bf16", 1.5, "compute", "changes"),
        Gain("compile: true", 1.2, "compute", "preserved"),
    ]
    monkeypatch.setattr(capture, "examined", lambda config, *rest: (Captured(ranks, 0.1, config), won))
    assert main(["diagnose", str(tmp_path / "c.yaml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("precision: bf16") and line.endswith("changes numerics") for line in lines)
    assert any(line.startswith("compile: true") and line.endswith("+2.0 MFU points") for line in lines)
    assert main(["diagnose", str(tmp_path / "c.yaml"), "--json"]) == 0
    levers = json.loads(capsys.readouterr().out)["levers"]
    assert [lever["numerics"] for lever in levers] == ["changes", "preserved"]
