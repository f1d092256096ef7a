"""The program of `kind: batch_inference`: a completion for every row of JSONL or Parquet files.

Invariant: one output row for each input row, in their order, in shards that appear whole; a shard that is
there is never done again, so a job that was killed at any moment goes on where it was. A row that cannot be
processed is a row with an `error`. The list of shards lies in storage beside them: every process of every
node works off its own stretch of it and then takes what is left of the others', one claim a shard.
"""

import hashlib
import json
import os
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tasks.engines import (
    Completion,
    Engine,
    EngineName,
    Precision,
    Settings,
    Tokens,
    check_engine,
    open_engine,
    read_tokens,
)
from tasks.generating import Work
from tasks.program import FinalError, JobFailedError, Program, leave_out, local_file, local_model, main
from tasks.rows import (
    ADDED,
    Format,
    InputFile,
    Reader,
    Row,
    Shard,
    decoded,
    encoded,
    fingerprint,
    format_of,
    is_pattern,
    matches,
)
from tasks.rows import shards as cut
from tasks.specfile import SpecError, Strict, read_spec
from tasks.storage import NotFoundError, exists
from training.manifest import MANIFEST, Entry, entries_of, manifest_bytes
from training.models import config_of
from training.processes import World, launch, world_from_environment

WORKER = "SLOTWISE_WORKER"  # in the processes that this one started: the model's directory
RUN = "run.json"  # what the shards of an output are made from, and their list
REPORT = "report.json"  # what came of all of them
EXAMPLES = 5


class InferenceSpec(Strict):
    """The section `batch_inference:` of a job."""

    input: str | list[str]  # keys of JSONL or Parquet files, or globs
    model: str  # key prefix of a model's directory
    prompt: str = "prompt"  # the column that holds the prompt
    messages: str | None = None  # or: the column that holds messages, for the model's chat template
    max_new_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.0, ge=0, le=100, allow_inf_nan=False)  # 0: greedy
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)  # 0: no limit
    repetition_penalty: float = Field(default=1.0, gt=0, le=10)
    stop: list[str] = Field(default=[], max_length=16)
    seed: int = Field(default=0, ge=0, lt=2**32)
    engine: EngineName = "transformers"
    dtype: Precision = "auto"
    tensor_parallel: int = Field(default=1, ge=1)  # GPUs that share one copy of the model
    batch: int | None = Field(default=None, ge=1)  # most rows generated together; memory decides by itself
    token_budget: int | None = Field(default=None, ge=1)  # most tokens in a batch, padding and new ones too
    shard_rows: int = Field(default=512, ge=1)  # rows in an output file
    output_format: Literal["same", "jsonl", "parquet"] = "same"
    max_error_share: float = Field(default=0.5, ge=0, le=1)  # more rows with errors than this fail the job

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.messages is not None and "prompt" in self.model_fields_set:
            raise ValueError("prompt and messages are both given; expected one of them")
        if not self.input:
            raise ValueError("input: expected at least one file")
        if not all(self.stop):
            raise ValueError("stop: an empty text would stop at once")
        return self

    @property
    def column(self) -> str:
        """What is asked is in this column."""
        return self.messages or self.prompt

    @property
    def settings(self) -> Settings:
        """How rows are completed."""
        names = ("max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed")
        return Settings(**{name: getattr(self, name) for name in names}, stop=tuple(self.stop))


@dataclass
class Tally:
    """Rows of shards, by how they ended, with examples of what went wrong."""

    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Take in the rows of another."""
        self.rows += other.rows
        self.failed += other.failed
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.examples = (self.examples + other.examples)[:EXAMPLES]


@dataclass(frozen=True)
class Run:
    """What is done with which rows, as all processes of all attempts see it."""

    spec: InferenceSpec
    files: tuple[InputFile, ...]
    shards: tuple[Shard, ...]
    form: Format

    @property
    def rows(self) -> int:
        """Of the whole input."""
        return sum(shard.rows for shard in self.shards)


def infer(program: Program) -> None:
    """Complete every row, and leave the rows as `<output>/rows-NNNNN.jsonl` or `.parquet`."""
    spec = read_spec(InferenceSpec, program.text, program.name)
    gpus = 1 if program.virtual else program.gpus
    check_engine(spec.engine, spec.tensor_parallel, gpus)
    files = _input_files(program, spec)
    worker = os.environ.get(WORKER)
    directory = Path(worker) if worker else local_model(program.place("model", spec.model), program.scratch)
    run = _agreed(program, spec, files, directory)
    if _done_before(program):
        return
    processes = gpus // spec.tensor_parallel
    if worker is None and (processes > 1 or spec.tensor_parallel > 1):
        _start_workers(program, directory, processes, spec.tensor_parallel)
        return
    world = world_from_environment() if worker else World(program.node_rank, program.nodes)
    if worker:
        program.metrics.path = program.scratch / f"worker-{world.local_rank}.json"
        _see_own_gpus(world.local_rank, spec.tensor_parallel)
    _work(program, run, directory, world, own_gpus=bool(worker))
    _close_if_complete(program, run)


def shard_key(output: str, index: int, form: Format = "jsonl") -> str:
    """Where the rows of a shard lie."""
    return f"{output}/rows-{index:05d}.{form}"


@dataclass(frozen=True)
class _Prepared:
    """A shard that was read, with the tokens of its prompts or what is wrong with them."""

    shard: Shard
    rows: list[Row]
    table: Any
    prompts: list[list[int] | str]


def _work(program: Program, run: Run, directory: Path, world: World, own_gpus: bool) -> None:
    """Do shards until none is left. Reading and writing go on beside generating, one shard ahead each."""
    tally, work = Tally(), Work(processes=1)
    if program.own_process:  # what a quantized model needs costs the others a second
        plain = config_of(str(directory)).get("quantization_config") is None
        leave_out("scipy", *(["torchao"] if plain else []))
    engine: Engine | None = None
    tokens: Tokens | None = None
    reader = Reader(run.files, run.spec.column)
    done = _finished(program, run)
    claims = _claimed(program, run, world, done)
    for index in sorted(done)[world.rank :: world.size]:
        tally.add(_recounted(program, run, index))
    _check_errors(run, tally)

    def prepare() -> _Prepared | None:
        shard = next(claims, None)
        if shard is None:
            return None
        nonlocal tokens
        if tokens is None:
            tokens = read_tokens(directory, run.spec.model)
            if run.spec.messages is not None and not tokens.chat:
                raise SpecError(f"messages: {run.spec.model!r} has no chat template; give prompt: instead")
        rows, table = reader.read(shard)
        readable = [row for row in rows if row.error is None]
        asked = iter(tokens.of([row.asked for row in readable], run.spec.messages is not None))
        prompts = [row.error if row.error is not None else next(asked) for row in rows]
        return _Prepared(shard, rows, table, prompts)

    with ThreadPoolExecutor(1) as reading, ThreadPoolExecutor(1) as writing:
        written: Future[None] | None = None
        coming = reading.submit(prepare)
        while (prepared := coming.result()) is not None:
            coming = reading.submit(prepare)
            if engine is None:  # a finished job needs no model
                engine = _opened(run.spec, directory, 0 if own_gpus else world.local_rank)
                work = engine.work
            rows, counted = _completed(run, engine, prepared)
            if written is not None:
                written.result()
            written = writing.submit(_put, program, run, prepared, rows, counted)
            tally.add(counted)
            _report(program, run, tally, work)
            _check_errors(run, tally)
        if written is not None:
            written.result()
    _report(program, run, tally, work)


def _opened(spec: InferenceSpec, directory: Path, gpu: int) -> Engine:
    return open_engine(
        spec.engine,
        directory,
        spec.model,
        spec.settings,
        spec.dtype,
        gpu,
        spec.tensor_parallel,
        spec.batch,
        spec.token_budget,
    )


def _completed(run: Run, engine: Engine, prepared: _Prepared) -> tuple[list[dict[str, Any]], Tally]:
    """The output rows of a shard, and their count."""
    new, column = run.spec.max_new_tokens, run.spec.column
    errors: dict[int, str] = {}
    good: dict[int, list[int]] = {}
    for place, (row, prompt) in enumerate(zip(prepared.rows, prepared.prompts, strict=True)):
        if isinstance(prompt, str):
            errors[place] = row.error or f"{row.where}: {column}: {prompt}"
        elif not prompt:
            errors[place] = f"{row.where}: {column}: is empty"
        elif len(prompt) + new > engine.tokens.longest:
            errors[place] = (
                f"{row.where}: {len(prompt)} tokens and {new} new ones do not fit the model's "
                f"{int(engine.tokens.longest)}"
            )
        else:
            good[place] = prompt
    seed = (run.spec.seed * 1_000_003 + prepared.shard.index) % 2**63
    made = dict(zip(good, engine.complete(list(good.values()), seed), strict=True)) if good else {}
    tally, rows = Tally(), []
    for place, row in enumerate(prepared.rows):
        answer = made.get(place, Completion(None, None, None, errors.get(place)))
        error = answer.error if answer.error is None or place in errors else f"{row.where}: {answer.error}"
        tokens = prepared.prompts[place]
        added = (
            answer.text,
            len(tokens) if isinstance(tokens, list) else None,
            answer.tokens,
            answer.reason,
            error,
        )
        own = {name: value for name, value in zip(ADDED, added, strict=True) if name != column}
        rows.append({**row.columns, **own})
        tally.add(_counted(dict(zip(ADDED, added, strict=True))))
    return rows, tally


def _counted(row: dict[str, Any]) -> Tally:
    error = row["error"]
    return Tally(
        1,
        int(error is not None),
        row["prompt_tokens"] or 0 if error is None else 0,
        row["completion_tokens"] or 0,
        [] if error is None else [str(error)[:300]],
    )


def _put(program: Program, run: Run, prepared: _Prepared, rows: list[dict[str, Any]], counted: Tally) -> None:
    """Write a shard, then what is to be known of it without reading it again."""
    key = shard_key(program.output, prepared.shard.index, run.form)
    data = encoded(rows, prepared.table, run.form)
    program.storage.write(key, data)
    _write_record(program, prepared.shard.index, data, counted)
    print(f"{key}: {len(rows)} rows", flush=True)


def _write_record(program: Program, index: int, data: bytes, counted: Tally) -> dict[str, Any]:
    record = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "tally": asdict(counted)}
    program.storage.write(_record_key(program, index), json.dumps(record).encode())
    return record


def _record_key(program: Program, index: int) -> str:
    return f"{program.output}/records/{index:05d}.json"


def _record(program: Program, run: Run, index: int) -> dict[str, Any]:
    """What is known of a finished shard; counted again when its writer was killed before it noted that."""
    try:
        return dict(json.loads(program.storage.read(_record_key(program, index))))
    except (NotFoundError, ValueError):
        pass
    key = shard_key(program.output, index, run.form)
    try:
        data = program.storage.read(key)
    except NotFoundError:
        raise JobFailedError(f"{key}: was there and is gone") from None
    tally = Tally()
    for row in decoded(data, run.form):
        tally.add(_counted(row))
    return _write_record(program, index, data, tally)


def _recounted(program: Program, run: Run, index: int) -> Tally:
    return Tally(**_record(program, run, index)["tally"])


def _finished(program: Program, run: Run) -> set[int]:
    """Shards that are there."""
    there = set(program.storage.keys(f"{program.output}/rows-"))
    return {s.index for s in run.shards if shard_key(program.output, s.index, run.form) in there}


def _claimed(program: Program, run: Run, world: World, done: set[int]) -> Iterator[Shard]:
    """Shards for this process alone: its own stretch of what is left, then the ends of the others'.

    Claims are the attempt's: another attempt begins when all processes of this one are gone.
    """
    left = [shard for shard in run.shards if shard.index not in done]
    if world.size == 1:
        yield from left
        return
    cuts = [len(left) * rank // world.size for rank in range(world.size + 1)]
    stretches = [left[begin:end] for begin, end in pairwise(cuts)]
    order = list(stretches[world.rank])
    for step in range(1, world.size):
        order += reversed(stretches[(world.rank + step) % world.size])
    prefix = f"{program.output}/claims/{os.environ.get('SLOTWISE_ATTEMPT', '1')}"
    taken: set[int] = set()
    for shard in order:
        if shard.index in taken:
            continue
        if program.storage.create(f"{prefix}/{shard.index:05d}", f"rank {world.rank}".encode()):
            # Who finishes last removes the claims: what is done is not to be claimed again.
            if not exists(program.storage, shard_key(program.output, shard.index, run.form)):
                yield shard
        else:
            taken = {int(key.rpartition("/")[2]) for key in program.storage.keys(f"{prefix}/")}


def _input_files(program: Program, spec: InferenceSpec) -> tuple[InputFile, ...]:
    """The files of the input, on this machine, in the order of the spec. Raises SpecError."""
    names: list[str] = []
    for reference in [spec.input] if isinstance(spec.input, str) else spec.input:
        if not is_pattern(reference):
            names.append(reference)
            continue
        place = program.place("input", reference)
        fixed = place.key[: min(place.key.index(mark) for mark in "*?[" if mark in place.key)]
        found = matches(place.key, place.storage.keys(fixed.rpartition("/")[0] + "/" if "/" in fixed else ""))
        if not found:
            raise SpecError(f"{place.where}: nothing in {place.storage.root} matches")
        prefix = reference.removesuffix(place.key)
        names += [prefix + key for key in found]
    format_of(names)
    return tuple(InputFile(name, local_file(program.place("input", name), program.scratch)) for name in names)


def _agreed(program: Program, spec: InferenceSpec, files: tuple[InputFile, ...], directory: Path) -> Run:
    """The run as the first process to come wrote it down; refuses to go on with one of something else."""
    given = format_of([file.name for file in files])
    form: Format = given if spec.output_format == "same" else spec.output_format
    if form == "parquet" and given != "parquet":
        raise SpecError(
            "output_format: parquet: the input is JSONL, whose rows have no types; expected jsonl"
        )
    made_from = {
        "input": [[file.name, fingerprint(file.path)] for file in files],
        "model": _model_print(directory),
        "settings": asdict(spec.settings) | {"stop": list(spec.stop)},
        "engine": spec.engine,
        "dtype": spec.dtype,
        "prompt": spec.column,
        "messages": spec.messages,
        "shard_rows": spec.shard_rows,
        "output_format": form,
    }
    key = f"{program.output}/{RUN}"
    try:
        agreed = json.loads(program.storage.read(key))
    except NotFoundError:
        Reader(files, spec.column).check()
        found = cut(files, spec.shard_rows)
        agreed = {"made_from": made_from, "shards": [list(asdict(shard).values()) for shard in found]}
        if not program.storage.create(key, json.dumps(agreed).encode()):
            agreed = json.loads(program.storage.read(key))
    for name in _changed(agreed["made_from"], made_from):
        raise SpecError(
            f"{program.name}: {name}: the rows under {program.output} were made with another one; "
            "use another output, or remove them"
        )
    return Run(spec, files, tuple(Shard(*values) for values in agreed["shards"]), form)


def _changed(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name, value in after.items():
        known = before.get(name)
        if isinstance(value, dict) and isinstance(known, dict) and name == "settings":
            yield from _changed(known, value)
        elif value != known:
            yield name


def _model_print(directory: Path) -> str:
    """Names a model: its manifest, which holds the hash of every file, or hashes made now."""
    if (directory / MANIFEST).is_file():
        return hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()
    hashes = {name: entry.sha256 for name, entry in entries_of(directory).items()}
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _close_if_complete(program: Program, run: Run) -> None:
    """List the shards in a manifest once all are there: the last process to finish sees them all."""
    wanted = [shard_key(program.output, shard.index, run.form) for shard in run.shards]
    if not set(wanted) <= set(program.storage.keys(f"{program.output}/rows-")):
        return
    with ThreadPoolExecutor(8) as pool:
        records = list(pool.map(lambda shard: _record(program, run, shard.index), run.shards))
    tally = Tally()
    for record in records:
        tally.add(Tally(**record["tally"]))
    _check_errors(run, tally)
    entries = {
        key.rpartition("/")[2]: Entry(record["bytes"], record["sha256"])
        for key, record in zip(wanted, records, strict=True)
    }
    program.storage.write(f"{program.output}/{REPORT}", json.dumps(asdict(tally), indent=1).encode())
    program.storage.write(f"{program.output}/{MANIFEST}", manifest_bytes(entries))
    for key in [
        *program.storage.keys(f"{program.output}/claims/"),
        *program.storage.keys(f"{program.output}/records/"),
    ]:
        program.storage.delete(key)
    program.metrics.update(
        rows_done=tally.rows,
        rows_failed=tally.failed,
        progress=1.0,
        outputs=[f"{program.output}/{MANIFEST}", *wanted[:20]],
    )


def _done_before(program: Program) -> bool:
    """Whether an earlier attempt finished all; then its counts are ours."""
    if not exists(program.storage, f"{program.output}/{MANIFEST}"):
        return False
    report = json.loads(program.storage.read(f"{program.output}/{REPORT}"))
    program.metrics.update(
        rows_done=report["rows"],
        rows_failed=report["failed"],
        progress=1.0,
        outputs=[f"{program.output}/{MANIFEST}"],
    )
    print(f"{program.output} is there already", flush=True)
    return True


def _check_errors(run: Run, tally: Tally) -> None:
    """Raise FinalError as soon as there are too many errors, however the rest goes."""
    if tally.failed > run.spec.max_error_share * run.rows:
        raise FinalError(
            f"{tally.failed} of {run.rows} rows failed, more than the {run.spec.max_error_share:g} allowed; "
            f"for example: {' | '.join(tally.examples)}"
        )


def _report(program: Program, run: Run, tally: Tally, work: Work) -> None:
    """What people see while rows are done; of a worker also the sums, for its parent to add up."""
    program.metrics.update(
        rows_done=tally.rows,
        rows_failed=tally.failed,
        progress=tally.rows / max(run.rows, 1),
        **work.metrics(run.spec.tensor_parallel),
        **({"work": asdict(work)} if WORKER in os.environ else {}),
    )


def _start_workers(program: Program, directory: Path, processes: int, tensor_parallel: int) -> None:
    """One process for each GPU, or group of them, of this node; their metrics add up to the job's."""
    command = [sys.executable, "-m", "tasks.inference", *sys.argv[1:]]
    surroundings = {**os.environ, WORKER: str(directory)}
    surroundings.setdefault("SLOTWISE_ATTEMPT", uuid.uuid4().hex)  # by hand
    program.scratch.mkdir(parents=True, exist_ok=True)
    files = [program.scratch / f"worker-{rank}.json" for rank in range(processes)]
    for file in files:
        file.unlink(missing_ok=True)
    with _added_up(program, files, tensor_parallel):
        code = launch(command, processes, surroundings, program.node_rank, program.nodes)
    if code:
        program.metrics.write()
        sys.exit(code)  # the worker has said why


@contextmanager
def _added_up(program: Program, files: list[Path], gpus_per_process: int) -> Iterator[None]:
    """Keep the job's metrics the sum of its workers'."""
    over = threading.Event()

    def look() -> None:
        found = []
        for file in files:
            try:
                found.append(json.loads(file.read_text(encoding="utf-8")))
            except (OSError, ValueError):
                continue
        work = Work(processes=0)
        for each in found:
            if each.get("work"):
                work.add(Work(**each["work"]))
        sums = {name: sum(each.get(name) or 0 for each in found) for name in ("rows_done", "rows_failed")}
        closed = next((each for each in found if each.get("outputs")), None)
        if closed:  # by who finished last, which counted the rows of all nodes
            sums = {name: closed[name] for name in ("rows_done", "rows_failed", "outputs")}
        progress = 1.0 if closed else sum(each.get("progress") or 0 for each in found)
        said = next((each["message"] for each in found if each.get("message")), None)
        program.metrics.update(
            **sums, progress=progress, **work.metrics(gpus_per_process), **({"message": said} if said else {})
        )

    def watch() -> None:
        while not over.wait(1.0):
            look()

    thread = threading.Thread(target=watch, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()


def _see_own_gpus(local_rank: int, tensor_parallel: int) -> None:
    """Leave this process the GPUs of its group; nothing has looked at them yet."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    given = visible.split(",") if visible else [str(gpu) for gpu in range((local_rank + 1) * tensor_parallel)]
    own = given[local_rank * tensor_parallel : (local_rank + 1) * tensor_parallel]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)


if __name__ == "__main__":
    main(infer, sys.argv[1:])
