"""A planted secret shows nowhere: in no fact, log, ledger, error or file that the site makes."""

import io
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flows.prefect_api import ApiError, call
from flows.server import ServerError, up
from tasks import web
from tasks.cluster import Site
from tasks.runner import read_order, run_rank
from tasks.secrets import redacted, watch_logs
from tasks.storage import StorageError, open_storage
from tests.conftest import make_site
from tests.tasks.planned_hours import Runs, answer, ask, plan_hour, submit

PLANTED = "pl4nted-s3cret"
HOUR = datetime(2026, 12, 1, 6, tzinfo=UTC)
# Everything that a site may be given a secret in.
PLANTS = {
    "AWS_SECRET_ACCESS_KEY": f"aws-{PLANTED}",
    "PREFECT_API_AUTH_STRING": f"admin:prefect-{PLANTED}",
    "METRICS_TOKEN": f"metrics-{PLANTED}",
    "WEBHOOK_PASSWORD": f"hook-{PLANTED}",
    "HF_TOKEN": f"hub-{PLANTED}",
}
NOBODY = "127.0.0.1:9"  # where no one listens


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLANTS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A service whose source and webhook need secrets and do not answer."""
    source = {
        "prometheus": f"http://user:${{METRICS_TOKEN}}@{NOBODY}/?token=${{METRICS_TOKEN}}",
        "query": "up",
    }
    service = {
        "name": "chat",
        "demand": source,
        "expected_gpus": 1,
        "ramp_per_hour": 60,
        "priority": 8,
        "target": {"webhook": f"http://user:${{WEBHOOK_PASSWORD}}@{NOBODY}/hook?key=${{WEBHOOK_PASSWORD}}"},
    }
    return make_site(tmp_path, services=[service], full_mode_seconds=0)


def files_with_it(*places: Path) -> list[str]:
    files = [file for place in places for file in place.rglob("*") if file.is_file()]
    assert files
    return [str(file) for file in files if PLANTED.encode() in file.read_bytes()]


@pytest.mark.usefixtures("planted")
def test_an_hour_in_which_everything_with_a_secret_fails_shows_none(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    answer(site, HOUR)
    submit(site, "a")
    done = plan_hour(site, HOUR, Runs())
    assert {problem.subject for problem in done.problems} >= {"chat"}
    assert PLANTED not in repr(done.problems)
    assert "no answer" in repr(done.problems) or "refused" in repr(done.problems)
    assert files_with_it(site.state, site.file.parent / "storage") == []
    for (table,) in [tuple(row.values()) for row in ask(site, "SELECT table_name FROM duckdb_tables()")]:
        assert PLANTED not in repr(ask(site, f"FROM {table}"))
    assert PLANTED not in caplog.text


@pytest.mark.usefixtures("planted")
def test_a_program_that_prints_its_environment_and_fails_shows_no_secret(site: Site, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    answer(site, now)
    code = (
        "import os, sys; [print(*each) for each in os.environ.items()]; "
        "sys.exit('failed with ' + os.environ['HF_TOKEN'])"
    )
    submit(site, "prints", command=[sys.executable, "-c", code])
    runs = Runs()
    plan_hour(site, now, runs)
    (rank,) = runs.made.values()
    lines: list[str] = []
    order = read_order(site.storage_root, rank["key"], "prints", 0)
    outcome = run_rank(order, tmp_path / "node", lines.append)
    assert outcome.state == "failed"
    assert PLANTED not in "\n".join(lines)
    plan_hour(site, datetime.now(UTC), runs, "replan")
    (run,) = ask(site, "SELECT error FROM runs")
    assert "failed with ***" in run["error"]
    assert b"HF_TOKEN" in site.storage.read("logs/prints/1-0.log")
    assert files_with_it(site.state, site.file.parent / "storage", tmp_path / "node") == []


@pytest.mark.usefixtures("planted")
def test_errors_name_what_failed_without_the_secrets_in_its_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:{PLANTED}@{NOBODY}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StorageError) as storage:
        open_storage("s3://bucket/prefix").read("a")
    with pytest.raises(ApiError) as api:
        call(f"http://user:{PLANTED}@{NOBODY}/api", "GET", "/health", timeout_s=2)
    with pytest.raises(web.WebError) as hook:
        web.call("POST", f"http://{NOBODY}/?key=${{WEBHOOK_PASSWORD}}", limit_s=2)
    with pytest.raises(web.WebError, match="environment variable NOT_THERE is not set"):
        web.call("POST", f"http://{NOBODY}/${{NOT_THERE}}", limit_s=2)
    for error in (storage, api, hook):
        assert PLANTED not in str(error.value)
        assert "127.0.0.1" in str(error.value) or "bucket" in str(error.value)


@pytest.mark.usefixtures("planted")
def test_a_logged_traceback_shows_no_secret() -> None:
    watch_logs()
    out = io.StringIO()
    logger = logging.Logger("apart")
    logger.addHandler(logging.StreamHandler(out))
    try:
        raise RuntimeError(f"cannot connect to http://me:{PLANTED}@host with {PLANTS['HF_TOKEN']}")
    except RuntimeError:
        logger.exception("it failed with %s", PLANTS["METRICS_TOKEN"])
    assert "cannot connect to http://***@host" in out.getvalue()
    assert PLANTED not in out.getvalue()


def test_short_values_and_plain_words_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "job")
    assert redacted("job a: see http://host/path@2x") == "job a: see http://host/path@2x"


def test_a_server_for_others_needs_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_SERVER_API_AUTH_STRING", raising=False)
    site = make_site(tmp_path)
    with pytest.raises(ServerError, match="set PREFECT_SERVER_API_AUTH_STRING to user:password first"):
        up(site, host="0.0.0.0")
    assert not (site.state / "run").exists()


def test_nothing_unpickles_and_yaml_is_read_safely() -> None:
    """Model files are safetensors, or weights only; the sources say so."""
    root = Path(__file__).resolve().parents[2]
    unsafe = (
        "import pickle",
        "yaml.unsafe_load",
        "yaml.full_load",
        "weights_only=False",
        "trust_remote_code=True",
    )
    for package in ("allocator", "flows", "tasks", "training"):
        for file in (root / package).rglob("*.py"):
            source = file.read_text()
            assert not [word for word in unsafe if word in source], file
            assert source.count("torch.load(") == source.count("weights_only=True"), file
