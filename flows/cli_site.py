"""Commands about the site: up, down, worker, hour, status."""

import os
from dataclasses import asdict
from typing import Any
from zoneinfo import ZoneInfo

from flows import server
from flows.cli_answers import MistakeError, at, print_json, print_table, published, terminal
from flows.cli_jobs import inbox, next_plan
from flows.prefect_api import ApiError, call
from tasks import instants, serving
from tasks.cluster import Site
from tasks.nodes import node_states


def up(site: Site, host: str, port: int | None, plan_now: bool, as_json: bool) -> None:
    """Start the site's part on this machine; a new one plans the current slot at once."""
    running = server.up(site, host=host, port=port)
    planning = plan_now and server.SERVER in running.started
    if planning:
        found = call(running.api_url, "GET", "/deployments/name/hourly/now")
        call(running.api_url, "POST", f"/deployments/{found['id']}/create_flow_run", SCHEDULED)
    if as_json:
        print_json({**asdict(running), "planning": planning})
        return
    console = terminal()
    if running.started:
        console.print(f"started {', '.join(running.started)}; logs in {site.state / 'logs'}", soft_wrap=True)
    elif running.deployed:
        console.print("everything runs already; its schedules follow the changed cluster file now")
    else:
        console.print("everything runs already; nothing was changed")
    console.print(f"Prefect UI: {running.ui_url}")
    if planning:
        console.print("the current slot is being planned; see it with `slotwise plan`")


SCHEDULED = {"state": {"type": "SCHEDULED"}}


def down(site: Site, as_json: bool) -> None:
    """Stop all that runs for the site on this machine, jobs included."""
    stopped = server.down(site)
    if as_json:
        print_json({"stopped": stopped})
    else:
        print(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")


def worker(site: Site, node: str) -> int:
    """Serve a node until told to end."""
    from flows.worker import work

    return work(site, node)


def hour(site: Site, as_json: bool) -> None:
    """Run the hourly flow for the current slot in this process, with its runs on the site's server."""
    os.environ.update(server.client_environment(server.api_url(site)))
    from flows.hourly import hourly

    said = hourly(str(site.file))
    if as_json:
        print_json({"result": said})
    else:
        print(said)


def status(site: Site, as_json: bool) -> None:
    """Whether everything answers, what was planned last and what waits."""
    found = {
        "cluster": site.cluster.name,
        "file": str(site.file),
        "server": _server(site),
        "nodes": _nodes(site),
        "services": _services(site),
        "inbox": len(inbox(site)),
        "next_plan": next_plan(site),
        **_planned(site),
    }
    if as_json:
        print_json(found)
        return
    zone = ZoneInfo(site.cluster.time_zone)
    console = terminal()
    console.print(f"{found['cluster']} ({found['file']}), times in {site.cluster.time_zone}", soft_wrap=True)
    console.print(f"server: {found['server']['says']}", soft_wrap=True)
    plan = found["last_plan"]
    if plan:
        console.print(
            f"last plan: {at(plan['instant'], zone)} ({plan['trigger']}, {plan['mode']}), value "
            f"{plan['value']:.4g}, utilization {plan['utilization']:.0%}, {plan['placed']} jobs placed, "
            f"{plan['unplaced']} not"
        )
    else:
        console.print("last plan: none yet")
    counts = ", ".join(f"{count} {state}" for state, count in found["jobs"].items())
    console.print(f"next plan: {at(found['next_plan'], zone)}; {found['inbox']} files in the inbox")
    console.print(f"jobs: {counts or 'none'}")
    for trouble in found["trouble"]:
        console.print(f"trouble: {trouble}", soft_wrap=True)
    _print_rows(site, "Nodes", found["nodes"])
    _print_rows(site, "Services", found["services"])


def _print_rows(site: Site, title: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        names = [name.replace("_", " ") for name in rows[0]]
        print_table(site, names, [list(row.values()) for row in rows], title)


def _server(site: Site) -> dict[str, Any]:
    """Where the server is, whether it answers, and what runs beside it here."""
    running = server.running(site)
    try:
        url = server.api_url(site)
    except server.ServerError as error:
        return {"says": str(error), "url": None, "answers": False, "pids": {}}
    pids = running.pids if running else {}
    try:
        answers = call(url, "GET", "/health", timeout_s=5) is True
        says = f"answers at {url}"
    except ApiError as error:
        answers, says = False, str(error)
    if pids:
        says += f"; here run {', '.join(pids)}"
    return {"says": says, "url": url, "answers": answers, "pids": pids}


def _nodes(site: Site) -> list[dict[str, Any]]:
    names = [node.name for node in site.cluster.nodes]
    states = node_states(site.storage, names, instants.now(), site.lost_after)
    return [
        {
            "node": node.name,
            "gpus": node.gpus,
            "type": node.gpu,
            "state": states[node.name].state,
            "reason": states[node.name].reason,
        }
        for node in site.cluster.nodes
    ]


def _services(site: Site) -> list[dict[str, Any]]:
    """Per service: GPUs it is meant to have, those it says it has, and those it has yet to leave."""
    found = []
    for service in site.cluster.services:
        target = serving.target(site.storage, service.name)
        seen = serving.observed(site.storage, service.name)
        found.append(
            {
                "service": service.name,
                "target": sum(map(len, target.gpus.values())),
                "holds": sum(map(len, seen.gpus.values())),
                "to_leave": sum(map(len, target.leaving.values())),
                "target_version": target.version,
                "acted_on": seen.version,
            }
        )
    return found


def _planned(site: Site) -> dict[str, Any]:
    """The last plan, jobs by state, and what went wrong lately; empty before the first plan."""
    from tasks.ledger import rows

    try:
        with published(site) as connection:
            plans = rows(connection, "FROM plans ORDER BY instant DESC LIMIT 1")
            jobs = connection.execute("SELECT state, count(*) FROM jobs GROUP BY ALL ORDER BY ALL").fetchall()
            trouble = connection.execute(
                "SELECT step || ': ' || subject || ': ' || reason FROM degradations "
                "WHERE instant >= (SELECT max(instant) FROM plans) ORDER BY ALL"
            ).fetchall()
            missed = connection.execute(
                "SELECT count(*) FROM missed_slots WHERE instant > now() - INTERVAL 1 DAY"
            ).fetchall()[0][0]
    except MistakeError:
        return {"last_plan": None, "jobs": {}, "trouble": []}
    says = [str(row[0]) for row in trouble]
    if missed:
        says.append(f"{missed} slots were not planned in the last day")
    return {"last_plan": plans[0] if plans else None, "jobs": dict(jobs), "trouble": says}
