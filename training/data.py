"""Text as one packed, contiguous array of tokens, cut into windows that come in a reproducible order.

Invariant: the n-th sequence of a run depends on the text, the sequence length and the seed alone, so a
position (how many sequences were consumed) is all a resumed run needs, whatever its number of processes. No
token is padding; the cost is that a sequence may begin in the middle of a sentence and the tail shorter
than a window is not used.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from training.packing import INDEX, PackedTokens

if TYPE_CHECKING:
    import torch

Tokens = NDArray[np.int32]
Encode = Callable[[str], Sequence[int] | Tokens]
SHIPPED_TEXT = Path(__file__).with_name("text")


class DataError(Exception):
    """Text that cannot be used; the message names it and what was expected."""


def text_files(data: str | Sequence[str]) -> list[Path]:
    """The files that a configuration's `data` names, in their order. Raises DataError."""
    if data == "shakespeare":
        return sorted(SHIPPED_TEXT.glob("*.txt"))
    files = [Path(name) for name in ([data] if isinstance(data, str) else data)]
    if not files:
        raise DataError("data: expected `shakespeare` or at least one text file")
    for file in files:
        if not file.is_file():
            raise DataError(f"data: {str(file)!r}: no such file; expected `shakespeare` or a text file")
    return files


def packed_tokens(files: Sequence[Path], encode: Encode, end: int) -> Tokens:
    """The tokens of all files, each closed by the token `end`. Raises DataError."""
    parts: list[Tokens] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data: {file}: not a text file in UTF-8: {error}") from None
        parts += [np.asarray(encode(text), dtype=np.int32), np.array([end], dtype=np.int32)]
    return np.ascontiguousarray(np.concatenate(parts))


def split(tokens: Tokens, held_out: float) -> tuple[Tokens, Tokens]:
    """The text to train on, and the share at its end that is held out."""
    cut = len(tokens) - int(len(tokens) * held_out)
    return tokens[:cut], tokens[cut:]


def packed_directory(data: str | Sequence[str]) -> Path | None:
    """The directory of packed tokens that `data` names, if it is one."""
    names = [data] if isinstance(data, str) else list(data)
    return Path(names[0]) if len(names) == 1 and Path(names[0], INDEX).is_file() else None


class Windows:
    """The sequences of a text, in an order drawn anew for each pass. Raises DataError if there is none.

    `part` is the range of tokens to use, when not all.
    """

    def __init__(
        self,
        tokens: Tokens | PackedTokens,
        seq_len: int,
        seed: int,
        name: str = "data",
        part: tuple[int, int] | None = None,
    ) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.seed = seed
        self.first, self.end = part or (0, len(tokens))
        length = self.end - self.first
        self.count = (length - 1) // seq_len
        self._order: tuple[int, NDArray[np.int64]] | None = None
        if self.count < 1:
            raise DataError(f"{name}: {length} tokens; expected at least seq_len + 1 = {seq_len + 1}")

    @cached_property
    def digest(self) -> str:
        """Names the text: runs on other text are other runs."""
        if isinstance(self.tokens, PackedTokens):  # hashed when it was packed
            return f"{self.tokens.digest}:{self.first}-{self.end}"
        return hashlib.sha256(self.tokens[self.first : self.end].tobytes()).hexdigest()[:16]

    def at(self, position: int, count: int) -> "torch.Tensor":
        """The sequences from `position` on, one token longer than `seq_len`: inputs and labels overlap."""
        return self._rows([self._window(position + step) for step in range(count)])

    def in_order(self, first: int, count: int) -> "torch.Tensor":
        """Sequences as they follow one another in the text, for scoring."""
        return self._rows(range(first, min(first + count, self.count)))

    def _window(self, position: int) -> int:
        epoch, place = divmod(position, self.count)
        order = self._order  # read once: threads that make batches ahead may be in another epoch
        if order is None or order[0] != epoch:
            random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._order = order = (epoch, random.permutation(self.count))
        return int(order[1][place])

    def _rows(self, windows: Sequence[int]) -> "torch.Tensor":
        import torch

        length = self.seq_len
        starts = [self.first + index * length for index in windows]
        rows = np.empty((len(starts), length + 1), np.int64)
        for row, start in zip(rows, starts, strict=True):
            row[:] = self.tokens[start : start + length + 1]
        return torch.from_numpy(rows)


def describe(windows: Windows) -> dict[str, Any]:
    """What identifies the data of a run."""
    return {"text": windows.digest, "seq_len": windows.seq_len, "seed": windows.seed}
