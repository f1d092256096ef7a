"""Instants and durations as text and numbers. All UTC; a slot is known by the instant it begins."""

import re
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DURATION = re.compile(r"(?:(?P<days>\d+(?:\.\d+)?)d)?(?:(?P<hours>\d+(?:\.\d+)?)h)?"
                      r"(?:(?P<minutes>\d+(?:\.\d+)?)m)?(?:(?P<seconds>\d+(?:\.\d+)?)s)?")  # fmt: skip


def now() -> datetime:
    """The present instant."""
    return datetime.now(UTC)


def steady() -> float:
    """Seconds since this machine's boot, sleep included, by a clock that nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot() -> str:
    """Which boot of this machine this is."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def text(instant: datetime) -> str:
    """`2026-12-01T06:00:00Z`, with a fraction only where there is one."""
    return instant.astimezone(UTC).isoformat().replace("+00:00", "Z")


def parse(value: str) -> datetime:
    """The instant an ISO 8601 text names; without a zone it is UTC. Raises ValueError."""
    instant = datetime.fromisoformat(value)
    return instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)


def floor(instant: datetime, minutes: int) -> datetime:
    """The latest multiple of `minutes` since the epoch that is not after the instant."""
    step = timedelta(minutes=minutes)
    return EPOCH + (instant - EPOCH) // step * step


def parse_duration(value: str) -> timedelta:
    """`90s`, `45m`, `3h`, `1d12h`, `1h30m`. Raises ValueError for anything else, and for nothing at all."""
    match = DURATION.fullmatch(value.strip())
    if match is None or not value.strip():
        raise ValueError("expected a duration such as 45m, 3h or 1d12h")
    try:
        return timedelta(**{unit: float(count) for unit, count in match.groupdict().items() if count})
    except OverflowError:
        raise ValueError("expected a duration of fewer days") from None
