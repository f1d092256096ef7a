"""A seeded storm; see `chaos`. The same seed brings the same troubles, to be looked at again."""

from pathlib import Path

import pytest

from tests.crash.chaos import CLUSTER, slots, weather
from tests.crash.world import World
from tests.tasks.worked_hours import HOUR

SEED = 20261201


def test_the_same_seed_brings_the_same_troubles() -> None:
    nodes = ["node0", "node1"]
    assert list(slots(SEED, 200, nodes)) == list(slots(SEED, 200, nodes)) != list(slots(7, 200, nodes))


def test_a_short_storm_loses_doubles_and_shares_nothing(tmp_path: Path) -> None:
    storm = weather(World(tmp_path, HOUR, cluster=CLUSTER), SEED, 10)
    assert storm.counts["planners killed"] and storm.counts["jobs"]


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_a_storm_of_200_slots_loses_doubles_and_shares_nothing(tmp_path: Path, part: int) -> None:
    storm = weather(World(tmp_path, HOUR, cluster=CLUSTER), SEED + part, 50)
    print(f"\nchaos, seed {SEED + part}: {dict(sorted(storm.counts.items()))}")
    assert storm.counts["slots"] == 50


@pytest.mark.long
def test_two_storms_of_one_seed_go_the_same_way(tmp_path: Path) -> None:
    runs = [weather(World(tmp_path / name, HOUR, cluster=CLUSTER), 11, 12) for name in ("one", "two")]
    assert runs[0].lines == runs[1].lines
