"""The parts of a run put together from its configuration: model, loss, levers, exchange, optimizer.

Invariant: parameters are known by their names in the model as it came, whatever is applied around it, and a
checkpoint holds fp32 weights and moments by those names. So a run can go on with other levers, another
precision, or another number of processes.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from training import models, shards
from training.activations import checkpoint_activations, compile_layers
from training.attention import attend_in_blocks
from training.communication import Exchange, exchange_for
from training.config import ConfigError, Precision, TrainingConfig
from training.flops import flops_per_token
from training.loss import decoder_layers, loss_of, own_module
from training.precision import PEAK_OF, MasterWeights, adamw, check_precision, to_fp8
from training.processes import World

CONVENTION = "matmul"


@dataclass
class Parts:
    """A model that is ready to train."""

    model: Any  # as it came
    inner: nn.Module  # with its loss
    exchange: Exchange  # and spread over the processes
    optimizer: torch.optim.Optimizer
    names: dict[str, nn.Parameter]  # what is learned, by the model's names
    masters: MasterWeights | None
    precision: Precision
    device: torch.device
    flops_per_token: float | None  # None when nothing is known of the model
    identity: dict[str, Any]

    @property
    def learned(self) -> list[nn.Parameter]:
        """What the optimizer steps on."""
        return list(self.names.values())

    @property
    def peak_precision(self) -> str:
        """Whose peak the work is measured against."""
        return PEAK_OF[self.precision]

    def tensors(self) -> dict[str, Any]:
        """All that a checkpoint holds, by name; tensors are the live ones."""
        self._begin_moments()
        found: dict[str, Any] = {}
        for name, parameter in self.names.items():
            found[f"weights.{name}"] = parameter.detach()
            for moment, value in self.optimizer.state[parameter].items():
                found[f"{moment}.{name}"] = value
        kept = self.model.state_dict().keys()
        for name, buffer in self.model.named_buffers():
            if name in kept:
                found[f"buffers.{name}"] = buffer
        return found

    def restore(self, tensors: dict[str, Any]) -> None:
        """Take over what was read into `tensors()`: all was read in place, but for the copy in bf16."""
        if self.masters is not None:
            self.masters.publish()

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights in fp32 on the host, one tensor after the other; every process must ask for all."""
        for name, parameter in self.names.items():
            value: Any = parameter.detach()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            yield name, value.float().cpu()

    def _begin_moments(self) -> None:
        """Give every parameter the moments that AdamW would at its first step."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not self.optimizer.state[parameter]:
                    where = parameter.device if group["fused"] else "cpu"
                    self.optimizer.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32, device=where),
                        "exp_avg": torch.zeros_like(parameter.detach()),
                        "exp_avg_sq": torch.zeros_like(parameter.detach()),
                    }


def assemble(
    config: TrainingConfig,
    world: World,
    device: torch.device,
    given: nn.Module | None = None,
    restored: bool = False,
) -> Parts:
    """Build what a resolved configuration says, on a device. `given` takes the configured model's place.

    What will be sharded may not fit in one process: it has no memory before it is. `restored`: a checkpoint
    will be read, so the values of sharded weights do not matter.
    """
    check_precision(config.precision, device)
    if config.tf32:
        torch.set_float32_matmul_precision("high")
    whole = world.size == 1 or config.parallel == "ddp"
    own = given is not None or config.model.startswith(models.MODULE)  # made whole, as its function makes it
    model, identity, flops = _model(config, given, device if whole else torch.device("meta"))
    if whole:
        model.to(device)
    model.train()
    if config.attention == "blocks":
        if device.type != "cpu":
            raise ConfigError("attention: blocks; expected library on a GPU, whose kernels skip the hidden")
        attend_in_blocks(model)
    inner = loss_of(model, int(config.loss_chunk))
    layers = decoder_layers(model)
    if config.precision == "fp8":
        to_fp8(model)
    checkpoint_activations(layers, config.activation_checkpointing)
    if config.compile is True:
        compile_layers(layers)
    masters = None
    if config.precision == "bf16_master" and (world.size == 1):
        masters = MasterWeights(model)
    exchange = exchange_for(inner, layers, config, world, device)
    if not whole and not own:
        shards.materialise(inner, model, device)
        if not restored:
            shards.fill(model, config.model, config.seed, config.layers, device)
    names = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if masters is not None:
        names = {name: masters.of[parameter] for name, parameter in names.items()}
    matrices = [parameter for parameter in names.values() if parameter.dim() >= 2]
    others = [parameter for parameter in names.values() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = adamw([group for group in groups if group["params"]], config.lr, config.fused_optimizer)
    return Parts(model, inner, exchange, optimizer, names, masters, config.precision, device, flops, identity)


def _model(
    config: TrainingConfig, given: nn.Module | None, where: torch.device
) -> tuple[Any, dict[str, Any], float | None]:
    """The model, what identifies it, and its FLOPs per token. Fresh weights are drawn `where`; on the meta
    device only a module of one's own has any."""
    if given is not None or config.model.startswith(models.MODULE):
        own = given if given is not None else own_module(config.model, config.seed)
        sizes = {name: list(parameter.shape) for name, parameter in own.named_parameters()}
        return own, {"own": sizes}, _counted(own, config.seq_len)
    shape = models.shape_of(config.model)
    if config.layers is not None:
        shape = replace(shape, layers=config.layers)
    if where.type == "meta":
        built = models.skeleton(config.model, config.layers)
    else:
        built = models.build(config.model, config.seed, config.layers, str(where))
    return built, asdict(shape), flops_per_token(shape, config.seq_len, CONVENTION)


def _counted(own: nn.Module, seq_len: int) -> float | None:
    """FLOPs per token of a module that is not known, as torch counts them on one sequence."""
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    device = next(own.parameters()).device
    rows = torch.zeros(1, seq_len + 1, dtype=torch.long, device=device)
    with torch.random.fork_rng(), counter:
        torch.autograd.backward(loss_of(own, 0)(rows))
    own.zero_grad()
    return counter.get_total_flops() / seq_len or None
