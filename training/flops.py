"""Model FLOPs per token, under the five conventions that people publish MFU in.

Invariant: a count is never given without its convention; the default, `matmul`, is what FlopCounterMode
counts. The conventions differ by up to a third for one model, so a figure compares only with figures of its
own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.models import Shape

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Convention:
    """6 FLOPs for each counted parameter, and `attention` × layers × attention width × sequence length."""

    parameters: Callable[[Shape], int]
    attention: int
    used_by: str


def _all_but_input_embedding(shape: Shape) -> int:
    return shape.parameters - (0 if shape.tied else shape.embedding_parameters)


CONVENTIONS: dict[str, Convention] = {
    "palm": Convention(lambda shape: shape.parameters, 12, "PaLM, llm-foundry, litgpt"),
    "no_embedding": Convention(_all_but_input_embedding, 12, "torchtitan, OLMo-core"),
    "matmul": Convention(lambda shape: shape.matmul_parameters, 12, "nanotron; FlopCounterMode"),
    "causal": Convention(lambda shape: shape.matmul_parameters, 6, "NeMo, Megatron-LM"),
    "6n": Convention(lambda shape: shape.parameters, 0, "scaling-law papers"),
}


def flops_per_token(shape: Shape, seq_len: int, convention: str = "matmul") -> int:
    """Model FLOPs, forward and backward, of one token in a sequence of `seq_len`.

    Raises ValueError for an unknown convention.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"convention: {convention!r}; expected one of {', '.join(CONVENTIONS)}")
    chosen = CONVENTIONS[convention]
    attention = chosen.attention * shape.layers * shape.heads * shape.head_dim * seq_len
    return 6 * chosen.parameters(shape) + attention


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops_per_s: float) -> float:
    """The share of the peak that the model's own FLOPs used; all three for the same number of GPUs."""
    return flops_per_token * tokens_per_s / peak_flops_per_s


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
