"""Attention in blocks: torch's own in other steps, on whatever shapes a Llama has."""

from typing import Any

import pytest
import torch
from torch import Tensor

from training import attention, models
from training.loss import LanguageModelLoss


@pytest.mark.parametrize(
    ("length", "heads", "key_heads"), [(256, 4, 2), (300, 4, 4), (129, 6, 2), (640, 2, 1)]
)
def test_blocks_give_what_the_library_gives_and_its_gradients(
    length: int, heads: int, key_heads: int
) -> None:
    torch.manual_seed(0)

    def made(count: int) -> Tensor:
        return torch.randn(2, length, count, 16).transpose(1, 2).requires_grad_()

    inputs = (made(heads), made(key_heads), made(key_heads))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *inputs, is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    arriving = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, inputs, arriving)
    found, _ = attention.causal_attention(*inputs, 16**-0.5)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, inputs, arriving), gradients)


def test_a_compiler_and_autograd_know_the_operator() -> None:
    inputs = [torch.randn(1, heads, 130, 8, requires_grad=True) for heads in (2, 1, 1)]
    torch.library.opcheck(attention.causal_attention, (*inputs, 0.3))


def test_a_model_loses_nothing_but_rounding_and_is_called_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randint(0, 256, (2, 257), generator=torch.Generator().manual_seed(0))
    losses: list[Tensor] = []
    gradients: list[Any] = []
    calls: list[int] = []
    kernel = attention._kernel

    def counted(query: Tensor, *given: Any, **named: Any) -> Any:
        calls.append(query.shape[2])
        return kernel(query, *given, **named)

    monkeypatch.setattr(attention, "_kernel", counted)
    for blocks in (False, True):
        model = models.build("llama-micro", seed=0)
        assert not blocks or attention.attend_in_blocks(model)
        loss = LanguageModelLoss(model, 0)(rows)
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-3)
    assert calls == [256, 256] * 2  # two layers, two blocks of 128 queries, two heads that share keys


def test_a_model_with_another_attention_is_left_alone() -> None:
    assert not attention.attend_in_blocks(torch.nn.Linear(2, 2))
