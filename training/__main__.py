"""`python -m training run CONFIG | flops | mfu | predict | ...`: train from a YAML file, or give a figure."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from training import diagnosis, figures, forecasts, hardware, models, preflight, trace
from training.commands import EXIT_WRONG, add_commands, carried_out


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; `--help` shows how a command is used."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_WRONG, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 2 for a mistake in what was asked, 1 for a run that failed."""
    parser = _Parser(prog="python -m training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    trains = add_commands(commands)
    for part in (figures, forecasts, diagnosis, preflight):
        part.register(commands)
    asked = parser.parse_args(arguments)
    if asked.command in trains:
        return carried_out(trains[asked.command], asked)
    try:
        text, code = asked.answer(asked)
        if text:
            print(text)
        return int(code)
    except (models.ModelError, hardware.HardwareError, trace.TraceError) as error:
        print(f"training: {error}", file=sys.stderr)
        return EXIT_WRONG


if __name__ == "__main__":
    sys.exit(main())
