"""Whether a plan keeps the rules, and what it is worth, found without any part of a solver.

Every solve ends here, so a mistake in a solver becomes a message and never a double-booked GPU. The
invariant: nothing in this module comes from the solvers; it reads the problem and the plan alone. The cost
is that the rules are written twice, here as a check and there as a search, and that a plan of 40 jobs pays
about a tenth of a millisecond.

Occupancy is one integer per slot with a bit for each GPU, so that a block of any width is tested at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from allocator.plan import Placement, Plan, ServicePlan
from allocator.problem import Job, Problem, Service

_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Score:
    """The figures of a plan.

    Attributes:
        objective: ``worth - shortage_cost - move_cost``.
        value: what the jobs will be recorded to have earned, without ageing.
        worth: the same with ageing.
        utilization: (job GPU-slots inside the horizon + served demand) over all GPU-slots.
        shortage: missing real-time GPU-slots (with quantiles, the expected number).
        completed: jobs that end within the horizon and in time.
    """

    objective: float
    value: float
    worth: float
    utilization: float
    shortage: float
    shortage_cost: float
    move_cost: float
    placed: int
    completed: int


@dataclass(frozen=True, slots=True)
class Slack:
    """What a finished plan has none of: jobs that could start earlier, GPU-slots that no service needs."""

    postponed: int
    held_idle: int


def check(problem: Problem, plan: Plan) -> list[str]:
    """All rules that the plan breaks, and figures it states wrongly; empty for a good plan."""
    broken = broken_rules(problem, plan)
    if broken:
        return broken
    figures = score(problem, plan)
    for field in ("objective", "value", "utilization"):
        said, found = getattr(plan, field), getattr(figures, field)
        if abs(said - found) > _TOLERANCE * max(1, abs(found)):
            broken.append(f"plan: {field}: {said}; the placements give {found}")
    if plan.bound is not None and plan.bound < figures.objective - _TOLERANCE * max(
        1, abs(figures.objective)
    ):
        broken.append(f"plan: bound: {plan.bound}; the objective {figures.objective:g} is above it")
    return broken


def broken_rules(problem: Problem, plan: Plan) -> list[str]:
    """The rules that the placements and the services of a plan break."""
    board = _Board(problem)
    jobs = problem.job_by_id
    seen: set[str] = set()
    started: list[tuple[Job, Placement]] = []
    for placement in plan.placements:
        job = jobs.get(placement.job)
        if job is None or placement.job in seen:
            board.broken.append(f"job {placement.job}: {'placed twice' if job else 'no such job'}")
            continue
        seen.add(placement.job)
        if job.running is None:
            started.append((job, placement))
        else:
            _check_running(board, job, placement)
    for job in problem.jobs:
        if job.running is not None and job.id not in seen:
            board.broken.append(f"job {job.id}: running, but not in the plan")
    board.fixed = list(board.busy)
    for job, placement in started:
        _check_start(board, job, placement)
    _check_realtime(board, plan.realtime)
    if (problem.tenants or problem.reservations) and not board.broken:
        _check_tenants(board, started)
        _check_reservations(board, started, plan.realtime)
    for entry in plan.unplaced:
        if entry.job not in jobs or entry.job in seen:
            board.broken.append(
                f"job {entry.job}: unplaced, but {'placed too' if entry.job in jobs else 'no such job'}"
            )
    return board.broken


def score(problem: Problem, plan: Plan) -> Score:
    """What a plan that keeps the rules is worth."""
    horizon, jobs = problem.slots, problem.job_by_id
    value = worth = moves = 0.0
    used = completed = 0
    starts: dict[str, int] = {}
    for placement in plan.placements:
        job, start, slots = jobs[placement.job], placement.start, placement.slots
        end = start + slots
        starts[placement.job] = start
        inside_end = end if end < horizon else horizon
        if job.running is not None:
            first, last = problem.running_window(job)
            used += len(placement.gpus) * (min(last, horizon) - min(first, horizon))
        else:
            used += len(placement.gpus) * (inside_end - start)
        if job.deadline is not None and end > job.deadline:
            continue
        share = max(0, inside_end - start) / slots if problem.open_end and end > horizon else 1
        value += job.full_value * share
        worth += problem.worth(job) * share
        completed += end <= horizon
    if problem.move_cost:
        moves = sum(problem.move_cost_of(job, starts.get(job.id)) for job in problem.jobs)
    short = cost = served = 0.0
    rows = {row.service: row for row in plan.realtime}
    for service in problem.services:
        counts = [len(gpus) for gpus in rows[service.service].gpus]
        missing = shortage_of(service, counts)
        short += missing
        cost += missing * service.penalty
        if service.demand is not None:
            served += sum(service.demand) - missing
        else:
            served += sum(sum(row) / len(row) for row in service.demand_quantiles or ()) - missing
    return Score(
        objective=worth - cost - moves,
        value=value,
        worth=worth,
        utilization=(used + served) / (problem.total_gpus * horizon),
        shortage=short,
        shortage_cost=cost,
        move_cost=moves,
        placed=len(plan.placements),
        completed=completed,
    )


def shortage_of(service: Service, counts: Iterable[int]) -> float:
    """GPU-slots that a service misses in all with these counts."""
    if service.demand is not None:
        return sum([want - have for want, have in zip(service.demand, counts, strict=True) if want > have])
    return sum([service.shortage(slot, have) for slot, have in enumerate(counts)])


def slack(problem: Problem, plan: Plan) -> Slack:
    """Count the jobs that could start one slot earlier, all else fixed, and the GPU-slots held idly."""
    board = _Board(problem)
    for placement in plan.placements:
        running = problem.job_by_id[placement.job].running is not None
        start, end = placement.start, placement.end
        if running:
            start, end = problem.running_window(problem.job_by_id[placement.job])
        board.take(_mask(placement.gpus), start, end)
    for row in plan.realtime:
        for slot, gpus in enumerate(row.gpus):
            board.take(_mask(gpus), slot, slot + 1)
    postponed = 0
    for placement in plan.placements:
        job, earlier = problem.job_by_id[placement.job], placement.start - 1
        if job.running is None and earlier >= job.release and earlier >= 0:
            mask = _mask(placement.gpus)
            postponed += not mask & (board.busy[earlier] | board.out[earlier])
    if postponed and (problem.tenants or problem.reservations):
        postponed = sum(_may_move_up(problem, plan, placement) for placement in plan.placements)
    rows = {row.service: row for row in plan.realtime}
    return Slack(postponed, sum(_held_idle(board, s, rows[s.service]) for s in problem.services))


def _may_move_up(problem: Problem, plan: Plan, placement: Placement) -> bool:
    """The thorough test, for problems with rules beyond free GPUs: move it and see."""
    job = problem.job_by_id[placement.job]
    if job.running is not None or placement.start <= max(job.release, 0):
        return False
    moved = Placement(placement.job, placement.start - 1, placement.slots, placement.gpus)
    rest = tuple(p if p is not placement else moved for p in plan.placements)
    return not broken_rules(problem, Plan(plan.mode, 0, 0, None, 0, 0, rest, plan.realtime))


class _Board:
    """Which GPUs are taken and out of service in each slot, as bit masks, and what was found wrong."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.busy = [0] * problem.slots
        self.out = [0] * problem.slots
        self.fixed = self.busy  # what running jobs take, once they are on the board
        self.broken: list[str] = []
        for hole in problem.unavailable:
            mask = _mask(hole.gpus)
            self._reach(hole.end)
            for slot in range(max(hole.start, 0), hole.end):
                self.out[slot] |= mask

    def take(self, mask: int, start: int, end: int) -> int:
        """Mark GPUs as taken from start to end; the GPUs that were taken before in one of the slots."""
        if end > len(self.busy):
            self._reach(end)
        busy, clash = self.busy, 0
        for slot in range(start, end):
            clash |= busy[slot] & mask
            busy[slot] |= mask
        return clash

    def _reach(self, slots: int) -> None:
        self.busy += [0] * (slots - len(self.busy))
        self.out += [0] * (slots - len(self.out))


def _check_running(board: _Board, job: Job, placement: Placement) -> None:
    assert job.running is not None
    problem = board.problem
    if placement.start != job.running.start or sorted(placement.gpus) != sorted(job.running.gpus):
        board.broken.append(
            f"job {job.id}: running, must stay at {job.running.start} on GPUs {list(job.running.gpus)}"
        )
    elif placement.slots != problem.running_slots(job):
        board.broken.append(
            f"job {job.id}: runs {problem.running_slots(job)} slots, the plan says {placement.slots}"
        )
    elif board.take(_mask(placement.gpus), *problem.running_window(job)):
        board.broken.append(f"job {job.id}: shares a GPU with another running job")


def _check_start(board: _Board, job: Job, placement: Placement) -> None:
    """A job that the plan starts: shape, window, free GPUs."""
    problem, gpus, start, slots = board.problem, placement.gpus, placement.start, placement.slots
    broken, total = board.broken, board.problem.total_gpus
    width = len(gpus)
    block = width > 0 and gpus == tuple(range(gpus[0], gpus[0] + width))
    if (
        not width
        or gpus[0] < 0
        or max(gpus) >= total
        or not (block or (min(gpus) >= 0 and len(set(gpus)) == width))
    ):
        broken.append(f"job {job.id}: GPUs {list(gpus)}; expected distinct GPUs of 0 to {total - 1}")
        return
    node_of, nodes = problem.node_of, problem.nodes
    node = nodes[node_of[gpus[0]]]
    for choice in job.choices:
        if choice.gpus == width and choice.slots_on(node.gpu) == slots:
            break
    else:
        broken.append(
            f"job {job.id}: {width} GPUs of type {node.gpu} for {slots} slots is none of its choices"
        )
        return
    if block and node_of[gpus[0]] == node_of[gpus[-1]]:
        if not problem.accepts(job, node):
            broken.append(f"job {job.id}: GPUs of type {node.gpu}; expected {' or '.join(job.gpu_types)}")
    else:
        fault = _gang_fault(problem, job, gpus)
        if fault:
            broken.append(f"job {job.id}: {fault}")
    end = start + slots
    if not max(job.release, 0) <= start < problem.slots:
        broken.append(f"job {job.id}: starts at {start}; allowed from {job.release} to {problem.slots - 1}")
        return
    if (job.deadline is not None and end > job.deadline) or (end > problem.slots and not problem.open_end):
        broken.append(
            f"job {job.id}: ends at {end}, after its deadline ({job.deadline}) or horizon ({problem.slots})"
        )
    mask = ((1 << width) - 1) << gpus[0] if block else _mask(gpus)
    out = board.out
    for slot in range(start, min(end, len(out))):
        if out[slot] & mask:
            broken.append(f"job {job.id}: GPU {_lowest(out[slot] & mask)} is out of service at slot {slot}")
            break
    if clash := board.take(mask, start, end):
        broken.append(
            f"job {job.id}: GPU {_lowest(clash)} is taken by another job between slots {start} and {end}"
        )


def _fits_some_node(problem: Problem, job: Job, width: int) -> bool:
    return any(node.gpus >= width and problem.accepts(job, node) for node in problem.nodes)


def _gang_fault(problem: Problem, job: Job, gpus: tuple[int, ...]) -> str | None:
    """What is wrong with a set of GPUs that is not one block of one node; None for a proper gang."""
    if _fits_some_node(problem, job, len(gpus)):
        return f"fits in a node, but GPUs {list(gpus)} are not consecutive GPUs of one node"
    touched = [problem.nodes[k] for k in {problem.node_of[gpu] for gpu in gpus}]
    if any(not problem.accepts(job, node) for node in touched):
        return f"uses a node of a type that it does not accept ({', '.join(job.gpu_types)})"
    if sum(node.gpus for node in touched) != len(gpus) or len({node.gpus for node in touched}) > 1:
        return f"wider than a node, must take whole nodes of one size, got GPUs {list(gpus)}"
    if len({(node.gpu, node.domain) for node in touched}) > 1:
        return "wider than a node, must take nodes of one type and one domain"
    return None


def _check_realtime(board: _Board, rows: tuple[ServicePlan, ...]) -> None:
    problem, broken = board.problem, board.broken
    listed: dict[str, ServicePlan] = {}
    for row in rows:
        if row.service in listed:
            broken.append(f"service {row.service}: listed twice")
        listed[row.service] = row
    for name in listed.keys() - {service.service for service in problem.services}:
        broken.append(f"service {name}: no such service")
    for service in problem.services:
        found = listed.get(service.service)
        if found is None or len(found.gpus) != problem.slots or len(found.shortage) != problem.slots:
            broken.append(
                f"service {service.service}: needs GPUs and a shortage for each of {problem.slots} slots"
            )
        else:
            _check_service(board, service, found)


def _check_service(board: _Board, service: Service, row: ServicePlan) -> None:
    problem, broken, who = board.problem, board.broken, f"service {service.service}"
    total, replica = problem.total_gpus, service.gpus_per_replica
    before: int | None = _mask(service.current) if isinstance(service.current, tuple) else None
    count = service.current - service.current % replica if isinstance(service.current, int) else None
    last: tuple[int, ...] | None = None
    now = 0
    for slot, gpus in enumerate(row.gpus):
        if gpus != last:
            if gpus and (min(gpus) < 0 or max(gpus) >= total or len(set(gpus)) != len(gpus)):
                broken.append(
                    f"{who}: slot {slot}: GPUs {list(gpus)}; expected distinct GPUs of 0 to {total - 1}"
                )
                return
            now, last = _mask(gpus), gpus
            if replica > 1 and _whole_replicas(problem, now, replica) != now:
                broken.append(f"{who}: slot {slot}: GPUs {list(gpus)} are not whole replicas of {replica}")
        if now & (board.busy[slot] | board.out[slot]):
            why = "taken" if now & board.busy[slot] else "out of service"
            gpu = _lowest(now & (board.busy[slot] | board.out[slot]))
            broken.append(f"{who}: GPU {gpu} is {why} at slot {slot}")
        board.busy[slot] |= now
        ramp = service.ramp_at(slot)
        if before is not None:
            before = _alive(problem, before, board.out[slot], replica)
            if now & ~before and before & ~now:
                broken.append(f"{who}: moves replicas to other GPUs at slot {slot}")
            lowest = (before & ~board.fixed[slot]).bit_count() - ramp
            count = before.bit_count()
        else:
            lowest = (count or 0) - ramp
            if slot == 0 and count is not None:
                # Where only a count is known, and fewer GPUs are free than it says, it cannot be held to it.
                idle = ((1 << total) - 1) & ~((board.busy[0] & ~now) | board.out[0])
                if _whole_replicas(problem, idle, replica).bit_count() < count:
                    lowest = 0
        if count is not None and not lowest <= len(gpus) <= count + ramp:
            broken.append(f"{who}: from {count} to {len(gpus)} GPUs at slot {slot}, its ramp is {ramp}")
        before = now
        if abs(row.shortage[slot] - service.shortage(slot, len(gpus))) > _TOLERANCE:
            found = service.shortage(slot, len(gpus))
            broken.append(f"{who}: slot {slot}: shortage {row.shortage[slot]}; its GPUs leave {found}")


def _alive(problem: Problem, held: int, out: int, replica: int) -> int:
    """The GPUs a service still has: those in service, of replicas that are whole."""
    if replica == 1:
        return held & ~out
    whole = _whole_replicas(problem, held, replica)
    dead, ones = whole & out, (1 << replica) - 1
    while dead:
        at = _replica_start(problem, whole, _lowest(dead), replica)
        whole &= ~(ones << at)
        dead = whole & out
    return whole


def _whole_replicas(problem: Problem, mask: int, replica: int) -> int:
    """The GPUs of a set that form replicas: from the lowest up, consecutive and within a node."""
    whole, at, ones = 0, 0, (1 << replica) - 1
    while mask >> at:
        at += _lowest(mask >> at)
        block = ones << at
        if mask & block == block and problem.node_of[at] == problem.node_of[at + replica - 1]:
            whole |= block
            at += replica
        else:
            at += 1
    return whole


def _replica_start(problem: Problem, whole: int, gpu: int, replica: int) -> int:
    """First GPU of the replica that holds a GPU, in a set that is made of whole replicas."""
    at = 0
    while True:
        at += _lowest(whole >> at)
        if at <= gpu < at + replica:
            return at
        at += replica


def _held_idle(board: _Board, service: Service, row: ServicePlan) -> int:
    """GPU-slots that could be given back, a replica at a time, with demand met and the ramp kept."""
    counts = [len(gpus) for gpus in row.gpus]
    if service.current is None:
        before: int | None = None
    else:
        before = service.current if isinstance(service.current, int) else len(service.current)
    idle = 0
    for slot, count in enumerate(counts):
        lower = count - service.gpus_per_replica
        near = before is None or abs(lower - before) <= service.ramp_at(slot)
        if lower >= max(service.wanted(slot)) and near:
            after = counts[slot + 1] if slot + 1 < len(counts) else lower
            idle += service.gpus_per_replica * (abs(after - lower) <= service.ramp)
        before = count
    return idle


def _check_tenants(board: _Board, started: list[tuple[Job, Placement]]) -> None:
    """Jobs too long to borrow fit, together, in what their tenant is guaranteed (or nobody is)."""
    problem = board.problem
    if not problem.tenants:
        return
    shares = {tenant.name: tenant for tenant in problem.tenants}
    unguaranteed = problem.total_gpus - sum(tenant.gpus for tenant in problem.tenants)
    use: dict[str | None, dict[int, int]] = {}

    def count(job: Job, slots: int, gpus: int, first: int, last: int) -> tuple[str | None, bool]:
        share = shares.get(job.tenant or "")
        key, borrows = (share.name, slots <= share.borrow_slots) if share else (None, False)
        if not borrows:
            row = use.setdefault(key, {})
            for slot in range(first, last):
                row[slot] = row.get(slot, 0) + gpus
        return key, borrows

    for job in problem.jobs:
        if job.running is not None:
            count(job, problem.running_slots(job), len(job.running.gpus), *problem.running_window(job))
    counted = [(job, p, count(job, p.slots, len(p.gpus), p.start, p.end)) for job, p in started]
    for job, placement, (key, borrows) in counted:
        limit = unguaranteed if key is None else shares[key].gpus
        peak = 0 if borrows else max(use[key][slot] for slot in range(placement.start, placement.end))
        if peak > limit:
            whose = f"tenant {key}" if key else "tenants without a guarantee"
            board.broken.append(f"job {job.id}: {whose} would hold {peak} GPUs; expected at most {limit}")


def _check_reservations(
    board: _Board, started: list[tuple[Job, Placement]], rows: tuple[ServicePlan, ...]
) -> None:
    """Where a job runs, all that is used or held for other tenants fits in the GPUs in service."""
    problem = board.problem
    if not problem.reservations:
        return
    reach = range(len(board.busy))
    held: list[dict[str, int]] = [{} for _ in reach]
    for reservation in problem.reservations:
        for slot in range(max(reservation.start, 0), min(reservation.end, len(held))):
            held[slot][reservation.tenant] = held[slot].get(reservation.tenant, 0) + reservation.gpus

    def use(job: Job, gpus: int, first: int, last: int) -> None:
        for slot in range(first, last):
            if job.tenant in held[slot]:
                held[slot][job.tenant] = max(0, held[slot][job.tenant] - gpus)

    for job in problem.jobs:
        if job.running is not None:
            use(job, len(job.running.gpus), *problem.running_window(job))
    for job, placement in started:
        use(job, len(placement.gpus), placement.start, placement.end)
    for job, placement in started:
        for slot in range(placement.start, placement.end):
            kept = sum(gpus for tenant, gpus in held[slot].items() if tenant != job.tenant)
            taken = (board.busy[slot] | board.out[slot]).bit_count()
            if kept and taken + kept > problem.total_gpus:
                board.broken.append(
                    f"job {job.id}: at slot {slot} takes GPUs that are reserved for another tenant"
                )
                break


def _mask(gpus: Sequence[int]) -> int:
    if not gpus:
        return 0
    first, width = gpus[0], len(gpus)
    if gpus == tuple(range(first, first + width)):
        return ((1 << width) - 1) << first
    mask = 0
    for gpu in gpus:
        mask |= 1 << gpu
    return mask


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1
