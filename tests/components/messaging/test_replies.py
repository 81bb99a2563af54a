import asyncio
from typing import Any, cast

import pytest
from nats.aio.client import Client

from components.messaging import replies
from tests.waiting import until

pytestmark = pytest.mark.anyio


class Recorder:
    """A client that records published messages."""

    def __init__(self) -> None:
        self.is_connected = False
        self.published: list[str] = []

    async def publish(self, subject: str, _data: bytes, **_others: Any) -> None:
        self.published.append(subject)


async def test_a_call_is_repeated_only_while_nats_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repetitions filled the client's buffer while NATS was away, and other calls were refused."""
    monkeypatch.setattr(replies, "FIRST_REPEAT_S", 0.01)
    client = Recorder()
    call = replies._Call(cast("Client", client), "a", b"")
    asyncio.get_running_loop().call_later(1000, call.end, None)
    answer = asyncio.create_task(call.answer())
    await asyncio.sleep(0.1)
    assert client.published == ["a"]
    assert call.was_repeated, "its receiver may reconnect later than we: one refusal is not enough"
    client.is_connected = True
    await until(lambda: len(client.published) >= 3)
    call.end(None)
    assert await answer is None
