"""The runner with real processes: what a program finds, how it ends, and what may never happen."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.facts import FactError, fact_key, fact_keys, write_fact
from tasks.inbox import request_cancel
from tasks.instants import now
from tasks.runner import PROGRAMS, _argv, read_order
from tasks.serving import Observed, publish_target, write_observed
from tasks.storage import NotFoundError
from tests.conftest import WAIT_S, wait_for
from tests.tasks.runners import DRIVER, Place, alive, note, python, stays
from tests.tasks.runners import place as place


def test_a_program_completes_with_its_metrics_and_its_log(place: Place) -> None:
    code = """
        import json, os
        print("line one"); print("line two")
        open(os.environ["SLOTWISE_METRICS"], "w").write(json.dumps({"mfu": 0.4, "steps": 10}))
    """
    runner = place.run(place.commit(python(code), gpus=(1, 2)))
    assert runner.result() == "completed"
    assert runner.output().splitlines() == ["READY", "SAID line one", "SAID line two", "OUTCOME completed"]
    fact = place.outcome()
    assert (fact["state"], fact["exit_code"], fact["error"]) == ("completed", 0, None)
    assert fact["metrics"] == {"mfu": 0.4, "steps": 10}
    assert fact["gpu_seconds"] > 0
    assert fact["cost"] == pytest.approx(fact["gpu_seconds"])  # at 3600 an hour
    assert place.started()["void"] is False
    assert place.storage.read("logs/a/1-0.log") == b"line one\nline two\n"
    assert place.lease() == {}


ENDS: dict[str, tuple[list[str], str, int, str]] = {
    "exit 1": (python("import sys; print('why'); sys.exit(1)"), "failed", 1, "exit code 1: why"),
    "exit 2": (python("import sys; print('x.yaml:3: no', file=sys.stderr); sys.exit(2)"), "failed", 2,
               "exit code 2: x.yaml:3: no"),
    "a traceback": (python("1 / 0"), "failed", 1, "exit code 1: ZeroDivisionError: division by zero"),
    "nothing said": (["false"], "failed", 1, "exit code 1: it said nothing"),
    "a message": (python("""
        import os, sys
        open(os.environ["SLOTWISE_METRICS"], "w").write('{"message": "out of\\\\nmemory"}')
        print("noise"); sys.exit(7)
    """), "failed", 7, "exit code 7: out of memory"),
    "kill -9 by itself": (python("import os; print('x', flush=True); os.kill(os.getpid(), 9)"), "crashed", -9,
                          "signal SIGKILL: x"),
    "abort": (python("import os; os.abort()"), "crashed", -6, "signal SIGABRT: it said nothing"),
    "no such program": (["no-such-program"], "failed", 2,
                        "exit code 2: command: 'no-such-program' cannot be run: No such file or directory"),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_how_a_program_ends_decides_the_state(place: Place, case: str) -> None:
    command, state, code, error = ENDS[case]
    assert place.run(place.commit(command)).result() == state
    fact = place.outcome()
    assert (fact["state"], fact["exit_code"], fact["error"]) == (state, code, error)


HOSTILE_METRICS = {
    "NaN": ('{"loss": NaN, "steps": 3}', {"loss": None, "steps": 3}),
    "infinite": ('{"loss": 1e999, "deep": [-1e999]}', {"loss": None, "deep": [None]}),
    "half a character": ('{"message": "a\\ud800"}', {"message": "a?"}),
    "torn": ('{"loss": 1', {}),
    "no object": ("[1]", {}),
    "nested": ("[" * 100_000, {}),
    "huge": (json.dumps({"x": "y" * 2_000_000}), {}),
    "binary": ("\udcff\udcfe", {}),
}


def test_metrics_of_any_kind_never_cost_the_outcome(place: Place) -> None:
    runners = {}
    for number, (name, (content, _)) in enumerate(HOSTILE_METRICS.items()):
        place.file(name).write_text(content, errors="surrogateescape")
        code = f"import os, shutil; shutil.copy({str(place.file(name))!r}, os.environ['SLOTWISE_METRICS'])"
        job = f"job{number}"
        runners[name] = (job, place.run(place.commit(python(code), job, gpus=(number,)), job))
    for name, (job, runner) in runners.items():
        assert runner.result() == "completed"
        assert place.outcome(job)["metrics"] == HOSTILE_METRICS[name][1], name


def test_while_it_runs_the_lease_tells_how_far_it_is(place: Place) -> None:
    code = (
        note(place)
        + """
import os, time
open(os.environ["SLOTWISE_METRICS"], "w").write('{"progress": 0.5}')
time.sleep(600)
"""
    )
    runner = place.run(place.commit([sys.executable, "-c", code]))
    wait_for(lambda: place.lease().get("metrics") == {"progress": 0.5}, "the lease to carry metrics")
    first = place.lease()
    assert first["doing"] == "running"
    assert first["pid"] == runner.process.pid
    wait_for(lambda: place.lease()["at"] > first["at"], "the lease to be renewed")


def test_a_program_killed_from_outside_has_crashed(place: Place) -> None:
    runner = place.run(place.commit(stays(place)))
    os.kill(place.pid(), signal.SIGKILL)
    assert runner.result() == "crashed"
    assert place.outcome()["error"] == "signal SIGKILL: it said nothing"


SAVES = """
import os, signal, sys, time
def save(*_):
    open(r'{path}', 'w').write('saved')
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
"""


def saves(place: Place) -> list[str]:
    """A program that saves its work when it is asked to leave."""
    return [sys.executable, "-c", SAVES.format(path=place.file("saved")) + note(place) + "time.sleep(600)"]


def test_a_runner_told_to_end_lets_the_program_save(place: Place) -> None:
    runner = place.run(place.commit(saves(place)))
    place.pid()
    runner.process.terminate()
    assert runner.result() == "crashed"
    assert place.outcome()["error"] == "its runner was told to end"
    assert place.file("saved").read_text() == "saved"


def test_a_flow_run_cancelled_by_a_person_is_cancelled(place: Place) -> None:
    runner = place.run(place.commit(stays(place)), person="cancels")
    place.pid()
    runner.process.terminate()
    assert runner.result() == "cancelled"
    assert place.outcome()["error"] == "cancelled by a person"


@pytest.mark.parametrize(("person", "state"), [("", "not_started"), ("cancels", "cancelled")])
def test_a_runner_told_to_end_while_it_waits_gives_its_start_up(
    place: Place, person: str, state: str
) -> None:
    runner = place.run(place.commit(stays(place), in_s=600), person=person)
    wait_for(lambda: place.lease().get("doing") == "waiting", "the runner to wait")
    runner.process.terminate()
    assert runner.result() == state
    assert place.started()["void"] is True
    assert not place.file("pid").exists()


def test_a_job_that_is_cancelled_ends(place: Place) -> None:
    runner = place.run(place.commit(saves(place)))
    place.pid()
    request_cancel(place.storage, "a", "someone", now())
    assert runner.result() == "cancelled"
    assert place.file("saved").exists()


def test_a_job_cancelled_while_it_waits_never_begins(place: Place) -> None:
    runner = place.run(place.commit(stays(place), in_s=600))
    wait_for(lambda: place.lease().get("doing") == "waiting", "the runner to wait")
    request_cancel(place.storage, "a", "someone", now())
    assert runner.result() == "cancelled"
    assert place.started()["void"] is True
    assert place.outcome()["gpu_seconds"] == 0
    assert not place.file("pid").exists()


def test_a_job_ends_at_its_max_duration(place: Place) -> None:
    runner = place.run(place.commit(saves(place), max_duration_s=4))
    assert runner.result() == "timed_out"
    assert place.outcome()["error"] == "ended at its max_duration of 0:00:04"
    assert place.file("saved").exists()


def test_a_program_that_will_not_leave_is_killed(place: Place) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code = f"{deaf}{note(place)}time.sleep(600)"
    driver = DRIVER.replace(
        "from tasks.runner import", "import tasks.runner; tasks.runner.GRACE_S = 1\nfrom tasks.runner import"
    )
    commit = place.commit([sys.executable, "-c", code], max_duration_s=4)
    arguments = [str(place.path / "storage"), commit, "a", "0", str(place.path / "node0"), "", "/nowhere"]
    process = subprocess.Popen([sys.executable, "-c", driver, *arguments], stdout=subprocess.DEVNULL)
    assert process.wait(WAIT_S) == 0
    assert place.outcome()["state"] == "timed_out"
    assert not alive(place.pid())


def test_what_a_program_leaves_behind_is_ended_with_it(place: Place) -> None:
    child = note(place, "child") + "import time; time.sleep(600)"
    code = f"""
import subprocess, sys, os, time
subprocess.Popen([sys.executable, "-c", {child!r}])
while not os.path.exists({str(place.file("child"))!r}):
    time.sleep(0.01)
"""
    runner = place.run(place.commit([sys.executable, "-c", code]))
    assert runner.result() == "completed"
    wait_for(lambda: not alive(place.pid("child")), "the child to be gone")


def test_an_attempt_is_begun_by_one_runner(place: Place) -> None:
    count = python(f"open({str(place.file('runs'))!r}, 'a').write('x')\nimport time; time.sleep(1)")
    commit = place.commit(count)
    runners = [place.run(commit) for _ in range(3)]
    assert sorted(runner.result() for runner in runners) == ["None", "None", "completed"]
    assert place.file("runs").read_text() == "x"
    assert place.outcome()["state"] == "completed"
    assert place.run(commit).result() == "None"


def test_an_attempt_that_was_voided_is_not_begun(place: Place) -> None:
    commit = place.commit(stays(place))
    write_fact(
        place.storage, fact_key("started", place.at, "a", 1, 0), now(), {"void": True, "reason": "late"}
    )
    assert place.run(commit).result() == "None"
    assert not place.file("pid").exists()
    assert [key for key in fact_keys(place.storage) if "/outcome/" in key] == []


def test_a_second_job_on_a_gpu_waits_for_the_first(place: Place) -> None:
    commits = [
        place.commit(stays(place, job), job, gpus=gpus) for job, gpus in (("a", (0, 1)), ("b", (1, 2)))
    ]
    first = place.run(commits[0], "a")
    pid = place.pid("a")
    second = place.run(commits[1], "b")
    wait_for(lambda: place.lease("b").get("doing") == "waiting", "the second job to wait")
    assert place.lease("b")["detail"].startswith("GPU 1 of node0, held by a attempt 1 (process ")
    assert not place.file("b").exists()
    os.kill(pid, signal.SIGKILL)
    assert first.result() == "crashed"
    os.kill(place.pid("b"), signal.SIGKILL)
    assert second.result() == "crashed"


def test_the_program_itself_holds_the_locks_of_its_gpus(place: Place) -> None:
    code = "import os; print(sorted(map(os.path.realpath, os.scandir('/proc/self/fd'))))"
    runner = place.run(place.commit(python(code), gpus=(1, 2)))
    assert runner.result() == "completed"
    for gpu in (1, 2):
        assert f"node0/gpus/{gpu}.lock'" in runner.output()


def test_jobs_on_different_gpus_run_side_by_side(place: Place) -> None:
    for job, gpus in (("a", (0, 1)), ("b", (2, 3))):
        place.run(place.commit(stays(place, job), job, gpus=gpus), job)
    assert alive(place.pid("a"))
    assert alive(place.pid("b"))
    assert alive(place.pid("a"))


def test_a_job_waits_until_a_service_has_really_left_its_gpus(place: Place) -> None:
    first = publish_target(place.storage, "chat", {"node0": [0, 1]}, now())
    write_observed(place.storage, "chat", now(), Observed(first, {"node0": frozenset({0, 1})}))
    second = publish_target(place.storage, "chat", {"node0": [0]}, now())
    runner = place.run(place.commit(python("pass"), gpus=(1,)))
    wait_for(lambda: "chat" in place.lease().get("detail", ""), "the runner to wait for the service")
    assert "not left yet" in place.lease()["detail"]
    assert [key for key in fact_keys(place.storage) if "/started/" in key] == []
    write_observed(
        place.storage, "chat", now(), Observed(second, {"node0": frozenset({0, 1})})
    )  # it says so, but holds it
    wait_for(lambda: f"acted on {second}" in place.lease()["detail"], "the runner to look again")
    write_observed(place.storage, "chat", now(), Observed(second, {"node0": frozenset({0})}))
    assert runner.result() == "completed"


def test_a_job_that_waits_too_long_goes_back_to_the_queue(place: Place) -> None:
    publish_target(place.storage, "chat", {"node0": [0]}, now())
    runner = place.run(place.commit(stays(place), timeout_s=1))
    assert runner.result() == "not_started"
    assert "waited too long for chat" in place.outcome()["error"]
    assert place.started()["void"] is True
    assert not place.file("pid").exists()


def test_a_runner_killed_takes_the_program_and_all_it_started_along(place: Place) -> None:
    child = note(place, "child") + "import time; time.sleep(600)"
    code = (
        note(place)
        + f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], close_fds=False)"
    )
    runner = place.run(place.commit([sys.executable, "-c", code]))
    pids = [place.pid(), place.pid("child")]
    runner.process.kill()
    wait_for(lambda: not any(map(alive, pids)), "the program and its child to be gone")
    commit = place.commit(python("pass"), job="next")
    assert place.run(commit, "next").result() == "completed"  # the GPU is free


def test_a_runner_that_is_thought_dead_ends_its_program(place: Place) -> None:
    runner = place.run(place.commit(saves(place)))
    place.pid()
    write_fact(place.storage, fact_key("outcome", place.at, "a", 1, 0), now(), {"state": "lost"})
    assert runner.result() == "crashed"
    assert place.outcome() | {"at": ""} == {"at": "", "state": "lost"}
    assert place.file("saved").exists()


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_runner_that_cannot_renew_its_lease_ends_its_program(place: Place, how: str) -> None:
    root, aside, hang = place.path / "storage", place.path / "aside", place.path / "hang"
    runner = place.run(place.commit(stays(place)))
    pid = place.pid()
    wait_for(lambda: place.lease().get("doing") == "running", "the lease")
    if how == "fails":
        root.rename(aside)
        root.write_text("no directory")
    else:
        hang.touch()
    cut_off = time.monotonic()
    wait_for(lambda: not alive(pid), "the program to be ended")
    assert time.monotonic() - cut_off > 1  # not at the first hiccup
    if how == "fails":
        root.unlink()
        aside.rename(root)
    else:
        hang.unlink()
    assert runner.result() == "crashed"  # and its outcome is not lost
    assert "storage could not be reached for" in place.outcome()["error"]


def environment_of(place: Place, **fields: Any) -> dict[str, str]:
    """What a program finds in its environment, and how nice it is."""
    code = f"""
import json, os
found = dict(os.environ, NICE=str(os.nice(0)), CWD=os.getcwd())
try:
    found["SESSION"] = open("/proc/self/autogroup").read().split()[-1]
except FileNotFoundError:  # a kernel without autogroups
    found["SESSION"] = found["NICE"]
open({str(place.file("environment"))!r}, "w").write(json.dumps(found))
"""
    assert place.run(place.commit(python(code), **fields)).result() == "completed"
    found: dict[str, str] = json.loads(place.file("environment").read_text())
    return found


def test_a_program_on_real_gpus_finds_them_in_its_environment(place: Place) -> None:
    found = environment_of(place, gpus=(1, 3), gpu="H100")
    expected = {
        "SLOTWISE_JOB": "a",
        "SLOTWISE_ATTEMPT": "1",
        "SLOTWISE_KIND": "training",
        "SLOTWISE_STORAGE": str(place.path / "storage"),
        "SLOTWISE_OUTPUT": "outputs/a",
        "SLOTWISE_NODE": "node0",
        "SLOTWISE_NODE_RANK": "0",
        "SLOTWISE_NODE_COUNT": "1",
        "SLOTWISE_GPUS": "2",
        "SLOTWISE_GPU_TYPE": "H100",
        "MASTER_ADDR": "127.0.0.1",
        "CUDA_VISIBLE_DEVICES": "1,3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "KEPT": "yes",
        "NICE": "0",
        "SESSION": "0",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert int(found["MASTER_PORT"]) > 0
    assert Path(found["SLOTWISE_METRICS"]).parent == Path(found["CWD"])
    assert [name for name in found if name.startswith("PREFECT_")] == []


def test_a_program_on_virtual_gpus_gets_its_share_and_is_nice(place: Place) -> None:
    found = environment_of(place, gpus=(1, 3))
    share = str(max((os.cpu_count() or 1) * 2 // 4, 1))
    assert (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"]) == (share, share)
    assert (found["CUDA_VISIBLE_DEVICES"], found["SLOTWISE_GPU_TYPE"]) == ("", "cpu")
    assert found["OMP_WAIT_POLICY"] == "PASSIVE"
    assert (found["NICE"], found["SESSION"]) == ("15", "15")


@pytest.mark.parametrize("kind", PROGRAMS)
def test_each_kind_has_its_program_and_finds_its_section_in_a_file(tmp_path: Path, kind: str) -> None:
    order: Any = type("Order", (), {"spec": {"kind": kind, kind: {"config": "x.yaml"}, "command": None}})
    command = _argv(order, tmp_path)
    assert command[:3] == [sys.executable, "-m", PROGRAMS[kind]]
    assert yaml.safe_load(Path(command[3]).read_text()) == {"config": "x.yaml"}


BAD_ORDERS: dict[str, tuple[Callable[[str], tuple[str, str, int]], type[Exception], str]] = {
    "no such commitment": (lambda key: (key + "x", "a", 0), NotFoundError, "no object"),
    "no such job": (lambda key: (key, "b", 0), FactError, "has no rank 0 of job b"),
    "no such rank": (lambda key: (key, "a", 1), FactError, "has no rank 1 of job a"),
}


@pytest.mark.parametrize("case", BAD_ORDERS)
def test_an_order_that_was_never_given_is_refused(place: Place, case: str) -> None:
    arguments, error, said = BAD_ORDERS[case]
    commit, job, rank = arguments(place.commit(["ls"]))
    with pytest.raises(error, match=said):
        read_order(place.storage.root, commit, job, rank)


def test_an_order_says_all_that_was_committed(place: Place) -> None:
    order = read_order(place.storage.root, place.commit(["ls"], nodes=2, max_duration_s=90), "a", 1)
    assert (order.job, order.attempt, order.node["node"]) == ("a", 1, "node1")
    assert (order.max_duration, order.lease) == (timedelta(seconds=90), timedelta(seconds=1))
    assert order.start == place.at
    assert order.commit_day == datetime.combine(place.at.date(), datetime.min.time())
