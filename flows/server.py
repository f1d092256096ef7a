"""Start and stop a site on this machine: the Prefect server, its deployments, workers, virtual services.

Invariant: `up` either returns a site that runs (server healthy, deployments made, workers polling) or leaves
nothing of what it started; `down` leaves no process and no port, also after a crash of anything here. Whoever
starts first wins a file lock, so two `up` at once start one site. The cost is a Prefect server on SQLite per
site: right for one machine and a few nodes, and replaced by environment variables (PostgreSQL) beyond that.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import flows
from flows.deploy import with_periods
from flows.prefect_api import ApiError, call
from flows.processes import (
    MARK,
    Process,
    alive,
    command,
    end,
    exit_when_told,
    marked,
    pause,
    recorded,
    resume,
    spawn,
    wait,
)
from tasks.cluster import Site
from tasks.instants import now, parse
from tasks.reconcile import GRACE_S
from tasks.secrets import redacted

ROOT = Path(flows.__file__).resolve().parent.parent
DEPLOYMENTS = ROOT / "deployments" / "prefect.yaml"
LOCAL = ("127.0.0.1", "localhost", "::1")
SERVER, DEPLOY, CONTROL = "server", "deploy", "worker-control"
INSTANCE = "instance.json"
RUN = "prefect.engine"  # in the command line of every flow run, see deployments/prefect.yaml
# Runs of the control pool at once: an hour, an ad-hoc one and re-plans; more wait in the server.
CONTROL_RUNS_AT_ONCE = 4

# Defaults for every process of a site; what the person's environment says comes first.
SETTINGS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_UI_API_URL": "/api",  # the browser may be on another machine
    "PREFECT_WORKER_QUERY_SECONDS": "2",
    "PREFECT_WORKER_HEARTBEAT_SECONDS": "30",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    # An hour of re-plans made ahead of time would all start at once after an outage.
    "PREFECT_SERVER_SERVICES_SCHEDULER_MIN_SCHEDULED_TIME": "PT5M",
    "PREFECT_LOGGING_COLORS": "false",
    "PREFECT_CLI_COLORS": "false",
    "PREFECT_CLI_PROMPT": "false",
    "PYTHONUNBUFFERED": "1",
}


class ServerError(Exception):
    """The site cannot be started or stopped; the message is one line for a person, without secrets."""

    def __init__(self, message: str) -> None:
        super().__init__(redacted(message))


@dataclass(frozen=True)
class Running:
    """A site that runs. `started` names what this `up` started, `deployed` says that it made deployments."""

    api_url: str
    ui_url: str
    pids: dict[str, int]
    started: tuple[str, ...] = ()
    deployed: bool = False


@dataclass(frozen=True)
class Instance:
    """What `up` notes down for `down` and for the next `up`."""

    mark: str
    file: str
    host: str
    port: int

    @property
    def url(self) -> str:
        """Where this machine reaches the server."""
        return f"http://{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{self.port}"


def up(
    site: Site,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    deployments: Path = DEPLOYMENTS,
    deadline_s: float = 300.0,
) -> Running:
    """Start what does not run yet of the site's part on this machine, and wait until it works.

    `deployments` is a prefect.yaml; they are made again when the server starts, or when they, the periods or
    the nodes in the cluster file have changed. Without `port` the last one is used again, or a free one.
    Raises ServerError, after stopping what it had started, when anything is not there by the deadline.
    """
    began, deadline = now(), time.monotonic() + deadline_s
    if host not in LOCAL and not os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        raise ServerError(
            f"--host {host} lets others in: set PREFECT_SERVER_API_AUTH_STRING to user:password first, and "
            "PREFECT_API_AUTH_STRING to the same on every machine"
        )
    if not deployments.is_file():
        raise ServerError(f"{deployments}: no such file; expected the deployments")
    with _lock(site):
        instance, processes = _instance(site), _alive(site)
        if instance is not None and processes and instance.file != str(site.file):
            raise ServerError(
                f"{site.state} is in use by {instance.file}, which runs; give {site.file} a state: of its own"
            )
        if SERVER not in processes:
            instance = _next_instance(site, instance, bool(processes), host, port)
        elif instance is None:
            raise ServerError(f"{_run(site) / INSTANCE} cannot be read; run `slotwise down` first")
        elif port not in (None, instance.port):
            raise ServerError(f"the server runs on port {instance.port} already; run `slotwise down` first")
        resume(marked(instance.mark))  # a `down` that was killed leaves workers paused
        start = _Start(site, instance, processes, began, deadline)
        try:
            with exit_when_told():
                deployed = start.server_and_deployments(deployments)
                start.the_rest()
                start.await_workers()
        except BaseException:
            if SERVER in start.started:
                _stop(site)
            else:  # what ran before goes on running
                end((processes[name] for name in (*start.started, DEPLOY) if name in processes), grace_s=5.0)
            raise
        processes.pop(DEPLOY, None)
        pids = {name: process.pid for name, process in processes.items()}
        return Running(f"{instance.url}/api", instance.url, pids, tuple(start.started), deployed)


def down(site: Site) -> list[str]:
    """Stop everything that `up` started and all that came of it; the names of what still ran."""
    if not _run(site).is_dir():
        return []
    with _lock(site):
        return _stop(site)


def running(site: Site) -> Running | None:
    """The site's server and what runs beside it on this machine, or None when its server does not run."""
    instance, processes = _instance(site), _alive(site)
    if instance is None or SERVER not in processes:
        return None
    pids = {name: process.pid for name, process in processes.items()}
    return Running(f"{instance.url}/api", instance.url, pids)


def api_url(site: Site) -> str:
    """Where the site's Prefect API is: this machine's own server, or PREFECT_API_URL. Raises ServerError."""
    if here := running(site):
        return here.api_url
    if given := os.environ.get("PREFECT_API_URL"):
        return given.rstrip("/")
    raise ServerError(
        f"no server runs for {site.file} on this machine; start it with `slotwise up`, "
        "or set PREFECT_API_URL to where it runs"
    )


def site_environment(site: Site, instance: Instance) -> dict[str, str]:
    """The environment of each process of a site."""
    return client_environment(f"{instance.url}/api") | {
        MARK: instance.mark,
        "PREFECT_HOME": str(site.state / "prefect"),
        "SLOTWISE_CLUSTER": str(site.file),
    }


def client_environment(url: str) -> dict[str, str]:
    """This environment, fit for a Prefect process: our settings, and this very code and Python first."""
    own = os.environ.get("PREFECT_SERVER_API_AUTH_STRING")  # who starts the server here may also call it
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **SETTINGS,
        **({"PREFECT_API_AUTH_STRING": own} if own else {}),
        **os.environ,
        "PREFECT_API_URL": url,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(paths),
    }


def log_tail(log: Path, most: int = 300) -> str:
    """The last words of a log, on one line."""
    try:
        lines = log.read_text(errors="replace")[-4 * most :].split("\n")
    except OSError:
        return "(no log)"
    words = " | ".join(line.strip() for line in lines if line.strip())
    return words[-most:] or "(empty log)"


def _commands(site: Site, instance: Instance) -> dict[str, list[str]]:
    """What runs on this machine, in the order in which it is started."""
    python, file = sys.executable, str(site.file)
    prefect = [python, "-m", "prefect"]
    serve = ["server", "start", "--host", instance.host, "--port", str(instance.port)]
    work = ["worker", "start", "--pool", "control", "--type", "process", "--name", CONTROL]
    limit = ["--limit", str(CONTROL_RUNS_AT_ONCE)]
    commands = {SERVER: [*prefect, *serve], CONTROL: [*prefect, *work, *limit]}
    for node in site.cluster.nodes:
        if node.address in LOCAL:
            command = [python, "-m", "flows.worker", node.name, "--cluster", file]
            commands[f"worker-{node.name}"] = command
    if all(node.gpu == "cpu" for node in site.cluster.nodes):
        for service in site.cluster.services:
            command = [python, "-m", "tasks.virtual_service", service.name, "--cluster", file]
            commands[f"service-{service.name}"] = command
    return commands


class _Start:
    """One `up` at work: what runs so far, and what of it was started now."""

    def __init__(
        self, site: Site, instance: Instance, processes: dict[str, Process], began: datetime, deadline: float
    ) -> None:
        self.site, self.instance, self.processes = site, instance, processes
        self.began, self.deadline = began, deadline
        self.environment = site_environment(site, instance)
        self.commands = _commands(site, instance)
        self.started: list[str] = []

    def server_and_deployments(self, file: Path) -> bool:
        """The server runs, and knows the deployments; whether they were made now."""
        noted = _run(self.site) / "deployed"
        nodes = [node.name for node in self.site.cluster.nodes]
        content = with_periods(file.read_text(), self.site) + repr(nodes)
        wanted = hashlib.sha256(content.encode()).hexdigest()
        known = noted.read_text() if noted.exists() else None
        self._spawn(SERVER)
        if SERVER not in self.started and known == wanted:
            return False
        self._deploy(file)
        noted.write_text(wanted)
        return True

    def the_rest(self) -> None:
        """All other processes run."""
        for name in self.commands:
            self._spawn(name)

    def await_workers(self) -> None:
        """The server has heard of each worker that was started here, since it was started."""
        missing = {name: self.processes[name] for name in self.started if name.startswith("worker-")}
        while missing:
            online: set[str] = set()
            for pool in ("control", "gpu"):
                with contextlib.suppress(ApiError):
                    found = call(f"{self.instance.url}/api", "POST", f"/work_pools/{pool}/workers/filter", {})
                    online |= {
                        str(each["name"]) for each in found if parse(each["last_heartbeat_time"]) > self.began
                    }
            missing = {name: process for name, process in missing.items() if name not in online}
            for name in missing:
                self._check(name, "has not reached the server")
            time.sleep(0.5)

    def _spawn(self, name: str) -> None:
        if name not in self.processes:
            log, records = _log(self.site, name), _run(self.site)
            self.processes[name] = spawn(name, self.commands[name], self.environment, log, records)
            self.started.append(name)

    def _deploy(self, file: Path) -> None:
        """Make pools, queues and deployments, in a process that loads its code while the server starts."""
        log = _log(self.site, DEPLOY)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        command = [sys.executable, "-m", "flows.deploy"]
        command += ["--cluster", str(self.site.file), "--file", str(file)]
        process = spawn(DEPLOY, command, self.environment, log, _run(self.site))
        self.processes[DEPLOY] = process
        while not _healthy(self.instance):
            self._check(SERVER, "is not healthy")
            time.sleep(0.25)
        left_s = max(0.0, self.deadline - time.monotonic())
        if wait([process], lambda process: not alive(process), left_s):
            raise ServerError(f"the deployments were not made in time; {log} ends: {log_tail(log)}")
        if not log.read_text().rstrip().endswith("deployed"):
            raise ServerError(f"the deployments could not be made; {log} ends: {log_tail(log)}")

    def _check(self, name: str, what: str) -> None:
        log = _log(self.site, name)
        if not alive(self.processes[name]):
            raise ServerError(f"{name} ended; {log} ends: {log_tail(log)}")
        if time.monotonic() > self.deadline:
            raise ServerError(f"{name} {what} in time; {log} ends: {log_tail(log)}")


def _stop(site: Site) -> list[str]:
    """Runs first, which need time to save and to say how they ended; then workers; the server last.

    Workers are paused meanwhile: one that is told to end kills its runs, and another would start the next.
    """
    processes, instance = _alive(site), _instance(site)
    server = processes.pop(SERVER, None)
    ours = {process.pid: process for process in processes.values()}
    if instance is not None:
        ours |= {each.pid: each for each in marked(instance.mark) if not server or each.pid != server.pid}
    commands = {pid: command(process) for pid, process in ours.items()}
    pause(
        process
        for pid, process in ours.items()
        if "worker" in commands[pid] or "flows.worker" in commands[pid]
    )
    end((process for pid, process in ours.items() if RUN in commands[pid]), grace_s=GRACE_S + 4.0)
    end(ours.values(), grace_s=3.0)
    if server is not None:
        end([server], grace_s=4.0)
    # A process that was being started while we looked is found now; no parent is left to start another.
    for _ in range(10):
        if instance is None or not (left := marked(instance.mark)):
            break
        end(left, grace_s=0.5)
    for record in _run(site).glob("*.json"):
        if record != _run(site) / INSTANCE:
            record.unlink(missing_ok=True)
    return [*processes, *([SERVER] if server else [])]


def _next_instance(site: Site, last: Instance | None, workers: bool, host: str, port: int | None) -> Instance:
    """A server to be started. Workers that outlived theirs know its address: it keeps it.

    The mark stays the site's own, so that whatever an earlier crash left behind is still found.
    """
    if last is not None and workers:
        host, port = last.host, last.port
    if port is None:
        port = last.port if last and last.host == host and _free(host, last.port) else _free_port(host)
    elif not _free(host, port):
        raise ServerError(f"port {port} on {host} is in use; choose another, or none for a free one")
    same = last is not None and last.file == str(site.file)
    instance = Instance(last.mark if last and same else uuid.uuid4().hex, str(site.file), host, port)
    temporary = _run(site) / ".instance"
    temporary.write_text(json.dumps(vars(instance)))
    temporary.replace(_run(site) / INSTANCE)
    return instance


def _instance(site: Site) -> Instance | None:
    try:
        return Instance(**json.loads((_run(site) / INSTANCE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _alive(site: Site) -> dict[str, Process]:
    return {name: process for name, process in recorded(_run(site)).items() if alive(process)}


def _healthy(instance: Instance) -> bool:
    try:
        return bool(call(f"{instance.url}/api", "GET", "/health", timeout_s=2.0) is True)
    except ApiError:
        return False


def _free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _run(site: Site) -> Path:
    return site.state / "run"


def _log(site: Site, name: str) -> Path:
    return site.state / "logs" / f"{name}.log"


@contextlib.contextmanager
def _lock(site: Site) -> Iterator[None]:
    """One `up` or `down` of a site at a time; it ends with its process, whatever happens."""
    try:
        _run(site).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServerError(f"{site.file}: state: {_run(site)} cannot be made: {error.strerror}") from None
    with (_run(site) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
