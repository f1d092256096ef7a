"""The keys and values of a batch: computed in groups of prompts about as long, then kept in one place.

Invariant: decoding goes on as if all prompts had been computed together: a prompt's keys and values lie at
the right of its row, under the same mask, and what lies left of them is never attended to. Padding costs most
where prompts are computed and little in a step of decoding, which gains from many rows: so the first is done
in groups, the second together. The last token of each prompt is left to the first step of decoding.

Memory is taken once, for all that a row may become, and written in place; transformers' own cache copies all
of it for each new token. Layers of other kinds, such as those that see a window, are left to transformers.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

ALIKE = 0.85  # of a group's longest prompt
LEAST_TOKENS = {"cuda": 8192, "cpu": 1024}  # of a group, below which it takes shorter prompts too


class Reserved(DynamicLayer):  # type: ignore[no-untyped-call]
    """The keys and values of one layer, with room for `most` tokens of each row."""

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = most
        self.room: tuple[torch.Tensor, torch.Tensor] | None = None

    def reserve(
        self, rows: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for so many rows of the kind that these are."""
        self.room = (
            keys.new_zeros(rows, keys.shape[1], self.most, keys.shape[3]),
            values.new_zeros(rows, values.shape[1], self.most, values.shape[3]),
        )
        return self.room

    def show(self, length: int) -> None:
        """Have so many tokens of the room be those that there are."""
        assert self.room is not None
        self.keys, self.values = (part[:, :, :length] for part in self.room)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.get_seq_length()
        length = before + key_states.shape[-2]
        room = self.room or self.reserve(len(key_states), key_states, value_states)
        for part, old, new in zip(room, (self.keys, self.values), (key_states, value_states), strict=True):
            if before and old is not None and old.data_ptr() != part.data_ptr():
                part[:, :, :before] = old
            part[:, :, before:length] = new
        self.show(length)
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self.room = None


def empty_cache(model: Any, most: int) -> Any:
    """A cache for rows of at most so many tokens."""
    cache = DynamicCache(config=model.config)
    cache.layers = [Reserved(most) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def prefill(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor, lengths: Sequence[int]) -> int:
    """Compute all but the last token of prompts, which are padded on the left and come the longest first.

    The number of positions computed; 0, and nothing done, where all are about as long or a layer is of
    another kind.
    """
    groups = list(_groups(lengths, LEAST_TOKENS[ids.device.type]))
    known = inspect.signature(type(model).forward).parameters
    plain = all(isinstance(layer, Reserved) for layer in cache.layers)
    if len(groups) < 2 or not plain or "logits_to_keep" not in known:
        return 0
    name, width, computed = cache_argument(model), ids.shape[1] - 1, 0
    for first, end in groups:
        begin = width + 1 - max(lengths[first], 2)
        seen = mask[first:end, begin:width]
        part: Any = DynamicCache(config=model.config)
        model(
            input_ids=ids[first:end, begin:width],
            attention_mask=seen,
            position_ids=(seen.cumsum(1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
            **{name: part},
        )
        computed += seen.numel()
        for layer, made in zip(cache.layers, part.layers, strict=True):
            room = layer.room or layer.reserve(len(ids), made.keys, made.values)
            room[0][first:end, :, begin:width] = made.keys
            room[1][first:end, :, begin:width] = made.values
    for layer in cache.layers:
        layer.show(width)
    return computed


def cache_argument(model: Any) -> str:
    """What a model calls its cache: transformers renamed it."""
    known = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in known else "past_key_values"


def _groups(lengths: Sequence[int], least_tokens: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows to compute together."""
    first = 0
    for place, length in enumerate(lengths):
        full = (place - first) * lengths[first] >= least_tokens
        if full and length < ALIKE * lengths[first]:
            yield first, place
            first = place
    yield first, len(lengths)
