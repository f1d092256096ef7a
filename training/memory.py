"""How much memory a training step takes on each GPU, before anything runs.

`predict` adds up what a step holds at its fullest moment: weights, gradients, the optimizer's moments,
activations, logits, communication buffers, and what CUDA and NCCL take for themselves. It is arithmetic on
the shape, so it answers at once and without torch.

Invariant: every tensor that a layer keeps for its backward pass stands in `_LAYER`, as torch keeps it for
transformers' Llama with scaled-dot-product attention and no mask; the tests hold the sum against torch's
MemTracker. The cost of plainness: the allocator's fragmentation is not in it, leave a tenth free.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

from training.models import ModelError, Shape

Checkpointing = Literal["none", "selective", "full"]
Sharding = Literal["none", "ddp", "fsdp", "hsdp"]
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
SHARDING: tuple[Sharding, ...] = ("none", "ddp", "fsdp", "hsdp")
PRECISIONS = ("fp32", "bf16", "fp8", "fp4")
GIB = 2**30


@dataclass(frozen=True)
class Layout:
    """How a step is laid out on the GPUs. The defaults are one GPU.

    `gpus` are all of them: data parallel ranks times `tensor` × `pipeline` × `context`. `shard_gpus` is
    how many data parallel ranks share one copy of the state with `hsdp` (a node's; all of them with `fsdp`).
    `sync_last` keeps gradients whole until the last micro-batch, so that they are reduced once a step.
    `loss_chunk` is how many tokens' logits exist at a time; None is all of a micro-batch.
    """

    seq_len: int
    micro_batch: int = 1  # sequences in one pass of one data parallel rank
    accumulation: int = 1  # passes in a step
    precision: str = "bf16"  # of the matmuls; master weights and moments are always fp32
    checkpointing: Checkpointing = "none"
    sharding: Sharding = "none"
    gpus: int = 1
    shard_gpus: int = 8
    reshard_after_forward: bool = True
    sync_last: bool = True
    loss_chunk: int | None = None
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def data_parallel(self) -> int:
        """Ranks that see different sequences."""
        return max(self.gpus // (self.tensor * self.pipeline * self.context), 1)

    @property
    def shards(self) -> int:
        """Ranks that share one copy of weights, gradients and moments (context ranks do as well)."""
        ranks = self.data_parallel * self.context
        return {"fsdp": ranks, "hsdp": min(self.shard_gpus, ranks)}.get(self.sharding, 1)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the fullest moment of a step, which `moment` names."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    communication: int
    context: int
    moment: str

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what holds them."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "moment"}

    @property
    def total(self) -> int:
        """Bytes altogether."""
        return sum(self.parts.values())


def predict(shape: Shape, layout: Layout) -> Memory:
    """Memory of the fullest GPU. Raises ModelError for a model with experts, or a layout that cannot be."""
    _check(shape, layout)
    return max(_moments(shape, layout), key=lambda memory: memory.total)


def largest_micro_batch(shape: Shape, layout: Layout, memory_bytes: float, spare: float = 0.1) -> int:
    """How many sequences fit in one pass when a share of `spare` is left free; 0 when none does."""
    room = memory_bytes * (1 - spare)

    def fits(size: int) -> bool:
        return predict(shape, replace(layout, micro_batch=size)).total <= room

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 2**20:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def layer_activations(shape: Shape, layout: Layout, checkpointing: Checkpointing | None = None) -> int:
    """Bytes that one layer keeps from its forward pass to its backward pass, for one micro-batch."""
    mode = checkpointing or layout.checkpointing
    column = _column(layout)
    tokens = layout.micro_batch * math.ceil(layout.seq_len / layout.context)
    per_token = sum(
        kept.width(shape) * kept.bytes[column] * (kept.copies if mode == "none" else 1)
        for kept in _LAYER
        if mode in kept.modes
    )
    # Tensor parallelism splits heads and MLP, the sequence parallelism that goes with it the rest.
    return math.ceil(tokens * per_token / layout.tensor)


@dataclass(frozen=True)
class _Kept:
    """A tensor that a layer keeps: its width for a token, and its bytes per element in fp32, under autocast,
    and with bf16 weights. `copies` is how often it is kept without checkpointing."""

    what: str
    width: Callable[[Shape], int]
    bytes: tuple[float, float, float]
    modes: tuple[str, ...] = ("none",)
    copies: int = 1


def _hidden(shape: Shape) -> int:
    return shape.hidden


def _queries(shape: Shape) -> int:
    return shape.heads * shape.head_dim


def _keys(shape: Shape) -> int:
    return shape.kv_heads * shape.head_dim


def _ffn(shape: Shape) -> int:
    return shape.ffn


def _one(shape: Shape) -> int:
    return 1


_FP32, _AUTOCAST, _BF16 = range(3)
# Selective checkpointing keeps the results of attention and of every second matmul (queries, values, gate,
# down: what torchtitan calls "selective op"); full checkpointing keeps the input of the layer.
_LAYER: tuple[_Kept, ...] = (
    _Kept("input of the layer", _hidden, (4, 4, 2), ("full", "selective")),
    _Kept("fp32 input of each norm", _hidden, (4, 4, 4), copies=2),
    _Kept("normalized input before its scale", _hidden, (4, 4, 2), copies=2),
    _Kept("inverse deviation of each norm", _one, (4, 4, 4), copies=2),
    _Kept("input of queries, keys and values", _hidden, (4, 0, 2)),
    _Kept("input of gate and up", _hidden, (4, 0, 2)),
    # Autocast makes a copy for each linear layer, fp32 norms cannot share theirs.
    _Kept("bf16 copies of linear inputs", _hidden, (0, 2, 0), copies=5),
    _Kept("queries", _queries, (4, 2, 2), ("none", "selective")),
    _Kept("keys", _keys, (4, 2, 2)),
    _Kept("values", _keys, (4, 2, 2), ("none", "selective")),
    _Kept("attention", _queries, (4, 2, 2), ("none", "selective")),
    _Kept("log-sum-exp of attention", lambda shape: shape.heads, (4, 4, 4), ("none", "selective")),
    _Kept("gate", _ffn, (4, 2, 2), ("none", "selective")),
    _Kept("activated gate, up and their product", _ffn, (4, 2, 2), copies=3),
    _Kept("down", _hidden, (4, 2, 2), ("selective",)),
)
# At the widest moment of a layer's backward pass the MLP's three wide tensors have gradients, and their
# product is gone. Of logits: in fp32, their log-softmax, and the gradient of it.
_BACKWARD_WIDE = 2
_LOGITS_BYTES = 12
_CUDA_CONTEXT, _NCCL = int(1.0 * GIB), int(1.5 * GIB)  # 0.5-2 and 1-2 GiB are seen


def _column(layout: Layout) -> int:
    if layout.precision == "fp32":
        return _FP32
    # Sharded weights are gathered in bf16; elsewhere autocast casts fp32 weights as it meets them.
    return _BF16 if layout.sharding in ("fsdp", "hsdp") else _AUTOCAST


def _moments(shape: Shape, layout: Layout) -> list[Memory]:
    """The moments of a step that can be its fullest.

    Between the first and the last layer of the backward pass activations go and gradients come, both evenly,
    so that only the ends count.
    """
    column, compute = _column(layout), 4 if layout.precision == "fp32" else 2
    fully = layout.sharding in ("fsdp", "hsdp")
    tokens = layout.micro_batch * math.ceil(layout.seq_len / layout.context)
    layers = math.ceil(shape.layers / layout.pipeline)
    layer = shape.layer_parameters // layout.tensor
    ends = (shape.embedding_parameters if layout.pipeline > 1 else shape.end_parameters) // layout.tensor
    head = shape.embedding_parameters // layout.tensor  # its gradient comes first, the input embedding's last
    own = layers * layer + ends

    weights = 4 * own // layout.shards
    gathered = reduced = 0
    if fully:
        weights += compute * ends  # these stay gathered
        gathered = compute * layer if layout.reshard_after_forward else 0  # the next one, while one is in use
        reduced = 4 * layer
    elif column == _AUTOCAST:  # the bf16 copies that the backward pass needs; recomputation makes them anew
        weights += 2 * (layer * layers if layout.checkpointing == "none" else 0)
        weights += 2 * head

    kept = layer_activations(shape, layout)
    # The stage that comes first in 1F1B holds as many micro-batches as there are stages.
    waiting = kept * layers * (layout.pipeline - 1)
    outside = tokens * shape.hidden * (8 + 2 * compute) // layout.tensor  # embedded tokens, the last norm
    logits = min(tokens, layout.loss_chunk or tokens) * shape.vocab * _LOGITS_BYTES // layout.tensor
    passing = _passing(shape, layout, kept)

    whole = not fully or (layout.accumulation > 1 and layout.sync_last)
    every = 4 * own // (1 if whole else layout.shards)
    held = every if layout.accumulation > 1 else 0  # of the passes before

    def gradients(done: int) -> int:
        """Bytes of gradients when the backward pass of `done` layers is over."""
        if not fully:
            return held or 4 * (head + done * layer)
        if held and whole:
            return held
        # The head's wait for those of the input embedding; those of the layer before are being reduced.
        return compute * head + max(held, 4 * max(done - 1, 0) * layer // layout.shards)

    def backward(moment: str, done: int) -> Memory:
        in_use = 0
        if fully:
            in_use = compute * layer * (1 if layout.reshard_after_forward else layers - done)
        return Memory(
            weights=weights + in_use,
            gradients=gradients(done),
            optimizer=8 * own // layout.shards,
            activations=waiting + kept * (layers - done) + passing,
            logits=0,
            communication=gathered + (reduced if done else 0),
            context=_system(layout),
            moment=moment,
        )

    first = backward("the backward pass of the last layer", 0)
    loss = replace(
        first,
        weights=weights + (0 if layout.reshard_after_forward or not fully else compute * layer * layers),
        gradients=held,
        activations=waiting + outside + kept * layers,
        logits=logits,
        communication=0,
        moment="the loss",
    )
    step = replace(
        first,
        weights=weights,
        gradients=every,
        activations=0,
        communication=0,
        moment="the optimizer's step",
    )
    return [loss, first, backward("the backward pass of the first layer", layers - 1), step]


def _passing(shape: Shape, layout: Layout, kept: int) -> int:
    """Bytes that the backward pass of one layer holds for as long as it lasts."""
    compute = 4 if layout.precision == "fp32" else 2
    autocast = _column(layout) == _AUTOCAST
    recomputed = 0
    if layout.checkpointing != "none":
        recomputed = layer_activations(shape, layout, "none")
        recomputed -= kept if layout.checkpointing == "selective" else 0
        recomputed += 2 * shape.layer_parameters // layout.tensor if autocast else 0
    tokens = layout.micro_batch * math.ceil(layout.seq_len / layout.context)
    wide = tokens * (_BACKWARD_WIDE * shape.ffn + shape.hidden) * compute
    down = shape.ffn * shape.hidden * (4 if autocast else compute)  # the first to have a gradient
    return recomputed + (wide + down) // layout.tensor


def _system(layout: Layout) -> int:
    """What CUDA and NCCL take for themselves."""
    return 0 if layout.device == "cpu" else _CUDA_CONTEXT + (_NCCL if layout.gpus > 1 else 0)


def sized(bytes_: float) -> str:
    """Bytes as people say them."""
    return f"{bytes_ / GIB:.1f} GiB" if bytes_ >= GIB / 10 else f"{bytes_ / 2**20:.1f} MiB"


def _check(shape: Shape, layout: Layout) -> None:
    if shape.experts:
        raise ModelError("memory is predicted for dense models; this one has experts")
    group = layout.tensor * layout.pipeline * layout.context
    if layout.gpus % group:
        raise ModelError(f"gpus: {layout.gpus}; expected a multiple of tensor × pipeline × context = {group}")
    for name, value, known in (
        ("precision", layout.precision, PRECISIONS),
        ("checkpointing", layout.checkpointing, CHECKPOINTING),
        ("sharding", layout.sharding, SHARDING),
    ):
        if value not in known:
            raise ModelError(f"{name}: {value!r}; expected one of {', '.join(known)}")
    for name in ("seq_len", "micro_batch", "accumulation", "gpus"):
        if getattr(layout, name) < 1:
            raise ModelError(f"{name}: {getattr(layout, name)}; expected 1 or more")
