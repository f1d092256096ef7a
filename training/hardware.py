"""What the hardware can do at best: published dense peaks, and the matmul rate measured on the device.

Invariant: a peak is dense, belongs to one precision, and comes with where it is from; an unknown GPU or a
precision that it lacks is an error, never another's peak. Names are matched whole, so that a new product is
not mistaken for an old one. The measured peak is the best that was seen on this machine in a day: measuring
costs about a second.
"""

import contextlib
import json
import os
import platform
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class HardwareError(Exception):
    """A GPU or a precision that the table does not hold."""


@dataclass(frozen=True)
class Gpu:
    """One product. `peaks` are dense FLOP/s by precision; `names` as people and drivers write it."""

    name: str
    names: tuple[str, ...]
    peaks: dict[str, float] = field(hash=False)
    memory_gb: float
    memory_tb_per_s: float
    nvlink_gb_per_s: float | None  # one way, to all peers together; None without NVLink
    source: str
    matmul_tflops: float | None = None  # the best plain bf16 matmul that was measured on one
    watts: float | None = None  # the board's limit, which is what long matmuls run into
    exponentials_t_per_s: float | None = None  # 1e12/s
    network_gb_per_s: float = 25.0  # one way for each GPU between NVLink domains, in the maker's own systems
    domain_gpus: int = 8  # that NVLink joins in the maker's own systems


@dataclass(frozen=True)
class Peak:
    """FLOP/s that a share is taken of, and where the number is from."""

    flops_per_s: float
    source: str


T = 1e12
# Datasheets print the figure with 2:4 sparsity; these are the dense halves.
# What else the roofline uses, and where it is from:
# - watts: the makers' board limits; glennklockwood.com/garden/processors/B200 and B300 give 1000 (B200), 1200
#   (in GB200) and 1400 (B300, GB300).
# - exponentials: counted, multiprocessors × 16 a clock × boost clock; on Blackwell Ultra twice as many
#   (developer.nvidia.com/blog/making-softmax-more-efficient-with-nvidia-blackwell-ultra). Where there is no
#   figure, the roofline takes a typical one.
# - domains: eight on the makers' boards with NVLink or its like, 72 in NVL72 racks, one on PCIe.
# - network: one adapter a GPU in the makers' own systems: 200 Gb/s beside A100, 400 beside Hopper and
#   Blackwell, 800 beside Blackwell Ultra (72 ConnectX-8 of 800G in a GB300 NVL72:
#   ai-infrastructure.net/nvidia-blackwell-platform). For L40S, A10G and RTX 4090, which come in systems of
#   all kinds, it is an assumption: 200 and 50 Gb/s.
GPUS: tuple[Gpu, ...] = (
    Gpu(
        "A100 SXM",
        ("A100", "A100-SXM4-40GB", "A100-SXM4-80GB"),
        {"bf16": 312 * T, "fp16": 312 * T, "tf32": 156 * T, "fp32": 19.5 * T},
        80,
        2.0,
        300,
        "NVIDIA A100 datasheet",
        matmul_tflops=271,
        watts=400,
        exponentials_t_per_s=2.4,
        network_gb_per_s=25,
        domain_gpus=8,
    ),
    Gpu(
        "H100 SXM",
        ("H100", "H100 80GB HBM3"),
        {"bf16": 989 * T, "fp16": 989 * T, "fp8": 1979 * T, "tf32": 494.5 * T, "fp32": 67 * T},
        80,
        3.35,
        450,
        "NVIDIA H100 datasheet",
        matmul_tflops=794.5,
        watts=700,
        exponentials_t_per_s=3.9,
        network_gb_per_s=50,
        domain_gpus=8,
    ),
    Gpu(
        "H200",
        ("H200 SXM", "H200 141GB HBM3e"),
        {"bf16": 989 * T, "fp16": 989 * T, "fp8": 1979 * T, "tf32": 494.5 * T, "fp32": 67 * T},
        141,
        4.8,
        450,
        "NVIDIA H200 datasheet",
        matmul_tflops=794.5,
        watts=700,
        exponentials_t_per_s=3.9,
        network_gb_per_s=50,
        domain_gpus=8,
    ),
    Gpu(
        "B200",
        (),
        {"bf16": 2250 * T, "fp8": 4500 * T, "fp4": 9000 * T},
        180,
        8.0,
        900,
        "NVIDIA DGX B200 datasheet",
        matmul_tflops=1745,
        watts=1000,
        exponentials_t_per_s=4.4,
        network_gb_per_s=50,
        domain_gpus=8,
    ),
    Gpu(
        "GB200",
        (),
        {"bf16": 2500 * T, "fp8": 5000 * T, "fp4": 10000 * T},
        186,
        8.0,
        900,
        "NVIDIA GB200 datasheet",
        matmul_tflops=1822,
        watts=1200,
        exponentials_t_per_s=4.6,
        network_gb_per_s=50,
        domain_gpus=72,
    ),
    Gpu(
        "B300",
        (),
        {"bf16": 2250 * T, "fp8": 4500 * T, "fp4": 12600 * T},
        288,
        8.0,
        900,
        "NVIDIA DGX B300 datasheet",
        matmul_tflops=1769,
        watts=1400,
        exponentials_t_per_s=8.8,
        network_gb_per_s=100,
        domain_gpus=8,
    ),
    Gpu(
        "GB300",
        (),
        {"bf16": 2500 * T, "fp8": 5000 * T, "fp4": 15000 * T},
        288,
        8.0,
        900,
        "NVIDIA GB300 datasheet",
        matmul_tflops=None,
        watts=1400,
        exponentials_t_per_s=9.1,
        network_gb_per_s=100,
        domain_gpus=72,
    ),
    Gpu(
        "L40S",
        (),
        {"bf16": 362 * T, "fp16": 362 * T, "fp8": 733 * T},
        48,
        0.86,
        None,
        "NVIDIA L40S datasheet",
        matmul_tflops=None,
        watts=350,
        network_gb_per_s=25,
        domain_gpus=1,
    ),
    Gpu(
        "A10G",
        (),
        {"bf16": 70 * T, "fp16": 70 * T},
        24,
        0.6,
        None,
        "NVIDIA A10G datasheet; not the A10's 125",
        matmul_tflops=69.5,
        watts=300,
        network_gb_per_s=6,
        domain_gpus=1,
    ),
    Gpu(
        "RTX 4090",
        ("4090",),
        {"bf16": 165 * T, "fp16": 165 * T},
        24,
        1.0,
        None,
        "NVIDIA Ada white paper, fp32 accumulation",
        matmul_tflops=164.8,
        watts=450,
        network_gb_per_s=6,
        domain_gpus=1,
    ),
    Gpu(
        "MI300X",
        (),
        {"bf16": 1307 * T, "fp16": 1307 * T, "fp8": 2610 * T},
        192,
        5.3,
        None,
        "AMD MI300X datasheet",
        matmul_tflops=668,
        watts=750,
        network_gb_per_s=50,
        domain_gpus=8,
    ),
)


def gpu(name: str) -> Gpu:
    """The product with this name. Raises HardwareError, which says how to add one."""
    if found := _BY_NAME.get(_plain(name)):
        return found
    raise HardwareError(
        f"gpu: {name!r}: its peak is not known; expected one of {', '.join(g.name for g in GPUS)} "
        "(add it with its dense peaks to GPUS in training/hardware.py, or use the measured peak)"
    )


def published_peak(name: str, precision: str) -> Peak:
    """A GPU's dense peak in a precision. Raises HardwareError."""
    found = gpu(name)
    if precision not in found.peaks:
        raise HardwareError(f"{found.name}: no peak in {precision}; expected one of {', '.join(found.peaks)}")
    return Peak(found.peaks[precision], f"{found.name} {precision} dense ({found.source})")


def achievable_peak(name: str) -> Peak:
    """The bf16 rate that a plain matmul reached on such a GPU. Raises HardwareError when nobody measured."""
    found = gpu(name)
    if found.matmul_tflops is None:
        raise HardwareError(f"{found.name}: no measured matmul is known; measure one on the device itself")
    return Peak(found.matmul_tflops * T, f"{found.name} best measured bf16 matmul")


def device_peak(device: "torch.device", precision: str) -> Peak:
    """The published peak of the device if it is in the table, else what a matmul reaches on it."""
    import torch

    if device.type == "cuda":
        with contextlib.suppress(HardwareError):
            return published_peak(torch.cuda.get_device_name(device), precision)
    return measured_peak(device, precision)


def measured_peak(
    device: "torch.device", precision: str, seconds: float = 1.0, refresh: bool = False
) -> Peak:
    """The best rate of a square matmul on the device, with the threads this process has.

    Sizes grow from 1024 to 4096 (8192 on a GPU) while `seconds` allow. A rate measured in the last day is
    used as it is; `refresh` measures again and keeps the better one, for when work was seen to beat the
    peak.
    """
    known = _read_cache()
    key = _key(device, precision)
    entry = known.get(key)
    if entry is None or refresh or time.time() - entry["at"] > CACHE_S:
        rate, size = _best_matmul(device, precision, seconds)
        if entry is None or not refresh or rate > entry["flops_per_s"]:
            entry = {"flops_per_s": rate, "size": size, "at": time.time()}
            _write_cache(known | {key: entry})
    return Peak(
        entry["flops_per_s"], f"measured: {precision} matmul of {entry['size']} on {key.split(' / ')[0]}"
    )


CACHE_S = 24 * 3600.0


def _best_matmul(device: "torch.device", precision: str, seconds: float) -> tuple[float, int]:
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    sizes = (256, 512, 1024, 1536, 2048, 3072, 4096) + ((8192,) if device.type == "cuda" else ())
    rates: dict[int, float] = {}
    began = time.perf_counter()
    for size in sizes:
        expected = 3 * 2 * size**3 / max(rates.values(), default=1e18)
        if rates and time.perf_counter() - began + expected > seconds:
            break
        rates[size] = _matmul_rate(size, dtype, device)
    # Below 1024 the rate counts only when the device is too slow for more.
    large = {size: rate for size, rate in rates.items() if size >= 1024} or rates
    best = max(large, key=lambda size: large[size])
    return large[best], best


def _matmul_rate(size: int, dtype: "torch.dtype", device: "torch.device") -> float:
    import torch

    generator = torch.Generator().manual_seed(0)  # a measurement must not move the state of a training run
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    out = torch.empty_like(left)
    best = float("inf")
    for _ in range(3):
        _wait(device)
        began = time.perf_counter()
        torch.mm(left, right, out=out)
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _wait(device: "torch.device") -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _key(device: "torch.device", precision: str) -> str:
    import torch

    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        name = f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"
    return f"{name} / {precision} / torch {torch.__version__}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


_CACHED: dict[str, dict[str, float]] = {}  # of this process: answers even where no file can be written


def _cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slotwise" / "matmul_peaks.json"


def _read_cache() -> dict[str, dict[str, float]]:
    found = dict(_CACHED)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        for key, entry in json.loads(_cache_file().read_text(encoding="utf-8")).items():
            if all(isinstance(entry[part], int | float) for part in ("flops_per_s", "size", "at")):
                found[key] = entry
    return found


def _write_cache(known: dict[str, dict[str, float]]) -> None:
    _CACHED.update(known)
    with contextlib.suppress(OSError, RuntimeError):
        file = _cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{uuid.uuid4().hex}")
        temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")
        temporary.replace(file)


def _plain(name: str) -> str:
    """A name as it is compared: lower case, without the maker and marks between its words."""
    words = name.casefold().replace("-", " ").replace("_", " ").split()
    return " ".join(word for word in words if word not in ("nvidia", "amd", "instinct", "geforce"))


_BY_NAME = {_plain(name): product for product in GPUS for name in (product.name, *product.names)}
