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
    batches = [name.removeprefix("ms_at_") for name in rows[0][1] if name.startswith("ms_at_")]
    head = [
        "model",
        "MB",
        "perplexity",
        *(f"ms at {b}" for b in batches),
        *(f"tokens/s at {b}" for b in batches),
    ]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for name, found in rows:
        keys = [f"ms_at_{b}" for b in batches] + [f"tokens_per_s_at_{b}" for b in batches]
        figures = [_shown(found.get(key)) for key in ("megabytes", "perplexity", *keys)]
        lines.append([name, *figures])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def picture(rows: Sequence[tuple[str, dict[str, Any]]], title: str) -> str:
    """The same as bars in SVG, as shares of the first model's: size, perplexity, tokens/s at each batch."""
    rates = [name for name in rows[0][1] if name.startswith("tokens_per_s_at_")]
    groups = {"megabytes": "size", "perplexity": "perplexity"} | {
        name: f"tokens/s at {name.removeprefix('tokens_per_s_at_')}" for name in rates
    }
    colours = ("#999999", "#0072b2", "#e69f00", "#009e73", "#cc79a7")
    bar, gap, height, top = 26, 30, 220, 60
    shares = []
    for key, label in groups.items():
        values = [found.get(key) for _, found in rows]
        shares.append((label, [(value or 0) / (values[0] or 1) for value in values], values))
    most = max(share for _, found, _ in shares for share in found) or 1
    width = gap + len(shares) * (len(rows) * bar + gap)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 420)}" height="{height + top + 60}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{gap}" y="20" font-size="14">{_escaped(title)}</text>',
    ]
    for place, (name, _) in enumerate(rows):
        x = gap + place * 130
        parts.append(f'<rect x="{x}" y="30" width="10" height="10" fill="{colours[place % 5]}"/>')
        parts.append(f'<text x="{x + 14}" y="39">{_escaped(name)}</text>')
    for group, (label, found, values) in enumerate(shares):
        left = gap + group * (len(rows) * bar + gap)
        for place, (share, value) in enumerate(zip(found, values, strict=True)):
            tall = height * share / most
            y, x = top + height - tall, left + place * bar
            parts.append(
                f'<rect x="{x}" y="{y:.1f}" width="{bar - 4}" height="{tall:.1f}" '
                f'fill="{colours[place % 5]}"/>'
            )
            parts.append(f'<text x="{x}" y="{y - 3:.1f}" font-size="9">{_shown(value)}</text>')
        parts.append(f'<text x="{left}" y="{top + height + 18}">{label}</text>')
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


def _shown(value: Any) -> str:
    return "–" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
