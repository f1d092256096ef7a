"""Compiled layers as they would be without graph breaks, to measure what the breaks cost.

torch.compile reads a layer's Python and breaks where it cannot follow. Here a layer runs once, what it
dispatches is recorded, operator by operator, and the record is compiled: no Python is left in it that could
break. Invariant: for measuring only, as one record serves all layers of the same parts, and what their Python
decides was decided when it was made. A layer whose operators depend on values (`.item()`) cannot be recorded.
"""

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


class Unbroken:
    """Stands where a module keeps its compiled call."""

    def __init__(self, layer: nn.Module, compiled: dict[Any, Any]) -> None:
        """`compiled`: the records so far, by what they were made from."""
        self.layer, self.compiled = layer, compiled

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The layer's outputs, from operators alone."""
        held = {**dict(self.layer.named_parameters()), **dict(self.layer.named_buffers())}
        leaves, tree = pytree.tree_flatten((inputs, named))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [*held.values(), *(leaves[place] for place in places)]
        key = (type(self.layer), *((tuple(each.shape), each.dtype, each.requires_grad) for each in tensors))
        if key not in self.compiled:
            self.compiled[key] = self._recorded(list(held), leaves, tree, places, tensors)
        record, outputs = self.compiled[key]
        return pytree.tree_unflatten(record(*tensors), outputs)

    def _recorded(
        self, names: list[str], leaves: list[Any], tree: Any, places: list[int], tensors: list[torch.Tensor]
    ) -> tuple[Any, Any]:
        from torch.fx.experimental.proxy_tensor import make_fx

        outputs = None

        def flat(*given: torch.Tensor) -> list[Any]:
            nonlocal outputs
            filled = list(leaves)
            for place, tensor in zip(places, given[len(names) :], strict=True):
                filled[place] = tensor
            inputs, named = pytree.tree_unflatten(filled, tree)
            compiled, self.layer._compiled_call_impl = self.layer._compiled_call_impl, None
            try:
                held = dict(zip(names, given, strict=False))
                found = torch.func.functional_call(self.layer, held, inputs, named)
            finally:
                self.layer._compiled_call_impl = compiled
            flattened, outputs = pytree.tree_flatten(found)
            return flattened

        graph = make_fx(flat, _allow_non_fake_inputs=True)(*tensors)
        return torch.compile(graph, fullgraph=True), outputs


def remove_breaks(model: nn.Module) -> int:
    """Let the layers that are to be compiled run without graph breaks from now on; how many."""
    compiled: dict[Any, Any] = {}
    layers = [layer for layer in model.modules() if layer._compiled_call_impl is not None]
    for layer in layers:
        layer._compiled_call_impl = Unbroken(layer, compiled)
    return len(layers)
