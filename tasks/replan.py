"""Replan: why the plan of the hour is out of date, if it is."""

import math
from collections.abc import Mapping

from tasks import ledger
from tasks.allocate import CONSIDERED
from tasks.cluster import Site
from tasks.collect import ledger_directory


def reasons_to_replan(site: Site) -> list[str]:
    """What has happened since the last commitment that a new one could answer; nothing before the first plan.

    Counted in facts, not by time: the clocks of nodes differ.
    """
    with ledger.open_ledger(ledger_directory(site)) as connection:
        known = ledger.rows(connection, "SELECT max(considered) AS considered FROM plans")[0]["considered"]
        count = ledger.rows(connection, CONSIDERED)[0]["count"]
        demand = ledger.rows(connection, "SELECT service, arg_max(gpus, ts) AS gpus FROM demand GROUP BY ALL")
        given = ledger.rows(
            connection, "SELECT service, arg_max(gpus, from_at) AS gpus FROM serving_counts GROUP BY ALL"
        )
    if known is None:
        return []
    return reasons(
        count - known,
        {row["service"]: row["gpus"] for row in demand},
        {row["service"]: row["gpus"] for row in given},
    )


def reasons(new_facts: int, wanted: Mapping[str, float], given: Mapping[str, int]) -> list[str]:
    """The same from figures: facts that no plan has considered, GPUs last observed to be wanted and given."""
    found = []
    if new_facts > 0:
        found.append(f"{new_facts} new facts about jobs, runs or nodes")
    for service, gpus in wanted.items():
        if service in given and math.ceil(gpus) > given[service]:
            found.append(f"{service}: {gpus:.1f} GPUs wanted, {given[service]} given")
    return found
