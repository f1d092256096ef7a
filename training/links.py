"""Which GPUs of this node reach each other over NVLink, as NVML says.

Invariant: a pair counts as linked only when NVML says so; without NVML nothing is claimed. A missing link is
a warning that names the pair: one slow pair slows every collective of the node.
"""

import importlib
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any


def mesh_lines(gpus: Sequence[int] | None = None, nvml: Any = None) -> list[str]:
    """The mesh in words: one line for a full one, else one for each pair that lacks a link."""
    nvml = nvml or importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        gpus = gpus if gpus is not None else visible_gpus(nvml.nvmlDeviceGetCount())
        linked = _linked(gpus, nvml)
    except nvml.NVMLError as error:
        return [f"NVLink: not known: {error}"]
    missing = [pair for pair, there in linked.items() if not there]
    if not missing:
        return [f"NVLink: a full mesh of {len(gpus)} GPUs"]
    if len(missing) == len(linked):
        return [f"NVLink: none between {len(gpus)} GPUs; collectives go over PCIe"]
    return [
        f"warning: NVLink: GPUs {left} and {right} are not linked; every collective waits for them"
        for left, right in missing
    ]


def visible_gpus(count: int, environment: Mapping[str, str] = os.environ) -> list[int]:
    """NVML's indices of the GPUs that this process may use: all, or those that are listed by number."""
    listed = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return (
        [int(name) for name in listed]
        if all(name.strip().isdecimal() for name in listed)
        else [*range(count)]
    )


def _linked(gpus: Sequence[int], nvml: Any) -> dict[tuple[int, int], bool]:
    handles = {gpu: nvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in gpus}
    return {
        (left, right): nvml.nvmlDeviceGetP2PStatus(
            handles[left], handles[right], nvml.NVML_P2P_CAPS_INDEX_NVLINK
        )
        == nvml.NVML_P2P_STATUS_OK
        for left, right in itertools.combinations(gpus, 2)
    }
