"""Finds the fastest setting of the levers that say `auto`: predict, probe the promising few, keep the best.

Invariant: the global batch, and so what is learned, stays the same but for rounding; a setting is chosen by
measured throughput, in fresh processes, on the real model and batch. What is not expected to fit in memory is
never run. Every probe teaches how far each lever's value is from its prediction, so that the next probe goes
where the best may still be; that finds a good setting with a tenth of the probes of a full search. The cost
is the probes: each starts a process, warms it up and times a few steps.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from training import models
from training.config import LEVERS, ConfigError, TrainingConfig
from training.flops import flops_per_token
from training.host_memory import available_bytes
from training.memory import sized

if TYPE_CHECKING:
    import torch

    from training.probe import Probe

Setting = dict[str, Any]
RECOMPUTED = {"none": 0.0, "selective": 1 / 6, "full": 1 / 3}  # more matmul work, as a share
SPEED = {"fp32": 1.0, "bf16": 1.0, "bf16_master": 1.03, "fp8": 1.0}  # beside the peak itself
DOUBT, NOISE = 0.25, 0.03  # of a lever's effect, and of a probe: standard deviations of log throughput
HOPE = 1.0  # standard deviations by which a doubtful setting is given the benefit of the doubt


@dataclass(frozen=True)
class Machine:
    """What a prediction needs to know of the device."""

    kind: str  # cpu or cuda
    peaks: Mapping[str, float]  # FLOP/s by precision, as far as known
    memory_bytes: float | None
    bytes_per_s: float
    half_tokens: float  # tokens in a pass at which matmuls reach half of their best
    pass_s: float  # what a pass costs beside its work, for each layer
    bf16: bool
    fp8: bool

    @classmethod
    def of(cls, device: "torch.device", memory_gb: float | None = None) -> "Machine":
        """The machine that a process runs on."""
        from training.hardware import HardwareError, gpu
        from training.precision import bf16_is_fast

        memory = memory_gb * 1e9 if memory_gb else available_bytes(device)
        if device.type != "cuda":
            fast = bf16_is_fast(device)[0]
            peaks = {"fp32": 1e11, "bf16": 2e11 if fast else 3e10}
            return cls("cpu", peaks, memory, 2e10, 64, 2e-4, fast, False)
        import torch

        try:
            product = gpu(torch.cuda.get_device_name(device))
            peaks, speed = dict(product.peaks), product.memory_tb_per_s * 1e12
        except HardwareError:
            peaks, speed = {"bf16": 3e14, "fp32": 2e13}, 1e12
        capability = torch.cuda.get_device_capability(device)
        return cls("cuda", peaks, memory, speed, 1024, 1e-4, capability >= (8, 0), capability >= (8, 9))


@dataclass(frozen=True)
class Candidate:
    """A setting and what is expected of it."""

    setting: Setting
    tokens_per_s: float
    memory_bytes: float | None


@dataclass(frozen=True)
class Tuned:
    """The configuration that was chosen, what was measured on the way, and how many settings there were."""

    config: TrainingConfig
    chosen: Setting
    probes: tuple[tuple[Setting, float | None], ...]  # tokens/s; None for one that failed
    settings: int
    why: str


def open_levers(config: TrainingConfig) -> list[str]:
    """The levers that say `auto` and are decided by measuring: some always, some when `tune` names them."""
    return [
        name
        for name, lever in LEVERS.items()
        if lever.tried and (not lever.by_rule or name in config.tune) and getattr(config, name) == "auto"
    ]


def candidates(config: TrainingConfig, processes: int, machine: Machine) -> list[Candidate]:
    """Every setting of the open levers that makes sense here and fits, best prediction first.

    Raises ConfigError when none fits.
    """
    names = open_levers(config)
    found, smallest = [], math.inf
    for setting in _settings(config, names, processes, machine):
        tried = config.model_copy(update=setting)
        needed = predicted_bytes(tried, processes)
        total = None if needed is None else needed[0]
        if total is not None and machine.memory_bytes is not None and total > 0.92 * machine.memory_bytes:
            smallest = min(smallest, total)
            continue
        found.append(Candidate(setting, predicted_tokens_per_s(tried, processes, machine), total))
    if not found:
        free = machine.memory_bytes or 0
        raise ConfigError(
            f"model: {config.model}: no setting fits: the smallest needs {sized(smallest)}, "
            f"{sized(free)} are free; expected more processes, a smaller model or a shorter seq_len"
        )
    return sorted(found, key=lambda each: -each.tokens_per_s)


def best_predicted(config: TrainingConfig, processes: int, machine: Machine) -> tuple[Setting, str]:
    """The best setting by prediction alone, and how it came about."""
    found = candidates(config, processes, machine)
    return found[0].setting, f"predicted best of {len(found)}, not measured"


def tune(
    config: TrainingConfig,
    processes: int,
    machine: Machine,
    probe: Callable[[TrainingConfig], "Probe"],
    log: Callable[[str], None] = lambda line: None,
    probes: int | None = None,
) -> Tuned:
    """Measure the promising settings and choose. `probe` runs one in a fresh process.

    Raises ConfigError when no setting fits or none ran.
    """
    found = candidates(config, processes, machine)
    left = min(config.tune_probes if probes is None else probes, len(found))
    if not left:
        best, why = found[0], f"predicted best of {len(found)}, not measured"
        return Tuned(config.model_copy(update=best.setting), best.setting, (), len(found), why)
    belief = _Belief(found)
    measured: dict[int, float] = {}
    tried: list[tuple[Setting, float | None]] = []
    dropped: set[int] = set()
    problem = ""
    for _ in range(left):
        place = belief.next(set(measured) | dropped)
        if place is None:
            break
        chosen = found[place]
        result = probe(config.model_copy(update=chosen.setting))
        tried.append((chosen.setting, result.tokens_per_s))
        if result.tokens_per_s is None:
            log(f"probe {_words(chosen.setting)}: {result.problem}")
            problem = result.problem
            dropped.add(place)
            if result.out_of_memory and chosen.memory_bytes is not None:
                needed = chosen.memory_bytes
                dropped |= {p for p, c in enumerate(found) if (c.memory_bytes or 0) >= needed}
            continue
        log(f"probe {_words(chosen.setting)}: {result.tokens_per_s:.0f} tokens/s")
        measured[place] = result.tokens_per_s
        belief.learn(place, result.tokens_per_s)
    if not measured:
        raise ConfigError(f"model: {config.model}: none of {len(tried)} probed settings ran: {problem}")
    best_place = max(measured, key=lambda place: measured[place])
    setting = found[best_place].setting
    why = f"fastest of {len(measured)} probed of {len(found)}: {measured[best_place]:.0f} tokens/s"
    return Tuned(config.model_copy(update=setting), setting, tuple(tried), len(found), why)


def predicted_tokens_per_s(config: TrainingConfig, processes: int, machine: Machine) -> float:
    """Tokens/s of all processes, from a bent roofline: matmuls, memory traffic, and each pass's cost."""
    shape = _shape(config)
    if shape is None:
        return float(config.micro_batch)  # nothing is known of the module: larger is tried first
    tokens = int(config.micro_batch) * config.seq_len
    passes = config.accumulation_for(processes)
    precision = {"bf16_master": "bf16"}.get(config.precision, config.precision)
    peak = machine.peaks.get(precision, machine.peaks.get("bf16", 1e12)) * SPEED[config.precision]
    share = 0.8 * tokens / (tokens + machine.half_tokens)
    work = flops_per_token(shape, config.seq_len, "matmul") * tokens
    traffic = (
        tokens * shape.layers * 16 * (shape.hidden + shape.ffn) * (0.7 if config.compile is True else 1.0)
    )
    casts = 6.0 * shape.parameters if config.precision in ("bf16", "fp8") else 0.0
    again = 1 + RECOMPUTED[config.activation_checkpointing]
    one_pass = (
        work * again / (peak * share)
        + (traffic * again + casts) / machine.bytes_per_s
        + shape.layers * machine.pass_s
    )
    step = passes * one_pass + 28.0 * shape.parameters / machine.bytes_per_s
    return tokens * passes * processes / step


def predicted_bytes(config: TrainingConfig, processes: int) -> tuple[float, dict[str, int]] | None:
    """Memory of one process and its parts, from the predictor; None for a module that nothing is known of."""
    shape = _shape(config)
    if shape is None:
        return None
    from training.memory import Layout, predict
    from training.resolve import loss_chunk_for

    mode: Any = config.activation_checkpointing
    sharding: Any = "none" if processes == 1 else {"auto": "ddp"}.get(config.parallel, config.parallel)
    chunk = loss_chunk_for(shape.vocab)[0] if config.loss_chunk == "auto" else config.loss_chunk
    import torch

    layout = Layout(
        seq_len=config.seq_len,
        micro_batch=int(config.micro_batch),
        accumulation=config.accumulation_for(processes),
        precision={"bf16_master": "bf16", "auto": "bf16"}.get(config.precision, config.precision),
        checkpointing=mode,
        sharding=sharding,
        gpus=processes,
        reshard_after_forward=config.reshard is not False,
        sync_last=config.sync != "every",
        loss_chunk=chunk or None,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    found = predict(shape, layout)
    return found.total, found.parts


class _Belief:
    """Log throughput of each candidate: its prediction, and a correction for each value of each lever.

    The corrections are a Gaussian linear model: all zero but doubtful at first, narrowed by each probe.
    """

    def __init__(self, found: Sequence[Candidate]) -> None:
        values = list(dict.fromkeys(pair for each in found for pair in each.setting.items()))
        self.features = np.array(
            [[1.0] + [float(each.setting[name] == value) for name, value in values] for each in found]
        )
        self.predicted = np.log([each.tokens_per_s for each in found])
        self.rows: list[int] = []
        self.seen: list[float] = []

    def learn(self, place: int, tokens_per_s: float) -> None:
        """A candidate was measured."""
        self.rows.append(place)
        self.seen.append(math.log(tokens_per_s) - float(self.predicted[place]))

    def next(self, done: set[int]) -> int | None:
        """The candidate that may be the best, of those not done."""
        left = [place for place in range(len(self.features)) if place not in done]
        if not left:
            return None
        mean, deviation = self._posterior()
        hoped = self.predicted + mean + HOPE * deviation
        return max(left, key=lambda place: (hoped[place], -place))

    def _posterior(self) -> tuple[Any, Any]:
        width = self.features.shape[1]
        prior = np.full(width, 1 / DOUBT**2)
        prior[0] = 1e-2  # the machine's speed as a whole is not known at all
        precision = np.diag(prior)
        right = np.zeros(width)
        for place, seen in zip(self.rows, self.seen, strict=True):
            row = self.features[place]
            precision += np.outer(row, row) / NOISE**2
            right += row * seen / NOISE**2
        covariance = np.linalg.inv(precision)
        mean = self.features @ (covariance @ right)
        spread = self.features.copy()
        spread[:, 0] = 0.0  # what all share does not tell them apart
        return mean, np.sqrt(np.einsum("ij,jk,ik->i", spread, covariance, spread))


def _settings(
    config: TrainingConfig, names: Sequence[str], processes: int, machine: Machine
) -> Iterator[Setting]:
    """Every combination of values that can run here."""
    for values in itertools.product(*(LEVERS[name].tried for name in names)):
        setting = dict(zip(names, values, strict=True))
        size = int(setting.get("micro_batch", config.micro_batch))
        if config.global_batch is not None and config.global_batch % (size * processes):
            continue
        precision = setting.get("precision", "fp32")
        if precision == "fp8" and not machine.fp8:
            continue
        if precision in ("bf16", "bf16_master") and not machine.bf16:
            continue
        if setting.get("attention") == "blocks" and machine.kind != "cpu":
            continue
        parallel = setting.get("parallel", config.parallel)
        if precision == "bf16_master" and processes > 1 and parallel == "ddp":
            continue
        if any(
            setting[name] != LEVERS[name].tried[0] for name in _idle(parallel, processes) & setting.keys()
        ):
            continue  # the same as with the first value
        yield setting


def _idle(parallel: str, processes: int) -> set[str]:
    """Levers that have no effect."""
    if processes == 1:
        return {"parallel", "reshard", "layers_per_group", "bucket_mb"}
    return {"ddp": {"reshard", "layers_per_group"}, "fsdp": {"bucket_mb"}}.get(parallel, set())


def _shape(config: TrainingConfig) -> models.Shape | None:
    if config.model.startswith(models.MODULE):
        return None
    shape = models.shape_of(config.model)
    return shape if config.layers is None else replace(shape, layers=config.layers)


def _words(setting: Setting) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items())
