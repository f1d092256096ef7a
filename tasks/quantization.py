"""The program of `kind: quantization`: a smaller model, published only if it predicts a text about as well.

Invariant: what is scored is the model as a reader will load it from its files, and a model that fails the
gate is never seen. The result is a Hugging Face directory with safetensors: transformers writes torchao's
int8 tensors as plain ones with their layout in the file's metadata, and loads them again by itself.
Embeddings and the output layer stay as they are, which small models feel most in their size.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from tasks.program import (
    JobFailedError,
    Place,
    Program,
    is_published,
    local_directory,
    local_file,
    local_model,
    main,
    publish_directory,
)
from tasks.specfile import SpecError, Strict, read_spec
from training.manifest import entries_of, write_manifest

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig

    from training.data import Windows

REPORT = "quantization.json"


class QuantizationSpec(Strict):
    """The section `quantization:` of a job."""

    model: str  # key prefix of a model's directory
    scheme: Literal["int8_weight_only", "int8_dynamic"] = "int8_weight_only"
    max_perplexity_increase: float = Field(default=0.05, ge=0)  # as a share: 0.05 lets 10.0 become 10.5
    data: str | list[str] = "shakespeare"  # the text whose held-out end is scored
    held_out: float = Field(default=0.05, gt=0, lt=0.5)
    seq_len: int = Field(default=256, ge=2)
    windows: int = Field(default=32, ge=1)  # sequences scored; as many as training scores at its end


def quantize_job(program: Program) -> None:
    """Quantize, score before and after, and publish under `<output>/model/` what passes the gate."""
    spec = read_spec(QuantizationSpec, program.text, program.name)
    if program.node_rank > 0:
        return  # one process is enough; the gang's other nodes have nothing to do
    source = local_model(program.place("model", spec.model), program.scratch)
    target = f"{program.output}/model"
    made_from = {
        "scheme": spec.scheme,
        "source": {name: entry.sha256 for name, entry in entries_of(source).items()},
        "settings": spec.model_dump(exclude={"model"}),
    }
    if (before := _published(program, target)) and before["made_from"] == made_from:
        program.metrics.update(**before["metrics"], progress=1.0, outputs=[target])
        print(f"{target} is there already", flush=True)
        return
    windows = _held_out(program, spec, source)
    metrics, directory = _quantized(program, spec, source, windows)
    increase = metrics["perplexity_after"] / metrics["perplexity_before"] - 1
    program.metrics.update(**metrics, perplexity_increase=increase)
    if not increase <= spec.max_perplexity_increase:  # also when it is not a number
        raise JobFailedError(
            f"not published: perplexity went from {metrics['perplexity_before']:.4g} to "
            f"{metrics['perplexity_after']:.4g}, by {increase:.2%}; max_perplexity_increase allows "
            f"{spec.max_perplexity_increase:.2%}"
        )
    report = {"made_from": made_from, "metrics": metrics}
    (directory / REPORT).write_text(json.dumps(report, indent=1), encoding="utf-8")
    write_manifest(directory)
    publish_directory(program.storage, target, directory)
    program.metrics.update(progress=1.0, outputs=[target])


def _quantized(
    program: Program, spec: QuantizationSpec, source: Path, windows: "Windows"
) -> tuple[dict[str, Any], Path]:
    """The quantized model's directory, and what was measured."""
    import torch
    from transformers import TorchAoConfig

    from training.evaluation import mean_loss, perplexity
    from training.models import load
    from training.trainer import write_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(str(source)).to(device)
    if getattr(model.config, "quantization_config", None) is not None:
        raise SpecError(f"{program.name}: model: {spec.model!r}: is quantized already")
    before = perplexity(mean_loss(model, windows, spec.windows))
    program.metrics.update(perplexity_before=before, progress=0.4)
    del model
    directory = program.scratch / "quantized"
    changed = load(str(source), quantization_config=TorchAoConfig(_scheme(spec.scheme)))
    write_model(changed, directory, source)
    del changed
    after = perplexity(mean_loss(load(str(directory)).to(device), windows, spec.windows))
    metrics = {
        "scheme": spec.scheme,
        "perplexity_before": before,
        "perplexity_after": after,
        "bytes_before": _weights_bytes(source),
        "bytes_after": _weights_bytes(directory),
    }
    return metrics, directory


def _scheme(name: str) -> "AOBaseConfig":
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    schemes = {
        "int8_weight_only": Int8WeightOnlyConfig,
        "int8_dynamic": Int8DynamicActivationInt8WeightConfig,
    }
    return schemes[name]()


def _held_out(program: Program, spec: QuantizationSpec, source: Path) -> "Windows":
    """The windows at the end of the text, in the model's own tokens: those that training held out too."""
    from training.data import Windows, packed_tokens, split, text_files
    from training.models import longest_sequence
    from training.tokenizer import end_token, tokens_of_directory

    longest = longest_sequence(str(source))
    if longest is not None and spec.seq_len > longest:
        raise SpecError(f"{program.name}: seq_len: {spec.seq_len}; the model sees at most {longest} tokens")
    data: str | list[str] = spec.data
    if data != "shakespeare":
        keys = [data] if isinstance(data, str) else data
        data = [str(local_file(program.place("data", key), program.scratch)) for key in keys]
    tokens = packed_tokens(
        text_files(data), lambda text: tokens_of_directory(source, text), end_token(source)
    )
    return Windows(split(tokens, spec.held_out)[1], spec.seq_len, 0, f"the last {spec.held_out:.0%} of data")


def _published(program: Program, target: str) -> dict[str, Any] | None:
    """The report of the model that an earlier attempt published."""
    if not is_published(program.storage, target):
        return None
    directory = local_directory(Place(program.storage, target, target), program.scratch / "published")
    try:
        found = json.loads((directory / REPORT).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) and {"made_from", "metrics"} <= found.keys() else None
    except (OSError, ValueError):
        return None


def _weights_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


if __name__ == "__main__":
    main(quantize_job, sys.argv[1:])
