"""A response in the background, and what two frontends do with it at once, a few turns of the loop apart."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from itertools import permutations, product
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from components.errors import BackendUnavailable, Cancelled, NobodyListens, UnknownResponse
from components.openai.responses import ResponseObject
from components.wire.responses import CancelResponse, ResponseUnderway
from services.frontend.stored import PUT_RETRY_PAUSE_S, RECONNECT_GRACE_S, Remembered, StoredResponses

pytestmark = pytest.mark.anyio
ID: Final = "resp_" + "0" * 32
MINE: Final = Remembered.of([], [], b"key")
MOST_TURNS: Final = 4  # between two events
PUT_TURNS: Final = 5  # a put waits for the disk, and for longer than other calls take


class Records:
    """One message of NATS each way."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.last = 0
        self.revisions: dict[str, int] = {}
        self.is_away = False

    async def put(self, key: str, value: bytes, revision: int | None = None) -> int | None:
        if self.is_away:
            raise BackendUnavailable("NATS is away")
        for _ in range(PUT_TURNS):
            await asyncio.sleep(0)
        if revision is not None and self.revisions.get(key) != revision:
            return None
        self.kept[key] = value
        self.last += 1
        self.revisions[key] = new = self.last
        await asyncio.sleep(0)
        return new

    async def get(self, key: str) -> bytes | None:
        if self.is_away:
            raise BackendUnavailable("NATS is away")
        await asyncio.sleep(0)
        found = self.kept.get(key)
        await asyncio.sleep(0)
        return found

    async def delete(self, key: str) -> None:
        await asyncio.sleep(0)
        self.kept.pop(key, None)
        self.revisions.pop(key, None)
        await asyncio.sleep(0)


class Two:
    """A frontend that works on a response, and another one."""

    def __init__(self) -> None:
        self.records = Records()
        self.is_away = False  # the first one, from NATS
        self.since_reconnect_s = math.inf  # since the other one's reconnect to NATS
        bus = SimpleNamespace(call=self._call, since_reconnect_s=lambda: self.since_reconnect_s)
        self.here, self.there = (StoredResponses(cast("Any", bus), cast("Any", self.records), name) for name in "ab")
        self.begun = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.deleted = False
        self.answers: list[str] = []  # of `cancel`
        self.work = asyncio.create_task(self._work())

    async def _call(self, subject: str, request: CancelResponse, *_: object, **__: object) -> ResponseUnderway:
        assert subject == "a.cancel_response"
        await asyncio.sleep(0)
        if self.is_away:
            raise NobodyListens("no responders")
        answer = await self.here._cancel_here(request)
        await asyncio.sleep(0)
        return answer

    async def _work(self) -> None:
        def response(status: str) -> ResponseObject:
            return cast("ResponseObject", Made(status))

        with self.here.underway(ID) as mine:
            await self.here.put(response("in_progress"), MINE)
            self.begun.set()
            try:
                with mine.cancellable():
                    await self.goes_on.wait()
                    await self.here.put_end(response("completed"), MINE)
            except Cancelled:
                await self.here.put_end(response("cancelled"), MINE)

    async def status(self) -> str | None:
        try:
            record = await self.there.get(ID, b"key")
        except UnknownResponse:
            return None
        return str(json.loads(record.response)["status"])


class Made:
    """As much of a response as the store looks at."""

    def __init__(self, status: str) -> None:
        self.id, self.status = ID, status

    def model_dump_json(self) -> str:
        return json.dumps({"id": ID, "status": self.status, "background": True, "output": []})


async def _read(two: Two) -> None:
    await two.status()


async def _cancel(two: Two) -> None:
    record = await two.there.cancel(ID, b"key")
    two.answers.append(json.loads(record.response)["status"])


async def _delete(two: Two) -> None:
    await two.there.delete(ID, b"key")
    two.deleted = True


async def _complete(two: Two) -> None:
    two.goes_on.set()


async def _away(two: Two) -> None:
    two.is_away = True


async def _back(two: Two) -> None:
    two.is_away = False


EVENTS: Final[dict[str, Callable[[Two], Awaitable[None]]]] = {
    "read": _read,
    "cancel": _cancel,
    "delete": _delete,
    "complete": _complete,
    "away": _away,
    "back": _back,
}


@pytest.mark.parametrize("first", EVENTS)
async def test_what_is_deleted_stays_so_and_an_answer_is_kept(first: str) -> None:
    """A read of a response whose frontend seemed lost stored "failed" over an answer, or after a delete.

    A cancellation that came while an answer was being stored put it there again, also after a delete.
    """
    for others in permutations([name for name in EVENTS if name != first], 3):
        for pauses in product(range(MOST_TURNS + 1), repeat=3):
            order, at = [first, *others], ([first, *others], pauses)
            two = Two()
            await two.begun.wait()
            tasks = []
            for name, pause in zip(order, [*pauses, 0], strict=True):
                tasks.append(asyncio.ensure_future(EVENTS[name](two)))
                for _ in range(pause):
                    await asyncio.sleep(0)
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert result is None or isinstance(result, UnknownResponse), (result, at)
            if two.deleted and not {"complete", "cancel"} & set(order):
                assert not two.records.kept, at
            two.is_away = False
            two.goes_on.set()
            await two.work
            status = await two.status()
            if two.deleted:
                assert status is None, at
            elif not two.deleted:
                assert status in {"completed", "cancelled"}, at
            assert "away" in order or "in_progress" not in two.answers, at


async def test_a_frontend_that_may_be_reconnecting_is_not_taken_for_lost() -> None:
    """After a restart of NATS, a client that polled another frontend read "failed" of a response that completed later.

    A cancellation did nothing meanwhile.
    """
    two = Two()
    await two.begun.wait()
    two.is_away, two.since_reconnect_s = True, RECONNECT_GRACE_S / 2
    assert await two.status() == "in_progress"
    two.since_reconnect_s = RECONNECT_GRACE_S
    assert await two.status() == "failed"
    two.since_reconnect_s = RECONNECT_GRACE_S / 2
    cancelling = asyncio.create_task(_cancel(two))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not cancelling.done()
    two.is_away = False
    await cancelling
    await two.work
    assert two.answers == ["cancelled"]


@pytest.mark.parametrize("deleted", [False, True])
async def test_an_answer_that_comes_while_nats_is_away_is_stored_later(deleted: bool) -> None:
    """An outage of more than two seconds lost the answer, which no client had. A deleted response stays deleted."""
    two = Two()
    await two.begun.wait()
    two.records.is_away = True
    two.goes_on.set()
    await asyncio.sleep(PUT_RETRY_PAUSE_S / 2)
    assert not two.work.done()
    if deleted:
        await two.records.delete(ID)
    two.records.is_away = False
    await two.work
    assert await two.status() == (None if deleted else "completed")
