"""A plan as an SVG drawing: GPUs down, slots across, one colour per kind of job, and a legend.

Everything that holds a GPU is a rectangle with a title that browsers show when the pointer rests on it, so
nothing has to be written small. Each service has its own hatching. The cost: a file of some ten kilobytes
for a day of 64 GPUs, a megabyte for 10,000.
"""

from collections.abc import Callable, Iterable
from html import escape

from allocator.picture import OUT, SERVICE_COLOUR, Holder, Rows, colours, figures, holders, ink, plain, window
from allocator.plan import Placement, Plan
from allocator.problem import Problem

_LEFT, _TOP, _RIGHT = 120.0, 96.0, 24.0
_INK, _FAINT, _PAPER = "#222", "#d8d8d8", "#fff"
_PALE = "#fbe3d2"
_ANGLES = (-45, 45, 90, 0)  # of the hatching of the first services
_FONT = "font-family='DejaVu Sans, Helvetica, Arial, sans-serif'"

Box = tuple[float, float, float, float]  # x, y, width, height in cells


def svg(problem: Problem, plan: Plan, *, committed: int = 1) -> str:
    """The drawing as text; ``committed`` is how many slots from the first are marked as committed."""
    rows = holders(problem, plan)
    sheet = _Sheet(problem)
    parts = [*_paper(sheet, problem, plan), *_grid(sheet, problem)]
    parts += _holes(sheet, rows)
    for at, service in enumerate(plan.realtime):
        parts += _service(sheet, rows, service.service, _hatch(at))
    for placement in plan.placements:
        parts += _job(sheet, problem, placement)
    parts += _committed(sheet, committed)
    parts += _axes(sheet, problem)
    parts += _legend(sheet, problem, rows)
    size = f"width='{sheet.width:g}' height='{sheet.height:g}' viewBox='0 0 {sheet.width:g} {sheet.height:g}'"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {size} {_FONT}>", *parts, "</svg>", ""])


class _Sheet:
    """Where cells lie on the paper."""

    def __init__(self, problem: Problem) -> None:
        self.slots = problem.slots
        self.gpus = problem.total_gpus
        self.cell = min(44.0, max(960.0 / self.slots, 2.5))
        self.row = min(22.0, max(880.0 / self.gpus, 1.5 if self.gpus < 2000 else 0.4))
        self.right = _LEFT + self.slots * self.cell
        self.bottom = _TOP + self.gpus * self.row
        self.width = max(self.right + _RIGHT, 760.0)
        self.height = self.bottom + 92

    def x(self, slot: float) -> float:
        return round(_LEFT + slot * self.cell, 2)

    def y(self, gpu: float) -> float:
        return round(_TOP + gpu * self.row, 2)

    def rect(self, box: Box, style: str, title: str = "", inset: float = 0) -> str:
        x, y, width, height = box
        inset = min(inset, height * self.row / 6, width * self.cell / 6)
        at = f"x='{self.x(x) + inset:g}' y='{self.y(y) + inset:g}'"
        size = f"width='{width * self.cell - 2 * inset:.2f}' height='{height * self.row - 2 * inset:.2f}'"
        if not title:
            return f"<rect {at} {size} {style}/>"
        return f"<rect {at} {size} {style}><title>{escape(title)}</title></rect>"

    def name(self, box: Box, text: str, colour: str) -> list[str]:
        """A label in the middle of a box, when it fits."""
        x, y, width, height = box
        size = min(12.0, height * self.row * 0.8)
        if size < 6 or len(text) * size * 0.62 + 4 > width * self.cell:
            return []
        at = f"x='{self.x(x + width / 2):g}' y='{self.y(y + height / 2) + size * 0.36:.2f}'"
        return [
            f"<text {at} font-size='{size:.1f}' fill='{colour}' text-anchor='middle'>{escape(text)}</text>"
        ]


def _paper(sheet: _Sheet, problem: Problem, plan: Plan) -> list[str]:
    strokes = f"<path d='M0,4 H8' stroke='{SERVICE_COLOUR}' stroke-width='2'/>"
    cross = "<path d='M0,0 l8,8 M8,0 l-8,8' stroke='#777' stroke-width='1'/>"
    size = "width='8' height='8' patternUnits='userSpaceOnUse'"
    return [
        "<defs>",
        *[
            f"<pattern id='hatch{at}' {size} patternTransform='rotate({angle})'>"
            f"<rect width='8' height='8' fill='{_PALE}'/>{strokes}</pattern>"
            for at, angle in enumerate(_ANGLES)
        ],
        f"<pattern id='cross' {size}><rect width='8' height='8' fill='#cfcfcf'/>{cross}</pattern>",
        "</defs>",
        f"<rect width='100%' height='100%' fill='{_PAPER}'/>",
        f"<text x='{_LEFT:g}' y='30' font-size='18' font-weight='bold' fill='{_INK}'>"
        f"{escape(problem.name)}, {escape(plan.mode)}</text>",
        f"<text x='{_LEFT:g}' y='52' font-size='12' fill='{_INK}'>{escape(figures(problem, plan))}</text>",
    ]


def _hatch(service: int) -> str:
    return f"url(#hatch{service % len(_ANGLES)})"


def _grid(sheet: _Sheet, problem: Problem) -> list[str]:
    parts = [sheet.rect((0, 0, sheet.slots, sheet.gpus), "fill='#fafafa'")]
    every = 1 if sheet.cell >= 8 else _step(sheet)
    parts += [
        _line(sheet.x(slot), _TOP, sheet.x(slot), sheet.bottom, _FAINT, 0.5)
        for slot in range(0, sheet.slots + 1, every)
    ]
    if sheet.row >= 6:
        parts += [
            _line(_LEFT, sheet.y(gpu), sheet.right, sheet.y(gpu), _FAINT, 0.5)
            for gpu in range(sheet.gpus + 1)
        ]
    return parts


def _holes(sheet: _Sheet, rows: Rows) -> list[str]:
    return [
        sheet.rect(box, "fill='url(#cross)'", "out of service") for box in _boxes(rows, lambda h: h == OUT)
    ]


def _service(sheet: _Sheet, rows: Rows, name: str, fill: str) -> list[str]:
    holder = Holder("service", name)
    boxes = list(_boxes(rows, lambda h: h == holder))
    parts = [
        sheet.rect(box, f"fill='{fill}'", f"{name}, slots {box[0]:g} to {box[0] + box[2]:g}") for box in boxes
    ]
    if boxes:
        largest = max(boxes, key=lambda box: (box[2] * min(box[3], 3), -box[0]))
        label = sheet.name(largest, name, _INK)
        x, y, width, height = largest
        if label:  # on a plate, so that the hatching does not strike it through
            plate = (len(name) * min(12.0, height * sheet.row * 0.8) * 0.62 + 6) / sheet.cell
            tall = min(height, 15 / sheet.row)
            box = (x + width / 2 - plate / 2, y + height / 2 - tall / 2, plate, tall)
            parts += [sheet.rect(box, f"fill='{_PALE}'"), *label]
    return parts


def _job(sheet: _Sheet, problem: Problem, placement: Placement) -> list[str]:
    job = problem.job_by_id[placement.job]
    colour = colours(problem)[job.kind]
    start, end = window(problem, placement)
    length = min(end, problem.slots) - start
    if length <= 0:
        return []
    title = (
        f"{job.id} ({job.kind}): {len(placement.gpus)} GPUs, slots {placement.start} to {placement.end}, "
        f"worth {plain(problem.worth(job))}"
    )
    parts = []
    for first, width in _runs(placement.gpus):
        box = (float(start), float(first), float(length), float(width))
        thin = width * sheet.row < 5  # a border would cover it
        style = f"fill='{colour}'" if thin else f"fill='{colour}' stroke='{_PAPER}' stroke-width='0.5' rx='2'"
        parts.append(sheet.rect(box, style, title, 0.2 if thin else 0.8))
        name = f"◂ {job.id}" if placement.start < 0 else job.id
        parts += sheet.name(box, f"{name} ▸" if end > problem.slots else name, ink(colour))
    return parts


def _committed(sheet: _Sheet, committed: int) -> list[str]:
    last = min(committed, sheet.slots)
    if last <= 0:
        return []
    x = sheet.x(last)
    return [
        f"<rect x='{_LEFT:g}' y='{_TOP - 10:g}' width='{x - _LEFT:g}' height='6' fill='#c00'/>",
        f"<path d='M{x:g},{_TOP - 10:g} V{sheet.bottom + 6:g}' stroke='#c00' stroke-width='1.5' "
        "stroke-dasharray='5 3'/>",
    ]


def _axes(sheet: _Sheet, problem: Problem) -> list[str]:
    parts = [
        f"<text x='{sheet.x(slot):g}' y='{_TOP - 14:g}' font-size='11' fill='{_INK}'>{slot}</text>"
        for slot in range(0, sheet.slots, _step(sheet))
    ]
    unit = f"slots of {problem.slot_minutes} minutes"
    parts.append(
        f"<text x='{sheet.right:g}' y='{sheet.bottom + 18:g}' font-size='11' fill='{_INK}' "
        f"text-anchor='end'>{unit}</text>"
    )
    written = -100.0
    for first, node in zip(problem.first_gpu, problem.nodes, strict=True):
        y = sheet.y(first)
        parts.append(_line(_LEFT - 6, y, sheet.right, y, "#555", 1.0 if sheet.row * node.gpus >= 6 else 0.3))
        if y - written >= 13:
            written = y
            name = f"{node.name} {node.gpu}" if node.gpu else node.name
            parts.append(
                f"<text x='{_LEFT - 24:g}' y='{y + 11:g}' font-size='11' fill='{_INK}' "
                f"text-anchor='end'>{escape(name)}</text>"
            )
    parts.append(_line(_LEFT - 6, sheet.bottom, sheet.right, sheet.bottom, "#555", 1.0))
    if sheet.row >= 10:
        parts += [
            f"<text x='{_LEFT - 4:g}' y='{sheet.y(gpu) + sheet.row * 0.75:.1f}' font-size='8' fill='#777' "
            f"text-anchor='end'>{gpu}</text>"
            for gpu in range(sheet.gpus)
        ]
    return parts


def _legend(sheet: _Sheet, problem: Problem, rows: Rows) -> list[str]:
    seen = {holder for row in rows for holder in row}
    kinds = {holder.kind for holder in seen if holder is not None and holder.sort == "job"}
    entries = [(colour, kind) for kind, colour in colours(problem).items() if kind in kinds]
    entries += [
        (_hatch(at), f"{service.service} (real-time)")
        for at, service in enumerate(problem.services)
        if Holder("service", service.service) in seen
    ]
    if OUT in seen:
        entries.append(("url(#cross)", "out of service"))
    entries += [("#fafafa", "idle"), ("#c00", "committed")]
    parts, x, y = [], _LEFT, sheet.bottom + 42
    for fill, name in entries:
        if x + 30 + len(name) * 7.2 > sheet.width:
            x, y = _LEFT, y + 22
        height, drop = (6, 4) if name == "committed" else (14, 0)
        parts.append(
            f"<rect x='{x:g}' y='{y + drop:g}' width='20' height='{height}' fill='{fill}' stroke='#999' "
            "stroke-width='0.5'/>"
        )
        parts.append(
            f"<text x='{x + 26:g}' y='{y + 11:g}' font-size='12' fill='{_INK}'>{escape(name)}</text>"
        )
        x += 26 + len(name) * 7.2 + 18
    return parts


def _boxes(rows: Rows, wanted: Callable[[Holder | None], bool]) -> Iterable[Box]:
    """Rectangles that cover the wanted cells: runs of slots, the same on neighbouring GPUs joined."""
    open_runs: dict[tuple[int, int], int] = {}
    for gpu in range(len(rows) + 1):
        runs = set(_slot_runs(rows[gpu], wanted)) if gpu < len(rows) else set()
        for run in [run for run in open_runs if run not in runs]:
            first = open_runs.pop(run)
            yield float(run[0]), float(first), float(run[1] - run[0]), float(gpu - first)
        for run in runs:
            open_runs.setdefault(run, gpu)


def _slot_runs(row: list[Holder | None], wanted: Callable[[Holder | None], bool]) -> list[tuple[int, int]]:
    runs, begin = [], -1
    for slot, holder in enumerate([*row, None]):
        if slot < len(row) and wanted(holder):
            begin = slot if begin < 0 else begin
        elif begin >= 0:
            runs.append((begin, slot))
            begin = -1
    return runs


def _runs(gpus: tuple[int, ...]) -> list[tuple[int, int]]:
    """Neighbouring GPUs as (first, how many)."""
    runs: list[tuple[int, int]] = []
    for gpu in sorted(gpus):
        if runs and gpu == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((gpu, 1))
    return runs


def _step(sheet: _Sheet) -> int:
    """Slots between two numbers on the axis."""
    return next(n for n in (1, 2, 3, 4, 6, 12, 24, 48, 96, 10**6) if n * sheet.cell >= 24)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    return (
        f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='{colour}' stroke-width='{width:g}'/>"
    )
