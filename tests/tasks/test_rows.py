"""Rows: cut into shards and read one shard at a time, however large the files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import rows as module
from tasks.rows import InputFile, Reader, Shard, fingerprint, matches, shards


def jsonl(tmp_path: Path, *contents: bytes) -> list[InputFile]:
    """Files with these bytes."""
    files = []
    for index, content in enumerate(contents):
        path = tmp_path / f"{index}.jsonl"
        path.write_bytes(content)
        files.append(InputFile(path.name, path))
    return files


def test_shards_hold_every_row_once_over_files_of_any_size(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "{n}"}}\n'.encode() for n in range(23)]
    for size in (1, 2, 5, 7, 23, 50):
        files = jsonl(tmp_path, b"".join(lines[:4]), b"\n", b"".join(lines[4:5]), b"".join(lines[5:]))
        found = shards(files, size)
        assert [shard.rows for shard in found[:-1]] == [size] * (len(found) - 1)
        reader = Reader(files, "prompt")
        asked = [row.asked for shard in found for row in reader.read(shard)[0]]
        assert asked == [str(n) for n in range(23)]


def test_parquet_is_read_in_any_order_of_shards(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = []
    for part, numbers in enumerate([range(7), range(7, 9), range(9, 31)]):
        path = tmp_path / f"{part}.parquet"
        pq.write_table(pa.table({"prompt": [str(n) for n in numbers]}), path, row_group_size=4)
        files.append(InputFile(path.name, path))
    found = shards(files, 5)
    assert sum(shard.rows for shard in found) == 31
    for order in (found, list(reversed(found)), found[1::2] + found[::2]):
        reader = Reader(files, "prompt")
        asked = {shard.index: [row.asked for row in reader.read(shard)[0]] for shard in order}
        assert [text for index in sorted(asked) for text in asked[index]] == [str(n) for n in range(31)]


def test_a_huge_line_is_an_error_row_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_LINE", 1000)
    files = jsonl(tmp_path, b'{"prompt": "a"}\n{"prompt": "' + b"x" * 5000 + b'"}\n{"prompt": "b"}\n')
    (shard,) = shards(files, 10)
    first, huge, last = Reader(files, "prompt").read(shard)[0]
    assert (first.asked, last.asked) == ("a", "b")
    assert huge.error is not None and huge.error.startswith("line 2: longer than")


def test_an_input_without_rows_has_no_shards(tmp_path: Path) -> None:
    assert shards(jsonl(tmp_path, b"", b"\n \n"), 4) == []


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_shard_of_large_rows_has_fewer_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(module, "MOST_SHARD", 10_000)
    lengths = [10, 10, 3000, 3000, 3000, 3000, 10, 20_000, 10]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(f'{{"prompt": "{"x" * length}"}}\n' for length in lengths))
    else:
        texts = [os.urandom(length // 2).hex() for length in lengths]
        pq.write_table(pa.table({"prompt": texts}), path, row_group_size=2)
    files = [InputFile(path.name, path)]
    found = shards(files, 8)
    assert [shard.rows for shard in found] == ([5, 2, 1, 1] if suffix == "jsonl" else [2, 2, 2, 2, 1])
    reader = Reader(files, "prompt")
    assert [len(row.asked) for shard in found for row in reader.read(shard)[0]] == lengths


GLOBS = {
    "in/*.jsonl": ["in/a.jsonl", "in/b.jsonl"],
    "in/**/*.jsonl": ["in/a.jsonl", "in/b.jsonl", "in/deep/c.jsonl"],
    "in/?.jsonl": ["in/a.jsonl", "in/b.jsonl"],
    "in/[!a].jsonl": ["in/b.jsonl"],
    "in/a.jso*": ["in/a.jsonl"],
    "*.jsonl": [],
}


@pytest.mark.parametrize("pattern", GLOBS)
def test_a_glob_stays_within_its_folder_unless_it_says_otherwise(pattern: str) -> None:
    keys = ["in/a.jsonl", "in/b.jsonl", "in/deep/c.jsonl", "in/a.txt"]
    assert matches(pattern, keys) == GLOBS[pattern]


def test_a_file_with_another_begin_or_end_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"a" * 200_000)
    before = fingerprint(path)
    path.write_bytes(b"a" * 199_999 + b"b")
    assert fingerprint(path) != before


LARGE = """
import resource, sys
from pathlib import Path
import pyarrow.parquet
from tasks.rows import InputFile, Reader, shards
files = [InputFile(Path(name).name, Path(name)) for name in sys.argv[2:]]
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
reader = Reader(files, "prompt")
found = shards(files, 256)
print(len(found), sum(len(reader.read(shard)[0]) for shard in found))
"""


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_large_file_is_read_in_little_memory(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"large.{suffix}"
    text, count = "x" * 20_000, 15_000  # 300 MB
    if suffix == "jsonl":
        with path.open("w") as out:
            for _ in range(count):
                out.write(f'{{"prompt": "{text}"}}\n')
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema([("prompt", pa.string())])
        with pq.ParquetWriter(path, schema, compression=None, use_dictionary=False) as out:
            for _ in range(count // 5000):  # row groups of 100 MB
                batch = [os.urandom(10_000).hex() for _ in range(5000)]
                out.write_table(pa.table({"prompt": batch}, schema), row_group_size=5000)
    limit = 160 << 20
    assert path.stat().st_size > 1.5 * limit
    command = [sys.executable, "-c", LARGE, str(limit), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [str(-(-count // 256)), str(count)]


def test_a_shard_of_a_file_that_became_shorter_is_said(tmp_path: Path) -> None:
    from tasks.specfile import SpecError

    files = jsonl(tmp_path, b'{"prompt": "a"}\n')
    with pytest.raises(SpecError, match=r"input: '0\.jsonl': has fewer rows than before"):
        Reader(files, "prompt").read(Shard(0, 0, 0, 1, 2))
