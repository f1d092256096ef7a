"""`python -m training run CONFIG | flops | mfu | predict | compare | diagnose | preflight`."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from training import diagnosis, figures, forecasts, hardware, models, preflight, trace

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
    for part in (figures, forecasts, diagnosis, preflight):
        part.register(commands)
    asked = parser.parse_args(arguments)
    try:
        if asked.command == "run":
            return _run(asked.config, asked.output or Path(asked.config.stem))
        text, code = asked.answer(asked)
        print(text)
        return int(code)
    except (models.ModelError, hardware.HardwareError, trace.TraceError) as error:
        print(f"training: {error}", file=sys.stderr)
        return EXIT_WRONG


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
