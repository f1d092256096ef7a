"""The command line of the allocator: solve, explain, what-if, compare, generate.

A mistake of the caller is one line on the error stream and exit code 2. Everything beyond the parser is
loaded by the command that needs it, so that help and errors are quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import contextmanager
from pathlib import Path

from allocator.fields import ProblemError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, NoReturn

    from rich.console import Console

    from allocator.plan import Plan
    from allocator.problem import Problem

MODES = ("fast", "full", "fifo", "backfill", "greedy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    try:
        chosen = _parser().parse_args(arguments)
        code: int = chosen.run(chosen)
    except ProblemError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            sys.stderr.close()  # the reader has gone; nothing is left to say
            return 1
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise ProblemError(f"{self.prog}: {message} (--help says more)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m allocator", description="Plan a day of GPUs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    solve = commands.add_parser("solve", help="plan a problem and show the plan")
    _problem_options(solve)
    solve.add_argument("--bound", action="store_true", help="prove how far the plan may be from the best")
    solve.add_argument(
        "--json", metavar="FILE", help="write the plan as JSON; - for the output instead of the grid"
    )
    solve.add_argument("--svg", metavar="FILE", help="draw the plan")
    solve.add_argument(
        "--committed", type=_count, default=1, metavar="K", help="slots marked as committed (default 1)"
    )
    solve.set_defaults(run=_solve)

    explain = commands.add_parser("explain", help="say why jobs are not in the plan, and what would help")
    _problem_options(explain)
    explain.add_argument(
        "jobs", nargs="*", metavar="JOB", help="ids of jobs; those left out when none is given"
    )
    explain.add_argument("--json", metavar="FILE", help="write the explanations as JSON; - for the output")
    explain.set_defaults(run=_explain)

    what_if = commands.add_parser("what-if", help="add, drop or change jobs and see what moves")
    _problem_options(what_if)
    what_if.add_argument("--drop", action="append", default=[], metavar="JOB", help="leave a job out")
    what_if.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="such as t02.priority=9 or slots=30"
    )
    what_if.add_argument("--add", action="append", default=[], metavar="FILE", help="a job, or jobs, as YAML")
    what_if.set_defaults(run=_what_if)

    compare = commands.add_parser("compare", help="compare the policies on all problems of a directory")
    compare.add_argument("directory", metavar="DIR", help="with *.yaml problems; or one file")
    compare.add_argument(
        "--full-seconds", type=_seconds, default=10.0, metavar="S", help="for full mode (10; 0: without it)"
    )
    compare.add_argument("--seed", type=int, default=0, metavar="N")
    compare.add_argument(
        "--json", metavar="FILE", help="write the figures; - for the output instead of the table"
    )
    compare.set_defaults(run=_compare)

    generate = commands.add_parser("generate", help="write a random problem as YAML")
    generate.add_argument("--seed", type=int, default=0, metavar="N")
    generate.add_argument("--gpus", type=int, metavar="G", help="of the cluster (16 to 64)")
    generate.add_argument("--jobs", type=int, metavar="J", help="asked for (as many as give the load)")
    generate.add_argument("--slots", type=int, default=24, metavar="S", help="the horizon (24)")
    generate.add_argument("--slot-minutes", type=int, default=60, metavar="M", help="of a slot (60)")
    generate.add_argument("--node-gpus", type=int, metavar="G", help="of a node")
    generate.add_argument("--load", type=float, metavar="X", help="job GPU-slots over all (1.2 to 3)")
    generate.add_argument("--family", metavar="NAME", help="like one of the scenarios, such as deadlines")
    generate.add_argument(
        "--features",
        metavar="A,B",
        help="what to lay over it: all, none, or some of running, holes, types, …",
    )
    generate.add_argument("--out", metavar="FILE", help="instead of the output")
    generate.set_defaults(run=_generate)
    return parser


def _problem_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", metavar="PROBLEM.yaml")
    parser.add_argument("--mode", choices=MODES, default="fast", help="fast unless said otherwise")
    parser.add_argument("--time-limit", type=_seconds, metavar="S", help="a cap on the search, in seconds")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--iterations",
        type=_count,
        metavar="N",
        help="steps of the search, whatever time they take; the same number and seed give the same plan",
    )


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}; expected seconds, 0 or more")
    return number


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of 0 or more")
    return int(text)


def _planned(chosen: argparse.Namespace, problem: Problem, bound: bool = False) -> Plan:
    from allocator import solve

    with _silent_libraries():
        return solve(
            problem,
            chosen.mode,
            seed=chosen.seed,
            iterations=chosen.iterations,
            time_limit=chosen.time_limit,
            bound=bound,
        )


@contextmanager
def _silent_libraries() -> Iterator[None]:
    """Keep the output ours: HiGHS prints a banner from C before it can be told not to."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _solve(chosen: argparse.Namespace) -> int:
    from allocator import load_problem
    from allocator.explain import with_reasons

    problem = load_problem(chosen.problem)
    plan = with_reasons(problem, _planned(chosen, problem, chosen.bound))
    if chosen.svg:
        from allocator.drawing import svg

        Path(chosen.svg).write_text(svg(problem, plan, committed=chosen.committed), encoding="utf-8")
    if chosen.json:
        _write(chosen.json, plan.to_dict())
    if chosen.json != "-":
        from allocator.picture import show

        show(_console(), problem, plan, committed=chosen.committed)
    return 0


def _explain(chosen: argparse.Namespace) -> int:
    from dataclasses import asdict

    from allocator import load_problem
    from allocator.explain import explain

    problem = load_problem(chosen.problem)
    plan = _planned(chosen, problem)
    placed = {placement.job for placement in plan.placements}
    jobs = chosen.jobs or [job.id for job in problem.jobs if job.id not in placed]
    with _silent_libraries():
        found = explain(problem, plan, jobs=jobs)
    if chosen.json:
        _write(chosen.json, [asdict(entry) for entry in found])
    if chosen.json != "-":
        from rich.markup import escape

        console = _console()
        for entry in found:
            if entry.job in placed:
                state = f"placed at slot {entry.earliest_start}"
            elif entry.earliest_start is None:
                state = "not placed"
            else:
                state = f"not placed, could start at slot {entry.earliest_start}"
            console.print(
                f"[bold]{escape(entry.job)}[/bold] {state}: {escape(entry.reason)}", highlight=False
            )
            if entry.remedy is not None:
                console.print(f"    would help: {escape(entry.remedy.text)}", highlight=False)
                console.print(
                    f"    try it: what-if {escape(entry.remedy.options)}", highlight=False, style="dim"
                )
        if not found:
            console.print("every job is in the plan")
    return 0


def _what_if(chosen: argparse.Namespace) -> int:
    from allocator import load_problem
    from allocator.difference import show_difference
    from allocator.what_if import change, parse_setting

    problem = load_problem(chosen.problem)
    added = [entry for name in chosen.add for entry in _jobs_of(name)]
    settings = [parse_setting(text) for text in chosen.set]
    if not (added or settings or chosen.drop):
        raise ProblemError("what-if: nothing to change; expected --add, --drop or --set")
    changed = change(problem, settings=settings, drop=chosen.drop, add=added)
    show_difference(_console(), problem, _planned(chosen, problem), changed, _planned(chosen, changed))
    return 0


def _jobs_of(name: str) -> list[Any]:
    import yaml

    try:
        data = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProblemError(f"{name}: not YAML: {' '.join(str(error).split())}") from None
    if isinstance(data, dict) and "jobs" in data:
        data = data["jobs"]
    return data if isinstance(data, list) else [data]


def _compare(chosen: argparse.Namespace) -> int:
    from allocator import load_problem
    from allocator.compare import compare, table

    where = Path(chosen.directory)
    files = [where] if where.is_file() else sorted([*where.glob("*.yaml"), *where.glob("*.yml")])
    if not files:
        raise ProblemError(f"{where}: no problems there; expected *.yaml files")
    found = []
    for file in files:
        problem = load_problem(file)
        with _silent_libraries():
            found.append(compare(problem, full_seconds=chosen.full_seconds, seed=chosen.seed))
    if chosen.json:
        _write(chosen.json, [entry.to_dict() for entry in found])
    if chosen.json != "-":
        console = _console()
        console.width = max(console.width, 132)  # a table that is cut says less than one that is scrolled
        console.print(table(found))
    return 0


def _generate(chosen: argparse.Namespace) -> int:
    from allocator.generate import FEATURES, generate, to_yaml

    features = None
    if chosen.features is not None:
        sets: dict[str, tuple[str, ...]] = {"all": FEATURES, "none": ()}
        features = sets.get(chosen.features) if chosen.features in sets else tuple(chosen.features.split(","))
    text = to_yaml(
        generate(
            chosen.seed,
            gpus=chosen.gpus,
            jobs=chosen.jobs,
            slots=chosen.slots,
            family=chosen.family,
            load=chosen.load,
            node_gpus=chosen.node_gpus,
            features=features,
            slot_minutes=chosen.slot_minutes,
        )
    )
    if chosen.out:
        Path(chosen.out).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


def _write(name: str, data: Any) -> None:
    import json

    text = json.dumps(data, indent=1) + "\n"
    if name == "-":
        sys.stdout.write(text)
    else:
        Path(name).write_text(text, encoding="utf-8")


def _console() -> Console:
    from rich.console import Console

    return Console()


if __name__ == "__main__":
    sys.exit(main())
