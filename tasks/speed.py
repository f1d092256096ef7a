"""How fast a model generates on this device, before and after: measured, as a table and as a picture.

Invariant: both models get the same prompts, lengths and batches in one process; a batch that memory does not
hold or that would take too long is left out, never guessed. The best of a few turns counts, since other work
on the machine only ever adds time.
"""

import time
from collections.abc import Sequence
from typing import Any

from tasks.batches import free_bytes
from tasks.generating import sizes_of, synchronize

BATCHES = (1, 16, 256)
PROMPT, NEW = 16, 8  # tokens
TURNS = 3
LONGEST_S = 30.0  # of one turn, as far as a smaller batch lets it be foreseen
COLOURS = ("#999999", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
BAR, GAP, TALL, LINE = 34, 30, 220, 16  # of the picture

Speed = dict[str, float | None]


def measured(model: Any, vocabulary: int, batches: Sequence[int] = BATCHES) -> Speed:
    """Milliseconds a step of decoding and tokens/s, prompts included, by batch; None where left out."""
    import torch

    found: Speed = {}
    device = next(model.parameters()).device
    sizes, generator = sizes_of(model), torch.Generator().manual_seed(0)
    before: tuple[int, float] | None = None
    for batch in batches:
        found[f"ms_at_{batch}"] = found[f"tokens_per_s_at_{batch}"] = None
        if sizes.batch_bytes(batch, PROMPT, NEW) > free_bytes(device):
            continue
        if before is not None and before[1] * batch / before[0] > LONGEST_S:
            continue
        ids = torch.randint(0, min(vocabulary, 256), (batch, PROMPT), generator=generator).to(device)
        seconds = min(_turn(model, ids) for _ in range(TURNS))
        before = (batch, seconds)
        found[f"ms_at_{batch}"] = seconds / NEW * 1000
        found[f"tokens_per_s_at_{batch}"] = batch * NEW / seconds
    return found


def table(rows: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """A Markdown table: one line for each model."""
    figures = {"gate": "gate", "layers": "layers", **_figures(rows)}
    lines = [["model", *figures.values()], ["---", "---", *["---:"] * (len(figures) - 1)]]
    for name, found in rows:
        lines.append([name, *(_shown(key, found.get(key)) for key in figures)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _figures(rows: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, str]:
    """What models are compared by, and what it is called."""
    found = {"megabytes": "MB", "perplexity": "perplexity", "greedy_agreement": "greedy agreement"}
    for start, label in (("ms_at_", "ms a step at"), ("tokens_per_s_at_", "tokens/s at")):
        found |= {
            name: f"{label} {name.removeprefix(start)}" for name in rows[0][1] if name.startswith(start)
        }
    return found


def picture(rows: Sequence[tuple[str, dict[str, Any]]], title: str, notes: Sequence[str] = ()) -> str:
    """The same as bars in SVG, each figure to its own scale, and what is to be said beside them below."""
    shares = []
    for key, label in _figures(rows).items():
        values = [found.get(key) for _, found in rows]
        most = max(value or 0.0 for value in values) or 1.0
        shares.append((key, label, [(value or 0) / most for value in values], values))
    names = [f"{name}, {found['gate']}" if found.get("gate") else name for name, found in rows]
    wide = max(len(rows) * BAR, 100) + GAP
    top = 40 + LINE * len(rows)
    width = max([GAP + len(shares) * wide, 420, *(2 * GAP + 6 * len(note) for note in notes)])
    height = top + TALL + 50 + LINE * len(notes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{GAP}" y="20" font-size="14">{_escaped(title)}</text>',
    ]
    for place, name in enumerate(names):
        line = 30 + LINE * place
        parts.append(
            f'<rect x="{GAP}" y="{line}" width="10" height="10" fill="{COLOURS[place % len(COLOURS)]}"/>'
        )
        parts.append(f'<text x="{GAP + 14}" y="{line + 9}">{_escaped(name)}</text>')
    for group, (key, label, found, values) in enumerate(shares):
        left = GAP + group * wide
        for place, (share, value) in enumerate(zip(found, values, strict=True)):
            tall, x = TALL * share, left + place * BAR
            y = top + 20 + TALL - tall
            parts.append(
                f'<rect x="{x}" y="{y:.1f}" width="{BAR - 4}" height="{tall:.1f}" '
                f'fill="{COLOURS[place % len(COLOURS)]}"/>'
            )
            parts.append(f'<text x="{x}" y="{y - 3:.1f}" font-size="8">{_shown(key, value)}</text>')
        parts.append(f'<text x="{left}" y="{top + TALL + 36}">{label}</text>')
    for place, note in enumerate(notes):
        parts.append(
            f'<text x="{GAP}" y="{top + TALL + 58 + LINE * place}" fill="#555555">{_escaped(note)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _turn(model: Any, ids: Any) -> float:
    import torch

    synchronize(ids.device)
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
    synchronize(ids.device)
    return time.perf_counter() - began


def _shown(key: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value if value is not None else "–"
    if key == "greedy_agreement":
        return f"{value:.1%}"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
