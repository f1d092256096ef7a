"""A checkpoint's weights as a model that anything loads, for who would not wait for a run's end.

Invariant: the weights are the run's at that step, in fp32; the optimizer's part of the checkpoint is left
alone. A checkpoint names its model, and holds neither its configuration nor its tokenizer: those are of the
shipped model, or of the directory that the run began with, where this machine has it.
"""

from pathlib import Path

from training.checkpoints import STATE, CheckpointError, read_state, read_tensors
from training.models import SHIPPED, build
from training.output import write_model
from training.processes import World


def is_checkpoint(directory: Path) -> bool:
    """Whether a run's checkpoint lies there."""
    return (directory / STATE).is_file() and (directory / ".metadata").is_file()


def write_checkpoint_as_model(checkpoint: Path, directory: Path, where: str) -> None:
    """Write a Hugging Face directory. Raises CheckpointError; `where` is what it calls the checkpoint."""
    config = read_state(checkpoint).get("config", {})
    named = str(config.get("model"))
    source = None if named in SHIPPED else Path(named)
    if source is not None and not (source / "config.json").is_file():
        raise CheckpointError(
            f"{where}: is a checkpoint of {named}, whose configuration is not on this machine; expected the "
            "model/ that its training leaves at the end"
        )
    model = build(named, 0, config.get("layers"))
    weights = {f"weights.{name}": parameter.data for name, parameter in model.named_parameters()}
    read_tensors(checkpoint, weights, World())
    write_model(model, directory, source)
