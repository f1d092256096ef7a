"""Batch inference: a row for a row, in their order, once."""

import io
import json
import multiprocessing
import os
import re
import shutil
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tasks import batches, inference
from tasks.batch_output import shard_key
from tasks.inference import infer
from tasks.program import FinalError, publish_directory
from tasks.specfile import SpecError
from tasks.storage import Storage, open_storage
from tests.tasks.kind_programs import ROWS as SECTION
from tests.tasks.kind_programs import Job, by_hand, program, put, rows, small_model, stocked
from training.manifest import write_manifest
from training.models import ModelError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture
def root(tmp_path: Path, model: Path) -> Path:
    """A storage directory with the model in it."""
    return stocked(tmp_path, model)


def test_rows_come_out_in_the_order_they_went_in(storage: Storage, model: Path, tmp_path: Path) -> None:
    publish_directory(storage, "models/small", model)
    put(storage, *[{"id": n, "prompt": "ROMEO. " * (1 + n * 7 % 5)} for n in range(13)])
    job = program(storage, tmp_path, SECTION)
    infer(job)
    found = rows(storage)
    assert [row["id"] for row in found] == list(range(13))
    assert [row["prompt_tokens"] for row in found] == [7 * (1 + n * 7 % 5) for n in range(13)]
    assert all(row["error"] is None and row["finish_reason"] in ("length", "stop") for row in found)
    assert storage.keys("outputs/job/rows-") == [shard_key("outputs/job", n) for n in range(3)]
    listed = json.loads(storage.read("outputs/job/manifest.json"))
    assert list(listed["files"]) == [f"rows-0000{n}.jsonl" for n in range(3)]
    assert job.metrics.known["rows_done"] == 13
    assert job.metrics.known["rows_per_s"] > 0


def test_rows_that_run_together_say_what_each_says_alone(root: Path, tmp_path: Path) -> None:
    storage = open_storage(str(root))
    put(storage, *[{"prompt": text} for text in ("What", "O Romeo, Romeo!", "Enter", "To be, or not")])
    infer(program(storage, tmp_path, {**SECTION, "batch": 4}, "together"))
    infer(program(storage, tmp_path, {**SECTION, "batch": 1}, "alone"))
    assert rows(storage, "together") == rows(storage, "alone")


def test_prompts_that_are_computed_in_groups_say_what_each_says_alone_and_less_is_padding(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(root))
    put(
        storage,
        *[{"prompt": ("O Romeo, Romeo! " * 8)[:length]} for length in (1, 2, 3, 9, 17, 33, 60, 61, 90)],
    )
    section = {**SECTION, "max_new_tokens": 12, "stop": ["e"], "shard_rows": 9}
    infer(program(storage, tmp_path, {**section, "batch": 1}, "alone"))
    monkeypatch.setattr(batches, "LEAST_ALIKE", 0.0)  # all in one batch
    together = program(storage, tmp_path, {**section, "batch": 9}, "together")
    infer(together)
    monkeypatch.setattr("tasks.key_values.LEAST_TOKENS", {"cpu": 8})
    grouped = program(storage, tmp_path, {**section, "batch": 9}, "grouped")
    infer(grouped)
    assert rows(storage, "grouped") == rows(storage, "together") == rows(storage, "alone")
    assert grouped.metrics.known["padding_waste"] < 0.7 * together.metrics.known["padding_waste"]


BAD: list[tuple[object, str]] = [
    (b"not json", "line 2: not JSON in UTF-8"),
    (b'{"prompt": "\xff"}', "line 2: not JSON in UTF-8"),
    (b"[1, 2]", "line 2: expected an object with 'prompt'"),
    ({"promt": "x"}, "line 2: has no column 'prompt'"),
    ({"prompt": 5}, "line 2: prompt: '5' is not text"),
    ({"prompt": None}, "line 2: prompt: 'None' is not text"),
    ({"prompt": ""}, "line 2: prompt: is empty"),
    ({"prompt": "x" * 1019}, "line 2: 1019 tokens and 6 new ones do not fit the model's 1024"),
    (b"[" * 100_000, "line 2: not JSON in UTF-8"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_row_is_an_error_row_and_the_others_go_on(
    root: Path, tmp_path: Path, line: object, message: str
) -> None:
    storage = open_storage(str(root))
    put(storage, {"prompt": "What"}, line, {"prompt": "Who"})
    job = program(storage, tmp_path, SECTION)
    infer(job)
    first, bad, last = rows(storage)
    assert first["completion"] is not None and last["completion"] is not None
    assert bad["completion"] is None
    assert bad["error"].startswith(message)
    assert (job.metrics.known["rows_done"], job.metrics.known["rows_failed"]) == (3, 1)


def test_the_longest_prompt_that_fits_is_done(root: Path, tmp_path: Path) -> None:
    storage = open_storage(str(root))
    put(storage, {"prompt": "x" * 1018})
    infer(program(storage, tmp_path, SECTION))
    assert rows(storage)[0]["error"] is None


def test_the_prompt_may_be_any_column_and_the_others_are_kept(root: Path, tmp_path: Path) -> None:
    storage = open_storage(str(root))
    put(storage, {"text": "What", "more": {"deep": [1, "é"]}})
    infer(program(storage, tmp_path, {**SECTION, "prompt": "text"}))
    (row,) = rows(storage)
    assert row["text"] == "What" and row["more"] == {"deep": [1, "é"]}


def test_blank_lines_are_no_rows(root: Path, tmp_path: Path) -> None:
    storage = open_storage(str(root))
    put(storage, b"", {"prompt": "a"}, b"  ", {"prompt": "b"}, b"")
    infer(program(storage, tmp_path, SECTION))
    assert [row["prompt"] for row in rows(storage)] == ["a", "b"]


def test_too_many_bad_rows_fail_the_job_with_an_example(root: Path, tmp_path: Path) -> None:
    storage = open_storage(str(root))
    put(storage, {"prompt": "a"}, b"?", b"?")
    with pytest.raises(FinalError, match=r"max_error_share: 0\.5: 2 of 3 rows failed; .*line 2: not JSON"):
        infer(program(storage, tmp_path, SECTION))
    assert not storage.keys("outputs/job/manifest.json")


def test_a_job_that_is_done_does_nothing_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(root))
    put(storage, {"prompt": "a"}, b"?")
    infer(program(storage, tmp_path, SECTION))
    monkeypatch.setattr(inference, "open_engine", None)  # a finished job needs no model
    again = program(storage, tmp_path, SECTION)
    infer(again)
    assert (again.metrics.known["rows_done"], again.metrics.known["rows_failed"]) == (2, 1)


@pytest.mark.parametrize("changes", [{"max_new_tokens": 7}, {"shard_rows": 2}, {"prompt": "q"}])
def test_shards_of_other_settings_are_not_mixed(root: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    storage = open_storage(str(root))
    put(storage, {"prompt": "a", "q": "b"})
    infer(program(storage, tmp_path, SECTION))
    with pytest.raises(
        SpecError, match=f"{next(iter(changes))}: the rows under outputs/job were made with another"
    ):
        infer(program(storage, tmp_path, {**SECTION, **changes}))


def test_what_was_given_may_be_mended_as_long_as_no_row_was_made_with_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(root))
    put(storage, {"prompt": "a"})
    whole = storage.read("models/small/model.safetensors")
    manifest = storage.read("models/small/manifest.json")
    storage.delete("models/small/manifest.json")  # as of a model that somebody copied there
    storage.write("models/small/model.safetensors", whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"spec\.yaml: model: 'models/small': cannot be loaded"):
        infer(program(storage, tmp_path, SECTION))
    assert not storage.keys("outputs/")
    storage.write("models/small/model.safetensors", whole)
    storage.write("models/small/manifest.json", manifest)
    put(storage, {"prompt": "a"}, {"prompt": "b"})
    monkeypatch.setattr(inference, "ATTEMPT", "the next one")
    infer(program(storage, tmp_path, SECTION))
    assert [row["prompt"] for row in rows(storage)] == ["a", "b"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({**SECTION, "input": "gone.jsonl"}, "input: 'gone.jsonl': no such object in"),
    ({**SECTION, "input": "../rows.jsonl"}, "expected a key inside the storage root"),
    ({**SECTION, "model": "models/gone"}, "model: 'models/gone': no model lies there"),
    ({**SECTION, "max_tokens": 5}, "max_tokens: unknown key; did you mean max_new_tokens?"),
    ({"input": "in/rows.jsonl"}, "model: missing; it is required"),
    ({**SECTION, "batch": 0}, "batch: 0: expected at least 1"),
]


@pytest.mark.parametrize(("section", "message"), WRONG)
def test_a_spec_that_cannot_work_is_one_line_and_is_not_tried_again(
    root: Path, section: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(open_storage(str(root)), {"prompt": "a"})
    job = Job("tasks.inference", root, "wrong", section)
    assert job.run_here(infer, monkeypatch) == 2
    assert message in job.said
    assert job.said.count("\n") == 1
    assert not job.output.exists()


def test_by_hand_it_needs_neither_a_runner_nor_prefect(root: Path) -> None:
    storage = open_storage(str(root))
    put(storage, {"prompt": "What"}, b"?")
    said = by_hand("tasks.inference", root, SECTION, "mine")
    assert json.loads(said[said.index("{") :])["rows_failed"] == 1
    assert [row["error"] is None for row in rows(storage, "mine")] == [True, False]


def test_files_come_in_the_order_of_the_spec_and_of_a_glob(
    storage: Storage, model: Path, tmp_path: Path
) -> None:
    publish_directory(storage, "models/small", model)
    for name, texts in {"in/b": "cd", "in/a": "ab", "in/deep/z": "y", "other": "ef"}.items():
        storage.write(f"{name}.jsonl", "".join(json.dumps({"prompt": t}) + "\n" for t in texts).encode())
    section = {**SECTION, "input": ["other.jsonl", "in/*.jsonl"], "shard_rows": 4}
    infer(program(storage, tmp_path, section))
    assert [row["prompt"] for row in rows(storage)] == ["e", "f", "a", "b", "c", "d"]
    with pytest.raises(SpecError, match=r"input: 'no/\*\.jsonl': nothing in .* matches"):
        infer(program(storage, tmp_path, {**SECTION, "input": "no/*.jsonl"}, "none"))


def test_parquet_comes_out_as_parquet_with_its_types(storage: Storage, model: Path, tmp_path: Path) -> None:
    import datetime

    import pyarrow as pa
    import pyarrow.parquet as pq

    publish_directory(storage, "models/small", model)
    when = [datetime.datetime(2026, 1, day, tzinfo=datetime.UTC) for day in range(1, 8)]
    prompts = ["What", None, "Who", "", "Where", "When", "Why"]
    table = pa.table({"when": when, "prompt": prompts, "raw": [b"\xff"] * 7})
    for part, (begin, end) in enumerate([(0, 3), (3, 7)]):
        buffer = io.BytesIO()
        pq.write_table(table.slice(begin, end - begin), buffer, row_group_size=2)
        storage.write(f"in/{part}.parquet", buffer.getvalue())
    infer(program(storage, tmp_path, {**SECTION, "input": "in/*.parquet", "shard_rows": 4}))
    keys = storage.keys("outputs/job/rows-")
    assert keys == [shard_key("outputs/job", n, "parquet") for n in range(2)]
    found = pa.concat_tables([pq.read_table(io.BytesIO(storage.read(key))) for key in keys])
    assert found.select(["when", "prompt", "raw"]) == table
    errors = found["error"].to_pylist()
    assert errors[1] == "in/0.parquet: row 2: prompt: 'None' is not text"
    assert errors[3] == "in/1.parquet: row 1: prompt: is empty"
    assert [error is None for error in errors].count(True) == 5
    assert all(
        text is not None
        for text, error in zip(found["completion"].to_pylist(), errors, strict=True)
        if not error
    )


def test_messages_go_through_the_models_chat_template(root: Path, tmp_path: Path, model: Path) -> None:
    storage = open_storage(str(root))
    talk = [{"role": "user", "content": "Who?"}]
    bad: list[Any] = ["Who?", [], [{"role": "user"}], [{"role": "nobody", "content": "x"}]]
    put(storage, *[{"talk": value} for value in (talk, *bad)])
    section = {**SECTION, "messages": "talk", "max_error_share": 1.0}
    with pytest.raises(SpecError, match="messages: 'talk': model 'models/small' has no chat template"):
        infer(program(storage, tmp_path, section, "none"))
    copy = tmp_path / "chat"
    shutil.copytree(model, copy)
    (copy / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('who?') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )
    write_manifest(copy)
    publish_directory(storage, "models/chat", copy)
    infer(program(storage, tmp_path, {**section, "model": "models/chat"}))
    first, *others = rows(storage)
    assert first["prompt_tokens"] == len("user: Who?\nassistant:")
    assert [row["error"].partition("talk: ")[2] for row in others] == [
        "'Who?' is not a list of messages",
        "has no messages",
        "\"{'role': 'user'}\" is no message; expected a role and a text as content",
        "the model's chat template refuses it: who?",
    ]


def test_a_row_ends_before_a_stop_text(root: Path, tmp_path: Path) -> None:
    storage = open_storage(str(root))
    put(storage, *[{"prompt": text} for text in ("What is", "O Romeo, Romeo!", "Enter", "To be, or")] * 4)
    section = {**SECTION, "max_new_tokens": 40, "batch": 16, "shard_rows": 16}
    infer(program(storage, tmp_path, section, "plain"))
    infer(program(storage, tmp_path, {**section, "stop": ["e", " t"]}, "stopped"))
    for plain, stopped in zip(rows(storage, "plain"), rows(storage, "stopped"), strict=True):
        text = plain["completion"]
        ends = [place for stop in ("e", " t") if (place := text.find(stop)) >= 0]
        assert stopped["completion"] == (text[: min(ends)] if ends else text)
        assert (stopped["finish_reason"] == "stop") == bool(ends)
        assert stopped["completion_tokens"] <= plain["completion_tokens"]


def test_sampling_is_the_same_for_a_seed_and_differs_between_seeds(root: Path, tmp_path: Path) -> None:
    storage = open_storage(str(root))
    put(storage, *[{"prompt": "What"}] * 4)
    section = {**SECTION, "temperature": 1.0, "top_p": 0.9, "top_k": 50, "max_new_tokens": 12}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        infer(program(storage, tmp_path, {**section, "seed": seed}, name))
    texts = {name: [row["completion"] for row in rows(storage, name)] for name in "abc"}
    assert texts["a"] == texts["b"] != texts["c"]
    assert len(set(texts["a"])) > 1


def test_a_checkpoint_of_a_training_is_a_model_too(storage: Storage, model: Path, tmp_path: Path) -> None:
    (checkpoint,) = (model.parent / "checkpoints").iterdir()
    publish_directory(storage, "runs/a/checkpoints/step-15", checkpoint)
    publish_directory(storage, "models/small", model)
    put(storage, {"prompt": "What"}, {"prompt": "To be or"})
    for name in ("models/small", "runs/a/checkpoints/step-15"):
        infer(program(storage, tmp_path, {**SECTION, "model": name}, name[:4]))
    assert rows(storage, "mode") == rows(storage, "runs")


def test_half_a_character_is_an_error_row(root: Path, tmp_path: Path) -> None:
    storage = open_storage(str(root))
    put(storage, b'{"prompt": "\\ud800"}', {"prompt": "What"})
    infer(program(storage, tmp_path, SECTION))
    assert rows(storage)[0]["error"] == "line 1: prompt: holds half a character (a surrogate)"


def test_errors_that_are_too_many_already_end_the_job_before_the_rest_is_done(
    root: Path, tmp_path: Path
) -> None:
    storage = open_storage(str(root))
    put(storage, *[b"?"] * 6, *[{"prompt": "What"}] * 24)
    with pytest.raises(FinalError, match=r"max_error_share: 0\.1: . of 30 rows failed; .*: line 1:"):
        infer(program(storage, tmp_path, {**SECTION, "max_error_share": 0.1}))
    assert len(storage.keys("outputs/job/rows-")) < 6


WRONG_ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"engine": "vllm"}, "engine: 'vllm': is not installed on this node"),
    ({"tensor_parallel": 2}, "tensor_parallel: 2: transformers takes one GPU a process"),
    ({"input": "in/rows.csv"}, "input: 'in/rows.csv': expected a name that ends in .jsonl"),
    ({"input": ["in/rows.jsonl", "x.parquet"]}, "JSONL and Parquet files are mixed"),
    ({"output_format": "parquet"}, "output_format: parquet: the input is JSONL"),
    ({"prompt": "a", "messages": "b"}, "prompt and messages are both given"),
    ({"input": "broken.parquet"}, "input: 'broken.parquet': not a Parquet file"),
    ({"input": []}, "expected at least one file"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_ENGINES)
def test_what_cannot_be_done_is_said_in_one_line_before_a_model_is_loaded(
    root: Path, tmp_path: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(root))
    put(storage, {"prompt": "a"})
    storage.write("broken.parquet", b"PAR1 no PAR1")
    monkeypatch.setattr(inference, "open_engine", None)
    with pytest.raises(SpecError, match=re.escape(message)) as told:
        infer(program(storage, tmp_path, {**SECTION, **changes}))
    assert "\n" not in str(told.value)
    assert not storage.keys("outputs/")


def test_vllm_gets_the_settings_and_its_answers_become_rows(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    class LLM:
        model_config = SimpleNamespace(max_model_len=20)
        llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: given.update(closed=True)))

        def __init__(self, **arguments: Any) -> None:
            given.update(arguments)

        def generate(
            self, prompts: list[dict[str, Any]], how: list[dict[str, Any]], use_tqdm: bool
        ) -> list[Any]:
            given.update(how[0], seeds=[each["seed"] for each in how])
            ends = ["stop", "length", "abort"]
            return [
                SimpleNamespace(
                    outputs=[
                        SimpleNamespace(text=f"{len(p['prompt_token_ids'])}", token_ids=[1], finish_reason=e)
                    ]
                )
                for p, e in zip(prompts, ends, strict=True)
            ]

    stand_in = ModuleType("vllm")
    stand_in.__spec__ = ModuleSpec("vllm", None)
    stand_in.LLM, stand_in.SamplingParams = LLM, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    storage = open_storage(str(root))
    put(storage, {"prompt": "What"}, b"?", {"prompt": "Where"}, {"prompt": "Who"}, {"prompt": "n" * 15})
    asked = {"engine": "vllm", "dtype": "bf16", "stop": ["."], "temperature": 0.5, "seed": 3, "top_k": 7}
    asked["max_error_share"] = 1.0
    infer(program(storage, tmp_path, SECTION | asked))
    found = [(row["completion"], row["finish_reason"]) for row in rows(storage)]
    assert found == [("4", "stop"), (None, None), ("5", "length"), (None, None), (None, None)]
    assert rows(storage)[3]["error"] == "line 4: vLLM ended it: abort"
    assert rows(storage)[4]["error"] == "line 5: 15 tokens and 6 new ones do not fit the model's 20"
    assert len(set(given["seeds"])) == 3  # rows that ask the same are not to be answered the same
    wanted = {"dtype": "bfloat16", "tensor_parallel_size": 1, "max_tokens": 6, "temperature": 0.5, "top_k": 7}
    assert wanted.items() <= given.items()
    assert given["closed"]  # else the job's process would wait for vLLM's
    assert given["stop"] == ["."] and given["model"] == str(root / "models/small")


LARGE_GB = float(os.environ.get("SLOTWISE_TEST_LARGE_GB", "3"))  # 10: as large as a night's input
MOST_MEMORY = 1 << 30  # bytes, however large the file and its row groups are
BLOB = "x" * 250_000


@pytest.mark.long
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_job_over_a_file_larger_than_its_memory_reads_it_piece_by_piece(root: Path, form: str) -> None:
    count = int(LARGE_GB * 1e9) // len(BLOB)
    (root / "in").mkdir()
    large = root / "in" / f"rows.{form}"
    writing = multiprocessing.get_context("spawn").Process(
        target={"jsonl": large_jsonl, "parquet": large_parquet}[form], args=(large, count)
    )
    writing.start()
    writing.join()
    assert writing.exitcode == 0
    size = large.stat().st_size
    assert size > LARGE_GB * 1e9
    section = {**SECTION, "input": f"in/rows.{form}", "max_new_tokens": 1, "batch": 32, "shard_rows": 512}
    job = Job("tasks.inference", root, "large", section)
    process, most = job.start(), 0
    try:
        while process.poll() is None:
            most = max(most, most_memory(process.pid))
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, job.said
    assert json.loads((job.output / "report.json").read_text())["rows"] == count
    print(f"{form}: {size / 1e9:.2f} GB, {count} rows, at most {most / 1e9:.2f} GB of memory")
    assert 0 < most < MOST_MEMORY < size


def most_memory(pid: int) -> int:
    """The most bytes that a process had in memory so far: its own, unlike `ru_maxrss`, which begins with what
    the process had that started it.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def large_jsonl(path: Path, count: int) -> None:
    """Rows of 250 kB, written one by one."""
    with path.open("w") as out:
        for number in range(count):
            out.write(f'{{"id": {number}, "prompt": "What", "blob": "{BLOB}"}}\n')


def large_parquet(path: Path, count: int) -> None:
    """The same in row groups of 1 GB, plain, so that nothing shrinks them, in pages of 4 MB.

    The writer looks at a page's size after each batch of values only. By default that is 1024 of them: here a
    page of 250 MB, which a reader has to hold.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema({"id": pa.int64(), "prompt": pa.string(), "blob": pa.string()})
    with pq.ParquetWriter(
        path, schema, compression="none", use_dictionary=False, write_batch_size=16
    ) as writer:
        for begin in range(0, count, 4000):
            ids = list(range(begin, min(begin + 4000, count)))
            blobs = [f"{number:08d}{BLOB}" for number in ids]
            table = pa.table({"id": ids, "prompt": ["What"] * len(ids), "blob": blobs}, schema)
            writer.write_table(table, row_group_size=4000)
