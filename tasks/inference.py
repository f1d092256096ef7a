"""The program of `kind: batch_inference`: a completion for every row of a JSONL file.

Invariant: one output row for each input row, in their order, in shards that appear whole; a shard that is
there is never done again, so a job that was killed at any moment goes on where it was. A row that cannot be
processed is a row with an `error`. The input is read as a stream, one shard at a time. Decoding is greedy:
it gives the same text each time, and shards do not depend on who made them.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from tasks.program import JobFailedError, Program, leave_out, local_file, local_model, main
from tasks.specfile import SpecError, Strict, read_spec
from tasks.storage import NotFoundError, Storage
from training.manifest import Entry, entries_of, manifest_bytes
from training.models import ModelError, config_of, load, longest_sequence
from training.processes import World, launch, world_from_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORKER = "SLOTWISE_WORKER"
RUN = "run.json"  # what the shards of an output were made from


class InferenceSpec(Strict):
    """The section `batch_inference:` of a job."""

    input: str  # key of a JSONL file
    model: str  # key prefix of a model's directory
    prompt: str = "prompt"  # the column that holds the prompt
    max_new_tokens: int = Field(default=64, ge=1)
    batch: int = Field(default=16, ge=1)  # rows generated together
    shard_rows: int = Field(default=256, ge=1)  # rows in an output file
    max_error_share: float = Field(default=0.5, ge=0, le=1)  # more rows with errors than this fail the job


@dataclass
class Tally:
    """What this process has done so far."""

    rows: int = 0
    failed: int = 0
    generated: int = 0  # rows that this attempt made, in `seconds`
    tokens: int = 0
    seconds: float = 0.0
    example: str = ""

    def count(self, row: dict[str, Any]) -> None:
        self.rows += 1
        if row["error"] is not None:
            self.failed += 1
            self.example = self.example or str(row["error"])


def infer(program: Program) -> None:
    """Complete every row, and leave the rows as `<output>/rows-NNNNN.jsonl`."""
    spec = read_spec(InferenceSpec, program.text, program.name)
    source = local_file(program.place("input", spec.input), program.scratch)
    directory = local_model(program.place("model", spec.model), program.scratch)
    _same_run_as_before(program, spec, source, directory)
    processes = 1 if program.virtual else program.gpus
    if processes > 1 and WORKER not in os.environ:
        command = [sys.executable, "-m", "tasks.inference", *sys.argv[1:]]
        code = launch(command, processes, {**os.environ, WORKER: "1"}, program.node_rank, program.nodes)
        if code:
            sys.exit(code)
        program.metrics.path = None
        return
    world = world_from_environment() if WORKER in os.environ else World(program.node_rank, program.nodes)
    tally = _own_shards(program, spec, source, directory, world)
    _report(program, tally, 1.0)
    if tally.failed > spec.max_error_share * tally.rows:
        raise SpecError(
            f"{tally.failed} of {tally.rows} rows failed, more than the {spec.max_error_share:g} allowed; "
            f"for example: {tally.example}"
        )
    _close_if_complete(program, spec, source)


def _own_shards(program: Program, spec: InferenceSpec, source: Path, directory: Path, world: World) -> Tally:
    """Do the shards of this process that are not there yet."""
    tally = Tally()
    total = source.stat().st_size
    done = set(program.storage.keys(f"{program.output}/rows-"))
    engine: Engine | None = None
    for index, (position, lines) in enumerate(_shards(source, spec.shard_rows)):
        if index % world.size != world.rank:
            continue
        key = shard_key(program.output, index)
        if key in done:
            for line in program.storage.read(key).splitlines():
                tally.count(json.loads(line))
        else:
            engine = engine or Engine(
                directory, world.local_rank, spec, program.own_process
            )  # a finished job needs no model
            began = time.perf_counter()
            rows = engine.complete(lines)
            tally.seconds += time.perf_counter() - began
            tally.generated += len(rows)
            for row in rows:
                tally.count(row)
                tally.tokens += row["completion_tokens"] or 0
            text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
            program.storage.write(key, text.encode("utf-8", errors="replace"))
            print(f"{key}: {len(rows)} rows", flush=True)
        _report(program, tally, position / total)
    return tally


def shard_key(output: str, index: int) -> str:
    """Where the rows of a shard lie."""
    return f"{output}/rows-{index:05d}.jsonl"


class Engine:
    """A model that completes rows, longest prompts together, on one device."""

    def __init__(self, directory: Path, gpu: int, spec: InferenceSpec, own_process: bool = False) -> None:
        self.spec = spec
        plain = config_of(str(directory)).get("quantization_config") is None
        if own_process:  # what a quantized model needs costs the others a second
            leave_out("scipy", *(["torchao"] if plain else []))
        import torch
        from transformers import AutoTokenizer

        self.device = torch.device("cuda", gpu) if torch.cuda.is_available() else torch.device("cpu")
        self.model: Any = load(str(directory)).to(self.device).eval()
        try:
            self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                directory, local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                f"{spec.model}: its tokenizer cannot be loaded: {' '.join(str(error).split())}"
            ) from None
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.room = (longest_sequence(str(directory)) or math.inf) - spec.max_new_tokens

    def complete(self, lines: Sequence[tuple[int, bytes]]) -> list[dict[str, Any]]:
        """An output row for each input line, in their order."""
        rows = [_parsed(number, line, self.spec.prompt) for number, line in lines]
        prompts: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            if row["error"] is None:
                tokens = self.tokenizer(row[self.spec.prompt])["input_ids"]
                row["prompt_tokens"] = len(tokens)
                if not tokens:
                    row["error"] = f"line {lines[place][0]}: {self.spec.prompt}: is empty"
                elif len(tokens) > self.room:
                    row["error"] = (
                        f"line {lines[place][0]}: {len(tokens)} tokens and {self.spec.max_new_tokens} new "
                        f"ones do not fit the model's {int(self.room) + self.spec.max_new_tokens}"
                    )
                else:
                    prompts[place] = tokens
        by_length = sorted(prompts, key=lambda place: -len(prompts[place]))
        for first in range(0, len(by_length), self.spec.batch):
            together = by_length[first : first + self.spec.batch]
            for place, made in zip(together, self._generated([prompts[p] for p in together]), strict=True):
                rows[place] |= made
        return rows

    def _generated(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Completions of prompts that run together; halves of them when memory does not hold all."""
        import torch

        try:
            return self._generate(prompts)
        except torch.OutOfMemoryError:
            if len(prompts) == 1:
                return [{"error": "out of memory"}]
        torch.cuda.empty_cache()
        half = len(prompts) // 2
        return self._generated(prompts[:half]) + self._generated(prompts[half:])

    def _generate(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        import torch

        padded = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(self.device)
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=padded["input_ids"],
                attention_mask=padded["attention_mask"],
                max_new_tokens=self.spec.max_new_tokens,
                do_sample=False,
                num_beams=1,
                pad_token_id=self.tokenizer.pad_token_id,
            )
        ends = self.model.generation_config.eos_token_id
        stops = set(ends if isinstance(ends, list) else [ends])
        found = []
        for tokens in out[:, padded["input_ids"].shape[1] :].tolist():
            end = next((place for place, token in enumerate(tokens) if token in stops), None)
            kept = tokens if end is None else tokens[:end]
            found.append(
                {
                    "completion": self.tokenizer.decode(kept, skip_special_tokens=True),
                    "completion_tokens": len(kept) + (end is not None),
                    "finish_reason": "length" if end is None else "stop",
                }
            )
        return found


def _parsed(number: int, line: bytes, prompt: str) -> dict[str, Any]:
    """The output row of an input line as far as reading goes: its own columns, and ours, which win."""
    result: dict[str, Any] = {
        "completion": None,
        "prompt_tokens": None,
        "completion_tokens": None,
        "finish_reason": None,
        "error": None,
    }
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        shown = line[:200].decode("utf-8", errors="replace").strip()
        return {"line": shown, **result, "error": f"line {number}: not JSON in UTF-8: {error}"}
    if not isinstance(row, dict):
        return {
            "line": str(row)[:200],
            **result,
            "error": f"line {number}: expected an object with {prompt!r}",
        }
    if prompt not in row:
        result["error"] = f"line {number}: has no column {prompt!r}"
    elif not isinstance(row[prompt], str):
        result["error"] = f"line {number}: {prompt}: {str(row[prompt])[:80]!r} is not text"
    return {**row, **{key: value for key, value in result.items() if key != prompt}}


def _shards(source: Path, size: int) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
    """The lines of a file that hold anything, numbered, `size` at a time, and the bytes read so far."""
    with source.open("rb") as file:
        position = 0

        def lines() -> Iterator[tuple[int, bytes]]:
            nonlocal position
            for number, line in enumerate(file, 1):
                position += len(line)
                if line.strip():
                    yield number, line

        stream = lines()
        while shard := list(islice(stream, size)):
            yield position, shard


def _same_run_as_before(program: Program, spec: InferenceSpec, source: Path, directory: Path) -> None:
    """Note what the output is made from; refuse to go on with shards that were made from something else."""
    model = {name: entry.sha256 for name, entry in entries_of(directory).items()}
    made_from = {
        "input": spec.input,
        "input_bytes": source.stat().st_size,
        "model": model,
        "prompt": spec.prompt,
        "max_new_tokens": spec.max_new_tokens,
        "shard_rows": spec.shard_rows,
    }
    data = json.dumps(made_from, indent=1, sort_keys=True).encode()
    key = f"{program.output}/{RUN}"
    if program.storage.create(key, data) or program.storage.read(key) == data:
        return
    before = json.loads(program.storage.read(key))
    changed = next(name for name, value in made_from.items() if before.get(name) != value)
    raise SpecError(
        f"{program.name}: {changed}: the rows under {program.output} were made with another one; "
        "use another output, or remove them"
    )


def _close_if_complete(program: Program, spec: InferenceSpec, source: Path) -> None:
    """List the shards in a manifest once all are there: the last process to finish sees them all."""
    count = sum(1 for _ in _shards(source, spec.shard_rows))
    wanted = [shard_key(program.output, index) for index in range(count)]
    if not set(wanted) <= set(program.storage.keys(f"{program.output}/rows-")):
        return
    entries = {key.rpartition("/")[2]: _entry(program.storage, key) for key in wanted}
    program.storage.write(f"{program.output}/manifest.json", manifest_bytes(entries))
    program.metrics.update(outputs=[f"{program.output}/manifest.json", *wanted[:20]])


def _entry(storage: Storage, key: str) -> Entry:
    import hashlib

    try:
        data = storage.read(key)
    except NotFoundError:
        raise JobFailedError(f"{key}: was there and is gone") from None
    return Entry(len(data), hashlib.sha256(data).hexdigest())


def _report(program: Program, tally: Tally, progress: float) -> None:
    rates: dict[str, Any] = (
        {"rows_per_s": tally.generated / tally.seconds, "tokens_per_s": tally.tokens / tally.seconds}
        if tally.tokens and tally.seconds
        else {}
    )
    program.metrics.update(rows_done=tally.rows, rows_failed=tally.failed, progress=progress, **rates)


if __name__ == "__main__":
    main(infer, sys.argv[1:])
