"""What the README tells people to type works, in its order, on a site of its own with the real flows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flows.server import DEPLOYMENTS, ROOT
from tests.flows.conftest import MakeSite

README = ROOT / "README.md"


def commands() -> list[str]:
    """The slotwise commands of the README's shell blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("slotwise ")]


def test_the_files_and_folders_that_the_readme_names_are_there() -> None:
    named = re.findall(r"`((?:deployments|flows|tasks|allocator|training)/[^` ]*)`", README.read_text())
    assert len(named) >= 8
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_make_targets_that_the_readme_names_are_there() -> None:
    targets = set(re.findall(r"\bmake ([a-z-]+)", README.read_text())) - {"and"}
    assert {"demo", "test", "up", "down", "lint"} <= targets
    found = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets <= found


@pytest.mark.xdist_group("server")
def test_the_commands_of_the_readme_work_one_after_the_other(make_site: MakeSite) -> None:
    given = commands()
    assert given[0].startswith("slotwise up") and given[-2].startswith("slotwise down")
    laptop = {"slot_minutes": 10, "nodes": [{"name": "laptop", "gpus": 4}]}
    environment = os.environ | {"SLOTWISE_CLUSTER": str(make_site(**laptop).file)}
    # The last, after `down`, asks the published copy, which needs no server.
    for command in given:
        words = shlex.split(command, comments=True)[1:]
        words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip(), command
        if command.startswith("slotwise why"):
            assert "hello: " in done.stdout


def test_the_job_that_the_readme_shows_is_taken(tmp_path: Path) -> None:
    from tasks.cluster import load_site
    from tasks.jobs import read_job

    (shown,) = re.findall(r"^```yaml\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert read_job(shown, "README", load_site(DEPLOYMENTS.parent / "laptop.yaml")).id == "hello"
