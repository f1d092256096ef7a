"""A set of replays as an SVG drawing: what each policy earned, used, lacked and made people wait.

Drawn from `replay_report` alone. One colour for each policy throughout, figures beside the bars, so that
nothing must be read off an axis.
"""

from collections.abc import Sequence
from html import escape

from flows.replay_report import Report, Table

COLOURS = {
    "fifo": "#999999",
    "backfill": "#e69f00",
    "greedy": "#56b4e9",
    "slotwise": "#0072b2",
    "full": "#009e73",
    "oracle": "#cc79a7",
}
FONT = "font-family='DejaVu Sans, Helvetica, Arial, sans-serif'"
WIDTH, GAP, LABEL, FIGURE = 540.0, 36.0, 96.0, 150.0  # of a panel: all, around it, left and right of its bars
BAR, MOST_ROWS = 15.0, 12

Bar = tuple[str, float, str, str]  # label, length, figure, colour
Panel = tuple[float, list[str]]  # height, elements drawn from (0, 0)


def picture(report: Report, title: str) -> str:
    """The drawing as text."""
    columns = [
        [_value(report), _utilization(report), _shortage(report), _plans(report)],
        [_waits(report, report.by_priority), _waits(report, report.by_gpus), _errors(report.forecast)],
    ]
    parts = [_text(GAP, 30, title, 15, "bold")]
    bottoms = []
    for at, panels in enumerate(columns):
        y = 56.0
        for height, elements in panels:
            x = GAP + at * (WIDTH + GAP)
            parts += [f"<g transform='translate({x:g},{y:g})'>", *elements, "</g>"]
            y += height + 24
        bottoms.append(y)
    y = max(bottoms)
    height, elements = _course(report, 2 * WIDTH + GAP)
    parts += [f"<g transform='translate({GAP:g},{y:g})'>", *elements, "</g>"]
    width, height = 2 * WIDTH + 3 * GAP, y + height + GAP
    box = f"width='{width:g}' height='{height:g}' viewBox='0 0 {width:g} {height:g}'"
    paper = f"<rect width='{width:g}' height='{height:g}' fill='#fff'/>"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {box} {FONT}>", paper, *parts, "</svg>", ""])


def _value(report: Report) -> Panel:
    offered = max((account["offered_value"] for account in report.accounts), default=0.0)
    fifo = next((each["value"] for each in report.accounts if each["policy"] == "fifo"), 0.0)
    bars = []
    for account in report.accounts:
        ratio = f" = {account['value'] / fifo:.2f} × fifo" if fifo else ""
        bars.append(_bar(account["policy"], account["value"], f"{account['value']:,.0f}{ratio}"))
    return _bars(f"Value of completed jobs (offered: {offered:,.0f})", bars, offered)


def _utilization(report: Report) -> Panel:
    bars = []
    for account in report.accounts:
        jobs, all_of_it = account["batch_utilization"], account["utilization"]
        said = f"{all_of_it:.1%}, jobs {jobs:.1%}"
        bars.append(_bar(account["policy"], all_of_it, said))
    return _bars("Utilization: jobs and served demand over all GPU-time", bars, 1.0)


def _shortage(report: Report) -> Panel:
    bars = []
    for account in report.accounts:
        said = f"{account['shortage_gpu_slots']:,.1f}; served {account['served_share']:.2%}"
        bars.append(_bar(account["policy"], account["shortage_gpu_slots"], said))
    return _bars("GPU-slots that services lacked, and share of demand served", bars)


def _plans(report: Report) -> Panel:
    names = report.plans.names
    bars = []
    for row in report.plans.rows:
        found = dict(zip(names, row, strict=True))
        moved = "none advised" if found["moved share"] is None else f"{found['moved share']:.0%} moved"
        said = f"{found['median ms']:.1f}, p95 {found['p95 ms']:.0f}; {moved}"
        bars.append(_bar(found["policy"], found["median ms"], said))
    return _bars("Median milliseconds to plan; advised starts moved an hour later", bars)


def _waits(report: Report, table: Table) -> Panel:
    bars = []
    for row in table.rows[:MOST_ROWS]:
        for at, (policy, wait) in enumerate(zip(report.policies, row[2:], strict=True)):
            label = f"{row[0]:g}  ({row[1]:,} jobs)" if at == 0 else ""
            bars.append((label, wait or 0.0, "" if wait is None else f"{wait:.2f}", _colour(policy)))
    more = len(table.rows) - MOST_ROWS
    return _bars(table.title + (f" (the first {MOST_ROWS})" if more > 0 else ""), bars)


def _errors(table: Table) -> Panel:
    bars = []
    for row in table.rows[: 2 * MOST_ROWS]:
        service, ahead, _, error, mean, inside = row
        said = f"{error:.2f} of {mean:.1f}; {inside:.0%} inside"
        bars.append((f"{service[:8]} +{ahead} h", error, said, "#009e73"))
    return _bars("Forecast: mean error in GPUs; share inside .05 to .95", bars)


def _course(report: Report, width: float) -> Panel:
    """Utilization day by day."""
    days = sorted({row["day"] for row in report.days})
    height, left, right = 150.0, 40.0, 90.0
    step = (width - left - right) / max(len(days) - 1, 1)
    parts = [_text(0, 0, "Utilization by day", 12, "bold")]
    for level in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = 14 + height * (1 - level)
        parts.append(f"<path d='M{left:g} {y:g}H{width - right:g}' stroke='#ddd'/>")
        parts.append(_text(left - 6, y + 4, f"{level:.0%}", 10, anchor="end"))
    for at, day in enumerate(days):
        if at % max(1, len(days) // 14) == 0:
            parts.append(_text(left + at * step, height + 30, f"{day:%m-%d}", 10, anchor="middle"))
    for at, policy in enumerate(report.policies):
        found = {row["day"]: row["utilization"] for row in report.days if row["policy"] == policy}
        places = [
            f"{left + days.index(day) * step:.1f},{14 + height * (1 - share):.1f}"
            for day, share in found.items()
        ]
        style = f"fill='none' stroke='{_colour(policy)}' stroke-width='2'"
        parts.append(f"<polyline points='{' '.join(places)}' {style}/>")
        parts.append(_text(width - right + 12, 26 + 16 * at, policy, 11, colour=_colour(policy)))
    return height + 36, parts


def _bars(title: str, bars: Sequence[Bar], most: float = 0.0) -> Panel:
    parts = [_text(0, 0, title, 12, "bold")]
    longest = max([most, *(length for _, length, _, _ in bars)]) or 1.0
    for at, (label, length, figure, colour) in enumerate(bars):
        y = 12 + at * BAR
        long = (WIDTH - LABEL - FIGURE) * length / longest
        parts.append(_text(LABEL - 6, y + 10, label, 10.5, anchor="end"))
        parts.append(
            f"<rect x='{LABEL:g}' y='{y:g}' width='{long:.1f}' height='{BAR - 3:g}' fill='{colour}'/>"
        )
        parts.append(_text(LABEL + long + 5, y + 10, figure, 10.5))
    return 12 + BAR * len(bars), parts


def _bar(policy: str, length: float, figure: str) -> Bar:
    return policy, length, figure, _colour(policy)


def _colour(policy: str) -> str:
    return COLOURS.get(policy, "#222222")


def _text(
    x: float,
    y: float,
    said: str,
    size: float,
    weight: str = "normal",
    anchor: str = "start",
    colour: str = "#222",
) -> str:
    style = f"font-size='{size:g}' font-weight='{weight}' text-anchor='{anchor}' fill='{colour}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(said)}</text>"
