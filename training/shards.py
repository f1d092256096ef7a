"""The weights of a sharded model: each process draws or reads what it keeps, and never holds them all.

Invariant: the values are those that one process alone would have. Fresh weights are drawn from the same
random stream, in the order in which transformers draws a whole model; a directory's are read by rows. Beside
its own shards a process holds one tensor at a time. The cost: each goes through the whole random stream, and
keeps little of it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training import models


def materialise(module: nn.Module, model: Any, device: torch.device) -> None:
    """Give a model of transformers that was sharded on the meta device its memory; `module` holds it.

    Buffers have their values then, and what was tied is tied; the parameters have none yet.
    """
    module.to_empty(device=device)
    model.tie_weights()
    for part in model.modules():
        if next(part.buffers(recurse=False), None) is not None:
            model._init_weights(part)


def fill(model: Any, name: str, seed: int, layers: int | None, device: torch.device) -> None:
    """Give this process's shards their values: fresh ones for a shipped name, else the directory's.

    Raises ModelError.
    """
    parameters = dict(model.named_parameters())
    rows = {each: _own_rows(parameter) for each, parameter in parameters.items()}

    def keep(each: str, part: Tensor) -> None:
        with torch.no_grad():
            parameters[each].to_local().copy_(part)

    if name in models.SHIPPED:
        for each, whole in drawn(name, seed, layers, device):
            keep(each, whole[rows[each]])
    else:
        shapes = {each: parameter.shape for each, parameter in parameters.items()}
        read_rows(name, shapes, rows, keep)


def drawn(name: str, seed: int, layers: int | None, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The fresh weights of a shipped model, one after the other, as `models.build` draws them all."""
    whole = models.skeleton(name, layers)
    called = {module: place for place, module in whole.named_modules()}
    wanted = {each for each, _ in whole.named_parameters()}  # of tied ones the first
    torch.manual_seed(seed)
    done: set[nn.Module] = set()
    for part in (whole.base_model, whole):  # the inner model is whole before what is around it is made
        new = [module for module in part.modules() if module not in done]
        for module in new:  # torch draws when a module is made; transformers draws all of them again
            if hasattr(module, "reset_parameters"):
                _with_memory(module, device, module.reset_parameters)
        for module in new:
            if module._parameters:
                found = _with_memory(module, device, lambda: whole._init_weights(module))  # noqa: B023
                for own, value in found.items():
                    if (each := f"{called[module]}.{own}") in wanted:
                        yield each, value
        done.update(new)


def read_rows(
    directory: str,
    shapes: dict[str, torch.Size],
    rows: dict[str, slice],
    keep: Callable[[str, Tensor], None],
) -> None:
    """Read these rows of each named tensor from a Hugging Face directory, and no others.

    One whose files have the tensors under other names than the model has is loaded whole. Raises ModelError.
    """
    from safetensors import safe_open

    places: dict[str, Path] = {}
    with models.loading(directory):
        for file in sorted(Path(directory).glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                places |= {name: file for name in tensors.keys() if name in shapes}  # noqa: SIM118
    if len(places) < len(shapes):
        state = models.load(directory).state_dict()
        for name, own in rows.items():
            keep(name, state[name][own])
        return
    for name, file in places.items():
        # Opened anew for each: a file that stays open keeps the pages that were read.
        with models.loading(directory), safe_open(file, "pt") as tensors:
            stored = tensors.get_slice(name)
            if tuple(stored.get_shape()) != tuple(shapes[name]):
                raise models.not_whole(directory, "mismatched keys", [name])
            keep(name, stored[rows[name]])


def _with_memory(module: nn.Module, device: torch.device, work: Callable[[], Any]) -> dict[str, Tensor]:
    """Do something with a module whose own parameters have memory meanwhile; what they were then."""
    before = dict(module._parameters)
    for name, parameter in before.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device))
    work()
    found = {name: value.detach() for name, value in module._parameters.items() if value is not None}
    module._parameters.update(before)
    return found


def _own_rows(parameter: Any) -> slice:
    """The rows of a sharded parameter that this process keeps, as torch.chunk cuts them."""
    mesh, count = parameter.device_mesh, parameter.shape[0]
    shards = mesh.ndim - 1  # the last dimension; with HSDP the one before replicates
    each = -(-count // mesh.size(shards))
    first = min(each * mesh.get_local_rank(shards), count)
    return slice(first, min(first + each, count))
