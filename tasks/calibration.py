"""Quantize a model by what its layers see of a text (AWQ): inputs that are large keep more precision.

Invariant: a layer's weights are scaled by the choice, among twenty, that changes its own outputs on the text
least; no scaling at all is one of them. The inverse lies with the weights, in the same safetensors, and
transformers applies it after loading: outputs are the same before and after, to the bit.

The cost is one pass of the text through the model for each of its blocks, in exchange for holding the inputs
of one block only, and about forty times a block's own work for the search. Blocks come in their order: each
sees what the quantized ones before it make of the text.
"""

import re
from typing import TYPE_CHECKING, Any

from tasks.schemes import note_quantization
from training.data import Windows

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig

BATCH = 8  # windows that go through the model together


def calibrate(model: Any, base: "AOBaseConfig", text: Windows, windows: int) -> None:
    """Quantize a model's linear layers, but the output one, as `base` does, scaled by what they see."""
    import torch
    from torchao.prototype.awq import AWQConfig
    from torchao.quantization import quantize_

    device = next(model.parameters()).device
    with torch.inference_mode():
        rows = text.at(0, min(windows, text.count))[:, :-1].to(device)
    for names in _blocks(model):

        def chosen(module: Any, name: str, names: frozenset[str] = names) -> bool:
            return name in names

        quantize_(model, AWQConfig(base, step="prepare"), filter_fn=chosen)
        with torch.no_grad():
            for first in range(0, len(rows), BATCH):
                model(input_ids=rows[first : first + BATCH], use_cache=False)
        quantize_(model, AWQConfig(base, step="convert"), filter_fn=chosen)
    note_quantization(model, AWQConfig(base, step="prepare_for_loading"))


def _blocks(model: Any) -> list[frozenset[str]]:
    """The names of the linear layers, those of one block of the model together."""
    import torch

    output = model.get_output_embeddings()
    found: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not output:
            block = re.match(r".*?\.\d+\.", name)
            found.setdefault(block[0] if block else "", set()).add(name)
    return [frozenset(names) for names in found.values()]
