"""Batch inference: a row for a row, in their order, once."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks import inference
from tasks.inference import infer, shard_key
from tasks.program import FinalError, publish_directory
from tasks.specfile import SpecError
from tasks.storage import Storage, open_storage
from tests.conftest import wait_for
from tests.tasks.kind_programs import Job, program, small_model

SECTION: dict[str, Any] = {
    "input": "in/rows.jsonl",
    "model": "models/small",
    "max_new_tokens": 6,
    "batch": 4,
    "shard_rows": 5,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture
def root(tmp_path: Path, model: Path) -> Path:
    """A storage directory with the model in it."""
    (tmp_path / "storage").mkdir()
    publish_directory(open_storage(str(tmp_path / "storage")), "models/small", model)
    return tmp_path / "storage"


def put(storage: Storage, *lines: object) -> None:
    """Leave the input; what is not bytes becomes a line of JSON."""
    data = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    storage.write("in/rows.jsonl", b"\n".join(data) + b"\n")


def rows(storage: Storage, name: str = "job") -> list[dict[str, Any]]:
    """All output rows, in the order of their shards."""
    shards = storage.keys(f"outputs/{name}/rows-")
    return [json.loads(line) for key in shards for line in storage.read(key).splitlines()]


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


@pytest.mark.parametrize(("line", "message"), BAD)
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
    with pytest.raises(
        FinalError, match=r"2 of 3 rows failed, more than the 0\.5 allowed; .*line 2: not JSON"
    ):
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


def test_a_killed_job_redoes_no_finished_shard_and_loses_no_row(root: Path) -> None:
    storage = open_storage(str(root))
    put(storage, *[{"id": n, "prompt": f"{n} What"} for n in range(40)])
    section = {**SECTION, "max_new_tokens": 30, "batch": 2, "shard_rows": 4}
    job = Job("tasks.inference", root, "killed", section)
    process = job.start()
    try:
        wait_for(lambda: len(storage.keys("outputs/killed/rows-")) >= 2, "two shards")
    finally:
        process.kill()
        process.wait()
    before = {path.name: path.stat().st_mtime_ns for path in job.output.glob("rows-*")}
    assert 2 <= len(before) < 10
    assert job.run() == 0, job.said
    after = {path.name: path.stat().st_mtime_ns for path in job.output.glob("rows-*")}
    assert before.items() <= after.items()
    assert [row["id"] for row in rows(storage, "killed")] == list(range(40))


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
    root: Path, section: dict[str, Any], message: str
) -> None:
    put(open_storage(str(root)), {"prompt": "a"})
    job = Job("tasks.inference", root, "wrong", section)
    assert job.run() == 2
    assert message in job.said
    assert job.said.count("\n") == 1
    assert not job.output.exists()
