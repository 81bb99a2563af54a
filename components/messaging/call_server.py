"""Serve calls as a NATS micro service, which `$SRV.PING`, `INFO` and `STATS` list."""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import nats.errors
from nats.micro.request import Request
from nats.micro.service import Endpoint as MicroEndpoint
from nats.micro.service import EndpointConfig, EndpointStats, Service, ServiceConfig
from opentelemetry import context, trace
from opentelemetry.trace import SpanKind, StatusCode

from components.aio import BackgroundTasks, exact_cancellation
from components.errors import InvariantBroken, MeshError, MessageTooLarge, PeerLost
from components.messaging.bus import Bus
from components.messaging.clocks import PeerClocks
from components.messaging.nats_errors import translated_nats_errors
from components.messaging.refusals import BAD_TRACEPARENT, Refusals
from components.telemetry.logs import request_id
from components.telemetry.spans import trace_context, tracer
from components.version import VERSION
from components.wire.codec import Dated, Struct, UnknownMessage, pack, unpack
from components.wire.refused import refusal

log = logging.getLogger(__name__)

STOP_S: Final = 2.0  # for our unsubscription
LEAVE_S: Final = 5.0  # for running calls
KEPT_S: Final = 30.0  # an answer is kept for a repeated call
OVER_NATS: Final = {"messaging.system": "nats"}  # span attributes
KEPT_BYTES: Final = 32 << 20  # of all answers


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A call that an instance answers on `<subject>.<name>`."""

    name: str
    request: type[Struct]
    handler: Callable[[Any], Awaitable[Struct]]  # a MeshError becomes Refused
    span: str | None = None  # the handler's
    runs_inline: bool = False  # the handler never waits: it needs no task
    is_idempotent: bool = False  # a repeated call may run again, so its answer is not kept
    refusal_level: int = logging.INFO  # log level of a refused call


class SentAnswers:
    """Recent answers by reply subject: a repeated call runs once and gets the same answer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answers: OrderedDict[str, bytes | None] = OrderedDict()  # None: the call is still running
        self._sent: deque[tuple[float, str]] = deque()  # in order
        self._bytes = 0

    def begin(self, reply: str) -> bool:
        if reply in self._answers:
            return False
        self._answers[reply] = None
        return True

    def find(self, reply: str) -> bytes | None:
        return self._answers.get(reply)

    def sent(self, reply: str, answer: bytes) -> None:
        now = self._clock()
        self._answers[reply] = answer
        self._sent.append((now, reply))
        self._bytes += len(answer)
        while self._sent and (self._sent[0][0] < now - KEPT_S or self._bytes > KEPT_BYTES):
            _, oldest = self._sent.popleft()
            self._bytes -= len(self._answers.pop(oldest) or b"")

    def allow_rerun(self, reply: str) -> None:
        """Run the call again if it is repeated."""
        del self._answers[reply]


class CallServer:
    """Runs each call in its own task, unless its endpoint `runs_inline`."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        url: str,
        refusals: Refusals,
        clocks: PeerClocks,
        check_size: Callable[[str, bytes, str], None],  # raises if an answer is too large
    ) -> None:
        self._url = url  # for errors
        self._refusals = refusals
        self._clocks = clocks
        self._check_size = check_size
        self._tasks = BackgroundTasks()
        self._answers = SentAnswers()
        self._errors: dict[str, int] = {e.name: 0 for e in endpoints}

    def stats(self, endpoint: EndpointStats) -> dict[str, int]:
        return {"errors": self._errors[endpoint.name], "in_flight": len(self._tasks)}

    def receive(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[None]]:
        if endpoint.runs_inline:
            return partial(self._answer, endpoint)

        async def start(request: Request) -> None:
            self._tasks.start(self._answer(endpoint, request))

        return start

    def cancel(self) -> None:
        """Running calls get no answer."""
        self._tasks.cancel()

    async def drain(self) -> None:
        await self._tasks.drain()

    async def _answer(self, endpoint: Endpoint, request: Request) -> None:
        reply = request._msg.reply
        if reply and not self._answers.begin(reply):
            if (sent := self._answers.find(reply)) is not None:
                await self._respond(endpoint, request, sent)
            return
        caller = trace_context(request.headers)
        if trace.get_current_span(caller) is trace.INVALID_SPAN:
            self._refusals.count(endpoint.name, BAD_TRACEPARENT)
        token = context.attach(caller)
        try:
            answer = await self._handled(endpoint, request)
        except MeshError as exc:
            self._errors[endpoint.name] += 1
            self._refusals.count(endpoint.name, exc)
            facts = {"call": endpoint.name, "error": type(exc).__name__, "cause": exc.message}
            log.log(endpoint.refusal_level, "call refused", extra=facts)
            # callers of every release try another instance after PeerLost; that one may support this message
            answer = refusal(PeerLost(exc.message) if isinstance(exc, UnknownMessage) else exc)
        except (Exception, asyncio.CancelledError) as exc:
            if isinstance(exc, asyncio.CancelledError) and _is_cancelled():
                raise  # otherwise only something that the handler awaited was cancelled
            self._errors[endpoint.name] += 1
            log.exception("call failed", extra={"call": endpoint.name})
            answer = refusal(InvariantBroken(f"{endpoint.name} failed: {type(exc).__name__}"))
        finally:
            context.detach(token)
            request_id.set("")  # this task continues with the next call
        if reply:
            packed = self._packed(endpoint, reply, answer)
            if endpoint.is_idempotent:
                self._answers.allow_rerun(reply)
            else:
                self._answers.sent(reply, packed)
            await self._respond(endpoint, request, packed)

    def _packed(self, endpoint: Endpoint, reply: str, answer: Struct) -> bytes:
        """Pack the answer, or a refusal if it is too large for NATS: else the caller would wait until its timeout."""
        packed = pack(answer)
        try:
            self._check_size(reply, packed, type(answer).__name__)
        except MessageTooLarge as exc:
            self._errors[endpoint.name] += 1
            log.warning("answer too large", extra={"call": endpoint.name, "cause": exc.message})
            return pack(refusal(exc))
        return packed

    async def _respond(self, endpoint: Endpoint, request: Request, answer: bytes) -> None:
        try:
            with translated_nats_errors(request._msg.reply, self._url):
                await request.respond(answer)
        except MeshError as exc:
            log.warning("answer lost", extra={"call": endpoint.name, "cause": exc.message})

    async def _handled(self, endpoint: Endpoint, request: Request) -> Struct:
        message = unpack(request.data, endpoint.request)
        request_id.set(getattr(message, "request_id", ""))  # inherited by the handler's tasks
        if isinstance(message, Dated):
            message = self._clocks.converted(message)
        if endpoint.span is None:
            return await endpoint.handler(message)
        with tracer.start_as_current_span(endpoint.span, kind=SpanKind.SERVER, attributes=OVER_NATS) as span:
            try:
                return await endpoint.handler(message)
            except MeshError as exc:
                span.set_status(trace.Status(StatusCode.ERROR, exc.message))
                raise


class _DirectEndpoint(MicroEndpoint):  # type: ignore[misc]  # nats-py has no types
    """An endpoint without a queue group, because only one instance listens on its subject.

    After a reconnect, a NATS cluster may deliver half of a group's calls to the old subscription at a frozen server.
    """

    async def _start(self) -> None:
        self._queue_group = ""
        self._subscription = await self._service._client.subscribe(self._subject, cb=self._handle_request)

    async def _stop(self) -> None:
        """Unsubscribe, but run the calls that NATS has delivered, so that callers need not repeat them."""
        try:
            with exact_cancellation():
                await self._subscription.drain()
        except BaseException:
            self._service._client._remove_sub(self._subscription._id)
            self._subscription._stop_processing()
            raise

    async def unsubscribe(self) -> None:
        """Unsubscribe even while disconnected, because nats-py renews all its subscriptions after an outage."""
        with suppress(nats.errors.Error, OSError, RuntimeError, AttributeError), exact_cancellation():
            await self._subscription.unsubscribe()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@asynccontextmanager
async def serve_calls(
    bus: Bus, role: str, subject: str, endpoints: Sequence[Endpoint], metadata: Mapping[str, str]
) -> AsyncIterator[None]:
    """Answer calls within the context. Leaving it waits up to LEAVE_S for running calls, except after an error.

    The wait is limited: a call may wait for something that never happens, such as `quiesce` for a write of a rank that has
    ended, or to an unreachable peer. Its caller detects the failure when this process ends.

    Args:
        role: name of the micro service, shared by the role's instances.
        subject: prefix of this instance; endpoint `x` listens on `<subject>.x`.
        metadata: returned by `$SRV.INFO`.
    """
    server = CallServer(endpoints, bus.url, bus.refusals, bus.clocks, bus.check_size)
    config = ServiceConfig(
        name=f"kvmesh-{role}",
        version=VERSION,
        description=f"kvmesh {role} instance",
        metadata={"subject": subject, **metadata},
        stats_handler=server.stats,
    )
    service = Service(bus.client, config)
    with exact_cancellation():
        await service.start()
    listening: list[_DirectEndpoint] = []
    for endpoint in endpoints:
        receives = EndpointConfig(endpoint.name, server.receive(endpoint), subject=f"{subject}.{endpoint.name}")
        subscribed = _DirectEndpoint(service, receives)
        await subscribed._start()
        service._endpoints.append(subscribed)
        listening.append(subscribed)
    await bus.flush()
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        if bus.client.is_connected:
            with suppress(nats.errors.Error, OSError, TimeoutError):  # NATS hangs or is gone: no call arrives
                async with asyncio.timeout(STOP_S):
                    with exact_cancellation():
                        await service.stop()  # callers get "no responders" at once
        for subscribed in listening:
            await subscribed.unsubscribe()
        if not has_failed:
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await server.drain()
        server.cancel()
        await server.drain()
