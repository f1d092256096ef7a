"""The command line: what people type, one function for each command, and what they are told when it is wrong.

Invariant: a person's mistake ends in one line for each on standard error and exit code 2, never a traceback.
Commands import what they need when they run, so that `slotwise --help` and shell completion stay quick.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tasks.cluster import Site

app = typer.Typer(
    name="slotwise",
    help="Keeps a GPU cluster full of the work that is worth most: optimise the day, commit the hour.",
    pretty_exceptions_enable=False,
    no_args_is_help=False,
)
ledger_app = typer.Typer(help="Make the database again from the facts, or compare the two.")
app.add_typer(ledger_app, name="ledger")

ClusterFile = Annotated[
    Path, typer.Option("--cluster", "-c", envvar="SLOTWISE_CLUSTER", help="The cluster file.", metavar="FILE")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with instants in UTC.")]
HERE = Path("cluster.yaml")


@app.command()
def submit(
    files: Annotated[
        list[Path], typer.Argument(help="Job specs (YAML); - is standard input.", metavar="FILE...")
    ],
    cluster: ClusterFile = HERE,
    json: AsJson = False,
) -> None:
    """Check job specs and leave them in the inbox; prints their ids."""
    from flows import cli_jobs

    cli_jobs.submit(_site(cluster), files, json)


@app.command()
def cancel(
    job: Annotated[str, typer.Argument(help="The job's id.")],
    cluster: ClusterFile = HERE,
    json: AsJson = False,
) -> None:
    """Ask for a job to end; a recurring one recurs no more."""
    from flows import cli_jobs

    cli_jobs.cancel(_site(cluster), job, json)


@app.command()
def jobs(
    cluster: ClusterFile = HERE,
    state: Annotated[
        list[str] | None, typer.Option("--state", "-s", help="Only jobs in this state; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 100,
    json: AsJson = False,
) -> None:
    """List jobs, the latest first."""
    from flows import cli_jobs

    cli_jobs.jobs(_site(cluster), state or [], limit, json)


@app.command()
def why(
    job: Annotated[str, typer.Argument(help="The job's id.")],
    cluster: ClusterFile = HERE,
    json: AsJson = False,
) -> None:
    """Say what has become of a job, and why it is where it is."""
    from flows import cli_jobs

    cli_jobs.why(_site(cluster), job, json)


@app.command()
def plan(
    cluster: ClusterFile = HERE,
    at: Annotated[str | None, typer.Option("--at", help="The plan in force then (ISO, UTC).")] = None,
    json: AsJson = False,
) -> None:
    """Show the latest plan: which job has which GPUs when, and what was left out."""
    from flows import cli_plan

    cli_plan.plan(_site(cluster), at, json)


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="A query, such as 'FROM jobs'; - is standard input.")],
    cluster: ClusterFile = HERE,
    json: AsJson = False,
) -> None:
    """Query the ledger's published copy. `FROM duckdb_views()` and the comments there say what it has."""
    from flows import cli_plan

    cli_plan.sql(_site(cluster), query, json)


@app.command()
def status(cluster: ClusterFile = HERE, json: AsJson = False) -> None:
    """Say whether server, nodes and services answer, what was planned last, and what waits."""
    from flows import cli_site

    cli_site.status(_site(cluster), json)


@app.command()
def up(
    cluster: ClusterFile = HERE,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option("--port", min=1, max=65535, help="Port; by default the last one, or a free one."),
    ] = None,
    plan_now: Annotated[bool, typer.Option(help="Plan the current slot at once.")] = True,
    json: AsJson = False,
) -> None:
    """Start server, workers and schedules on this machine; what runs already is left alone."""
    from flows import cli_site

    cli_site.up(_site(cluster), host, port, plan_now, json)


@app.command()
def down(cluster: ClusterFile = HERE, json: AsJson = False) -> None:
    """Stop all that `up` started here, running jobs included; they are tried again later."""
    from flows import cli_site

    cli_site.down(_site(cluster), json)


@app.command()
def worker(
    node: Annotated[str, typer.Argument(help="The node's name in the cluster file.")],
    cluster: ClusterFile = HERE,
) -> None:
    """Serve a node: take the work that is committed to its GPUs. Runs until told to end."""
    from flows import cli_site

    raise typer.Exit(cli_site.worker(_site(cluster), node))


@app.command()
def hour(cluster: ClusterFile = HERE, json: AsJson = False) -> None:
    """Plan and commit the current slot now, in this process."""
    from flows import cli_site

    cli_site.hour(_site(cluster), json)


@app.command()
def replay(
    jobs: Annotated[Path, typer.Option("--jobs", help="Recorded jobs, CSV or Parquet.", metavar="FILE")],
    json: Annotated[Path, typer.Option("--json", help="Where the figures go.", metavar="FILE")],
    cluster: ClusterFile = HERE,
    demand: Annotated[
        Path | None,
        typer.Option("--demand", help="Recorded demand: ts and a column a service.", metavar="FILE"),
    ] = None,
    start: Annotated[
        str | None, typer.Option("--start", help="First second of submit_s, or a duration such as 60d.")
    ] = None,
    days: Annotated[float | None, typer.Option("--days", min=1 / 24, max=3660, help="Length.")] = None,
    policies: Annotated[
        str, typer.Option("--policies", help="Some of fifo,backfill,greedy,slotwise,full,oracle.")
    ] = "fifo,backfill,greedy,slotwise",
    seed: Annotated[int, typer.Option("--seed", help="Of what is drawn.")] = 0,
    failures: Annotated[
        str | None,
        typer.Option("--failures", help="A file (node,from_s,to_s), or mean days between a node's."),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option("--ledger", help="Where the ledger goes; beside the figures.", metavar="FILE"),
    ] = None,
) -> None:
    """Replay recorded jobs and demand under several policies, with a virtual clock."""
    from flows import cli_replay

    cli_replay.replay(
        _site(cluster), (jobs, demand), (start, days), policies, (seed, failures), (json, ledger)
    )


@ledger_app.command()
def rebuild(cluster: ClusterFile = HERE, json: AsJson = False) -> None:
    """Make the database again from the facts alone."""
    from flows import cli_plan

    cli_plan.rebuild_ledger(_site(cluster), json)


@ledger_app.command()
def verify(cluster: ClusterFile = HERE, json: AsJson = False) -> None:
    """Compare the database with the facts; exit code 1 when they differ."""
    from flows import cli_plan

    raise typer.Exit(0 if cli_plan.verify_ledger(_site(cluster), json) else 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code: 0, 1 for a finding, 2 for a mistake, 130 for Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        return int(typer.main.get_command(app).main(given, prog_name="slotwise", standalone_mode=False) or 0)
    except typer.Abort:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()
        return 0
    except Exception as error:
        if not isinstance(error, _mistakes()):
            if not hasattr(error, "format_message"):  # of the command line itself
                raise
            error = typer.BadParameter(f"{error.format_message().rstrip('.')}; see slotwise --help")
        print(getattr(error, "message", None) or error, file=sys.stderr)
        return 2


def _mistakes() -> tuple[type[Exception], ...]:
    """Errors that are worded for people. Imported only when something is wrong."""
    from flows.cli_answers import MistakeError
    from flows.prefect_api import ApiError
    from flows.server import ServerError
    from flows.worker import WorkerError
    from tasks.ledger import LedgerError
    from tasks.specfile import SpecError
    from tasks.storage import StorageError

    return MistakeError, ApiError, ServerError, WorkerError, LedgerError, SpecError, StorageError


def _site(file: Path) -> "Site":
    from tasks.cluster import load_site
    from tasks.specfile import SpecError

    if file == HERE and not file.exists():
        raise SpecError(
            "there is no cluster.yaml here; name the cluster file with --cluster or SLOTWISE_CLUSTER"
        )
    return load_site(file)


if __name__ == "__main__":
    sys.exit(main())
