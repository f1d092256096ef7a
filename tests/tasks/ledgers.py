"""A ledger of its own for a test: made from facts, asked, and read as a whole."""

import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tasks import ledger
from tasks.storage import Storage, open_storage
from tests.tasks.worked_hours import Facts

Tables = dict[str, list[tuple[Any, ...]]]


@pytest.fixture
def plain(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "storage"))


@pytest.fixture
def facts(plain: Storage) -> Facts:
    return Facts(plain)


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger without facts: copying it is quicker than making another."""
    directory = tmp_path_factory.mktemp("migrated")
    with ledger.open_ledger(directory):
        pass
    return ledger.ledger_file(directory)


@pytest.fixture
def directory(tmp_path: Path, migrated: Path) -> Path:
    directory = tmp_path / "ledger"
    directory.mkdir()
    shutil.copy(migrated, ledger.ledger_file(directory))
    return directory


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """Where no ledger has been yet."""
    return tmp_path / "new" / "ledger"


def query(directory: Path, text: str) -> list[dict[str, Any]]:
    with ledger.open_ledger(directory) as connection:
        return ledger.rows(connection, text)


def contents(file: Path) -> Tables:
    """All rows of all tables, sorted."""
    with duckdb.connect(str(file), read_only=True) as connection:
        names = connection.execute("SELECT table_name FROM duckdb_tables() ORDER BY 1").fetchall()
        return {name: sorted(connection.execute(f"FROM {name}").fetchall(), key=repr) for (name,) in names}
