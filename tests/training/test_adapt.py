"""The micro-batch while training: it grows while it pays and fits, and goes back when it does not."""

from pathlib import Path

import pytest

from tests.training.small_runs import trained
from training import adapt
from training.adapt import Change, Look, decide

IDLE = Look(micro_batch=4, occupancy=0.5, seconds=1.0, memory_share=0.2)


@pytest.mark.parametrize(
    ("look", "before", "ceiling", "expected"),
    [
        (IDLE, None, 16, 8),
        (Look(4, 0.9, 1.0, 0.2), None, 16, None),  # busy enough
        (Look(4, 0.5, 1.0, 0.6), None, 16, None),  # twice as much might not fit
        (IDLE, None, 4, None),  # it was larger once, and no faster
        (Look(16, 0.5, 1.0, 0.2), None, 16, None),  # one pass already
        (Look(8, 0.6, 0.8, 0.3), IDLE, 16, 16),  # it paid: on
        (Look(8, 0.6, 0.99, 0.3), IDLE, 16, 4),  # it did not: back
        (Look(8, 0.9, 0.8, 0.98), IDLE, 16, 4),  # nearly full
        (Look(1, 0.9, 0.8, 0.98), None, 16, None),  # nothing smaller
    ],
)
def test_decisions(look: Look, before: Look | None, ceiling: int, expected: int | None) -> None:
    change = decide(look, before, own_batch=16, ceiling=ceiling)
    assert (change and change.micro_batch) == expected
    assert change is None or change.why


def test_a_run_that_adapts_keeps_its_batch_and_its_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapt, "WINDOW", 3)
    monkeypatch.setattr(adapt, "memory_share", lambda device, limit: 0.1)
    changes = iter([Change(4, "idle"), Change(8, "idle"), Change(2, "full"), None])
    monkeypatch.setattr(adapt, "decide", lambda *asked: next(changes))
    heard: list[str] = []
    found = trained(tmp_path / "a", micro_batch=2, global_batch=8, adapt=True, steps=14, log=heard.append)
    sizes = [line.partition(":")[0] for line in heard if line.startswith("micro_batch")]
    assert sizes == [
        "micro_batch 2 -> 4, accumulation 2",
        "micro_batch 4 -> 8, accumulation 1",
        "micro_batch 8 -> 2, accumulation 4",
    ]
    fixed = trained(tmp_path / "b", micro_batch=2, global_batch=8, steps=14)
    assert found.progress.position == fixed.progress.position == 14 * 8
    assert found.progress.losses == pytest.approx(fixed.progress.losses, rel=1e-4)
