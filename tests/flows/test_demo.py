"""The demonstration, as `make demo` runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("server")]


def test_the_demonstration_does_all_that_it_checks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flows.demo", "--directory", str(tmp_path / "a demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NO  " not in done.stdout
    assert done.stdout.count("yes  ") == 11
