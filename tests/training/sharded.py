"""One of two gloo processes that builds a sharded model: `python -m tests.training.sharded ANSWER MODEL`.

Each leaves a JSON object in ANSWER.RANK: how many bytes building took at most, and a digest of each weight as
gathered from both and of each buffer.
"""

import hashlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from training import models

# 0.8 GB in fp32, of which no tensor has more than 32 MB.
LARGE = models.Shape(16, 1024, 2816, 16, 8, 64, 8000)


def digests(model: Any) -> dict[str, str]:
    """A digest of each weight, whole, and of each buffer."""
    found = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        whole = value.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        found[name] = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    return found


def know_large() -> None:
    """Have the large model among those that ship, and one whose embeddings are tied."""
    models.SHIPPED["large"] = (LARGE, 1024, {"rope_theta": 10000.0})
    shape, longest, rope = models.SHIPPED["llama-micro"]
    models.SHIPPED["tied"] = (replace(shape, tied=True), longest, rope)


def _peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def main(answer: str, model: str) -> None:
    """Build the model and say what it took."""
    import torch

    from training.assembly import assemble
    from training.config import TrainingConfig
    from training.processes import joined, world_from_environment

    know_large()
    models._hush()
    from transformers import LlamaForCausalLM  # noqa: F401 takes memory of its own

    world, device = world_from_environment(), torch.device("cpu")
    config = TrainingConfig(model=model, parallel="fsdp", reshard=True, loss_chunk=0, micro_batch=1)
    with joined(world, device):
        before = _peak_bytes()
        parts = assemble(config, world, device)
        took = _peak_bytes() - before
        found = digests(parts.model)
    Path(f"{answer}.{world.rank}").write_text(json.dumps({"bytes": took, "digests": found}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
