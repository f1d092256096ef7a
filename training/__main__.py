"""`python -m training run CONFIG | flops | mfu`: train from a YAML file, or compute a figure at once."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from training import flops, hardware, models

EXIT_WRONG, EXIT_FAILED, EXIT_STOPPED = 2, 1, 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 2 for a mistake in what was asked, 1 for a run that failed."""
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train, going on from the newest checkpoint")
    run.add_argument("config", type=Path, help="a YAML file; training/config.py lists the keys")
    run.add_argument(
        "--output", type=Path, help="where checkpoints and the model go (default: the file's name)"
    )
    for name, help_text in (
        ("flops", "model FLOPs per token"),
        ("mfu", "the share of the peak that was used"),
    ):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("--model", required=True, help="a shipped name, a config.json or its directory")
        command.add_argument("--seq-len", type=int, required=True)
        command.add_argument("--convention", choices=list(flops.CONVENTIONS), default="matmul")
        command.add_argument("--json", action="store_true")
    share = commands.choices["mfu"]
    share.add_argument("--tokens-per-s-per-gpu", type=float, required=True)
    share.add_argument("--gpu", required=True)
    share.add_argument("--precision", default="bf16")
    asked = parser.parse_args(arguments)
    try:
        if asked.command == "run":
            return _run(asked.config, asked.output or Path(asked.config.stem))
        print(_figure(asked))
        return 0
    except (models.ModelError, hardware.HardwareError) as error:
        print(f"training: {error}", file=sys.stderr)
        return EXIT_WRONG


def _figure(asked: argparse.Namespace) -> str:
    if asked.seq_len < 1:
        raise models.ModelError(f"--seq-len: {asked.seq_len}; expected 1 or more")
    shape = models.shape_of(asked.model)
    per_token = flops.flops_per_token(shape, asked.seq_len, asked.convention)
    found: dict[str, Any] = {
        "model": asked.model,
        "parameters": shape.parameters,
        "seq_len": asked.seq_len,
        "convention": asked.convention,
        "flops_per_token": per_token,
    }
    if asked.command == "mfu":
        peak = hardware.published_peak(asked.gpu, asked.precision)
        found |= {
            "tokens_per_s_per_gpu": asked.tokens_per_s_per_gpu,
            "flops_per_s_per_gpu": per_token * asked.tokens_per_s_per_gpu,
            "peak_flops_per_s": peak.flops_per_s,
            "peak_source": peak.source,
            "mfu": flops.mfu(per_token, asked.tokens_per_s_per_gpu, peak.flops_per_s),
        }
    if asked.json:
        return json.dumps(found)
    if asked.command == "mfu":
        text = f"{found['mfu']:.2%} of {peak.flops_per_s / 1e12:g} TFLOP/s, {peak.source}"
    else:
        text = f"{per_token / 1e9:.3f} GFLOP per token; {shape.parameters:,} parameters"
    return f"{text}; convention {asked.convention}"


def _run(config_file: Path, output: Path) -> int:
    from training.checkpoints import CheckpointError
    from training.config import ConfigError, load_config
    from training.data import DataError
    from training.tokenizer import TokenizerError

    asked_to_stop = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    quiet = os.environ.get("RANK", "0") != "0"

    def say(line: str) -> None:
        if not quiet:
            print(line, flush=True)

    def report(metrics: dict[str, Any]) -> None:
        rate = (
            f", {metrics['tokens_per_s']:.0f} tokens/s, MFU {metrics['mfu']:.1%}" if "mfu" in metrics else ""
        )
        say(f"step {metrics['steps']}/{metrics['steps_total']}: loss {metrics['loss']:.4f}{rate}")

    try:
        config = load_config(config_file)
        from training.trainer import Stopped, TrainingError, train, write_curve

        try:
            result = train(config, output, report=report, stopping=lambda: asked_to_stop, log=say)
        except Stopped as stopped:
            say(str(stopped))
            return EXIT_STOPPED
        except TrainingError as error:
            print(f"training: {error}", file=sys.stderr)
            return EXIT_FAILED
        if not quiet:
            write_curve(output / "curve.jsonl", result.progress.losses)
        say(f"held-out loss {result.held_out_loss:.4f}; the model is in {result.directory}")
        return 0
    except (ConfigError, DataError, TokenizerError) as error:
        print(f"training: {error}", file=sys.stderr)
        return EXIT_WRONG
    except CheckpointError as error:
        print(f"training: {error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
