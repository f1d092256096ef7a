"""One check for each kind of field of a planning problem, and the error that they raise.

Each check names the owner, the field, the value and what was expected, in one line for the person who wrote
the problem. They return nothing, or the value in its kept form.
"""

from __future__ import annotations  # no annotation is evaluated, so typing is never loaded: 8 ms of import

import math
from itertools import pairwise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

QUANTILES = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)


class ProblemError(ValueError):
    """A mistake in a planning problem, told in one line for the person who wrote it."""


def quantile_row(who: str, slot: int, row: Any) -> tuple[int, ...]:
    counts = as_tuple(who, f"demand_quantiles of slot {slot}", row)
    if len(counts) != len(QUANTILES):
        raise ProblemError(
            f"{who}: demand_quantiles of slot {slot}: has {len(counts)} entries; expected {len(QUANTILES)}"
        )
    for count in counts:
        if type(count) is not int or count < 0:
            whole(who, f"demand_quantiles of slot {slot}", count, 0)
    if any(a > b for a, b in pairwise(counts)):
        raise ProblemError(
            f"{who}: demand_quantiles of slot {slot}: {list(counts)}; expected counts that do not fall"
        )
    return counts


def whole(who: str, field: str, value: Any, low: int | None = None, high: int | None = None) -> None:
    if type(value) is int and (low is None or value >= low) and (high is None or value <= high):
        return
    bounds = "" if low is None else f" of {low} or more" if high is None else f" from {low} to {high}"
    raise ProblemError(f"{who}: {field}: {value!r}; expected a whole number{bounds}")


def number(who: str, field: str, value: Any) -> None:
    if type(value) is int and value >= 0:
        return
    if type(value) is float and math.isfinite(value) and value >= 0:
        return
    raise ProblemError(f"{who}: {field}: {value!r}; expected a finite number of 0 or more")


def text(who: str, field: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ProblemError(f"{who}: {field}: {value!r}; expected a name")


def as_tuple(who: str, field: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value
    if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__iter__"):
        raise ProblemError(f"{who}: {field}: {value!r}; expected a list")
    return tuple(value)


def distinct_gpus(who: str, field: str, gpus: tuple[int, ...]) -> None:
    for gpu in gpus:
        whole(who, field, gpu, 0)
    if len(set(gpus)) != len(gpus):
        raise ProblemError(f"{who}: {field}: {list(gpus)} lists a GPU twice; expected distinct GPUs")


def in_cluster(who: str, field: str, gpus: tuple[int, ...], total: int) -> None:
    for gpu in gpus:
        if gpu >= total:
            raise ProblemError(f"{who}: {field}: GPU {gpu}; expected 0 to {total - 1}")


def window(who: str, start: Any, end: Any) -> None:
    whole(who, "from", start)
    whole(who, "to", end)
    if end <= start:
        raise ProblemError(f"{who}: to: {end}; expected more than from, which is {start}")


def unique(what: str, field: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        name = next(name for k, name in enumerate(names) if name in names[:k])
        raise ProblemError(f"{what} {name}: {field}: {name!r} is used twice; expected each once")
