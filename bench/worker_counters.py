"""Counters of the workers of a mesh, from their metrics pages."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import httpx

from bench.processes import Server
from components.discovery.registry import join_registry
from components.wire.instances import Role

SETTLE_S: Final = 0.3  # time until transfers are counted


class Counted(NamedTuple):
    """A worker's counters since its start."""

    computed: float  # prompt tokens
    found: float  # prompt tokens in the prefix cache
    transfers: float  # complete ones

    def since(self, before: "Counted") -> "Counted":
        return Counted(*(now - then for now, then in zip(self, before, strict=True)))


NAMES: Final = {
    "kvmesh_prompt_tokens_total": "computed",
    "kvmesh_prefix_cache_hits_total": "found",
    "kvmesh_kv_transfer_seconds_count": "transfers",
}


def counted(page: str) -> Counted:
    """Parse a metrics page. Raises: TypeError, if it lacks a counter."""
    pairs = (line.split() for line in page.splitlines() if line and not line.startswith("#"))
    return Counted(**{NAMES[pair[0]]: float(pair[1]) for pair in pairs if pair[0] in NAMES})


class Counters:
    """Counters of all workers of some roles, since this object was created."""

    def __init__(self, server: Server, roles: Sequence[Role]) -> None:
        """`server`: a mesh run by `services.local`."""
        self._pages = asyncio.run(_metrics_pages(server, roles))
        self._before = self._read()

    def now(self) -> list[list[Counted]]:
        """Return the counters by role and worker."""
        return [
            [now.since(then) for now, then in zip(*pair, strict=True)]
            for pair in zip(self._read(), self._before, strict=True)
        ]

    def _read(self) -> list[list[Counted]]:
        time.sleep(SETTLE_S)
        return [[counted(httpx.get(url).raise_for_status().text) for url in some] for some in self._pages]


async def _metrics_pages(server: Server, roles: Sequence[Role]) -> list[list[str]]:
    facts = json.loads((server.log.parent / "local" / "running.json").read_text())
    async with join_registry(facts["etcd_url"], facts["namespace"], 10.0) as registry:
        return [[f"{r.http}/metrics" for r in registry.book.of_role(role) if r.http] for role in roles]
