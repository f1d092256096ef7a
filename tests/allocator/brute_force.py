"""The best objective of a tiny problem, by trying everything, and random tiny problems to try it on.

Nothing here comes from a solver: places are enumerated from the problem, and ``allocator.check`` says what
is allowed and what it is worth. The invariant: what is returned is the best that any plan can have. The
cost is exponential: four GPUs, four slots and four jobs take some tenths of a second.
"""

import random
from itertools import combinations
from typing import Any

from allocator import Job, Placement, Plan, Problem, ServicePlan
from allocator.check import broken_rules, score

Way = tuple[Placement, float]


def best_objective(problem: Problem) -> float:
    """The highest objective of any plan that keeps every rule."""
    running = tuple(
        Placement(job.id, job.running.start, problem.running_slots(job), tuple(sorted(job.running.gpus)))
        for job in problem.jobs
        if job.running is not None
    )
    choices = [_ways(problem, job) for job in problem.jobs if job.running is None]
    choices.sort(key=len)
    hopes = [
        sum(max([0.0, *(gain for _, gain in ways)]) for ways in choices[at:])
        for at in range(len(choices) + 1)
    ]
    served = _service_rows(problem)
    best = -float("inf")

    def worth(placed: tuple[Placement, ...], rows: tuple[ServicePlan, ...]) -> float:
        return score(problem, Plan("brute", 0, 0, None, 0, 0, running + placed, rows)).objective

    empty = worth((), served[0][1])

    def search(at: int, placed: tuple[Placement, ...], gained: float) -> None:
        nonlocal best
        if empty + gained + hopes[at] <= best + 1e-9:
            return
        if at < len(choices):
            for placement, gain in choices[at]:
                if not any(_clash(placement, other) for other in placed):
                    search(at + 1, (*placed, placement), gained + gain)
            search(at + 1, placed, gained)
            return
        for cost, rows in served:
            if empty + gained - (cost - served[0][0]) <= best + 1e-9:
                return
            if not broken_rules(problem, Plan("brute", 0, 0, None, 0, 0, running + placed, rows)):
                best = worth(placed, rows)
                return

    search(0, (), 0.0)
    return best


def _clash(one: Placement, other: Placement) -> bool:
    return one.start < other.end and other.start < one.end and bool(set(one.gpus) & set(other.gpus))


def _ways(problem: Problem, job: Job) -> list[Way]:
    """Every place that the job may take when it is alone, with what it adds to the objective there."""
    alone = tuple(
        Placement(
            other.id, other.running.start, problem.running_slots(other), tuple(sorted(other.running.gpus))
        )
        for other in problem.jobs
        if other.running is not None
    )
    bare = Problem(
        **{
            field: getattr(problem, field)
            for field in (
                "slots",
                "nodes",
                "jobs",
                "unavailable",
                "tenants",
                "open_end",
                "ageing_per_slot",
                "move_cost",
            )
        }
    )
    nothing = score(bare, Plan("brute", 0, 0, None, 0, 0, alone)).objective
    found = []
    shapes = {(c.gpus, c.slots_on(node.gpu)) for c in job.choices for node in problem.nodes}
    for width, slots in sorted((w, s) for w, s in shapes if s is not None):
        for gpus in combinations(range(problem.total_gpus), width):
            for start in range(problem.slots):
                placement = Placement(job.id, start, slots, gpus)
                plan = Plan("brute", 0, 0, None, 0, 0, (*alone, placement))
                if not broken_rules(bare, plan):
                    found.append((placement, score(bare, plan).objective - nothing))
    return found


def _service_rows(problem: Problem) -> list[tuple[float, tuple[ServicePlan, ...]]]:
    """All that services may hold together were there no jobs to start, the cheapest first."""
    together: list[tuple[float, tuple[ServicePlan, ...]]] = [(0.0, ())]
    for service in problem.services:
        sequences: list[tuple[tuple[int, ...], ...]] = [()]
        for slot in range(problem.slots):
            out = {gpu for hole in problem.unavailable if hole.start <= slot < hole.end for gpu in hole.gpus}
            usable = [gpu for gpu in range(problem.total_gpus) if gpu not in out]
            sets = [
                chosen
                for size in range(0, len(usable) + 1, service.gpus_per_replica)
                for chosen in combinations(usable, size)
            ]
            sequences = [
                (*before, chosen)
                for before in sequences
                for chosen in sets
                if not before or set(before[-1]) - out <= set(chosen) or set(chosen) <= set(before[-1]) - out
            ]
        rows = []
        for sequence in sequences:
            short = tuple(service.shortage(slot, len(gpus)) for slot, gpus in enumerate(sequence))
            rows.append((sum(short) * service.penalty, ServicePlan(service.service, sequence, short)))
        together = [
            (cost + more, (*held, row))
            for cost, held in together
            for more, row in rows
            if not any(set(a) & set(b) for other in held for a, b in zip(other.gpus, row.gpus, strict=True))
        ]
    running = tuple(
        Placement(job.id, job.running.start, problem.running_slots(job), tuple(sorted(job.running.gpus)))
        for job in problem.jobs
        if job.running is not None
    )
    allowed = [
        (cost, rows)
        for cost, rows in together
        if not broken_rules(problem, Plan("brute", 0, 0, None, 0, 0, running, rows))
    ]
    return sorted(allowed, key=lambda pair: pair[0])


def tiny_problem(seed: int) -> Problem:
    """A random problem that is small enough to try everything, with every feature of the format by chance."""
    rng = random.Random(f"tiny {seed}")
    slots = rng.randint(3, 4)
    sizes = rng.choice(((4,), (2, 2), (3,), (1, 2), (2, 1), (3, 1)))
    total = sum(sizes)
    typed = rng.random() < 0.35 and len(sizes) > 1
    nodes = [
        {"name": f"n{k}", "gpus": size, "domain": "rack"} | ({"gpu": "AB"[k]} if typed else {})
        for k, size in enumerate(sizes)
    ]
    data: dict[str, Any] = {
        "name": f"tiny-{seed}",
        "slots": slots,
        "nodes": nodes,
        "open_end": rng.random() < 0.3,
    }
    tenants = ["x", "y"] if rng.random() < 0.4 else []
    jobs: list[dict[str, Any]] = []
    for number in range(rng.randint(2, 4)):
        length = rng.randint(1, 3)
        job: dict[str, Any] = {"id": f"j{number}", "priority": rng.randint(1, 5)}
        if typed and rng.random() < 0.5:
            job |= {"gpus": 1, "slots": {"A": length, "B": rng.randint(1, 3)}}
        elif rng.random() < 0.3 and total > 1:
            job["choices"] = [{"gpus": 1, "slots": length + 1}, {"gpus": 2, "slots": length}]
        else:
            job |= {"gpus": rng.randint(1, max(sizes)), "slots": length}
            if len(set(sizes)) == 1 and len(sizes) > 1 and not typed and rng.random() < 0.2:
                job["gpus"] = total  # a gang
        if typed and "choices" not in job and rng.random() < 0.3:
            job["gpu_types"] = [rng.choice("AB")] if isinstance(job["slots"], int) else ["A", "B"]
        if rng.random() < 0.3:
            job["release"] = rng.randint(0, slots - 1)
        if rng.random() < 0.3:
            job["deadline"] = rng.randint(1, slots)
        if tenants and rng.random() < 0.8:
            job["tenant"] = rng.choice(tenants)
        if rng.random() < 0.3:
            job["waited"] = rng.randint(1, 5)
        if rng.random() < 0.3:
            job["announced"] = {"start": rng.randint(0, slots)}
        jobs.append(job)
    at = 0
    if rng.random() < 0.4:
        jobs.append(
            {
                "id": "r",
                "gpus": 1,
                "slots": rng.randint(2, 4),
                "priority": 1,
                "running": {"start": -1, "gpus": [0]},
            }
        )
        at = 1
    if any("announced" in job for job in jobs):
        data["move_cost"] = rng.choice((0.5, 2))
    if any("waited" in job for job in jobs):
        data["ageing_per_slot"] = 0.1
    if rng.random() < 0.4:
        begin = rng.randint(0, slots - 1)
        data["unavailable"] = [
            {"gpus": [rng.randrange(total)], "from": begin, "to": begin + rng.randint(1, 3)}
        ]
    if tenants and rng.random() < 0.7:
        data["tenants"] = {"x": {"gpus": rng.randint(0, total - 1), "borrow_slots": rng.choice((0, 1, 2))}}
    if tenants and rng.random() < 0.5:
        begin = rng.randint(0, slots - 1)
        data["reservations"] = [
            {
                "gpus": rng.randint(1, total),
                "from": begin,
                "to": begin + rng.randint(1, 3),
                "tenant": rng.choice(tenants),
            }
        ]
    if rng.random() < 0.5 and total - at > 1:
        service: dict[str, Any] = {"service": "s", "ramp": rng.choice((1, 2)), "priority": 1}
        service["shortage_penalty"] = rng.choice((1, 4, 8))
        if rng.random() < 0.3:
            service["demand_quantiles"] = [sorted(rng.randint(0, 2) for _ in range(10)) for _ in range(slots)]
        else:
            service["demand"] = [rng.randint(0, 2) for _ in range(slots)]
        if rng.random() < 0.4:
            service["current"] = [total - 1]
            if rng.random() < 0.3:
                service["ramp_first"] = 0
        data["realtime"] = [service]
    data["jobs"] = jobs
    return Problem.from_dict(data)
