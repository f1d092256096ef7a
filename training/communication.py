"""How the processes of a run share gradients and weights: DDP, FSDP2, or HSDP, applied from outside.

Invariant: gradients are sums over all processes and passes, whatever the layout, and are exchanged once a
step unless `sync: every` asks for more. With FSDP the layers of a group share one reduce-scatter, and the
weights stay gathered between the passes of a step unless memory asks for `reshard`; after the last pass
they are always given back, so no pass ever reads weights of the step before. The cost of exchanging once: a
process holds its whole gradient between the passes.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from training.config import TrainingConfig, check_parallel
from training.processes import World


@dataclass
class Exchange:
    """The module to call, and how its gradients are exchanged. `scale` undoes the mean that is taken."""

    module: nn.Module
    sync: str = "last"
    scale: int = 1
    sharded: bool = False
    reshard: bool = True

    @contextlib.contextmanager
    def passing(self, last: bool) -> Iterator[None]:
        """The context of one pass, forward and backward."""
        exchange = last or self.sync == "every"
        if self.sharded:
            module: Any = self.module
            module.set_requires_gradient_sync(exchange)
            # Weights that stay gathered must go with the last pass: later ones would use this step's.
            module.set_reshard_after_backward(last or self.reshard)
            yield
        elif not exchange and (no_sync := getattr(self.module, "no_sync", None)) is not None:
            with no_sync():
                yield
        else:
            yield


def exchange_for(
    module: nn.Module, layers: Sequence[nn.Module], config: TrainingConfig, world: World, device: torch.device
) -> Exchange:
    """The module spread over the processes as the configuration says. Raises ConfigError."""
    if world.size == 1:
        return Exchange(module)
    check_parallel(config, world.size, world.local_size)
    if config.parallel == "ddp":
        return Exchange(_ddp(module, config, device), config.sync, world.size)
    return _sharded(module, layers, config, world, device)


def flat_sum(values: Sequence[float], device: torch.device, world: World) -> list[float]:
    """Values summed over all processes, as one small bucket."""
    if world.size == 1:
        return list(values)
    import torch.distributed as dist

    together = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(together)
    return [float(value) for value in together]


def _ddp(module: nn.Module, config: TrainingConfig, device: torch.device) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    with warnings.catch_warnings():
        # Its successor, forward_sync_buffers, is not in all versions that we take.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        return DistributedDataParallel(
            module,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=25.0 if config.bucket_mb == "auto" else config.bucket_mb,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )


def _sharded(
    module: nn.Module, layers: Sequence[nn.Module], config: TrainingConfig, world: World, device: torch.device
) -> Exchange:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if config.parallel == "hsdp":
        sizes = (world.size // world.local_size, world.local_size)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (world.size,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(
        param_dtype=None if config.precision == "fp32" else torch.bfloat16,
        reduce_dtype=torch.bfloat16 if config.reduce_precision == "bf16" else torch.float32,
        cast_forward_inputs=False,
    )
    reshard = config.reshard is True
    size = 1 if config.layers_per_group == "auto" else config.layers_per_group
    groups = [list(layers[first : first + size]) for first in range(0, len(layers), size)]
    for group in groups:
        chosen: Any = group if len(group) > 1 else group[0]
        fully_shard(chosen, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    _prefetch(groups, 1 if config.prefetch_layers == "auto" else config.prefetch_layers)
    return Exchange(module, config.sync, world.size, True, reshard)


def _prefetch(groups: Sequence[Sequence[Any]], ahead: int) -> None:
    """Gather the weights of the next groups while one computes, forward and backward.

    FSDP itself gathers one group ahead in backward; in forward only when it is told to.
    """
    if not ahead:
        return
    heads = [group[0] for group in groups]
    for place, head in enumerate(heads):
        if following := heads[place + 1 : place + 1 + ahead]:
            head.set_modules_to_forward_prefetch(following)
        if before := heads[max(place - ahead, 0) : place][::-1]:
            head.set_modules_to_backward_prefetch(before)
