"""Ways to measure what fits in runs of free GPUs.

A row says that active jobs weigh no more than the runs can hold, for a function f of a width: jobs in one run
never weigh more than the run when f(a) + f(b) ≤ f(a + b). With f(width) = width it is plain capacity; with
f(width) = ⌊width/k⌋ it says that no two runs make one block of k GPUs. The functions tried are roundings of
width·p/q. The invariant: each of them keeps f(a) + f(b) ≤ f(a + b), so each row holds for every plan.
"""

from math import gcd

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_MAX_MULTIPLE = 3  # p in the roundings of width·p/q
_MAX_KNOWN = 5000


class Rounding:
    """f(width) = ⌊p·width/q⌋, plus the part of the rest that exceeds r/q, scaled to whole numbers.

    This is the mixed-integer rounding of a row: f(a) + f(b) ≤ f(a + b) for all widths.
    """

    __slots__ = ("p", "q", "r", "values")

    def __init__(self, p: int, q: int, r: int, largest: int = 0) -> None:
        self.p, self.q, self.r = p, q, r
        self.values = [self(width) for width in range(largest + 1)]

    def __call__(self, width: int) -> int:
        whole, rest = divmod(self.p * width, self.q)
        if not self.r:
            return whole
        return whole * (self.q - self.r) + max(0, rest - self.r)

    def of(self, widths: Ints) -> Ints:
        whole, rest = np.divmod(self.p * widths, self.q)
        return whole * (self.q - self.r) + np.maximum(0, rest - self.r) if self.r else whole


PLAIN = Rounding(1, 1, 0)

_known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Rounding]] = {}


def roundings(widths: tuple[int, ...], runs: tuple[int, ...]) -> list[Rounding]:
    """Functions worth trying for these widths and runs, each different on them."""
    key = (widths, runs)
    found = _known.get(key)
    if found is not None:
        return found
    found, seen = [], set()
    largest = max([*widths, *runs], default=1)
    divisors = sorted(
        {w for w in widths if w > 1} | {w + 1 for w in widths} | {run for run in runs if run > 1}
    )
    for q in [1, *divisors]:
        for p in range(1, min(q, _MAX_MULTIPLE + 1) if q > 1 else 2):
            if gcd(p, q) > 1:
                continue
            for r in sorted({0} | {p * run % q for run in runs}):
                rounding = Rounding(p, q, r, largest)
                values = [rounding.values[w] for w in (*widths, *runs)]
                scale = gcd(*values)
                if not scale or not any(rounding.values[w] for w in widths):
                    continue
                shape = tuple(v // scale for v in values)
                if shape not in seen:
                    seen.add(shape)
                    found.append(rounding)
    if len(_known) > _MAX_KNOWN:
        _known.clear()
    _known[key] = found
    return found


def blocks_lost(runs: dict[int, int], rounding: Rounding, unit: int, most: int) -> Ints:
    """How many more blocks of ``q`` GPUs are lost with each replica that a service holds.

    What is left over beside the blocks of all runs can be held without loss; then every q GPUs cost a block.
    """
    q = rounding.q
    left_over = sum(run % q * count for run, count in runs.items())
    counts = np.arange(most + 1)
    lost = np.maximum(counts * (unit // q), -(-np.maximum(0, counts * unit - left_over) // q))
    return np.diff(lost)  # type: ignore[no-any-return]
