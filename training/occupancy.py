"""How busy the Tensor Cores are: from the GPU's own counters where it has them, else from the work done.

Invariant: an occupancy comes with its source. Hopper and later count the cycles in which a Tensor Core
worked (NVML's GPM metrics), over the time between two samples; elsewhere it is the achieved model FLOP/s over
what a matmul reaches on the same device, which is no counter but moves with one.
"""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.flops import mfu
from training.hardware import Peak, device_peak, measured_peak

if TYPE_CHECKING:
    import torch

FULL = 0.8  # below this share a larger micro-batch is worth a try
TENSOR_ACTIVE = 5  # NVML_GPM_METRIC_ANY_TENSOR_UTIL, per cent


@dataclass(frozen=True)
class Occupancy:
    """A share between 0 and 1, and where it is from."""

    share: float
    source: str


class GpmCounter:
    """Tensor Core occupancy between two calls of `read`, from NVML. Raises OSError where there is none."""

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        self.nvml = nvml = nvml or importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()
            # Not by its number: NVML counts the GPUs that CUDA_VISIBLE_DEVICES hides as well.
            self.handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            if not nvml.nvmlGpmQueryDeviceSupport(self.handle).isSupportedDevice:
                raise OSError("this GPU has no GPM metrics")
            self.samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
            nvml.nvmlGpmSampleGet(self.handle, self.samples[0])
        except nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from None

    def read(self) -> Occupancy | None:
        """The occupancy since the last call; None when the counters could not be read."""
        nvml = self.nvml
        try:
            nvml.nvmlGpmSampleGet(self.handle, self.samples[1])
            asked = nvml.c_nvmlGpmMetricsGet_t()
            asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
            asked.numMetrics = 1
            asked.sample1, asked.sample2 = self.samples
            asked.metrics[0].metricId = getattr(nvml, "NVML_GPM_METRIC_ANY_TENSOR_UTIL", TENSOR_ACTIVE)
            nvml.nvmlGpmMetricsGet(asked)
            self.samples.reverse()
            share = asked.metrics[0].value / 100.0
            if asked.metrics[0].nvmlReturn or not 0 <= share <= 1:  # also where it is no number
                return None
            return Occupancy(share, "GPM: Tensor Core active cycles")
        except nvml.NVMLError:
            return None


def occupancy_meter(
    device: "torch.device", achieved: Callable[[], float], achievable: Callable[[], float]
) -> Callable[[], Occupancy]:
    """What reads the occupancy of a device. `achieved` and `achievable` are FLOP/s, asked when needed."""
    counter = None
    if device.type == "cuda":
        with contextlib.suppress(OSError):
            import torch

            counter = GpmCounter(str(torch.cuda.get_device_properties(device).uuid))

    def read() -> Occupancy:
        counted = counter.read() if counter else None
        if counted:
            return counted
        # More than all of it means that the peak was measured while something else ran.
        share = min(achieved() / achievable(), 1.0)
        return Occupancy(share, "model FLOP/s over the best matmul measured on this device")

    return read


def share_of_peak(
    flops_per_token: float, tokens_per_s: float, device: "torch.device", precision: str
) -> tuple[float, Peak] | None:
    """One process's MFU and the peak that it is of; None when no peak is known that its work stays below.

    No work beats the hardware: a measured peak that was beaten was measured while something else ran, and is
    measured again.
    """
    peak = device_peak(device, precision)
    share = mfu(flops_per_token, tokens_per_s, peak.flops_per_s)
    if share > 1:
        peak = measured_peak(device, precision, refresh=True)
        share = mfu(flops_per_token, tokens_per_s, peak.flops_per_s)
    return (share, peak) if share <= 1 else None
