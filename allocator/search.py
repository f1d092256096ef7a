"""Large neighbourhood search: open a part of the plan, solve it to the end, keep what is at least as good.

A step looks at a place where a job that is out would like to be (or at a random spot, or at some slots of a
service), opens the jobs nearest to it in time and in GPUs, and lets CP-SAT place them and any that are out
in the cells that are then free. How many are opened follows from how hard the last steps were. The
invariant: the state is never worth less than before. The cost of the choice: what only a larger change can
reach is not found.
"""

from collections.abc import Callable
from random import Random
from time import perf_counter

from allocator.cells import Budget, CellModel
from allocator.improve import improve
from allocator.relaxation import Relaxation
from allocator.state import State, bits, job_cells, keeps_rules, schedule_of, state_of_schedule

_DUST = 1e-9
_FEWEST, _MOST = 4.0, 40.0  # jobs opened in a step
_MOST_GROUPS = 80  # groups of jobs that are out that may come in, in a step
_EFFORT = 0.35  # of CP-SAT in a step, in its deterministic time
_STEP_SECONDS = 3.0
_SHUFFLE = 300  # steps of fast mode's search at once


class Search:
    """A search from a state, step by step.

    Attributes:
        state, worth: the best so far.
        step_seconds: after which a step is ended, whatever its effort.
    """

    def __init__(self, relaxation: Relaxation, state: State, seed: int) -> None:
        self.step_seconds = _STEP_SECONDS
        self.relaxation = relaxation
        self.rng = Random(seed)
        self.size = 9.0
        self.steps = 0
        self.adopt(state)

    def adopt(self, state: State) -> None:
        """Go on from another state."""
        self.state = state
        self.worth = state.worth(self.relaxation)

    def run(self, until: float, enough: Callable[[], bool], steps: int | None = None) -> None:
        """Step until a moment, or until it is enough, or so many times."""
        while perf_counter() < until and not enough() and steps != 0:
            self.step(until - perf_counter())
            steps = None if steps is None else steps - 1

    def step(self, seconds: float) -> None:
        """Many small steps of fast mode's search, or one with CP-SAT, in turn."""
        if self.steps % 3 == 0:
            self.steps += 1
            until = perf_counter() + min(seconds, self.step_seconds)
            self.shuffle(_SHUFFLE, until)
        else:
            self._open(seconds)

    def shuffle(self, steps: int, until: float) -> None:
        """Let fast mode's local search work on the state."""
        schedule = improve(schedule_of(self.relaxation, self.state), steps, Random(self.rng.random()), until)
        self._keep(state_of_schedule(self.relaxation, schedule))

    def _keep(self, state: State) -> None:
        worth = state.worth(self.relaxation)
        if worth >= self.worth - _DUST and keeps_rules(self.relaxation, state):
            self.state, self.worth = state, worth

    def _open(self, seconds: float) -> None:
        rng, relaxation, state = self.rng, self.relaxation, self.state
        layout = relaxation.layout
        self.steps += 1
        out = self._groups_out()
        slots: dict[str, tuple[int, int]] = {}
        services = relaxation.problem.services
        if services and (rng.random() < 0.25 or not (out or state.jobs)):
            service = rng.choice(services)
            length = min(layout.horizon, rng.randint(2, 8))
            first = rng.randrange(layout.horizon - length + 1)
            slots[service.service] = (first, first + length)
            held = 0
            for mask in state.held[service.service][first : first + length]:
                held |= mask
            near = held or 1 << rng.randrange(layout.gpus)
            when = (first, first + length)
        elif out and rng.random() < 0.7:
            group = rng.choice(out)
            spots = relaxation.spots_of(group)
            if not spots:
                return
            spot = relaxation.spots[rng.choice(spots)]
            starts = bits(spot.where)
            near = 0
            for begin in rng.sample(starts, spot.pieces):
                near |= ((1 << spot.piece) - 1) << begin
            when = (spot.start, spot.end)
        else:
            near = 1 << rng.randrange(layout.gpus)
            first = rng.randrange(layout.horizon)
            when = (first, first + 1)
        chosen = self._nearest(near, when, max(2, round(self.size)))
        within = self._region(near, chosen)
        for name, (first, last) in slots.items():
            for slot in range(first, last):
                within |= state.held[name][slot] << (slot * layout.gpus)
        groups = rng.sample(out, _MOST_GROUPS) if len(out) > _MOST_GROUPS else out
        model = CellModel(
            relaxation, state, chosen, slots, within, groups, snug=rng.random() < 0.85, tidy=True
        )
        if not model.places and not model.holds:
            return
        budget = Budget(_EFFORT, min(seconds, self.step_seconds), rng.randrange(2**31), hasty=True)
        found = model.solve(budget)
        if found.state is not None:
            self._keep(found.state)
        self.size = min(_MOST, self.size * 1.03) if found.proven else max(_FEWEST, self.size * 0.9)

    def _groups_out(self) -> list[int]:
        left = [len(group.tasks) for group in self.relaxation.groups]
        for at, _ in self.state.jobs:
            left[self.relaxation.spots[at].group] -= 1
        return [group for group, count in enumerate(left) if count]

    def _nearest(self, near: int, when: tuple[int, int], count: int) -> list[int]:
        """Positions of the jobs nearest to some GPUs and slots; how much each sort of distance matters is
        chance."""
        relaxation, rng = self.relaxation, self.rng
        layout = relaxation.layout
        first, last = (near & -near).bit_length() - 1, near.bit_length() - 1
        by_time = rng.choice((0.3, 1.0, 3.0)) / layout.horizon
        by_gpu = rng.choice((0.3, 1.0, 3.0)) / layout.gpus
        ranked = []
        for position, (at, firsts) in enumerate(self.state.jobs):
            spot = relaxation.spots[at]
            apart = min(max(0, begin - last, first - begin - spot.piece + 1) for begin in firsts)
            later = max(0, spot.start - when[1] + 1, when[0] - spot.end + 1)
            ranked.append((apart * by_gpu + later * by_time + 0.02 * rng.random(), position))
        ranked.sort()
        return [position for _, position in ranked[:count]]

    def _region(self, near: int, chosen: list[int]) -> int:
        """The cells that a step may use: all of the GPUs that it is about, and those of the jobs it opens."""
        relaxation, layout = self.relaxation, self.relaxation.layout
        row, cells = near, 0
        for position in chosen:
            at, firsts = self.state.jobs[position]
            cells |= job_cells(relaxation, self.state.jobs[position])
            if len(chosen) <= 40 and layout.gpus <= 256:
                for begin in firsts:
                    row |= ((1 << relaxation.spots[at].piece) - 1) << begin
        if layout.gpus > 64:
            for first, node in zip(layout.problem.first_gpu, layout.problem.nodes, strict=True):
                inside = ((1 << node.gpus) - 1) << first
                if near & inside:
                    row |= inside
        return cells | row * layout.repeat(layout.rows)
