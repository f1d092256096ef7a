"""What a finished run leaves: the model as a Hugging Face directory, and its loss curve."""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.manifest import write_manifest
from training.tokenizer import write_tokenizer

if TYPE_CHECKING:
    import torch

FILE_BYTES = 4 << 30  # of weights, at most, unless one tensor is larger


def write_model(
    model: Any,
    directory: Path,
    tokenizer_source: Path | None,
    weights: "Iterable[tuple[str, torch.Tensor]] | None" = None,
) -> None:
    """Write a Hugging Face directory: safetensors, configuration, tokenizer, and a manifest at the end.

    `weights` are written in place of the model's own, and taken one by one: no more than a file's are held. A
    module that is not of transformers leaves its weights alone.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if not hasattr(model, "save_pretrained"):
        _write_tensors(directory, model.state_dict().items() if weights is None else weights)
    elif weights is None:
        model.save_pretrained(directory)
    elif getattr(model.config, "num_local_experts", 0):  # files keep apart what the model has as one tensor
        model.save_pretrained(directory, state_dict=dict(weights))
    else:
        model.save_pretrained(directory, state_dict={})  # all but the weights
        _write_tensors(directory, weights)
    if hasattr(model, "save_pretrained"):
        write_tokenizer(directory, tokenizer_source)
    write_manifest(directory)


def _write_tensors(directory: Path, tensors: "Iterable[tuple[str, torch.Tensor]]") -> None:
    """Write safetensors: one file, or several with the index that transformers looks for."""
    from safetensors.torch import save_file

    files: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = size = 0

    def flush() -> None:
        nonlocal size
        save_file(held, directory / f".{len(files)}.safetensors", {"format": "pt"})
        files.append(list(held))
        held.clear()
        size = 0

    for name, tensor in tensors:
        if held and size + tensor.nbytes > FILE_BYTES:
            flush()
        held[name] = tensor.contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    names = [f"model-{place:05}-of-{len(files):05}.safetensors" for place in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    for place, name in enumerate(names):
        (directory / f".{place}.safetensors").replace(directory / name)
    if len(files) > 1:
        places = {each: name for name, own in zip(names, files, strict=True) for each in own}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def write_curve(file: Path, losses: Sequence[float | None]) -> None:
    """The loss of each step, as JSON lines; null for a step that was left out."""
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
