"""The program of `kind: quantization`: a smaller model, published only if it predicts a text about as well.

Invariant: what is scored is the model as a reader will load it from its files, and a model that fails the
gate is never seen. The result is a Hugging Face directory with safetensors: transformers writes torchao's
tensors as plain ones with their layout in the file's metadata, and loads them again by itself. Embeddings
and the output layer stay as they are, which small models feel most in their size.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from tasks.calibration import calibrate
from tasks.program import (
    FinalError,
    JobFailedError,
    Place,
    Program,
    is_published,
    local_directory,
    local_file,
    local_model,
    main,
    publish_directory,
    said_of,
)
from tasks.schemes import SCHEMES, Device, quantization_argument, this_device
from tasks.specfile import SpecError, Strict, read_spec
from tasks.speed import Speed, measured, picture, table
from training.manifest import entries_of, write_manifest
from training.models import config_of
from training.output import write_model

if TYPE_CHECKING:
    from training.data import Tokens, Windows

SchemeName = Literal[
    "int8_weight_only", "int8_dynamic", "int8_awq", "int4_weight_only", "int4_awq", "fp8", "auto"
]
REPORT = "quantization.json"


class QuantizationSpec(Strict):
    """The section `quantization:` of a job."""

    model: str  # key prefix of a model's directory
    scheme: SchemeName = "int8_weight_only"
    prefer: Literal["speed", "size"] = "speed"  # what `auto` picks by, among what passes the gate
    max_perplexity_increase: float = Field(default=0.05, ge=0)  # as a share: 0.05 lets 10.0 become 10.5
    min_agreement: float = Field(default=0.0, ge=0, le=1)  # of greedy outputs, as a share of their tokens
    data: str | list[str] = "shakespeare"  # the text whose held-out end is scored
    held_out: float = Field(default=0.05, gt=0, lt=0.5)
    seq_len: int = Field(default=256, ge=2)
    windows: int = Field(default=32, ge=1)  # sequences scored; as many as training scores at its end
    measure_speed: bool = True
    calibration: str | list[str] | None = None  # for awq, another text than what `data` does not hold out
    calibration_windows: int = Field(default=16, ge=1)  # sequences of it that the layers are shown

    @model_validator(mode="after")
    def _scores_what_it_has_not_seen(self) -> Self:
        if shared := set(_listed(self.calibration or [])) & set(_listed(self.data)):
            raise ValueError(
                f"calibration: {min(shared)!r} is scored, as data; expected another text, or none: the part "
                "of data that is not held out is used then"
            )
        return self


@dataclass(frozen=True)
class Scored:
    """A model as it was measured; `outputs` are the tokens it generated after each prompt."""

    name: str
    directory: Path
    perplexity: float
    bytes: int
    outputs: list[list[int]]
    speed: Speed

    @property
    def row(self) -> tuple[str, dict[str, Any]]:
        """Its line in the table."""
        return self.name, {"megabytes": self.bytes / 1e6, "perplexity": self.perplexity, **self.speed}


@dataclass(frozen=True)
class Texts:
    """What a model is calibrated with, and what it is scored on: never the same."""

    shown: "Windows"
    scored: "Windows"


def quantize_job(program: Program) -> None:
    """Quantize, score before and after, and publish under `<output>/model/` what passes the gate."""
    spec = read_spec(QuantizationSpec, program.text, program.name)
    if program.node_rank > 0:
        return  # one process is enough; the gang's other nodes have nothing to do
    device = this_device()
    schemes = _possible(program, spec, device)
    model = program.place("model", spec.model)
    source = local_model(model, program.scratch)
    with said_of(model, source):
        _quantize(program, spec, source, schemes, device)


def _quantize(
    program: Program, spec: QuantizationSpec, source: Path, schemes: list[str], device: Device
) -> None:
    if config_of(str(source)).get("quantization_config") is not None:
        raise SpecError(f"{program.name}: model: {spec.model!r}: is quantized already")
    target = f"{program.output}/model"
    made_from = {
        "scheme": spec.scheme,
        "source": {name: entry.sha256 for name, entry in entries_of(source).items()},
        "settings": spec.model_dump(exclude={"model"}),
    }
    if (known := _published(program, target)) and known["made_from"] == made_from:
        program.metrics.update(**known["metrics"], progress=1.0, outputs=[target])
        print(f"{target} is there already", flush=True)
        return
    texts = _texts(program, spec, source)
    before = _scored("before", source, spec, texts.scored, device)
    program.metrics.update(perplexity_before=before.perplexity, progress=1 / (len(schemes) + 1))
    passed: list[tuple[Scored, dict[str, Any]]] = []
    failed: list[str] = []
    for turn, scheme in enumerate(schemes, 2):
        if SCHEMES[scheme].plain in [done.name for done, _ in passed]:
            continue  # calibrating takes longest, and is for what is too bad without
        try:
            after = _quantized(program, spec, source, texts, scheme, device)
        except Exception as error:  # whatever a library raises where a kernel does not fit the model
            told = f"{scheme}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if len(schemes) == 1:
                raise JobFailedError(f"{program.name}: scheme: {told}") from error
            failed.append(told)
            continue
        metrics = _compared(before, after)
        program.metrics.update(**metrics, progress=turn / (len(schemes) + 2))
        if problem := _gate(spec, metrics):
            failed.append(f"{scheme}: {problem}" if len(schemes) > 1 else problem)
        else:
            passed.append((after, metrics))
    if not passed:
        raise FinalError(f"not published: {'; '.join(failed)}")
    best, metrics = max(passed, key=lambda found: _worth(spec, found[0]))
    rows = [before.row, *(after.row for after, _ in passed)]
    print(table(rows), flush=True)
    report = {"made_from": made_from, "metrics": metrics, "failed": failed}
    (best.directory / REPORT).write_text(json.dumps(report, indent=1), encoding="utf-8")
    write_manifest(best.directory)
    title = f"{spec.model} on {device.name}"
    program.storage.write(f"{program.output}/quantization.md", f"{title}\n\n{table(rows)}".encode())
    program.storage.write(f"{program.output}/quantization.svg", picture(rows, title).encode())
    publish_directory(program.storage, target, best.directory)  # last: what is published is not done again
    outputs = [target, f"{program.output}/quantization.md", f"{program.output}/quantization.svg"]
    program.metrics.update(**metrics, progress=1.0, outputs=outputs)


def _possible(program: Program, spec: QuantizationSpec, device: Device) -> list[str]:
    """The schemes to try. Raises SpecError when the device cannot run the one that is asked for."""
    if spec.scheme == "auto":
        return [name for name, scheme in SCHEMES.items() if scheme.lacks(device) is None]
    if lacks := SCHEMES[spec.scheme].lacks(device):
        raise SpecError(f"{program.name}: scheme: {spec.scheme!r}: {lacks}")
    return [spec.scheme]


def _quantized(
    program: Program, spec: QuantizationSpec, source: Path, texts: Texts, scheme: str, device: Device
) -> Scored:
    """The model quantized, written to its directory, loaded from there and measured."""
    from training.models import load

    way, directory = SCHEMES[scheme], program.scratch / "quantized" / scheme
    if way.plain:
        changed = load(str(source), dtype=_dtype(device)).to(device.kind).eval()
        calibrate(changed, way.config(), texts.shown, spec.calibration_windows)
    else:
        where = {"device_map": {"": 0}} if way.least else {}  # a GPU's kernels pack the weights
        changed = load(
            str(source), quantization_config=quantization_argument(scheme), dtype=_dtype(device), **where
        )
    write_model(changed, directory, source)
    del changed
    return _scored(scheme, directory, spec, texts.scored, device)


def _scored(name: str, directory: Path, spec: QuantizationSpec, windows: "Windows", device: Device) -> Scored:
    import torch

    from training.evaluation import mean_loss, perplexity
    from training.models import load

    where = {"device_map": {"": 0}} if name in SCHEMES and SCHEMES[name].least else {}
    model = load(str(directory), dtype=_dtype(device), **where)
    if not where:
        model = model.to(device.kind)
    model.eval()
    found = perplexity(mean_loss(model, windows, spec.windows))
    length = max(min(spec.seq_len // 2, 64), 1)
    prompts = windows.in_order(0, min(spec.windows, 8))[:, :length].to(device.kind)
    new = min(spec.seq_len, length + 32) - length
    with torch.inference_mode():
        out = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
    speed = measured(model, int(model.config.vocab_size)) if spec.measure_speed else {}
    return Scored(name, directory, found, _weights_bytes(directory), out[:, length:].tolist(), speed)


def _dtype(device: Device) -> Any:
    import torch

    return torch.bfloat16 if device.kind == "cuda" else torch.float32


def _compared(before: Scored, after: Scored) -> dict[str, Any]:
    """What people see of a quantized model beside what it was made from."""
    return {
        "scheme": after.name,
        "perplexity_before": before.perplexity,
        "perplexity_after": after.perplexity,
        "perplexity_increase": after.perplexity / before.perplexity - 1,
        "greedy_agreement": _agreement(before.outputs, after.outputs),
        "bytes_before": before.bytes,
        "bytes_after": after.bytes,
        **{f"{name}_before": value for name, value in before.speed.items()},
        **{f"{name}_after": value for name, value in after.speed.items()},
    }


def _agreement(before: list[list[int]], after: list[list[int]]) -> float:
    """The share of tokens up to where greedy outputs part: after that they answer different texts."""
    common = total = 0
    for left, right in zip(before, after, strict=True):
        parting = (place for place, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1])
        common += next(parting, len(left))
        total += len(left)
    return common / total if total else 1.0


def _gate(spec: QuantizationSpec, metrics: dict[str, Any]) -> str | None:
    """Why a model may not be published, and by how much; None when it may."""
    increase, agreement = metrics["perplexity_increase"], metrics["greedy_agreement"]
    if not increase <= spec.max_perplexity_increase:  # also when it is not a number
        return (
            f"perplexity went from {metrics['perplexity_before']:.4g} to {metrics['perplexity_after']:.4g}, "
            f"by {increase:.2%}; max_perplexity_increase allows {spec.max_perplexity_increase:.2%}"
        )
    if agreement < spec.min_agreement:
        return f"greedy outputs agree in {agreement:.2%}; min_agreement asks for {spec.min_agreement:.2%}"
    return None


def _worth(spec: QuantizationSpec, found: Scored) -> float:
    """What `auto` picks the most of: tokens/s at a batch of 16, or few bytes."""
    rate = found.speed.get("tokens_per_s_at_16")
    return float(rate) if spec.prefer == "speed" and rate is not None else -float(found.bytes)


def _texts(program: Program, spec: QuantizationSpec, source: Path) -> Texts:
    """The texts in the model's own tokens. What is scored is what training held out too."""
    from training.data import Windows, split
    from training.models import longest_sequence

    longest = longest_sequence(str(source))
    if longest is not None and spec.seq_len > longest:
        raise SpecError(f"{program.name}: seq_len: {spec.seq_len}; the model sees at most {longest} tokens")
    shown, scored = split(_tokens(program, "data", spec.data, source), spec.held_out)
    if spec.calibration is not None:
        shown = _tokens(program, "calibration", spec.calibration, source)
    return Texts(
        Windows(shown, spec.seq_len, 0, "calibration" if spec.calibration else "data"),
        Windows(scored, spec.seq_len, 0, f"the last {spec.held_out:.0%} of data"),
    )


def _tokens(program: Program, field: str, text: str | list[str], source: Path) -> "Tokens":
    """A text in the model's own tokens."""
    from training.data import DataError, packed_tokens, text_files
    from training.tokenizer import end_token, tokens_of_directory

    places = [] if text == "shakespeare" else [program.place(field, key) for key in _listed(text)]
    files = [local_file(place, program.scratch) for place in places] or text_files(text)
    try:
        return packed_tokens(files, lambda part: tokens_of_directory(source, part), end_token(source))
    except DataError as error:  # it knows files on this machine only, as data
        said = str(error)
        for place, file in zip(places, files, strict=False):
            said = said.replace(f"data: {file}", place.where)
        raise SpecError(said) from None


def _listed(text: str | list[str]) -> list[str]:
    return [text] if isinstance(text, str) else text


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
