"""Fit the roofline's constants on half of the published runs, and test them on the other half.

Runs that differ only in the software's release are one setting; settings are dealt alternately, so that no
tested setting was seen by the fit in any release. Deterministic; a fit takes some seconds of one core.
"""

import csv
import math
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from training.flops import flops_per_token
from training.hardware import gpu
from training.memory import Layout
from training.models import shape_of
from training.roofline import CONVENTION, EFFICIENCY, PEAK_OF, Efficiency, fastest, step_parts

PUBLISHED = Path(__file__).parent / "published"
_MODELS = {"8B": "llama-3.1-8b", "70B": "llama-3.1-70b", "405B": "llama-3.1-405b"}


@dataclass(frozen=True)
class Row:
    """One published run."""

    source: str
    model: str
    gpu: str
    gpus: int
    precision: str
    seq_len: int
    tokens_per_s_per_gpu: float
    batch: int

    @property
    def setting(self) -> tuple[str, str, int, str, int]:
        """What the run is, whichever release of the software it ran on."""
        return self.model, self.gpu, self.gpus, self.precision, self.seq_len

    @property
    def mfu(self) -> float:
        """Of the precision's own dense peak, by the convention of the roofline."""
        per_token = flops_per_token(shape_of(self.model), self.seq_len, CONVENTION)
        return per_token * self.tokens_per_s_per_gpu / gpu(self.gpu).peaks[PEAK_OF[self.precision]]


@cache
def published_rows(*files: str) -> tuple[Row, ...]:
    """All runs of the files, or of both files there are, in their order."""
    return tuple(
        Row(
            line.get("container") or line["source"],
            _MODELS[line["model"].rpartition("_")[2]],
            gpu(line["system"]).name,
            int(line["gpus"]),
            _precision(line["precision"]),
            int(line["seq"]),
            float(line["tok_s_gpu"]),
            # Fine-tuning recipes take small batches.
            32 if line.get("task", "").startswith("SFT") else default_batch(int(line["gpus"])),
        )
        for file in files or ("megatron_bridge_llama.csv", "other_runs.csv")
        for line in csv.DictReader((PUBLISHED / file).read_text(encoding="utf-8").splitlines())
    )


def halves() -> tuple[list[Row], list[Row]]:
    """Rows to fit on, and rows to test on."""
    fitted: set[object] = set()
    for file in ("megatron_bridge_llama.csv", "other_runs.csv"):
        fitted.update(sorted({row.setting for row in published_rows(file)})[::2])
    rows = published_rows()
    return [row for row in rows if row.setting in fitted], [row for row in rows if row.setting not in fitted]


def default_batch(gpus: int) -> int:
    """Sequences in a step when nobody says: an assumption, that steps grow with the cluster up to a limit."""
    odd = gpus // (gpus & -gpus)  # what is left of the count without its factors of two
    target = min(max(128, gpus // 2), 2048)
    return -(-target // (64 * odd)) * 64 * odd


def predicted_mfu(row: Row, constants: Efficiency = EFFICIENCY) -> float:
    """What the roofline says of a row's setting."""
    return _timed(row, _layout(row, constants), constants) * row.mfu / row.tokens_per_s_per_gpu


def fit(rows: list[Row], rounds: int = 4) -> Efficiency:
    """The constants that bring the roofline nearest to the rows, layouts chosen anew in each round."""
    import numpy as np
    from scipy.optimize import least_squares

    start = np.log(np.array(astuple(_PRIOR)))
    values = start
    for _ in range(rounds):
        layouts = {row.setting: _layout(row, _constants(values)) for row in rows}

        def errors(logs: Any, layouts: dict[Any, Layout] = layouts) -> list[float]:
            tried = _constants(logs)
            off = [
                math.log(_timed(row, layouts[row.setting], tried) / row.tokens_per_s_per_gpu) for row in rows
            ]
            # A weak pull to what is plausible: with few kinds of rows constants trade against each other.
            return off + [0.3 * float(pull) for pull in logs - start]

        values = least_squares(errors, values).x
    return Efficiency(*(round(value, 4) for value in astuple(_constants(values))))


def _constants(logs: Any) -> Efficiency:
    return Efficiency(*(math.exp(float(value)) for value in logs))


def _layout(row: Row, constants: Efficiency) -> Layout:
    shape, product = shape_of(row.model), gpu(row.gpu)
    return fastest(shape, product, row.gpus, row.seq_len, row.batch, row.precision, constants)[0]


# Where the fit starts and what it is drawn to: matmul shares near the best that was measured.
_PRIOR = Efficiency(
    matmul=0.8, throttling=0.3, microscaling=0.9, softmax=2.0, traffic=1.5, unfused=2.0, exposed=0.3
)


def _timed(row: Row, layout: Layout, constants: Efficiency) -> float:
    """Tokens per second and GPU."""
    parts = step_parts(shape_of(row.model), gpu(row.gpu), layout, row.precision, constants)
    return row.batch * row.seq_len / parts.total / row.gpus


def _precision(written: str) -> str:
    word = written.split()[0].casefold()
    return {"fp8-cs": "fp8", "nvfp4": "fp4"}.get(word, word)


def report(constants: Efficiency, fitted: list[Row], tested: list[Row]) -> str:
    """The table: each setting, whether the constants were fitted on it, its published and predicted MFU."""
    heading = f"{'model':15} {'GPU':9} {'GPUs':>5} {'precision':9} {'seq':>5}"
    lines = [f"{heading} half    rows  published     predicted  worst"]
    ends = []
    for half, rows in (("fitted", fitted), ("tested", tested)):
        off = []
        for setting in sorted({row.setting for row in rows}):
            own = [row for row in rows if row.setting == setting]
            said = 100 * predicted_mfu(own[0], constants)
            seen = [100 * row.mfu for row in own]
            off += [abs(said - value) for value in seen]
            model, product, gpus, precision, seq = setting
            lines.append(
                f"{model:15} {product:9} {gpus:5} {precision:9} {seq:5} {half}  {len(own):4}  "
                f"{min(seen):5.1f} to {max(seen):5.1f}  {said:5.1f}     {max(off[-len(own) :]):5.1f}"
            )
        ends.append(
            f"{half}: {len(off)} rows, mean error {sum(off) / len(off):.2f} MFU points, worst {max(off):.2f}"
        )
    return "\n".join([*lines, *ends])


def swapped_report() -> str:
    """The same with the halves swapped: constants of the other half, found now."""
    tested, fitted = halves()
    return report(fit(fitted), fitted, tested)


if __name__ == "__main__":
    print(fit(halves()[0]))
