"""Finds problems of a mesh and suggests how to fix them."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from components.settings import MeshSettings
from services.inspect.facts import Facts, gather_facts
from services.inspect.findings import Finding, Level
from services.inspect.instance_checks import (
    check_clocks,
    check_contact,
    check_devices,
    check_heartbeats,
    check_instances,
    check_layouts,
    check_pages,
    check_prefill,
    check_transport,
    check_versions,
)
from services.inspect.server_checks import check_etcd, check_nats, check_nixl, check_shm

Check = Callable[[Facts], Iterator[Finding]]

OF_INSTANCES: Final[Sequence[Check]] = (
    check_instances,
    check_heartbeats,
    check_pages,
    check_contact,
    check_versions,
    check_layouts,
    check_devices,
    check_prefill,
    check_clocks,
    check_transport,
)


def findings(facts: Facts) -> list[Finding]:
    """Instances are checked only if etcd and NATS work, because otherwise they are unknown."""
    of_instances = OF_INSTANCES if facts.servers_work else ()
    checks = (check_etcd, check_nats, *of_instances, check_nixl, check_shm)
    return [finding for check in checks for finding in check(facts)]


async def show_doctor(settings: MeshSettings, console: Console, *, as_json: bool) -> bool:
    """Return whether nothing is wrong."""
    found = findings(await gather_facts(settings))
    if as_json:
        console.out(json.dumps([asdict(finding) for finding in found]), highlight=False)
    else:
        console.print(report(found))
        counts = {level: sum(finding.level is level for finding in found) for level in Level}
        console.print(f"\n{counts[Level.WRONG]} wrong, {counts[Level.NOTE]} to note, {counts[Level.OK]} ok")
    return not any(finding.level is Level.WRONG for finding in found)


def report(found: Sequence[Finding]) -> Table:
    marks = {Level.OK: ("ok", "green"), Level.NOTE: ("note", "yellow"), Level.WRONG: ("WRONG", "bold red")}
    table = Table.grid(padding=(0, 2, 0, 0))
    for finding in found:
        text = Text(finding.what)
        if finding.do:
            text.append(f"\n→ {finding.do}", style="cyan")
        table.add_row(Text(*marks[finding.level]), finding.check, text)
    return table
