"""Generation by vLLM, where it is installed and asked for. Tried with its build for processors, 0.32.

Invariant: vLLM gets tokens, never texts, and samples each row by a seed of its own, so that what a row says
depends on neither its batch nor the process that makes it. A quantized model is one by its own configuration.
vLLM batches by itself, so our batches, cache and token budget have no part in it.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.engines import Completion, Precision, Settings, read_tokens
from tasks.generating import Work
from training.models import ModelError


class VllmEngine:
    """vLLM's offline engine, in processes of its own.

    `close` ends them: what is left of them keeps Python from ending, and the GPU with it.
    """

    def __init__(
        self, directory: Path, name: str, settings: Settings, precision: Precision, tensor_parallel: int
    ) -> None:
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        import vllm

        self.tokens = read_tokens(directory, name)
        self.settings = settings
        dtype = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision]
        self.work = Work()
        try:
            self.model = vllm.LLM(
                model=str(directory),
                dtype=dtype,
                tensor_parallel_size=tensor_parallel,
                seed=settings.seed,
                max_model_len=-1,  # what memory allows: the model's own may not fit
            )
        except (ValueError, RuntimeError, OSError) as error:
            raise ModelError(f"{name}: vLLM cannot load it: {' '.join(str(error).split())[:300]}") from error
        self.tokens.longest = min(self.tokens.longest, self.model.model_config.max_model_len)

    def complete(self, prompts: Sequence[list[int]], seed: int) -> list[Completion]:
        from vllm import SamplingParams

        given = self.settings
        plain: dict[str, Any] = {
            "max_tokens": given.max_new_tokens,
            "temperature": given.temperature,
            "top_p": given.top_p,
            "top_k": given.top_k or -1,
            "repetition_penalty": given.repetition_penalty,
            "stop": list(given.stop) or None,
        }
        # One seed for all would draw the same for rows that ask the same.
        seeds = [(seed + place) % 2**63 if given.temperature else None for place in range(len(prompts))]
        began = time.perf_counter()
        answers = self.model.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(**plain, seed=own) for own in seeds],
            use_tqdm=False,
        )
        found = []
        for prompt, answer in zip(prompts, answers, strict=True):
            best = answer.outputs[0]
            self.work.prompt_tokens += len(prompt)
            if best.finish_reason not in ("stop", "length"):
                found.append(Completion(None, None, None, f"vLLM ended it: {best.finish_reason}"))
                continue
            self.work.generated_tokens += len(best.token_ids)
            found.append(Completion(best.text, len(best.token_ids), best.finish_reason))
        self.work.rows += len(prompts)
        self.work.seconds += time.perf_counter() - began
        return found

    def close(self) -> None:
        self.model.llm_engine.engine_core.shutdown()
