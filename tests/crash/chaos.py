"""A seeded storm over a world: what goes wrong is decided by the seed alone, before anything is run.

Each slot may bring a planner that dies at its n-th step, storage that fails some of its operations or takes
no large file, nodes that lose power or storage and come back, runs that are killed, samples that are missing,
bad specs and cancelled jobs. The checker judges every slot; at the end the storm is over and all work is
finished.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tasks import ledger
from tasks.collect import ledger_directory
from tests.crash.world import MINUTE, World

SIZES = (1, 1, 1, 2, 2, 4, 8)
STEPS_OF_AN_HOUR = 120
CLUSTER = {"slot_minutes": 5, "plan_every_minutes": 10, "plan_slots": 48, "start_timeout_minutes": 5}


@dataclass(frozen=True)
class Slot:
    """What one slot brings. Names of nodes; `kills`: which of the runs that run are killed."""

    how: dict[str, Any]
    replan: dict[str, Any] | None
    demand: float | None
    jobs: tuple[tuple[int, float], ...]  # GPUs and minutes of new ones
    bad_spec: bool
    cancels: bool
    power: tuple[str, ...]
    cut: tuple[str, ...]
    back: bool
    kills: int


@dataclass
class Storm:
    """What happened: a line for each slot, and how often each sort of trouble came."""

    lines: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def slots(seed: int, count: int, nodes: list[str]) -> Iterator[Slot]:
    """The storm of a seed."""
    chance = random.Random(seed)
    for number in range(count):
        yield Slot(
            how=_trouble(chance, seed * 1000 + number),
            replan=_trouble(chance, seed * 1000 + 500 + number) if chance.random() < 0.4 else None,
            demand=None if chance.random() < 0.15 else round(chance.uniform(0, 4), 2),
            jobs=tuple(
                (chance.choice(SIZES), round(chance.uniform(3, 30), 1))
                for _ in range(chance.choice((0, 0, 1, 2)))
            ),
            bad_spec=chance.random() < 0.05,
            cancels=chance.random() < 0.04,
            power=tuple(node for node in nodes if chance.random() < 0.02),
            cut=tuple(node for node in nodes if chance.random() < 0.02),
            back=chance.random() < 0.4,
            kills=chance.randrange(5) if chance.random() < 0.15 else 0,
        )


def _trouble(chance: random.Random, seed: int) -> dict[str, Any]:
    """How a planner fares: mostly well."""
    step, share, size = (
        chance.randint(1, STEPS_OF_AN_HOUR),
        chance.choice((0.01, 0.05, 0.3)),
        chance.choice((1, 400)),
    )
    sort = chance.random()
    if sort < 0.25:
        return {"fault": f"*#{step}"}
    if sort < 0.40:
        return {"errors": share, "seed": seed}
    return {"disk": size * 1024} if sort < 0.48 else {}


def weather(world: World, seed: int, count: int) -> Storm:
    """Let the storm pass over the world, judge every slot, and finish the work."""
    storm, nodes = Storm(), [node.name for node in world.site.cluster.nodes]
    for number, slot in enumerate(slots(seed, count, nodes)):
        happened = [*_people(world, storm, number, slot), *_machines(world, storm, slot)]
        happened.append(_hour(world, storm, "hourly", slot.how))
        world.pass_minutes(4)
        if slot.replan is not None:
            happened.append(_hour(world, storm, "replan", slot.replan))
        world.check(settled=False)
        world.pass_minutes(6)
        storm.lines.append(f"{number}: {'; '.join(happened)}")
        storm.counts["slots"] += 1
    world.finish(hours=60)
    assert ledger.verify(ledger_directory(world.site), world.storage) == []
    return storm


def _people(world: World, storm: Storm, number: int, slot: Slot) -> Iterator[str]:
    for index, (gpus, minutes) in enumerate(slot.jobs):
        world.submit(f"job{number}-{index}", minutes=minutes, gpus=gpus, priority=1 + (number + index) % 5)
        storm.counts["jobs"] += 1
    if slot.bad_spec:
        world.leave(f"bad{number}.yaml", b"kind: training\ngpus: -3\n")
        storm.counts["bad specs"] += 1
        yield "bad spec"
    if slot.cancels and number > 1:
        job = f"job{number - 1}-0"
        if job in world.asked.jobs:
            world.cancel(job)
            storm.counts["cancelled"] += 1
            yield f"cancel {job}"
    if slot.demand is None:
        storm.counts["demand gaps"] += 1
        yield "no demand"
    else:
        world.demand("chat", slot.demand, world.now - 10 * MINUTE)


def _machines(world: World, storm: Storm, slot: Slot) -> Iterator[str]:
    if slot.back and world.down | world.cut:
        yield f"back: {', '.join(sorted(world.down | world.cut))}"
        storm.counts["nodes back"] += len(world.down | world.cut)
        world.down.clear()
        world.cut.clear()
    for node in slot.power:
        if node not in world.down:
            world.lose(node)
            storm.counts["nodes lost"] += 1
            yield f"{node} without power"
    for node in slot.cut:
        if node not in world.down | world.cut:
            world.cut.add(node)
            storm.counts["nodes cut off"] += 1
            yield f"{node} without storage"
    running = sorted(name for name, run in world.runs.items() if run.state == "running")
    for name in running[: slot.kills]:
        world.crash(world.runs[name])
        storm.counts["runs killed"] += 1
        yield f"kill {name}"


def _hour(world: World, storm: Storm, trigger: Any, how: dict[str, Any]) -> str:
    code = world.hour(trigger, **how)
    sort = next(iter(how), "none")
    storm.counts[f"planners: {sort}"] += 1
    storm.counts[{0: "planners that ended", -9: "planners killed"}.get(code, "planners that failed")] += 1
    if not how:
        assert code == 0
    return f"{trigger} {how} -> {code}"
