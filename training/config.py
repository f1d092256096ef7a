"""The training configuration: one YAML file, typed, every key with its default.

Invariant: a configuration that was read can be trained as it says, on any number of processes that divides
its global batch; an unknown key is an error that names the nearest known one.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

C = TypeVar("C", bound=BaseModel)
Precision = Literal["fp32", "bf16"]


# What was expected, by pydantic's name for what is wrong; its own words serve for the rest.
EXPECTED = {
    "string_type": "expected a text",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "finite_number": "expected a finite number",
    "greater_than": "expected more than {gt:g}",
    "greater_than_equal": "expected at least {ge:g}",
    "less_than": "expected less than {lt:g}",
    "less_than_equal": "expected at most {le:g}",
    "literal_error": "expected {expected}",
}


class ConfigError(Exception):
    """A configuration that cannot be used; the message names file, key, value and what was expected."""


class TrainingConfig(BaseModel):
    """What to train, on what, for how long."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = "llama-tiny"  # a shipped name, or a Hugging Face directory
    data: str | list[str] = "shakespeare"  # the text that ships, or text files in UTF-8
    held_out: float = Field(
        default=0.05, gt=0, lt=0.5
    )  # the share at the end of the text that is never trained on
    seq_len: int = Field(default=256, ge=2)
    micro_batch: int = Field(default=8, ge=1)  # sequences in one pass of one process
    accumulation: int | None = Field(
        default=None, ge=1
    )  # passes of each process in a step; 1 if nothing is said
    global_batch: int | None = Field(default=None, ge=1)  # or: sequences in a step, all processes together
    steps: int = Field(default=100, ge=1)
    lr: float = Field(default=1e-3, gt=0)
    min_lr: float = Field(default=0.1, ge=0, le=1)  # what is left of lr at the end of the cosine, as a share
    warmup: int = Field(default=10, ge=0)  # steps
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float = Field(default=1.0, gt=0)  # largest norm of the gradient
    seed: int = Field(default=0, ge=0, lt=2**31)
    precision: Precision = "fp32"
    checkpoint_every: int = Field(default=50, ge=1)  # steps
    keep_checkpoints: int = Field(default=2, ge=1)
    held_out_windows: int = Field(
        default=32, ge=1
    )  # sequences of the held-out text that are scored at the end

    @model_validator(mode="after")
    def _one_way_to_say_the_batch(self) -> "TrainingConfig":
        if self.accumulation is not None and self.global_batch is not None:
            raise ValueError("expected accumulation or global_batch, not both")
        if self.global_batch is not None and self.global_batch % self.micro_batch:
            raise ValueError(
                f"global_batch {self.global_batch}: expected a multiple of micro_batch {self.micro_batch}"
            )
        return self

    def accumulation_for(self, processes: int) -> int:
        """Passes of each process in a step. Raises ConfigError when the global batch cannot be divided so."""
        if self.global_batch is None:
            return self.accumulation or 1
        passes, rest = divmod(self.global_batch, self.micro_batch * processes)
        if rest:
            raise ConfigError(
                f"global_batch: {self.global_batch}; expected a multiple of micro_batch {self.micro_batch} "
                f"times {processes} processes"
            )
        return passes


def load_config(path: Path) -> TrainingConfig:
    """Read a configuration from a YAML file. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return parse_config(text, str(path))


def parse_config(text: str, where: str) -> TrainingConfig:
    """The configuration in a YAML text; `where` stands for it in errors. Raises ConfigError."""
    import yaml

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    return checked(TrainingConfig, data or {}, where)


def checked(cls: type[C], data: Any, where: str) -> C:
    """The model that the mapping describes. Raises ConfigError with one line for the first problem."""
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{where}: {data!r}; expected a mapping with {', '.join(list(cls.model_fields)[:4])}, ..."
        )
    for key in data:
        if key not in cls.model_fields:
            near = difflib.get_close_matches(str(key), cls.model_fields, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(cls.model_fields)}"
            raise ConfigError(f"{where}: {key}: unknown key; {hint}")
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"][:1]))
        known = EXPECTED.get(problem["type"])
        message = known.format(**problem.get("ctx", {})) if known else problem["msg"]
        message = message.removeprefix("Value error, ")
        told = f"{field}: {problem['input']!r}: " if field else ""
        raise ConfigError(f"{where}: {told}{message}") from None
