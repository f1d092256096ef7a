"""Which lever helps against which cause, and which one a run should try next.

Invariant: what is proposed differs from the configuration in one lever (or two that only work together),
keeps the global batch, and fits the run: nothing about collectives for a run of one process, nothing about
page-locked memory without a GPU. A proposal is a guess by the largest cause; `diagnose` measures it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from training.config import LEVERS, TrainingConfig
from training.diagnosis import WORDS, accused, cost_of, points, share_of, three_causes, words
from training.step_profile import as_metrics
from training.trace import CAUSES, Breakdown, stragglers

# Cause and values, in the order in which they are tried.
_LEVERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("compute", {"precision": "bf16"}),
    ("compute", {"compile": True}),
    ("optimizer", {"fused_optimizer": True}),
    ("communication", {"sync": "last"}),
    ("communication", {"bucket_mb": 100.0}),
    ("communication", {"reshard": False}),
    ("copies", {"pinned": True, "prefetch_batches": 1}),
    ("data", {"loader_workers": 1, "prefetch_batches": 1}),
    ("compute", {"loss_chunk": "auto"}),
    ("compute", {"keep_host_memory": True}),  # the last, as a process cannot take it back
)
LARGE_MB = 4.0  # of a bucket, beyond which latency is no part of what it costs
_ONLY_WITH = {"bucket_mb": "ddp", "reshard": "fsdp"}  # the sharding that a lever belongs to


@dataclass(frozen=True)
class Remedy:
    """A line of the YAML file, what it is to cure, and the configuration with it."""

    cause: str
    line: str
    config: TrainingConfig

    @property
    def levers(self) -> list[str]:
        """Their names."""
        return [part.partition(":")[0] for part in self.line.split(", ")]

    @property
    def numerics(self) -> str:
        """Whether anything but rounding changes."""
        return "changes" if any(LEVERS[name].numerics == "changes" for name in self.levers) else "preserved"


def candidates(config: TrainingConfig, processes: int = 1, cuda: bool = False) -> Iterator[Remedy]:
    """What may be tried, one at a time."""
    if isinstance(config.micro_batch, int):
        passes = config.accumulation_for(processes)
        for times in sorted({factor for factor in (2, passes) if factor > 1 and passes % factor == 0}):
            update: dict[str, Any] = {"micro_batch": config.micro_batch * times}
            line = f"micro_batch: {update['micro_batch']}"
            if config.global_batch is None:
                update["accumulation"] = passes // times
            yield Remedy("idle", line, config.model_copy(update=update))
    for cause, values in _LEVERS:
        new = {name: value for name, value in values.items() if not _has(getattr(config, name), value)}
        if not new or (not cuda and "pinned" in new):
            continue
        if cause == "communication" and processes == 1:
            continue
        if any(_ONLY_WITH.get(name, config.parallel) not in (config.parallel, "auto") for name in new):
            continue
        line = ", ".join(f"{name}: {str(value).lower()}" for name, value in new.items())
        yield Remedy(cause, line, config.model_copy(update=new))


def next_lever(
    ranks: Sequence[Breakdown], config: TrainingConfig, processes: int, cuda: bool
) -> tuple[str, str] | None:
    """The line to try next, and why; None when nothing that is known is left."""
    known = list(candidates(config, processes, cuda))
    for cause in [*accused(ranks, causes_left(config, processes, cuda)), "compute"]:
        # What keeps the numbers comes first.
        own = sorted((one for one in known if one.cause == cause), key=lambda one: one.numerics == "changes")
        if own:
            return own[0].line, f"{WORDS[cause][0]} takes {cost_of(ranks, cause):.0%} of the step"
    return None


def causes_left(config: TrainingConfig, processes: int, cuda: bool) -> set[str]:
    """Causes against which a lever is left to try. Buckets that are large are so; larger ones are a guess."""
    small = config.bucket_mb == "auto" or config.bucket_mb < LARGE_MB
    left = candidates(config, processes, cuda)
    return {remedy.cause for remedy in left if small or remedy.levers != ["bucket_mb"]}


def diagnosed(
    ranks: list[Breakdown], config: TrainingConfig, mfu: float | None, processes: int
) -> dict[str, Any]:
    """What a run's metrics say of its steps: milliseconds by cause, MFU points, words, the next lever."""
    cuda = any(one.device == "cuda" for one in ranks)
    found: dict[str, Any] = {
        **as_metrics(ranks),
        "step_ms": json.dumps({cause: 1e3 * _mean(ranks, cause) for cause in CAUSES}),
        "bottleneck": "; ".join(words(ranks, causes_left(config, processes, cuda))),
        "stragglers": json.dumps([rank for rank, _ in stragglers(ranks)]),
    }
    if mfu:
        costs = {cause: points(share_of(ranks, cause), mfu) for cause in CAUSES if cause != "compute"}
        found |= {"mfu_points": json.dumps(costs), "three_causes": json.dumps(three_causes(ranks, mfu))}
    proposed = next_lever(ranks, config, processes, cuda)
    if proposed is not None:
        found |= {"next_lever": proposed[0], "next_lever_why": proposed[1]}
    return found


def _mean(ranks: Sequence[Breakdown], cause: str) -> float:
    """Seconds of a step."""
    return sum(one.seconds[cause] for one in ranks) / sum(one.steps for one in ranks)


def _has(current: Any, wanted: Any) -> bool:
    """Whether a lever is already there, or further; a rule's choice is, unless it is the plain value."""
    if wanted == "auto":
        return bool(current)
    if isinstance(wanted, bool | str) or not isinstance(current, int | float):
        return bool(current == wanted)
    return bool(current >= wanted)
