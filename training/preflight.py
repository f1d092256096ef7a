"""`python -m training preflight`: what of this machine is wrong, and what it would cost, before a run.

Invariant: a check that cannot be made says so and never passes; nothing on the machine is changed. The cost:
torch is loaded, and asking a GPU for its state makes a driver that sleeps wake up.
"""

import argparse
import importlib
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["ok", "warning", "wrong", "unknown"]
TAKEN_GB = 1.0  # of a GPU's memory: more is somebody else's work
KERNEL_LOG = ("dmesg", "--level", "err,warn,info,notice")


@dataclass(frozen=True)
class Check:
    """One line of the table; `cost` says what happens if nobody acts, and is empty when all is well."""

    subject: str
    state: State
    found: str
    cost: str = ""


def register(commands: Any) -> None:
    """Add the command to a parser; the parsed arguments carry the function to call as `answer`."""
    preflight = commands.add_parser("preflight", help="what of this machine is wrong, and what it would cost")
    preflight.add_argument("--output", type=Path, default=Path(), help="where checkpoints will go")
    preflight.add_argument("--disk-gb", type=float, default=50.0, help="that they need")
    preflight.add_argument("--json", action="store_true")
    preflight.set_defaults(answer=_answer)


def _answer(asked: argparse.Namespace) -> tuple[str, int]:
    found = [*checks(), disk(asked.output, asked.disk_gb)]
    failed = int(any(check.state == "wrong" for check in found))
    if asked.json:
        return json.dumps([asdict(check) for check in found]), failed
    return "\n".join(table(found)), failed


def table(found: list[Check]) -> list[str]:
    """A line for each check, and one that sums up."""
    lines = [f"{check.state:8} {check.subject:14} {check.found}" + (f": {check.cost}" if check.cost else "")
             for check in found]  # fmt: skip
    counts = {
        state: sum(check.state == state for check in found) for state in ("wrong", "warning", "unknown")
    }
    return [*lines, ", ".join(f"{count} {state}" for state, count in counts.items())]


def checks(nvml: Any = None, torch: Any = None, kernel_log: Callable[[], str] | None = None) -> list[Check]:
    """All but the disk. The arguments stand in for the libraries and the kernel's log."""
    torch = torch or importlib.import_module("torch")
    nvml = nvml or importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        gpus = [nvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        missing = Check("driver", "unknown", f"no NVML: {error}", "training runs on the CPU, if at all")
        return [missing, _torch(torch, 0)]
    return [
        _driver(nvml, torch),
        _torch(torch, len(gpus)),
        _nccl(torch, len(gpus)),
        *itertools.chain.from_iterable(
            (_memory(nvml, gpu, handle), _ecc(nvml, gpu, handle)) for gpu, handle in enumerate(gpus)
        ),
        *_peers(nvml, gpus),
        _xid(kernel_log or _kernel_log),
    ]


def disk(output: Path, needed_gb: float) -> Check:
    """Whether checkpoints have room where they go, or at the nearest directory that is there."""
    place = output.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free / 1e9
    if free < needed_gb:
        return Check(
            "disk", "wrong", f"{free:.1f} GB free at {place}, {needed_gb:g} needed", "checkpoints fail"
        )
    return Check("disk", "ok", f"{free:.1f} GB free at {place}")


def _driver(nvml: Any, torch: Any) -> Check:
    version, reached = _text(nvml.nvmlSystemGetDriverVersion()), int(nvml.nvmlSystemGetCudaDriverVersion())
    found = f"{version}, for CUDA {reached // 1000}.{reached % 1000 // 10}"
    wanted = torch.version.cuda
    if wanted and int(wanted.split(".")[0]) > reached // 1000:
        return Check(
            "driver", "wrong", f"{found}; torch has CUDA {wanted}", "no kernel starts; update the driver"
        )
    return Check("driver", "ok", found)


def _torch(torch: Any, gpus: int) -> Check:
    found = f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    if gpus and not torch.version.cuda:
        return Check("torch", "wrong", found, f"{gpus} GPUs stay idle; install a CUDA build")
    if gpus and not torch.cuda.is_available():
        return Check("torch", "wrong", f"{found}, which sees no GPU", f"{gpus} GPUs stay idle")
    return Check("torch", "ok", found)


def _nccl(torch: Any, gpus: int) -> Check:
    if not torch.distributed.is_nccl_available():
        state: State = "wrong" if gpus > 1 else "ok"
        return Check("NCCL", state, "not there", "only one GPU can be used" if gpus > 1 else "")
    version = torch.cuda.nccl.version()
    return Check("NCCL", "ok", ".".join(map(str, version)) if isinstance(version, tuple) else str(version))


def _memory(nvml: Any, gpu: int, handle: Any) -> Check:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    taken, total = memory.used / 1e9, memory.total / 1e9
    subject, found = f"GPU {gpu} memory", f"{taken:.1f} of {total:.1f} GB taken"
    if taken > TAKEN_GB:
        return Check(subject, "warning", found, f"micro-batches have {taken / total:.0%} less room")
    return Check(subject, "ok", found)


def _ecc(nvml: Any, gpu: int, handle: Any) -> Check:
    subject = f"GPU {gpu} ECC"
    try:
        broken = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    except nvml.NVMLError as error:  # cards without ECC answer so
        return Check(subject, "unknown", str(error), "memory errors go unseen")
    if broken:
        return Check(
            subject, "wrong", f"{broken} uncorrected errors", "a run dies or learns garbage; reset the GPU"
        )
    return Check(subject, "ok", "no uncorrected errors")


def _peers(nvml: Any, gpus: list[Any]) -> Iterator[Check]:
    """One line when all pairs reach each other, else one for each pair that does not."""
    apart = []
    for left, right in itertools.combinations(range(len(gpus)), 2):
        status = nvml.nvmlDeviceGetP2PStatus(gpus[left], gpus[right], nvml.NVML_P2P_CAPS_INDEX_READ)
        if status != nvml.NVML_P2P_STATUS_OK:
            apart.append((left, right))
    for left, right in apart:
        yield Check(
            "peer access", "warning", f"GPUs {left} and {right}: none", "their transfers go through the host"
        )
    if len(gpus) > 1 and not apart:
        yield Check("peer access", "ok", f"all {len(gpus)} GPUs reach each other")


def _xid(kernel_log: Callable[[], str]) -> Check:
    try:
        codes = re.findall(r"NVRM: Xid \((.*?)\): (\d+)", kernel_log())
    except OSError as error:
        return Check(
            "Xid", "unknown", f"the kernel's log cannot be read: {error}", "faults of GPUs go unseen"
        )
    if codes:
        named = ", ".join(sorted({f"{code} on {device}" for device, code in codes}))
        return Check("Xid", "wrong", named, "the GPU failed since the machine started; runs on it may die")
    return Check("Xid", "ok", "none in the kernel's log")


def _kernel_log() -> str:
    try:
        asked = subprocess.run(KERNEL_LOG, capture_output=True, text=True, check=False, timeout=20)
    except subprocess.TimeoutExpired as error:
        raise OSError(str(error)) from None
    if asked.returncode:
        raise OSError(" ".join(asked.stderr.split()) or f"dmesg ended with {asked.returncode}")
    return asked.stdout


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
