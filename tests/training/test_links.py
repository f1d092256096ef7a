"""The NVLink mesh as people read it."""

from types import SimpleNamespace
from typing import Any

import pytest

from training.links import mesh_lines, visible_gpus


class NVMLError(Exception):
    """As pynvml names it."""


def nvml(missing: set[tuple[int, int]], count: int = 4) -> Any:
    """A node of GPUs on which these pairs are not linked."""
    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetP2PStatus=lambda left, right, what: 5 if (left, right) in missing else 0,
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
    )


EVERY = {(left, right) for left in range(4) for right in range(left + 1, 4)}


@pytest.mark.parametrize(
    ("missing", "lines"),
    [
        (set(), ["NVLink: a full mesh of 4 GPUs"]),
        (EVERY, ["NVLink: none between 4 GPUs; collectives go over PCIe"]),
        ({(1, 3)}, ["warning: NVLink: GPUs 1 and 3 are not linked; every collective waits for them"]),
    ],
)
def test_a_missing_link_names_its_pair(missing: set[tuple[int, int]], lines: list[str]) -> None:
    assert mesh_lines(range(4), nvml(missing)) == lines


def test_without_a_driver_nothing_is_claimed() -> None:
    def fail() -> None:
        raise NVMLError("Driver Not Loaded")

    found = nvml(set())
    found.nvmlInit = fail
    assert mesh_lines(None, found) == ["NVLink: not known: Driver Not Loaded"]


@pytest.mark.parametrize(
    ("listed", "expected"), [("2,3", [2, 3]), ("", [0, 1, 2, 3]), ("GPU-1a,GPU-2b", [0, 1, 2, 3])]
)
def test_gpus_that_are_hidden_are_left_out(listed: str, expected: list[int]) -> None:
    assert visible_gpus(4, {"CUDA_VISIBLE_DEVICES": listed}) == expected
