"""Random planning problems of the families of the shipped scenarios, for tests, benchmarks and curiosity.

A family says which jobs are asked for and how the real-time demand moves (see ``families``). Features
(running jobs, holes, GPU types, tenants, ...) are laid over it, each by its own function. The invariant: the
same arguments give the same problem on every machine and Python, and every problem is valid.

The cost of the choice: what is asked for is scaled to the load by widening jobs and stretching their
durations, so at extreme ratios of GPUs to jobs they look less like the scenario of the family's name.
"""

import random
from collections.abc import Callable
from typing import Any

from allocator.families import FAMILIES, Family
from allocator.fields import ProblemError
from allocator.problem import Problem

SIZES = (16, 24, 32, 48, 64)  # GPUs, when the caller names none
_USUAL_JOBS = (16, 48)  # jobs, when the caller names no number
_MOST_STRETCH = 2.0  # durations grow by no more before jobs are added
FEATURES = (
    "running",
    "holes",
    "deadlines",
    "types",
    "tenants",
    "services",
    "elastic",
    "gangs",
    "reservations",
    "ageing",
    "announced",
    "open_end",
)


def generate(
    seed: int,
    *,
    gpus: int | None = None,
    jobs: int | None = None,
    slots: int = 24,
    family: str | None = None,
    load: float | None = None,
    node_gpus: int | None = None,
    features: tuple[str, ...] | None = None,
    slot_minutes: int = 60,
) -> Problem:
    """A random problem.

    Args:
        seed: the same seed and arguments give the same problem.
        gpus: of the cluster; drawn from 16 to 64 when absent.
        jobs: how many are asked for, running ones not counted; when absent some 16 to 48, or more if the
            load needs it.
        slots: the horizon.
        family: a key of ``FAMILIES``; drawn, without ``light_load``, when absent.
        load: job GPU-slots asked for over all GPU-slots; drawn from what the family has when absent.
        node_gpus: GPUs of a node; that of the family when absent.
        features: those of ``FEATURES`` to lay over it; each by chance when absent.

    Raises:
        ProblemError: naming the argument, its value and what was expected.
    """
    rng = random.Random(f"slotwise {seed}")
    _check(gpus, jobs, slots, family, load, node_gpus, features)
    name = family or rng.choice([name for name in FAMILIES if name != "light_load"])
    total = gpus or rng.choice(SIZES)
    draw = _Draw(rng, FAMILIES[name], total, slots)
    wanted = features if features is not None else tuple(f for f in FEATURES if rng.random() < 0.3)
    draw.load = load if load is not None else round(rng.uniform(*draw.family.load), 2)
    size = node_gpus or draw.family.node_gpus or (8 if _NEED_NODES & set(wanted) and total >= 16 else total)
    _lay_nodes(draw, size)
    _lay_demand(draw)
    _ask_jobs(draw, jobs)
    for feature in FEATURES:
        if feature in wanted:
            _LAY[feature](draw)
    return Problem.from_dict(
        {"name": f"{name}-{seed}", "slot_minutes": slot_minutes, "slots": slots} | draw.problem()
    )


def to_yaml(problem: Problem) -> str:
    """A problem as the text of a file, a line for each node, service and job."""
    import yaml

    def flow(value: Any) -> str:
        return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9).strip()

    lines = []
    for key, value in problem.to_dict().items():
        if isinstance(value, list):
            lines.append(f"{key}:" if value else f"{key}: []")
            lines += [f"  - {flow(entry)}" for entry in value]
        elif isinstance(value, dict):
            lines.append(f"{key}:")
            lines += [f"  {flow({name: entry})[1:-1]}" for name, entry in value.items()]
        else:
            lines.append(flow({key: value})[1:-1])
    return "\n".join(lines) + "\n"


_NEED_NODES = frozenset(("types", "gangs"))


def _check(
    gpus: int | None,
    jobs: int | None,
    slots: int,
    family: str | None,
    load: float | None,
    node_gpus: int | None,
    features: tuple[str, ...] | None,
) -> None:
    for field, value, low in (("gpus", gpus, 1), ("jobs", jobs, 0), ("slots", slots, 1)):
        if value is not None and value < low:
            raise ProblemError(f"generate: {field}: {value}; expected a whole number of {low} or more")
    if family is not None and family not in FAMILIES:
        raise ProblemError(f"generate: family: {family}; expected one of {', '.join(FAMILIES)}")
    if load is not None and not 0 < load <= 100:
        raise ProblemError(f"generate: load: {load}; expected a number above 0 and up to 100")
    if node_gpus is not None and node_gpus < 1:
        raise ProblemError(f"generate: node-gpus: {node_gpus}; expected a whole number of 1 or more")
    for feature in features or ():
        if feature not in FEATURES:
            raise ProblemError(f"generate: features: {feature}; expected some of {', '.join(FEATURES)}")


class _Draw:
    """A problem while it is drawn: plain dictionaries as in a file."""

    def __init__(self, rng: random.Random, family: Family, gpus: int, slots: int) -> None:
        self.rng = rng
        self.family = family
        self.gpus = gpus
        self.slots = slots
        self.load = 1.0
        self.nodes: list[dict[str, Any]] = []
        self.jobs: list[dict[str, Any]] = []
        self.services: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {}

    def problem(self) -> dict[str, Any]:
        return {"nodes": self.nodes, "realtime": self.services, "jobs": self.jobs} | self.more

    @property
    def node_size(self) -> int:
        return max(int(node["gpus"]) for node in self.nodes)

    def share(self, count: float) -> int:
        """A number of slots of a day of 24, for this horizon: at least one, at most all."""
        return max(1, min(self.slots, round(count * self.slots / 24)))

    def some(self, entries: list[dict[str, Any]], share: float) -> list[dict[str, Any]]:
        return [entry for entry in entries if self.rng.random() < share]


def _lay_nodes(draw: _Draw, size: int) -> None:
    left = draw.gpus
    while left:
        count = min(size, left)
        draw.nodes.append({"name": f"node{len(draw.nodes)}", "gpus": count})
        left -= count


def _flat(draw: _Draw, peak: int) -> list[int]:
    return [peak] * draw.slots


def _day(draw: _Draw, peak: int) -> list[int]:
    """Low at night, up through the morning, a plateau, down in the evening."""
    low = max(1, peak // 6) if peak else 0
    begin, top = draw.share(draw.rng.randint(6, 10)), draw.share(draw.rng.randint(12, 16))
    fall = draw.share(draw.rng.randint(17, 21))
    rows = []
    for slot in range(draw.slots):
        if slot < begin:
            part = 0.0
        elif slot < top:
            part = (slot - begin) / max(1, top - begin)
        elif slot < fall:
            part = 1.0
        else:
            part = max(0.0, 1 - (slot - fall) / max(1, draw.slots - fall))
        rows.append(low + round((peak - low) * part))
    return rows


def _burst(draw: _Draw, peak: int) -> list[int]:
    """Quiet, but for a few slots that rise steeper than the ramp."""
    low = max(1, peak // 8) if peak else 0
    at, length = draw.rng.randrange(draw.slots), draw.share(draw.rng.randint(2, 4))
    rows = [low] * draw.slots
    for slot in range(at, min(at + length, draw.slots)):
        rows[slot] = max(low, round(peak * draw.rng.uniform(0.5, 1)))
    return rows


_DEMANDS: dict[str, Callable[[_Draw, int], list[int]]] = {"flat": _flat, "day": _day, "burst": _burst}


def _lay_demand(draw: _Draw) -> None:
    rng, family = draw.rng, draw.family
    draw.services.append(
        {
            "service": "chat",
            "demand": _DEMANDS[family.demand](draw, round(draw.gpus * rng.uniform(*family.peak))),
            "ramp": max(1, round(draw.gpus * rng.uniform(*family.ramp))),
            "priority": 8,
            "shortage_penalty": rng.choice((5, 8, 8, 10)),
        }
    )


def _ask_jobs(draw: _Draw, count: int | None) -> None:
    rng, family = draw.rng, draw.family
    asked = _shapes(
        draw, count if count is not None else rng.randint(*_USUAL_JOBS), exactly=count is not None
    )
    if family.in_order:
        asked.sort(key=lambda entry: entry[0] == len(family.asks) - 1 or entry[0])
    for at, (which, gpus, slots) in enumerate(asked):
        ask = family.asks[which]
        kind = rng.choice(ask.kinds)
        job: dict[str, Any] = {"id": f"{kind[0]}{at:02}", "kind": kind, "gpus": gpus, "slots": slots}
        job["priority"] = rng.choice(ask.priorities)
        if rng.random() < family.late and slots < draw.slots:
            job["release"] = rng.randint(1, max(1, min(draw.slots - slots, draw.slots // 2)))
        if rng.random() < ask.deadline_share:
            _set_deadline(draw, job)
        draw.jobs.append(job)
    draw.jobs.sort(key=lambda job: job.get("release", 0))


def _shapes(draw: _Draw, count: int, exactly: bool) -> list[tuple[int, int, int]]:
    """The sort, GPUs and slots of about ``count`` jobs (or exactly so many) that ask for the load together.

    Widths double while that keeps durations natural; then durations are stretched; then there are more jobs.
    """
    rng, family, goal = draw.rng, draw.family, draw.load * draw.gpus * draw.slots
    widest: int = draw.node_size
    weights = [ask.share for ask in family.asks]
    drawn: list[tuple[int, int, float]] = []

    def more() -> None:
        which = rng.choices(range(len(weights)), weights)[0]
        ask = family.asks[which]
        drawn.append((which, rng.choice(ask.gpus), rng.randint(*ask.slots) * draw.slots / 24))

    def cells(widen: int, stretch: float) -> int:
        return sum(width(gpus, widen) * length(slots, stretch) for _, gpus, slots in drawn)

    def width(gpus: int, widen: int) -> int:
        return min(gpus * widen or draw.gpus // 2 + 1, widest)

    def length(slots: float, stretch: float) -> int:
        return max(1, min(draw.slots, round(slots * stretch)))

    for _ in range(count):
        more()
    widen, stretch = 1, 1.0
    usual = max(width for ask in family.asks for width in ask.gpus)
    room = min(widest, draw.gpus if exactly else max(usual, draw.gpus // 2))
    while 2 * usual * widen <= room and cells(widen, 1.3) < goal:
        widen *= 2
    while not exactly and cells(widen, _MOST_STRETCH) < goal:
        more()
    if drawn:
        low, high = 0.0, draw.slots if exactly else _MOST_STRETCH
        for _ in range(20):
            stretch = (low + high) / 2
            low, high = (stretch, high) if cells(widen, stretch) < goal else (low, stretch)
    return [(which, width(gpus, widen), length(slots, stretch)) for which, gpus, slots in drawn]


def _set_deadline(draw: _Draw, job: dict[str, Any]) -> None:
    first = job.get("release", 0)
    job["deadline"] = min(draw.slots, first + job["slots"] + draw.rng.randint(0, draw.share(6)))


# Features, each laid over what is there


def _lay_running(draw: _Draw) -> None:
    """Work that has begun, from the lowest GPUs of some nodes up."""
    rng, at = draw.rng, 0
    for node in draw.nodes:
        used = 0
        while used < node["gpus"] and rng.random() < 0.45:
            gpus = min(rng.choice((1, 2, 4, 8)), node["gpus"] - used)
            gone, left = rng.randint(0, draw.share(8)), rng.randint(1, draw.share(8))
            draw.jobs.append(
                {
                    "id": f"r{len(draw.jobs):02}",
                    "kind": "training",
                    "gpus": gpus,
                    "slots": gone + left,
                    "priority": rng.choice((1, 2, 3, 5)),
                    "running": {"start": -gone, "gpus": list(range(at + used, at + used + gpus))},
                }
            )
            used += gpus + rng.choice((0, 0, 1))
        at += node["gpus"]


def _lay_holes(draw: _Draw) -> None:
    """A node under maintenance for some hours, or a few GPUs that failed for the whole day and beyond."""
    rng, holes = draw.rng, []
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(draw.nodes))
        first = sum(node["gpus"] for node in draw.nodes[:at])
        size = draw.nodes[at]["gpus"]
        begin = rng.randrange(draw.slots)
        if rng.random() < 0.5:
            width = max(1, min(size, rng.choice((2, 4, 8))))
            start = first + rng.randrange(0, size - width + 1)
            gpus = list(range(start, start + width))
            hole = {"gpus": gpus, "from": begin, "to": begin + rng.randint(1, draw.share(8))}
        else:
            hole = {"gpus": [first + rng.randrange(size)], "from": 0, "to": 2 * draw.slots}
        holes.append(hole)
    draw.more["unavailable"] = holes


def _lay_deadlines(draw: _Draw) -> None:
    for job in draw.some(draw.jobs, 0.4):
        if "running" not in job:
            _set_deadline(draw, job)


def _lay_types(draw: _Draw) -> None:
    """Two types; most jobs run on both, at different speed."""
    rng = draw.rng
    if len(draw.nodes) < 2:
        for node in draw.nodes:
            node["gpu"] = "H100"
        return
    split = rng.randint(1, len(draw.nodes) - 1)
    for at, node in enumerate(draw.nodes):
        node["gpu"] = "H100" if at < split else "A100"
    for job in draw.jobs:
        if "running" in job:
            continue
        chance = rng.random()
        if chance < 0.25:
            job["gpu_types"] = [rng.choice(("H100", "A100"))]
        elif chance < 0.7:
            slower = min(draw.slots, max(job["slots"], round(job["slots"] * rng.uniform(1.3, 2.4))))
            job["slots"] = {"H100": job["slots"], "A100": slower}


def _lay_tenants(draw: _Draw) -> None:
    rng = draw.rng
    names = rng.sample(("search", "ads", "vision", "speech"), rng.randint(2, 3))
    left, tenants = draw.gpus, {}
    for name in names[: rng.randint(1, len(names))]:
        gpus = rng.randint(draw.gpus // 8, max(1, draw.gpus // 3))
        gpus = min(gpus, left)
        left -= gpus
        tenants[name] = {"gpus": gpus, "borrow_slots": rng.choice((0, 2, 4))}
    for job in draw.jobs:
        if rng.random() < 0.8:
            job["tenant"] = rng.choice(names)
    draw.more["tenants"] = tenants


def _lay_services(draw: _Draw) -> None:
    """One or two more services, and for some the GPUs they hold now, quantiles or replicas."""
    rng = draw.rng
    for name in rng.sample(("search", "code", "speech"), rng.randint(1, 2)):
        replica = rng.choice((1, 1, 2, 4))
        replica = min(replica, draw.node_size)
        peak = max(1, round(draw.gpus * rng.uniform(0.03, 0.15)))
        rows = _DEMANDS[rng.choice(("flat", "day", "burst"))](draw, peak)
        service: dict[str, Any] = {"service": name, "ramp": max(replica, round(peak * rng.uniform(0.3, 1)))}
        if rng.random() < 0.3:
            service["demand_quantiles"] = [
                sorted(max(0, round(want * rng.uniform(0.6, 1.4))) for _ in range(10)) for want in rows
            ]
        else:
            service["demand"] = rows
        service |= {"priority": rng.choice((3, 5, 8)), "shortage_penalty": rng.choice((5, 8, 10))}
        if replica > 1:
            service["gpus_per_replica"] = replica
        draw.services.append(service)
    top = draw.gpus
    for service in draw.services:
        if rng.random() < 0.5 and "demand" in service:
            replica = service.get("gpus_per_replica", 1)
            size = draw.nodes[-1]["gpus"]
            count = min(service["demand"][0] // replica, size // replica if replica > 1 else draw.gpus)
            held = count * replica
            if held and top - held >= draw.gpus - size:  # all on the last node, where nothing else begins
                service["current"] = list(range(top - held, top))
                top -= held
    taken = set(range(top, draw.gpus))
    draw.jobs = [job for job in draw.jobs if not taken & set(job.get("running", {}).get("gpus", ()))]


def _lay_elastic(draw: _Draw) -> None:
    """Twice the GPUs for a little more than half of the time, or half the GPUs for twice."""
    for job in draw.some(draw.jobs, 0.35):
        gpus, slots = job["gpus"], job["slots"]
        if "running" in job or isinstance(slots, dict):
            continue
        other = (2 * gpus, -(-slots * 6 // 10)) if 2 * gpus <= draw.node_size else (gpus // 2, 2 * slots)
        if other[0] >= 1 and other[1] <= draw.slots:
            del job["gpus"], job["slots"]
            job["choices"] = [{"gpus": gpus, "slots": slots}, {"gpus": other[0], "slots": other[1]}]


def _lay_gangs(draw: _Draw) -> None:
    """Racks, and some jobs of two to four whole nodes."""
    rng, nodes = draw.rng, draw.nodes
    whole = [node for node in nodes if node["gpus"] == nodes[0]["gpus"]]
    if len(whole) < 2:
        return
    rack = rng.choice((2, 4, 8))
    for at, node in enumerate(nodes):
        node["domain"] = f"rack{at // rack}"
    size = nodes[0]["gpus"]
    for job in draw.some(draw.jobs, 0.08):
        count = rng.randint(2, max(2, min(4, rack, len(whole))))
        if "running" not in job and "choices" not in job and count * size <= draw.gpus:
            if isinstance(job["slots"], int):
                job["slots"] = max(1, round(job["slots"] * job["gpus"] / (count * size)))
            job["gpus"] = count * size


def _lay_reservations(draw: _Draw) -> None:
    rng = draw.rng
    begin = rng.randrange(draw.slots)
    tenant = rng.choice(("eval", "search", "ads"))
    draw.more["reservations"] = [
        {
            "gpus": rng.randint(1, max(1, draw.gpus // 3)),
            "from": begin,
            "to": begin + rng.randint(2, draw.share(8) + 2),
            "tenant": tenant,
        }
    ]
    for job in draw.some(draw.jobs, 0.15):
        job.setdefault("tenant", tenant)


def _lay_ageing(draw: _Draw) -> None:
    draw.more["ageing_per_slot"] = draw.rng.choice((0.01, 0.02, 0.05))
    for job in draw.some(draw.jobs, 0.6):
        if "running" not in job:
            job["waited"] = draw.rng.randint(1, draw.share(36) + 1)


def _lay_announced(draw: _Draw) -> None:
    draw.more["move_cost"] = draw.rng.choice((1, 3, 10))
    for job in draw.some(draw.jobs, 0.3):
        if "running" not in job:
            job["announced"] = {"start": draw.rng.randint(job.get("release", 0), draw.slots)}


def _lay_open_end(draw: _Draw) -> None:
    """The live loop: jobs may end after the horizon, some longer than it."""
    draw.more["open_end"] = True
    for job in draw.some(draw.jobs, 0.05):
        if "running" not in job and isinstance(job.get("slots"), int):
            job["slots"] = draw.slots + draw.rng.randint(1, draw.share(12))
            job.pop("deadline", None)


_LAY: dict[str, Callable[[_Draw], None]] = {
    "running": _lay_running,
    "holes": _lay_holes,
    "deadlines": _lay_deadlines,
    "types": _lay_types,
    "tenants": _lay_tenants,
    "services": _lay_services,
    "elastic": _lay_elastic,
    "gangs": _lay_gangs,
    "reservations": _lay_reservations,
    "ageing": _lay_ageing,
    "announced": _lay_announced,
    "open_end": _lay_open_end,
}
