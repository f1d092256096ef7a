"""`python -m training`: figures at once, and runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from training import launching
from training.__main__ import main
from training.config import LEVERS, TrainingConfig, load_config, plain_of
from training.probe import EXIT_MEMORY, Probe
from training.probe import probe as probe_in_a_process


def test_flops_of_a_shipped_model(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["flops", "--model", "llama-3.1-8b", "--seq-len", "8192", "--convention", "palm", "--json"]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["flops_per_token"] == pytest.approx(61.07e9, rel=1e-4)


def test_mfu_of_a_published_run(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["mfu", "--model", "llama-3.1-8b", "--seq-len", "8192", "--tokens-per-s-per-gpu", "5762"]
    asked += ["--gpu", "H100 SXM", "--precision", "bf16", "--convention", "no_embedding"]
    assert main(asked) == 0
    assert capsys.readouterr().out == (
        "33.74% of 989 TFLOP/s, H100 SXM bf16 dense (NVIDIA H100 datasheet); convention no_embedding\n"
        "42.00% of the best measured bf16 matmul\n"
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["flops", "--model", "lama-tiny", "--seq-len", "8"], "did you mean llama-tiny?"),
        (["flops", "--model", "llama-tiny", "--seq-len", "0"], "--seq-len: 0; expected 1 or more"),
        (
            ["mfu", "--model", "llama-tiny", "--seq-len", "8", "--tokens-per-s-per-gpu", "1", "--gpu", "H9"],
            "gpu: 'H9': its peak is not known",
        ),
        (["run", "gone.yaml"], "gone.yaml: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    asked: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(asked) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_importing_training_loads_neither_torch_nor_transformers() -> None:
    modules = "training.config, training.data, training.performance, training.preflight, training.trainer"
    heavy = "'torch' in sys.modules or 'transformers' in sys.modules"
    check = f"import sys, training, training.__main__, {modules}; sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


SMALL = "model: llama-micro, seq_len: 16, steps: 2, held_out_windows: 2"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("model: lama-tiny", "model: 'lama-tiny': no such model; did you mean llama-tiny?"),
        ("model: 'module:no.such:thing'", "expected module:PACKAGE.MODULE:FUNCTION"),
        ("micro_batc: 2", "micro_batc: unknown key; did you mean micro_batch?"),
        ("data: gone.txt", "data: 'gone.txt': no such file"),
        ("data: DAMAGED", "not a text file in UTF-8"),
        ("seq_len: 999999", "seq_len: 999999; llama-micro sees at most 1024 tokens"),
        ("global_batch: 7, micro_batch: 2", "global_batch 7: expected a multiple of micro_batch 2"),
        ("memory_gb: 0.001", "micro_batch: 8; needs"),
        ("layers: 3", "layers: 3; llama-micro has 2"),
        (
            "precision: fp8",
            "precision: fp8; expected a GPU with fp8 matmuls, this is a CPU; use bf16 or fp32",
        ),
    ],
)
def test_a_run_that_cannot_be_is_one_line_and_leaves_nothing(
    keys: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("DAMAGED").write_bytes(b"\xff\xfe\xfd")
    Path("c.yaml").write_text(
        yaml.safe_dump({**yaml.safe_load(f"{{{SMALL}}}"), **yaml.safe_load(f"{{{keys}}}")})
    )
    assert main(["run", "c.yaml"]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1
    assert not list(Path().glob("c/**/*.safetensors")) and not list(Path().glob("c/**/step-*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "taken"], "--output: taken: taken is a file; expected a directory"),
        (["--output", "taken/below"], "is a file; expected a directory"),
        (["--checkpoints", "taken"], "--checkpoints: taken: taken is a file; expected a directory"),
        (["--processes", "0"], "--processes: 0; expected 1 or more"),
        (["--processes", "two"], "argument --processes: invalid int value: 'two'"),
    ],
)
def test_a_run_that_has_no_place_or_no_process_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(f"{{{SMALL}}}")
    Path("taken").write_text("")
    try:
        code = main(["run", "c.yaml", *arguments])
    except SystemExit as left:
        code = int(str(left.code))
    said = capsys.readouterr().err
    assert code == 2 and message in said and said.count("\n") == 1
    assert not list(Path().glob("**/step-*"))


@pytest.mark.parametrize(("parallel", "precision"), [("hsdp", "fp32"), ("ddp", "bf16_master")])
def test_what_two_processes_cannot_do_is_said_before_they_start(
    parallel: str, precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"{{{SMALL}, parallel: {parallel}, precision: {precision}}}")
    assert main(["run", str(config), "--output", str(tmp_path / "out"), "--processes", "2"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_model_whose_shard_is_corrupt_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(f"{{{SMALL}}}")
    assert main(["run", "c.yaml"]) == 0
    shard = Path("c/model/model.safetensors")
    shard.write_bytes(shard.read_bytes()[:5000])
    Path("d.yaml").write_text("{model: c/model, seq_len: 16, steps: 2}")
    capsys.readouterr()
    assert main(["run", "d.yaml"]) == 2
    said = capsys.readouterr().err
    assert "c/model: cannot be loaded" in said and said.count("\n") == 1
    assert not list(Path().glob("d/**/step-*"))


def test_a_run_leaves_its_model_and_its_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(f"{{{SMALL}, micro_batch: 2}}")
    assert main(["run", "my.yaml"]) == 0
    assert len(Path("my/curve.jsonl").read_text().splitlines()) == 2
    assert Path("my/model/model.safetensors").is_file()
    assert [json.loads(line)["steps"] for line in Path("my/metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_comparison_measures_the_plain_loop_first_and_reports_the_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[TrainingConfig] = []

    def probe(config: TrainingConfig, processes: int) -> Probe:
        asked.append(config)
        return Probe(10.0 * int(config.micro_batch), flops_per_token=1e6)

    monkeypatch.setattr(launching, "probe", probe)
    Path("c.yaml").write_text(f"{{{SMALL}, global_batch: 4, micro_batch: auto, tune_probes: 2}}")
    assert main(["run", "c.yaml", "--compare"]) == 0
    said = capsys.readouterr().out
    assert "tuner: micro_batch 4: fastest of 2 probed of 3: 40 tokens/s" in said
    assert "plain baseline: 10 tokens/s, MFU" in said
    assert asked[-1] == plain_of(asked[-1], 1)
    summary = json.loads(Path("c/summary.json").read_text())
    assert summary["plain_tokens_per_s"] == 10.0
    assert summary["gain"] == summary["tokens_per_s"] / 10.0
    assert json.loads(summary["levers"])["micro_batch"] == 4
    assert main(["run", "c.yaml"]) == 0  # it is done, and tunes nothing
    assert len(asked) == 3


def test_a_probe_in_a_fresh_process_measures_and_one_that_cannot_run_says_why(tmp_path: Path) -> None:
    config = TrainingConfig(model="llama-micro", seq_len=16, global_batch=4, micro_batch=2)
    found = probe_in_a_process(config, steps=2)
    assert found.problem == ""
    assert found.tokens_per_s is not None and found.step_s is not None
    assert found.tokens_per_s == pytest.approx(4 * 16 / found.step_s)
    assert found.memory_bytes and found.flops_per_token and len(found.losses) == 3
    gone = probe_in_a_process(config.model_copy(update={"data": "gone.txt"}))
    assert gone.tokens_per_s is None and not gone.out_of_memory
    assert gone.problem == "training: data: 'gone.txt': no such file; expected `shakespeare` or a text file"


@pytest.mark.long
def test_a_run_that_tunes_and_compares_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(
        "{model: llama-tiny, seq_len: 64, global_batch: 8, micro_batch: auto, "
        "activation_checkpointing: auto, tune_probes: 3, steps: 6, held_out_windows: 2}"
    )
    assert main(["run", "c.yaml", "--compare"]) == 0
    summary = json.loads(Path("c/summary.json").read_text())
    assert summary["gain"] > 0.5 and 0 < summary["plain_mfu"] <= 1
    record = yaml.safe_load(Path("c/resolved.yaml").read_text())["record"]
    assert len(record["probes"]) == 3 and "fastest of 3 probed of" in record["auto"]["micro_batch"]


def test_the_check_of_a_gpu_without_one_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-check"]) == 1
    said = capsys.readouterr().err
    assert said == "gpu-check: torch sees no GPU here; --cpu measures a small model instead\n"


def test_levers_are_listed_with_what_they_do_to_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["levers"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in LEVERS)
    assert "preserved, bitwise" in said and "changed" in said


def test_when_one_of_several_processes_runs_out_of_memory_all_start_again_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    started: list[TrainingConfig] = []

    def launch(command: list[str], processes: int, *others: object) -> int:
        started.append(load_config(Path(command[command.index("run") + 1])))
        return EXIT_MEMORY if int(started[-1].micro_batch) > 2 else 0

    monkeypatch.setattr(launching, "launch", launch)
    Path("c.yaml").write_text(f"{{{SMALL}, global_batch: 16, micro_batch: 8}}")
    assert main(["run", "c.yaml", "--processes", "2"]) == 0
    assert [config.micro_batch for config in started] == [8, 4, 2]
    assert {config.global_batch for config in started} == {16}
    assert "micro_batch 8 -> 4: out of memory; on from the newest checkpoint" in capsys.readouterr().out
    monkeypatch.setattr(launching, "launch", lambda *asked: EXIT_MEMORY)
    assert main(["run", "c.yaml", "--processes", "2"]) == 1  # not even one sequence fits
