"""The loss in chunks: the numbers of torch's own, without all of its logits."""

import pytest

from training.loss import chunked_cross_entropy, loss_of
from training.models import ModelError


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_chunks_change_neither_the_loss_nor_its_gradients(chunk: int) -> None:
    import torch

    torch.manual_seed(0)
    labels = torch.randint(0, 50, (64,))
    found = []
    for chunked in (True, False):
        torch.manual_seed(1)
        hidden = torch.randn(64, 16, dtype=torch.float64).float().requires_grad_()
        weight = torch.randn(50, 16).requires_grad_()
        if chunked:
            loss = chunked_cross_entropy(hidden, weight, labels, chunk)
        else:
            loss = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
        torch.autograd.backward(loss * 0.25)
        assert hidden.grad is not None and weight.grad is not None
        found.append((loss.detach(), hidden.grad, weight.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_no_more_logits_exist_than_a_chunk_of_tokens_has() -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                largest = max(largest, made.numel())
            return made

    hidden, weight = torch.randn(512, 8).requires_grad_(), torch.randn(1000, 8).requires_grad_()
    with Watch():  # type: ignore[no-untyped-call]
        loss = chunked_cross_entropy(hidden, weight, torch.zeros(512, dtype=torch.long), 32)
        torch.autograd.backward(loss)
    assert largest == 32 * 1000


def test_a_module_that_returns_no_scalar_is_named() -> None:
    import torch

    class Wrong(torch.nn.Module):
        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return inputs

    with pytest.raises(ModelError, match="Wrong: returned no scalar loss"):
        loss_of(Wrong(), 0)(torch.zeros(1, 3, dtype=torch.long))
