"""What a finished run leaves: the model as a Hugging Face directory, and its loss curve."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.manifest import write_manifest
from training.tokenizer import write_tokenizer

if TYPE_CHECKING:
    import torch


def write_model(
    model: Any,
    directory: Path,
    tokenizer_source: Path | None,
    weights: "Mapping[str, torch.Tensor] | None" = None,
) -> None:
    """Write a Hugging Face directory: safetensors, configuration, tokenizer, and a manifest at the end.

    `weights` are written in place of the model's own. A module that is not of transformers leaves its weights
    alone.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if hasattr(model, "save_pretrained"):
        chosen = {} if weights is None else {"state_dict": dict(weights)}
        model.save_pretrained(directory, **chosen)
        write_tokenizer(directory, tokenizer_source)
    else:
        from safetensors.torch import save_file

        found = model.state_dict() if weights is None else weights
        save_file(
            {name: value.contiguous() for name, value in found.items()}, directory / "model.safetensors"
        )
    write_manifest(directory)


def write_curve(file: Path, losses: Sequence[float | None]) -> None:
    """The loss of each step, as JSON lines; null for a step that was left out."""
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
