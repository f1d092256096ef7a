"""Batch inference against the plain loop that generates one row after the other, and a model before and after
it is quantized, each in one run.

Rows/s are per second of processor time, of one thread: other work on the machine does not move them.
"""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.inference import infer
from tasks.program import publish_directory, quiet_libraries
from tasks.quantization import quantize_job
from tasks.storage import Storage, open_storage
from tests.tasks.kind_programs import program
from training.data import SHIPPED_TEXT

ROWS, NEW = 96, 48
STOPS = ["\n"]

pytestmark = pytest.mark.benchmark


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 3 M parameters that has read the plays for a while."""
    if given := os.environ.get("SLOTWISE_BENCHMARK_MODEL"):
        return Path(given)
    from training.config import TrainingConfig
    from training.trainer import train

    config = TrainingConfig(
        model="llama-tiny",
        seq_len=128,
        steps=100,
        warmup=5,
        lr=2e-3,
        checkpoint_every=1000,
        held_out_windows=4,
    )
    return train(config, tmp_path_factory.mktemp("tiny")).directory


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """Pieces of the plays, 16 to 200 characters long."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(SHIPPED_TEXT.glob("*.txt")))
    draw = random.Random(7)
    found = []
    for _ in range(ROWS):
        begin = draw.randrange(len(text) - 200)
        found.append(text[begin : begin + draw.randint(16, 200)])
    return found


def test_rows_per_second_against_one_row_at_a_time(model: Path, prompts: list[str], tmp_path: Path) -> None:
    import torch

    quiet_libraries()
    torch.set_num_threads(1)
    storage = open_storage(str(tmp_path / "storage"))
    publish_directory(storage, "model", model)
    storage.write("rows.jsonl", "".join(json.dumps({"prompt": p}) + "\n" for p in prompts).encode())
    table: list[tuple[str, str, float, float, float, dict[str, Any]]] = []
    for stop in ([], STOPS):
        plain, seconds = one_at_a_time(model, prompts, stop)
        named = f"all {NEW} new tokens" if not stop else "rows end at a line's end"
        table.append((named, "plain loop, fp32", ROWS / seconds, 1.0, 1.0, {}))
        for dtype in ("fp32",) if stop else ("fp32", "bf16"):
            name = f"{dtype}-{len(stop)}"
            got, found = ours(storage, tmp_path / name, name, dtype, stop)
            same = sum(a == b for a, b in zip(got, plain, strict=True)) / ROWS
            rate = ROWS / found["cpu_seconds"]
            table.append((named, f"batches, {dtype}", rate, rate * seconds / ROWS, same, found))
    print(f"\n{ROWS} rows, {NEW} new tokens; load {os.getloadavg()[0]:.1f}")
    print(
        f"{'rows':26}{'how':20}{'rows/s':>8}{'times':>7}{'same':>7}{'tok/s':>10}{'waste':>8}{'MFU':>7}{'MBU':>7}"
    )
    for rows, how, rate, times, same, more in table:
        figures = [more.get(key) for key in FIGURES]
        shown = "".join(
            f"{value:>{width}.3g}" if value is not None else " " * width
            for value, width in zip(figures, (10, 8, 7, 7), strict=True)
        )
        print(f"{rows:26}{how:20}{rate:8.2f}{times:7.2f}{same:7.1%}{shown}")


def test_a_model_before_and_after_it_is_quantized(model: Path, tmp_path: Path) -> None:
    import torch

    quiet_libraries()
    torch.set_num_threads(1)
    storage = open_storage(str(tmp_path / "storage"))
    publish_directory(storage, "model", model)
    section = {"model": "model", "scheme": "auto", "seq_len": 128, "windows": 16}
    job = program(storage, tmp_path / "scratch", section)
    quantize_job(job)
    print(f"\n{storage.read('outputs/job/quantization.md').decode()}")
    found = job.metrics.known
    print(
        f"picked {found['scheme']}: perplexity {found['perplexity_increase']:+.2%}, "
        f"{found['bytes_after'] / found['bytes_before']:.2f} of the size, "
        f"greedy tokens agree in {found['greedy_agreement']:.1%}"
    )


FIGURES = ("tokens_per_s", "padding_waste", "prefill_mfu", "decode_bandwidth_utilization")


def one_at_a_time(model: Path, prompts: list[str], stop: list[str]) -> tuple[list[str], float]:
    """What most people write first: a loop over `generate`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    more: dict[str, Any] = {"stop_strings": stop, "tokenizer": tokenizer} if stop else {}

    def complete(prompt: str) -> str:
        given = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            out = loaded.generate(
                input_ids=given["input_ids"],
                attention_mask=given["attention_mask"],
                max_new_tokens=NEW,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                **more,
            )
        text = str(tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True))
        return text[: text.find(stop[0])] if stop and stop[0] in text else text

    loaded.eval()
    complete(prompts[0])
    began = time.process_time()
    found = [complete(prompt) for prompt in prompts]
    return found, time.process_time() - began


def ours(
    storage: Storage, scratch: Path, name: str, dtype: str, stop: list[str]
) -> tuple[list[str], dict[str, Any]]:
    """The same rows through the whole job, loading the model and writing the rows among it."""
    section = {"input": "rows.jsonl", "model": "model", "max_new_tokens": NEW, "dtype": dtype, "stop": stop}
    job = program(storage, scratch, section, name)
    began = time.process_time()
    infer(job)
    seconds = time.process_time() - began
    lines = [line for key in storage.keys(f"outputs/{name}/rows-") for line in storage.read(key).splitlines()]
    return [json.loads(line)["completion"] for line in lines], {**job.metrics.known, "cpu_seconds": seconds}
