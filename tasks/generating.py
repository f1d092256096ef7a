"""What one process's generation is measured by: tokens, padding, and shares of what the device can do.

Invariant: a FLOP or a byte is counted for a token that a row needed, never for padding, so a share of the
peak cannot be raised by waste. Prefill counts 2 FLOPs for each weight a prompt token meets and causal
attention; decode counts each weight once per step and each row's keys and values.
"""

import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from training.hardware import HardwareError, device_peak, gpu

if TYPE_CHECKING:
    import torch


# What people see of the work: sums and rates, and what of a device's peak was reached.
SHARES = ("padding_waste", "mfu", "prefill_mfu", "decode_bandwidth_utilization")
FIGURES = ("rows_per_s", "tokens_per_s", "prompt_tokens", "completion_tokens", "gpu_seconds", *SHARES)


@dataclass
class Work:
    """Sums over everything a process generated. Those of several processes add up."""

    processes: int = 1
    rows: int = 0
    prompt_tokens: int = 0
    padded_tokens: int = 0  # positions of prompts that were computed, padding among them
    generated_tokens: int = 0
    stepped_tokens: int = 0  # positions of completions that were computed, those of finished rows among them
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_flops: float = 0.0
    decode_bytes: float = 0.0
    peak_flops_per_s: float = 0.0  # of all processes together, like the next one
    peak_bytes_per_s: float = 0.0

    def add(self, other: "Work") -> None:
        """Take in what another process did."""
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))

    def metrics(self, gpus_per_process: int) -> dict[str, Any]:
        """What people see of it; nothing before anything was done."""
        if not self.seconds:
            return {}
        computed = self.padded_tokens + self.stepped_tokens
        found: dict[str, Any] = {
            "rows_per_s": self.rows * self.processes / self.seconds,
            "tokens_per_s": self.generated_tokens * self.processes / self.seconds,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.generated_tokens,
            "gpu_seconds": self.seconds * gpus_per_process,
            "padding_waste": 1 - (self.prompt_tokens + self.generated_tokens) / computed
            if computed
            else None,
        }
        if self.prefill_seconds and self.peak_flops_per_s:
            rate = self.prefill_flops * self.processes / self.prefill_seconds
            # The MFU of the run is that of prefill: decode is bound by bytes, whose share is its own.
            found["prefill_mfu"] = found["mfu"] = _share(rate, self.peak_flops_per_s)
            found["peak_flops_per_s"] = self.peak_flops_per_s
        if self.decode_seconds and self.peak_bytes_per_s:
            rate = self.decode_bytes * self.processes / self.decode_seconds
            found["decode_bandwidth_utilization"] = _share(rate, self.peak_bytes_per_s)
            found["peak_bytes_per_s"] = self.peak_bytes_per_s
        return found


def _share(rate: float, peak: float) -> float | None:
    """None above 1: a measured peak was none then, as of bf16 on processors whose large matmuls are slow."""
    return rate / peak if rate <= peak else None


@dataclass(frozen=True)
class Sizes:
    """What a token costs a model. Widths are numbers of elements."""

    linear_weights: int  # of all linear layers but the output one
    output_weights: int
    weight_bytes: int  # as they are kept, quantized or not; input embedding left out
    layers: int
    query_width: int  # heads × head dimension
    kv_width: int  # keys and values together, one layer
    ffn: int
    hidden: int
    vocab: int
    element: int  # bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        return self.layers * self.kv_width * self.element

    def prefill_flops(self, length: int) -> float:
        """Model FLOPs of a prompt: attention is causal, the output layer sees its last token only."""
        attention = 2 * self.layers * self.query_width * length * length
        return 2 * self.linear_weights * length + attention + 2 * self.output_weights

    def batch_bytes(self, rows: int, prompt: int, new: int) -> int:
        """Most memory that a batch of padded prompts takes beside the model, while it is generated.

        Keys and values (one layer of them twice, while it grows), one layer's activations of the prompt, its
        mask, and the logits of one position in fp32 with two copies.
        """
        cache = rows * (prompt + new) * self.kv_bytes * (1 + 2 / self.layers)
        activations = rows * prompt * self.element * (6 * self.hidden + 3 * self.ffn + 2 * self.query_width)
        mask = rows * prompt * prompt * (1 + self.element)
        return int(cache + activations + mask + rows * self.vocab * 12)


def sizes_of(model: Any) -> Sizes:
    """Sizes of a loaded causal language model, quantized or not."""
    import torch

    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    output = model.get_output_embeddings()
    linear = output_weights = weight_bytes = 0
    element = 4
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            linear += module.in_features * module.out_features
            weight_bytes += sum(stored_bytes(part) for part in module.parameters())
            if module is output:
                output_weights = module.in_features * module.out_features
                element = module.weight.element_size()
    heads = int(config.num_attention_heads)
    head = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return Sizes(
        linear_weights=linear - output_weights,
        output_weights=output_weights,
        weight_bytes=weight_bytes,
        layers=int(config.num_hidden_layers),
        query_width=heads * head,
        kv_width=2 * kv_heads * head,
        ffn=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        hidden=int(config.hidden_size),
        vocab=int(config.vocab_size),
        element=element,
    )


def stored_bytes(weight: Any) -> int:
    """Bytes of a weight as it is kept: a quantized tensor is its parts."""
    if names := getattr(weight, "tensor_data_names", None):
        parts = [
            getattr(weight, name) for name in (*names, *getattr(weight, "optional_tensor_data_names", ()))
        ]
        return sum(part.numel() * part.element_size() for part in parts if part is not None)
    return int(weight.numel() * weight.element_size())


def peaks(device: "torch.device", precision: str) -> tuple[float, float]:
    """FLOP/s and bytes/s that the device reaches at best: published where known, else measured."""
    return device_peak(device, precision).flops_per_s, _bandwidth(device)


def _bandwidth(device: "torch.device") -> float:
    """Bytes/s of memory: from the table of GPUs, else what copying 64 MiB reaches (read and written)."""
    import torch

    if device.type == "cuda":
        try:
            return gpu(torch.cuda.get_device_name(device)).memory_tb_per_s * 1e12
        except HardwareError:
            pass
    source = torch.ones(16 << 20, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(3):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * source.numel() * 4 / best


def synchronize(device: "torch.device") -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
