"""How well a model predicts a text: the mean loss over its windows, and the perplexity, which is e to that.

Invariant: every token counts once and equally, whatever the batch.
"""

import math
from typing import TYPE_CHECKING, Any

from training.data import Windows

if TYPE_CHECKING:
    import torch


def mean_loss(model: Any, windows: Windows, most: int, batch: int = 8) -> float:
    """Nats per token over the first `most` windows of the text; the model is left in the mode it was in."""
    import torch

    device = next(model.parameters()).device
    total, tokens = 0.0, 0
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for first in range(0, min(most, windows.count), batch):
            rows = windows.in_order(first, min(batch, most - first)).to(device)
            total += float(summed_loss(model, rows))
            tokens += rows[:, 1:].numel()
    model.train(was_training)
    return total / tokens


def perplexity(loss: float) -> float:
    """What a mean loss is as perplexity; infinite where a float ends."""
    return math.exp(loss) if loss < 700 else math.inf


def summed_loss(model: Any, rows: "torch.Tensor") -> "torch.Tensor":
    """The loss of all tokens together: sums can be added over microbatches and processes, means cannot."""
    import torch

    logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
