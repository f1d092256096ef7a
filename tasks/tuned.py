"""What a training job measured about its levers, kept so that the next one like it starts at once.

Invariant: a setting is used again only where it was measured: the same model sizes, batch, sequence length
and levers that were not left open, on as many GPUs of the same type, with the same versions of what computes.
It is one JSON object, `tuned/<digest of all that>.json`, replaced as a whole; whoever cannot read it measures
again. The outcome of each job says the same to the ledger (view `tuned`). The cost of so narrow a key: an
upgrade of torch has every job measured anew.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from tasks.facts import FactError, read_json, write_json
from tasks.storage import NotFoundError, Storage, StorageError
from training import models
from training.config import LEVERS, ConfigError, TrainingConfig, checked
from training.launching import Baseline, decided, plain_baseline
from training.models import MODULE
from training.record import versions
from training.tuner import open_levers

Say = Callable[[str], None]


@dataclass(frozen=True)
class Circumstances:
    """All that a setting's speed depends on, as far as it is known before the job runs."""

    model: dict[str, Any]  # its sizes
    batch: dict[str, Any]  # and the memory it may take
    levers: dict[str, Any]  # as the configuration has them, `auto` where they are open
    gpu_type: str
    gpus: int
    versions: dict[str, str] = field(default_factory=versions)
    threads: str = field(default_factory=lambda: os.environ.get("OMP_NUM_THREADS", ""))

    @property
    def key(self) -> str:
        """Where in storage the setting lies."""
        together = json.dumps(asdict(self), sort_keys=True)
        return f"tuned/{hashlib.sha256(together.encode()).hexdigest()[:24]}.json"


@dataclass(frozen=True)
class Remembered:
    """The levers that were chosen, if any were open; how fast the plain loop was; which job measured it."""

    chosen: dict[str, Any]
    why: str
    probes: list[dict[str, Any]]
    plain: Baseline | None  # None where it does not run
    job: str

    def applied(self, config: TrainingConfig) -> TrainingConfig:
        """The configuration with these levers. Raises ConfigError when they do not go with it."""
        if not self.chosen:
            return config
        record = {"chosen": self.chosen, "auto": dict.fromkeys(self.chosen, self.why), "probes": self.probes}
        return checked(
            TrainingConfig, {**config.model_dump(), **self.chosen, "record": record}, "tuned setting"
        )


def circumstances(config: TrainingConfig, gpu_type: str, gpus: int) -> Circumstances:
    """Those of a configuration whose files are on this machine. Raises ModelError."""
    own = config.model.startswith(MODULE)
    sizes = {"module": config.model} if own else asdict(models.shape_of(config.model))
    return Circumstances(
        {**sizes, "layers_used": config.layers},
        {name: getattr(config, name) for name in ("seq_len", "global_batch", "memory_gb")},
        {name: getattr(config, name) for name in LEVERS},
        gpu_type,
        gpus,
    )


def remembered(storage: Storage, key: str) -> Remembered | None:
    """What was measured, if it was and can be read."""
    try:
        found = read_json(storage, key)
        return Remembered(
            dict(found["chosen"]),
            str(found["why"]),
            list(found["probes"]),
            Baseline(**found["plain"]) if found["plain"] is not None else None,
            str(found["job"]),
        )
    except (NotFoundError, FactError, KeyError, TypeError, ValueError):
        return None


def measure(
    storage: Storage, found: Circumstances, config: TrainingConfig, processes: int, job: str, say: Say
) -> Remembered:
    """Measure the plain loop and the levers that are open, if any, in processes of this machine; keep it.

    Raises ConfigError when nothing runs.
    """
    plain = plain_baseline(config, processes, say)
    result = Remembered({}, "none is open", [], plain, job)
    if open_levers(config):
        record = decided(config, processes, say).record or {}
        result = Remembered(
            record["chosen"], next(iter(record["auto"].values())), record["probes"], plain, job
        )
    keep(storage, found, result, say)
    return result


def keep(storage: Storage, found: Circumstances, result: Remembered, say: Say) -> None:
    """Leave what was measured for the next job alike."""
    try:
        write_json(storage, found.key, {**asdict(result), "circumstances": asdict(found)})
    except StorageError as error:
        say(f"the tuned setting is not kept: {error}")


def measured_together(record: dict[str, Any], job: str) -> Remembered | None:
    """What the processes of a gang measured, from the record of their configuration; None if they did not."""
    if "plain" not in record:
        return None
    chosen = record.get("chosen", {})
    why = record["auto"][next(iter(chosen))] if chosen else "none is open"
    plain = Baseline(**record["plain"]) if record["plain"] else None
    return Remembered(chosen, why, record.get("probes", []), plain, job)


def forget(storage: Storage, key: str) -> None:
    """Drop a setting that turned out not to run."""
    storage.delete(key)


def tuned(
    storage: Storage,
    config: TrainingConfig,
    gpu_type: str,
    gpus: int,
    job: str,
    may_measure: bool,
    say: Say,
    compare: bool = False,
) -> tuple[TrainingConfig, Remembered | None, Circumstances | None]:
    """The configuration with its open levers as they were measured, now or by an earlier job; and under which
    circumstances, None where nothing is to be known.

    Where nothing is known and nothing may be measured the levers stay open for the trainer to decide.
    `compare`: the plain loop is to be known though none is open.
    """
    if not (compare or open_levers(config)):
        return config, None, None
    found = circumstances(config, gpu_type, gpus)
    known = remembered(storage, found.key)
    if known is not None:
        try:
            config = known.applied(config)
            what = f"levers as {known.job} measured them: {known.why}"
            say(what if known.chosen else f"plain loop as {known.job} measured it")
            return config, known, found
        except ConfigError as error:
            say(f"what {known.job} measured is not used: {error}")
    if not may_measure:
        return config, None, found
    known = measure(storage, found, config, gpus, job, say)
    return known.applied(config), known, found
