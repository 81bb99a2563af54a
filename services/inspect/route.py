"""Shows where a prompt would be routed: a frontend chooses a decode instance, which then chooses a prefill instance."""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from msgspec.structs import asdict
from rich.console import Console
from rich.table import Table

from components.errors import DeadlineExceeded, PeerLost
from components.messaging.bus import Bus
from components.settings import MeshSettings
from components.wire.inspection import ExplainRoute, RouteExplained
from components.wire.instances import InstanceRecord
from components.wire.tokens import num_tokens
from services.inspect.mesh import Mesh, open_mesh

ANSWER_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Choice:
    by: InstanceRecord
    answer: RouteExplained


async def show_route(settings: MeshSettings, console: Console, asked: ExplainRoute, *, as_json: bool = False) -> None:
    async with open_mesh(settings) as mesh:
        choices = await _ask(mesh, asked)
    if as_json:
        console.out(json.dumps(as_fields(choices)), highlight=False)
    else:
        _print_choices(console, choices)


async def _ask(mesh: Mesh, asked: ExplainRoute) -> list[Choice]:
    """Return a frontend's choice, and that of the decode instance that it would choose."""
    frontends = mesh.book.of_role("frontend")
    if not frontends:
        raise SystemExit("no frontend is registered, and only a frontend can tokenize the prompt")
    frontend, answer = await first_answer(mesh.bus, frontends, asked)
    first = Choice(frontend, answer)
    decode = mesh.book.find("decode", answer.chosen)
    if decode is None:
        return [first]
    follow = ExplainRoute(
        token_ids=answer.token_ids, adapter=asked.adapter, session=asked.session, cache_salt=asked.cache_salt
    )
    return [first, Choice(decode, await _explain(mesh.bus, decode, follow))]


def as_fields(choices: Sequence[Choice]) -> dict[str, Any]:
    """An excluded instance has an infinite cost, which becomes null in JSON."""
    return {
        "tokens": num_tokens(choices[0].answer.token_ids),
        "choices": [
            {
                "role": choice.by.role,
                "instance": choice.by.instance_id,
                "policy": choice.answer.policy,
                "chosen": choice.answer.chosen or None,
                "why": choice.answer.why,
                "candidates": [
                    {**asdict(one), "cost": one.cost if one.cost is not None and math.isfinite(one.cost) else None}
                    for one in choice.answer.candidates
                ],
            }
            for choice in choices
        ],
    }


def _print_choices(console: Console, choices: Sequence[Choice]) -> None:
    frontend = choices[0]
    tokens = num_tokens(frontend.answer.token_ids)
    _print(console, f"frontend {frontend.by.instance_id}: a decode instance for {tokens} tokens", frontend.answer)
    for decode in choices[1:]:
        _print(console, f"decode {decode.by.instance_id}: a prefill instance", decode.answer)
        if not decode.answer.chosen:
            console.print(f"Decode would compute the prompt itself: {decode.answer.why}.")


async def first_answer(
    bus: Bus, frontends: list[InstanceRecord], asked: ExplainRoute
) -> tuple[InstanceRecord, RouteExplained]:
    """Query the frontends one by one until one answers, because a killed one's record stays in etcd for a while."""
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
