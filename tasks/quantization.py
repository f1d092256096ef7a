"""The program of `kind: quantization`: a smaller model, published only if it predicts a text about as well.

Invariant: what is scored is the model as a reader will load it from its files, and a model that fails the
gate is never seen. The result is a Hugging Face directory with safetensors: transformers writes torchao's
tensors as plain ones with their layout in the file's metadata, and loads them again by itself. Embeddings
and the output layer stay as they are, which small models feel most in their size.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from tasks.calibration import calibrate
from tasks.gptq import calibrate_gptq
from tasks.program import (
    FinalError,
    JobFailedError,
    Program,
    is_published,
    local_file,
    local_model,
    main,
    publish_directory,
    said_of,
)
from tasks.schemes import SCHEMES, Device, changed_layers, quantize_layers, this_device
from tasks.specfile import SpecError, Strict, read_spec
from tasks.speed import Speed, measured, picture, table
from tasks.storage import NotFoundError
from training.manifest import MANIFEST, entries_of, write_manifest
from training.models import config_of
from training.output import write_model

if TYPE_CHECKING:
    from training.data import Tokens, Windows

SchemeName = Literal[
    "int8_weight_only",
    "int8_dynamic",
    "int8_awq",
    "int4_weight_only",
    "int4_awq",
    "int4_gptq",
    "fp8",
    "auto",
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
    calibration: str | list[str] | None = None  # for awq and gptq; else what `data` does not hold out
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
    layers: tuple[int, int]  # linear layers that are quantized, and all that could be
    outputs: list[list[int]]
    speed: Speed


@dataclass(frozen=True)
class Tried:
    """A scheme and what became of it: `problem` is why it may not be published."""

    model: Scored
    metrics: dict[str, Any]
    problem: str | None


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
    schemes, left_out = _possible(program, spec, device)
    model = program.place("model", spec.model)
    source = local_model(model, program.scratch)
    with said_of(model, source):
        _quantize(program, spec, source, schemes, left_out, device)


def _quantize(
    program: Program,
    spec: QuantizationSpec,
    source: Path,
    schemes: list[str],
    left_out: dict[str, str],
    device: Device,
) -> None:
    """Try the schemes in turn; `left_out` gets those that came to nothing, with the reason."""
    if config_of(str(source)).get("quantization_config") is not None:
        raise SpecError(f"{program.name}: model: {spec.model!r}: is quantized already")
    target = f"{program.output}/model"
    made_from = {
        "scheme": spec.scheme,
        "source": {name: entry.sha256 for name, entry in entries_of(source).items()},
        "settings": spec.model_dump(exclude={"model"}),
    }
    if (known := _published(program, target)) is not None:
        if other := next(_changed(known["made_from"], made_from), None):
            raise SpecError(
                f"{program.name}: {other}: the model in {target} was made with another one; "
                f"{program.another_output}"
            )
        program.metrics.update(**known["metrics"], progress=1.0, outputs=[target])
        print(f"{target} is there already", flush=True)
        return
    texts = _texts(program, spec, source)
    before = _scored("before", source, spec, texts.scored, device)
    program.metrics.update(perplexity_before=before.perplexity, progress=1 / (len(schemes) + 1))
    tried: list[Tried] = []
    for turn, scheme in enumerate(schemes, 2):
        plain = SCHEMES[scheme].plain
        if any(done.model.name == plain and not done.problem for done in tried):
            left_out[scheme] = f"{plain} passed the gate without calibration, which takes longest"
            continue
        try:
            after = _quantized(program, spec, source, texts, scheme, device)
        except Exception as error:  # whatever a library raises where a kernel does not fit the model
            told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if len(schemes) == 1:
                raise JobFailedError(f"{program.name}: scheme: {scheme}: {told}") from error
            left_out[scheme] = told
            continue
        metrics = _compared(before, after)
        tried.append(Tried(after, metrics, _gate(spec, after, metrics)))
        program.metrics.update(**metrics, progress=turn / (len(schemes) + 2))
    _publish(program, spec, before, tried, left_out, made_from, device)


def _publish(
    program: Program,
    spec: QuantizationSpec,
    before: Scored,
    tried: list[Tried],
    left_out: dict[str, str],
    made_from: dict[str, Any],
    device: Device,
) -> None:
    """Publish the best of what passed the gate, and say what became of all; FinalError if nothing did."""
    passed = [found for found in tried if not found.problem]
    failed = {found.model.name: found.problem for found in tried if found.problem}
    best, why = _best(spec, passed)
    rows = [_row(before, {"greedy_agreement": 1.0}, "")]
    for found in tried:
        gate = "failed" if found.problem else "published" if found is best else "passed"
        rows.append(_row(found.model, found.metrics, gate))
    notes = [f"{name}: {reason}" for name, reason in {**failed, **left_out}.items()]
    print(f"{table(rows)}\n" + "".join(f"{note}\n" for note in notes), flush=True)
    program.metrics.update(not_published=notes)
    if best is None:
        said = "; ".join(notes) if spec.scheme == "auto" else next(iter(failed.values()))
        raise FinalError(f"{program.name}: not published: {said}")
    target = f"{program.output}/model"
    metrics = {**best.metrics, "picked_by": why, "not_published": notes}
    (best.model.directory / REPORT).write_text(
        json.dumps({"made_from": made_from, "metrics": metrics}, indent=1), encoding="utf-8"
    )
    write_manifest(best.model.directory)
    title = f"{spec.model} on {device.name}"
    listed = "".join(f"- {note}\n" for note in notes)
    text = f"{title}\n\n{table(rows)}\npublished: {best.model.name}, {why}\n" + (
        f"\nnot published:\n\n{listed}" if notes else ""
    )
    program.storage.write(f"{program.output}/quantization.md", text.encode())
    program.storage.write(f"{program.output}/quantization.svg", picture(rows, title, notes).encode())
    publish_directory(program.storage, target, best.model.directory)  # last: what is there is not done again
    outputs = [target, f"{program.output}/quantization.md", f"{program.output}/quantization.svg"]
    program.metrics.update(**metrics, progress=1.0, outputs=outputs)


def _row(model: Scored, metrics: dict[str, Any], gate: str) -> tuple[str, dict[str, Any]]:
    """A model's line in the table."""
    changed, all_layers = model.layers
    return model.name, {
        "gate": gate,
        "layers": f"{changed}/{all_layers}",
        "megabytes": model.bytes / 1e6,
        "perplexity": model.perplexity,
        "greedy_agreement": metrics["greedy_agreement"],
        **model.speed,
    }


def _possible(program: Program, spec: QuantizationSpec, device: Device) -> tuple[list[str], dict[str, str]]:
    """The schemes to try, and why others are not. Raises SpecError where the one that was asked cannot be."""
    lacking = {name: lacks for name, scheme in SCHEMES.items() if (lacks := scheme.lacks(device))}
    if spec.scheme != "auto":
        if spec.scheme in lacking:
            raise SpecError(f"{program.name}: scheme: {spec.scheme!r}: {lacking[spec.scheme]}")
        return [spec.scheme], {}
    for name, lacks in lacking.items():
        print(f"{name} is left out: {lacks}", flush=True)
    return [name for name in SCHEMES if name not in lacking], lacking


def _quantized(
    program: Program, spec: QuantizationSpec, source: Path, texts: Texts, scheme: str, device: Device
) -> Scored:
    """The model quantized, written to its directory, loaded from there and measured."""
    from training.models import load

    way, directory = SCHEMES[scheme], program.scratch / "quantized" / scheme
    changed = load(str(source), dtype=_dtype(device)).eval()
    if way.config is None:
        calibrate_gptq(changed, texts.shown, spec.calibration_windows)  # which uses the GPU as it needs it
    elif way.plain:
        calibrate(changed.to(device.kind), way.config(), texts.shown, spec.calibration_windows)
    else:
        quantize_layers(changed.to(device.kind), way.config())
    write_model(changed, directory, source)
    del changed
    return _scored(scheme, directory, spec, texts.scored, device)


def _scored(name: str, directory: Path, spec: QuantizationSpec, windows: "Windows", device: Device) -> Scored:
    import torch

    from training.evaluation import mean_loss, perplexity
    from training.models import load

    model = load(str(directory), dtype=_dtype(device)).to(device.kind)
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
    outputs, size = out[:, length:].tolist(), _weights_bytes(directory)
    return Scored(name, directory, found, size, changed_layers(model), outputs, speed)


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
        "layers_quantized": after.layers[0],
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


def _gate(spec: QuantizationSpec, after: Scored, metrics: dict[str, Any]) -> str | None:
    """Why a model may not be published, and by how much; None when it may."""
    if not after.layers[0]:
        return f"none of its {after.layers[1]} linear layers has sizes that {after.name} takes"
    increase, agreement = metrics["perplexity_increase"], metrics["greedy_agreement"]
    if not increase <= spec.max_perplexity_increase:  # also when it is not a number
        return (
            f"perplexity went from {metrics['perplexity_before']:.4g} to {metrics['perplexity_after']:.4g}, "
            f"by {increase:.2%}; max_perplexity_increase allows {spec.max_perplexity_increase:.2%}"
        )
    if agreement < spec.min_agreement:
        return f"greedy outputs agree in {agreement:.2%}; min_agreement asks for {spec.min_agreement:.2%}"
    return None


def _best(spec: QuantizationSpec, passed: list[Tried]) -> tuple[Tried | None, str]:
    """The one to publish, the fastest or the smallest, and why; None when nothing passed."""
    if len(passed) < 2:
        asked = "as asked" if spec.scheme != "auto" else "the only one that passed the gate"
        return next(iter(passed), None), asked
    rated = [found for found in passed if found.model.speed.get("tokens_per_s_at_16") is not None]
    if spec.prefer == "speed" and rated:
        best = max(rated, key=lambda found: found.model.speed["tokens_per_s_at_16"] or 0.0)
        return best, "the fastest at a batch of 16"
    why = "the smallest" if spec.prefer == "size" else "the smallest, since no speed was measured"
    return min(passed, key=lambda found: found.model.bytes), why


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
    named = f"calibration: {spec.calibration!r}" if spec.calibration else f"data: {spec.data!r}: its rest"
    held_out = f"data: {spec.data!r}: its last {spec.held_out:.3%}"
    return Texts(Windows(shown, spec.seq_len, 0, named), Windows(scored, spec.seq_len, 0, held_out))


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
    """The report of the model that an earlier attempt published, an empty one where somebody else did."""
    there = program.storage.keys(f"{target}/")
    if not there or (f"{target}/{MANIFEST}" in there and not is_published(program.storage, target)):
        return None
    unknown: dict[str, Any] = {"made_from": {}, "metrics": {}}
    try:
        found = json.loads(program.storage.read(f"{target}/{REPORT}"))
        return {**unknown, **found} if isinstance(found, dict) else unknown
    except (NotFoundError, ValueError):
        return unknown


def _changed(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Fields of the spec in which a model that is there differs from the one that is asked for."""
    if before.get("source") != after["source"]:
        yield "model"
    known = before.get("settings", {})
    yield from (name for name, value in after["settings"].items() if known.get(name, value) != value)


def _weights_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


if __name__ == "__main__":
    main(quantize_job, sys.argv[1:])
