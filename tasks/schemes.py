"""The ways to quantize a model's linear layers, and which of them a device can run.

Invariant: what a device lacks is said from this table, before a model is loaded. The tensors are torchao's,
or those of compressed-tensors where llmcompressor made them (the extra `gptq`); transformers and vLLM read
both by the model's own configuration. Tried: the int8 schemes and int4_gptq with transformers on a processor,
int8 with vLLM there too; int4_weight_only, int4_awq and fp8 need a GPU.

A library leaves a layer as it is when its sizes do not suit a scheme, and says nothing: int4 takes inputs in
groups of 128, fp8 sizes that are multiples of 16. So whoever quantizes counts the layers that changed.
"""

import importlib.util
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

    A scheme with a `plain` one is that one fitted to what the layers see of a text: by AWQ as `config` says,
    or, without a `config`, by GPTQ.
    """

    config: Callable[[], "AOBaseConfig"] | None
    least: tuple[int, int] | None
    what: str
    plain: str | None = None

    def lacks(self, device: Device) -> str | None:
        """What the device, or this machine, is short of; None when it can run this."""
        if self.config is None and importlib.util.find_spec("llmcompressor") is None:
            return "it needs llmcompressor, which is not installed on this node: pip install 'slotwise[gptq]'"
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
    "int4_gptq": Scheme(None, None, "4-bit weights in groups of 128, by GPTQ", "int4_weight_only"),
    "fp8": Scheme(_fp8, (8, 9), "8-bit floats for weights and activations, a scale for each row"),
}


def this_device() -> Device:
    """The first GPU that this process sees, or its processor."""
    import torch

    if not torch.cuda.is_available():
        return Device("cpu", "a processor", None)
    return Device("cuda", torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))


def quantize_layers(model: Any, config: "AOBaseConfig") -> None:
    """Quantize the linear layers of a model, but the output one, where it lies: the kernels of a GPU pack
    weights that are on it. transformers would do so while it loads, and needs accelerate for that.
    """
    import torch
    from torchao.quantization import quantize_

    output = model.get_output_embeddings()
    quantize_(model, config, lambda module, _: isinstance(module, torch.nn.Linear) and module is not output)
    note_quantization(model, config)


def note_quantization(model: Any, config: "AOBaseConfig") -> None:
    """Have transformers write what the layers are: into the configuration, and beside the tensors."""
    from transformers import TorchAoConfig
    from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

    stored = TorchAoConfig(config)
    model.config.quantization_config = stored
    model.hf_quantizer = TorchAoHfQuantizer(stored, pre_quantized=False)


def changed_layers(model: Any) -> tuple[int, int]:
    """How many linear layers of a model are quantized, and how many could be: all but the output one."""
    import torch

    output, changed, found = model.get_output_embeddings(), 0, 0
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not output:
            found += 1
            packed = hasattr(module, "quantization_scheme")  # by compressed-tensors
            changed += packed or hasattr(module.weight, "tensor_data_names")
    return changed, found
