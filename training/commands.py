"""What `python -m training` does that trains or measures: run, levers, pack, gpu-check, probe."""

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.checkpoints import Checkpoints
    from training.config import TrainingConfig
    from training.launching import Baseline

PLAIN = "plain.json"  # below the output: what the plain loop reached
EXIT_WRONG, EXIT_FAILED, EXIT_STOPPED = 2, 1, 143


def add_commands(commands: Any) -> dict[str, Callable[[argparse.Namespace], int]]:
    """Add the commands to a parser; what runs each."""
    run = commands.add_parser("run", help="train, going on from the newest checkpoint")
    run.add_argument(
        "config",
        type=Path,
        help="a YAML file; `levers` lists what makes it fast, training/config.py all keys",
    )
    run.add_argument("--output", help="where all goes, a directory (default: the file's name)")
    run.add_argument("--checkpoints", help="where checkpoints go: a directory or s3://bucket/prefix")
    run.add_argument(
        "--processes", type=int, help="on this machine (default: one per GPU; not under torchrun)"
    )
    run.add_argument(
        "--compare", action="store_true", help="first measure a plain loop on the same hardware and batch"
    )
    commands.add_parser("levers", help="every lever: default, plain value, and what it does to the numbers")
    pack = commands.add_parser("pack", help="write text files as packed tokens")
    pack.add_argument("files", nargs="+")
    pack.add_argument("--model", default="llama-tiny", help="whose tokenizer")
    pack.add_argument("--output", required=True, help="a directory or s3://bucket/prefix")
    check = commands.add_parser("gpu-check", help="measure all of it on one GPU, in one table")
    check.add_argument("--cpu", action="store_true", help="the same table, small, on the processor")
    check.add_argument("--json", type=Path, help="also write the rows to this file")
    probe = commands.add_parser("probe", help="time a configuration for a few steps in this process")
    probe.add_argument("config", type=Path)
    probe.add_argument("--steps", type=int, default=3)
    probe.add_argument("--answer", type=Path, default=Path("/dev/stdout"))
    return {"run": _run, "levers": _levers, "pack": _pack, "gpu-check": _gpu_check, "probe": _probe}


def carried_out(work: Callable[[argparse.Namespace], int], asked: argparse.Namespace) -> int:
    """Run a command, with mistakes and failures as one line each; the exit code."""
    from training.checkpoints import CheckpointError
    from training.config import ConfigError
    from training.data import DataError
    from training.hardware import HardwareError
    from training.manifest import ManifestError
    from training.models import ModelError
    from training.objects import ObjectError
    from training.tokenizer import TokenizerError

    wrong = (ConfigError, DataError, HardwareError, ManifestError, ModelError, ObjectError, TokenizerError)
    try:
        return work(asked)
    except wrong as error:
        print(f"training: {error}", file=sys.stderr)
        return EXIT_WRONG
    except CheckpointError as error:
        print(f"training: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:  # a disk that is full, a place that cannot be written to
        where = f"{error.filename}: " if error.filename else ""
        print(f"training: {where}{error.strerror or error}", file=sys.stderr)
        return EXIT_FAILED


def _run(asked: argparse.Namespace) -> int:
    from training.config import ConfigError, load_config
    from training.launching import launch_workers
    from training.objects import is_url

    config = load_config(asked.config)
    output = Path(asked.output or asked.config.stem)
    _check_place("--output", output)
    if asked.checkpoints and not is_url(asked.checkpoints):
        _check_place("--checkpoints", Path(asked.checkpoints))
    if "RANK" in os.environ:
        for name in ("processes", "compare"):
            if getattr(asked, name):
                raise ConfigError(f"--{name}: torchrun has started the processes; expected a run without it")
        return _train(config, output, asked.checkpoints, worker=True)
    if asked.processes is not None and asked.processes < 1:
        raise ConfigError(f"--processes: {asked.processes}; expected 1 or more")
    processes = asked.processes or _gpus()
    config = _prepared(config, output, processes, asked)
    if processes > 1:
        return launch_workers(config, output, processes, asked.checkpoints, _say)
    return _train(config, output, asked.checkpoints, worker=False)


def _check_place(option: str, place: Path) -> None:
    """Refuse what cannot become a directory before anything is trained. Raises ConfigError."""
    from training.config import ConfigError

    there = next(path for path in (place, *place.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{option}: {place}: {there} is a file; expected a directory")
    if not os.access(there, os.W_OK):
        raise ConfigError(f"{option}: {place}: {there} cannot be written to; expected a directory that can")


def _prepared(
    config: "TrainingConfig", output: Path, processes: int, asked: argparse.Namespace
) -> "TrainingConfig":
    """The configuration with what needs measuring decided; the plain loop is measured when asked for."""
    from training.config import check_parallel
    from training.launching import as_before, decided, plain_baseline

    config.accumulation_for(processes)
    check_parallel(config, processes, processes)
    begun = bool(asked.checkpoints) or (output / "checkpoints").is_dir()
    if begun and (output / "resolved.yaml").is_file():
        config = as_before(config, output / "resolved.yaml")
    config = decided(config, processes, _say)
    if asked.compare:
        baseline = plain_baseline(config, processes, _say)
        if baseline is None:
            return config
        output.mkdir(parents=True, exist_ok=True)
        (output / PLAIN).write_text(json.dumps(asdict(baseline)), encoding="utf-8")
    return config


def _train(config: "TrainingConfig", output: Path, place: str | None, worker: bool) -> int:
    """Train in this process, one of the run's; its exit code."""
    from training.launching import gain
    from training.probe import EXIT_MEMORY
    from training.progress import Shown
    from training.trainer import OutOfMemory, Stopped, TrainingError, train, write_curve

    plain = _plain(output / PLAIN)

    def told(metrics: dict[str, Any]) -> dict[str, Any]:
        return gain(metrics, plain)

    with Shown(_say) as shown, _stop_noted() as stopping:
        report = _reporter(output, told, shown.step)
        try:
            result = train(config, output, _place(place, output), report, stopping, shown.line)
        except Stopped as stopped:
            shown.line(str(stopped))
            return EXIT_STOPPED
        except TrainingError as error:
            print(f"training: {error}", file=sys.stderr)
            return EXIT_MEMORY if worker and isinstance(error, OutOfMemory) else EXIT_FAILED
    if _first():
        write_curve(output / "curve.jsonl", result.progress.losses)
        summary = told(result.metrics)
        (output / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
        if "gain" in summary:
            _say(f"{summary['gain']:.2f} times the plain loop's {summary['plain_tokens_per_s']:.0f} tokens/s")
    _say(f"held-out loss {result.held_out_loss:.4f}; the model is in {result.directory}")
    return 0


def _plain(file: Path) -> "Baseline | None":
    """What an earlier start of the run measured of the plain loop. Raises ConfigError."""
    from training.config import ConfigError
    from training.launching import Baseline

    if not file.is_file():
        return None
    try:
        return Baseline(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file}: {error}; remove it, or measure again with --compare") from None


def _reporter(
    output: Path,
    told: Callable[[dict[str, Any]], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> Callable[[dict[str, Any]], None]:
    """What a run reports to: the metrics file, from the first step on that this attempt makes, and people."""
    from training.launching import MetricsFile

    file: MetricsFile | None = None

    def report(metrics: dict[str, Any]) -> None:
        nonlocal file
        file = file or MetricsFile(output / "metrics.jsonl", metrics["steps"] - 1)
        file.add(told(metrics))
        show(metrics)

    return report


@contextlib.contextmanager
def _stop_noted() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM came: the run looks at it between two steps."""
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGTERM, before)


def _place(place: str | None, output: Path) -> "Checkpoints | None":
    """Where checkpoints go; None is below the output."""
    from training.checkpoints import LocalCheckpoints, ObjectCheckpoints
    from training.objects import is_url

    if place is None:
        return None
    return ObjectCheckpoints(place, output / "restored") if is_url(place) else LocalCheckpoints(Path(place))


def _first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say(line: str) -> None:
    """Print a line, once for all processes of a run."""
    if _first():
        print(line, flush=True)


def _levers(asked: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from training.config import lever_table

    table = Table("lever", "default", "plain", "numerics", "what it is")
    for row in lever_table():
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0


def _pack(asked: argparse.Namespace) -> int:
    from training.corpus import pack_text

    count = pack_text(asked.files, asked.model, asked.output)
    print(f"{count} tokens in {asked.output}")
    return 0


def _gpu_check(asked: argparse.Namespace) -> int:
    from training.gpu_check import gpu_check

    return gpu_check(asked.cpu, asked.json)


def _probe(asked: argparse.Namespace) -> int:
    from training.config import load_config
    from training.probe import answer_probe

    return answer_probe(load_config(asked.config), asked.steps, asked.answer)


def _gpus() -> int:
    """Processes of a run when nobody says: one per GPU."""
    import torch

    return max(torch.cuda.device_count(), 1)
