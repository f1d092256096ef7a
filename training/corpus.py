"""From a configuration's `data` to the windows of a run: text or packed tokens, on disk or in S3."""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from training import models, objects
from training.config import ConfigError, TrainingConfig
from training.data import DataError, Tokens, Windows, packed_directory, packed_tokens, split, text_files
from training.manifest import ManifestError
from training.models import MODULE, ModelError
from training.packing import PackedTokens, pack
from training.tokenizer import byte_tokens, end_token, tokens_of_directory


def load_text(config: TrainingConfig) -> tuple[Windows, Windows]:
    """The windows to train on and those held out. Raises DataError, ModelError or ConfigError."""
    own = config.model.startswith(MODULE)
    longest = None if own else models.longest_sequence(config.model)
    if longest is not None and config.seq_len > longest:
        raise ConfigError(f"seq_len: {config.seq_len}; {config.model} sees at most {longest} tokens")
    config = config.model_copy(update={"data": fetched_data(config.data)})
    vocabulary = None if own else models.shape_of(config.model).vocab
    held = f"the last {config.held_out:.0%} of data, held out"
    if (directory := packed_directory(config.data)) is not None:
        try:
            packed = PackedTokens(directory)
        except ManifestError as error:
            raise DataError(f"data: {error}") from None
        if vocabulary is not None and packed.largest >= vocabulary:
            raise DataError(
                f"data: {directory}: has token {packed.largest}; {config.model} knows {vocabulary} tokens"
            )
        cut = len(packed) - int(len(packed) * config.held_out)
        return (
            Windows(packed, config.seq_len, config.seed, "data", (0, cut)),
            Windows(packed, config.seq_len, config.seed, held, (cut, len(packed))),
        )
    source = tokenizer_source(config.model)
    encode = byte_tokens if source is None else lambda text: tokens_of_directory(source, text)
    tokens = packed_tokens(text_files(config.data), encode, end_token(source))
    if vocabulary is not None and int(tokens.max()) >= vocabulary:
        raise ConfigError(
            f"model: {config.model}: its tokenizer has tokens beyond its vocabulary of {vocabulary}"
        )
    kept, held_out = split(tokens, config.held_out)
    return (
        Windows(kept, config.seq_len, config.seed, "data"),
        Windows(held_out, config.seq_len, config.seed, held),
    )


def fetched_data(data: str | list[str]) -> str | list[str]:
    """The same data with what lies in S3 fetched to this machine. Raises DataError."""
    if isinstance(data, str):
        return str(_fetched(data))
    return [str(_fetched(name)) for name in data]


def with_local_model(config: TrainingConfig) -> TrainingConfig:
    """The configuration with a model that lies in S3 fetched to this machine. Raises ModelError."""
    if not objects.is_url(config.model):
        return config
    try:
        return config.model_copy(update={"model": str(objects.fetched(config.model))})
    except (objects.ObjectError, ManifestError) as error:
        raise ModelError(f"model: {error}") from None


def pack_text(files: list[str], model: str, output: str) -> int:
    """Write text files as packed tokens for a model, to disk or S3; how many tokens. Raises DataError."""
    if objects.is_url(output):
        with tempfile.TemporaryDirectory() as scratch:
            count = pack_text(files, model, f"{scratch}/packed")
            objects.put_directory(output.rstrip("/"), Path(scratch) / "packed")
            return count
    source = tokenizer_source(model)
    encode = byte_tokens if source is None else lambda text: tokens_of_directory(source, text)
    end = end_token(source)

    def parts() -> Iterator[Tokens]:
        for file in itertools.chain.from_iterable(text_files(name) for name in files):
            yield packed_tokens([file], encode, end)

    try:
        return pack(parts(), models.shape_of(model).vocab, Path(output))
    except ManifestError as error:
        raise DataError(str(error)) from None


def tokenizer_source(model: str) -> Path | None:
    """The directory whose tokenizer the model uses; None for the byte tokenizer."""
    return None if model in models.SHIPPED or model.startswith(MODULE) else Path(model)


def _fetched(name: str) -> str | Path:
    if not objects.is_url(name):
        return name
    try:
        return objects.fetched(name)
    except (objects.ObjectError, ManifestError) as error:
        raise DataError(f"data: {error}") from None
