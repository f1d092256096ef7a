"""The training loop, on torch alone: one process, or several with DDP.

Invariant: the loss curve depends on the configuration and the text, not on how often the run was killed:
weights, optimizer, random state and position in the data are restored together (bitwise the same on one
process in fp32). A step's gradient is the mean over all its tokens, however they are spread over passes and
processes. The cost: a checkpoint stops the loop while it is written.
"""

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import models
from training.checkpoints import (
    Checkpoints,
    LocalCheckpoints,
    name_of,
    newest,
    read_checkpoint,
    write_checkpoint,
)
from training.config import ConfigError, TrainingConfig
from training.data import Windows, describe, packed_tokens, split, text_files
from training.evaluation import mean_loss, perplexity, summed_loss
from training.flops import flops_per_token, mfu
from training.hardware import Peak, device_peak, measured_peak
from training.manifest import write_manifest
from training.processes import World, joined, world_from_environment
from training.tokenizer import byte_tokens, end_token, tokens_of_directory, write_tokenizer

if TYPE_CHECKING:
    import torch

CONVENTION = "matmul"


class TrainingError(Exception):
    """A run that cannot go on; the message says at which step and why."""


class Stopped(Exception):
    """The run was asked to stop and has saved what it had."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}, which is saved")
        self.step = step


@dataclass(frozen=True)
class Progress:
    """Where a run stands. Rates are of the steps of all attempts, without the first after each start."""

    step: int
    position: int  # sequences consumed
    losses: tuple[float, ...]
    seconds: float = 0.0
    tokens: int = 0
    tokens_timed: int = 0


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
) -> Result:
    """Train from the newest checkpoint, or from the start, to the configured step.

    `directory` is scratch space, and holds the checkpoints too when no other place for them is given.
    `report` hears the metrics after each step; when `stopping` says so the step is finished and saved.
    Raises Stopped, TrainingError, and the errors of what it uses.
    """
    import torch

    world = world_from_environment()
    device = torch.device("cuda", world.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    train_windows, held_out = load_text(config)
    with joined(world, device):
        run = _Run(
            config, directory, checkpoints or LocalCheckpoints(directory / "checkpoints"), world, device, log
        )
        run.build(train_windows)
        progress = run.steps(train_windows, report, stopping)
        return run.finish(progress, held_out)


def load_text(config: TrainingConfig) -> tuple[Windows, Windows]:
    """The windows to train on and those held out. Raises DataError, ModelError or ConfigError."""
    longest = models.longest_sequence(config.model)
    if longest is not None and config.seq_len > longest:
        raise ConfigError(f"seq_len: {config.seq_len}; {config.model} sees at most {longest} tokens")
    source = _tokenizer_source(config)
    encode = byte_tokens if source is None else lambda text: tokens_of_directory(source, text)
    tokens = packed_tokens(text_files(config.data), encode, end_token(source))
    vocabulary = models.shape_of(config.model).vocab
    if int(tokens.max()) >= vocabulary:
        raise ConfigError(
            f"model: {config.model}: its tokenizer has tokens beyond its vocabulary of {vocabulary}"
        )
    kept, held_out = split(tokens, config.held_out)
    return (
        Windows(kept, config.seq_len, config.seed, "data"),
        Windows(held_out, config.seq_len, config.seed, f"the last {config.held_out:.0%} of data, held out"),
    )


def learning_rate(config: TrainingConfig, step: int) -> float:
    """The rate of a step, counted from 0: a linear climb, then a cosine down to `min_lr` of it."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    left = max(config.steps - config.warmup, 1)
    share = min((step - config.warmup) / left, 1.0)
    return config.lr * (config.min_lr + (1 - config.min_lr) * 0.5 * (1 + math.cos(math.pi * share)))


class _Run:
    """One process's part of a run: the model, the optimizer, and where checkpoints go."""

    def __init__(
        self,
        config: TrainingConfig,
        directory: Path,
        checkpoints: Checkpoints,
        world: World,
        device: "torch.device",
        log: Callable[[str], None],
    ) -> None:
        self.config = config
        self.directory = directory
        self.checkpoints = checkpoints
        self.world = world
        self.device = device
        self.log = log
        self.accumulation = config.accumulation_for(world.size)
        self.global_batch = config.micro_batch * self.accumulation * world.size
        self.shape = models.shape_of(config.model)
        self.flops_per_token = flops_per_token(self.shape, config.seq_len, CONVENTION)
        self.peak: Peak | None = None
        self.model: Any  # transformers' model
        self.wrapped: Any  # the model itself, or DDP around it
        self.optimizer: torch.optim.Optimizer
        self.start = Progress(0, 0, ())

    def build(self, windows: Windows) -> None:
        """Make the model and the optimizer, and restore the newest checkpoint if there is one."""
        import torch

        self.identity = {"model": asdict(self.shape), **describe(windows)}
        self.model = models.build(self.config.model, self.config.seed).to(self.device)
        self.model.train()
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=self.config.lr, betas=(0.9, 0.95), fused=True)
        if (found := self._agreed_checkpoint()) is not None:
            self.start = self._restore(found)
            self.log(f"resumed after step {self.start.step}")
        self.wrapped = self.model
        if self.world.size > 1:
            from torch.nn.parallel import DistributedDataParallel

            ids = [self.device.index] if self.device.type == "cuda" else None
            self.wrapped = DistributedDataParallel(self.model, device_ids=ids, gradient_as_bucket_view=True)
        if self.world.rank == 0:
            self.peak = device_peak(self.device, self.config.precision)

    def steps(
        self, windows: Windows, report: Callable[[dict[str, Any]], None], stopping: Callable[[], bool]
    ) -> Progress:
        """Train to the last step."""
        progress, saved = self.start, self.start.step
        fresh = True  # the first step of a process also warms it up: it is not timed
        while progress.step < self.config.steps:
            began = time.perf_counter()
            loss, stop = self._step(windows, progress, stopping())
            if not math.isfinite(loss):
                raise TrainingError(
                    f"step {progress.step + 1}: the loss is {loss}; a lower lr or a longer warmup may help"
                )
            tokens = self.global_batch * self.config.seq_len
            progress = Progress(
                progress.step + 1,
                progress.position + self.global_batch,
                (*progress.losses, loss),
                progress.seconds + (0.0 if fresh else time.perf_counter() - began),
                progress.tokens + tokens,
                progress.tokens_timed + (0 if fresh else tokens),
            )
            fresh = False
            last = progress.step == self.config.steps
            if last or stop or progress.step % self.config.checkpoint_every == 0:
                self._save(progress)
                saved = progress.step
            if self.world.rank == 0:
                report({**self.metrics(progress), "checkpoint_step": saved})
            if stop and not last:
                raise Stopped(progress.step)
        return progress

    def finish(self, progress: Progress, held_out: Windows) -> Result:
        """Score the model on the held-out text and write it as a Hugging Face directory."""
        directory = self.directory / "model"
        loss = float("nan")
        if self.world.rank == 0:
            loss = mean_loss(self.model, held_out, self.config.held_out_windows, self.config.micro_batch)
            write_model(self.model, directory, _tokenizer_source(self.config))
        metrics = {**self.metrics(progress), "held_out_loss": loss, "perplexity": perplexity(loss)}
        return Result(progress, loss, directory, metrics)

    def metrics(self, progress: Progress) -> dict[str, Any]:
        """What people see of a run at this point."""
        found: dict[str, Any] = {
            "steps": progress.step,
            "steps_total": self.config.steps,
            "progress": progress.step / self.config.steps,
            "loss": progress.losses[-1] if progress.losses else None,
            "flops": self.flops_per_token * progress.tokens,
            "mfu_convention": CONVENTION,
            "processes": self.world.size,
        }
        if not progress.seconds or self.peak is None:
            return found
        rate = progress.tokens_timed / progress.seconds
        share = mfu(self.flops_per_token, rate / self.world.size, self.peak.flops_per_s)
        if share > 1:  # no work beats the hardware: the peak was measured while something else ran
            self.peak = measured_peak(self.device, self.config.precision, refresh=True)
            share = mfu(self.flops_per_token, rate / self.world.size, self.peak.flops_per_s)
        return {
            **found,
            "tokens_per_s": rate,
            "mfu": share,
            "peak_flops_per_s": self.peak.flops_per_s,
            "peak_source": self.peak.source,
        }

    def _step(self, windows: Windows, progress: Progress, stop: bool) -> tuple[float, bool]:
        """One step of the optimizer: the mean loss of its tokens, and whether any process is to stop."""
        import torch

        config, world = self.config, self.world
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, progress.step)
        own = config.micro_batch * self.accumulation
        rows = windows.at(progress.position + world.rank * own, own)
        tokens = self._summed(float(rows[:, 1:].numel()))[0]
        total = torch.zeros((), device=self.device)
        for index, part in enumerate(torch.split(rows, config.micro_batch)):
            last = index == self.accumulation - 1
            with contextlib.ExitStack() as stack:
                if world.size > 1 and not last:
                    stack.enter_context(self.wrapped.no_sync())
                if config.precision == "bf16":
                    stack.enter_context(torch.autocast(self.device.type, torch.bfloat16))
                loss = summed_loss(self.wrapped, part.to(self.device))
                total += loss.detach()
                torch.autograd.backward(
                    loss * (world.size / tokens)
                )  # DDP divides by the number of processes
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss_sum, stops = self._summed(float(total), float(stop))
        return loss_sum / tokens, stops > 0

    def _summed(self, *values: float) -> list[float]:
        """The values summed over all processes."""
        if self.world.size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        both = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(both)
        return [float(value) for value in both]

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

        state, tensors = read_checkpoint(directory)
        for key, value in self.identity.items():
            if state["identity"].get(key) != value:
                raise ConfigError(
                    f"{key}: the checkpoint after step {state['step']} was made with "
                    f"{state['identity'].get(key)}, this run has {value}; use another output, "
                    "or remove the checkpoints"
                )
        self.model.load_state_dict(tensors["model"])
        self.optimizer.load_state_dict(tensors["optimizer"])
        torch.set_rng_state(tensors["random"])
        if self.device.type == "cuda" and tensors["random_cuda"] is not None:
            torch.cuda.set_rng_state(tensors["random_cuda"], self.device)
        names = ("step", "position", "losses", "seconds", "tokens", "tokens_timed")
        return replace(Progress(**{name: state[name] for name in names}), losses=tuple(state["losses"]))

    def _save(self, progress: Progress) -> None:
        """Publish a checkpoint from rank 0, and drop those beyond the configured number."""
        if self.world.rank != 0:
            return
        import torch

        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        tensors = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": cuda,
        }
        state = {
            **asdict(progress),
            "identity": self.identity,
            "config": self.config.model_dump(),
            "processes": self.world.size,
            "torch": torch.__version__,
        }
        directory = self.directory / f".writing-{name_of(progress.step)}"
        write_checkpoint(directory, state, tensors)
        self.checkpoints.publish(progress.step, directory)
        shutil.rmtree(directory, ignore_errors=True)
        for step in sorted(self.checkpoints.steps())[: -self.config.keep_checkpoints]:
            self.checkpoints.remove(step)


def write_model(model: Any, directory: Path, tokenizer_source: Path | None) -> None:
    """Write a Hugging Face directory: safetensors, configuration, tokenizer, and a manifest at the end."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    model.save_pretrained(directory)
    write_tokenizer(directory, tokenizer_source)
    write_manifest(directory)


def write_curve(file: Path, losses: tuple[float, ...]) -> None:
    """The loss of each step, as JSON lines."""
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _tokenizer_source(config: TrainingConfig) -> Path | None:
    """The directory whose tokenizer the model uses; None for the byte tokenizer."""
    return None if config.model in models.SHIPPED else Path(config.model)
