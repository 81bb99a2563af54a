"""Where a prompt would go: a frontend chooses a decode instance, which then chooses a prefill instance."""

import asyncio
import math
from contextlib import suppress

from rich.console import Console
from rich.table import Table

from components.discovery.registry import join_registry
from components.errors import DeadlineExceeded, PeerLost
from components.messaging.bus import Bus, connect_bus
from components.settings import MeshSettings
from components.wire.inspection import ExplainRoute, RouteExplained
from components.wire.instances import InstanceRecord
from components.wire.tokens import num_tokens
from services.inspect.connection import one_line_errors

CONNECT_S = 8.0
ANSWER_S = 5.0


async def show_route(settings: MeshSettings, console: Console, asked: ExplainRoute) -> None:
    with one_line_errors(settings, "etcd", "NATS"):
        async with asyncio.timeout(CONNECT_S + 2 * ANSWER_S):
            await _show(settings, console, asked)


async def _show(settings: MeshSettings, console: Console, asked: ExplainRoute) -> None:
    async with (
        connect_bus(settings.nats_url, "inspect", settings.nats_access("inspect")) as bus,
        join_registry(settings.etcd_url, settings.namespace, settings.lease_ttl_s, settings.etcd_access()) as registry,
    ):
        frontends = registry.book.of_role("frontend")
        if not frontends:
            raise SystemExit("no frontend is registered, and only a frontend can tokenize the prompt")
        frontend, answer = await first_answer(bus, frontends, asked)
        tokens = num_tokens(answer.token_ids)
        title = f"frontend {frontend.instance_id}: a decode instance for {tokens} tokens"
        _print(console, title, answer)
        decode = registry.book.find(answer.chosen)
        if decode is None:
            return
        follow = ExplainRoute(
            token_ids=answer.token_ids, adapter=asked.adapter, session=asked.session, cache_salt=asked.cache_salt
        )
        answer = await _explain(bus, decode, follow)
        _print(console, f"decode {decode.instance_id}: a prefill instance", answer)
        if not answer.chosen:
            console.print(f"Decode would compute the prompt itself: {answer.why}.")


async def first_answer(
    bus: Bus, frontends: list[InstanceRecord], asked: ExplainRoute
) -> tuple[InstanceRecord, RouteExplained]:
    """Ask one frontend after another: a killed one's record stays in etcd for a while."""
    for frontend in frontends[:-1]:
        with suppress(PeerLost, DeadlineExceeded):
            return frontend, await _explain(bus, frontend, asked)
    return frontends[-1], await _explain(bus, frontends[-1], asked)


async def _explain(bus: Bus, record: InstanceRecord, asked: ExplainRoute) -> RouteExplained:
    return await bus.call(f"{record.subject}.explain_route", asked, RouteExplained, timeout_s=ANSWER_S)


def _print(console: Console, title: str, answer: RouteExplained) -> None:
    if not answer.candidates:
        console.print(f"{title}, by {answer.policy}: none ({answer.why})")
        return
    table = Table(title=f"{title}, by {answer.policy}")
    for name in ("", "instance", "cached", "queued", "running", "pages", "breaker", "cost"):
        table.add_column(name, justify="left" if name in {"", "instance", "breaker"} else "right")
    for candidate in answer.candidates:
        cost = candidate.cost
        table.add_row(
            "→" if candidate.instance_id == answer.chosen else "",
            candidate.instance_id,
            str(candidate.cached_tokens),
            str(candidate.queued_tokens),
            str(candidate.running),
            f"{candidate.used_pages}/{candidate.total_pages}",
            candidate.breaker,
            "" if cost is None else "too full" if math.isinf(cost) else f"{cost:.0f}",
        )
    console.print(table)
    console.print(f"{answer.chosen}: {answer.why}")
