"""Bad messages on every subject of every role: each is refused by name and counted, and the mesh still answers."""

import asyncio
import json
import os
import pickle
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import httpx
import msgpack
import pytest
from msgspec.structs import replace

from components.errors import DeadlineExceeded, MalformedMessage, MessageTooLarge, PeerLost
from components.kv_transfer.open_sockets import listeners
from components.messaging.clocks import now_ms
from components.wire.codec import UnknownMessage, pack, unpack
from components.wire.generate import CancelStreams, GenerateRequest, StreamItem
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord
from components.wire.kv_events import FetchKvDump, KvEventBatch, pack_batch
from components.wire.prefill import OpenRoom, PagesOffered, PrefillAccepted, PrefillRequest, Quiesce, RoomOk
from components.wire.refused import Refused
from components.wire.sampling import SamplingParams
from tests.components.kv_transfer.test_ucx_settings import own_address
from tests.components.wire.frames import frame_of
from tests.mesh.harness import Client, MeshProcesses, metrics_of, open_client
from tests.mesh.mocks import MODEL, no_page_is_lost, one_engine, random_prompts
from tests.secured import SECURED
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.mesh

ROLES: Final = ("bootstrap", "prefill", "decode", "frontend")
LATE: Final = 1  # a deadline that has passed


class Evil:
    """Creates a directory if a process loads its pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (EVIL,)


EVIL: Final = f"/tmp/kvmesh-unpickled-{os.getpid()}"


UNKNOWN: Final = ("unknown tag", "another version")


def garbage() -> Iterator[tuple[str, bytes]]:
    """Yield the names and bytes of invalid messages."""
    whole = pack(CancelStreams(reply_to="r", stream_ids=[1]))
    yield "empty", b""
    yield "zeros", bytes(64)
    yield "text", b'{"json": true}'
    yield "pickle", pickle.dumps(Evil())
    yield "truncated", whole[:-3]
    yield "a byte too many", whole + b"\0"
    yield "unknown tag", msgpack.packb(["no-such-thing.v1", {}])
    yield "another version", msgpack.packb(["generate.v999", {}])
    yield "another conversation's", pack(Refused(error="PeerLost", message="m"))
    yield "a claim of two billion items", b"\xdd\x7f\xff\xff\xff"
    yield "deep", b"\x91" * 100_000 + b"\xc0"
    yield "a million bytes", b"\xc6\x00\x0f\x42\x40" + bytes(1_000_000)


def counted(page: str) -> dict[tuple[str, str], float]:
    """Return the numbers of refused messages, by message and reason."""
    text = "\n".join(metrics_of(page))
    found = re.findall(r'^kvmesh_messages_refused_total\{message="(.*?)",reason="(.*?)"\} (\S+)$', text, re.MULTILINE)
    return {(message, reason): float(count) for message, reason, count in found}


def page_of(record: InstanceRecord) -> str:
    return str(record.metrics or record.http)


async def until_counted(record: InstanceRecord, message: str, reason: str, least: float = 1) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await asyncio.to_thread(counted, page_of(record))).get((message, reason), 0.0) < least:
            await asyncio.sleep(0.05)


async def endpoints(client: Client, record: InstanceRecord) -> list[str]:
    """Return the calls that an instance answers, from `$SRV.INFO`."""
    name = f"kvmesh-{record.role}"
    inbox = await client.bus.client.subscribe(client.bus.client.new_inbox())
    await client.bus.client.publish(f"$SRV.INFO.{name}", reply=inbox.subject)
    while True:
        info = json.loads((await inbox.next_msg(timeout=PATIENCE_S)).data)
        if info["metadata"]["subject"] == record.subject:
            return [endpoint["name"] for endpoint in info["endpoints"]]


async def refused(client: Client, record: InstanceRecord, call: str, data: bytes) -> str:
    """Return the name of the error that a call returns."""
    answer = await client.bus.client.request(f"{record.subject}.{call}", data, timeout=PATIENCE_S)
    return unpack(answer.data, Refused).error


async def refuses(client: Client, record: InstanceRecord, call: str, message: object, error: str) -> None:
    before = counted(page_of(record)).get((call, error), 0.0)
    assert await refused(client, record, call, pack(message)) == error, message
    await until_counted(record, call, error, before + 1)


async def every_call_refuses_garbage(client: Client, record: InstanceRecord) -> None:
    calls = await endpoints(client, record)
    assert calls
    bad = list(garbage())
    for call in calls:
        for what, data in bad:
            # Another instance may know the message, so the caller should ask it.
            error = PeerLost if what in UNKNOWN else MalformedMessage
            assert await refused(client, record, call, data) == error.__name__, (record.role, call, what)
        await until_counted(record, call, MalformedMessage.__name__, len(bad) - len(UNKNOWN))
        await until_counted(record, call, UnknownMessage.__name__, len(UNKNOWN))
        headers = {"traceparent": "00-not-a-trace-at-all"}
        await client.bus.client.request(f"{record.subject}.{call}", b"", timeout=PATIENCE_S, headers=headers)
        await until_counted(record, call, "BadTraceparent")


def namespace_of(record: InstanceRecord) -> str:
    return record.subject.partition(".")[0]


async def published_garbage_is_counted(client: Client, by_role: dict[str, InstanceRecord]) -> None:
    frontend, decode, prefill = by_role["frontend"], by_role["decode"], by_role["prefill"]
    user = "frontend-0" if SECURED else "frontend"
    for subject, reader, name in (
        (f"{namespace_of(frontend)}.tokens.{user}.{frontend.instance_id}-{frontend.epoch}", frontend, "tokens"),
        (f"{decode.subject}.heartbeat", frontend, "heartbeat"),
        (f"{prefill.subject}.heartbeat", decode, "heartbeat"),
        (f"{prefill.subject}.kv_events", decode, "kv_events"),
    ):
        for _, data in garbage():
            await client.bus.client.publish(subject, data)
        unknown = len(UNKNOWN) if name == "heartbeat" else 0  # the others are no [tag, fields] pairs
        await until_counted(reader, name, MalformedMessage.__name__, len(list(garbage())) - unknown)
        await until_counted(reader, name, UnknownMessage.__name__, unknown) if unknown else None
    beat = Heartbeat(instance_id=decode.instance_id, epoch="old", step=1, busy=True)
    await client.bus.publish(f"{decode.subject}.heartbeat", beat)
    await until_counted(frontend, "heartbeat", "Stranger")
    for number in (10**9, 10**9 + 7):
        batch = KvEventBatch(prefill.instance_id, "old" if number % 2 else prefill.epoch, number, [bytes(16)], [])
        await client.bus.publish_bytes(f"{prefill.subject}.kv_events", pack_batch(batch))
    await until_counted(decode, "kv_events", "Stranger")
    await until_counted(decode, "kv_events", "Gap")


async def wrong_requests_are_refused(client: Client, by_role: dict[str, InstanceRecord]) -> None:
    decode, prefill, bootstrap = by_role["decode"], by_role["prefill"], by_role["bootstrap"]
    sampling, soon = SamplingParams(max_tokens=4), now_ms() + int(PATIENCE_S * 1000)
    generate = GenerateRequest(
        request_id="bad", epoch=decode.epoch, model=MODEL, stream_id=1, reply_to="nobody", token_ids=b"\1\0\0\0",
        deadline_unix_ms=soon, sampling=sampling,
    )  # fmt: skip
    for changes, error in (
        ({"epoch": "old"}, "StaleInstance"),
        ({"deadline_unix_ms": LATE}, DeadlineExceeded.__name__),
        ({"model": "other"}, "UnknownModel"),
        ({"adapter": "other"}, "UnknownModel"),
        ({"token_ids": b"\1\0\0"}, MalformedMessage.__name__),
        ({"sampling": replace(sampling, stop_token_ids=("a",))}, MalformedMessage.__name__),
        ({"sampling": replace(sampling, n=0)}, "Rejected"),
        ({"sampling": replace(sampling, n=2**40)}, "Rejected"),
    ):
        await refuses(client, decode, "generate", replace(generate, **changes), error)
    prompt = PrefillRequest(
        request_id="bad", epoch=prefill.epoch, decode_id=decode.instance_id, decode_epoch=decode.epoch,
        room="bad", stamp=1, token_ids=b"\1\0\0\0" * 40, deadline_unix_ms=soon, sampling=sampling,
    )  # fmt: skip
    for changes, error in (
        ({"epoch": "old"}, "StaleInstance"),
        ({"deadline_unix_ms": LATE}, DeadlineExceeded.__name__),
        ({"token_ids": b"\1"}, MalformedMessage.__name__),
    ):
        # a new request id, because a refused request has ended
        await refuses(client, prefill, "prefill", replace(prompt, request_id=error, **changes), error)
    await refuses(client, prefill, "prefill", replace(prompt, request_id="StaleInstance"), "Rejected")
    await refuses(client, prefill, "kv_dump", FetchKvDump(epoch="old"), "StaleInstance")
    # pages that decode does not have, an unknown room, a request that has ended
    await client.bus.call(f"{prefill.subject}.prefill", prompt, PrefillAccepted, timeout_s=PATIENCE_S)
    assert decode.kv is not None
    num_pages = -(-40 // decode.kv.layout.page_size)
    offer = PagesOffered(
        request_id="bad", room="bad", bootstrap_id=bootstrap.instance_id, decode_id=decode.instance_id,
        decode_epoch=decode.epoch, pages=list(range(num_pages)), num_cached_pages=0, aux_slot=0, deadline_unix_ms=soon,
    )  # fmt: skip
    wrong: list[dict[str, Any]] = [
        {"pages": [decode.kv.num_pages] * num_pages},
        {"pages": [-1] * num_pages},
        {"pages": [2**62] * num_pages},
        {"pages": []},
        {"num_cached_pages": num_pages + 1},
        {"num_cached_pages": -1},
        {"aux_slot": decode.kv.aux_slots},
        {"aux_slot": -1},
        {"decode_epoch": "old"},
        {"decode_id": "nobody"},
        {"room": "elsewhere"},
        {"request_id": "StaleInstance"},
    ]
    for changes in wrong:
        await refuses(client, prefill, "pages", replace(offer, **changes), "TransferFailed")
    room = OpenRoom(
        room="bad", request_id="bad", prefill_id=prefill.instance_id, prefill_epoch=prefill.epoch,
        decode_id="nobody", decode_epoch="e", pages=[1], num_cached_pages=0, aux_slot=0, deadline_unix_ms=soon,
    )  # fmt: skip
    # Bootstrap forwards an offer that does not fit, and prefill refuses it.
    await client.bus.call(f"{bootstrap.subject}.open", replace(room, num_cached_pages=2), RoomOk, timeout_s=PATIENCE_S)
    await client.bus.client.request(
        f"{prefill.subject}.quiesce", pack(Quiesce(request_id="bad", cause="test")), timeout=PATIENCE_S
    )


async def frames_in_disorder_move_a_stream_and_lose_no_token(
    client: Client, by_role: dict[str, InstanceRecord], expected: list[int], prompt: list[int]
) -> None:
    """Forge frames of decode for a running stream."""
    inbox = client.mesh._inbox
    stream = asyncio.create_task(client.generate(prompt, len(expected), model=MODEL))
    instance_id, epoch = by_role["decode"].instance_id, by_role["decode"].epoch
    async with asyncio.timeout(PATIENCE_S):
        while not len(inbox):
            await asyncio.sleep(0)  # before the first frame
    stream_id = max(inbox._sources[instance_id].streams)
    for seq in (10**6, -1, 10**6):
        item = StreamItem(stream_id, seq, [1, 2, 3])
        await client.bus.publish_bytes(inbox.subject, frame_of(instance_id, epoch, 1, [item]).pack())
    stranger = frame_of("other", epoch, 1, [StreamItem(stream_id, 0, [9])])
    await client.bus.publish_bytes(inbox.subject, stranger.pack())
    assert await stream == expected


def test_every_bad_message_is_refused_counted_and_survived(mock_mesh: MeshProcesses) -> None:
    *_, frontend_process = mock_mesh.start(*ROLES)
    prompts = random_prompts(12)
    expected = one_engine(mock_mesh.home, prompts)

    async def run() -> None:
        async with open_client(mock_mesh, MODEL) as client:
            await client.until_usable("prefill")
            by_role = {role: client.book.of_role(role)[0] for role in ROLES}
            for record in by_role.values():
                await every_call_refuses_garbage(client, record)
            await published_garbage_is_counted(client, by_role)
            await wrong_requests_are_refused(client, by_role)
            await over_max_payload(client, by_role, urlsplit(mock_mesh.nats_url))
            await frames_in_disorder_move_a_stream_and_lose_no_token(client, by_role, expected[0], prompts[0])
            answers = await asyncio.gather(
                *(client.generate(p, len(e), model=MODEL) for p, e in zip(prompts, expected, strict=True))
            )
            assert list(answers) == expected
            await no_page_is_lost(client)

    asyncio.run(run())
    body = {"model": MODEL, "prompt": "a", "max_tokens": 3, "ignore_eos": True}
    assert httpx.post(f"{frontend_process.url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200
    assert not Path(EVIL).exists()
    for worker in mock_mesh.workers:
        assert worker.popen.poll() is None
        assert "Traceback" not in worker.logged(), worker.logged()


async def over_max_payload(client: Client, by_role: dict[str, InstanceRecord], nats: SplitResult) -> None:
    """Our bus refuses to send a message over the server's limit. The server disconnects a client that sends one."""
    huge = CancelStreams(reply_to="r" * (client.bus.client.max_payload + 1), stream_ids=[])
    with pytest.raises(MessageTooLarge):
        await client.bus.publish(f"{by_role['decode'].subject}.cancel", huge)
    assert ("sent", "MessageTooLarge") in client.bus.refusals._counts
    reader, writer = await asyncio.open_connection(nats.hostname, nats.port)
    await reader.readline()  # its INFO
    if nats.scheme == "tls":  # KVMESH_TEST_SECURE=1
        await writer.start_tls(ssl.create_default_context(), server_hostname=nats.hostname)
    size = client.bus.client.max_payload + 1
    login = json.dumps({"verbose": False, "user": nats.username, "pass": nats.password})
    writer.write(b"CONNECT %b\r\nPUB %b.cancel %d\r\n" % (login.encode(), by_role["decode"].subject.encode(), size))
    assert b"Maximum Payload" in await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()


def test_a_packet_from_the_network_reaches_no_worker(mock_mesh: MeshProcesses) -> None:
    """UCX's port was open on each interface: 21 bytes sent to it crashed decode at its next transfer."""
    low, high = 21_000, 21_099  # below the ports that the kernel gives out
    for worker in mock_mesh.start("bootstrap", "prefill", "decode", "frontend", UCX_TCP_PORT_RANGE=f"{low}-{high}"):
        ports = listeners(worker.popen.pid)
        assert ports
        of_ucx = [listener.port for listener in ports if low <= listener.port <= high]
        assert len(of_ucx) == (worker.role in {"prefill", "decode"}), "the firewall has one range for KV"
        assert len(ports) - len(of_ucx) == (2 if worker.role == "frontend" else 1)  # metrics; requests
        assert all(listener.address.is_loopback for listener in ports), worker.role
        if worker.role == "decode" and (address := own_address()) is not None:
            for listener in ports:
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((address, listener.port), 5)
