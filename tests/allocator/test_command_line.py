"""``python -m allocator``: what it prints and writes, and that a mistake is one line and exit code 2."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from allocator import Plan, Problem, load_problem
from allocator.__main__ import main
from allocator.check import check
from tests.allocator.scenarios import SCENARIOS

ROOT = SCENARIOS.parents[1]
CONTENTION = str(SCENARIOS / "contention.yaml")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")


def modules_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after some code, without those of an idle one."""
    tail = "\nimport sys; print('\\n'.join(sys.modules), file=sys.stderr)"
    runs = [
        subprocess.run(
            [sys.executable, "-c", text + tail], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for text in (code, "pass")
    ]
    after, before = (set(run.stderr.split()) for run in runs)
    return after - before


HEAVY = {
    "ortools",
    "numpy",
    "scipy",
    "highspy",
    "yaml",
    "rich",
    "json",
    "typing",
    "random",
    "prefect",
    "torch",
}


def test_importing_the_allocator_loads_no_solver_and_no_reader() -> None:
    loaded = modules_after("import allocator")
    assert not HEAVY & {name.partition(".")[0] for name in loaded}
    assert len(loaded) < 60
    assert sum(name.startswith("allocator") for name in loaded) <= 5


def test_help_and_mistakes_load_neither_yaml_nor_rich_nor_a_solver() -> None:
    loaded = modules_after(
        "from allocator.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    )
    assert not (HEAVY - {"typing"}) & {name.partition(".")[0] for name in loaded}


def test_it_runs_as_a_module() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "allocator", "solve", CONTENTION],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith("contention, fast: objective ")
    assert run.stderr == ""


@pytest.mark.parametrize("mode", ["fast", "fifo", "backfill", "greedy"])
def test_solve_prints_the_grid_the_figures_and_the_reasons(
    mode: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["solve", CONTENTION, "--mode", mode, "--json", str(tmp_path / "plan.json")]) == 0
    text = capsys.readouterr().out
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert text.startswith(f"contention, {mode}: objective {plan.objective} · value {plan.value}")
    assert "━━" in text and "node0" in text
    for entry in plan.unplaced:
        assert entry.reason.split(";")[0][:30] in text
        assert entry.earliest_start is not None


def test_the_json_is_a_plan_that_passes_the_check(tmp_path: Path) -> None:
    assert main(["solve", CONTENTION, "--json", str(tmp_path / "plan.json")]) == 0
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert check(load_problem(CONTENTION), plan) == []


def test_json_to_the_output_is_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", CONTENTION, "--json", "-"]) == 0
    assert Plan.from_dict(json.loads(capsys.readouterr().out)).mode == "fast"


def test_a_solver_library_says_nothing_between_the_json() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "allocator", "solve", CONTENTION, "--bound", "--json", "-"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout)["bound"] >= 1052


def test_svg_writes_a_drawing(tmp_path: Path) -> None:
    assert main(["solve", CONTENTION, "--svg", str(tmp_path / "plan.svg"), "--committed", "2"]) == 0
    root = ElementTree.fromstring((tmp_path / "plan.svg").read_text())
    assert root.tag.endswith("svg")


def test_the_committed_slots_are_the_ones_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    main(["solve", CONTENTION, "--committed", "3"])
    assert capsys.readouterr().out.splitlines()[2].count("━") == 3 * 4


def test_a_bound_says_how_far_from_the_best_the_plan_may_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["solve", CONTENTION, "--bound", "--json", str(tmp_path / "plan.json")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert plan.bound is not None and plan.bound >= 1052
    assert "below the best" in text or "proven best" in text


def test_full_mode_finds_the_proven_best(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", CONTENTION, "--mode", "full", "--time-limit", "20"]) == 0
    assert capsys.readouterr().out.startswith("contention, full: objective 1052 ")


def test_the_same_seed_gives_the_same_plan(tmp_path: Path) -> None:
    plans = []
    for name in ("one", "two"):
        main(["solve", CONTENTION, "--seed", "5", "--iterations", "50", "--json", str(tmp_path / name)])
        plans.append(json.loads((tmp_path / name).read_text()) | {"solve_ms": 0})
    assert plans[0] == plans[1]


def test_explain_says_why_who_and_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", CONTENTION]) == 0
    text = capsys.readouterr().out
    assert "not placed, could start at slot" in text
    assert "would help: raise its priority" in text
    assert "try it: what-if --set " in text


def test_what_explain_says_to_try_places_the_job(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["explain", CONTENTION, "--json", "-"])
    entry = json.loads(capsys.readouterr().out)[0]
    settings = [
        f"{setting['path']}={json.dumps(setting['value'])}" for setting in entry["remedy"]["settings"]
    ]
    assert main(["what-if", CONTENTION, *[part for text in settings for part in ("--set", text)]]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith(entry["job"])]
    assert row.split()[1:3] == ["not", "placed"] and "slots" in row


def test_explain_of_a_placed_job_says_why_not_earlier(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", CONTENTION, "h16"]) == 0
    assert capsys.readouterr().out.startswith("h16 placed at slot ")


def test_what_if_shows_what_comes_in_goes_out_and_moves(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text("{id: new, gpus: 16, slots: 2, priority: 20}")
    arguments = ["--add", str(tmp_path / "job.yaml"), "--drop", "t01", "--set", "t05.priority=9"]
    assert main(["what-if", CONTENTION, *arguments]) == 0
    text = capsys.readouterr().out
    assert "before: objective" in text and "after:  objective" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert rows["new"].split()[1] == "–" and "slots" in rows["new"]
    assert "slots" in rows["t05"]


def test_compare_prints_one_table_and_writes_its_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("light_load", "contention"):
        (tmp_path / f"{name}.yaml").write_text((SCENARIOS / f"{name}.yaml").read_text())
    assert main(["compare", str(tmp_path), "--full-seconds", "0", "--json", str(tmp_path / "out.json")]) == 0
    text = capsys.readouterr().out
    assert text.index("contention (16 GPUs") < text.index("light_load (16 GPUs")
    data = json.loads((tmp_path / "out.json").read_text())
    assert [entry["problem"] for entry in data] == ["contention", "light_load"]
    assert data[0]["rows"][0]["value"] == 477


def test_what_is_generated_can_be_solved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--seed", "3", "--gpus", "16", "--jobs", "12", "--slots", "12", "--load", "1.5"]
    assert main(["generate", *arguments, "--features", "holes,running"]) == 0
    text = capsys.readouterr().out
    problem = Problem.from_dict(yaml.safe_load(text))
    assert (problem.total_gpus, problem.slots) == (16, 12)
    (tmp_path / "p.yaml").write_text(text)
    assert main(["solve", str(tmp_path / "p.yaml")]) == 0


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no command": ([], "the following arguments are required"),
    "unknown command": (["plan"], "invalid choice"),
    "no problem": (["solve"], "the following arguments are required: PROBLEM.yaml"),
    "unknown mode": (["solve", CONTENTION, "--mode", "quick"], "invalid choice: 'quick'"),
    "no such file": (["solve", "nowhere.yaml"], "nowhere.yaml: No such file"),
    "not YAML": (["solve", "{tmp}/bad.yaml"], "bad.yaml: not YAML"),
    "not a problem": (["solve", "{tmp}/list.yaml"], "list.yaml: problem: "),
    "unknown key": (
        ["solve", "{tmp}/key.yaml"],
        "key.yaml: job a: deadlin: unknown key; did you mean deadline?",
    ),
    "negative time": (["solve", CONTENTION, "--time-limit", "-1"], "'-1'; expected seconds, 0 or more"),
    "no number": (["solve", CONTENTION, "--committed", "few"], "'few'; expected a whole number of 0 or more"),
    "no place for the plan": (["solve", CONTENTION, "--json", "{tmp}/no/where.json"], "No such file"),
    "unknown job": (["explain", CONTENTION, "t99"], "job t99: no such job"),
    "nothing to change": (["what-if", CONTENTION], "nothing to change"),
    "no such job to set": (
        ["what-if", CONTENTION, "--set", "t99.priority=2"],
        "--set t99.priority: no job 't99'",
    ),
    "no such job to drop": (["what-if", CONTENTION, "--drop", "t99"], "--drop: no job 't99'"),
    "no job to add": (["what-if", CONTENTION, "--add", "{tmp}/none.yaml"], "none.yaml: No such file"),
    "empty directory": (["compare", "{tmp}/empty"], "no problems there"),
    "unknown family": (["generate", "--family", "rush"], "generate: family: rush; expected one of"),
    "unknown feature": (["generate", "--features", "gaps"], "generate: features: gaps; expected some of"),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_is_one_line_and_exit_code_2(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text("jobs: [")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    (tmp_path / "empty").mkdir()
    (tmp_path / "key.yaml").write_text(
        "{slots: 2, nodes: [{name: n, gpus: 1}], jobs: [{id: a, gpus: 1, slots: 1, deadlin: 2}]}"
    )
    arguments, message = MISTAKES[name]
    assert main([text.replace("{tmp}", str(tmp_path)) for text in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert message in said.err
    assert "Traceback" not in said.err
