"""`services.<ROLE>` that also answers `.cached_blocks`, with the cached blocks, and loses each fifth batch of KV events."""

import os
from itertools import count
from typing import Any, Final

from components.errors import BackendUnavailable
from components.messaging.bus import Bus
from components.messaging.call_server import Endpoint
from components.process import run
from components.wire.kv_events import FetchKvDump, KvDumpPart, pack_hashes
from services.decode.__main__ import main as decode
from services.decode.config import DecodeSettings
from services.decode.service import DecodeService
from services.prefill.__main__ import main as prefill
from services.prefill.config import PrefillSettings
from services.prefill.service import PrefillService

ROLE: Final = os.environ["ROLE"]
LOST: Final = 5


def telling(endpoints: Any) -> Any:
    def wrapper(self: Any) -> list[Endpoint]:
        async def cached_blocks(_: FetchKvDump) -> KvDumpPart:
            blocks = await self._engine.between_steps(lambda engine: list(engine._memory.prefix._page_of))
            return KvDumpPart(number=0, blocks=pack_hashes(blocks))

        return [*endpoints(self), Endpoint("cached_blocks", FetchKvDump, cached_blocks)]

    return wrapper


def losing(publish: Any) -> Any:
    batches = count(1)

    async def wrapper(self: Bus, subject: str, data: bytes, reply: str = "") -> None:
        if subject.endswith(".kv_events") and next(batches) % LOST == 0:
            raise BackendUnavailable("lost")
        await publish(self, subject, data, reply)

    return wrapper


for service in (DecodeService, PrefillService):
    service.endpoints = telling(service.endpoints)  # type: ignore[method-assign]
Bus.publish_bytes = losing(Bus.publish_bytes)  # type: ignore[method-assign]

if __name__ == "__main__":
    run(prefill(PrefillSettings.read()) if ROLE == "prefill" else decode(DecodeSettings.read()))
