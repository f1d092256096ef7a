"""What torch's own trackers count for a step of transformers' Llama, on fake tensors."""

import contextlib
from dataclasses import replace
from typing import Any

from training.memory import Layout
from training.models import Shape

VOCAB = 8192


def shape_with(layers: int, hidden: int = 1024, heads: int = 8, kv_heads: int = 2) -> Shape:
    return Shape(layers, hidden, 7 * hidden // 2, heads, kv_heads, hidden // heads, VOCAB)


def model_of(shape: Shape, dtype: str = "float32") -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    make: Any = LlamaConfig
    config = make(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def no_mask() -> Any:
    """As with real tensors: fake ones make transformers build a mask that attention then keeps."""
    from transformers.models.llama import modeling_llama as module

    modeling_llama: Any = module
    made = modeling_llama.create_causal_mask
    modeling_llama.create_causal_mask = lambda *given, **named: None
    try:
        yield
    finally:
        modeling_llama.create_causal_mask = made


def checkpoint_layers(model: Any, mode: str) -> None:
    """Recompute layers: wholly, or all but attention and every second matmul."""
    if mode == "none":
        return
    from torch.utils import checkpoint as module

    checkpointing: Any = module
    for layer in model.model.layers:
        contexts = (
            {}
            if mode == "full"
            else {"context_fn": lambda: checkpointing.create_selective_checkpoint_contexts(_policy())}
        )

        def again(*given: Any, run: Any = layer.forward, contexts: Any = contexts, **named: Any) -> Any:
            return checkpointing.checkpoint(run, *given, use_reentrant=False, **contexts, **named)

        layer.forward = again


def _policy() -> Any:
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    seen = {True: 0, False: 0}
    attention = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    )

    def policy(context: Any, operation: Any, *given: Any, **named: Any) -> Any:
        kept = operation in attention
        if operation == torch.ops.aten.mm.default:
            seen[context.is_recompute] += 1
            kept = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def peak_of_step(shape: Shape, layout: Layout) -> int:
    """Bytes at the fullest moment of the second step, on one GPU."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    bf16 = layout.precision == "bf16"
    with FakeTensorMode(), no_mask():
        model = model_of(shape)
        checkpoint_layers(model, layout.checkpointing)
        tokens = torch.zeros(layout.micro_batch, layout.seq_len, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for step in range(2):
                if step:
                    tracker.reset_mod_stats()
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = _loss(model, tokens)
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()
        return _total(tracker.get_tracker_snapshot("peak"))


def peak_of_sharded_step(shape: Shape, layout: Layout) -> int:
    """The same on one of `layout.gpus` with FSDP2, bf16 gathered and fp32 reduced."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=layout.gpus, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (layout.gpus,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        how: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        with FakeTensorMode(), no_mask():
            model = model_of(shape)
            for layer in model.model.layers:
                fully_shard(layer, reshard_after_forward=layout.reshard_after_forward, **how)
            fully_shard(model, **how)
            checkpoint_layers(model, layout.checkpointing)
            tokens = torch.zeros(layout.micro_batch, layout.seq_len, dtype=torch.long)
            # The fused optimizer is taken apart on fake tensors, which costs memory that a real one does not.
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            tracker = FSDPMemTracker(model, optimizer)
            with tracker:
                for step in range(2):
                    _loss(model, tokens).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if not step:
                        tracker.reset_mod_stats()
            return _total(tracker.get_tracker_snapshot("peak"))
    finally:
        dist.destroy_process_group()


def kept_by_a_layer(shape: Shape, layout: Layout) -> int:
    """Bytes of activations that one more layer keeps after a forward pass with weights in bf16."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

    found = []
    for layers in (1, 2):
        with FakeTensorMode(), no_mask():
            model = model_of(replace(shape, layers=layers), "bfloat16")
            checkpoint_layers(model, layout.checkpointing)
            tokens = torch.zeros(layout.micro_batch, layout.seq_len, dtype=torch.long)
            tracker = MemTracker()
            tracker.track_external(model)
            with tracker:
                hidden = model.model(input_ids=tokens).last_hidden_state
                now = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
                found.append(now[_MemRefType.ACT] + now[_MemRefType.TEMP])
                del hidden
    return int(found[1] - found[0])


def _loss(model: Any, tokens: Any) -> Any:
    import torch

    logits = model(input_ids=tokens).logits.float()
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), tokens.view(-1))


def _total(snapshot: Any) -> int:
    import torch

    return int(snapshot[torch.device("cpu")]["Total"])
