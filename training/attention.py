"""Causal attention on a processor, in blocks of queries that see only the keys up to their own.

torch's kernel for processors looks at keys 512 at a time: within these a causal mask hides half of what was
computed. Here each block of queries is given its own keys and the mask of its corner alone, and the heads
that share keys stand side by side in one block, so that keys and values are never repeated.

Invariant: the same sums as torch's attention but for their order, and the same tensors kept for backward.
The cost: a call for each block, with fewer queries to share among the threads; past 2048 tokens little is
won.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 128  # queries
NAME = "causal_blocks"  # among transformers' attention functions
_kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_in_blocks(model: Any) -> bool:
    """Have a model of transformers use this attention; whether it can."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if getattr(getattr(model, "config", None), "_attn_implementation", None) != "sdpa":
        return False
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(NAME)
    return True


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **named: Any,
) -> tuple[Tensor, None]:
    """What transformers calls; whatever is not plain causal attention goes to the library's."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    length = query.shape[2]
    if attention_mask is not None or dropout or not BLOCK < length == key.shape[2]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **named
        )
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    attended, _ = causal_attention(query, key, value, scale)
    return attended, None


@torch.library.custom_op("slotwise::causal_attention", mutates_args=())
def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of shape (batch, length, heads, width), and the log-sum-exp of each row for backward.

    query: (batch, heads, length, width); key, value: (batch, key heads, length, width), whose number divides
    that of the heads.
    """
    batch, heads, length, width = query.shape
    key_heads = key.shape[1]
    attended = query.new_empty(batch, length, heads, width)
    grouped = _grouped(query, key_heads)
    places = _grouped(attended.transpose(1, 2), key_heads)
    sums = []
    for first, last in _blocks(length):
        found, summed = _kernel(
            grouped[:, :, :, first:last].flatten(2, 3),
            key[:, :, :last],
            value[:, :, :last],
            attn_mask=_mask(first, last, heads // key_heads, query.dtype),
            scale=scale,
        )
        places[:, :, :, first:last] = found.unflatten(2, (-1, last - first))
        sums.append(summed)
    return attended, torch.cat(sums, -1)


@torch.library.custom_op("slotwise::causal_attention_backward", mutates_args=())
def _causal_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, length, key_heads = query.shape[1], query.shape[2], key.shape[1]
    sharing = heads // key_heads
    # What is as long as the sequence, with the heads that share keys side by side.
    queries, outputs, arrived = (
        _grouped(each, key_heads) for each in (query, attended.transpose(1, 2), gradient.transpose(1, 2))
    )
    query_gradient = torch.empty_like(query)
    places = _grouped(query_gradient, key_heads)
    key_gradient = value_gradient = query.new_empty(0)
    for first, last in reversed(_blocks(length)):
        found, for_key, for_value = _kernel_backward(
            arrived[:, :, :, first:last].flatten(2, 3),
            queries[:, :, :, first:last].flatten(2, 3),
            key[:, :, :last],
            value[:, :, :last],
            outputs[:, :, :, first:last].flatten(2, 3),
            sums[:, :, sharing * first : sharing * last],
            0.0,
            False,
            attn_mask=_mask(first, last, sharing, query.dtype),
            scale=scale,
        )
        places[:, :, :, first:last] = found.unflatten(2, (-1, last - first))
        if last == length:  # the last block sees every key
            key_gradient, value_gradient = for_key, for_value
        else:
            key_gradient[:, :, :last] += for_key
            value_gradient[:, :, :last] += for_value
    return query_gradient, key_gradient.contiguous(), value_gradient.contiguous()


@causal_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = query.shape
    key_heads = key.shape[1]
    rows = (batch, key_heads, heads // key_heads * length)
    return query.new_empty(batch, length, heads, width), query.new_empty(rows, dtype=torch.float32)


@_causal_attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(query),
        torch.empty_like(key, memory_format=torch.contiguous_format),
        torch.empty_like(value, memory_format=torch.contiguous_format),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, scale = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.scale = scale


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
    return *_causal_attention_backward(gradient, *ctx.saved_tensors, ctx.scale), None


causal_attention.register_autograd(_differentiate, setup_context=_keep)


def _grouped(tensor: Any, key_heads: int) -> Any:
    """The heads in groups that share keys, without a copy: (batch, key heads, sharing, length, width)."""
    return tensor.unflatten(1, (key_heads, -1))


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(first, min(first + BLOCK, length)) for first in range(0, length, BLOCK)]


@cache
def _mask(first: int, last: int, sharing: int, dtype: torch.dtype) -> Tensor:
    """What a block's queries may not see, once for each of the heads that share keys: at most a few MB."""
    hidden = torch.full((last - first, last), float("-inf"), dtype=dtype)
    return hidden.triu_(first + 1).repeat(sharing, 1)
