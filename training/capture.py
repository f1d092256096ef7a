"""Run a configuration for a few steps to see where they go, and again with one lever changed at a time.

Invariant: nothing of the real run is touched: a capture trains from the start in a directory of its own that
is removed. The profiler slows many small ops down, so gains are measured without it. On a processor, which
others use too, steps with a lever and without it take turns, and what counts is the median of their ratios;
a GPU is alone and may not hold two models, so there one follows the other. A lever helps when most pairs say
so, not the median alone: a busy machine makes two equal runs differ by some per cent. Several processes
measure together, and all of them ask. The cost: each lever that is tried costs a build of the model and some
steps.
"""

import contextlib
import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from training.config import TrainingConfig, load_config
from training.diagnosis import broken
from training.processes import World, joined, world_from_environment
from training.remedies import Remedy, candidates
from training.signs import UNBROKEN
from training.step_profile import of_metrics
from training.trace import Breakdown

if TYPE_CHECKING:
    import torch

HELPS = 1.03
WARM_UP = 2  # steps that are not timed
MOST_STEPS = 50  # within which a profile must have been made
FEWEST_PAIRS, MOST_PAIRS, PAIRS_S = 7, 40, 8.0  # pairs of steps for a lever: as many as fit, within these
WHOLE_PROCESS = {"keep_host_memory"}  # levers that a process cannot take back
Stepping = contextlib.AbstractContextManager[Callable[[], float]]  # a run, and its next step's seconds


@dataclass(frozen=True)
class Captured:
    """Where the time of some steps goes, of each rank, the run's MFU without the profiler if it is known, and
    its configuration without any `auto`."""

    ranks: list[Breakdown]
    mfu: float | None
    config: TrainingConfig


@dataclass(frozen=True)
class Gain:
    """What one changed line of the YAML file does to the speed: 1.2 is a fifth more tokens a second."""

    line: str
    times: float
    cause: str  # that the lever is against
    numerics: str  # whether anything but rounding changes
    least: float = math.inf  # `times` in the less good of the pairs: three in four say more

    @property
    def helps(self) -> bool:
        """Whether it wins more than a measurement may be off."""
        return self.times >= HELPS and self.least > 1


def captured(config: TrainingConfig, steps: int = 4) -> Captured:
    """Profile some steps. Of several processes only the first hears of any. Raises what training raises."""
    last: dict[str, Any] = {}

    def after(metrics: dict[str, Any]) -> bool:
        last.update(metrics)
        return bool(of_metrics(metrics)) or metrics["steps"] > MOST_STEPS

    with tempfile.TemporaryDirectory(prefix="capture-") as directory:
        _train(config.model_copy(update={"profile_steps": steps}), Path(directory), after)
        resolved = Path(directory, "resolved.yaml")
        config = load_config(resolved) if resolved.is_file() else config
    return Captured(of_metrics(last), last.get("mfu"), config)


def examined(
    config: TrainingConfig,
    levers: bool,
    only: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Captured, list[Gain]]:
    """Profile some steps, and measure what each lever wins where that is asked for. Every process must ask.

    In one process group: where one has just ended, another of the same address may wait for it for ever.
    """
    from training.resolve import prepare_device

    world = world_from_environment()
    device = prepare_device(config, world, lambda line: None)
    with joined(world, device):
        seen = captured(config)
        if levers and world.size == 1 and (not only or "compile" in only) and broken(seen.ranks):
            seen = _sized(seen, device, say)
        return seen, gains(config, say, only) if levers else []


def _sized(seen: Captured, device: "torch.device", say: Callable[[str], None]) -> Captured:
    """With what the step would win without its graph breaks, where that can be measured."""
    if seen.config.activation_checkpointing != "none":
        say("graph breaks: what they cost is not measured: a record of a layer recomputes nothing")
        return seen
    run = partial(stepping, seen.config, World(), device)
    try:
        _, times = _times(run, partial(run, unbroken=True), World(), device, device.type == "cuda")
    except Exception as error:  # a layer whose operators depend on values, for one
        say(f"graph breaks: what they cost is not measured: {' '.join(str(error).split())[:200]}")
        return seen
    say(f"without graph breaks: {times:.2f} ×")
    won = max(1 - 1 / times, 0.0)
    ranks = [replace(one, signs={**one.signs, UNBROKEN: won * one.total}) for one in seen.ranks]
    return replace(seen, ranks=ranks)


@contextlib.contextmanager
def stepping(
    config: TrainingConfig, world: World, device: "torch.device", unbroken: bool = False
) -> Iterator[Callable[[], float]]:
    """A run from the start, of which each call makes one step and returns its seconds.

    `unbroken`: its compiled layers have no graph breaks, whatever breaks them. Every process of the world
    must make the same calls. Raises what training raises.
    """
    from training.checkpoints import LocalCheckpoints
    from training.corpus import load_text, with_local_model
    from training.feed import Feed
    from training.resolve import resolve
    from training.trainer import Run

    config = with_local_model(config)
    windows, _ = load_text(config)
    config, _ = resolve(config.model_copy(update={"adapt": False}), world, device)
    with tempfile.TemporaryDirectory(prefix="capture-") as directory:
        place = Path(directory)
        run = Run(config, place, LocalCheckpoints(place / "none"), world, lambda line: None)
        run.build(device, windows, None)
        if unbroken:
            from training.unbroken import remove_breaks

            remove_breaks(run.parts.model)
        progress = run.start

        def step() -> float:
            nonlocal progress
            began = time.perf_counter()
            loss, _, problem = run.step(feed, progress, False)
            seconds = time.perf_counter() - began
            progress = run.after(progress, loss, problem, seconds)
            return seconds

        ahead, workers = int(config.prefetch_batches), int(config.loader_workers)
        with Feed(windows, device, ahead, workers, config.pinned is True) as feed:
            for _ in range(WARM_UP):
                step()
            yield step


def gains(
    config: TrainingConfig, say: Callable[[str], None] = lambda line: None, only: Sequence[str] = ()
) -> list[Gain]:
    """What each lever wins by itself, the largest first; one that cannot be used here is left out.

    `only` names the levers to try; all that may help when it is empty. Every process must ask.
    """
    from training.resolve import prepare_device, resolve

    world = world_from_environment()
    device = prepare_device(config, world, lambda line: None)
    found = []
    with joined(world, device):
        config, _ = resolve(config.model_copy(update={"adapt": False}), world, device)
        for remedy in candidates(config, world.size, device.type == "cuda"):
            if only and not set(only) & set(remedy.levers):
                continue
            try:
                least, times = times_faster(config, remedy, world, device)
            except Exception as error:  # a lever that this machine lacks must not end the diagnosis
                say(f"{remedy.line}: not possible here: {' '.join(str(error).split())[:200]}")
                continue
            found.append(Gain(remedy.line, times, remedy.cause, remedy.numerics, least))
            say(f"{remedy.line}: {times:.2f} ×")
    return sorted(found, key=lambda gain: -gain.times)


def proposed(won: Sequence[Gain]) -> str | None:
    """The line to try next, after all were tried: the best that keeps the numbers, if one helps."""
    helping = sorted(
        (gain for gain in won if gain.helps), key=lambda gain: (gain.numerics == "changes", -gain.times)
    )
    return f"{helping[0].line} ({helping[0].times:.2f} × as measured)" if helping else None


def times_faster(
    config: TrainingConfig, remedy: Remedy, world: World, device: "torch.device"
) -> tuple[float, float]:
    """How many times as fast steps are with the remedy: in the lowest quarter, and the median. Every process
    must ask."""
    from training.resolve import prepare_device

    apart = device.type == "cuda" or bool(WHOLE_PROCESS & set(remedy.levers))

    def after() -> Stepping:
        if apart:
            prepare_device(remedy.config, world, lambda line: None)
        return stepping(remedy.config, world, device)

    return _times(lambda: stepping(config, world, device), after, world, device, apart)


def _times(
    before: Callable[[], Stepping],
    after: Callable[[], Stepping],
    world: World,
    device: "torch.device",
    apart: bool,
) -> tuple[float, float]:
    """How many times as fast the steps are after: in the lowest quarter, and the median. `apart`: one run has
    ended before the other begins."""
    if apart:
        slow = sorted(_alone(before, device))
        fast = sorted(_alone(after, device))
        quarter = len(fast) // 4
        return slow[quarter] / fast[-1 - quarter], median(slow) / median(fast)
    with before() as step, after() as other:
        found = sorted(ratios(step, other, world, device))
    return found[len(found) // 4], median(found)


def ratios(
    step: Callable[[], float], other: Callable[[], float], world: World, device: "torch.device"
) -> list[float]:
    """Seconds of the one over those of the other, of pairs of steps that were made one after the other.

    Who comes first alternates, as a machine grows slower or faster meanwhile.
    """
    from training.communication import flat_sum

    expected = flat_sum((step() + other(),), device, world)[0] / world.size
    pairs = min(max(math.ceil(PAIRS_S / expected), FEWEST_PAIRS), MOST_PAIRS)
    found = []
    for pair in range(pairs):
        if pair % 2:
            late, early = other(), step()
        else:
            early, late = step(), other()
        found.append(early / late)
    return found


def _alone(run: Callable[[], Stepping], device: "torch.device") -> list[float]:
    """Seconds of some steps, with nothing else in memory."""
    try:
        with run() as step:
            return [step() for _ in range(FEWEST_PAIRS)]
    finally:
        gc.collect()
        if device.type == "cuda":
            import torch

            torch.cuda.empty_cache()


def _train(config: TrainingConfig, directory: Path, after: Callable[[dict[str, Any]], bool]) -> None:
    """Train until `after`, which hears the metrics of each step that has ended, says that it is enough."""
    from training.trainer import Stopped, train

    enough = False

    def report(metrics: dict[str, Any]) -> None:
        nonlocal enough
        if not enough:
            enough = after(metrics)

    long = config.model_copy(update={"steps": 10_000, "checkpoint_every": 10_000})
    with contextlib.suppress(Stopped):
        train(long, directory, report=report, stopping=lambda: enough)
