"""How long a training job should take on each width and GPU type, by the performance model, before any ran.

Invariant: predictions are made once, when the job is taken in, from its configuration and the cluster's GPU
types, and stand beside the spec from then on; what cannot be predicted is said in words and left to the
declaration, never an error. The layouts of a prediction are the fastest that exist, tensor and pipeline
parallelism among them, which the trainer may not run: recorded runs correct that (see durations). The cost:
some tens of milliseconds for each width and type, once for jobs alike.
"""

import functools
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tasks.cluster import Cluster
from tasks.jobs import Job, width_misfit
from tasks.storage import Storage
from tasks.work import sequences_of, trained_shape, training_config
from training.config import ConfigError, TrainingConfig
from training.hardware import HardwareError
from training.models import ModelError, Shape
from training.performance import Duration, duration

VIRTUAL = "cpu"  # the type of GPUs that are shares of a processor: no peak is known beforehand

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Predicted:
    """One width on one GPU type: the run's seconds, between which bounds, its MFU, and the sentence."""

    gpu: str
    gpus: int
    seconds: float
    low: float
    high: float
    mfu: float
    reason: str


@dataclass(frozen=True)
class Predictions:
    """Those that could be made, and why others could not."""

    runs: tuple[Predicted, ...] = ()
    problems: tuple[str, ...] = ()


def predictions_of(job: Job, cluster: Cluster, storage: Storage) -> Predictions | None:
    """What a training job should take; None for other kinds, for own commands and on virtual GPUs."""
    section = job.training
    types = job.gpu_types or tuple(dict.fromkeys(node.gpu for node in cluster.nodes))
    real = [gpu for gpu in types if gpu != VIRTUAL]
    if section is None or not real:
        return None
    try:
        config = training_config(section, storage)
        shape = trained_shape(config, storage)
    except Exception as error:  # whatever is wrong with what a spec names, its runner will say
        said = " ".join(str(error).split()) or type(error).__name__
        log.info("%s: how long it takes is not predicted: %s", job.id or job.kind, said)
        return Predictions(problems=(said,))
    runs: list[Predicted] = []
    problems: list[str] = []
    for gpu in real:
        for width in job.widths or (job.gpus,):
            if width_misfit(width, cluster, (gpu,)):
                continue  # it waits for GPUs of another type
            found = _predicted(config, shape, gpu, width)
            if isinstance(found, Predicted):
                runs.append(found)
            else:
                problems.append(f"{width} × {gpu}: {found}")
    return Predictions(tuple(runs), tuple(problems))


def seconds_by_place(recorded: str | None) -> Mapping[tuple[str, int], float]:
    """Seconds by (GPU type, width), from what the ledger holds; empty when it holds nothing."""
    return {
        (str(run["gpu"]), int(run["gpus"])): float(run["seconds"]) for run in json.loads(recorded or "[]")
    }


def predicted_s(recorded: str | None, gpu_types: Iterable[str], gpus: int) -> float | None:
    """Seconds on so many GPUs of any of these types: on the slowest; None unless all are predicted."""
    known = seconds_by_place(recorded)
    found = [known.get((gpu, gpus)) for gpu in gpu_types] if known else []
    return max((each for each in found if each is not None), default=None) if None not in found else None


def _predicted(config: TrainingConfig, shape: Shape, gpu: str, gpus: int) -> Predicted | str:
    """A prediction, or why there is none."""
    try:
        batch = sequences_of(config, gpus)
    except ConfigError as error:
        return str(error)
    precision = {"bf16_master": "bf16", "auto": "bf16"}.get(config.precision, config.precision)
    tokens = float(batch * config.seq_len * config.steps)
    said = _duration(config.model, shape, tokens, gpu, gpus, precision, config.seq_len, batch)
    if isinstance(said, str):
        return said
    return Predicted(gpu, gpus, said.seconds, said.low, said.high, said.mfu, said.reason)


@functools.lru_cache(maxsize=4096)  # jobs are much alike: a thousand in the inbox cost as much as one
def _duration(
    model: str, shape: Shape, tokens: float, gpu: str, gpus: int, precision: str, seq_len: int, batch: int
) -> Duration | str:
    try:
        return duration(model, tokens, gpu, gpus, precision, seq_len, batch, shape=shape)
    except (HardwareError, ModelError) as error:
        return str(error)
    except Exception as error:  # a fault of the model must not keep a job out
        log.warning("%s on %s × %s: %r", model, gpus, gpu, error)
        return type(error).__name__
