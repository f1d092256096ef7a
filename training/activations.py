"""What the layers keep for backward: activation checkpointing and compilation, applied from outside.

Invariant: the model's parameters keep their names, so a checkpoint fits whatever levers were on. Recomputing
gives the same bits, as dropout's random state is restored with it. Layers are compiled one by one: the same
code serves them all, so a model of 80 layers compiles as fast as one of two; the cost is that nothing is
fused across their borders.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import training.attention  # noqa: F401 registers the operator

_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default}
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.slotwise.causal_attention.default,
}


def checkpoint_activations(layers: Sequence[nn.Module], mode: str) -> int:
    """Have layers compute activations again in backward; how many do.

    `full` keeps a layer's input alone; `selective` keeps the attention and every second matmul as well.
    """
    contexts = {"full": None, "selective": _selective}
    if mode not in contexts:
        return 0
    for layer in layers:
        layer.forward = functools.partial(_again, layer.forward, contexts[mode])
    return len(layers)


def compile_layers(layers: Sequence[nn.Module]) -> int:
    """Compile the layers, each by itself, when they first run; how many."""
    import torch._dynamo

    # One code object serves all layers, and the micro-batch may change once or twice during a run.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    for layer in layers:
        layer.compile()
    return len(layers)


def _again(forward: Any, contexts: Any, *inputs: Any, **named: Any) -> Any:
    chosen = {} if contexts is None else {"context_fn": contexts}
    return checkpoint(forward, *inputs, use_reentrant=False, **chosen, **named)


def _selective() -> Any:
    seen = {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
        if op in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op in _MATMULS:
            turn = "recompute" if context.is_recompute else "forward"
            seen[turn] += 1
            if seen[turn] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
