"""Replan: why the plan of the hour is out of date, if it is."""

import math

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
    reasons = []
    if count > known:
        reasons.append(f"{count - known} new facts about jobs, runs or nodes")
    granted = {row["service"]: row["gpus"] for row in given}
    for row in demand:
        if row["service"] in granted and math.ceil(row["gpus"]) > granted[row["service"]]:
            wanted = f"{row['gpus']:.1f} GPUs wanted, {granted[row['service']]} given"
            reasons.append(f"{row['service']}: {wanted}")
    return reasons
