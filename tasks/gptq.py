"""Quantize a model's linear layers to 4 bits by GPTQ, through llmcompressor (the extra `gptq`).

Invariant: layers are quantized in their order, column by column, and what a column loses is made up for in
those after it, by what the layer sees of a text that is not scored. A layer whose inputs do not come in whole
groups stays as it is, and so does the output layer. The result is in compressed-tensors' format, which vLLM
computes in 4 bits on a GPU; transformers unpacks it, so there it saves disk, not time.

The cost is one pass of the text for each block of the model, and the inverse of a matrix as wide as each
layer. llmcompressor keeps to its own range of versions of transformers.
"""

from typing import Any

from training.data import Windows

BATCH = 8  # windows that go through the model together
GROUP = 128  # weights of a row that share a scale


def calibrate_gptq(model: Any, text: Windows, windows: int) -> None:
    """Quantize a loaded model in place."""
    import torch
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    output, kept = model.get_output_embeddings(), []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and (module is output or module.in_features % GROUP):
            kept.append(name)
    rows: Any = [
        {"input_ids": row, "attention_mask": row.new_ones(len(row))}
        for row in text.at(0, min(windows, text.count))[:, :-1]
    ]
    oneshot(
        model=model,
        dataset=torch.utils.data.DataLoader(rows, batch_size=BATCH),
        recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=kept),
        num_calibration_samples=len(rows),
        pipeline="sequential",
    )
