"""What watches a run: occupancy with its source, a watchdog, and lines that people read."""

import io
import math
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from training.occupancy import GpmCounter, occupancy_meter
from training.progress import Shown, told
from training.watchdog import EXIT_HUNG, Watchdog

HANGS = """
import time
from training.watchdog import Watchdog
with Watchdog(0.2) as watchdog:
    watchdog.beat("step 7")
    time.sleep(60)
"""


class NVMLError(Exception):
    """As pynvml names it."""


def nvml(supported: bool = True, utilization: float = 64.0) -> Any:
    """What GpmCounter uses of pynvml, for a GPU that answers so."""
    made: list[int] = []

    def sample() -> int:
        made.append(len(made))
        return made[-1]

    def metrics_get(asked: Any) -> None:
        assert asked.metrics[0].metricId == 5 and asked.numMetrics == 1
        assert {asked.sample1, asked.sample2} == {0, 1}
        asked.metrics[0].value, asked.metrics[0].nvmlReturn = utilization, 0

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlGpmQueryDeviceSupport=lambda handle: SimpleNamespace(isSupportedDevice=supported),
        nvmlGpmSampleAlloc=sample,
        nvmlGpmSampleGet=lambda handle, sample: None,
        nvmlGpmMetricsGet=metrics_get,
        NVML_GPM_METRICS_GET_VERSION=1,
        c_nvmlGpmMetricsGet_t=lambda: SimpleNamespace(metrics=[SimpleNamespace()]),
    )


def test_the_counter_gives_the_share_of_cycles_and_its_source() -> None:
    found = GpmCounter("a-b", nvml(utilization=64.0)).read()
    assert found is not None
    assert (found.share, found.source) == (0.64, "GPM: Tensor Core active cycles")


@pytest.mark.parametrize("utilization", [math.nan, 140.0])
def test_a_reading_that_cannot_be_is_none(utilization: float) -> None:
    assert GpmCounter("a-b", nvml(utilization=utilization)).read() is None


def test_a_gpu_without_counters_is_told_apart() -> None:
    with pytest.raises(OSError, match="no GPM metrics"):
        GpmCounter("a-b", nvml(supported=False))


def test_a_driver_that_fails_later_gives_nothing() -> None:
    found = nvml()
    counter = GpmCounter("a-b", found)

    def fail(asked: Any) -> None:
        raise NVMLError("not supported")

    found.nvmlGpmMetricsGet = fail
    assert counter.read() is None


def test_without_counters_occupancy_is_work_over_the_best_matmul() -> None:
    import torch

    found = occupancy_meter(torch.device("cpu"), lambda: 30.0, lambda: 40.0)()
    assert found.share == 0.75
    assert "best matmul measured on this device" in found.source


def test_a_run_that_hangs_is_ended_and_says_where_it_was() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == EXIT_HUNG
    assert "training: hung for" in ended.stderr and "in step 7; ended (hang_seconds)" in ended.stderr
    assert "Current thread" in ended.stderr or "Thread 0x" in ended.stderr


def test_a_run_that_goes_on_is_left_alone() -> None:
    with Watchdog(5.0) as watchdog:
        for step in range(3):
            watchdog.beat(f"step {step}")
            time.sleep(0.01)
    watchdog.thread.join(10)
    assert not watchdog.thread.is_alive()


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({"loss": 2.5}, "loss 2.5000"),
        ({"loss": None}, "left out"),
        ({"loss": 2.5, "tokens_per_s": 1234.4, "mfu": 0.412}, "loss 2.5000, 1234 tokens/s, MFU 41.2%"),
    ],
)
def test_a_step_is_one_short_line(metrics: dict[str, Any], line: str) -> None:
    assert told(metrics) == line


class Terminal(io.StringIO):
    """What is written to it, by a program that thinks a person watches."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("watched", [True, False])
def test_a_terminal_shows_a_bar_with_lines_above_it_and_anything_else_a_line_per_step(
    watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out: io.StringIO = Terminal() if watched else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    with Shown(lambda line: print(line)) as shown:
        for step in (1, 2):
            shown.step({"steps": step, "steps_total": 2, "loss": 1.5, "mfu": 0.5})
        shown.line("resumed after step 1")
    said = out.getvalue()
    assert "resumed after step 1" in said and "loss 1.5000, MFU 50.0%" in said
    assert ("2/2" in said and "\x1b[" in said) if watched else ("step 2/2: loss 1.5000" in said)
