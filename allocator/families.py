"""Families of planning problems: what the jobs and the demand of the shipped scenarios have in common.

Data only; ``generate`` draws from it. Numbers are those of a day of 24 slots and a cluster of 16 to 32 GPUs.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ask:
    """A sort of job: how common it is, and the ranges that its fields are drawn from."""

    share: float
    kinds: tuple[str, ...]
    gpus: tuple[int, ...]
    slots: tuple[int, int]
    priorities: tuple[int, ...]
    deadline_share: float = 0


@dataclass(frozen=True, slots=True)
class Family:
    """What makes the problems of a family alike.

    Attributes:
        asks: sorts of jobs; a width of 0 stands for one GPU more than half of the cluster.
        node_gpus: 0 for one node as large as the cluster.
        late: share of jobs that are released after slot 0.
        demand: the shape of the first service's demand, a key of ``generate._DEMANDS``.
        peak: its highest demand, as a share of the cluster.
        ramp: as a share of the cluster.
        in_order: whether jobs queue in the order of ``asks``, else as they come.
        load: job GPU-slots asked for over all GPU-slots, from and to.
    """

    asks: tuple[Ask, ...]
    node_gpus: int
    late: float
    demand: str
    peak: tuple[float, float]
    ramp: tuple[float, float]
    in_order: bool = False
    load: tuple[float, float] = (1.2, 3.0)


_SMALL = ("batch_inference", "quantization")
FAMILIES: dict[str, Family] = {
    "contention": Family(
        asks=(
            Ask(0.25, ("training",), (8, 8, 4), (5, 9), (1,)),
            Ask(0.55, ("batch_inference", "quantization", "training"), (1, 1, 2, 2, 4), (1, 3), (3, 5, 8)),
            Ask(0.2, ("training",), (2, 4, 8), (3, 6), (3, 8, 8)),
        ),
        node_gpus=0,
        late=0.2,
        demand="flat",
        peak=(0.0, 0.15),
        ramp=(0.1, 1.0),
        in_order=True,
    ),
    "deadlines": Family(
        asks=(
            Ask(0.5, ("batch_inference", "training"), (1, 2, 2, 4, 8), (1, 6), (1, 2, 3, 5), 0.6),
            Ask(0.3, _SMALL, (1, 1, 2, 4), (1, 3), (1, 3, 5), 0.4),
            Ask(0.2, ("training",), (4, 8, 8), (2, 6), (1, 2, 5), 0.3),
        ),
        node_gpus=8,
        late=0.45,
        demand="day",
        peak=(0.2, 0.4),
        ramp=(0.1, 0.25),
    ),
    "fragmentation": Family(
        asks=(
            Ask(0.45, ("batch_inference",), (1, 2, 2, 3), (2, 7), (1, 2)),
            Ask(0.25, ("training",), (8,), (3, 4), (5, 8)),
            Ask(0.3, ("quantization",), (1, 1, 2), (1, 2), (2, 3)),
        ),
        node_gpus=0,
        late=0.1,
        demand="flat",
        peak=(0.03, 0.1),
        ramp=(0.05, 0.2),
        in_order=True,
    ),
    "light_load": Family(
        asks=(
            Ask(0.5, ("training",), (1, 2, 2, 4), (2, 4), (1, 2, 3)),
            Ask(0.5, _SMALL, (1, 1, 2), (1, 2), (1, 3)),
        ),
        node_gpus=0,
        late=0.5,
        demand="day",
        peak=(0.2, 0.3),
        ramp=(0.15, 0.3),
        load=(0.1, 0.4),
    ),
    "realtime_burst": Family(
        asks=(
            Ask(0.6, ("training",), (2, 4, 4, 8), (2, 6), (1, 1, 2, 3, 5, 8)),
            Ask(0.4, _SMALL, (1, 1, 2, 4), (1, 3), (1, 2, 3, 5, 8)),
        ),
        node_gpus=0,
        late=0.5,
        demand="burst",
        peak=(0.5, 0.8),
        ramp=(0.08, 0.2),
    ),
    "realtime_peak": Family(
        asks=(
            Ask(0.55, ("training",), (2, 4, 4, 8, 16), (4, 8), (1, 2, 2, 3, 5)),
            Ask(0.45, _SMALL, (1, 2, 2, 4), (1, 4), (2, 2, 3, 5)),
        ),
        node_gpus=0,
        late=0.25,
        demand="day",
        peak=(0.5, 0.8),
        ramp=(0.12, 0.25),
    ),
    "scale": Family(
        asks=(
            Ask(0.2, ("training",), (0,), (4, 4), (2, 3), 0.9),
            Ask(0.8, _SMALL, (2, 4, 2), (1, 4), (3, 4)),
        ),
        node_gpus=0,
        late=0.1,
        demand="flat",
        peak=(0.05, 0.1),
        ramp=(0.1, 0.2),
    ),
}
