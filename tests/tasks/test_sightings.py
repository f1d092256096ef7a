"""How old a lease is by control's own clock, whatever its date says."""

from pathlib import Path

import pytest

from tasks.sightings import Sightings

LOST_AFTER = 40.0
EVERY = 60.0  # between looks


class Looks:
    """Looks at one lease at control's pace; a renewal is (its date by its writer's clock) - (control's)."""

    def __init__(self, directory: Path) -> None:
        self.file, self.time = directory / "seen.json", 1000.0
        self.token = 0

    def look(self, dated_s: float, renewed: bool = True, trusted: bool = True, after: float = EVERY) -> float:
        self.time += after
        self.token += renewed
        sightings = Sightings(self.file, self.time, LOST_AFTER)
        age = sightings.age_s("lease", str(self.token), dated_s, trusted)
        sightings.keep()
        self.agrees = sightings.clock_agrees("lease")
        return age


@pytest.fixture
def looks(tmp_path: Path) -> Looks:
    return Looks(tmp_path)


def test_at_first_sight_a_date_is_all_there_is(looks: Looks) -> None:
    assert looks.look(500) == 500


def test_where_the_date_is_not_trusted_a_lease_counts_from_first_sight(looks: Looks) -> None:
    assert looks.look(500, trusted=False) == 0
    assert looks.look(560, renewed=False, trusted=False) == EVERY


@pytest.mark.parametrize("behind", [-1800, -30, 0, 30, 45, 1800])
def test_a_lease_that_is_renewed_is_young_whatever_its_writers_clock_says(
    looks: Looks, behind: float
) -> None:
    looks.look(behind)
    looks.look(behind)
    assert max(looks.look(behind + late) for late in (0, 3, 1, 2, 0)) <= 3
    assert looks.agrees == (abs(behind) <= 20)


def test_a_lease_that_was_renewed_long_before_this_look_is_as_old_as_its_date_says(looks: Looks) -> None:
    looks.look(1)
    looks.look(2)
    assert looks.look(58) >= 56  # its writer died a second after the last look


def test_a_lease_that_is_not_renewed_grows_older(looks: Looks) -> None:
    looks.look(2)
    looks.look(2)
    assert looks.look(62, renewed=False) >= EVERY
    assert looks.look(122, renewed=False) >= 2 * EVERY


@pytest.mark.parametrize("step", [-600, 86_400])
def test_a_step_of_either_clock_makes_no_living_lease_old(looks: Looks, step: float) -> None:
    looks.look(1)
    looks.look(1)
    assert looks.look(step + 1) < LOST_AFTER
    assert looks.look(step + 2) < LOST_AFTER
    assert looks.look(1) < LOST_AFTER  # set right again
    assert looks.look(2, after=3600) < LOST_AFTER


@pytest.mark.parametrize("content", [b"", b"[]", b'{"boot": "another", "seen": {}}', b'{"boot": 1}', b"\xff"])
def test_a_memory_that_is_lost_is_started_anew(looks: Looks, content: bytes) -> None:
    looks.look(1)
    looks.file.write_bytes(content)
    assert looks.look(500) == 500


def test_a_memory_that_cannot_be_kept_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "in-the-way").write_text("")
    sightings = Sightings(tmp_path / "in-the-way" / "seen.json", 1.0, LOST_AFTER)
    assert sightings.age_s("lease", "1", 5.0) == 5.0
    sightings.keep()
