"""Preflight: each fault of a machine is named with what it costs; what cannot be checked does not pass."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from training.__main__ import main
from training.preflight import Check, checks, disk, table


class Nvml:
    """Two healthy GPUs, but for what a test changes."""

    class NVMLError(Exception):
        """As pynvml names it."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_P2P_CAPS_INDEX_READ, NVML_P2P_STATUS_OK = 0, 0

    def __init__(
        self, taken: float = 0.5e9, broken: int = 0, apart: bool = False, driver: int = 13000
    ) -> None:
        self.taken, self.broken, self.apart, self.driver = taken, broken, apart, driver

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, gpu: int) -> int:
        return gpu

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.10"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.driver

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(used=self.taken, total=80e9)

    def nvmlDeviceGetTotalEccErrors(self, gpu: int, kind: int, since: int) -> int:
        if self.broken < 0:
            raise self.NVMLError("Not Supported")
        return self.broken if gpu == 1 else 0

    def nvmlDeviceGetP2PStatus(self, left: int, right: int, what: int) -> int:
        return 1 if self.apart else 0


def torch_with(cuda: str | None = "13.0", sees: bool = True, nccl: bool = True) -> Any:
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: sees, nccl=SimpleNamespace(version=lambda: (2, 28, 3))),
        distributed=SimpleNamespace(is_nccl_available=lambda: nccl),
    )


def unreadable() -> str:
    raise OSError("Operation not permitted")


def test_a_healthy_machine_passes() -> None:
    found = checks(Nvml(), torch_with(), str)
    assert [check.state for check in found] == ["ok"] * len(found)
    assert {check.subject for check in found} >= {
        "driver",
        "torch",
        "NCCL",
        "GPU 0 memory",
        "peer access",
        "Xid",
    }


@pytest.mark.parametrize(
    ("nvml", "torch", "log", "expected"),
    [
        (Nvml(driver=12080), torch_with(), "", ("driver", "wrong", "no kernel starts; update the driver")),
        (Nvml(), torch_with(cuda=None), "", ("torch", "wrong", "2 GPUs stay idle; install a CUDA build")),
        (Nvml(), torch_with(sees=False), "", ("torch", "wrong", "2 GPUs stay idle")),
        (Nvml(), torch_with(nccl=False), "", ("NCCL", "wrong", "only one GPU can be used")),
        (Nvml(taken=40e9), torch_with(), "", ("GPU 1 memory", "warning", "micro-batches have 50% less room")),
        (
            Nvml(broken=3),
            torch_with(),
            "",
            ("GPU 1 ECC", "wrong", "a run dies or learns garbage; reset the GPU"),
        ),
        (Nvml(broken=-1), torch_with(), "", ("GPU 1 ECC", "unknown", "memory errors go unseen")),
        (
            Nvml(apart=True),
            torch_with(),
            "",
            ("peer access", "warning", "their transfers go through the host"),
        ),
        (
            Nvml(),
            torch_with(),
            "[9.1] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
            ("Xid", "wrong", "the GPU failed since the machine started; runs on it may die"),
        ),
    ],
)
def test_each_fault_is_named_with_its_cost(
    nvml: Nvml, torch: Any, log: str, expected: tuple[str, str, str]
) -> None:
    found = checks(nvml, torch, lambda: log)
    assert expected in [(check.subject, check.state, check.cost) for check in found]


def test_a_kernel_log_that_cannot_be_read_does_not_pass() -> None:
    (found,) = [check for check in checks(Nvml(), torch_with(), unreadable) if check.subject == "Xid"]
    assert found.state == "unknown"
    assert "Operation not permitted" in found.found


def test_a_disk_that_is_too_small_is_wrong_even_where_nothing_is_yet(tmp_path: Path) -> None:
    assert disk(tmp_path / "not" / "there", 1e9).state == "wrong"
    assert disk(tmp_path, 0.0).state == "ok"


def test_the_table_counts_what_is_not_well() -> None:
    lines = table([Check("a", "ok", "fine"), Check("b", "wrong", "broken", "costs much")])
    assert lines[1].endswith("broken: costs much")
    assert lines[-1] == "1 wrong, 0 warning, 0 unknown"


@pytest.mark.parametrize(("needed", "code"), [("0", 0), ("1e9", 1)])
def test_the_command_fails_when_something_is_wrong(
    needed: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preflight", "--output", str(tmp_path), "--disk-gb", needed, "--json"]) == code
    (found,) = [check for check in json.loads(capsys.readouterr().out) if check["subject"] == "disk"]
    assert found["state"] == ("wrong" if code else "ok")
