"""What `auto` becomes when nothing is measured: rules and predictions, each with its reason.

Invariant: every process of a run has the same levers: the first one decides, as the memory that is free
differs from node to node, and tells the others. What the tuner has measured stands in the configuration
already and is left as it is.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from training import models
from training.config import LEVERS, ConfigError, TrainingConfig
from training.host_memory import available_bytes, keep_freed_memory
from training.memory import sized
from training.processes import World

if TYPE_CHECKING:
    import torch

GIB = 2**30
GRADIENT_BUCKETS = 8  # ddp exchanges a step's gradients in about so many parts, to overlap them
MOST_LOGITS = 16 << 20  # that exist at one time when `loss_chunk` is auto: 64 MB in fp32
GROUP_MB = 64  # fsdp: groups of layers at least this large


def prepare_device(config: TrainingConfig, world: World, log: Callable[[str], None]) -> "torch.device":
    """Set what must be set before torch touches the device; the device of this process."""
    for name, value in config.nccl.items():
        os.environ[name] = value
        log(f"{name}={value}, as the configuration says")
    if config.expandable_segments is not False:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import torch

    if torch.cuda.is_available():
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
        return device
    if config.keep_host_memory is not False:
        keep_freed_memory()
    return torch.device("cpu")


def resolve(
    config: TrainingConfig, world: World, device: "torch.device"
) -> tuple[TrainingConfig, dict[str, str]]:
    """The configuration without any `auto`, and the reason for each. Raises ConfigError.

    Processes of one run must all ask, in their process group.
    """
    if world.size == 1:
        return _decided(config, world, device)
    import torch.distributed as dist

    told: list[Any] = [None]
    if world.rank == 0:
        try:
            found, reasons = _decided(config, world, device)
            told = [({name: getattr(found, name) for name in LEVERS}, reasons, "")]
        except ConfigError as error:
            told = [({}, {}, str(error))]
    dist.broadcast_object_list(told, 0)
    levers, reasons, problem = told[0]
    if problem:
        raise ConfigError(problem)
    return config.model_copy(update=levers), reasons


def _decided(
    config: TrainingConfig, world: World, device: "torch.device"
) -> tuple[TrainingConfig, dict[str, str]]:
    from training.tuner import Machine, best_predicted

    open_levers = [name for name in LEVERS if getattr(config, name) == "auto"]
    machine = Machine.of(device, config.memory_gb)
    changes, reasons = _by_rule(config, world, device, machine.memory_bytes)
    config = config.model_copy(update=changes)
    if any(getattr(config, name) == "auto" for name in LEVERS):
        chosen, why = best_predicted(config, world.size, machine)
        changes |= chosen
        reasons |= dict.fromkeys(chosen, why)
        config = config.model_copy(update=chosen)
    config.accumulation_for(world.size)
    return config, {name: f"{getattr(config, name)}: {reasons[name]}" for name in open_levers}


def _by_rule(
    config: TrainingConfig, world: World, device: "torch.device", memory: float | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of the levers that need no measuring, and the reasons."""
    gpu = device.type == "cuda"
    own = config.model.startswith(models.MODULE)
    shape = None if own else models.shape_of(config.model)
    state = 16 * shape.parameters if shape else 0  # bytes: fp32 weights, gradients, both moments
    many = world.size > 1
    whole_fits = memory is None or state <= 0.5 * memory
    nodes = world.size // world.local_size
    if not many or (whole_fits and config.precision != "bf16_master"):
        parallel = ("ddp", "one process" if not many else f"the state of {state / GIB:.1f} GiB fits whole")
    elif nodes > 1 and world.local_size > 1 and memory and state / world.local_size <= 0.5 * memory:
        parallel = ("hsdp", f"{nodes} nodes, each of which can hold the state in shards")
    else:
        parallel = ("fsdp", f"the state of {state / GIB:.1f} GiB is sharded over {world.size} processes")
    layers = shape.layers if shape else 1
    layer_mb = 4 * shape.matmul_parameters / layers / 1e6 if shape else GROUP_MB
    group = min(max(1, round(GROUP_MB / layer_mb)), max(layers // 2, 1))
    bucket = min(max(4 * (shape.parameters if shape else 0) / 1e6 / GRADIENT_BUCKETS, 4.0), 100.0)
    gathered = 4 * (shape.parameters if shape else 0) / 2  # bf16 weights, not given back between passes
    keeps = memory is None or (state / world.size + gathered) <= 0.5 * memory
    rules: dict[str, tuple[Any, str]] = {
        "parallel": parallel,
        "reshard": (not keeps, "the gathered weights fit" if keeps else "memory asks for it"),
        "sync": _sync(state / 4, memory, parallel[0] if config.parallel == "auto" else config.parallel),
        "layers_per_group": (group, f"a layer has {layer_mb:.0f} MB; groups of {GROUP_MB} MB or more"),
        "prefetch_layers": (1, "one group is gathered while another computes"),
        "bucket_mb": (round(bucket, 1), f"about {GRADIENT_BUCKETS} exchanges a step"),
        "attention": _attention(gpu, own, config.seq_len),
        "loss_chunk": loss_chunk_for(shape.vocab if shape else None),
        "pinned": (gpu, "GPU" if gpu else "no GPU"),
        "prefetch_batches": (1, "the next batch is made while one computes"),
        "loader_workers": (int(gpu), "the host idles" if gpu else "the processor computes"),
        "keep_host_memory": (not gpu, "GPU" if gpu else "CPU: pages are not cleared again in each pass"),
        "adapt": (
            config.micro_batch == "auto" or "micro_batch" in (config.record or {}).get("chosen", {}),
            "as micro_batch is auto or not",
        ),
        "expandable_segments": (gpu, "GPU" if gpu else "no GPU"),
    }
    open_rules = {name: rule for name, rule in rules.items() if getattr(config, name) == "auto"}
    return (
        {name: value for name, (value, _) in open_rules.items()},
        {name: why for name, (_, why) in open_rules.items()},
    )


def _sync(gradient: float, memory: float | None, parallel: str) -> tuple[str, str]:
    """When gradients are exchanged: sharded ones are whole on each process until then."""
    if parallel == "ddp" or memory is None or gradient <= 0.25 * memory:
        return "last", "once a step"
    return "every", f"the whole gradient of {gradient / GIB:.1f} GiB would be held between passes"


def _attention(gpu: bool, own: bool, seq_len: int) -> tuple[str, str]:
    """Which attention, and why."""
    if gpu:
        return "library", "kernels of GPUs skip what a causal mask hides"
    if own:
        return "library", "the module has its own"
    if seq_len <= 128:  # one block
        return "library", f"{seq_len} tokens are too few to divide"
    return "blocks", "CPU: the library computes what the causal mask hides"


def loss_chunk_for(vocab: int | None) -> tuple[int, str]:
    """How many tokens' logits exist at one time when nobody says, and why."""
    if vocab is None:
        return 0, "the module makes its own loss"
    return max(128, 1 << ((MOST_LOGITS // vocab).bit_length() - 1)), f"a vocabulary of {vocab}"


def check_memory(config: TrainingConfig, world: World, device: "torch.device") -> None:
    """Refuse a resolved configuration that will not fit, and say what takes the room. Raises ConfigError."""
    from training.tuner import predicted_bytes

    free = config.memory_gb * 1e9 if config.memory_gb else available_bytes(device)
    found = predicted_bytes(config, world.size)
    if found is None or free is None:
        return
    total, parts = found
    available = free if device.type == "cuda" or config.memory_gb else free / world.local_size
    if total > available:
        largest = max(parts, key=lambda name: parts[name])
        raise ConfigError(
            f"micro_batch: {config.micro_batch}; needs {sized(total)}, {sized(available)} are "
            f"free ({largest} take {sized(parts[largest])}); expected a smaller micro_batch, "
            "activation_checkpointing: full, or more processes with parallel: fsdp"
        )
