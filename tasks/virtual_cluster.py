"""The cluster of a replay: who holds which GPU at a virtual instant, and what that adds up to.

Invariant: a GPU has at most one holder. A job begins only on GPUs that no job and no service holds, a service
gets a GPU only when no job is on it; anything else raises ConservationError, which is a mistake in the
planner or here. Figures are integrals over time, so they do not depend on how slots are cut.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tasks.cluster import Site
from tasks.trace import Demand

DUST = 1e-6


class ConservationError(Exception):
    """A GPU was about to be used twice."""


@dataclass
class Totals:
    """Sums since the begin, in GPU-seconds, and the slots (by service) in which a GPU was missing."""

    busy: float = 0.0
    wanted: dict[str, float] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    known_s: dict[str, float] = field(default_factory=dict)
    short_slots: dict[str, set[int]] = field(default_factory=dict)


class VirtualCluster:
    """GPUs by their numbers within a problem; seconds count from the begin of the window."""

    def __init__(self, site: Site, demand: Mapping[str, Demand]) -> None:
        self.places = [(node.name, index) for _, node, index in site.gpu_numbers()]
        self.number = {place: number for number, place in enumerate(self.places)}
        self.slot_s = site.slot.total_seconds()
        self.demand = demand
        # What a GPU that a service lacks for an hour costs, in the value of jobs.
        self.prices = {each.name: each.priority * each.shortage_penalty for each in site.cluster.services}
        self.now = 0.0
        self.job_on: list[str | None] = [None] * len(self.places)
        self.busy = 0
        self.lost: set[str] = set()
        self.targets: dict[str, tuple[int, ...]] = dict.fromkeys(demand, ())
        self.held: dict[str, tuple[int, ...]] = dict.fromkeys(demand, ())
        self.history: dict[str, list[tuple[float, int]]] = {name: [(0.0, 0)] for name in demand}
        self.totals = Totals(
            wanted=dict.fromkeys(demand, 0.0),
            served=dict.fromkeys(demand, 0.0),
            known_s=dict.fromkeys(demand, 0.0),
            short_slots={name: set() for name in demand},
        )

    def advance(self, to: float) -> None:
        """Let time pass; nothing changes its holder meanwhile, and no demand."""
        length = to - self.now
        if length <= 0:
            return
        self.totals.busy += self.busy * length
        middle = self.now + length / 2
        for name, demand in self.demand.items():
            wanted, held = demand.at(middle), len(self.held[name])
            if math.isnan(wanted):
                continue
            self.totals.known_s[name] += length
            self.totals.wanted[name] += wanted * length
            self.totals.served[name] += min(wanted, held) * length
            if wanted > held + DUST:
                slots = range(int(self.now / self.slot_s + DUST), math.ceil(to / self.slot_s - DUST))
                self.totals.short_slots[name].update(slots)
        self.now = to

    def start(self, job: str, gpus: Sequence[int]) -> None:
        """Give a job its GPUs. Raises ConservationError when one has a holder or its node is lost."""
        if not self.can_start(gpus):
            raise ConservationError(f"job {job} cannot begin on GPUs {list(gpus)}: {self._holders(gpus)}")
        for gpu in gpus:
            self.job_on[gpu] = job
        self.busy += len(gpus)

    def can_start(self, gpus: Sequence[int]) -> bool:
        """Whether nothing holds these GPUs."""
        return all(
            self.job_on[gpu] is None and self.places[gpu][0] not in self.lost for gpu in gpus
        ) and not (set(gpus) & {gpu for held in self.held.values() for gpu in held})

    def end(self, job: str, gpus: Sequence[int]) -> None:
        """Take a job's GPUs back; services that wait for them get them."""
        for gpu in gpus:
            if self.job_on[gpu] != job:
                raise ConservationError(f"job {job} ends on GPU {gpu}, which is held by {self.job_on[gpu]}")
            self.job_on[gpu] = None
        self.busy -= len(gpus)
        self._settle()

    def serve(self, service: str, gpus: Iterable[int]) -> None:
        """Set what a service should hold; it holds of that what no job is on and no node took with it."""
        self.targets[service] = tuple(sorted(gpus))
        self._settle()

    def set_lost(self, nodes: Iterable[str]) -> None:
        """Set which nodes are gone."""
        self.lost = set(nodes)
        self._settle()

    def idle(self) -> int:
        """GPUs that nothing holds or is about to."""
        taken = {gpu for target in self.targets.values() for gpu in target}
        return sum(
            self.job_on[gpu] is None and gpu not in taken and node not in self.lost
            for gpu, (node, _) in enumerate(self.places)
        )

    def held_at(self, service: str, at: float) -> int:
        """How many GPUs a service held at a time; none before the window."""
        return next((count for when, count in reversed(self.history[service]) if when <= at), 0)

    def by_node(self, gpus: Iterable[int]) -> dict[str, frozenset[int]]:
        """GPUs as the live loop's targets say them."""
        nodes: dict[str, set[int]] = {}
        for gpu in gpus:
            node, index = self.places[gpu]
            nodes.setdefault(node, set()).add(index)
        return {node: frozenset(indices) for node, indices in nodes.items()}

    def _settle(self) -> None:
        """What services hold, in the order of the cluster file where two were told the same GPU."""
        taken: set[int] = set()
        for name, target in self.targets.items():
            self.held[name] = tuple(
                gpu
                for gpu in target
                if self.job_on[gpu] is None and gpu not in taken and self.places[gpu][0] not in self.lost
            )
            taken.update(self.held[name])
            if self.history[name][-1][1] != len(self.held[name]):
                self.history[name].append((self.now, len(self.held[name])))

    def _holders(self, gpus: Sequence[int]) -> str:
        services = {gpu: name for name, held in self.held.items() for gpu in held}
        told = {gpu: self.job_on[gpu] or services.get(gpu) for gpu in gpus}
        lost = [gpu for gpu in gpus if self.places[gpu][0] in self.lost]
        return ", ".join(f"{gpu} is held by {who}" for gpu, who in told.items() if who) or f"{lost} are lost"
