"""What a step minimises: the summed loss of a batch of sequences, as one module around the model.

Invariant: sums, never means, so that microbatches and processes can be added up; every token counts once.
The logits of a language model exist for one chunk of tokens at a time, and their gradient is computed in the
same pass, so that a vocabulary of 128 thousand does not take more memory than all the layers. No matmul is
done twice; the cost is that the gradient of the output layer is held from forward to backward.
"""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from training.models import MODULE, ModelError

if TYPE_CHECKING:
    from torch import Tensor


class LanguageModelLoss(nn.Module):
    """The summed next-token loss of a Hugging Face causal language model.

    `forward(rows)`: rows are token ids of shape (sequences, seq_len + 1); inputs and labels overlap. `chunk`
    is how many tokens have logits at one time, 0 for all. FSDP must keep the output layer in its root group:
    its weight is used without calling it.
    """

    def __init__(self, model: Any, chunk: int) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk

    def forward(self, rows: "Tensor") -> "Tensor":
        labels = rows[:, 1:].flatten()
        if not self.chunk:
            logits = self.model(input_ids=rows[:, :-1], use_cache=False).logits.float()
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
        hidden = self.model.base_model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        return chunked_cross_entropy(hidden.flatten(0, 1), head.weight, labels, self.chunk)


class OwnModuleLoss(nn.Module):
    """The summed loss of any module that takes token ids and labels and returns the mean loss.

    `module(inputs, labels)`: both of shape (sequences, seq_len); labels are the tokens that follow. What it
    returns is a scalar, or has one as `loss`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: "Tensor") -> "Tensor":
        returned = self.model(rows[:, :-1], rows[:, 1:])
        loss = getattr(returned, "loss", returned)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise ModelError(f"{type(self.model).__name__}: returned no scalar loss; expected a tensor")
        summed: Tensor = loss * rows[:, 1:].numel()
        return summed


def loss_of(model: Any, chunk: int) -> nn.Module:
    """The module that a step calls: for a causal language model of transformers, or any other module."""
    if hasattr(model, "get_output_embeddings") and hasattr(model, "base_model"):
        return LanguageModelLoss(model, chunk)
    return OwnModuleLoss(model)


def own_module(reference: str, seed: int) -> nn.Module:
    """The module that `module:package.module:function` makes when it is called. Raises ModelError."""
    name, _, function = reference.removeprefix(MODULE).partition(":")
    torch.manual_seed(seed)
    try:
        made = getattr(importlib.import_module(name), function)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ModelError(f"model: {reference!r}: {error}; expected module:PACKAGE.MODULE:FUNCTION") from None
    except Exception as error:  # the user's own code
        raise ModelError(f"model: {reference!r}: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"model: {reference!r}: returned {type(made).__name__}; expected a torch.nn.Module")
    return made


def chunked_cross_entropy(hidden: "Tensor", weight: "Tensor", labels: "Tensor", chunk: int) -> "Tensor":
    """The summed cross-entropy of `hidden @ weight.T` against labels, `chunk` tokens at a time.

    hidden: (tokens, width); weight: (vocabulary, width); labels: (tokens,). Under autocast the matmuls run in
    its precision and the softmax in fp32. Equal to torch's cross_entropy but for the order of its sums.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    apply: Any = _ChunkedCrossEntropy.apply
    summed: Tensor = apply(hidden, weight, labels, chunk)
    return summed


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: "Tensor", weight: "Tensor", labels: "Tensor", chunk: int) -> "Tensor":
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        wanted = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if wanted[0] else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        for first in range(0, len(hidden), chunk):
            part, right = hidden[first : first + chunk], labels[first : first + chunk]
            logits = (part @ weight.t()).float()
            normaliser = torch.logsumexp(logits, 1, keepdim=True)
            total += (normaliser - logits.gather(1, right[:, None])).sum()
            if hidden_grad is None and weight_grad is None:
                continue
            gradient = logits.sub_(normaliser).exp_()  # the softmax, in the memory of the logits
            gradient.scatter_add_(1, right[:, None], torch.full_like(normaliser, -1.0))
            lowered = gradient.to(hidden.dtype)
            if hidden_grad is not None:
                torch.mm(lowered, weight, out=hidden_grad[first : first + chunk])
            if weight_grad is not None:
                if lowered.dtype == torch.float32:
                    weight_grad.addmm_(lowered.t(), part)
                else:
                    weight_grad += lowered.t() @ part
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: "Tensor") -> Any:
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = gradients[0]
        return (
            None if hidden_grad is None else hidden_grad.mul_(scale.to(hidden_grad.dtype)),
            None if weight_grad is None else weight_grad.mul_(scale).to(ctx.weight_dtype),
            None,
            None,
        )


def decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """The repeated layers of a model: the longest list of modules in it; none is an empty list."""
    lists = [list(part) for part in model.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=len, default=[])
