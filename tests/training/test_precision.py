"""Precisions that need a GPU, as far as a processor can tell."""

import pytest

from tests.training.small_runs import SMALL
from training.config import ConfigError
from training.precision import check_precision, to_fp8


def test_fp8_takes_the_place_of_the_layers_matmuls_and_trains() -> None:
    import torch

    from training.loss import loss_of
    from training.models import build

    model = build("llama-micro", 0)
    rows = torch.randint(0, 256, (2, 17))
    exact = float(loss_of(model, 0)(rows).detach())
    assert to_fp8(model, emulated=True) == 2 * 7  # of each layer, and not the output layer
    assert type(model.lm_head) is torch.nn.Linear
    loss = loss_of(model, 0)(rows)
    assert float(loss.detach()) == pytest.approx(exact, rel=0.01) and float(loss.detach()) != exact
    torch.autograd.backward(loss)
    assert all(torch.isfinite(part.grad).all() for part in model.parameters() if part.grad is not None)
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None


def test_fp8_without_a_gpu_is_refused() -> None:
    import torch

    with pytest.raises(ConfigError, match="precision: fp8; expected a GPU with fp8 matmuls, this is a CPU"):
        check_precision("fp8", torch.device("cpu"))
    check_precision(SMALL.precision, torch.device("cpu"))
