"""What a model would reach on a number of GPUs: step time, MFU, memory, what limits it, and what it costs.

`predict` chooses the fastest parallel layout that fits and times it with the roofline. Invariant: an answer
comes with its interval, and says in which respect it goes beyond the published runs that the constants were
fitted on; the further beyond, the wider. Tensor, pipeline and context parallelism are counted whether or not
this package runs them. An answer takes some milliseconds and no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from training import hardware, models
from training.fit import default_batch
from training.flops import flops_per_token
from training.memory import Layout, Memory
from training.roofline import CONVENTION, EFFICIENCY, PEAK_OF, Parts, fastest

# Deviation of log(predicted / published rate): of the tested rows, and where nothing near was published.
SPREAD, OTHER_SPREAD = 0.103, 0.25
LEVEL = 1.645  # deviations: nine of ten fall inside
SPREAD_A_DOUBLING = 0.08  # added for each doubling beyond what was published
# What was published: fewest and most GPUs by type, precisions, sequence lengths, parameters.
_GPUS = {"A100 SXM": (64, 64), "H100 SXM": (8, 16384), "B200": (8, 128), "GB200": (8, 256), "GB300": (8, 256)}
_PRECISIONS = {"A100 SXM": ("bf16",), "H100 SXM": ("fp8", "bf16"), "B200": ("fp8",)}
_BLACKWELL = ("fp8", "mxfp8", "fp4")
_SEQ_LEN, _PARAMETERS = (4096, 8192), (8.0e9, 4.06e11)

# Where the study that this follows saw gains fade: beyond 64 GPUs, and above 200B parameters.
FADING_COUNTS, FADING_MODELS = (64, 256, 1024, 4096), ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b")

_ASKED = ("model", "gpu", "gpus", "precision", "seq_len", "batch")


@dataclass(frozen=True)
class Prediction:
    """One answer; `low` and `high` are the MFU between which nine of ten runs should fall."""

    model: str
    gpu: str
    gpus: int
    precision: str
    seq_len: int
    batch: int  # sequences in a step
    layout: Layout
    memory: Memory
    parts: Parts
    mfu: float
    low: float
    high: float
    tokens_per_s_per_gpu: float
    extrapolated: tuple[str, ...]  # in which respects, each a sentence's end

    @property
    def limiting(self) -> str:
        """Which of compute, HBM, NVLink, network and memory capacity costs most."""
        return self.parts.limiting

    def seconds(self, tokens: float) -> float:
        """Seconds that a run of so many tokens takes."""
        return tokens / (self.tokens_per_s_per_gpu * self.gpus)

    def cost_per_trillion_tokens(self, price_per_gpu_hour: float) -> float:
        """In the price's currency."""
        return 1e12 / self.tokens_per_s_per_gpu / 3600 * price_per_gpu_hour

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines."""
        return {
            **{name: getattr(self, name) for name in _ASKED},
            "step_seconds": self.parts.total,
            "step_parts_seconds": asdict(self.parts),
            "limiting_factor": self.limiting,
            "mfu": self.mfu,
            "mfu_interval": [self.low, self.high],
            "mfu_convention": CONVENTION,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "memory_bytes_per_gpu": self.memory.parts | {"total": self.memory.total},
            "fullest_moment": self.memory.moment,
            "layout": asdict(self.layout) | {"data": self.layout.data_parallel, "precision": self.precision},
            "extrapolated": list(self.extrapolated),
        }


def predict(
    model: str,
    gpu: str,
    gpus: int,
    precision: str = "bf16",
    seq_len: int = 8192,
    batch: int | None = None,
    shape: models.Shape | None = None,
) -> Prediction:
    """The fastest layout that fits and what it reaches.

    `batch` is in sequences; left out, a usual one for the count. `shape` is that of a model which is not
    found by its name; it is looked up otherwise. Raises ModelError for a model that is
    unknown or does not fit, HardwareError for a GPU that is unknown or lacks the precision.
    """
    for name, value in (("gpus", gpus), ("seq_len", seq_len), ("batch", 1 if batch is None else batch)):
        if value < 1:
            raise models.ModelError(f"{name}: {value}; expected 1 or more")
    shape, product = shape or models.shape_of(model), hardware.gpu(gpu)
    batch = batch or default_batch(gpus)
    layout, parts, memory = fastest(shape, product, gpus, seq_len, batch, precision, EFFICIENCY)
    rate = batch * seq_len / parts.total / gpus
    peak = product.peaks[PEAK_OF[precision]]
    mfu = flops_per_token(shape, seq_len, CONVENTION) * rate / peak
    beyond, spread = _beyond(shape.parameters, product.name, gpus, precision, seq_len)
    width = math.exp(LEVEL * spread)
    return Prediction(
        model, product.name, gpus, precision, seq_len, batch, layout, memory, parts,
        mfu, mfu / width, min(mfu * width, 1.0), rate, beyond,
    )  # fmt: skip


def predict_counts(
    model: str, gpu: str, counts: Sequence[int], precision: str, seq_len: int, batch: int | None = None
) -> list[Prediction]:
    """A prediction for each count that the model fits on and that shares the batch evenly."""
    found = []
    for gpus in counts:
        try:
            found.append(predict(model, gpu, gpus, precision, seq_len, batch))
        except models.ModelError as error:
            if not str(error).startswith("gpus:"):
                raise
    return found


def fading(said: Prediction) -> tuple[list[Prediction], list[Prediction]]:
    """The same step on other counts of GPUs, and of other sizes of Llama: where gains fade."""
    setting = said.precision, said.seq_len, said.batch
    counts = predict_counts(said.model, said.gpu, sorted({*FADING_COUNTS, said.gpus}), *setting)
    sizes = [one for name in FADING_MODELS for one in predict_counts(name, said.gpu, [said.gpus], *setting)]
    return counts, sizes


@dataclass(frozen=True)
class Choice:
    """One way to run a job: so many of one type, at its price."""

    prediction: Prediction
    seconds: float
    cost: float


def compare(
    model: str,
    tokens: float,
    offered: dict[str, tuple[int, float]],
    precision: str = "bf16",
    seq_len: int = 8192,
    batch: int | None = None,
) -> list[Choice]:
    """Every type and count of GPUs that the job fits on, fastest first.

    `offered` is how many there are of each type, and the price of an hour. A type that lacks the precision
    runs in bf16. Raises ModelError, HardwareError.
    """
    found = []
    for name, (most, price) in offered.items():
        own = precision if PEAK_OF.get(precision, precision) in hardware.gpu(name).peaks else "bf16"
        counts = [2**power for power in range(most.bit_length())]
        for said in predict_counts(model, name, counts, own, seq_len, batch):
            seconds = said.seconds(tokens)
            found.append(Choice(said, seconds, seconds / 3600 * said.gpus * price))
    return sorted(found, key=lambda choice: (choice.seconds, choice.cost))


@dataclass(frozen=True)
class Duration:
    """How long a run is expected to take, between which bounds, and at which MFU (`causal`)."""

    seconds: float
    low: float
    high: float
    mfu: float
    reason: str


def duration(
    model: str,
    tokens: float,
    gpu: str,
    gpus: int,
    precision: str = "bf16",
    seq_len: int = 8192,
    batch: int | None = None,
    measured: float | None = None,
    shape: models.Shape | None = None,
) -> Duration:
    """Seconds for a job that has never run; `measured` is actual over predicted seconds of runs like it.

    `shape`, and the ModelError and HardwareError that are raised, are as with `predict`; who has a declared
    duration falls back on it.
    """
    said = predict(model, gpu, gpus, precision, seq_len, batch, shape)
    seconds = said.seconds(tokens) * (measured or 1.0)
    mfu = said.mfu / (measured or 1.0)
    limiting = said.limiting.replace("_", " ")
    reason = f"{tokens:.3g} tokens at {mfu:.0%} MFU on {gpus} × {said.gpu}, limited by {limiting}"
    if measured:
        reason += f", {measured:.2f} × the prediction as in earlier runs"
    return Duration(seconds, seconds * said.mfu / said.high, seconds * said.mfu / said.low, mfu, reason)


def _beyond(
    parameters: int, gpu: str, gpus: int, precision: str, seq_len: int
) -> tuple[tuple[str, ...], float]:
    """In which respects a setting was never published, and the deviation of the log that this leaves."""
    said: list[str] = []
    spread = SPREAD

    def outside(value: float, known: tuple[float, float], what: str) -> None:
        nonlocal spread
        low, high = known
        distance = math.log2(max(value / high, low / value, 1.0))
        if distance > 0.01:
            said.append(f"{what} (published: {low:g} to {high:g})")
            spread += SPREAD_A_DOUBLING * distance

    if gpu in _GPUS:
        outside(gpus, _GPUS[gpu], f"{gpus} {gpu}")
    else:
        said.append(f"no published run on {gpu} was fitted")
        spread += OTHER_SPREAD - SPREAD
    if precision == "bf16":  # few runs, of other software, that differ much among each other
        spread += OTHER_SPREAD - SPREAD
    if precision not in _PRECISIONS.get(gpu, _BLACKWELL):
        said.append(f"no published run in {precision} on {gpu} was fitted")
        spread += OTHER_SPREAD - SPREAD
    outside(seq_len, _SEQ_LEN, f"a sequence of {seq_len}")
    outside(parameters, _PARAMETERS, f"{parameters / 1e9:.3g}e9 parameters")
    return tuple(said), spread
