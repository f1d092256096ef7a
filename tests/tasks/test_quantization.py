"""Quantization: smaller, about as good, and published only then."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks import quantization
from tasks.inference import infer
from tasks.program import FinalError, JobFailedError, is_published, publish_directory
from tasks.quantization import quantize_job
from tasks.schemes import SCHEMES, Device, Scheme
from tasks.specfile import SpecError
from tasks.storage import Storage, open_storage
from tests.tasks.kind_programs import Job, by_hand, program, small_model
from training.data import SHIPPED_TEXT

SECTION: dict[str, Any] = {"model": "models/small", "seq_len": 64, "windows": 4, "measure_speed": False}
pytestmark = pytest.mark.xdist_group("quantization")  # they share a model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("small"), steps=40)


@pytest.fixture
def filled(tmp_path: Path, model: Path) -> Storage:
    """A storage directory with the model in it."""
    storage = open_storage(str(tmp_path / "storage"))
    publish_directory(storage, "models/small", model)
    return storage


@pytest.mark.parametrize("scheme", ["int8_weight_only", "int8_dynamic", "int8_awq"])
def test_a_quantized_model_is_smaller_and_about_as_good(filled: Storage, tmp_path: Path, scheme: str) -> None:
    job = program(filled, tmp_path / "scratch", {**SECTION, "scheme": scheme})
    quantize_job(job)
    metrics = job.metrics.known
    assert metrics["bytes_after"] < 0.6 * metrics["bytes_before"]
    assert metrics["perplexity_after"] == pytest.approx(metrics["perplexity_before"], rel=0.05)
    assert metrics["perplexity_before"] < 100 < 264
    assert is_published(filled, "outputs/job/model")


def test_transformers_loads_the_published_model_with_integer_weights(filled: Storage, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantize_job(program(filled, tmp_path / "scratch", SECTION))
    directory = tmp_path / "storage" / "outputs" / "job" / "model"
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert loaded.model.layers[0].mlp.up_proj.weight.qdata.dtype == torch.int8
    assert AutoTokenizer.from_pretrained(directory)("To be")["input_ids"] == list(b"To be")


def test_inference_runs_on_a_quantized_model(storage: Storage, model: Path, tmp_path: Path) -> None:
    publish_directory(storage, "models/small", model)
    quantize_job(program(storage, tmp_path / "q", SECTION, "quantized"))
    storage.write("rows.jsonl", b'{"prompt": "What"}\n')
    section = {"input": "rows.jsonl", "model": "outputs/quantized/model", "max_new_tokens": 3}
    infer(program(storage, tmp_path / "i", section, "rows"))
    row = json.loads(storage.read("outputs/rows/rows-00000.jsonl"))
    assert row["error"] is None and row["completion_tokens"] == 3


def test_a_model_that_became_too_bad_is_not_published(
    filled: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torchao.quantization import IntxWeightOnlyConfig, PerAxis

    one_bit = getattr(torch, "int1")  # noqa: B009 -- torch's stubs do not have it
    crude = IntxWeightOnlyConfig(weight_dtype=one_bit, granularity=PerAxis(0))
    monkeypatch.setitem(SCHEMES, "int8_weight_only", Scheme(lambda: crude, None, "one bit"))
    job = program(filled, tmp_path / "scratch", SECTION)
    with pytest.raises(FinalError, match=r"not published: perplexity went from .* allows 5\.00%"):
        quantize_job(job)
    assert job.metrics.known["perplexity_after"] > 1.05 * job.metrics.known["perplexity_before"]
    assert filled.keys("outputs/") == []


def test_what_is_published_already_is_not_done_again(
    filled: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = program(filled, tmp_path / "scratch", SECTION)
    quantize_job(first)
    monkeypatch.setattr(quantization, "_quantized", None)  # would fail if it were called
    again = program(filled, tmp_path / "again", SECTION)
    quantize_job(again)
    assert again.metrics.known["perplexity_after"] == first.metrics.known["perplexity_after"]


def test_a_model_of_other_settings_is_not_put_in_the_place_of_one_that_is_read(
    filled: Storage, tmp_path: Path, model: Path
) -> None:
    quantize_job(program(filled, tmp_path / "scratch", SECTION))
    before = {key: filled.read(key) for key in filled.keys("outputs/")}
    changed: dict[str, dict[str, Any]] = {"scheme": {"scheme": "int8_dynamic"}, "seq_len": {"seq_len": 32}}
    for name, change in changed.items():
        told = f"spec.yaml: {name}: the model in outputs/job/model was made with another one; use another"
        with pytest.raises(SpecError, match=told):
            quantize_job(program(filled, tmp_path / name, {**SECTION, **change}))
    publish_directory(filled, "outputs/theirs/model", model)
    with pytest.raises(SpecError, match="model: the model in outputs/theirs/model was made with another one"):
        quantize_job(program(filled, tmp_path / "theirs", SECTION, "theirs"))
    assert before.items() <= {key: filled.read(key) for key in filled.keys("outputs/")}.items()


def test_a_quantized_model_is_not_quantized_again(filled: Storage, tmp_path: Path) -> None:
    quantize_job(program(filled, tmp_path / "scratch", SECTION, "once"))
    with pytest.raises(SpecError, match="model: 'outputs/once/model': is quantized already"):
        quantize_job(program(filled, tmp_path / "twice", {**SECTION, "model": "outputs/once/model"}, "twice"))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({**SECTION, "model": "models/gone"}, "model: 'models/gone': no model lies there"),
    ({**SECTION, "model": "../models/small"}, "expected a key inside the storage root"),
    ({**SECTION, "scheme": "int3"}, "scheme: 'int3': expected 'int8_weight_only', 'int8_dynamic'"),
    ({**SECTION, "shceme": "int8_dynamic"}, "shceme: unknown key; did you mean scheme?"),
    ({**SECTION, "data": "gone.txt"}, "data: 'gone.txt': no such object in"),
    ({**SECTION, "calibration": "gone.txt"}, "calibration: 'gone.txt': no such object in"),
    ({**SECTION, "data": "no.txt"}, "spec.yaml: data: 'no.txt': not a text file in UTF-8: 'utf-8' codec"),
    ({**SECTION, "calibration": "no.txt"}, "spec.yaml: calibration: 'no.txt': not a text file in UTF-8"),
    ({**SECTION, "data": "a.txt", "calibration": "a.txt"}, "calibration: 'a.txt' is scored, as data"),
    ({**SECTION, "scheme": "int4_awq"}, "scheme: 'int4_awq': it needs a GPU of compute capability 8.0"),
    ({**SECTION, "scheme": "fp8"}, "scheme: 'fp8': it needs a GPU of compute capability 8.9 or more"),
    ({**SECTION, "scheme": "int4_weight_only", "model": "models/gone"}, "compute capability 8.0 or more"),
    ({**SECTION, "seq_len": 5000}, "seq_len: 5000; the model sees at most 1024 tokens"),
]


@pytest.mark.parametrize(("section", "message"), WRONG)
def test_a_spec_that_cannot_work_is_one_line_and_is_not_tried_again(
    filled: Storage,
    tmp_path: Path,
    section: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filled.write("no.txt", b"\xff\xfe\x00")
    monkeypatch.setattr("training.models.load", None)  # no model is loaded before it is said
    job = Job("tasks.quantization", tmp_path / "storage", "wrong", section)
    assert job.run_here(quantize_job, monkeypatch) == 2
    assert message in job.said
    assert job.said.count("\n") == 1
    assert not job.output.exists()


def test_auto_tries_what_the_device_has_and_picks_the_smallest_or_the_fastest_that_passes(
    filled: Storage, tmp_path: Path
) -> None:
    for prefer in ("size", "speed"):
        section = {**SECTION, "scheme": "auto", "prefer": prefer, "measure_speed": prefer == "speed"}
        job = program(filled, tmp_path / prefer, section, prefer)
        quantize_job(job)
        report = json.loads(filled.read(f"outputs/{prefer}/model/quantization.json"))
        assert report["metrics"]["scheme"] == job.metrics.known["scheme"]
        text = filled.read(f"outputs/{prefer}/quantization.md").decode()
        head, _, *lines = [
            line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")
        ]
        table = {line[0]: dict(zip(head, line, strict=True)) for line in lines}
        assert list(table) == ["before", "int8_weight_only", "int8_dynamic"]
        assert table["before"]["greedy agreement"] == "100.0%"
        assert table["int8_dynamic"]["layers"] == "14/14" and table["before"]["layers"] == "0/14"
        why = {"size": "the smallest", "speed": "the fastest at a batch of 16"}[prefer]
        assert f"published: {job.metrics.known['scheme']}, {why}\n" in text
        gates = {name: line["gate"] for name, line in table.items()}
        assert gates.pop(job.metrics.known["scheme"]) == "published"
        assert sorted(gates.values()) == ["", "passed"]
        for note in (
            "int8_awq: int8_weight_only passed the gate without calibration",
            "int4_weight_only: it needs a GPU of compute capability 8.0 or more, and this is a processor",
            "fp8: it needs a GPU of compute capability 8.9 or more, and this is a processor",
        ):
            assert f"\n- {note}" in text
            assert any(said.startswith(note) for said in job.metrics.known["not_published"])
            assert note in filled.read(f"outputs/{prefer}/quantization.svg").decode()
    speeds = {name: float(line["tokens/s at 16"]) for name, line in table.items() if name != "before"}
    assert job.metrics.known["scheme"] == max(speeds, key=lambda name: speeds[name])
    assert job.metrics.known["tokens_per_s_at_256_after"] > 0


def test_auto_passes_over_a_scheme_that_the_library_refuses_and_calibrates_in_its_place(
    filled: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing() -> Any:
        raise NotImplementedError("no kernel\nfor these sizes")

    monkeypatch.setitem(SCHEMES, "int8_weight_only", Scheme(refusing, None, "refused"))
    job = program(filled, tmp_path / "scratch", {**SECTION, "scheme": "auto"})
    quantize_job(job)
    report = json.loads(filled.read("outputs/job/model/quantization.json"))
    assert report["metrics"]["scheme"] == "int8_dynamic"
    refused = "int8_weight_only: NotImplementedError: no kernel for these sizes"
    assert refused in report["metrics"]["not_published"]
    assert "\n| int8_awq | " in filled.read("outputs/job/quantization.md").decode()


@pytest.fixture
def uneven(model: Path, tmp_path: Path) -> Path:
    """The same model in other numbers: some inputs of its attention are large, and their weights small."""
    import torch

    from training.models import load
    from training.output import write_model

    changed = load(str(model))
    with torch.no_grad():
        for layer in changed.model.layers:
            layer.input_layernorm.weight[::8] *= 64
            for part in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, part).weight[:, ::8] /= 64
    write_model(changed, tmp_path / "uneven", model)
    return tmp_path / "uneven"


def test_calibration_keeps_the_precision_where_the_inputs_are_large_and_files_keep_the_calibration(
    uneven: Path, tmp_path: Path
) -> None:
    import torch

    from tasks.calibration import calibrate
    from tasks.schemes import quantize_layers
    from training.data import Windows
    from training.models import load
    from training.output import write_model

    text = (SHIPPED_TEXT / "hamlet.txt").read_bytes()
    windows = Windows(np.frombuffer(text, np.uint8).astype(np.int32), 64, 0)
    rows = windows.at(100, 4)[:, :-1]  # others than those that the layers are shown

    def outputs(model: Any) -> torch.Tensor:
        with torch.inference_mode():
            return torch.Tensor(model.eval()(input_ids=rows).logits)

    exact = load(str(uneven))
    wanted = outputs(exact)
    rounded = load(str(uneven))
    config = SCHEMES["int8_weight_only"].config
    assert config is not None
    quantize_layers(rounded, config())
    plain = outputs(rounded)
    calibrate(exact, config(), windows, 8)
    calibrated = outputs(exact)
    assert (calibrated - wanted).abs().mean() < 0.5 * (plain - wanted).abs().mean()
    write_model(exact, tmp_path / "written", uneven)
    assert torch.equal(outputs(load(str(tmp_path / "written"), dtype="auto")), calibrated)


def test_the_text_that_is_scored_is_not_calibrated_with(
    filled: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from training.data import Windows

    used: list[Any] = []

    def noted(windows: Windows, *places: int) -> Any:
        used.append(windows)
        raise RuntimeError("seen")

    monkeypatch.setattr(Windows, "at", noted)
    for name, more in {"same": {}, "other": {"calibration": "mine.txt"}}.items():
        filled.write("mine.txt", b"my own words " * 20)
        section = {**SECTION, "scheme": "int8_awq", "held_out": 0.25, **more}
        with pytest.raises(JobFailedError, match=r"spec\.yaml: scheme: int8_awq: RuntimeError: seen"):
            quantize_job(program(filled, tmp_path / name, section, name))
    same, other = (bytes(windows.tokens.astype(np.uint8)) for windows in used)
    whole = b"".join(path.read_bytes() + b"\0" for path in sorted(SHIPPED_TEXT.glob("*.txt")))
    assert same == whole[: len(same)] and len(same) / len(whole) == pytest.approx(0.75, abs=1e-3)
    assert other == b"my own words " * 20 + b"\0"


def test_by_hand_it_needs_neither_a_runner_nor_prefect(filled: Storage, tmp_path: Path) -> None:
    said = by_hand("tasks.quantization", tmp_path / "storage", SECTION, "mine")
    assert json.loads(said[said.index("{") :])["scheme"] == "int8_weight_only"
    assert is_published(filled, "outputs/mine/model")


def test_a_gate_on_agreement_fails_for_good_and_says_by_how_much(filled: Storage, tmp_path: Path) -> None:
    section = {**SECTION, "scheme": "int8_dynamic", "min_agreement": 1.0, "max_perplexity_increase": 0.0}
    job = Job("tasks.quantization", tmp_path / "storage", "gated", section)
    assert job.run() == 2  # not tried again
    assert "not published: perplexity went from" in job.said
    assert "max_perplexity_increase allows 0.00%" in job.metrics["message"]
    assert filled.keys("outputs/gated/") == []


def test_a_scheme_that_changes_no_layer_is_not_published(
    filled: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(model: Any, *_: Any) -> None:
        """What torchao does where no layer's sizes suit it: nothing, in silence."""

    monkeypatch.setattr(quantization, "calibrate", nothing)
    with pytest.raises(FinalError, match="none of its 14 linear layers has sizes that int8_awq takes"):
        quantize_job(program(filled, tmp_path / "scratch", {**SECTION, "scheme": "int8_awq"}))
    assert filled.keys("outputs/") == []


def test_a_library_that_is_not_there_is_named_before_the_model_is_loaded(
    filled: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llmcompressor", None)
    monkeypatch.setattr("training.models.load", None)
    with pytest.raises(
        SpecError, match=r"scheme: 'int4_gptq': it needs llmcompressor, .* 'slotwise\[gptq\]'"
    ):
        quantize_job(program(filled, tmp_path / "scratch", {**SECTION, "scheme": "int4_gptq"}))


def test_gptq_makes_a_model_of_4_bits_that_transformers_loads(storage: Storage, tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor", reason="llmcompressor is not installed (extra gptq)")
    from training.config import TrainingConfig
    from training.trainer import train

    config = TrainingConfig(model="llama-tiny", seq_len=64, steps=30, warmup=2, lr=2e-3, held_out_windows=1)
    publish_directory(storage, "models/tiny", train(config, tmp_path / "tiny").directory)
    section = {**SECTION, "model": "models/tiny", "scheme": "int4_gptq", "calibration_windows": 8}
    job = program(storage, tmp_path / "scratch", section)
    quantize_job(job)
    metrics = job.metrics.known
    assert metrics["bytes_after"] < 0.5 * metrics["bytes_before"]
    assert metrics["layers_quantized"] == 24  # of 28: the inputs of down_proj come in no whole groups
    storage.write("rows.jsonl", b'{"prompt": "What"}\n')
    section = {"input": "rows.jsonl", "model": "outputs/job/model", "max_new_tokens": 3}
    infer(program(storage, tmp_path / "i", section, "rows"))
    row = json.loads(storage.read("outputs/rows/rows-00000.jsonl"))
    assert row["error"] is None and row["completion_tokens"] == 3


EVERYWHERE = ["int8_weight_only", "int8_dynamic", "int8_awq"]
DEVICES = [
    (Device("cpu", "a processor", None), EVERYWHERE),
    (Device("cuda", "T4", (7, 5)), EVERYWHERE),
    (Device("cuda", "A100", (8, 0)), [*EVERYWHERE, "int4_weight_only", "int4_awq"]),
    (Device("cuda", "H100", (9, 0)), [*EVERYWHERE, "int4_weight_only", "int4_awq", "fp8"]),
]


@pytest.mark.parametrize(("device", "names"), DEVICES, ids=lambda value: getattr(value, "name", ""))
def test_a_device_runs_the_schemes_that_it_has(
    device: Device, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llmcompressor", None)
    assert [name for name, scheme in SCHEMES.items() if scheme.lacks(device) is None] == names
