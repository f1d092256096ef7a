"""`python -m training`: figures at once, and runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from training.__main__ import main


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


def test_a_run_leaves_its_model_and_its_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("my.yaml").write_text(
        "{model: llama-micro, seq_len: 16, steps: 2, micro_batch: 2, held_out_windows: 2}"
    )
    import signal

    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["run", "my.yaml"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(Path("my/curve.jsonl").read_text().splitlines()) == 2
    assert Path("my/model/model.safetensors").is_file()
