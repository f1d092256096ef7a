"""Model FLOPs per token, under the five conventions that people publish MFU in.

Invariant: a count is never given without its convention; the default, `matmul`, is what FlopCounterMode
counts. The conventions differ by up to a third for one model, so a figure compares only with figures of its
own. Of experts only those that a token visits are counted, and of a window only the keys inside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.models import Shape

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Convention:
    """6 FLOPs for each counted parameter, and `attention` × layers × attention width × sequence length.

    12 counts the whole square of queries and keys, 6 the half that a causal mask leaves.
    """

    parameters: Callable[[Shape], int]
    attention: int
    used_by: str


def _all_but_input_embedding(shape: Shape) -> int:
    return shape.active_parameters - (0 if shape.tied else shape.embedding_parameters)


CONVENTIONS: dict[str, Convention] = {
    "palm": Convention(lambda shape: shape.active_parameters, 12, "PaLM, llm-foundry, litgpt"),
    "no_embedding": Convention(_all_but_input_embedding, 12, "torchtitan, OLMo-core"),
    "matmul": Convention(lambda shape: shape.matmul_parameters, 12, "nanotron; FlopCounterMode"),
    "causal": Convention(lambda shape: shape.matmul_parameters, 6, "NeMo, Megatron-LM"),
    "6n": Convention(lambda shape: shape.active_parameters, 0, "scaling-law papers"),
}


@dataclass(frozen=True)
class Work:
    """FLOPs of one token, forward and backward, apart by the precision they can run in."""

    linear: int
    attention: int

    @property
    def total(self) -> int:
        """Both."""
        return self.linear + self.attention


def work_per_token(shape: Shape, seq_len: int, convention: str = "matmul") -> Work:
    """Model FLOPs of one token in a sequence of `seq_len`. Raises ValueError for an unknown convention."""
    if convention not in CONVENTIONS:
        raise ValueError(f"convention: {convention!r}; expected one of {', '.join(CONVENTIONS)}")
    chosen = CONVENTIONS[convention]
    seen = (shape.layers - shape.windowed_layers) * seq_len
    if shape.windowed_layers and shape.window is not None:
        inside = min(shape.window, seq_len)
        # Causal queries at the start of the sequence see less than a window: on average W - W²/2T keys.
        keys = inside if chosen.attention == 12 else 2 * inside - inside * inside / seq_len
        seen += round(shape.windowed_layers * keys)
    return Work(6 * chosen.parameters(shape), chosen.attention * shape.heads * shape.head_dim * seen)


def flops_per_token(shape: Shape, seq_len: int, convention: str = "matmul") -> int:
    """The total of `work_per_token`. Raises ValueError for an unknown convention."""
    return work_per_token(shape, seq_len, convention).total


def recomputed_per_token(shape: Shape, seq_len: int, checkpointing: str, convention: str = "matmul") -> Work:
    """What activation checkpointing computes again, as torch does it: it stops before the last matmul.

    `selective` keeps attention and every second matmul, so that keys, attention's output and up come again.
    """
    if checkpointing == "none":
        return Work(0, 0)
    attention_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    again = shape.hidden * (kv_width + attention_width) + shape.experts_per_token * shape.hidden * shape.ffn
    if checkpointing == "selective":
        return Work(2 * shape.layers * again, 0)
    again += shape.hidden * (kv_width + attention_width) + shape.experts_per_token * shape.hidden * shape.ffn
    again += shape.hidden * shape.experts
    return Work(2 * shape.layers * again, work_per_token(shape, seq_len, convention).attention // 3)


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops_per_s: float) -> float:
    """The share of the peak that the model's own FLOPs used; all three for the same number of GPUs."""
    return flops_per_token * tokens_per_s / peak_flops_per_s


def hfu(model: Work, recomputed: Work, tokens_per_s: float, peak_flops_per_s: float) -> float:
    """The share of the peak that all FLOPs used, those computed again for checkpointing too."""
    return (model.total + recomputed.total) * tokens_per_s / peak_flops_per_s


def split_mfu(model: Work, tokens_per_s: float, linear_peak: float, attention_peak: float) -> float:
    """MFU when linear layers run in one precision and attention in another: each over its own peak.

    It is the share of time that the work would take at both peaks.
    """
    return tokens_per_s * (model.linear / linear_peak + model.attention / attention_peak)


def counted_flops_per_token(model: "nn.Module", seq_len: int) -> float:
    """What torch counts for a forward and backward pass of a sequence, per token; on meta too."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    device = next(model.parameters()).device
    tokens = torch.zeros(1, seq_len, dtype=torch.long, device=device)
    # A ready-made mask: transformers would look into the tokens for one, and on meta there is nothing to see.
    mask = torch.zeros(1, 1, seq_len, seq_len, device=device)
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=tokens, attention_mask=mask, use_cache=False).logits.sum().backward()
    return counter.get_total_flops() / seq_len
