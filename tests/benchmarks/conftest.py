"""Benchmarks of the flows stand on the same sites as the flows' tests; figures of all come in one table."""

from collections.abc import Callable

import pytest
from rich.console import Console
from rich.table import Table

from tests.flows.conftest import make_site, migrated_database

__all__ = ["make_site", "migrated_database"]
Figure = Callable[[str, str, str], None]
_figures = pytest.StashKey[list[tuple[str, str, str]]]()


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Add a row to the table at the end of the run: what it is, what was measured, what it should be."""
    rows = request.config.stash.setdefault(_figures, [])

    def add(what: str, measured: str, wanted: str) -> None:
        rows.append((what, measured, wanted))

    return add


def pytest_terminal_summary(config: pytest.Config) -> None:
    """Print the figures of all benchmarks that ran."""
    if rows := config.stash.get(_figures, []):
        table = Table("training on this machine", "measured", "wanted")
        for row in rows:
            table.add_row(*row)
        Console(width=120).print(table)
