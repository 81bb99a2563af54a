"""The prompts that decode computes itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from components.discovery.book import InstanceBook
from components.messaging.fleet import Fleet
from components.messaging.liveness import Liveness
from components.routing.policy import PromptLoad
from components.routing.router import RouteChoice
from components.wire.heartbeat import Heartbeat
from components.wire.tokens import PromptBlocks, pack_tokens, seed_hash
from services.decode.prefill_choice import LocalPrefill, LocalPrefillReason, PrefillChoice
from tests.components.discovery.records import record
from tests.components.kv_transfer.fake_transfer import endpoint

SPEED = 5000.0  # prompt tokens/s of each


class Mesh:
    def __init__(self) -> None:
        book = InstanceBook()
        self.alive = Liveness(book, "prefill")
        self.fleet = Fleet(book, self.alive, "prefill", "least_load")
        kv = endpoint("p")
        for name in ("p1", "p2"):
            book.put(name, record(name, "e", role="prefill", model="m", kv=kv))
        engine: Any = SimpleNamespace(kv_region=SimpleNamespace(layout=kv.layout), adapters={})
        prefill: Any = SimpleNamespace(has_free_aux_slot=True, check=lambda _kv: None)
        self._choice = PrefillChoice(
            self.fleet,
            engine,
            prefill,
            lambda: PromptLoad(0, SPEED),
            model="m",
            max_local_prefill=16,
            local_prefill_on_queue=True,
        )

    def queue(self, name: str, tokens: int) -> None:
        self.alive.record_heartbeat(
            Heartbeat(
                instance_id=name,
                epoch="e",
                step=1,
                busy=bool(tokens),
                queued_tokens=tokens,
                prompt_tokens_per_s=SPEED,
                num_requests=1 if tokens else 0,
            )
        )

    async def choose(self) -> RouteChoice | LocalPrefill:
        blocks = PromptBlocks(pack_tokens(list(range(2000))), seed_hash("m"))
        return await self._choice.choose(blocks, 2000, adapter="", session="")


@pytest.mark.anyio
async def test_an_idle_instance_whose_breaker_is_open_keeps_no_prompt_from_being_computed_here() -> None:
    mesh = Mesh()
    mesh.queue("p1", 0)
    mesh.queue("p2", 100_000)
    chosen = await mesh.choose()
    assert isinstance(chosen, RouteChoice)
    assert chosen.instance_id == "p1"
    for _ in range(3):
        mesh.fleet.router.health.failed("p1", mesh.fleet.router.now_s)
    chosen = await mesh.choose()
    assert isinstance(chosen, LocalPrefill), "the queue of p2 takes 20 s"
    assert chosen.reason is LocalPrefillReason.QUEUES
