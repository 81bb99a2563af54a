import asyncio
import json
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from components.discovery.registry import Registration
from components.errors import (
    BackendUnavailable,
    DeadlineExceeded,
    InvariantBroken,
    MalformedMessage,
    MessageTooLarge,
    PeerLost,
    QueueFull,
)
from components.messaging import call_server
from components.messaging.bus import HEADERS_BYTES, Bus
from components.messaging.call_server import Endpoint, serve_calls
from components.messaging.connection import connect_bus
from components.messaging.presence import present_endpoint
from components.urls import without_password
from components.wire.codec import unpack
from components.wire.generate import CancelStreams, GenerateRequest, StreamsCancelled
from components.wire.instances import AskPresent, Present
from components.wire.prefill import KvComing, RoomOk
from components.wire.refused import Refused, raised
from components.wire.sampling import SamplingParams
from services.local.child_process import kill
from services.local.servers import NATS, running
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]

LEAVES_WITHIN_S: Final = 25.0  # nats-py's own drain gives up after 30 s
Handler = Callable[[Any], Any]


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with connect_bus(nats_url, "test") as connected:
        yield connected


@asynccontextmanager
async def served(bus: Bus, namespace: str, handler: Handler, **others: Handler) -> AsyncIterator[str]:
    """Serve `close` with `handler`. Yields: the subject."""
    subject = f"{namespace}.bootstrap.one"
    endpoints = [Endpoint("close", KvComing, handler), *(Endpoint(n, KvComing, h) for n, h in others.items())]
    async with serve_calls(bus, "bootstrap", subject, endpoints, {"instance_id": "one"}):
        yield subject


async def ok(request: KvComing) -> RoomOk:
    return RoomOk(room=request.room)


async def ask(bus: Bus, subject: str, room: str = "r", timeout_s: float = PATIENCE_S) -> RoomOk:
    return await bus.call(f"{subject}.close", KvComing(room=room), RoomOk, timeout_s=timeout_s)


async def test_a_call_is_answered(bus: Bus, namespace: str) -> None:
    async with served(bus, namespace, ok) as subject:
        answers = await asyncio.gather(*(ask(bus, subject, str(i)) for i in range(50)))
    assert [a.room for a in answers] == [str(i) for i in range(50)]


async def test_leaving_waits_for_calls_except_after_an_error(
    bus: Bus, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose follower had ended during a write never ended: `quiesce` waited for that write."""
    monkeypatch.setattr(call_server, "LEAVE_S", 1000.0)
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def wait(request: KvComing) -> RoomOk:
        has_begun.set()
        await may_end.wait()
        return RoomOk(room=request.room)

    async with asyncio.TaskGroup() as group:
        async with served(bus, namespace, wait) as subject:
            asked = group.create_task(ask(bus, subject))
            await has_begun.wait()
            asyncio.get_running_loop().call_later(0.1, may_end.set)
        assert await asked == RoomOk(room="r")
    has_begun.clear()
    may_end.clear()
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ZeroDivisionError):
            async with served(bus, namespace, wait) as subject:
                asked = asyncio.create_task(ask(bus, subject, timeout_s=0.5))
                await has_begun.wait()
                raise ZeroDivisionError
    with pytest.raises((PeerLost, DeadlineExceeded)):
        await asked


async def test_leaving_gives_up_a_call_that_does_not_end(
    bus: Bus, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker waited for `quiesce`, which waited for a write to an unreachable peer."""
    monkeypatch.setattr(call_server, "LEAVE_S", 0.1)
    has_begun = asyncio.Event()

    async def wait(_: KvComing) -> RoomOk:
        has_begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with asyncio.timeout(PATIENCE_S), served(bus, namespace, wait) as subject:
        asked = asyncio.create_task(ask(bus, subject, timeout_s=0.5))
        await has_begun.wait()
    with pytest.raises((PeerLost, DeadlineExceeded)):
        await asked


async def test_a_refusal_arrives_as_the_error_it_was(bus: Bus, namespace: str) -> None:
    async def full(_: KvComing) -> RoomOk:
        raise QueueFull("no room", retry_after_s=0.5, rooms=7)

    async with served(bus, namespace, full) as subject:
        with pytest.raises(QueueFull, match="no room") as raised:
            await ask(bus, subject)
    assert raised.value.fields == {"retry_after_s": 0.5, "rooms": 7}


async def test_an_instance_that_leaves_refuses_to_be_present_without_a_word(
    bus: Bus, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each Ctrl-C printed "call refused call=present" up to four times for each process."""
    caplog.set_level(logging.DEBUG, "components")
    registration, subject = Registration("one", "1"), f"{namespace}.bootstrap.one"
    registration.leaving = True
    async with serve_calls(bus, "bootstrap", subject, [present_endpoint(registration)], {"instance_id": "one"}):
        with pytest.raises(PeerLost):
            await bus.call(f"{subject}.present", AskPresent(epoch="1"), Present, timeout_s=PATIENCE_S)
    [refused] = [r for r in caplog.records if r.message == "call refused"]
    assert refused.levelno == logging.DEBUG


async def test_a_call_without_a_listener_fails_at_once(bus: Bus, namespace: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(PeerLost, match="no process listens"):
            await ask(bus, f"{namespace}.bootstrap.gone", timeout_s=1000)


async def test_a_call_gives_up_at_its_deadline(bus: Bus, namespace: str) -> None:
    release = asyncio.Event()

    async def slow(request: KvComing) -> RoomOk:
        await release.wait()
        return RoomOk(room=request.room)

    async with served(bus, namespace, slow) as subject:
        with pytest.raises(DeadlineExceeded, match="no answer"):
            await ask(bus, subject, timeout_s=0.05)
        release.set()


async def test_a_slow_handler_delays_no_other_call(bus: Bus, namespace: str) -> None:
    release = asyncio.Event()

    async def slow(request: KvComing) -> RoomOk:
        if request.room == "slow":
            await release.wait()
        return RoomOk(room=request.room)

    async with served(bus, namespace, slow) as subject:
        waiting = asyncio.create_task(ask(bus, subject, "slow"))
        await asyncio.gather(*(ask(bus, subject, "quick") for _ in range(10)))
        assert not waiting.done()
        release.set()
        assert (await waiting).room == "slow"


@pytest.mark.parametrize("missing", [0, HEADERS_BYTES // 2])
async def test_a_message_too_large_is_refused_at_the_sender_and_the_connection_lives(
    bus: Bus, namespace: str, missing: int
) -> None:
    """The server counts headers too, and disconnects a client for one byte too many."""
    data = b"\0" * (bus.client.max_payload - missing)
    request = GenerateRequest(
        request_id="r",
        epoch="e",
        model="m",
        stream_id=1,
        reply_to="x",
        token_ids=data[: len(data) - 180],
        deadline_unix_ms=0,
        sampling=SamplingParams(max_tokens=1),
    )
    async with served(bus, namespace, ok) as subject:
        span = TracerProvider().get_tracer("test").start_span("x")
        with trace.use_span(span), pytest.raises(MessageTooLarge, match="exceeds"):
            await bus.call(f"{subject}.close", request, RoomOk, timeout_s=PATIENCE_S)
        with pytest.raises(MessageTooLarge):
            await bus.publish_bytes(subject, b"\0" * (bus.client.max_payload + 1))
        assert (await ask(bus, subject)).room == "r"
    assert bus.client.stats["reconnects"] == 0


async def test_an_answer_too_large_is_refused_at_once_and_the_call_runs_once(bus: Bus, namespace: str) -> None:
    """NATS refuses such an answer. Its caller got no error, and waited for its whole time limit."""
    runs = 0

    async def large(_: KvComing) -> RoomOk:
        nonlocal runs
        runs += 1
        return RoomOk(room="x" * bus.client.max_payload)

    async with served(bus, namespace, large, small=ok) as subject:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(MessageTooLarge, match=r"RoomOk of \d+ bytes .* exceeds"):
                await ask(bus, subject, timeout_s=1000)
        answer = await bus.call(f"{subject}.small", KvComing(room="r"), RoomOk, timeout_s=PATIENCE_S)
    assert (runs, answer.room) == (1, "r")
    assert bus.client.stats["reconnects"] == 0


async def test_a_malformed_request_is_answered_and_the_service_lives(bus: Bus, namespace: str) -> None:
    async with served(bus, namespace, ok) as subject:
        for garbage in (b"", b"\xc1", b"\x80" * 100):
            answer = await bus.client.request(f"{subject}.close", garbage, timeout=PATIENCE_S)
            assert b"MalformedMessage" in answer.data
        with pytest.raises(MalformedMessage, match="where kv-coming"):
            await bus.call(f"{subject}.close", RoomOk(room="r"), RoomOk, timeout_s=PATIENCE_S)
        assert (await ask(bus, subject)).room == "r"


async def test_an_unknown_kind_of_message_is_a_reason_to_try_another_instance(bus: Bus, namespace: str) -> None:
    """It was MalformedMessage, and a client's 500, although other instances knew the message."""
    async with served(bus, namespace, ok) as subject:
        answer = await bus.client.request(f"{subject}.close", msgpack.packb(["room-close.v9", {}]), timeout=PATIENCE_S)
    error = raised(unpack(answer.data, Refused))
    assert type(error) is PeerLost
    assert "unknown message tag 'room-close.v9'" in error.message


async def test_an_answer_of_another_conversation_is_malformed(bus: Bus, namespace: str) -> None:
    async def wrong(_: KvComing) -> StreamsCancelled:
        return StreamsCancelled(count=1)

    async with served(bus, namespace, wrong) as subject:
        with pytest.raises(MalformedMessage, match="where room-ok"):
            await ask(bus, subject)


async def test_a_bug_in_a_handler_costs_one_call(bus: Bus, namespace: str, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(request: KvComing) -> RoomOk:
        if request.room == "bad":
            raise ZeroDivisionError("secret")
        return RoomOk(room=request.room)

    async with served(bus, namespace, broken) as subject:
        with pytest.raises(InvariantBroken, match="close failed: ZeroDivisionError") as raised:
            await ask(bus, subject, "bad")
        assert "secret" not in str(raised.value)
        assert (await ask(bus, subject)).room == "r"
    assert "ZeroDivisionError: secret" in caplog.text


async def test_an_answer_that_cannot_be_sent_costs_one_call(
    bus: Bus, namespace: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bus, "check_size", lambda *_: None)

    async def too_much(_: KvComing) -> RoomOk:
        return RoomOk(room="x" * (bus.client.max_payload + 1))

    async with served(bus, namespace, too_much, other=ok) as subject:
        with pytest.raises(DeadlineExceeded):
            await ask(bus, subject, timeout_s=0.2)
        await bus.call(f"{subject}.other", KvComing(room="r"), RoomOk, timeout_s=PATIENCE_S)
    assert "answer lost" in caplog.messages


async def test_a_message_published_to_an_endpoint_is_handled_without_an_answer(bus: Bus, namespace: str) -> None:
    handled = asyncio.Event()

    async def note(request: KvComing) -> RoomOk:
        handled.set()
        return RoomOk(room=request.room)

    async with served(bus, namespace, note) as subject:
        await bus.publish(f"{subject}.close", KvComing(room="r"))
        await asyncio.wait_for(handled.wait(), PATIENCE_S)


async def test_a_service_lists_itself_and_counts_its_calls(bus: Bus, namespace: str) -> None:
    runs = []

    async def run(request: KvComing) -> RoomOk:
        runs.append(request.room)
        return await ok(request)

    async def refuse(_: KvComing) -> RoomOk:
        runs.append("refused")
        raise QueueFull("full")

    async def asked(verb: str) -> dict[str, Any]:
        """The answer of our instance; other tests' services share the server."""
        found: list[dict[str, Any]] = []
        inbox = bus.client.new_inbox()
        subscription = await bus.client.subscribe(inbox)
        await bus.client.publish(f"$SRV.{verb}.kvmesh-bootstrap", reply=inbox)
        while not found:
            answer = json.loads((await subscription.next_msg(timeout=PATIENCE_S)).data)
            found += [answer] if answer["metadata"].get("subject") == f"{namespace}.bootstrap.one" else []
        await subscription.unsubscribe()
        return found[0]

    async with served(bus, namespace, run, refuse=refuse) as subject:
        for _ in range(3):
            await ask(bus, subject)
        with pytest.raises(QueueFull):
            await bus.call(f"{subject}.refuse", KvComing(room="r"), RoomOk, timeout_s=PATIENCE_S)
        ping, info, stats = await asked("PING"), await asked("INFO"), await asked("STATS")
    assert ping["name"] == info["name"] == stats["name"] == "kvmesh-bootstrap"
    assert info["metadata"]["instance_id"] == "one"
    assert {e["subject"] for e in info["endpoints"]} == {f"{subject}.close", f"{subject}.refuse"}
    counted = {e["name"]: (e["num_requests"], e["data"]["errors"]) for e in stats["endpoints"]}
    assert runs == ["r", "r", "r", "refused"]
    assert {name: errors for name, (_, errors) in counted.items()} == {"close": 0, "refuse": 1}
    assert counted["close"][0] >= 3, "a call is sent again after a second, and counted again"
    assert counted["refuse"][0] >= 1


async def test_leaving_finishes_calls_in_flight_and_refuses_new_ones_at_once(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_server, "LEAVE_S", 1000.0)
    entered, release = asyncio.Event(), asyncio.Event()

    async def slow(request: KvComing) -> RoomOk:
        entered.set()
        await release.wait()
        return RoomOk(room=request.room)

    async with connect_bus(nats_url, "server") as server, connect_bus(nats_url, "client") as client:
        async with asyncio.TaskGroup() as group:
            serving = served(server, namespace, slow)
            subject = await serving.__aenter__()
            waiting = group.create_task(ask(client, subject, "slow"))
            await asyncio.wait_for(entered.wait(), PATIENCE_S)
            leaving = group.create_task(serving.__aexit__(None, None, None))
            while True:
                try:
                    await ask(client, subject, timeout_s=0.1)
                except PeerLost:
                    break
                except DeadlineExceeded:
                    continue
            assert not leaving.done()
            release.set()
        assert waiting.result().room == "slow"


async def test_the_trace_continues_on_the_other_side_of_a_call(bus: Bus, namespace: str) -> None:
    inside: list[trace.SpanContext] = []

    async def look(request: KvComing) -> RoomOk:
        inside.append(trace.get_current_span().get_span_context())
        return RoomOk(room=request.room)

    async with served(bus, namespace, look) as subject:
        span = TracerProvider().get_tracer("test").start_span("caller")
        with trace.use_span(span, end_on_exit=True):
            await ask(bus, subject)
        await ask(bus, subject)
    assert inside[0].trace_id == span.get_span_context().trace_id
    assert inside[0].span_id == span.get_span_context().span_id
    assert not inside[1].is_valid


@pytest.mark.parametrize("subject", ["x" * 5000, "", "two words", "line\r\nbreak"])
async def test_a_bad_subject_is_an_error_of_ours_and_the_connection_lives(
    bus: Bus, namespace: str, subject: str
) -> None:
    """A subject of 5,000 characters ended the process: NATS disconnects, and nats-py does not reconnect."""
    with pytest.raises(MalformedMessage, match="is not a valid NATS subject"):
        await bus.publish_bytes(subject, b"x")
    with pytest.raises(MalformedMessage):
        await bus.publish_bytes("right", b"x", reply="r" * 5000)
    async with served(bus, namespace, ok) as good:
        await ask(bus, good)
    assert bus.client.stats["reconnects"] == 0


async def test_a_bus_waits_for_nats_and_comes_back_after_its_restart(
    tmp_path: Path, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "components")
    received: list[bytes] = []

    async def receive(message: Any) -> None:
        received.append(message.data)

    async with running(NATS, tmp_path) as server:
        assert server.process is not None
        await kill(server.process)
        connecting = asyncio.create_task(_enter(connect_bus(server.url, "waits")))
        await until(lambda: "NATS cannot be reached, trying again" in caplog.messages)
        [said] = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert f"NATS at {without_password(server.url)} cannot be reached" in vars(said)["reason"]
        assert not connecting.done()
        await server.restart()
        context, bus = await asyncio.wait_for(connecting, PATIENCE_S)
        async with served(bus, namespace, ok) as subject, bus.subscription(f"{namespace}.news", receive):
            await ask(bus, subject)
            await kill(server.process)
            with pytest.raises((BackendUnavailable, DeadlineExceeded, PeerLost)):
                await ask(bus, subject, timeout_s=0.3)
            await server.restart()
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        assert (await ask(bus, subject, timeout_s=0.5)).room == "r"
                        break
                    except (BackendUnavailable, DeadlineExceeded, PeerLost):
                        continue
            await bus.publish(f"{namespace}.news", CancelStreams(reply_to="x", stream_ids=[]))
            await until(lambda: received)
        await context.__aexit__(None, None, None)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_leaving_needs_no_nats_that_answers(tmp_path: Path, namespace: str, how: signal.Signals) -> None:
    async with running(NATS, tmp_path) as server:
        assert server.process is not None
        async with asyncio.timeout(LEAVES_WITHIN_S):
            async with connect_bus(server.url, "leaves") as bus, served(bus, namespace, ok) as subject:
                await ask(bus, subject)
                server.process.send_signal(how)
        if how is signal.SIGSTOP:
            server.process.send_signal(signal.SIGCONT)


async def test_leaving_with_unsent_messages_needs_no_nats(tmp_path: Path) -> None:
    """A process that was stopped during an outage of NATS ended with a traceback and status 1."""
    async with running(NATS, tmp_path) as server, asyncio.timeout(LEAVES_WITHIN_S), connect_bus(server.url, "a") as bus:
        assert server.process is not None
        server.process.kill()
        await until(lambda: not bus.client.is_connected)
        await bus.publish_bytes("a.b", b"x")


async def _enter(context: Any) -> tuple[Any, Bus]:
    return context, await context.__aenter__()


async def test_a_cancellation_counts_while_much_is_unsent(
    bus: Bus, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py forgot it while it waited for its socket: an unread answer was generated, and its pages were held."""
    monkeypatch.setattr(bus.client, "_max_pending_size", 1, raising=False)
    flushing = asyncio.Event()

    async def flush(*_: Any, **__: Any) -> None:
        if not flushing.is_set():
            flushing.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    monkeypatch.setattr(bus.client, "_flush_pending", flush)
    calling = asyncio.create_task(ask(bus, f"{namespace}.bootstrap.gone", timeout_s=1000))
    await flushing.wait()
    calling.cancel()
    await asyncio.wait((calling,), timeout=PATIENCE_S)
    assert calling.cancelled()
