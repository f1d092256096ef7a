"""A plan that a person can read in a terminal: GPUs down, slots across, and the figures above it.

Rows of GPUs that hold the same in every slot are shown once; if that is still too long, a row is a node (or
several) and shows how full it is. Long horizons are folded to the width of the terminal. Colour says what
kind of work it is; without colour the job's name, the fill and the border at its start still say it.

The invariant: what is drawn comes from the problem and the plan alone, through ``holders``. The cost of
folding: a column of several slots shows what holds most of them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from allocator.plan import Placement, Plan
from allocator.problem import Problem

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

KIND_COLOURS = {"training": "#0072b2", "batch_inference": "#009e73", "quantization": "#e69f00"}
MORE_COLOURS = ("#cc79a7", "#56b4e9", "#8c6bb1", "#7f6a4f", "#b8a40c")  # for kinds that are not ours
SERVICE_COLOUR = "#d55e00"
_FILLS = {"training": "─", "batch_inference": "═", "quantization": "~"}
_LEVELS = " ▁▂▃▄▅▆▇█"
_MOST_ROWS = 72  # display rows before nodes are shown instead of GPUs
_MOST_NODES = 40


@dataclass(frozen=True, slots=True)
class Holder:
    """What has a GPU in a slot: a job, a service, or nobody because it is out of service.

    Attributes:
        sort: ``job``, ``service`` or ``out``.
        name: of the job or service.
        kind: of the job.
    """

    sort: str
    name: str = ""
    kind: str = ""


OUT = Holder("out")
Rows = list[list[Holder | None]]


def holders(problem: Problem, plan: Plan) -> Rows:
    """What has each GPU in each slot of the horizon; None for an idle one."""
    rows: Rows = [[None] * problem.slots for _ in range(problem.total_gpus)]
    for hole in problem.unavailable:
        for gpu in hole.gpus:
            for slot in range(max(hole.start, 0), min(hole.end, problem.slots)):
                rows[gpu][slot] = OUT
    for service in plan.realtime:
        holder = Holder("service", service.service)
        for slot, gpus in enumerate(service.gpus):
            for gpu in gpus:
                rows[gpu][slot] = holder
    for placement in plan.placements:
        job = problem.job_by_id[placement.job]
        holder = Holder("job", job.id, job.kind)
        start, end = window(problem, placement)
        for gpu in placement.gpus:
            for slot in range(start, min(end, problem.slots)):
                rows[gpu][slot] = holder
    return rows


def window(problem: Problem, placement: Placement) -> tuple[int, int]:
    """Slots (from, to) in which a placed job holds its GPUs; to may lie beyond the horizon."""
    job = problem.job_by_id[placement.job]
    if job.running is not None:
        return problem.running_window(job)
    return placement.start, placement.end


def colours(problem: Problem) -> dict[str, str]:
    """A colour for each kind of job in the problem, ours always the same."""
    kinds = sorted({job.kind for job in problem.jobs})
    strange = [kind for kind in kinds if kind not in KIND_COLOURS]
    more = {kind: MORE_COLOURS[at % len(MORE_COLOURS)] for at, kind in enumerate(strange)}
    return {kind: KIND_COLOURS.get(kind) or more[kind] for kind in kinds}


def figures(problem: Problem, plan: Plan) -> str:
    """The figures of a plan in one line."""
    from allocator.check import score

    found = score(problem, plan)
    parts = [
        f"objective {plain(plan.objective)}",
        f"value {plain(plan.value)}",
        f"utilization {100 * plan.utilization:.1f} %",
        f"{found.placed} of {len(problem.jobs)} jobs",
        f"shortage {plain(found.shortage)} GPU-slots",
    ]
    if found.move_cost:
        parts.append(f"moves {plain(found.move_cost)}")
    if plan.gap_percent is not None:
        near = "proven best" if plan.gap_percent == 0 else f"at most {plan.gap_percent:.2f} % below the best"
        parts.append(f"{near} (bound {plain(plan.bound or 0)})")
    parts.append(f"{plan.solve_ms:.1f} ms")
    return " · ".join(parts)


def plain(number: float) -> str:
    """A figure as people write it: 1052, 3.5."""
    return f"{round(number, 2):.10g}"


def show(
    console: "Console",
    problem: Problem,
    plan: Plan,
    *,
    committed: int = 1,
    most_unplaced: int = 20,
    remedies: dict[str, str] | None = None,
) -> None:
    """Print the grid, the figures, what was left out and why, and the warnings.

    Args:
        committed: slots from the first that are committed and marked so.
        most_unplaced: unplaced jobs to list.
        remedies: for unplaced jobs, what would help.
    """
    console.print(
        f"[bold]{_safe(problem.name)}[/bold], {plan.mode}: {figures(problem, plan)}", highlight=False
    )
    console.print(grid(problem, plan, width=console.width, committed=committed), highlight=False)
    if plan.unplaced:
        console.print(_unplaced(problem, plan, most_unplaced, remedies or {}), highlight=False)
        if len(plan.unplaced) > most_unplaced:
            console.print(
                f"and {len(plan.unplaced) - most_unplaced} more (--json has them all)", highlight=False
            )
    for warning in plan.warnings:
        console.print(f"[yellow]warning:[/yellow] {_safe(warning)}", highlight=False)


def grid(
    problem: Problem, plan: Plan, *, width: int = 100, committed: int = 1, most_rows: int = _MOST_ROWS
) -> "Text":
    """The GPU × slot grid with its header and legend, no wider than ``width`` where that can be."""
    from rich.text import Text

    rows = holders(problem, plan)
    groups = _alike(problem, rows)
    overview = len(groups) > most_rows
    bands = _bands(problem) if overview else []
    labels = [label for label, _ in bands] if overview else [_label(problem, group) for group in groups]
    margin = max(len(label) for label in labels) + 1
    fold, cell = _columns(problem.slots, max(width - margin - 1, 8))
    text = Text(no_wrap=True, overflow="crop")
    _header(text, problem.slots, margin, fold, cell, committed)
    paint = _Paint(problem, fold, cell)
    if overview:
        for label, gpus in bands:
            text.append(label.ljust(margin))
            paint.fullness(text, [rows[gpu] for gpu in gpus])
    else:
        named: set[str] = set()
        spans = {p.job: (p.start, window(problem, p)[1]) for p in plan.placements}
        for label, group in zip(labels, groups, strict=True):
            text.append(label.ljust(margin))
            paint.row(text, rows[group[0]], named, spans)
    notes = [f"(a column is {fold} slots)"] if fold > 1 else []
    if overview:
        notes.append("(a letter is a kind, height the share of the GPUs in use)")
    _legend(text, problem, rows, margin, width, notes)
    return text


def _alike(problem: Problem, rows: Rows) -> list[list[int]]:
    """Neighbouring GPUs of a node that hold the same in every slot."""
    groups: list[list[int]] = []
    for gpu, row in enumerate(rows):
        if groups and problem.node_of[gpu] == problem.node_of[gpu - 1] and row == rows[gpu - 1]:
            groups[-1].append(gpu)
        else:
            groups.append([gpu])
    return groups


def _bands(problem: Problem) -> list[tuple[str, range]]:
    """Nodes, or so many neighbouring nodes together that there are not too many rows."""
    nodes, first = problem.nodes, (*problem.first_gpu, problem.total_gpus)
    step = -(-len(nodes) // _MOST_NODES)
    bands = []
    for at in range(0, len(nodes), step):
        last = min(at + step, len(nodes)) - 1
        name = nodes[at].name if last == at else f"{nodes[at].name}–{nodes[last].name}"
        if nodes[at].gpu:
            name += f" {nodes[at].gpu}"
        bands.append((name, range(first[at], first[last + 1])))
    if len(bands) == 1 and problem.total_gpus > 1:  # one large node: bands of its GPUs
        size = -(-problem.total_gpus // _MOST_NODES)
        starts = range(0, problem.total_gpus, size)
        return [
            (f"{s}–{min(s + size, problem.total_gpus) - 1}", range(s, min(s + size, problem.total_gpus)))
            for s in starts
        ]
    return bands


def _label(problem: Problem, group: list[int]) -> str:
    node = problem.node_of[group[0]]
    gpus = f"{group[0]}" if len(group) == 1 else f"{group[0]}–{group[-1]}"
    if group[0] != problem.first_gpu[node]:
        return f"{'':{len(_node_label(problem, node))}} {gpus}"
    return f"{_node_label(problem, node)} {gpus}"


def _node_label(problem: Problem, node: int) -> str:
    entry = problem.nodes[node]
    return f"{entry.name} {entry.gpu}" if entry.gpu else entry.name


def _columns(slots: int, width: int) -> tuple[int, int]:
    """How many slots a column stands for, and how many characters it is wide."""
    fold = -(-slots // width)
    columns = -(-slots // fold)
    return fold, max(1, min(4, width // columns))


def _header(text: "Text", slots: int, margin: int, fold: int, cell: int, committed: int) -> None:
    columns = -(-slots // fold)
    every = next(n for n in (1, 2, 3, 4, 6, 12, 24, 48, 1000) if n * cell > len(str(slots)))
    marks = ""
    for column in range(0, columns, every):
        marks = marks.ljust(column * cell) + str(column * fold)
    text.append("slot".ljust(margin) + marks[: columns * cell + 4] + "\n", "bold")
    firm = min(-(-committed // fold), columns)
    text.append(" " * margin)
    text.append("━" * (firm * cell), "bold red")
    text.append("┄" * ((columns - firm) * cell) + "\n", "dim")


class _Paint:
    """Turns rows of holders into characters and styles."""

    def __init__(self, problem: Problem, fold: int, cell: int) -> None:
        self.fold = fold
        self.cell = cell
        self.colours = colours(problem)
        self.slots = problem.slots

    def row(
        self,
        text: "Text",
        row: Sequence[Holder | None],
        named: set[str],
        spans: dict[str, tuple[int, int]],
    ) -> None:
        """One row; a job's name goes on the first row that it has."""
        column = 0
        for holder, run in groupby(self._folded(row)):
            length = len(list(run)) * self.cell
            if holder is None:
                text.append("·" * length, "dim")
            elif holder.sort == "out":
                text.append("×" * length, "white on grey30")
            elif holder.sort == "service":
                name = "" if f"\0{holder.name}" in named or length <= len(holder.name) + 1 else holder.name
                if name:
                    named.add(f"\0{holder.name}")
                text.append(f"╱{name}".ljust(length, "╱"), f"{SERVICE_COLOUR} on #fbe3d2")
            else:
                start, end = spans[holder.name]
                fill = _FILLS.get(holder.kind, "-")
                name = "" if holder.name in named else holder.name[: max(length - 1, 1)]
                named.add(holder.name)
                mark = "◂" if start < 0 else "▏"
                body = name if length == 1 and name else f"{mark}{name}".ljust(length, fill)
                if end > self.slots and column * self.fold + length // self.cell * self.fold >= self.slots:
                    body = body[:-1] + "▸" if length > 1 else body
                text.append(body, f"{ink(self.colours[holder.kind])} on {self.colours[holder.kind]}")
            column += length // self.cell
        text.append("\n")

    def fullness(self, text: "Text", rows: Sequence[Sequence[Holder | None]]) -> None:
        """One row for many GPUs: how full each column is, in the colour of what it has most of."""
        for first in range(0, self.slots, self.fold):
            seen = Counter(
                holder for row in rows for holder in row[first : first + self.fold] if holder is not None
            )
            total = len(rows) * min(self.fold, self.slots - first)
            level = _LEVELS[-(-sum(seen.values()) * (len(_LEVELS) - 1) // total)]
            sorts: Counter[str] = Counter()
            for holder, count in seen.items():
                sorts[holder.kind or holder.sort] += count
            top = sorts.most_common(1)[0][0] if sorts else ""
            letter = {"service": "╱", "out": "×", "": "·"}.get(top, top[:1])
            style = self.colours.get(top, SERVICE_COLOUR if top == "service" else "grey50")
            text.append(
                (letter + level * self.cell)[-self.cell - 1 :][: self.cell] if self.cell > 1 else level, style
            )
        text.append("\n")

    def _folded(self, row: Sequence[Holder | None]) -> Iterable[Holder | None]:
        if self.fold == 1:
            return row
        return [
            Counter(row[first : first + self.fold]).most_common(1)[0][0]
            for first in range(0, self.slots, self.fold)
        ]


def _legend(text: "Text", problem: Problem, rows: Rows, margin: int, width: int, notes: list[str]) -> None:
    """What colours and fills mean, on as many lines as it takes."""
    seen = {holder for row in rows for holder in row}
    entries: list[tuple[str, str, str]] = []
    for kind, colour in colours(problem).items():
        if any(holder is not None and holder.kind == kind for holder in seen):
            entries.append((_FILLS.get(kind, "-") * 2, f"{ink(colour)} on {colour}", kind))
    if any(holder is not None and holder.sort == "service" for holder in seen):
        entries.append(("╱╱", f"{SERVICE_COLOUR} on #fbe3d2", "real-time"))
    if OUT in seen:
        entries.append(("××", "white on grey30", "out of service"))
    entries += [("··", "dim", "idle"), ("━━", "bold red", "committed")]
    entries += [("", "", note) for note in notes]
    at = width
    for sample, style, meaning in entries:
        length = len(f"{sample} {meaning}  ".lstrip())
        if at + length > width + 2:
            text.append(("\n" if at != width else "") + " " * margin)
            at = margin
        text.append(sample, style)
        text.append(f" {meaning}  ".lstrip() if not sample else f" {meaning}  ")
        at += length


def _unplaced(problem: Problem, plan: Plan, most: int, remedies: dict[str, str]) -> "RenderableType":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("unplaced", "GPUs×slots", "worth", "earliest", "why"):
        table.add_column(column, no_wrap=column != "why", justify="right" if column == "worth" else "left")
    for entry in plan.unplaced[:most]:
        job = problem.job_by_id[entry.job]
        shape = " or ".join(f"{choice.gpus}×{choice.first_slots}" for choice in job.choices)
        why = entry.reason + (f"; {remedies[entry.job]}" if entry.job in remedies else "")
        earliest = "–" if entry.earliest_start is None else f"slot {entry.earliest_start}"
        table.add_row(_safe(job.id), shape, plain(problem.worth(job)), earliest, _safe(why))
    return table


def ink(colour: str) -> str:
    """Black or white, whichever reads better on a colour."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 140 else "white"


def _safe(text: str) -> str:
    """Square brackets in a name are not markup."""
    from rich.markup import escape

    return escape(text)
