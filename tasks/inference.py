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
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tasks.batch_output import Output, Tally, counted
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
from tasks.generating import FIGURES, SHARES, Work
from tasks.program import (
    WRONG,
    FinalError,
    Place,
    Program,
    leave_out,
    local_file,
    local_model,
    main,
    reading,
    said_of,
)
from tasks.rows import (
    ADDED,
    Format,
    InputFile,
    Reader,
    Row,
    Shard,
    fingerprint,
    format_of,
    is_pattern,
    matching,
)
from tasks.rows import shards as cut
from tasks.specfile import SpecError, Strict, read_spec
from tasks.storage import NotFoundError
from tasks.workers import WORKER, see_own_gpus, start_workers
from training.manifest import MANIFEST, entries_of
from training.models import config_of, longest_sequence
from training.processes import World, world_from_environment

RUN = "run.json"  # what the shards of an output are made from, and their list
ATTEMPT = os.environ.get("SLOTWISE_ATTEMPT") or uuid.uuid4().hex  # all processes of an attempt have the same


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
    shard_rows: int = Field(default=512, ge=1)  # most rows in an output file
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


@dataclass(frozen=True)
class Run:
    """What is done with which rows, as all processes of all attempts see it."""

    spec: InferenceSpec
    files: tuple[InputFile, ...]
    output: Output


def infer(program: Program) -> None:
    """Complete every row, and leave the rows as `<output>/rows-NNNNN.jsonl` or `.parquet`."""
    spec = read_spec(InferenceSpec, program.text, program.name)
    gpus = 1 if program.virtual else program.gpus
    check_engine(spec.engine, spec.tensor_parallel, gpus)
    files = _input_files(program, spec)
    worker = os.environ.get(WORKER)
    model = program.place("model", spec.model)
    directory = Path(worker) if worker else local_model(model, program.scratch)
    with said_of(model, directory):
        longest = longest_sequence(str(directory))
    if longest is not None and spec.max_new_tokens >= longest:
        raise SpecError(
            f"max_new_tokens: {spec.max_new_tokens}: with a prompt the model sees at most {longest} tokens; "
            f"expected less than {longest}"
        )
    run = _agreed(program, spec, files, directory)
    if (known := run.output.closed()) is not None:
        print(f"{program.output} is there already", flush=True)
        _report_whole(program, run, World(program.node_rank, program.nodes))
        program.metrics.update(**_rows(known), progress=1.0, outputs=[f"{program.output}/{MANIFEST}"])
        return
    processes = gpus // spec.tensor_parallel
    if worker is None and (processes > 1 or spec.tensor_parallel > 1):
        start_workers(program, directory, processes, spec.tensor_parallel)
        _report_whole(program, run, World(program.node_rank, program.nodes))
        return
    world = world_from_environment() if worker else World(program.node_rank, program.nodes)
    if worker:
        program.metrics.path = program.scratch / f"worker-{world.local_rank}.json"
        see_own_gpus(world.local_rank, spec.tensor_parallel)
    try:
        with said_of(model, directory):
            _work(program, run, model, directory, world, own_gpus=bool(worker))
    except WRONG:
        if not run.output.finished():  # such as of a model that cannot be loaded: nothing is left of it
            program.storage.delete(f"{program.output}/{RUN}")
        raise
    all_there = run.output.total()
    figures = _report_whole(program, run, world)
    if all_there is not None:  # the last process to finish sees them all
        tally, entries = all_there
        _check_errors(run, tally)
        outputs = run.output.close(tally, entries, figures)
        program.metrics.update(**_rows(tally), progress=1.0, outputs=outputs)


@dataclass(frozen=True)
class _Prepared:
    """A shard that was read, with the tokens of its prompts or what is wrong with them."""

    shard: Shard
    rows: list[Row]
    table: Any
    prompts: list[list[int] | str]


def _work(program: Program, run: Run, model: Place, directory: Path, world: World, own_gpus: bool) -> None:
    """Do shards until none is left. Reading and writing go on beside generating, one shard ahead each."""
    tally, work = Tally(), Work(processes=1)
    if program.own_process and run.spec.engine == "transformers":  # what few models need costs a second
        plain = config_of(str(directory)).get("quantization_config") is None
        leave_out("scipy", *(["torchao"] if plain else []))
    engine: Engine | None = None
    tokens: Tokens | None = None
    reader = Reader(run.files, run.spec.column, whole=run.output.form == "jsonl")
    done = run.output.finished()
    claims = run.output.claimed(world, done)
    for index in sorted(done)[world.rank :: world.size]:
        tally.add(run.output.tally(index))
    _check_errors(run, tally)

    def prepare() -> _Prepared | None:
        shard = next(claims, None)
        if shard is None:
            return None
        nonlocal tokens
        if tokens is None:
            tokens = read_tokens(directory, model.where)
            if run.spec.messages is not None and not tokens.chat:
                raise SpecError(
                    f"messages: {run.spec.messages!r}: model {run.spec.model!r} has no chat template; "
                    "expected prompt, and a column of texts"
                )
        rows, table = reader.read(shard)
        readable = [row for row in rows if row.error is None]
        asked = iter(tokens.of([row.asked for row in readable], run.spec.messages is not None))
        prompts = [row.error if row.error is not None else next(asked) for row in rows]
        return _Prepared(shard, rows, table, prompts)

    def put(prepared: _Prepared, rows: list[dict[str, Any]], ended: Tally, so_far: Work) -> None:
        if world.size > 1:  # first: whoever sees the last shard is to know all shares
            run.output.share(world, so_far)
        run.output.put(prepared.shard, rows, prepared.table, ended)

    with ExitStack() as ending, ThreadPoolExecutor(1) as ahead, ThreadPoolExecutor(1) as writing:
        written: Future[None] | None = None
        coming = ahead.submit(prepare)
        while (prepared := coming.result()) is not None:
            coming = ahead.submit(prepare)
            if engine is None:  # a finished job needs no model
                engine = _opened(run.spec, model, directory, 0 if own_gpus else world.local_rank)
                ending.callback(engine.close)
                work = engine.work
            rows, ended = _completed(run, engine, prepared)
            if written is not None:
                written.result()
            written = writing.submit(put, prepared, rows, ended, replace(work))
            tally.add(ended)
            _report(program, run, tally, work)
            _check_errors(run, tally)
        if written is not None:
            written.result()
    _report(program, run, tally, work)


def _opened(spec: InferenceSpec, model: Place, directory: Path, gpu: int) -> Engine:
    return open_engine(
        spec.engine,
        directory,
        model.where,
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
        tally.add(counted(dict(zip(ADDED, added, strict=True))))
    return rows, tally


def _input_files(program: Program, spec: InferenceSpec) -> tuple[InputFile, ...]:
    """The files of the input, on this machine, in the order of the spec. Raises SpecError."""
    names: list[str] = []
    for reference in [spec.input] if isinstance(spec.input, str) else spec.input:
        if not is_pattern(reference):
            names.append(reference)
            continue
        place = program.place("input", reference)
        with reading(place):
            found = matching(place.storage, place.key)
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
    if (agreed := _known(program, key, made_from)) is None:
        Reader(files, spec.column).check()
        found = cut(files, spec.shard_rows)
        agreed = {"made_from": made_from, "shards": [list(asdict(shard).values()) for shard in found]}
        agreed["attempt"] = ATTEMPT
        if not program.storage.create(key, json.dumps(agreed).encode()):
            agreed = json.loads(program.storage.read(key))
    for name in _changed(agreed["made_from"], made_from):
        raise SpecError(
            f"{program.name}: {name}: the rows under {program.output} were made with another one; "
            f"{program.another_output}"
        )
    return Run(
        spec, files, Output(program.storage, program.output, form, tuple(Shard(*v) for v in agreed["shards"]))
    )


def _known(program: Program, key: str, made_from: dict[str, Any]) -> dict[str, Any] | None:
    """What is written down already. Of an attempt that ended before it made a row nothing binds the next."""
    try:
        agreed = dict(json.loads(program.storage.read(key)))
    except NotFoundError:
        return None
    others = agreed.get("attempt") != ATTEMPT and next(_changed(agreed["made_from"], made_from), None)
    if others and not program.storage.keys(f"{program.output}/rows-"):
        program.storage.delete(key)
        return None
    return agreed


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


def _check_errors(run: Run, tally: Tally) -> None:
    """Raise FinalError as soon as there are too many errors, however the rest goes."""
    if tally.failed > run.spec.max_error_share * run.output.rows:
        raise FinalError(
            f"max_error_share: {run.spec.max_error_share:g}: {tally.failed} of {run.output.rows} rows "
            f"failed; for example: {' | '.join(tally.examples)}"
        )


def _report(program: Program, run: Run, tally: Tally, work: Work) -> None:
    """What people see while rows are done; of a worker also the sums, for its parent to add up."""
    program.metrics.update(
        **_rows(tally),
        progress=tally.rows / max(run.output.rows, 1),
        **work.metrics(run.spec.tensor_parallel),
        **({"work": asdict(work)} if WORKER in os.environ else {}),
    )


def _report_whole(program: Program, run: Run, world: World) -> dict[str, Any]:
    """Figures of the whole job; its shares of what the devices can do stand in each rank's metrics.

    A rank that ends before another one knows that one's work up to its last shard. Rates stay the rank's own:
    people add them up.
    """
    if world.size == 1:
        return {name: program.metrics.known[name] for name in FIGURES if name in program.metrics.known}
    figures = run.output.whole_work(run.spec.tensor_parallel)
    program.metrics.update(**{name: value for name, value in figures.items() if name in SHARES})
    return figures


def _rows(tally: Tally) -> dict[str, int]:
    return {"rows_done": tally.rows, "rows_failed": tally.failed}


if __name__ == "__main__":
    main(infer, sys.argv[1:])
