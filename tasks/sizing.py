"""How many servers keep waiting within a target: Erlang's C, for as many servers as one likes, whole or not.

Invariant: the answer rises with the load and is the smallest one that keeps the target. Arrivals are taken to
be Poisson and service times exponential with the measured mean, requests to wait in one queue for all
servers (A. K. Erlang, 1917). The cost of the choice: a burst within a sample, or a queue for each replica,
needs more; a fixed service time needs a little less.
"""

import math

from scipy.optimize import brentq
from scipy.special import gammaincc, gammaln

WIDEST = 12.0  # square roots of the load above it: no target needs more


def servers_needed(per_s: float, service_s: float, wait_s: float, share: float) -> float:
    """Servers, with a fraction, at which `share` of the requests wait at most `wait_s` to be served.

    `per_s` requests arrive in a second, each takes a server for `service_s` on average. Raises ValueError for
    values out of range.
    """
    if not (per_s >= 0 and service_s > 0 and wait_s >= 0 and 0 < share < 1 and math.isfinite(per_s)):
        raise ValueError(
            f"servers_needed: per_s {per_s}, service_s {service_s}, wait_s {wait_s}, share {share}; "
            "expected a finite load from 0, a service time above 0, a wait from 0, a share between 0 and 1"
        )
    busy = per_s * service_s
    if busy <= 0:
        return 0.0

    def late(servers: float) -> float:
        """The share that waits longer, less the share that may."""
        return waits(servers, busy) * math.exp(-(servers - busy) * wait_s / service_s) - (1 - share)

    most = busy + WIDEST * math.sqrt(busy) + WIDEST
    least = busy * (1 + 1e-9)
    if late(least) <= 0:
        return least
    return float(brentq(late, least, most, xtol=1e-9 * most))


def waits(servers: float, busy: float) -> float:
    """Erlang's C: the share of requests that find all servers busy; `busy` is the load in servers, below
    them.
    """
    # Erlang's B as a^n e^-a / Γ(n + 1, a), which holds for any n.
    log_blocked = (
        servers * math.log(busy) - busy - float(gammaln(servers + 1)) - math.log(gammaincc(servers + 1, busy))
    )
    blocked = math.exp(log_blocked)
    return blocked / (1 - busy / servers * (1 - blocked))
