"""Records shared by all processes, in a JetStream stream that keeps the last message of each key.

They survive their writers and a restart of NATS. If NATS loses its data, an empty stream replaces the lost one. If NATS
restricts users' rights, only the administrator may create one: a stream can read and write any subject.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final, Self, TypeVar

import nats.errors
from nats.js.api import DiscardPolicy, Header, StorageType, StreamConfig
from nats.js.errors import APIError, BadRequestError, NoStreamResponseError, NotFoundError, ServiceUnavailableError

from components.aio import exact_cancellation
from components.errors import BackendUnavailable, DeadlineExceeded, MessageTooLarge
from components.messaging.bus import HEADERS_BYTES, Bus
from components.messaging.nats_errors import translated_nats_errors

log = logging.getLogger(__name__)
T = TypeVar("T")

TIMEOUT_S: Final = 2.0
CREATE_RETRY_PAUSE_S: Final = 10.0  # without permission, an attempt takes TIMEOUT_S
NO_STREAM: Final = 10059  # JetStream's codes
STREAM_EXISTS: Final = 10058  # with another configuration
OTHER_REVISION: Final = 10071
NO_JETSTREAM: Final = (None, 10039, 10076)  # no answer; not for the account; not on the server
ELECTION_S: Final = 10.0  # clusters elect a leader in four to nine seconds
ELECTION_PAUSE_S: Final = 0.3
COMMAND: Final = "`python -m services.frontend.response_stream`, with the administrator's access,"


@dataclass(frozen=True, slots=True)
class RecordsConfig:
    records: int
    bytes: int
    age_s: float
    replicas: int = 1  # cluster members that each keep all records


class NoJetStream(BackendUnavailable):
    """NATS has no JetStream, or this account may not use it."""


class Records:
    def __init__(self, bus: Bus, name: str, config: RecordsConfig) -> None:
        """`open` creates the stream if necessary, and so does a call that finds none."""
        self._bus = bus
        self._jetstream = bus.client.jetstream(timeout=TIMEOUT_S)
        self._config = config
        self._stream, self._prefix = name.replace(".", "-"), f"{name}.records"
        self._create_failed_s = -math.inf  # monotonic

    async def open(self) -> Self:
        """Create the stream, or give it this configuration in place of an earlier one.

        Raises: NoJetStream; BackendUnavailable, also if there is no stream and it cannot be created.
        """
        with self._errors():
            found = await self._found_config()
        if found is not None and _same(found, self._config):
            return self
        try:
            with self._errors():
                await self._create()
        except BackendUnavailable as exc:
            if found is None:
                raise
            log.warning(
                "the stream of stored responses has other settings than this frontend",
                extra={"stream": self._stream, "cause": exc.message},
            )
        return self

    async def make(self) -> None:
        """Raises: BackendUnavailable."""
        await self._repeated(self._create)

    async def put(self, key: str, value: bytes, revision: int | None = None) -> int | None:
        """Store or replace a record. All processes can read it when this returns.

        Args:
            revision: store it only if this is still the record's revision.
        Returns: the new revision; None if it was deleted, replaced or evicted since `revision`.
        Raises: MessageTooLarge, BackendUnavailable.
        """
        most = self._bus.client.max_payload - HEADERS_BYTES
        if len(value) > most:
            raise MessageTooLarge(f"a record has {len(value)} bytes, but NATS accepts {most}", bytes=len(value))
        return await self._repeated(lambda: self._put(key, value, revision))

    async def get(self, key: str) -> bytes | None:
        """Raises: BackendUnavailable."""
        return await self._repeated(lambda: self._get(key))

    async def delete(self, key: str) -> None:
        """Raises: BackendUnavailable."""
        await self._repeated(lambda: self._delete(key))

    async def _put(self, key: str, value: bytes, revision: int | None) -> int | None:
        try:
            return await self._publish(key, value, revision)
        except (NoStreamResponseError, NotFoundError):
            was_recreated = await self._create_lost()
        except BadRequestError as exc:
            if exc.err_code != OTHER_REVISION or revision is None:
                raise
            state = (await self._jetstream.stream_info(self._stream)).state
            was_recreated = state.last_seq < revision  # by another process: NATS had lost its data
            if not was_recreated:
                return None
        return await self._publish(key, value, None if was_recreated else revision)

    async def _get(self, key: str) -> bytes | None:
        try:
            # not `direct`, for the reason in components/permissions.py
            found = await self._jetstream.get_last_msg(self._stream, f"{self._prefix}.{key}")
        except NotFoundError as exc:
            if exc.err_code == NO_STREAM:  # the stream is gone, with all records
                await self._create_lost()
            return None
        data: bytes | None = found.data
        return data

    async def _delete(self, key: str) -> None:
        with suppress(NotFoundError):  # the stream is gone
            await self._jetstream.purge_stream(self._stream, subject=f"{self._prefix}.{key}")

    async def _repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        """With several members, repeat `call` while they may be electing a leader."""
        end_s = time.monotonic() + (ELECTION_S if self._config.replicas > 1 else 0.0)
        while True:
            try:
                with self._errors():
                    return await call()
            except BackendUnavailable:
                if time.monotonic() >= end_s:
                    raise
            await asyncio.sleep(ELECTION_PAUSE_S)

    async def _publish(self, key: str, value: bytes, revision: int | None = None) -> int:
        headers = None if revision is None else {Header.EXPECTED_LAST_SUBJECT_SEQUENCE: str(revision)}
        subject = f"{self._prefix}.{key}"
        sent = await self._jetstream.publish(subject, value, stream=self._stream, timeout=TIMEOUT_S, headers=headers)
        return int(sent.seq)

    async def _create_lost(self) -> bool:
        """Create the stream, unless it exists: another process may have created it, or it has no leader now.

        Returns: whether it was created.
        """
        if await self._found_config() is not None:
            return False
        if time.monotonic() < self._create_failed_s + CREATE_RETRY_PAUSE_S:
            raise self._not_created()
        try:
            await self._create()
        except BackendUnavailable:
            self._create_failed_s = time.monotonic()
            raise
        log.warning(
            "NATS has lost the stored responses, an empty stream takes their place", extra={"stream": self._stream}
        )
        return True

    async def _create(self) -> None:
        """Raises: BackendUnavailable, if NATS does not answer, as to users without the right."""
        wanted = StreamConfig(
            name=self._stream,
            subjects=[f"{self._prefix}.*"],
            storage=StorageType.FILE,
            discard=DiscardPolicy.OLD,
            max_msgs_per_subject=1,
            max_msgs=self._config.records,
            max_bytes=self._config.bytes,
            max_age=self._config.age_s,
            num_replicas=self._config.replicas,
        )
        try:
            try:
                await self._jetstream.add_stream(wanted)
            except BadRequestError as exc:
                if exc.err_code != STREAM_EXISTS:
                    raise
                await self._jetstream.update_stream(wanted)
        except nats.errors.TimeoutError:
            raise self._not_created() from None

    async def _found_config(self) -> RecordsConfig | None:
        try:
            found = (await self._jetstream.stream_info(self._stream)).config
        except NotFoundError:
            return None
        return RecordsConfig(found.max_msgs, found.max_bytes, found.max_age, found.num_replicas)

    def _not_created(self) -> BackendUnavailable:
        return BackendUnavailable(
            f"NATS does not answer the request to create or change the stream {self._stream}. If this user may not do "
            f"that, {COMMAND} does"
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        url = self._bus.url
        try:
            with translated_nats_errors(self._prefix, url):
                try:
                    with exact_cancellation():
                        yield
                        return
                    raise nats.errors.ConnectionClosedError  # nats-py has cancelled the call itself
                except APIError as exc:
                    if isinstance(exc, ServiceUnavailableError) and exc.err_code in NO_JETSTREAM:
                        raise NoJetStream(f"NATS at {url} has no JetStream for this account") from exc
                    raise BackendUnavailable(
                        f"JetStream of NATS at {url} cannot keep records: {exc.description}", subject=self._prefix
                    ) from exc
        except DeadlineExceeded as exc:  # this limit is ours, not the request's
            # after a write error NATS stores nothing more in a stream, and reports that only in its own log
            raise BackendUnavailable(
                f"JetStream of NATS at {url} does not answer: if NATS's log has write errors, as of a full disk, free "
                "space and restart NATS",
                subject=self._prefix,
            ) from exc


def _same(one: RecordsConfig, other: RecordsConfig) -> bool:
    return replace(one, age_s=0) == replace(other, age_s=0) and math.isclose(one.age_s, other.age_s)
