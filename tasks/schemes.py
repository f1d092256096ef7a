"""The ways to quantize a model's linear layers, and which of them a device can run.

Invariant: what a device lacks is said from this table, before a model is loaded. The tensors are torchao's;
transformers and vLLM (as `quantization="torchao"`, from the model's own configuration) read them. Tried here:
the int8 schemes with transformers on a processor; int4 and fp8 need a GPU. torchao's GPTQ does as well, and
is not among them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig


@dataclass(frozen=True)
class Device:
    """What computes here; `capability` is a GPU's compute capability, None for a processor."""

    kind: str
    name: str
    capability: tuple[int, int] | None


@dataclass(frozen=True)
class Scheme:
    """A way to quantize. `least` is the GPU it needs; None: any device will do.

    A scheme with a `plain` one is that one scaled by what the layers see of a text.
    """

    config: Callable[[], "AOBaseConfig"]
    least: tuple[int, int] | None
    what: str
    plain: str | None = None

    def lacks(self, device: Device) -> str | None:
        """What the device is short of; None when it can run this."""
        if self.least is None or (device.capability is not None and device.capability >= self.least):
            return None
        major, minor = self.least
        return f"it needs a GPU of compute capability {major}.{minor} or more, and this is {device.name}"


def _int8_weight_only() -> "AOBaseConfig":
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


def _int8_dynamic() -> "AOBaseConfig":
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return Int8DynamicActivationInt8WeightConfig()


def _int4_weight_only() -> "AOBaseConfig":
    from torchao.quantization import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d")


def _fp8() -> "AOBaseConfig":
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

    return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())


SCHEMES: dict[str, Scheme] = {
    "int8_weight_only": Scheme(_int8_weight_only, None, "8-bit weights, activations as they are"),
    "int8_dynamic": Scheme(_int8_dynamic, None, "8-bit weights, activations rounded to 8 bits as they come"),
    "int8_awq": Scheme(_int8_weight_only, None, "int8_weight_only, calibrated", "int8_weight_only"),
    "int4_weight_only": Scheme(_int4_weight_only, (8, 0), "4-bit weights in groups of 128, tinygemm kernels"),
    "int4_awq": Scheme(_int4_weight_only, (8, 0), "int4_weight_only, calibrated", "int4_weight_only"),
    "fp8": Scheme(_fp8, (8, 9), "8-bit floats for weights and activations, a scale for each row"),
}


def this_device() -> Device:
    """The first GPU that this process sees, or its processor."""
    import torch

    if not torch.cuda.is_available():
        return Device("cpu", "a processor", None)
    return Device("cuda", torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))


def quantization_argument(scheme: str) -> Any:
    """What transformers is to quantize with while it loads a model."""
    from transformers import TorchAoConfig

    return TorchAoConfig(SCHEMES[scheme].config())
