"""Pictures as SVG text: curves of a prediction over GPU counts, and stacked bars of where a step's time goes.

Written by hand, so that nothing but a browser is needed. A band or a piece carries a title, which browsers
show when the pointer rests on it.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

from training.performance import Prediction

_INK, _FAINT, _MFU, _COST = "#222", "#ddd", "#1f5fa8", "#b3541e"
_FONT = "font-family='DejaVu Sans, Helvetica, Arial, sans-serif' font-size='12'"
LABELS = {
    "compute": "compute",
    "hbm": "HBM",
    "nvlink": "NVLink",
    "network": "network",
    "memory_capacity": "memory capacity",
}
BANDS = {
    "compute": "#e8f1e4",
    "hbm": "#fdf1cf",
    "nvlink": "#e3e6f6",
    "network": "#f8dfdc",
    "memory_capacity": "#eee3f1",
}
COLOURS = ("#4c7fb0", "#e0a030", "#5a9e6f", "#c2574f", "#8a6bb0", "#bbbbbb", "#6b6b6b")
_LEFT, _TOP, _WIDTH, _HEIGHT = 64.0, 56.0, 620.0, 300.0


def curve(predictions: Sequence[Prediction], price_per_gpu_hour: float | None) -> str:
    """MFU with its interval, and cost per trillion tokens, over GPU counts; bands say what limits.

    Without a price the right axis counts GPU-hours instead.
    """
    counts = [said.gpus for said in predictions]
    low, high = math.log2(min(counts)) - 0.5, math.log2(max(counts)) + 0.5
    costs = [said.cost_per_trillion_tokens(price_per_gpu_hour or 1.0) for said in predictions]
    dearest = 5 * _round_above(max(costs) / 5)  # the axis has five lines

    def x(gpus: float) -> float:
        return _LEFT + _WIDTH * (math.log2(gpus) - low) / (high - low)

    def y(share: float) -> float:
        return _TOP + _HEIGHT * (1 - min(share, 1.0))

    parts = [_band(said, x(said.gpus / 2**0.5), x(said.gpus * 2**0.5)) for said in predictions]
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        parts.append(f"<path d='M{_LEFT} {at:.1f}H{_LEFT + _WIDTH}' stroke='{_FAINT}'/>")
        parts.append(_text(_LEFT - 8, at + 4, f"{10 * tenth} %", _MFU, "end"))
        parts.append(_text(_LEFT + _WIDTH + 8, at + 4, _short(dearest * tenth / 10), _COST))
    parts += [_text(x(gpus), _TOP + _HEIGHT + 18, str(gpus), _INK, "middle") for gpus in counts]
    outline = [(x(said.gpus), y(said.high)) for said in predictions]
    outline += [(x(said.gpus), y(said.low)) for said in reversed(predictions)]
    parts.append(f"<polygon points='{_points(outline)}' fill='{_MFU}' fill-opacity='0.15'/>")
    parts += _line(
        [(x(said.gpus), y(said.mfu)) for said in predictions], _MFU, [s.extrapolated for s in predictions]
    )
    parts += _line(
        [(x(said.gpus), y(cost / dearest)) for said, cost in zip(predictions, costs, strict=True)],
        _COST,
        [said.extrapolated for said in predictions],
    )
    first = predictions[0]
    unit = "cost" if price_per_gpu_hour else "GPU-hours"
    parts.append(
        _text(
            _LEFT,
            22,
            f"{first.model} on {first.gpu}, {first.precision}, {first.batch} × {first.seq_len} tokens",
            _INK,
        )
    )
    parts.append(_text(_LEFT, 42, "MFU (causal)", _MFU))
    parts.append(_text(_LEFT + _WIDTH, 42, f"{unit} per trillion tokens", _COST, "end"))
    parts.append(
        _text(
            _LEFT + _WIDTH / 2,
            _TOP + _HEIGHT + 38,
            "GPUs (hollow: beyond what was published)",
            _INK,
            "middle",
        )
    )
    parts += _legend(BANDS, _TOP + _HEIGHT + 52)
    return _sheet(parts, _LEFT + _WIDTH + 90, _TOP + _HEIGHT + 84)


def stacked_bars(bars: Mapping[str, Mapping[str, float]], title: str) -> str:
    """One horizontal bar for each name; its pieces are shares of a second, a step, or anything alike."""
    longest = max((sum(pieces.values()) for pieces in bars.values()), default=0) or 1.0
    names = list(dict.fromkeys(piece for pieces in bars.values() for piece in pieces))
    colour = dict(zip(names, COLOURS, strict=False))
    parts = [_text(_LEFT, 22, title, _INK)]
    for row, (name, pieces) in enumerate(bars.items()):
        top, left = 40 + 30 * row, _LEFT + 40
        parts.append(_text(left - 8, top + 15, name, _INK, "end"))
        for piece, size in pieces.items():
            width = _WIDTH * size / longest
            parts.append(
                f"<rect x='{left:.2f}' y='{top}' width='{width:.2f}' height='22' "
                f"fill='{colour.get(piece, _INK)}'>"
                f"<title>{escape(f'{name}: {piece} {size:.4g}')}</title></rect>"
            )
            if (inside := f"{size:.3g}") and width >= 8 * len(inside):
                parts.append(_text(left + width / 2, top + 15, inside, "#fff", "middle"))
            left += width
        parts.append(_text(left + 8, top + 15, f"{sum(pieces.values()):.4g}", _INK))
    bottom = 40 + 30 * len(bars) + 8
    parts += _legend(colour, bottom)
    return _sheet(parts, _LEFT + _WIDTH + 90, bottom + 34)


def _band(said: Prediction, left: float, right: float) -> str:
    title = f"{said.gpus} GPUs: {said.mfu:.1%} MFU ({said.low:.1%} to {said.high:.1%})"
    title += f", limited by {LABELS[said.limiting]}"
    return (
        f"<rect x='{left:.1f}' y='{_TOP}' width='{right - left:.1f}' height='{_HEIGHT}' "
        f"fill='{BANDS[said.limiting]}'><title>{escape(title)}</title></rect>"
    )


def _line(points: Sequence[tuple[float, float]], colour: str, hollow: Sequence[object]) -> list[str]:
    parts = [f"<polyline points='{_points(points)}' fill='none' stroke='{colour}' stroke-width='2'/>"]
    for (x, y), empty in zip(points, hollow, strict=True):
        fill = "#fff" if empty else colour
        parts.append(
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{fill}' stroke='{colour}' stroke-width='2'/>"
        )
    return parts


def _legend(colours: Mapping[str, str], top: float) -> list[str]:
    parts, left = [], _LEFT
    for name, colour in colours.items():
        word = LABELS.get(name, name)
        parts.append(
            f"<rect x='{left:.1f}' y='{top}' width='14' height='14' fill='{colour}' stroke='{_FAINT}'/>"
        )
        parts.append(_text(left + 19, top + 12, word, _INK))
        left += 34 + 7 * len(word)
    return parts


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' fill='{colour}' text-anchor='{anchor}'>{escape(text)}</text>"


def _round_above(value: float) -> float:
    """The next number that people like to read on an axis."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * digit for digit in (1, 2, 2.5, 3, 4, 5, 6, 8, 10) if power * digit >= value)


def _short(value: float) -> str:
    for size, word in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{word}"
    return f"{value:.3g}"


def _sheet(parts: Sequence[str], width: float, height: float) -> str:
    size = f"width='{width:g}' height='{height:g}' viewBox='0 0 {width:g} {height:g}'"
    paper = f"<rect width='{width:g}' height='{height:g}' fill='#fff'/>"
    return "\n".join(
        [f"<svg xmlns='http://www.w3.org/2000/svg' {size} {_FONT}>", paper, *parts, "</svg>", ""]
    )
