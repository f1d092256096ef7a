"""Precision: what the matmuls compute in, while the weights that are learned stay in fp32.

Invariant: whatever the matmuls compute in, the optimizer steps on fp32 weights and gradients are summed in
fp32. `bf16` is autocast: weights are cast in every pass. `bf16_master` keeps a bf16 copy, which is cast once
a step; it costs 2 bytes for each parameter and pays when a step has several passes. `fp8` turns the layers'
linear modules into torchao's, which scale and cast on the fly; it needs a GPU with fp8 matmuls.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from training.config import ConfigError, Precision

PEAK_OF: dict[str, str] = {"fp32": "fp32", "bf16": "bf16", "bf16_master": "bf16", "fp8": "fp8"}


@contextlib.contextmanager
def computing(precision: Precision, device: torch.device, casted_by_fsdp: bool) -> Iterator[None]:
    """The context of a forward pass."""
    if precision in ("bf16", "fp8") and not casted_by_fsdp:
        with torch.autocast(device.type, torch.bfloat16):
            yield
    else:
        yield


def check_precision(precision: Precision, device: torch.device) -> None:
    """Refuse a precision that the device lacks. Raises ConfigError."""
    if precision != "fp8":
        return
    if device.type != "cuda":
        raise ConfigError("precision: fp8; expected a GPU with fp8 matmuls, this is a CPU; use bf16 or fp32")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise ConfigError(
            f"precision: fp8; {torch.cuda.get_device_name(device)} has no fp8 matmuls; use bf16"
        )


def bf16_is_fast(device: torch.device) -> tuple[bool, str]:
    """Whether bf16 matmuls run on instructions of their own, and why."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(), torch.cuda.get_device_name(device)
    found = sorted({"avx512_bf16", "amx_bf16", "bf16"} & _processor_flags())
    if found:
        return True, f"this processor has {', '.join(found)}"
    return False, "this processor has no bf16 instructions"


def to_fp8(model: nn.Module, emulated: bool = False) -> int:
    """Swap the linear modules of the layers for torchao's fp8 ones; how many. Not the output layer.

    `emulated` computes the same rounding with fp32 matmuls, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def eligible(module: nn.Module, name: str) -> bool:
        return (
            isinstance(module, nn.Linear)
            and "lm_head" not in name
            and module.in_features % 16 == 0
            and module.out_features % 16 == 0
        )

    count = sum(eligible(module, name) for name, module in model.named_modules())
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=emulated), module_filter_fn=eligible)
    return count


class MasterWeights:
    """fp32 weights and gradients behind a model whose own weights are bf16.

    Gradients move into the masters as soon as backward has made them, so the bf16 ones never pile up.
    """

    def __init__(self, model: nn.Module) -> None:
        self.of: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in dict.fromkeys(model.parameters()):
            master = nn.Parameter(parameter.detach().clone().float())
            parameter.data = parameter.data.to(torch.bfloat16)
            self.of[parameter] = master
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def _take(self, parameter: torch.Tensor) -> None:
        master = self.of[parameter]  # type: ignore[index]
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model the masters' values."""
        torch._foreach_copy_(list(self.of), list(self.of.values()))


def _processor_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123
            for line in lines:
                if line.startswith(("flags", "Features")):
                    return set(line.partition(":")[2].split())
    except OSError:
        pass
    return set()


def adamw(groups: list[dict[str, Any]], lr: float, fused: bool) -> torch.optim.Optimizer:
    """AdamW as language models are trained with it."""
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused or None)
