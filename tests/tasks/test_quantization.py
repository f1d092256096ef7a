"""Quantization: smaller, about as good, and published only then."""

import json
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


def test_other_settings_are_done_anew(filled: Storage, tmp_path: Path) -> None:
    quantize_job(program(filled, tmp_path / "scratch", SECTION))
    again = program(filled, tmp_path / "again", {**SECTION, "scheme": "int8_dynamic"})
    quantize_job(again)
    report = json.loads(filled.read("outputs/job/model/quantization.json"))
    assert report["metrics"]["scheme"] == again.metrics.known["scheme"] == "int8_dynamic"


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
        lines = filled.read(f"outputs/{prefer}/quantization.md").decode().splitlines()
        assert [line.split(" | ")[0] for line in lines[4:]] == [
            "| before",
            "| int8_weight_only",
            "| int8_dynamic",  # int8_weight_only passed: nothing to gain from calibrating
        ]
    speeds = {line.split(" | ")[0]: float(line.split(" | ")[7]) for line in lines[4:]}
    assert f"| {job.metrics.known['scheme']}" == max(list(speeds)[1:], key=lambda name: speeds[name])
    assert filled.read("outputs/speed/quantization.svg").startswith(b"<svg")
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
    assert report["failed"] == ["int8_weight_only: NotImplementedError: no kernel for these sizes"]
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
    from tasks.schemes import quantization_argument
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
    plain = outputs(load(str(uneven), quantization_config=quantization_argument("int8_weight_only")))
    calibrate(exact, SCHEMES["int8_awq"].config(), windows, 8)
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


EVERYWHERE = ["int8_weight_only", "int8_dynamic", "int8_awq"]
DEVICES = [
    (Device("cpu", "a processor", None), EVERYWHERE),
    (Device("cuda", "T4", (7, 5)), EVERYWHERE),
    (Device("cuda", "A100", (8, 0)), [*EVERYWHERE, "int4_weight_only", "int4_awq"]),
    (Device("cuda", "H100", (9, 0)), [*EVERYWHERE, "int4_weight_only", "int4_awq", "fp8"]),
]


@pytest.mark.parametrize(("device", "names"), DEVICES, ids=lambda value: getattr(value, "name", ""))
def test_a_device_runs_the_schemes_that_it_has(device: Device, names: list[str]) -> None:
    assert [name for name, scheme in SCHEMES.items() if scheme.lacks(device) is None] == names
