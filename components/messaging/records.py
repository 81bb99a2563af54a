"""Records shared by all processes, in a JetStream stream that keeps the last message of each key.

They survive their writers and a restart of NATS. If NATS loses its data, an empty stream replaces the lost one.
If NATS restricts its users' rights, only the administrator may create a stream: a stream can read and write any subject.
"""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, Header, StorageType, StreamConfig
from nats.js.errors import APIError, BadRequestError, NoStreamResponseError, NotFoundError, ServiceUnavailableError

from components.aio import exact_cancellation
from components.errors import BackendUnavailable, DeadlineExceeded, MessageTooLarge
from components.messaging.bus import HEADERS_BYTES, Bus, translated_nats_errors

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 2.0
CREATE_RETRY_PAUSE_S: Final = 10.0  # after a failed attempt to create the stream; without permission it takes TIMEOUT_S
NO_STREAM: Final = 10059  # JetStream's codes
OTHER_REVISION: Final = 10071
COMMAND: Final = "`python -m services.frontend.response_stream`, with the administrator's access,"


@dataclass(frozen=True, slots=True)
class Bounds:
    records: int
    bytes: int
    age_s: float


class Records:
    def __init__(self, bus: Bus, jetstream: JetStreamContext, name: str, bounds: Bounds) -> None:
        self._bus = bus
        self._jetstream = jetstream
        self._name, self._bounds = name, bounds
        self._stream, self._prefix = _names(name)
        self._create_failed_s = -math.inf  # monotonic

    async def put(self, key: str, value: bytes, revision: int | None = None) -> int | None:
        """Store or replace a record. All processes can read it when this returns.

        Args:
            revision: store it only if this is still the record's revision.
        Returns: the record's new revision; None if it was deleted, replaced or evicted since `revision`.
        Raises: MessageTooLarge, BackendUnavailable.
        """
        most = self._bus.client.max_payload - HEADERS_BYTES
        if len(value) > most:
            raise MessageTooLarge(f"a record has {len(value)} bytes, but NATS accepts {most}", bytes=len(value))
        with _errors(self._prefix, self._bus.url):
            try:
                return await self._publish(key, value, revision)
            except (NoStreamResponseError, NotFoundError):
                await self._recreate_stream()
                return await self._publish(key, value)
            except BadRequestError as exc:
                if exc.err_code != OTHER_REVISION or revision is None:
                    raise
                state = (await self._jetstream.stream_info(self._stream)).state
                was_recreated = state.last_seq < revision  # by another process, after NATS had lost its data
                return await self._publish(key, value) if was_recreated else None

    async def get(self, key: str) -> bytes | None:
        with _errors(self._prefix, self._bus.url):
            try:
                # not `direct`, for the reason in components/permissions.py
                found = await self._jetstream.get_last_msg(self._stream, f"{self._prefix}.{key}")
            except NotFoundError as exc:
                if exc.err_code == NO_STREAM:  # the stream is gone, with all records
                    await self._recreate_stream()
                return None
        data: bytes | None = found.data
        return data

    async def delete(self, key: str) -> None:
        with _errors(self._prefix, self._bus.url), suppress(NotFoundError):  # the stream is gone
            await self._jetstream.purge_stream(self._stream, subject=f"{self._prefix}.{key}")

    async def _publish(self, key: str, value: bytes, revision: int | None = None) -> int:
        headers = None if revision is None else {Header.EXPECTED_LAST_SUBJECT_SEQUENCE: str(revision)}
        subject = f"{self._prefix}.{key}"
        sent = await self._jetstream.publish(subject, value, stream=self._stream, timeout=TIMEOUT_S, headers=headers)
        return int(sent.seq)

    async def _recreate_stream(self) -> None:
        if time.monotonic() < self._create_failed_s + CREATE_RETRY_PAUSE_S:
            raise _missing(self._stream)
        if not await _create_stream(self._jetstream, self._name, self._bounds):
            self._create_failed_s = time.monotonic()
            raise _missing(self._stream)
        log.warning(
            "NATS has lost the stored responses, an empty stream takes their place", extra={"records": self._name}
        )


async def open_records(bus: Bus, name: str, bounds: Bounds) -> Records:
    """Open or create the stream of records `name`, with `bounds` in place of earlier ones.

    Raises: BackendUnavailable, also without JetStream, or if there is no stream and this user may not create it.
    """
    jetstream = bus.client.jetstream(timeout=TIMEOUT_S)
    stream, prefix = _names(name)
    with _errors(prefix, bus.url):
        found = await _bounds_of(jetstream, stream)
        if (found is None or not _same(found, bounds)) and not await _create_stream(jetstream, name, bounds):
            if found is None:
                raise _missing(stream)
            log.warning(
                "the stream of stored responses has other bounds than this frontend",
                extra={"stream": stream, "advice": f"this user may not change them; {COMMAND} changes them"},
            )
    return Records(bus, jetstream, name, bounds)


def _missing(stream: str) -> BackendUnavailable:
    return BackendUnavailable(f"NATS has no stream {stream}, and this user may not create it: {COMMAND} creates it")


async def _bounds_of(jetstream: JetStreamContext, stream: str) -> Bounds | None:
    try:
        config = (await jetstream.stream_info(stream)).config
    except NotFoundError:
        return None
    return Bounds(config.max_msgs, config.max_bytes, config.max_age)


def _same(one: Bounds, other: Bounds) -> bool:
    return (one.records, one.bytes) == (other.records, other.bytes) and math.isclose(one.age_s, other.age_s)


async def _create_stream(jetstream: JetStreamContext, name: str, bounds: Bounds) -> bool:
    """Create the stream, or change its bounds.

    Returns: False if there is no answer, because NATS does not answer calls that the user has no right to make.
    """
    stream, prefix = _names(name)
    config = StreamConfig(
        name=stream,
        subjects=[f"{prefix}.*"],
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=1,
        max_msgs=bounds.records,
        max_bytes=bounds.bytes,
        max_age=bounds.age_s,
        num_replicas=1,
    )
    try:
        try:
            await jetstream.add_stream(config)
        except BadRequestError:  # it exists with other bounds
            await jetstream.update_stream(config)
    except nats.errors.TimeoutError:
        return False
    return True


def _names(name: str) -> tuple[str, str]:
    """Stream name and subject prefix."""
    return name.replace(".", "-"), f"{name}.records"


@contextmanager
def _errors(subject: str, url: str) -> Iterator[None]:
    try:
        with translated_nats_errors(subject, url):
            try:
                with exact_cancellation():
                    yield
                    return
                raise nats.errors.ConnectionClosedError  # nats-py has cancelled the call itself
            except (nats.errors.NoRespondersError, ServiceUnavailableError) as exc:
                raise BackendUnavailable(f"NATS at {url} has no JetStream, or not this stream: {exc}") from exc
            except APIError as exc:
                raise BackendUnavailable(
                    f"JetStream of NATS at {url} cannot keep records: {exc.description}", subject=subject
                ) from exc
    except DeadlineExceeded as exc:  # this limit is ours, not the request's
        # after a write error NATS stores nothing more in a stream, and reports that only in its own log
        raise BackendUnavailable(
            f"JetStream of NATS at {url} does not answer: if NATS's log has write errors, as of a full disk, free space "
            "and restart NATS",
            subject=subject,
        ) from exc
