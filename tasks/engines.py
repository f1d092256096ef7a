"""What generates: transformers, which is always there, or vLLM where it is installed and asked for.

Invariant: an engine answers every prompt it is given, in their order, and an answer depends on the prompt
and the settings, not on which process made it. Greedy decoding in fp32 gives a row the same text in any
batch but for near ties; sampling is seeded by the shard.
"""

import importlib.util
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tasks import batches
from tasks.generating import Work, peaks, sizes_of, synchronize
from tasks.specfile import SpecError
from training.models import ModelError, config_of, load, longest_sequence

if TYPE_CHECKING:
    import torch

EngineName = Literal["transformers", "vllm"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
MOST_ROWS = {"cuda": 512, "cpu": 64}  # above these a batch gains little and padding grows
LEAST_TO_DROP = 8  # rows in a batch before finished ones are taken out of it


@dataclass(frozen=True)
class Settings:
    """How rows are completed. A temperature of 0 is greedy decoding."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Completion:
    """What became of a prompt: a text and its tokens, or an error."""

    text: str | None
    tokens: int | None
    reason: Literal["stop", "length"] | None
    error: str | None = None


class Engine(Protocol):
    """A loaded model."""

    tokens: "Tokens"
    work: Work

    def complete(self, prompts: Sequence[list[int]], seed: int) -> list[Completion]:
        """Complete prompts of one shard; `seed` is the shard's own."""

    def close(self) -> None:
        """End what it started; it answers nothing after that."""


@dataclass
class Tokens:
    """A model's tokenizer, and how long a prompt may be."""

    tokenizer: Any
    longest: float  # prompt and completion together
    chat: bool = field(init=False)

    def __post_init__(self) -> None:
        self.chat = bool(getattr(self.tokenizer, "chat_template", None))

    def of(self, asked: Sequence[Any], messages: bool = False) -> list[list[int] | str]:
        """Tokens of each text, or of each list of messages, or what is wrong with it."""
        wrong = [_no_messages(item) if messages else _no_text(item) for item in asked]
        texts = [
            item for item, error in zip(asked, wrong, strict=True) if not error and isinstance(item, str)
        ]
        plain = iter(self.tokenizer(texts)["input_ids"] if texts else [])
        found: list[list[int] | str] = []
        for item, error in zip(asked, wrong, strict=True):
            if error:
                found.append(error)
            else:
                found.append(list(next(plain)) if isinstance(item, str) else self._of_messages(item))
        return found

    def _of_messages(self, messages: list[dict[str, Any]]) -> list[int] | str:
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's author, which may refuse messages
            return f"the model's chat template refuses it: {' '.join(str(error).split())[:200]}"
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def read_tokens(directory: Path, name: str) -> Tokens:
    """The tokenizer in a model's directory. Raises ModelError; `name` is what it calls the model."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # tokenizers raises plain Exception for a file that it cannot read
        raise ModelError(
            f"{name}: its tokenizer cannot be loaded: {' '.join(str(error).split())[:200]}"
        ) from None
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return Tokens(tokenizer, longest_sequence(str(directory)) or math.inf)


def check_engine(engine: EngineName, tensor_parallel: int, gpus: int) -> None:
    """Raise SpecError where this node cannot run the engine, before anything is loaded."""
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise SpecError("engine: 'vllm': is not installed on this node; install it, or use transformers")
    if tensor_parallel > 1 and engine != "vllm":
        raise SpecError(
            f"tensor_parallel: {tensor_parallel}: transformers takes one GPU a process; use engine: vllm"
        )
    if gpus % tensor_parallel:
        raise SpecError(f"tensor_parallel: {tensor_parallel}: does not divide the node's {gpus} GPUs")


def open_engine(
    engine: EngineName,
    directory: Path,
    name: str,
    settings: Settings,
    precision: Precision,
    gpu: int,
    tensor_parallel: int,
    most_rows: int | None,
    most_tokens: int | None,
) -> Engine:
    """Load a model. Raises ModelError or SpecError."""
    if engine == "vllm":
        from tasks.vllm_engine import VllmEngine

        return VllmEngine(directory, name, settings, precision, tensor_parallel)
    return TransformersEngine(directory, name, settings, precision, gpu, most_rows, most_tokens)


class TransformersEngine:
    """transformers' `generate` on length-sorted batches that fit in memory.

    Rows that are finished leave their batch, keys and values with them, once they are half of it.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        settings: Settings,
        precision: Precision = "auto",
        gpu: int = 0,
        most_rows: int | None = None,
        most_tokens: int | None = None,
    ) -> None:
        self.settings = settings
        quantized = config_of(str(directory)).get("quantization_config") is not None
        import torch

        self.tokens = read_tokens(directory, name)
        self.device = torch.device("cuda", gpu) if torch.cuda.is_available() else torch.device("cpu")
        self.precision = chosen_precision(precision, self.device)
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        # A quantized model has been scored as it was saved: nothing else is what its gate let through.
        dtype: Any = "auto" if quantized else dtypes[self.precision]
        self.model: Any = load(str(directory), dtype=dtype).to(self.device).eval()
        self.sizes = sizes_of(self.model)
        self.most_rows = most_rows or MOST_ROWS[self.device.type]
        self.most_tokens = most_tokens or math.inf
        self.work = Work()
        self.work.peak_flops_per_s, self.work.peak_bytes_per_s = peaks(self.device, self.precision)
        ends = self.model.generation_config.eos_token_id
        self.ends = [] if ends is None else ends if isinstance(ends, list) else [ends]

    def complete(self, prompts: Sequence[list[int]], seed: int) -> list[Completion]:
        import torch

        new, free = self.settings.max_new_tokens, batches.free_bytes(self.device)

        def fits(rows: int, prompt: int) -> bool:
            within = rows * (prompt + new) <= self.most_tokens
            return within and self.sizes.batch_bytes(rows, prompt, new) <= free

        found: list[Completion] = [Completion(None, None, None, "not generated")] * len(prompts)
        began = time.perf_counter()
        torch.manual_seed(seed)
        for places in batches.batches([len(prompt) for prompt in prompts], new, self.most_rows, fits):
            for place, made in zip(places, self._generated([prompts[p] for p in places]), strict=True):
                found[place] = made
        self.work.seconds += time.perf_counter() - began
        self.work.rows += len(prompts)
        return found

    def close(self) -> None:
        """Nothing of it outlives its process."""

    def _generated(self, prompts: list[list[int]]) -> list[Completion]:
        """Completions of prompts that run together; halves of them when memory does not hold all."""
        import torch

        try:
            return [self._completion(tokens) for tokens in self._generate(prompts)]
        except (torch.OutOfMemoryError, MemoryError):
            if len(prompts) == 1:
                return [Completion(None, None, None, f"{len(prompts[0])} tokens: out of memory")]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        half = len(prompts) // 2
        return self._generated(prompts[:half]) + self._generated(prompts[half:])

    def _generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """New tokens of each prompt, what follows an end among them."""
        import torch

        from tasks.key_values import cache_argument, empty_cache, prefill

        padded = self.tokens.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(self.device)
        ids, mask = padded["input_ids"], padded["attention_mask"]
        cache = empty_cache(self.model, ids.shape[1] + self.settings.max_new_tokens)
        rows, left = list(range(len(prompts))), self.settings.max_new_tokens
        made: list[list[int]] = [[] for _ in prompts]
        prefilled, began = False, time.perf_counter()
        with torch.inference_mode():
            computed = prefill(self.model, cache, ids, mask, [len(prompt) for prompt in prompts])
        self.work.padded_tokens += computed + len(prompts) if computed else ids.numel()
        while True:
            watch = _watch(self)
            with torch.inference_mode():
                out = self.model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    **{cache_argument(self.model): cache},
                    max_new_tokens=left,
                    stopping_criteria=[watch],
                    pad_token_id=self.tokens.tokenizer.pad_token_id,
                    num_beams=1,
                    **self._sampling(),
                )
                steps = out.shape[1] - ids.shape[1]
                for row, tokens in zip(rows, out[:, -steps:].tolist(), strict=True):
                    made[row] += tokens
                synchronize(self.device)
                ended = time.perf_counter()
                self._note(rows, prompts, steps, began, watch.first, ended, prefilled)
                left -= steps
                keep = [index for index, done in enumerate(watch.done.tolist()) if not done]
                if not left or not keep:
                    break
                index = torch.tensor(keep, device=self.device)
                cache.batch_select_indices(index)
                ids = out[index]
                mask = torch.cat([mask[index], mask.new_ones(len(keep), steps)], dim=1)
            rows, prefilled, began = [rows[place] for place in keep], True, time.perf_counter()
        return made

    def _sampling(self) -> dict[str, Any]:
        given = self.settings
        if not given.temperature:
            return {"do_sample": False, "repetition_penalty": given.repetition_penalty}
        return {
            "do_sample": True,
            "temperature": given.temperature,
            "top_p": given.top_p,
            "top_k": given.top_k,
            "repetition_penalty": given.repetition_penalty,
        }

    def _note(
        self,
        rows: list[int],
        prompts: list[list[int]],
        steps: int,
        began: float,
        first: float,
        ended: float,
        prefilled: bool,
    ) -> None:
        """Account for one call of `generate`: its first step computes the prompts, unless they are cached."""
        work, sizes = self.work, self.sizes
        work.stepped_tokens += len(rows) * steps
        decoding = steps
        if not prefilled:
            decoding -= 1
            work.prompt_tokens += sum(len(prompt) for prompt in prompts)
            work.prefill_flops += sum(sizes.prefill_flops(len(prompt)) for prompt in prompts)
            work.prefill_seconds += first - began
            began = first
        held = sum(len(prompts[row]) for row in rows) + len(rows) * steps / 2
        work.decode_bytes += decoding * (sizes.weight_bytes + held * sizes.kv_bytes)
        work.decode_seconds += ended - began

    def _completion(self, tokens: list[int]) -> Completion:
        """The text up to where it ends; the token that ends it counts, and is not part of the text."""
        end = next((place for place, token in enumerate(tokens) if token in self.ends), None)
        kept = tokens if end is None else tokens[:end]
        count, reason = len(kept) + (end is not None), "length" if end is None else "stop"
        text = self._text(kept)
        if any(stop in text for stop in self.settings.stop):
            low, high = 1, len(kept)  # the fewest tokens whose text holds a stop
            while low < high:
                middle = (low + high) // 2
                held = any(stop in self._text(kept[:middle]) for stop in self.settings.stop)
                low, high = (low, middle) if held else (middle + 1, high)
            text = self._text(kept[:low])
            text = text[: min(place for stop in self.settings.stop if (place := text.find(stop)) >= 0)]
            count, reason = low, "stop"
        self.work.generated_tokens += count
        return Completion(text, count, "stop" if reason == "stop" else "length")

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokens.tokenizer.decode(tokens, skip_special_tokens=True))


def _watch(engine: TransformersEngine) -> Any:
    """Sees each step of `generate`: when the first was done, and which rows are.

    Ends the call when half of a large batch is done, for the rest to go on alone.
    """
    import torch
    from transformers import StoppingCriteria
    from transformers.generation.stopping_criteria import StopStringCriteria

    stops = engine.settings.stop
    by_text = StopStringCriteria(engine.tokens.tokenizer, list(stops)) if stops else None
    ends = torch.tensor(engine.ends, device=engine.device)

    class Watch(StoppingCriteria):
        first = 0.0
        done: Any = None

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            if self.done is None:
                synchronize(engine.device)
                self.first = time.perf_counter()
                self.done = torch.zeros(len(input_ids), dtype=torch.bool, device=engine.device)
            self.done |= torch.isin(input_ids[:, -1], ends)
            if by_text is not None:
                self.done |= by_text(input_ids, scores)
            if len(self.done) >= LEAST_TO_DROP and 2 * int(self.done.sum()) >= len(self.done):
                return torch.ones_like(self.done)
            return self.done

    return Watch()


def chosen_precision(asked: Precision, device: "torch.device") -> str:
    """What a model computes in: bf16 on a GPU that has it, fp32 on a processor unless asked otherwise."""
    import torch

    if asked != "auto":
        return asked
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    return "fp32"


def _no_text(asked: Any) -> str | None:
    """Why this is no text; None when it is."""
    if not isinstance(asked, str):
        return f"{str(asked)[:80]!r} is not text"
    return None if _whole(asked) else "holds half a character (a surrogate)"


def _no_messages(asked: Any) -> str | None:
    """Why this is no list of messages; None when it is."""
    if not isinstance(asked, list):
        return f"{str(asked)[:80]!r} is not a list of messages"
    for message in asked:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            return f"{str(message)[:80]!r} is no message; expected a role and a text as content"
        if not _whole(content):
            return "holds half a character (a surrogate)"
    return None if asked else "has no messages"


def _whole(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
