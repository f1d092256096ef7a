"""How much a job has to do, where that can be told before it runs: FLOPs, tokens, bytes.

Invariant: an amount is found once, when the job is taken in, from its spec and from what the spec names in
storage, and stands beside the spec from then on; whatever cannot be told is None, never an error, and such a
job is planned by its declaration. The cost of the choice: files of rows are read when their job comes, up to
`MOST_BYTES`; an input or a model that is not there yet and an input that is larger are left to the
declaration.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from tasks.durations import Work
from tasks.jobs import Job
from tasks.storage import Storage, located
from training.config import TrainingConfig, checked, parse_config
from training.flops import flops_per_token
from training.hardware import HardwareError, published_peak
from training.manifest import MANIFEST, parse_manifest
from training.models import MODULE, SHIPPED, ModelError, Shape, described, parsed, shape_of

MOST_BYTES = 64 << 20  # of an input whose rows are counted

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Amount:
    """FLOPs of training, in a precision on which the peak depends; most new tokens of inference; bytes of the
    model that is quantized."""

    amount: float
    precision: str | None = None


def amount_of(job: Job, storage: Storage) -> Amount | None:
    """What there is to do, or None if that cannot be told."""
    section = getattr(job, job.kind)
    if section is None:
        return None
    try:
        return _AMOUNTS[job.kind](job, section, storage)
    except Exception as error:  # whatever is wrong with what a spec names, its runner will say
        log.info("%s: what it has to do is not known: %s", job.id or job.kind, error)
        return None


def work_on(amount: float | None, precision: str | None, gpu_types: Iterable[str]) -> Work | None:
    """A recorded amount as work on GPUs of these types, at the pace of the slowest of them."""
    if amount is None:
        return None
    if precision is None:
        return Work(amount)
    try:
        return Work(amount, min(published_peak(gpu, precision).flops_per_s for gpu in gpu_types))
    except (HardwareError, ValueError):  # a type without a published peak; no type at all
        return None


def training_config(section: dict[str, Any], storage: Storage) -> TrainingConfig:
    """The configuration that a spec's section holds or names. Raises ConfigError, StorageError."""
    config = section["config"]
    if isinstance(config, str):
        place, key = located(storage, config)
        return parse_config(place.read(key, MOST_BYTES).decode(), config)
    return checked(TrainingConfig, config, "config")


def trained_shape(training: TrainingConfig, storage: Storage) -> Shape:
    """The sizes of what is trained, shipped or in storage. Raises ModelError, StorageError."""
    if training.model.startswith(MODULE):
        raise ModelError(f"model: {training.model}: its sizes are known when it is built")
    if training.model in SHIPPED:
        shape = shape_of(training.model)
    else:
        place, key = located(storage, training.model)
        name = f"{training.model.rstrip('/')}/config.json"
        shape = described(training.model, parsed(place.read(f"{key}/config.json", MOST_BYTES), name))
    layers = min(training.layers or shape.layers, shape.layers)
    return replace(shape, layers=layers, windowed_layers=min(shape.windowed_layers, layers))


def sequences_of(training: TrainingConfig, gpus: int) -> int:
    """Sequences in a step on so many GPUs. Raises ConfigError when they cannot share the global batch."""
    passes = training.accumulation_for(gpus)
    return training.global_batch or int(training.micro_batch) * passes * gpus


def _training(job: Job, section: dict[str, Any], storage: Storage) -> Amount | None:
    training = training_config(section, storage)
    if training.precision == "auto":
        return None
    if job.widths and training.global_batch is None:  # a step is larger the wider the job becomes
        return None
    tokens = sequences_of(training, job.gpus) * training.seq_len * training.steps
    return Amount(
        float(flops_per_token(trained_shape(training, storage), training.seq_len)) * tokens,
        training.precision.removesuffix("_master"),
    )


def _batch_inference(_: Job, section: dict[str, Any], storage: Storage) -> Amount | None:
    from tasks.inference import InferenceSpec  # with all that a program needs, which the hour does not
    from tasks.rows import count, is_pattern, matching

    spec = InferenceSpec.model_validate(section)
    rows, left = 0, MOST_BYTES
    for reference in [spec.input] if isinstance(spec.input, str) else spec.input:
        place, key = located(storage, reference)
        for name in matching(place, key) if is_pattern(key) else [key]:
            data = place.read(name, left)
            left -= len(data)
            rows += count(name, data)
    return Amount(float(rows * spec.max_new_tokens)) if rows else None


def _quantization(_: Job, section: dict[str, Any], storage: Storage) -> Amount | None:
    place, key = located(storage, section["model"])
    files = parse_manifest(place.read(f"{key}/{MANIFEST}", MOST_BYTES), key)
    size = sum(entry.bytes for entry in files.values())
    return Amount(float(size)) if size else None


_AMOUNTS = {"training": _training, "batch_inference": _batch_inference, "quantization": _quantization}
