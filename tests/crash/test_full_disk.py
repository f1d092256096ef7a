"""A file system that is really full: an hour on it may fail, and loses, doubles and damages nothing.

Needs the right to mount one; `make_hostile` limits the size of files instead and needs nothing.
"""

import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasks import ledger
from tasks.collect import ledger_directory
from tests.crash.world import MINUTE, World

HOUR = datetime(2026, 12, 1, 6, tzinfo=UTC)
pytestmark = pytest.mark.long


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """The directory of a file system of 64 MB."""
    directory = tmp_path / "small"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(directory)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.mark.parametrize("left_kb", [0, 8, 64, 400, 1500, 4000])
def test_an_hour_on_a_full_disk_is_made_up_for_once_there_is_room(small: Path, left_kb: int) -> None:
    world = World(small, HOUR - 2 * MINUTE)
    world.submit("before", minutes=80)
    world.pass_minutes(2)
    assert world.hour() == 0
    world.pass_minutes(58)
    world.submit("new", minutes=10)
    world.demand("chat", 2.0, world.now - 10 * MINUTE)
    world.to_next_hour()
    filler = small / "filler"
    free = shutil.disk_usage(small).free
    filler.write_bytes(b"x" * max(free - left_kb * 1024, 0))
    world.hour()
    world.check(settled=False)
    filler.unlink()
    assert world.hour("replan") == 0
    world.check()
    world.finish()
    assert ledger.verify(ledger_directory(world.site), world.storage) == []
