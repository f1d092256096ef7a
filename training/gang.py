"""The tuner where a run's processes are there already, on one node or several: they measure together.

Invariant: the first process leads the search and the others follow, so that all run the same probes and end
with the same levers. A probe is one fresh process beside each of the run's, joined over a port of its own at
the run's address; when one of them fails the others are ended, as they would wait for it for ever. The cost:
the run's own processes hold their GPU's context meanwhile, and each probe starts as slowly as the run.
"""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training.config import LEVERS, ConfigError, TrainingConfig
from training.launching import as_before, decided, plain_baseline
from training.probe import EXIT_MEMORY, Probe, answered, probe_command
from training.processes import World, free_port
from training.tuner import open_levers

POLL_S = 0.1
ENDING_S = 15.0


def decided_together(
    config: TrainingConfig,
    resolved: Path,
    world: World,
    say: Callable[[str], None],
    beat: Callable[[str], None],
    stopping: Callable[[], bool],
    compare: bool = False,
) -> TrainingConfig:
    """The configuration with its open levers chosen, and the levers of the first process in all of the group.

    `resolved` is what an earlier start of the run left, if it is there: what it decided is taken. `beat`
    hears of each probe. `compare`: the plain loop is measured too, and the record holds what that reached
    (`plain`) and how long all of it took (`measuring_s`). Raises, in all, ConfigError when nothing runs, and
    Stopped when one is `stopping`.
    """
    if world.size == 1:
        return config

    def measure(setting: dict[str, Any], port: int) -> Probe:
        beat(f"a probe of {setting}")
        return _probe(config.model_copy(update=setting), port, world, stopping)

    def ask(tried: TrainingConfig, processes: int) -> Probe:
        fields, port = type(config).model_fields, free_port()
        setting = {
            name: getattr(tried, name) for name in fields if getattr(tried, name) != getattr(config, name)
        }
        _told(("probe", setting, port))
        return measure(setting, port)

    if world.rank == 0:
        try:
            chosen = _decided(config, resolved, world, say, ask, compare)
        except ConfigError as error:
            _told(("wrong", str(error)))
            raise
        _told(("chosen", {name: getattr(chosen, name) for name in [*LEVERS, "record"]}))
        return chosen
    while True:
        match _told(None):
            case ("probe", setting, port):
                measure(setting, port)
            case ("chosen", levers):
                return config.model_copy(update=levers)
            case ("wrong", problem):
                raise ConfigError(problem)


def _decided(
    config: TrainingConfig,
    resolved: Path,
    world: World,
    say: Callable[[str], None],
    ask: Callable[[TrainingConfig, int], Probe],
    compare: bool,
) -> TrainingConfig:
    """What the first process decides, with probes that all make."""
    if not (compare or open_levers(config)):
        return config
    if resolved.is_file():
        return as_before(config, resolved)
    began = time.monotonic()
    plain = plain_baseline(config, world.size, say, ask) if compare else None
    if open_levers(config) and config.tune_probes:
        config = decided(config, world.size, say, ask)
    if not compare:
        return config
    measured = {"plain": plain and asdict(plain), "measuring_s": time.monotonic() - began}
    return config.model_copy(update={"record": {**(config.record or {}), **measured}})


def _told(message: Any) -> Any:
    """The first process's message, in all."""
    import torch.distributed as dist

    box = [message]
    dist.broadcast_object_list(box, 0)
    return box[0]


def _probe(config: TrainingConfig, port: int, world: World, stopping: Callable[[], bool]) -> Probe:
    """Run this process's part of a probe; in the first, what was found."""
    import torch.distributed as dist

    from training.trainer import Stopped

    # torchrun's own store would be asked for in place of the probe's.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    environment["MASTER_PORT"] = str(port)
    with tempfile.TemporaryDirectory() as scratch, (Path(scratch) / "said").open("w+") as said:
        command, answer = probe_command(config, Path(scratch))
        child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=said)
        try:
            if _await(child, stopping):
                raise Stopped(0)
        finally:
            _end(child)
        said.seek(0)
        ends: list[Any] = [None] * world.size
        dist.all_gather_object(ends, (child.returncode, said.read()))
        failed = [end for end in ends if end[0] > 0]  # below 0: ended because another had failed
        code, text = next((end for end in failed if end[0] == EXIT_MEMORY), (failed or ends)[0])
        return answered(code, answer, text)


def _await(child: "subprocess.Popen[bytes]", stopping: Callable[[], bool]) -> bool:
    """Return when every process's child has ended, or one has failed; whether any process is to stop."""
    import torch
    import torch.distributed as dist

    while True:
        code = child.poll()
        counts = torch.tensor([code is None, bool(code), stopping()], dtype=torch.int64)
        dist.all_reduce(counts)
        running, failed, stops = counts.tolist()
        if failed or stops or not running:
            return bool(stops)
        time.sleep(POLL_S)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Have a child end, if it has not."""
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(ENDING_S)
    child.kill()
    child.wait()
