"""How long a training step takes on a layout of GPUs, from a roofline with a few fitted constants.

A step's time is a sum of parts: matmuls and attention at a share of their precision's peak, elementwise
work at the memory's speed, communication over NVLink and over the network as far as it is not hidden, and
what memory capacity costs: recomputed layers and pipeline bubbles. Invariant: the constants in `EFFICIENCY`
are what `training.fit` finds on half of the published rows; everything else is counted. The cost of
plainness: one number for each effect, the same for every maker's software.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from training.flops import recomputed_per_token, work_per_token
from training.hardware import Gpu, HardwareError
from training.memory import CHECKPOINTING, Layout, Memory
from training.memory import predict as predict_memory
from training.models import ModelError, Shape

CONVENTION = "causal"  # the published rows' own
# What a precision's matmuls are called in the table of GPUs, and what memory they take.
PEAK_OF = {"fp32": "fp32", "bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "fp4": "fp4"}
LOSS_CHUNK = 2048
SPARE = 0.1  # of the memory, for fragmentation
INTERLEAVE = 4  # chunks that each pipeline stage is cut in, where it has as many layers


@dataclass(frozen=True)
class Efficiency:
    """The fitted constants.

    Matmuls reach the share `matmul` of a peak that has a watt for each TFLOP/s, and less, by the power
    `throttling`, of one that has fewer: long matmuls run into the board's limit before the peak.
    """

    matmul: float
    throttling: float
    microscaling: float  # what is left of it when each 32 values have a scale of their own
    softmax: float  # what attention does beside its matmuls, as a multiple of its exponentials
    traffic: float  # how often elementwise data moves, as a multiple of the least
    unfused: float  # how much more of it moves in bf16 runs, all published with other software
    exposed: float  # share of communication that nothing hides

    def share(self, gpu: Gpu, precision: str) -> float:
        """Of the peak of a precision, what its matmuls reach on a GPU."""
        peak = gpu.peaks[PEAK_OF[precision]]
        watts_per_tflops = (gpu.watts or TYPICAL_WATTS) / (peak / 1e12)
        throttled = float(min(watts_per_tflops, 1.0) ** self.throttling)
        return min(self.matmul * throttled, 0.95)


TYPICAL_WATTS, TYPICAL_EXPONENTIALS, HEAD_DIM = 700.0, 4.0, 128
EFFICIENCY = Efficiency(
    matmul=0.7904,
    throttling=0.2186,
    microscaling=0.9823,
    softmax=2.5788,
    traffic=4.0728,
    unfused=4.055,
    exposed=0.4644,
)


@dataclass(frozen=True)
class Parts:
    """Seconds of a step by what limits it."""

    compute: float
    hbm: float
    nvlink: float
    network: float
    memory_capacity: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.hbm + self.nvlink + self.network + self.memory_capacity

    @property
    def limiting(self) -> str:
        """What costs most beside the matmuls, when it is a tenth of the step or more; else compute."""
        others = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "compute"}
        worst = max(others, key=lambda name: others[name])
        return worst if others[worst] * 10 >= self.total else "compute"


def step_parts(
    shape: Shape, gpu: Gpu, layout: Layout, precision: str, constants: Efficiency = EFFICIENCY
) -> Parts:
    """Where the time of one step goes; the global batch is what the layout makes of it."""
    group = layout.tensor * layout.pipeline * layout.context
    micro = layout.micro_batch * layout.seq_len  # tokens that a group works on at a time
    tokens = micro * layout.accumulation
    rate, attention_rate = _rates(gpu, precision, constants)
    work = work_per_token(shape, layout.seq_len, CONVENTION)
    again = recomputed_per_token(shape, layout.seq_len, layout.checkpointing, CONVENTION)
    compute = tokens / group * (work.linear / rate + work.attention / attention_rate)
    recompute = tokens / group * (again.linear / rate + again.attention / attention_rate)
    hbm = _traffic(shape, layout, tokens / group, precision, constants) / (gpu.memory_tb_per_s * 1e12)
    nvlink, network = _communication(shape, gpu, layout, tokens)
    busy = compute + recompute + hbm
    chunks = max(min(INTERLEAVE, shape.layers // layout.pipeline), 1)
    bubble = (busy + nvlink * constants.exposed) * (layout.pipeline - 1) / (layout.accumulation * chunks)
    unhidden = _unhidden(nvlink, network, busy, constants.exposed)
    return Parts(compute, hbm, *unhidden, memory_capacity=recompute + bubble)


def candidates(shape: Shape, gpu: Gpu, gpus: int, seq_len: int, batch: int) -> Iterator[Layout]:
    """Every layout worth a look: `batch` sequences a step on `gpus`, whatever memory they take."""
    for tensor in _powers(min(8, gpu.domain_gpus, shape.kv_heads)):
        for pipeline in _powers(min(16, shape.layers)):
            for context in _powers(max(seq_len // 4096, 1)):
                group = tensor * pipeline * context
                if gpus % group or batch % (gpus // group):
                    continue
                own = batch // (gpus // group)
                for micro in _powers(8):
                    if own % micro:
                        continue
                    base = Layout(seq_len, micro, own // micro, gpus=gpus, loss_chunk=LOSS_CHUNK)
                    base = replace(base, tensor=tensor, pipeline=pipeline, context=context)
                    yield from _variants(base)


def fastest(
    shape: Shape, gpu: Gpu, gpus: int, seq_len: int, batch: int, precision: str, constants: Efficiency
) -> tuple[Layout, Parts, Memory]:
    """The layout whose step is shortest among those that fit. Raises ModelError when none does."""
    room = gpu.memory_gb * 1e9 * (1 - SPARE)
    timed = [
        (step_parts(shape, gpu, layout, precision, constants), layout)
        for layout in candidates(shape, gpu, gpus, seq_len, batch)
    ]
    if not timed:
        raise ModelError(f"gpus: {gpus}; no layout shares {batch} sequences evenly, expected a divisor")
    least = math.inf
    for parts, layout in sorted(timed, key=lambda pair: pair[0].total):
        stated = replace(layout, precision="fp32" if precision == "fp32" else "bf16")
        memory = predict_memory(shape, stated)
        if memory.total <= room:
            return layout, parts, memory
        least = min(least, memory.total)
    raise ModelError(
        f"gpus: {gpus} {gpu.name} do not hold it: each needs {least / 1e9:.0f} GB in the leanest layout, "
        f"{room / 1e9:.0f} of {gpu.memory_gb:g} GB can be used"
    )


def _rates(gpu: Gpu, precision: str, constants: Efficiency) -> tuple[float, float]:
    """FLOP/s of linear layers, and of attention, which runs in bf16 where the matmuls are narrower."""
    if precision not in PEAK_OF:
        raise ModelError(f"precision: {precision!r}; expected one of {', '.join(PEAK_OF)}")
    if PEAK_OF[precision] not in gpu.peaks:
        raise HardwareError(f"{gpu.name}: no peak in {precision}; expected one of {', '.join(gpu.peaks)}")
    linear = gpu.peaks[PEAK_OF[precision]] * constants.share(gpu, precision)
    linear *= constants.microscaling if precision == "mxfp8" else 1.0
    own = "fp32" if precision == "fp32" else "bf16"
    matmuls = gpu.peaks[own] * constants.share(gpu, own)
    # Causal FLOPs by exponentials, of which the backward pass computes each again: 6 × the head dimension.
    exponentials = (gpu.exponentials_t_per_s or TYPICAL_EXPONENTIALS) * 1e12 / constants.softmax
    attention = 1 / (1 / matmuls + 1 / (6 * HEAD_DIM * exponentials))
    return linear, attention


def _traffic(shape: Shape, layout: Layout, tokens: float, precision: str, constants: Efficiency) -> float:
    """Bytes that norms, rotations, activations, casts and residuals move, and the optimizer's own."""
    wide = shape.ffn * max(shape.experts_per_token, 1)
    moved = 2 * shape.layers * (24 * shape.hidden + 9 * wide) + 12 * shape.vocab
    own = shape.parameters / (layout.tensor * layout.pipeline * layout.shards)
    times = constants.traffic * (constants.unfused if precision == "bf16" else 1.0)
    return times * tokens * moved + 28 * own


def _communication(shape: Shape, gpu: Gpu, layout: Layout, tokens: int) -> tuple[float, float]:
    """Seconds of a step's transfers over NVLink and over the network, hidden or not."""
    inside = (gpu.nvlink_gb_per_s or gpu.network_gb_per_s) * 1e9
    outside = gpu.network_gb_per_s * 1e9
    layers = shape.layers / layout.pipeline
    own_tokens = tokens / layout.context
    # Of hidden states: two gathers and two scatters forward, and twice that backward with the gathers again.
    split = 10 * 2 * shape.hidden * (layout.tensor - 1) / layout.tensor
    around = 6 * 2 * 2 * shape.kv_heads * shape.head_dim * (layout.context - 1) / layout.tensor
    nvlink = own_tokens * layers * split / inside
    passed = own_tokens * 2 * 2 * shape.hidden / layout.tensor * (1 if layout.pipeline > 1 else 0)
    network = passed / (inside if layout.gpus <= gpu.domain_gpus else outside)
    if layout.tensor * layout.context <= gpu.domain_gpus:
        nvlink += own_tokens * layers * around / inside
    else:
        network += own_tokens * layers * around / outside

    shards = layout.shards
    own = shape.parameters / (layout.tensor * layout.pipeline)
    passes = layout.accumulation if layout.reshard_after_forward else 1
    # bf16 weights gathered, for both directions when they are let go between them; fp32 gradients scattered.
    moved = own * passes * ((4 if layout.reshard_after_forward else 2) + 4) * (shards - 1) / shards
    near = min(gpu.domain_gpus // layout.tensor, shards)  # shards within one NVLink domain
    if near >= shards:
        return nvlink + moved / inside, network
    # Rings within the domain carry most; each domain's share crosses the network once, over all its NICs.
    return nvlink + moved / inside, network + moved / (outside * max(near, 1))


def _unhidden(nvlink: float, network: float, busy: float, exposed: float) -> tuple[float, float]:
    """What is left of both when each hides behind half of the computing, but for a share `exposed`."""
    return (
        max(exposed * nvlink, nvlink - busy / 2),
        max(exposed * network, network - busy / 2),
    )


def _variants(base: Layout) -> Iterator[Layout]:
    for checkpointing in CHECKPOINTING:
        layout = replace(base, checkpointing=checkpointing)
        if layout.data_parallel * layout.context == 1:
            yield layout
            continue
        yield replace(layout, sharding="fsdp", reshard_after_forward=False)
        yield replace(layout, sharding="fsdp", reshard_after_forward=True, sync_last=False)


def _powers(most: int) -> list[int]:
    """1, 2, 4 … up to `most`."""
    return [2**power for power in range(max(most, 1).bit_length())]
