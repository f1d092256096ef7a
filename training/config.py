"""The training configuration: one YAML file, typed, every key with its default.

Invariant: a configuration that was read can be trained as it says, on any number of processes that divides
its global batch; an unknown key is an error that names the nearest known one. Every lever (what makes a run
faster or smaller without changing what is learned, or not much) stands in `LEVERS` with what it does to the
numbers; a lever that says `auto` is decided before the first step, and the decision is kept (see resolve).
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

C = TypeVar("C", bound=BaseModel)
Auto = Literal["auto"]
Counted = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Precision = Literal["fp32", "bf16", "bf16_master", "fp8", "auto"]
Numerics = Literal["bitwise", "rounding", "changes"]

# What was expected, by pydantic's name for what is wrong; its own words serve for the rest.
EXPECTED = {
    "string_type": "expected a text",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
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
    """What to train, on what, for how long; and the levers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # What is learned.
    model: str = "llama-tiny"  # a shipped name, a Hugging Face directory, or module:PACKAGE.MODULE:FUNCTION
    data: str | list[str] = "shakespeare"  # the text that ships, text files in UTF-8, or packed tokens
    layers: int | None = Field(default=None, ge=1)  # only the first so many, to measure a slice of a model
    held_out: float = Field(
        default=0.05, gt=0, lt=0.5
    )  # the share at the end of the text that is never trained on
    seq_len: int = Field(default=256, ge=2)
    global_batch: int | None = Field(default=None, ge=1)  # sequences in a step, all processes together
    steps: int = Field(default=100, ge=1)
    lr: float = Field(default=1e-3, gt=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # after the warm-up
    min_lr: float = Field(default=0.1, ge=0, le=1)  # what is left of lr at the end, as a share
    warmup: int = Field(default=10, ge=0)  # steps
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float = Field(default=1.0, gt=0)  # largest norm of the gradient
    seed: int = Field(default=0, ge=0, lt=2**31)
    bad_steps: int = Field(default=3, ge=0)  # steps in a row that may be left out: not a number, or a spike
    spike: float | None = Field(default=None, gt=0)  # nats above the running mean that make a loss a spike

    # What is kept and watched.
    checkpoint_every: int = Field(default=50, ge=1)  # steps
    keep_checkpoints: int = Field(default=2, ge=1)
    async_checkpoints: bool = True  # written while training goes on
    eval_every: int | None = Field(default=None, ge=1)  # steps; always at the end
    held_out_windows: int = Field(default=32, ge=1)  # sequences of the held-out text that are scored
    profile_steps: int = Field(default=3, ge=0)  # of a run many times as long, to see where time goes
    hang_seconds: float = Field(default=1800, gt=0)  # a step that takes longer ends the run with its stacks
    memory_gb: float | None = Field(default=None, gt=0)  # what a process may use; what is free otherwise

    # Levers; LEVERS says what each does.
    micro_batch: Counted | Auto = 8
    accumulation: int | None = Field(default=None, ge=1)
    precision: Precision = "fp32"
    activation_checkpointing: Literal["none", "selective", "full", "auto"] = "none"
    compile: bool | Auto = False
    attention: Literal["library", "blocks", "auto"] = "auto"
    loss_chunk: NonNegative | Auto = "auto"
    parallel: Literal["ddp", "fsdp", "hsdp", "auto"] = "auto"
    reshard: bool | Auto = "auto"
    layers_per_group: Counted | Auto = "auto"
    prefetch_layers: NonNegative | Auto = "auto"
    bucket_mb: Annotated[float, Field(gt=0)] | Auto = "auto"
    sync: Literal["last", "every", "auto"] = "auto"
    reduce_precision: Literal["fp32", "bf16"] = "fp32"
    fused_optimizer: bool = True
    pinned: bool | Auto = "auto"
    prefetch_batches: NonNegative | Auto = "auto"
    loader_workers: NonNegative | Auto = "auto"
    keep_host_memory: bool | Auto = "auto"
    expandable_segments: bool | Auto = "auto"
    tf32: bool = False
    adapt: bool | Auto = "auto"

    # How `auto` is decided.
    tune: list[str] = Field(default_factory=list)  # levers at auto to measure too, which a rule would decide
    tune_probes: int = Field(default=4, ge=0)  # candidates that are measured; 0 trusts the prediction
    tune_steps: int = Field(default=3, ge=1)  # timed steps of each probe
    nccl: dict[str, str] = Field(default_factory=dict)  # NCCL_* variables, set and logged as they stand here
    record: dict[str, Any] | None = None  # how a resolved file came about

    @model_validator(mode="after")
    def _one_way_to_say_the_batch(self) -> "TrainingConfig":
        if self.accumulation is not None and self.global_batch is not None:
            raise ValueError("expected accumulation or global_batch, not both")
        if self.micro_batch == "auto":
            if self.global_batch is None:
                raise ValueError("micro_batch: auto; expected global_batch beside it, which it divides")
        elif self.global_batch is not None and self.global_batch % self.micro_batch:
            raise ValueError(
                f"global_batch {self.global_batch}: expected a multiple of micro_batch {self.micro_batch}"
            )
        for name in self.tune:
            if name not in LEVERS or not LEVERS[name].tried:
                known = ", ".join(name for name, lever in LEVERS.items() if lever.by_rule and lever.tried)
                raise ValueError(f"tune: {name}: expected some of {known}")
        if wrong := [name for name in self.nccl if not name.startswith("NCCL_")]:
            raise ValueError(f"nccl: {wrong[0]}: expected names that begin with NCCL_")
        return self

    def accumulation_for(self, processes: int) -> int:
        """Passes of each process in a step. Raises ConfigError when the global batch cannot be divided so."""
        if self.global_batch is None:
            return self.accumulation or 1
        smallest = 1 if self.micro_batch == "auto" else self.micro_batch
        passes, rest = divmod(self.global_batch, smallest * processes)
        if rest or not passes:
            raise ConfigError(
                f"global_batch: {self.global_batch}; expected a multiple of micro_batch {smallest} "
                f"times {processes} processes"
            )
        return passes


@dataclass(frozen=True)
class Lever:
    """What a lever does. `numerics`: the same bits, the same but for rounding, or another computation."""

    numerics: Numerics
    plain: Any  # its value in the plain baseline that --compare measures
    what: str
    tried: tuple[Any, ...] = ()  # what `auto` chooses from by measuring
    by_rule: bool = False  # a rule decides, unless `tune` names it; always where nothing is tried


LEVERS: dict[str, Lever] = {
    "micro_batch": Lever(
        "rounding",
        1,
        "sequences in one pass of one process; auto: measured, the global batch stays",
        (1, 2, 4, 8, 16, 32),
    ),
    "accumulation": Lever("rounding", None, "passes in a step; follows from global_batch when that is given"),
    "precision": Lever(
        "changes",
        "fp32",
        "fp32; bf16: autocast; bf16_master: weights in bf16, master in fp32; fp8: linear layers by torchao",
        ("fp32", "bf16", "bf16_master", "fp8"),
    ),
    "activation_checkpointing": Lever(
        "bitwise",
        "none",
        "activations computed again in backward: none, every second layer (selective), all (full)",
        ("none", "selective", "full"),
    ),
    "compile": Lever(
        "rounding", False, "torch.compile of each layer; measured, as it may lose", (False, True)
    ),
    "attention": Lever(
        "rounding",
        "library",
        "CPU: causal attention in blocks that skip what the mask hides; auto: blocks on a CPU",
        ("library", "blocks"),
        True,
    ),
    "loss_chunk": Lever(
        "rounding", 0, "tokens whose logits exist at one time; 0: all; auto: chunks of up to 16M logits"
    ),
    "parallel": Lever(
        "rounding",
        "ddp",
        "ddp, fsdp (sharded), hsdp (sharded in a node, replicated across); auto: by memory",
        ("ddp", "fsdp"),
        True,
    ),
    "reshard": Lever(
        "bitwise",
        True,
        "fsdp: free the gathered weights after forward; auto: if memory asks",
        (False, True),
        True,
    ),
    "layers_per_group": Lever(
        "bitwise", 1, "fsdp: layers whose gradients share one reduce-scatter", (1, 2, 4), True
    ),
    "prefetch_layers": Lever("bitwise", 0, "fsdp: groups gathered ahead of their use"),
    "bucket_mb": Lever(
        "rounding", 25.0, "ddp: gradients that share one all-reduce, MB", (4.0, 25.0, 100.0), True
    ),
    "sync": Lever(
        "rounding",
        "every",
        "gradients are exchanged after every pass, or the last of a step; auto: the last, if memory allows",
    ),
    "reduce_precision": Lever("changes", "fp32", "fsdp: precision in which gradients are summed"),
    "fused_optimizer": Lever("rounding", False, "AdamW as one kernel"),
    "pinned": Lever("bitwise", False, "batches pass through page-locked memory; GPU only"),
    "prefetch_batches": Lever(
        "bitwise", 0, "batches made and copied ahead, on a stream of their own", (0, 1, 2), True
    ),
    "loader_workers": Lever("bitwise", 0, "threads that make batches", (0, 1, 2), True),
    "keep_host_memory": Lever(
        "bitwise", False, "freed memory of the host is kept for the next pass, not given back; CPU only"
    ),
    "expandable_segments": Lever("bitwise", False, "CUDA memory grows in place, with fewer holes; GPU only"),
    "tf32": Lever("changes", False, "fp32 matmuls may use TF32; GPU only"),
    "adapt": Lever(
        "rounding",
        False,
        "micro-batch follows occupancy and memory while training; auto: if micro_batch is auto",
    ),
}


def plain_of(config: TrainingConfig, processes: int) -> TrainingConfig:
    """The plain baseline of a configuration: every lever at its plain value, the global batch the same."""
    plain = {name: lever.plain for name, lever in LEVERS.items()}
    batch = config.global_batch or int(config.micro_batch) * (config.accumulation or 1) * processes
    return config.model_copy(update={**plain, "global_batch": batch, "record": None})


def preserving_of(config: TrainingConfig) -> TrainingConfig:
    """The configuration with every lever that changes the computation at its plain value."""
    plain = {name: lever.plain for name, lever in LEVERS.items() if lever.numerics == "changes"}
    return config.model_copy(update=plain)


def levers_on(config: TrainingConfig) -> dict[str, Any]:
    """The levers that are not at their plain value, with their values."""
    return {
        name: getattr(config, name)
        for name, lever in LEVERS.items()
        if getattr(config, name) not in (lever.plain, "auto")
    }


def check_parallel(config: TrainingConfig, processes: int, on_node: int) -> None:
    """Refuse what cannot be spread over so many processes, `on_node` of them on each. Raises ConfigError."""
    if processes > 1 and config.parallel == "ddp" and config.precision == "bf16_master":
        raise ConfigError("precision: bf16_master; expected parallel: fsdp or hsdp, not ddp")
    nodes = on_node > 1 and processes % on_node == 0 and processes > on_node
    if processes > 1 and config.parallel == "hsdp" and not nodes:
        raise ConfigError(
            f"parallel: hsdp; expected several nodes of several processes each, found {processes} "
            f"processes, {on_node} on this node; use fsdp"
        )


def halved(micro_batch: int) -> int:
    """The next smaller micro-batch that divides this one; 0 when there is none."""
    divisors = [size for size in range(1, micro_batch) if micro_batch % size == 0]
    below = [size for size in divisors if size <= micro_batch // 2]
    return max(below, default=0)


def lever_table() -> list[tuple[str, str, str, str, str]]:
    """Rows of name, default, plain value, what it does to the numbers, and what it is."""
    words = {"bitwise": "preserved, bitwise", "rounding": "preserved, to rounding", "changes": "changed"}
    return [
        (
            name,
            _shown(TrainingConfig.model_fields[name].default),
            _shown(lever.plain),
            words[lever.numerics],
            lever.what,
        )
        for name, lever in LEVERS.items()
    ]


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
    return checked(TrainingConfig, {} if data is None else data, where)


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
        problems = error.errors(include_url=False)
        problem = problems[0]
        field = ".".join(map(str, problem["loc"][:1]))
        known = EXPECTED.get(problem["type"])
        message = known.format(**problem.get("ctx", {})) if known else problem["msg"]
        message = message.removeprefix("Value error, ")
        annotation = cls.model_fields[field].annotation if field in cls.model_fields else None
        if known and Auto in get_args(annotation):
            message += ", or auto"
        told = f"{field}: {problem['input']!r}: " if field else ""
        raise ConfigError(f"{where}: {told}{message}") from None


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value is None else str(value)
