"""Small networks that learned, across recorded services, what a blend's errors look like.

Invariant: they see ratios and differences only (see `experts`), so any service in any unit looks alike to
them, and they say by how many times the blend's own error scale each quantile lies from its centre. Their
weights ship with the package; numpy is enough to use them, torch is needed to train them
(`python -m tasks.forecast train`). The cost of the choice: what no recorded service did is not foreseen.
"""

from functools import cache
from pathlib import Path

import numpy as np

from tasks.experts import Array

WEIGHTS = Path(__file__).parent / "pretraining" / "weights.npz"
Layers = tuple[tuple[Array, Array], ...]  # weight (in × out) and bias of each layer


def offsets(features: Array, networks: tuple[Layers, ...] | None = None) -> Array:
    """Quantiles at LEVELS as multiples of the error scale, mean of the networks: row × level."""
    chosen = shipped() if networks is None else networks
    return np.asarray(np.mean([_forward(layers, features) for layers in chosen], axis=0))


@cache
def shipped() -> tuple[Layers, ...]:
    """The networks in the package."""
    with np.load(WEIGHTS) as file:
        return unpacked(dict(file))


def packed(networks: tuple[Layers, ...]) -> dict[str, Array]:
    """Networks as arrays with the names `<network>.<layer>.<weight or bias>`."""
    return {
        f"{number}.{depth}.{name}": array
        for number, layers in enumerate(networks)
        for depth, layer in enumerate(layers)
        for name, array in zip(("weight", "bias"), layer, strict=True)
    }


def unpacked(arrays: dict[str, Array]) -> tuple[Layers, ...]:
    """The reverse."""
    numbers = sorted({int(name.split(".")[0]) for name in arrays})
    depth = len(arrays) // len(numbers) // 2
    return tuple(
        tuple(
            (arrays[f"{number}.{layer}.weight"], arrays[f"{number}.{layer}.bias"]) for layer in range(depth)
        )
        for number in numbers
    )


def _forward(layers: Layers, features: Array) -> Array:
    found = features
    for weight, bias in layers[:-1]:
        found = found @ weight + bias
        found = found / (1 + np.exp(-found))
    weight, bias = layers[-1]
    return np.asarray(found @ weight + bias)
