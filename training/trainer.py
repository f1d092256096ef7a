"""The training loop, on torch alone: one process, or several with DDP, FSDP or HSDP.

Invariant: the loss curve depends on the configuration and the text, not on how often the run was killed:
weights, optimizer, random state and position in the data are restored together (bitwise the same on one
process in fp32). A step's gradient is the mean over all its tokens, however they are spread over passes and
processes. Nothing of a step is lost when the micro-batch changes: that happens between steps, or the step
is made again. The cost: the loss of each step is read back, so host and device meet once a step.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.checkpoints import (
    Checkpoints,
    LocalCheckpoints,
    Writer,
    check_same_run,
    newest,
    read_random,
    read_state,
    read_tensors,
)
from training.config import TrainingConfig, halved, levers_on
from training.corpus import load_text, tokenizer_source, with_local_model
from training.data import Windows, describe
from training.evaluation import perplexity
from training.hardware import device_peak
from training.links import mesh_lines
from training.occupancy import share_of_peak
from training.output import write_curve, write_model
from training.processes import World, joined, world_from_environment
from training.record import write_resolved
from training.watchdog import Watchdog

if TYPE_CHECKING:
    import torch
    from torch import nn

    from training.feed import Ask, Feed

__all__ = [
    "Progress",
    "Result",
    "Stopped",
    "TrainingError",
    "load_text",
    "train",
    "write_curve",
    "write_model",
]
CONVENTION = "matmul"
SPIKE_WINDOW = 20  # steps whose mean loss a spike is measured against


class TrainingError(Exception):
    """A run that cannot go on; the message says at which step and why."""


class OutOfMemory(TrainingError):
    """Memory ran out where the process could not make do with a smaller micro-batch by itself."""


class Stopped(Exception):
    """The run was asked to stop and has saved what it had."""

    def __init__(self, step: int) -> None:
        where = f"after step {step}, which is saved" if step else "before the first step"
        super().__init__(f"stopped {where}")
        self.step = step


@dataclass(frozen=True)
class Progress:
    """Where a run stands. Rates are of the steps of all attempts, without the first after each start."""

    step: int
    position: int  # sequences consumed
    losses: tuple[float | None, ...]  # None for a step that was left out because it was no number
    seconds: float = 0.0
    tokens: int = 0
    tokens_timed: int = 0
    left_out: int = 0  # steps in a row, up to now


@dataclass(frozen=True)
class Result:
    """What a finished run came to. `directory` holds the model; only rank 0 writes it."""

    progress: Progress
    held_out_loss: float
    directory: Path
    metrics: dict[str, Any]


def train(
    config: TrainingConfig,
    directory: Path,
    checkpoints: Checkpoints | None = None,
    report: Callable[[dict[str, Any]], None] = lambda metrics: None,
    stopping: Callable[[], bool] = lambda: False,
    log: Callable[[str], None] = lambda line: None,
    model: "nn.Module | None" = None,
    compare: bool = False,
) -> Result:
    """Train from the newest checkpoint, or from the start, to the configured step.

    `directory` is scratch space, and holds the checkpoints too when no other place for them is given.
    `report` hears the metrics after each step; when `stopping` says so the step is finished and saved.
    `model` is trained in place of the configured one. `compare`: of several processes that start the plain
    loop is measured first, see `gang`. Raises Stopped, TrainingError, and the errors of what
    it uses.
    """
    from training.gang import decided_together
    from training.resolve import check_memory, prepare_device, resolve

    world = world_from_environment()
    device = prepare_device(config, world, log)
    named, config = config.model, with_local_model(config)
    train_windows, held_out = load_text(config)
    with joined(world, device), Watchdog(config.hang_seconds) as watchdog:
        if model is None:
            before = directory / "resolved.yaml"
            config = decided_together(config, before, world, log, watchdog.beat, stopping, compare)
        config, reasons = resolve(config, world, device)
        check_memory(config, world, device)
        if device.type == "cuda" and world.local_size > 1 and world.local_rank == 0:
            for line in mesh_lines():
                log(line)
        run = Run(config, directory, checkpoints or LocalCheckpoints(directory / "checkpoints"), world, log)
        run.build(device, train_windows, model)
        if world.rank == 0:
            resolved = run.config.model_copy(update={"model": named})
            write_resolved(directory / "resolved.yaml", resolved, reasons, world, device)
        try:
            progress = run.steps(train_windows, held_out, report, stopping, watchdog)
        finally:
            run.writer.close()
        watchdog.beat("the end")
        return run.finish(progress, held_out)


def learning_rate(config: TrainingConfig, step: int) -> float:
    """The rate of a step, counted from 0: a linear climb, then the schedule down to `min_lr` of it."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    share = min((step - config.warmup) / max(config.steps - config.warmup, 1), 1.0)
    falls = {"cosine": 0.5 * (1 + math.cos(math.pi * share)), "linear": 1 - share, "constant": 1.0}
    return config.lr * (config.min_lr + (1 - config.min_lr) * falls[config.schedule])


class Run:
    """One process's part of a run: the model, the optimizer, and where checkpoints go."""

    def __init__(
        self,
        config: TrainingConfig,
        directory: Path,
        checkpoints: Checkpoints,
        world: World,
        log: Callable[[str], None],
    ) -> None:
        self.config = config
        self.directory = directory
        self.checkpoints = checkpoints
        self.world = world
        self.log = log
        self.micro_batch = int(config.micro_batch)
        self.accumulation = config.accumulation_for(world.size)
        self.global_batch = self.micro_batch * self.accumulation * world.size
        self.own_batch = self.micro_batch * self.accumulation
        self.start = Progress(0, 0, ())
        self.evaluated: dict[str, Any] = {}
        self.diagnosed: dict[str, Any] = {}

    def build(self, device: "torch.device", windows: Windows, given: "nn.Module | None") -> None:
        """Make the model and the optimizer, spread them, and restore the newest checkpoint, if any."""
        from training import assembly

        self.device = device
        found = self._agreed_checkpoint()
        self.parts = assembly.assemble(self.config, self.world, device, given, restored=found is not None)
        self.identity = {"model": self.parts.identity, **describe(windows)}
        per_token = self.parts.flops_per_token
        self.flops_per_token = per_token if per_token is not None else 0.0
        self.writer = Writer(
            self.checkpoints,
            self.directory,
            self.world,
            self.parts.exchange.sharded,
            self.config.keep_checkpoints,
            self.config.async_checkpoints,
        )
        if found is not None:
            self.start = self._restore(found)
            self.log(f"resumed after step {self.start.step}")
        if self.world.rank == 0 and self.flops_per_token:
            device_peak(
                device, self.parts.peak_precision
            )  # measured, where it must be, before the first step

    def steps(
        self,
        windows: Windows,
        held_out: Windows,
        report: Callable[[dict[str, Any]], None],
        stopping: Callable[[], bool],
        watchdog: Watchdog,
    ) -> Progress:
        """Train to the last step."""
        from training.adapt import Adaptation
        from training.feed import Feed
        from training.remedies import diagnosed
        from training.step_profile import StepProfile

        config, progress = self.config, self.start
        saved = self.writer.saved = progress.step
        fresh = True  # the first step of a process also warms it up: it is not timed
        adaptation = Adaptation(self) if config.adapt is True else None
        ahead = 0 if config.prefetch_batches == "auto" else config.prefetch_batches
        workers = 0 if config.loader_workers == "auto" else config.loader_workers
        profile = StepProfile(
            config.profile_steps, config.steps - progress.step, self.accumulation, self.device, self.log
        )
        with (
            Feed(windows, self.device, ahead, workers, config.pinned is True) as feed,
            contextlib.closing(profile),
        ):
            while progress.step < config.steps:
                watchdog.beat(f"step {progress.step + 1}")
                untimed = fresh or profile.before()
                began = time.perf_counter()
                loss, stop, problem = self.step(feed, progress, stopping())
                seconds = time.perf_counter() - began
                progress = self.after(progress, loss, problem, 0.0 if untimed else seconds)
                profiled = profile.after(seconds, self.world)
                if adaptation and not untimed:
                    adaptation.after(seconds)
                if profiled:
                    share = self.metrics(progress).get("mfu")
                    self.diagnosed = diagnosed(profiled, config, share, self.world.size)
                last = progress.step == config.steps
                if config.eval_every and progress.step % config.eval_every == 0 and not last:
                    self.evaluated = {"eval_step": progress.step, "eval_loss": self.evaluate(held_out)}
                if not problem and (last or stop or progress.step % config.checkpoint_every == 0):
                    self._save(progress)
                    if last or stop:
                        self.writer.wait()
                saved = self.writer.saved
                if self.world.rank == 0:
                    report({**self.metrics(progress), "step_seconds": seconds, "checkpoint_step": saved})
                if stop and not last:
                    raise Stopped(saved)
                fresh = False
        self.writer.wait()
        return progress

    def step(self, feed: "Feed", progress: Progress, stop: bool) -> tuple[float, bool, str]:
        """One step of the optimizer: the mean loss of its tokens, whether any process is to stop, and why the
        step was left out, if it was: its loss or gradient is no number, or the loss is a spike."""
        from training.communication import flat_sum
        from training.step import clipped_norm

        parts, config = self.parts, self.config
        for group in parts.optimizer.param_groups:
            group["lr"] = learning_rate(config, progress.step)
        tokens = self.global_batch * config.seq_len
        loss_sum = self._passes(feed, progress.position, tokens)
        norm = clipped_norm(parts.learned, config.clip)
        total, stops = flat_sum((loss_sum, float(stop)), self.device, self.world)
        loss = total / tokens
        problem = self._problem(progress, loss, norm)
        if not problem:
            parts.optimizer.step()
            if parts.masters is not None:
                parts.masters.publish()
        parts.optimizer.zero_grad()
        return loss, stops > 0, problem

    def _passes(self, feed: "Feed", position: int, tokens: int) -> float:
        """Forward and backward over this process's part of the step; its summed loss.

        Alone, a process that runs out of memory halves its micro-batch and makes the step again.
        """
        import torch

        from training.step import forward_backward

        while True:
            try:
                asks, following = self.asks(position)
                return forward_backward(self.parts, feed, asks, following, tokens)
            except torch.OutOfMemoryError as error:
                smaller = halved(self.micro_batch)
                if self.world.size > 1 or not smaller or self.config.global_batch is None:
                    raise OutOfMemory(
                        f"out of memory with micro_batch {self.micro_batch}; expected a smaller one, or "
                        "activation_checkpointing: full"
                    ) from error
            self.parts.optimizer.zero_grad()
            self.change_micro_batch(smaller, "out of memory")
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def change_micro_batch(self, size: int, why: str) -> None:
        """Another micro-batch from here on; accumulation follows, the step stays the same."""
        self.log(f"micro_batch {self.micro_batch} -> {size}, accumulation {self.own_batch // size}: {why}")
        self.micro_batch, self.accumulation = size, self.own_batch // size

    def asks(self, position: int) -> "tuple[list[Ask], list[Ask]]":
        """The batches of this process in the step at a position, and in the next."""
        from training.feed import Ask

        own = position + self.world.rank * self.own_batch
        asks = [Ask(own + each * self.micro_batch, self.micro_batch) for each in range(self.accumulation)]
        return asks, [Ask(ask.position + self.global_batch, ask.count) for ask in asks]

    def _problem(self, progress: Progress, loss: float, norm: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss}; a lower lr or a longer warmup may help"
        if not math.isfinite(norm):
            return f"the gradient's norm is {norm}; a lower lr or a longer warmup may help"
        recent = [known for known in progress.losses[-SPIKE_WINDOW:] if known is not None]
        if self.config.spike is None or len(recent) < SPIKE_WINDOW // 2:
            return ""
        mean = sum(recent) / len(recent)
        return f"the loss is {loss:.4f}, a spike over {mean:.4f}" if loss > mean + self.config.spike else ""

    def after(self, progress: Progress, loss: float, problem: str, seconds: float) -> Progress:
        """The progress after a step. Raises TrainingError when too many were left out in a row."""
        step = progress.step + 1
        left_out = progress.left_out + 1 if problem else 0
        if left_out > self.config.bad_steps:
            raise TrainingError(f"step {step}: {problem}")
        if problem:
            self.log(f"step {step} left out: {problem}")
        tokens = self.global_batch * self.config.seq_len
        return Progress(
            step,
            progress.position + self.global_batch,
            (*progress.losses, loss if math.isfinite(loss) else None),
            progress.seconds + seconds,
            progress.tokens + tokens,
            progress.tokens_timed + (tokens if seconds else 0),
            left_out,
        )

    def evaluate(self, held_out: Windows) -> float:
        """The mean loss of the held-out text, each process scoring its part."""
        from training.communication import flat_sum
        from training.step import scored

        total, tokens = scored(
            self.parts, held_out, self.config.held_out_windows, self.micro_batch, self.world
        )
        total, tokens = flat_sum((total, tokens), self.device, self.world)
        return total / tokens

    def finish(self, progress: Progress, held_out: Windows) -> Result:
        """Score the model on the held-out text and write it as a Hugging Face directory."""
        directory = self.directory / "model"
        loss = self.evaluate(held_out)
        if not math.isfinite(loss):
            raise TrainingError(f"step {progress.step}: the held-out loss is {loss}; no model is written")
        weights = self.parts.whole_weights()
        try:
            if self.world.rank == 0:
                source = tokenizer_source(self.config.model)
                write_model(self.parts.model, directory, source, weights)
        finally:
            for _ in weights:  # all processes gather each, whether the first can write it or not
                pass
        metrics = {**self.metrics(progress), "held_out_loss": loss, "perplexity": perplexity(loss)}
        return Result(progress, loss, directory, metrics)

    def metrics(self, progress: Progress) -> dict[str, Any]:
        """What people see of a run at this point."""
        found: dict[str, Any] = {
            "steps": progress.step,
            "steps_total": self.config.steps,
            "progress": progress.step / self.config.steps,
            "loss": progress.losses[-1] if progress.losses else None,
            "tokens": progress.tokens,
            "flops": self.flops_per_token * progress.tokens,
            "mfu_convention": CONVENTION,
            "precision": self.config.precision,
            "processes": self.world.size,
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "levers": json.dumps(levers_on(self.config)),
            **self.evaluated,
            **self.diagnosed,
        }
        if not progress.seconds:
            return found
        rate = progress.tokens_timed / progress.seconds
        found["tokens_per_s"] = rate
        if not self.flops_per_token or self.world.rank:
            return found
        own_rate = rate / self.world.size
        known = share_of_peak(self.flops_per_token, own_rate, self.device, self.parts.peak_precision)
        if known is None:
            return found
        share, peak = known
        return {**found, "mfu": share, "peak_flops_per_s": peak.flops_per_s, "peak_source": peak.source}

    def _agreed_checkpoint(self) -> Path | None:
        """The newest undamaged checkpoint, chosen by rank 0 and the same for all."""
        found = newest(self.checkpoints, self.log) if self.world.rank == 0 else None
        if self.world.size == 1:
            return found[1] if found else None
        import torch
        import torch.distributed as dist

        step = torch.tensor([found[0] if found else -1], device=self.device)
        dist.broadcast(step, 0)
        if int(step) < 0:
            return None
        if self.world.local_rank == 0 and found is None:
            self.checkpoints.fetch(int(step))
        dist.barrier()
        return found[1] if found else self.checkpoints.fetch(int(step))

    def _restore(self, directory: Path) -> Progress:
        import torch

        state = read_state(directory)
        check_same_run(state, self.identity, self.config.steps)
        tensors = self.parts.tensors()
        read_tensors(directory, tensors, self.world)
        self.parts.restore(tensors)
        if (random := read_random(directory, self.world.rank)) is not None:
            torch.set_rng_state(random["cpu"])
            if self.device.type == "cuda" and "cuda" in random:
                torch.cuda.set_rng_state(random["cuda"], self.device)
        if self.config.adapt is True and self.own_batch % state["micro_batch"] == 0:
            self.micro_batch = state["micro_batch"]
            self.accumulation = self.own_batch // self.micro_batch
        names = ("step", "position", "losses", "seconds", "tokens", "tokens_timed")
        return replace(Progress(**{name: state[name] for name in names}), losses=tuple(state["losses"]))

    def _save(self, progress: Progress) -> None:
        """Begin to write a checkpoint."""
        import torch

        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        state = {
            **asdict(progress),
            "identity": self.identity,
            "config": self.config.model_dump(),
            "processes": self.world.size,
            "micro_batch": self.micro_batch,
            "torch": torch.__version__,
        }
        self.writer.write(progress.step, state, self.parts.tensors(), random)
