"""Processes are known by id and start time, and by a mark that their children inherit."""

import os
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from flows.processes import MARK, Process, alive, end, marked, recorded, spawn, wait


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


def sleeper(tmp_path: Path, mark: str, code: str = "import time; time.sleep(60)") -> Process:
    command = [sys.executable, "-S", "-c", code]
    return spawn("sleeper", command, {MARK: mark}, tmp_path / "log", tmp_path / "run")


def test_a_process_that_was_started_is_recorded_alive_and_ends_on_request(tmp_path: Path, mark: str) -> None:
    process = sleeper(tmp_path, mark)
    assert recorded(tmp_path / "run") == {"sleeper": process}
    assert alive(process)
    end([process], grace_s=10)
    assert not alive(process)


def test_a_process_that_ignores_the_request_is_killed_after_the_grace(tmp_path: Path, mark: str) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    process = sleeper(tmp_path, mark, code)
    assert not wait([process], lambda _: "deaf" in (tmp_path / "log").read_text(), 30)
    end([process], grace_s=0.2)
    assert not alive(process)


def test_a_process_with_a_reused_id_is_not_touched(tmp_path: Path, mark: str) -> None:
    process = sleeper(tmp_path, mark)
    earlier = replace(process, started=process.started + "0")
    assert not alive(earlier)
    end([earlier], grace_s=0.2)
    assert alive(process)
    end([process], grace_s=10)


def test_an_ended_child_that_nobody_waited_for_is_not_alive(tmp_path: Path, mark: str) -> None:
    process = sleeper(tmp_path, mark, "pass")
    assert not wait([process], lambda each: not alive(each), 30)


def test_children_of_children_are_found_by_the_mark_when_their_parent_is_gone(
    tmp_path: Path, mark: str
) -> None:
    code = (
        "import subprocess, sys; sleep = [sys.executable, '-S', '-c', 'import time; time.sleep(60)']; "
        "print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True)"
    )
    parent = sleeper(tmp_path, mark, code)
    assert not wait([parent], lambda each: not alive(each), 30)
    grandchild = int((tmp_path / "log").read_text())
    found = marked(mark)
    assert [process.pid for process in found] == [grandchild]
    end(found, grace_s=10)
    assert marked(mark) == []


def test_a_neighbour_with_another_mark_is_not_found(tmp_path: Path, mark: str) -> None:
    process = sleeper(tmp_path, mark)
    assert marked(mark[:-1]) == []
    assert marked(uuid.uuid4().hex) == []
    end([process], grace_s=10)


def test_the_caller_itself_is_never_among_the_marked(tmp_path: Path, mark: str) -> None:
    code = f"from flows.processes import marked; print(len(marked({mark!r})))"
    environment = {**os.environ, MARK: mark}
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stdout == "0\n"


def test_a_damaged_record_is_passed_over(tmp_path: Path, mark: str) -> None:
    process = sleeper(tmp_path, mark)
    (tmp_path / "run" / "broken.json").write_text('{"name": "bro')
    assert recorded(tmp_path / "run") == {"sleeper": process}
    end([process], grace_s=10)


def test_output_is_appended_to_the_log(tmp_path: Path, mark: str) -> None:
    for word in ("one", "two"):
        process = sleeper(tmp_path, mark, f"import sys; print({word!r}); print({word!r}, file=sys.stderr)")
        assert not wait([process], lambda each: not alive(each), 30)
    assert sorted((tmp_path / "log").read_text().split()) == ["one", "one", "two", "two"]
