"""Sizing: Erlang's C against its textbook recursion, and what an operator may expect of the answer."""

import math

import pytest

from tasks.sizing import servers_needed, waits


def textbook_waits(servers: int, busy: float) -> float:
    """Erlang's C by the recursion for whole numbers."""
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = busy * blocked / (count + busy * blocked)
    return blocked / (1 - busy / servers * (1 - blocked))


@pytest.mark.parametrize(("servers", "busy"), [(1, 0.5), (3, 2.0), (10, 8.0), (100, 90.0), (1000, 960.0)])
def test_the_share_that_waits_is_erlangs(servers: int, busy: float) -> None:
    assert waits(servers, busy) == pytest.approx(textbook_waits(servers, busy), rel=1e-9)


@pytest.mark.parametrize("per_s", [0.01, 0.7, 5.0, 80.0, 400.0])
@pytest.mark.parametrize(("wait_s", "share"), [(0.0, 0.9), (1.0, 0.95), (4.0, 0.99)])
def test_rounded_up_it_is_the_fewest_servers_that_keep_the_target(
    per_s: float, wait_s: float, share: float
) -> None:
    service_s = 2.0
    busy = per_s * service_s

    def in_time(servers: int) -> bool:
        if servers <= busy:
            return False
        late = textbook_waits(servers, busy) * math.exp(-(servers - busy) * wait_s / service_s)
        return late <= 1 - share

    fewest = next(servers for servers in range(1, 2000) if in_time(servers))
    assert math.ceil(servers_needed(per_s, service_s, wait_s, share) - 1e-6) == fewest


def test_more_load_needs_more_servers_but_fewer_for_each_request() -> None:
    loads = [0.01 * 3**power for power in range(12)]
    needed = [servers_needed(load, 1.0, 0.5, 0.95) for load in loads]
    each = [servers / load for servers, load in zip(needed, loads, strict=True)]
    assert needed == sorted(needed)
    assert each == sorted(each, reverse=True)
    assert all(servers > load for servers, load in zip(needed, loads, strict=True))


def test_no_load_needs_no_server() -> None:
    assert servers_needed(0.0, 1.0, 0.5, 0.95) == 0.0


@pytest.mark.parametrize("broken", [{"per_s": -1.0}, {"per_s": math.inf}, {"service_s": 0.0}, {"share": 1.0}])
def test_values_out_of_range_are_refused(broken: dict[str, float]) -> None:
    good = {"per_s": 1.0, "service_s": 1.0, "wait_s": 1.0, "share": 0.9}
    with pytest.raises(ValueError, match="expected a finite load"):
        servers_needed(**(good | broken))
