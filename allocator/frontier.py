"""Early placement in a large grid: look only near the slot where the last job of the same shape went.

While an order is packed, cells only get taken, so the earliest start of a shape never moves back. The slot
found for a shape is kept as its frontier, and the next job of that shape looks at a window of a few slots
from there; if nothing fits, at the next and wider one. The invariant: the result is the same as that of a
look at the whole grid. The cost: bookkeeping that pays only when an operation on the whole grid takes
microseconds.
"""

from __future__ import annotations

from allocator.grid import Option

LARGE = 12_000  # cells of a grid from which on this is quicker
_AHEAD = 3  # slots that the first window has beyond the length of the job


class Frontier:
    """The earliest start that each shape may still have."""

    __slots__ = ("by_option", "by_shape", "stride")

    def __init__(self, stride: int) -> None:
        self.stride = stride
        self.by_option: dict[Option, int] = {}
        self.by_shape: dict[
            tuple[int, int], int
        ] = {}  # of jobs that may begin anywhere: a floor for all others

    def search(self, free: int, option: Option, earliest: int) -> tuple[int, int, int]:
        """The first window of slots in which the option fits.

        Returns:
            its first slot, the cells in it that stay free for the job's slots, and those where it may begin;
            both counted from that slot, the last is 0 when it fits nowhere.
        """
        stride, shape = self.stride, (option.gpus, option.slots)
        first = max(earliest, self.by_option.get(option, option.first), self.by_shape.get(shape, 0))
        span = option.slots + _AHEAD
        while first <= option.last:
            low = first * stride
            lasting = (free >> low) & ((1 << (span * stride)) - 1)
            for shift in option.time_shifts:
                lasting &= lasting >> shift
            fits = lasting
            for shift in option.width_shifts:
                fits &= fits >> shift
            fits &= option.starts >> low
            if fits:
                found = first + ((fits & -fits).bit_length() - 1) // stride
                self.by_option[option] = found
                if option.anywhere and not earliest:
                    self.by_shape[shape] = found
                return first, lasting, fits
            first += span - option.slots + 1
            span += span - option.slots
        return first, 0, 0
