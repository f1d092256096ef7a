"""Which models there are: the shapes that ship, and Hugging Face directories.

Invariant: a shape is known without torch, and the model built from it is transformers' own. Experts, sliding
windows, biases and norms of queries are counted where the architecture is in `_ARCHITECTURES`; every other is
refused, so that no count of FLOPs is ever wrong.
"""

import contextlib
import difflib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class ModelError(Exception):
    """A model that does not exist or cannot be used; the message names it and what was expected."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a dense decoder with a gated MLP; `tied` when both embeddings are one matrix."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    experts: int = 0  # of each layer; 0 is one dense MLP
    experts_per_token: int = 1
    window: int | None = None  # keys that a query sees in a windowed layer, itself included
    windowed_layers: int = 0
    other_per_layer: int = 0  # parameters that nothing is multiplied by: biases, norms of queries and keys

    @property
    def embedding_parameters(self) -> int:
        """Those of the input embedding."""
        return self.vocab * self.hidden

    @property
    def matmul_parameters(self) -> int:
        """Those a token is multiplied by: linear layers, the output one included, and experts it visits."""
        return self._matrices(self.experts_per_token) + self.embedding_parameters

    @property
    def layer_parameters(self) -> int:
        """All of one layer."""
        return self._matrices(max(self.experts, 1)) // self.layers + 2 * self.hidden + self.other_per_layer

    @property
    def parameters(self) -> int:
        """All distinct parameters."""
        return self.layers * self.layer_parameters + self.end_parameters

    @property
    def end_parameters(self) -> int:
        """Those outside the layers: both embeddings and the last norm."""
        return (1 if self.tied else 2) * self.embedding_parameters + self.hidden

    @property
    def active_parameters(self) -> int:
        """All but the experts that a token does not visit."""
        return self.parameters - self._matrices(max(self.experts, 1)) + self._matrices(self.experts_per_token)

    def _matrices(self, experts: int) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        router = self.hidden * self.experts
        return self.layers * (attention + experts * 3 * self.hidden * self.ffn + router)


MODULE = "module:"  # begins the name of a model that a function in a Python module makes
BYTE_VOCAB = 264  # 256 bytes, two special tokens, rounded up to a multiple of 8
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# name: shape, longest sequence, rope. The small ones read bytes and run on a CPU.
SHIPPED: dict[str, tuple[Shape, int, Mapping[str, Any]]] = {
    "llama-micro": (Shape(2, 64, 176, 4, 2, 16, BYTE_VOCAB), 1024, {"rope_theta": 10000.0}),
    "llama-tiny": (Shape(4, 256, 704, 4, 2, 64, BYTE_VOCAB), 2048, {"rope_theta": 10000.0}),
    "llama-30m": (Shape(10, 512, 1408, 8, 4, 64, BYTE_VOCAB), 2048, {"rope_theta": 10000.0}),
    "llama-60m": (Shape(12, 640, 1792, 10, 5, 64, BYTE_VOCAB), 2048, {"rope_theta": 10000.0}),
    "llama-3.1-8b": (Shape(32, 4096, 14336, 32, 8, 128, 128256), 131072, LLAMA_3_ROPE),
    "llama-3.1-70b": (Shape(80, 8192, 28672, 64, 8, 128, 128256), 131072, LLAMA_3_ROPE),
    "llama-3.1-405b": (Shape(126, 16384, 53248, 128, 8, 128, 128256), 131072, LLAMA_3_ROPE),
}
# What is raised for a directory that cannot be read; ImportError for want of what its own format asks for.
_UNREADABLE = (OSError, ValueError, RuntimeError, KeyError, ImportError)
_ARCHITECTURES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
# Keys that would make any of these another model than a Shape can say, and the values that are harmless.
_BEYOND: dict[str, tuple[Any, ...]] = {
    "num_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "layer_types": (None,),
}


def config_of(model: str) -> dict[str, Any]:
    """The Hugging Face configuration of a shipped name, a directory with config.json, or such a file.

    Raises ModelError.
    """
    if model in SHIPPED:
        return _shipped(model)
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        near = difflib.get_close_matches(model, SHIPPED, 1, 0.6)
        hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(SHIPPED)}, or a directory"
        raise ModelError(f"model: {model!r}: no such model; {hint}")
    try:
        return parsed(file.read_bytes(), str(file))
    except OSError as error:
        raise ModelError(f"{file}: not a JSON configuration: {error}") from None


def parsed(data: bytes, name: str) -> dict[str, Any]:
    """A configuration from the bytes of a config.json; `name` stands for the file in a ModelError."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name}: not a JSON configuration: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{name}: expected a JSON object, the configuration of a model")
    return config


def shape_of(model: str) -> Shape:
    """The shape of a model that `config_of` finds. Raises ModelError when a Shape cannot say what it is."""
    return described(model, config_of(model))


def described(model: str, config: Mapping[str, Any]) -> Shape:
    """The shape that a Hugging Face configuration describes; `model` names it in a ModelError."""
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        raise ModelError(f"{model}: model_type {kind!r}; expected one of {', '.join(_ARCHITECTURES)}")
    for key, harmless in _beyond(config).items():
        if config.get(key) not in harmless:
            raise ModelError(
                f"{model}: {key}: {config[key]!r} is not supported; its FLOPs would be counted wrongly"
            )
    try:
        return _shape(kind, config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{model}: config.json: {error}: missing or not a number above 0") from None


def _beyond(config: Mapping[str, Any]) -> Mapping[str, tuple[Any, ...]]:
    """`_BEYOND`, with layers that all attend fully, or all in one window, as harmless."""
    kinds = config.get("layer_types")
    window = config.get("model_type") in ("mistral", "mixtral") and config.get("sliding_window")
    alike = ["sliding_attention" if window else "full_attention"]
    plain = isinstance(kinds, list) and bool(kinds) and kinds == alike * len(kinds)
    windows = {} if config.get("model_type") != "llama" else {"sliding_window": (None,)}
    experts = {} if config.get("model_type") == "mixtral" else {"num_local_experts": (None, 0, 1)}
    switched = {"use_sliding_window": (None, False)}
    return {**_BEYOND, **windows, **experts, **switched, "layer_types": (None, kinds) if plain else (None,)}


def _shape(kind: str, config: Mapping[str, Any]) -> Shape:
    def number(key: str, default: Any = None) -> int:
        value = config[key] if default is None else config.get(key) or default
        if isinstance(value, bool) or int(value) != value or value < 1:
            raise ValueError(f"{key} is {value!r}")
        return int(value)

    layers, hidden, ffn = number("num_hidden_layers"), number("hidden_size"), number("intermediate_size")
    heads = number("num_attention_heads")
    kv_heads, head_dim = number("num_key_value_heads", heads), number("head_dim", hidden // heads)
    mixture = kind == "mixtral"
    # Mistral's layers all see the same window; Qwen's only when switched on, which is refused above.
    window = config.get("sliding_window") if kind in ("mistral", "mixtral") else None
    biases = 0
    if kind == "qwen2" or config.get("attention_bias"):
        biases += (heads + 2 * kv_heads) * head_dim + (hidden if kind != "qwen2" else 0)
    if config.get("mlp_bias"):
        biases += 2 * ffn + hidden
    return Shape(
        layers,
        hidden,
        ffn,
        heads,
        kv_heads,
        head_dim,
        vocab=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=number("num_local_experts") if mixture else 0,
        experts_per_token=number("num_experts_per_tok") if mixture else 1,
        window=number("sliding_window") if window else None,
        windowed_layers=layers if window else 0,
        other_per_layer=biases + (2 * head_dim if kind == "qwen3" else 0),
    )


def longest_sequence(model: str) -> int | None:
    """How many tokens the model can see at once, when its configuration says so."""
    found = config_of(model).get("max_position_embeddings")
    if found is not None and not isinstance(found, int):
        raise ModelError(f"{model}: config.json: max_position_embeddings: {found!r}; expected a whole number")
    return found or None


def build(model: str, seed: int, layers: int | None = None, device: str = "cpu") -> Any:
    """The model in fp32: with fresh weights from `seed` for a shipped name, else the directory's.

    `layers` cuts a shipped one to its first so many. `device` is where fresh weights are drawn: a GPU draws
    billions in a second, other ones than a CPU from the same seed. Raises ModelError.
    """
    import torch

    _hush()
    _check_cut(model, layers)
    if model not in SHIPPED:
        return load(model)
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        return LlamaForCausalLM(_llama_config(model, layers))


def skeleton(model: str, layers: int | None = None) -> Any:
    """The model on the meta device: parameters and buffers with shapes but no memory. Raises ModelError."""
    import torch

    _hush()
    _check_cut(model, layers)
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

    with torch.device("meta"):
        if model in SHIPPED:
            return LlamaForCausalLM(_llama_config(model, layers))
        with loading(model):
            config = AutoConfig.from_pretrained(model, local_files_only=True)
            automatic: Any = AutoModelForCausalLM
            built = automatic.from_config(config, dtype=torch.float32)
            if Path(model, "generation_config.json").is_file():
                built.generation_config = GenerationConfig.from_pretrained(model, local_files_only=True)
            return built


def _check_cut(model: str, layers: int | None) -> None:
    if layers is not None and model not in SHIPPED:
        raise ModelError(f"layers: {layers}; expected a shipped model to cut, not {model}")
    if layers is not None and layers > SHIPPED[model][0].layers:
        raise ModelError(f"layers: {layers}; {model} has {SHIPPED[model][0].layers}")


def _llama_config(name: str, layers: int | None) -> Any:
    from transformers import LlamaConfig

    cut = {} if layers is None else {"num_hidden_layers": layers}
    return LlamaConfig(**_arguments({**_shipped(name), **cut}))


def _hush() -> None:
    """Keep from people what libraries say on import to their own authors, and progress bars from logs."""
    import torch
    from transformers.utils import logging as transformers_logging

    if not torch.cuda.is_available():  # that kernels for GPUs cannot be loaded is no news there
        logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def load(directory: str, **arguments: Any) -> Any:
    """The causal language model in a Hugging Face directory, in fp32 unless `dtype` says otherwise.

    Raises ModelError.
    """
    import torch

    _hush()
    from transformers import AutoModelForCausalLM

    if not Path(directory, "config.json").is_file():
        raise ModelError(f"{directory}: no config.json; expected a Hugging Face model directory")
    # Weights of other sizes are told below, by name.
    chosen = {"dtype": torch.float32, "ignore_mismatched_sizes": True, **arguments}
    with loading(directory):
        found: Any = AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, output_loading_info=True, **chosen
        )
    loaded, info = found
    for what in ("missing_keys", "mismatched_keys"):
        if names := sorted(key if isinstance(key, str) else str(key[0]) for key in info.get(what) or ()):
            raise not_whole(directory, what.replace("_", " "), names)
    return loaded


@contextlib.contextmanager
def loading(directory: str) -> Iterator[None]:
    """What transformers and safetensors raise for a directory that they cannot read, as ModelError."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except (*_UNREADABLE, SafetensorError, StrictDataclassError) as error:
        raise ModelError(f"{directory}: cannot be loaded: {' '.join(str(error).split())[:300]}") from error


def not_whole(directory: str, what: str, names: Sequence[str]) -> ModelError:
    """The error for tensors that a directory lacks, or has in other sizes."""
    return ModelError(f"{directory}: {what}: {', '.join(names[:3])}; the weights are not whole")


def _shipped(name: str) -> dict[str, Any]:
    shape, longest, rope = SHIPPED[name]
    sizes = asdict(shape)
    small = shape.vocab == BYTE_VOCAB
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": sizes["layers"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["ffn"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "vocab_size": sizes["vocab"],
        "tie_word_embeddings": sizes["tied"],
        "max_position_embeddings": longest,
        "rope_parameters": {"rope_type": "default", **rope},
        "rms_norm_eps": 1e-5,
        "bos_token_id": 256 if small else 128000,
        "eos_token_id": 256 if small else 128001,
        "pad_token_id": 257 if small else None,
    }


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "model_type"}
