"""What happens inside a step: the passes, the norm of the gradient, and scoring without learning."""

from collections.abc import Sequence
from typing import Any

import torch

from training.assembly import Parts
from training.data import Windows
from training.feed import Ask, Feed
from training.precision import computing
from training.processes import World


def forward_backward(
    parts: Parts, feed: Feed, asks: Sequence[Ask], following: Sequence[Ask], tokens: int
) -> float:
    """All passes of a step: gradients of the mean over the step's `tokens`; this process's summed loss.

    A pass's loss is a sum over its tokens, so passes and processes of any size weigh by their tokens.
    Gradients are exchanged by the exchange's rule; it takes the mean over processes, which is undone here.
    """
    exchange = parts.exchange
    total = torch.zeros((), device=feed.device)
    upcoming = [*asks, *following]
    for place, ask in enumerate(asks):
        rows = feed.take(ask, upcoming[place + 1 :])
        with exchange.passing(last=place == len(asks) - 1):
            with computing(parts.precision, feed.device, exchange.sharded):
                loss = exchange.module(rows)
            torch.autograd.backward(loss * (exchange.scale / tokens))
        total += loss.detach()
    return float(total)


def clipped_norm(parameters: Sequence[torch.nn.Parameter], most: float) -> float:
    """Scale the gradients to at most this norm; the norm they had, over all processes."""
    norm: Any = torch.nn.utils.clip_grad_norm_(parameters, most)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def scored(parts: Parts, windows: Windows, most: int, batch: int, world: World) -> tuple[float, float]:
    """The summed loss of this process's share of the first windows of a text, and its tokens.

    Every process makes equally many passes, as a sharded model needs them all; one without a window of its
    own scores the last again, for nothing.
    """
    count = min(most, windows.count)
    turns = -(-count // (batch * world.size))
    module = parts.exchange.module if parts.exchange.sharded else parts.inner
    total = tokens = 0.0
    parts.inner.eval()
    with torch.no_grad(), computing(parts.precision, parts.device, parts.exchange.sharded):
        for turn in range(turns):
            first = (turn * world.size + world.rank) * batch
            size = max(min(batch, count - first), 0)
            rows = windows.in_order(first if size else count - 1, size or 1).to(parts.device)
            loss = float(module(rows))
            if size:
                total += loss
                tokens += rows[:, 1:].numel()
    parts.inner.train()
    return total, tokens
