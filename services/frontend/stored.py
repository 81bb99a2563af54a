"""Stored responses, and those that run in the background."""

import asyncio
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from typing import Annotated, Final

from pydantic import Field, TypeAdapter

from components.errors import (
    BackendUnavailable,
    Cancelled,
    DeadlineExceeded,
    NobodyListens,
    PeerLost,
    Rejected,
    UnknownResponse,
)
from components.messaging.bus import Bus
from components.messaging.call_server import Endpoint
from components.messaging.records import NoJetStream, Records
from components.openai.items import InputItem
from components.openai.responses import ResponseObject
from components.wire.codec import pack, unpack
from components.wire.responses import CancelResponse, ResponseUnderway, StoredResponse
from services.frontend.config import FrontendSettings

log = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = 5.0
RECONNECT_GRACE_S: Final = 5.0  # since our own reconnect: other frontends may reconnect later
ASK_RETRY_PAUSE_S: Final = 0.2
PUT_TIMEOUT_S: Final = 60.0  # how long to retry while NATS is unreachable
PUT_RETRY_PAUSE_S: Final = 0.5
SALT_BYTES: Final = 16
RESPONSE_ID: Final = re.compile(r"resp_[0-9a-f]{32}")
ITEMS: Final[TypeAdapter[list[InputItem]]] = TypeAdapter(list[Annotated[InputItem, Field(discriminator="type")]])
_INSTANCE_LOST: Final = "The instance working on this response was lost, or its time limit has passed. Try again."


@dataclass(frozen=True, slots=True)
class Remembered:
    input: str  # JSON
    earlier: str  # JSON
    owner: bytes

    @classmethod
    def of(cls, items: Sequence[InputItem], earlier: Sequence[InputItem], key: bytes) -> "Remembered":
        salt = os.urandom(SALT_BYTES)
        return cls(_dumped(items), _dumped(earlier), salt + _hash(key, salt))


class Underway:
    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.over = asyncio.Event()
        self.revision: int | None = None  # of its record, once stored
        self._task = task
        self._before = task.cancelling()
        self._cancelled = False
        self._stoppable = True

    def cancel(self) -> None:
        """Cancel it once. Ignored while it stores how it ended."""
        if self._stoppable and not self._cancelled:
            self._cancelled = True
            self._task.cancel()

    def ends(self) -> None:
        """Ignore cancellations from now on."""
        self._stoppable = False

    @contextmanager
    def cancellable(self) -> Iterator[None]:
        """Raises: Cancelled, in place of the asyncio.CancelledError that `cancel` caused."""
        try:
            yield
        except asyncio.CancelledError as exc:
            if self._cancelled and self._task.uncancel() <= self._before:
                raise Cancelled("the response was cancelled") from exc
            raise
        finally:
            self.ends()


class StoredResponses:
    def __init__(self, bus: Bus, records: Records, subject: str) -> None:
        self._bus = bus
        self._records = records
        self._subject = subject
        self._underway: dict[str, Underway] = {}

    def endpoint(self) -> Endpoint:
        return Endpoint("cancel_response", CancelResponse, self._cancel_here)

    async def put(self, response: ResponseObject, remembered: Remembered) -> None:
        record = StoredResponse(
            response=response.model_dump_json(),
            input=remembered.input,
            earlier=remembered.earlier,
            owner=remembered.owner,
            frontend=self._subject if response.status == "in_progress" else "",
        )
        mine = self._underway.get(response.id)
        if mine is None:
            await self._records.put(response.id, pack(record))
            return
        if not record.frontend:
            mine.ends()  # a cancellation would store it again
        # With the revision, a response that was deleted meanwhile stays deleted.
        revision = await self._records.put(response.id, pack(record), mine.revision)
        mine.revision = mine.revision if revision is None else revision

    async def put_end(self, response: ResponseObject, remembered: Remembered) -> None:
        """Store the end of a background response. Retry while NATS is unreachable: no client has it yet.

        Raises: MeshError, also if NATS is unreachable for PUT_TIMEOUT_S.
        """
        clock = asyncio.get_running_loop().time
        until_s = clock() + PUT_TIMEOUT_S
        while True:
            try:
                return await self.put(response, remembered)
            except BackendUnavailable:
                if clock() >= until_s:
                    raise
            await asyncio.sleep(PUT_RETRY_PAUSE_S)

    async def get(self, response_id: str, key: bytes) -> StoredResponse:
        """Raises: UnknownResponse, also if the response belongs to another API key."""
        return await self._with_outcome(response_id, await self._find(response_id, key))

    async def delete(self, response_id: str, key: bytes) -> None:
        """Delete a response; cancel it if it runs. Raises: UnknownResponse."""
        record = await self._find(response_id, key)
        if record.frontend:
            await self._ask(record.frontend, CancelResponse(response_id=response_id))
        await self._records.delete(response_id)

    async def cancel(self, response_id: str, key: bytes) -> StoredResponse:
        """Cancel a response if it runs. Raises: UnknownResponse; Rejected, if it is not one in the background."""
        record = await self._find(response_id, key)
        if not json.loads(record.response)["background"]:
            raise Rejected("Only responses in the background can be cancelled: close the connection of this one.")
        if record.frontend:
            await self._ask(record.frontend, CancelResponse(response_id=response_id))
        return await self.get(response_id, key)

    @contextmanager
    def underway(self, response_id: str) -> Iterator[Underway]:
        """The current task works on this response. A cancellation waits until this is left."""
        self._underway[response_id] = mine = Underway()
        try:
            yield mine
        finally:
            del self._underway[response_id]
            mine.over.set()

    async def _find(self, response_id: str, key: bytes) -> StoredResponse:
        data = await self._records.get(response_id) if RESPONSE_ID.fullmatch(response_id) else None
        record = None if data is None else unpack(data, StoredResponse)
        if record is None or not _owns(key, record.owner):
            raise UnknownResponse(f"Response with id '{response_id[:128]}' not found.")
        return record

    async def _with_outcome(self, response_id: str, record: StoredResponse) -> StoredResponse:
        """Return `record`, or a newer one; if its frontend is gone, return the response as failed.

        The failure is not stored: the frontend may have lost NATS only for a moment and still store an answer, or the
        response may have been deleted meanwhile.
        """
        if not record.frontend or await self._ask(record.frontend, CancelResponse(response_id=response_id, ask=True)):
            return record
        data = await self._records.get(response_id)  # it may have ended just now
        if data is None:
            raise UnknownResponse(f"Response with id '{response_id}' not found.")
        latest = unpack(data, StoredResponse)
        if not latest.frontend:
            return latest
        error = {"code": "server_error", "message": _INSTANCE_LOST}
        response = {**json.loads(latest.response), "status": "failed", "error": error}
        return StoredResponse(
            response=json.dumps(response), input=latest.input, earlier=latest.earlier, owner=latest.owner
        )

    async def _ask(self, frontend: str, request: CancelResponse) -> bool:
        """Return whether the response runs on `frontend`, or may run there.

        It may if the frontend does not answer in time, or may still be reconnecting to NATS.
        A cancellation is repeated until the frontend may no longer be reconnecting.
        """
        subject = f"{frontend}.cancel_response"
        while True:
            try:
                answer = await self._bus.call(subject, request, ResponseUnderway, timeout_s=CALL_TIMEOUT_S)
            except NobodyListens:
                if self._bus.since_reconnect_s() >= RECONNECT_GRACE_S:
                    return False
                if request.ask:
                    return True
                await asyncio.sleep(ASK_RETRY_PAUSE_S)
            except PeerLost:
                return False
            except DeadlineExceeded:
                return True
            else:
                return answer.underway

    async def _cancel_here(self, request: CancelResponse) -> ResponseUnderway:
        mine = self._underway.get(request.response_id)
        if mine is not None and not request.ask:
            mine.cancel()
            await mine.over.wait()
        return ResponseUnderway(underway=mine is not None)


async def open_stored(bus: Bus, settings: FrontendSettings, subject: str) -> StoredResponses | None:
    """Open the store; None, if it is switched off or NATS has no JetStream."""
    if settings.max_stored_responses == 0:
        return None
    records = Records(bus, f"{settings.namespace}.responses", settings.stored_config)
    try:
        await records.open()
    except NoJetStream as exc:
        log.warning("responses are not stored until this frontend is restarted", extra={"cause": exc.message})
        return None
    except BackendUnavailable as exc:
        log.warning("responses cannot be stored yet", extra={"cause": exc.message})
    return StoredResponses(bus, records, subject)


def items_before(record: StoredResponse) -> list[InputItem]:
    input_items = [item for text in (record.earlier, record.input) for item in ITEMS.validate_json(text)]
    return input_items + output_items(record)


def output_items(record: StoredResponse) -> list[InputItem]:
    return ITEMS.validate_json(json.dumps(json.loads(record.response)["output"]))


def _dumped(items: Sequence[InputItem]) -> str:
    return ITEMS.dump_json(list(items), exclude_none=True).decode()


def _hash(key: bytes, salt: bytes) -> bytes:
    return blake2b(key, digest_size=32, salt=salt).digest()


def _owns(key: bytes, owner: bytes) -> bool:
    salt, hashed = owner[:SALT_BYTES], owner[SALT_BYTES:]
    return len(salt) == SALT_BYTES and compare_digest(_hash(key, salt), hashed)
