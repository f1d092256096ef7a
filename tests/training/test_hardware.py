"""Peaks: looked up whole and never guessed; measured once and kept."""

from pathlib import Path

import pytest

from training import hardware
from training.hardware import HardwareError, gpu, measured_peak, published_peak


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hardware, "_CACHED", {})


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("nvidia l40s", "L40S"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_gpu_is_found_as_people_and_drivers_write_it(written: str, name: str) -> None:
    assert gpu(written).name == name


@pytest.mark.parametrize("written", ["H100 PCIe", "A10", "H1000", "cpu", ""])
def test_an_unknown_gpu_never_gets_the_peak_of_another(written: str) -> None:
    with pytest.raises(HardwareError, match=r"add it with its dense peaks to GPUS in training/hardware\.py"):
        gpu(written)


def test_a_precision_that_the_gpu_lacks_is_an_error() -> None:
    with pytest.raises(HardwareError, match="A100 SXM: no peak in fp8; expected one of bf16"):
        published_peak("A100", "fp8")


def test_a_peak_says_where_it_is_from() -> None:
    assert published_peak("B200", "bf16").source == "B200 bf16 dense (NVIDIA DGX B200 datasheet)"


def test_each_name_belongs_to_one_gpu() -> None:
    names = [hardware._plain(n) for product in hardware.GPUS for n in (product.name, *product.names)]
    assert len(set(names)) == len(names)


def test_the_measured_peak_is_a_real_rate_and_names_its_size() -> None:
    import torch

    found = measured_peak(torch.device("cpu"), "fp32", seconds=0.2)
    assert found.flops_per_s > 1e8
    assert "fp32 matmul of" in found.source


def test_a_measured_peak_is_kept_for_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(hardware, "_best_matmul", lambda *asked: (3e9, 1024))
    measured_peak(torch.device("cpu"), "fp32")
    monkeypatch.setattr(hardware, "_CACHED", {})
    monkeypatch.setattr(hardware, "_best_matmul", lambda *asked: (9e9, 1024))
    assert measured_peak(torch.device("cpu"), "fp32").flops_per_s == 3e9


@pytest.mark.parametrize(("second", "kept"), [(9e9, 9e9), (1e9, 3e9)])
def test_measuring_again_keeps_the_better_rate(
    monkeypatch: pytest.MonkeyPatch, second: float, kept: float
) -> None:
    import torch

    monkeypatch.setattr(hardware, "_best_matmul", lambda *asked: (3e9, 1024))
    measured_peak(torch.device("cpu"), "fp32")
    monkeypatch.setattr(hardware, "_best_matmul", lambda *asked: (second, 1024))
    assert measured_peak(torch.device("cpu"), "fp32", refresh=True).flops_per_s == kept


def test_a_damaged_cache_file_is_measured_over(tmp_path: Path) -> None:
    import torch

    (tmp_path / "slotwise").mkdir()
    (tmp_path / "slotwise" / "matmul_peaks.json").write_text('{"x": [')
    assert measured_peak(torch.device("cpu"), "fp32", seconds=0.05).flops_per_s > 0
