"""Tokens of a model: bytes for the models that ship, else the tokenizer in the model's directory.

Invariant: the byte tokenizer's token is the byte itself, so text becomes tokens without a loop, and the
files written beside a model give transformers the same tokens. The cost: a byte is a token, about four
times more tokens than a trained vocabulary would need.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END, PAD = 256, 257
END_TEXT, PAD_TEXT = "<|end|>", "<|pad|>"
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


class TokenizerError(Exception):
    """A directory whose tokenizer cannot be read."""


def byte_tokens(text: str) -> NDArray[np.int32]:
    """The bytes of a text as tokens."""
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)


def tokens_of_directory(directory: Path, text: str) -> Sequence[int]:
    """A text in the tokens of the model in a Hugging Face directory. Raises TokenizerError."""
    return list(_read(directory).encode(text, add_special_tokens=False).ids)


def end_token(directory: Path | None) -> int:
    """The token that ends a text: the byte tokenizer's, or the one that a model's configuration states."""
    if directory is None:
        return END
    try:
        stated = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{directory}: config.json: {error}") from None
    first = stated[0] if isinstance(stated, list) and stated else stated
    if not isinstance(first, int):
        raise TokenizerError(f"{directory}: config.json: eos_token_id: {stated!r}; expected a token")
    return first


def write_tokenizer(directory: Path, source: Path | None) -> None:
    """Put the tokenizer's files beside a model: the byte tokenizer's, or copies of those in `source`."""
    if source is not None:
        for name in FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
        return
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_TEXT,
        "eos_token": END_TEXT,
        "pad_token": PAD_TEXT,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def byte_tokenizer() -> "Tokenizer":
    """The byte tokenizer as the `tokenizers` library writes it: a vocabulary of single bytes, no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TEXT, special=True), AddedToken(PAD_TEXT, special=True)])
    return tokenizer


def _read(directory: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{directory}: no tokenizer.json; expected the model's tokenizer beside it")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception for a file it cannot read
        raise TokenizerError(f"{file}: cannot be read: {error}") from None


def _byte_vocabulary() -> dict[str, int]:
    """The printable stand-in that byte-level tokenizers use for each byte: itself, or one after U+0100."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}
