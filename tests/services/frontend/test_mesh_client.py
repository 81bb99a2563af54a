import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from components.discovery.book import InstanceBook
from components.errors import (
    Cancelled,
    DeadlineExceeded,
    DecodeLost,
    FramesLost,
    InvariantBroken,
    MalformedMessage,
    MeshError,
    NoDecodeInstance,
    Overloaded,
    PeerBroken,
    PeerLost,
    PromptTooLong,
    StaleInstance,
)
from components.messaging import inbox
from components.messaging.call_server import Endpoint
from components.messaging.clocks import now_ms
from components.messaging.fleet import Fleet
from components.messaging.inbox import StreamInbox
from components.messaging.liveness import Liveness, Loss
from components.messaging.outbox import OutStream
from components.telemetry.logs import RequestIds
from components.telemetry.spans import NOT_KEPT
from components.wire.generate import CancelStreams, GenerateAccepted, GenerateRequest, PromptOrigin, StreamItem
from components.wire.heartbeat import Heartbeat
from components.wire.logprobs import TokenLogprobs
from components.wire.sampling import SamplingParams, branch_seed
from components.wire.step_stats import DraftCounts
from components.wire.tokens import unpack_tokens
from services.frontend.decode_choice import MAX_MOVES, Waits
from services.frontend.mesh_client import MeshClient
from services.frontend.ports import Prompt
from services.frontend.request_lines import RequestLines
from services.frontend.request_timeline import unkept_timeline
from tests.components.discovery.records import record
from tests.components.messaging.fake_bus import FakeBus
from tests.components.messaging.frames import nothing_lost
from tests.components.wire.frames import frame_of
from tests.faults.virtual_loop import run_virtually
from tests.services.frontend.reading import Reading, reading
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

PROMPT = Prompt(
    request_id="r",
    model="m",
    token_ids=[1, 2, 3],
    sampling=SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, seed=11, ignore_eos=True, stop_token_ids=(7,)),
    cache_salt="s",
    deadline_unix_ms=0,
)

Script = Callable[["Decode", OutStream, GenerateRequest], None]


class Message:
    def __init__(self, data: bytes) -> None:
        self.data = data


class Decode:
    """One decode instance: takes requests, and does with each what its script says."""

    def __init__(self, mesh: "Mesh", name: str, script: Script) -> None:
        self.mesh, self.name, self.script = mesh, name, script
        self.frames = 0
        self.requests: list[GenerateRequest] = []
        self.refusal: MeshError | None = None
        mesh.bus.serve(f"ns.decode.{name}", [Endpoint("generate", GenerateRequest, self.generate)])
        self.register("1")

    def register(self, epoch: str) -> None:
        self.mesh.book.put(self.name, record(self.name, epoch, model="m", max_context=100, started_unix_ms=5000))

    async def generate(self, request: GenerateRequest) -> GenerateAccepted:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        asyncio.get_running_loop().call_soon(self.script, self, OutStream(request.reply_to, request.stream_id), request)
        return GenerateAccepted(request_id=request.request_id)

    def send(self, *items: Any) -> None:
        frame = Message(frame_of(self.name, "1", 1, list(items), self.frames).pack())
        self.frames += 1
        self.mesh.tasks.append(asyncio.ensure_future(self.mesh.inbox.receive(frame)))

    def later(self, act: Callable[..., object], *args: object) -> None:
        """Act when what was sent has been read."""

        async def after() -> None:
            for _ in range(40):
                await asyncio.sleep(0)
            act(*args)

        self.mesh.tasks.append(asyncio.ensure_future(after()))

    def lose(self) -> None:
        self.mesh.book.remove(self.name)


class Mesh:
    def __init__(self) -> None:
        self.bus, self.book, self.inbox = FakeBus(), InstanceBook(), StreamInbox("ns.frontend.f.tokens", nothing_lost)
        self.decodes = Liveness(self.book, "decode")
        fleet = Fleet(self.book, self.decodes, "decode", "round_robin", Random(0))
        self.client = MeshClient(self.bus, self.inbox, fleet, "m")
        self.tasks: list[asyncio.Future[None]] = []

    async def ask(self, life_ms: int = 1_000_000, **changes: Any) -> list[StreamItem]:
        prompt = replace(PROMPT, deadline_unix_ms=now_ms() + life_ms, **changes)
        async with asyncio.timeout(PATIENCE_S), reading(self.client, prompt) as (deltas,):
            return [delta async for delta in deltas]

    def cancelled(self) -> list[tuple[str, list[int]]]:
        return [(subject, m.stream_ids) for subject, m in self.bus.sent if isinstance(m, CancelStreams)]


@pytest.fixture
async def mesh(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    """Its client's own limits lie beyond a test's: what it fails to notice is not ended by one of them."""
    monkeypatch.setattr("services.frontend.mesh_client.DISPATCH_TIMEOUT_S", 1000.0)
    made = Mesh()
    made.client.choice._waits = Waits(1000.0, 1000.0)
    yield made
    await asyncio.sleep(0)
    await asyncio.gather(*made.tasks)
    assert not len(made.inbox), "a stream was left open"
    assert not made.client._sending


def answers(decode: Decode, stream: OutStream, request: GenerateRequest) -> None:
    """One token per remaining one, each a function of its position: as draws of (seed, position) are."""
    start = len(unpack_tokens(request.token_ids))
    for number in range(request.sampling.max_tokens):
        finish = "length" if number == request.sampling.max_tokens - 1 else None
        decode.send(stream.tokens([100 + start + number], finish, num_cached_tokens=2))


def dies_after(count: int) -> Script:
    def script(decode: Decode, stream: OutStream, request: GenerateRequest) -> None:
        start = len(unpack_tokens(request.token_ids))
        for number in range(count):
            decode.send(stream.tokens([100 + start + number]))
        decode.later(decode.lose)

    return script


def fails_with(error: MeshError) -> Script:
    return lambda decode, stream, _: decode.send(stream.error(error))


def tokens(deltas: list[StreamItem]) -> list[int]:
    return [t for d in deltas for t in d.token_ids]


WHOLE = [103, 104, 105, 106, 107, 108]


async def test_a_stream_is_read_to_its_end_and_nothing_is_cancelled(mesh: Mesh) -> None:
    decode = Decode(mesh, "a", answers)
    deltas = await mesh.ask()
    assert tokens(deltas) == WHOLE
    assert [d.finish for d in deltas][-1] == "length"
    assert deltas[0].num_cached_tokens == 2
    [request] = decode.requests
    assert (request.epoch, request.model, request.reply_to) == ("1", "m", mesh.inbox.subject)
    assert request.sampling == PROMPT.sampling
    assert request.cache_salt == "s"
    assert not mesh.cancelled()


async def test_a_stream_whose_cancel_was_lost_is_cancelled_again(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage of NATS lost it, and decode computed to the end."""
    streams: list[OutStream] = []
    decode = Decode(mesh, "a", lambda _, stream, request: streams.append(stream))
    asking = asyncio.create_task(mesh.ask())
    while not streams:
        await asyncio.sleep(0)
    for _ in range(10):  # until decode's answer is in, and the client waits for tokens
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    await asyncio.sleep(0)
    assert mesh.cancelled() == [("ns.decode.a.cancel", [0])]
    monkeypatch.setattr(inbox, "CANCEL_AGAIN_AFTER_S", -1.0)
    decode.send(streams[0].tokens([103]))
    await asyncio.gather(*mesh.tasks)
    await asyncio.sleep(0)
    assert mesh.cancelled() == [("ns.decode.a.cancel", [0])] * 2
    decode.lose()
    decode.send(streams[0].tokens([104]))
    await asyncio.gather(*mesh.tasks)
    assert len(mesh.cancelled()) == 2, "nothing is sent to an instance that has gone"


@pytest.mark.parametrize("count", [0, 1, 4, 5])
async def test_a_stream_moves_with_the_tokens_it_has_the_rest_to_make_and_the_same_seed(mesh: Mesh, count: int) -> None:
    Decode(mesh, "a", dies_after(count))
    second = Decode(mesh, "b", answers)
    assert tokens(await mesh.ask()) == WHOLE
    [request] = second.requests
    assert unpack_tokens(request.token_ids) == [1, 2, 3, *WHOLE[:count]]
    assert request.sampling.max_tokens == 6 - count
    assert request.sampling == structs.replace(PROMPT.sampling, max_tokens=6 - count)
    assert request.num_generated == count
    await asyncio.sleep(0)
    assert mesh.cancelled() == [("ns.decode.a.cancel", [0])], "the lost one may live, and generate for nobody"
    shown = CollectorRegistry()
    mesh.client.moves.show(shown)
    assert shown.get_sample_value("kvmesh_streams_moved_total", {"reason": "DecodeLost"}) == 1
    assert shown.get_sample_value("kvmesh_tokens_computed_again_total") == 3 + count
    assert shown.get_sample_value("kvmesh_requests_retried_total", {"reason": "DecodeLost"}) == 0


async def test_the_log_of_a_request_has_its_instances_its_moves_and_where_prompts_were_computed(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    """A move runs in a task that no request has begun."""

    def dies(decode: Decode, stream: OutStream, _: GenerateRequest) -> None:
        decode.send(stream.tokens([103])._replace(origin=PromptOrigin("p1", "")), stream.error(DecodeLost("a broke")))

    Decode(mesh, "a", dies)
    second = Decode(mesh, "b", answers)
    caplog.handler.addFilter(RequestIds())
    caplog.set_level(logging.INFO)
    with unkept_timeline(NOT_KEPT, "chat", {"kvmesh.request_id": "r"}) as timeline:
        assert tokens(await mesh.ask()) == WHOLE
        RequestLines().end(timeline, "/route", "m", 200)
    assert second.requests[0].wants_origin
    facts = {record.message: vars(record) for record in caplog.records}
    assert facts["stream moves"]["request_id"] == "r"
    told = facts["request"]
    assert (told["decode"], told["prefill"], told["moves"]) == ("a,b", "p1", 1)
    assert told["moved_because"] == "a broke"


async def test_draft_counts_of_a_moved_stream_are_those_of_all_its_instances(mesh: Mesh) -> None:
    def dies(decode: Decode, stream: OutStream, _: GenerateRequest) -> None:
        for count in (1, 2):
            decode.send(stream.tokens([102 + count])._replace(draft_counts=DraftCounts(4 * count, count)))
        decode.send(stream.error(DecodeLost("a broke")))

    def ends(decode: Decode, stream: OutStream, _: GenerateRequest) -> None:
        decode.send(stream.tokens([105, 106, 107])._replace(draft_counts=DraftCounts(5, 2)))
        decode.send(stream.tokens([108], "length"))

    Decode(mesh, "a", dies)
    second = Decode(mesh, "b", ends)
    items = await mesh.ask(prediction=[7, 8])
    assert tokens(items) == WHOLE
    counts = [item.draft_counts for item in items if item.draft_counts is not None]
    assert counts[-1] == (13, 4)  # items of one turn are joined
    assert counts == sorted(counts)
    assert unpack_tokens(second.requests[0].prediction) == [7, 8]


@pytest.mark.parametrize("lost", ["gap", "silent", "error", "before the answer"])
async def test_every_way_of_losing_an_instance_moves_its_stream(mesh: Mesh, lost: str) -> None:
    def script(decode: Decode, stream: OutStream, request: GenerateRequest) -> None:
        decode.send(stream.tokens([103]))
        if lost == "gap":
            stream.tokens([104])
            decode.send(stream.tokens([105]))
        elif lost == "silent":
            health = mesh.decodes._health["a"]
            decode.later(mesh.decodes._lose, health, Loss.SILENT, "silent")
        else:
            decode.send(stream.error(DecodeLost("leaving")))

    first = Decode(mesh, "a", script)
    second = Decode(mesh, "b", answers)
    if lost == "before the answer":

        async def never(_: GenerateRequest) -> GenerateAccepted:
            asyncio.get_running_loop().call_soon(first.lose)
            await asyncio.Event().wait()
            raise AssertionError

        mesh.bus.handlers["ns.decode.a.generate"] = never
    assert tokens(await mesh.ask()) == WHOLE
    assert len(second.requests) == 1


@pytest.mark.parametrize(
    "error",
    [Overloaded("leaving"), PeerLost("leaving"), MalformedMessage("unknown message tag 'generate.v9'")],
)
async def test_an_instance_that_refuses_is_passed_over(
    mesh: Mesh, error: MeshError, caplog: pytest.LogCaptureFixture
) -> None:
    first = Decode(mesh, "a", answers)
    first.refusal = error
    Decode(mesh, "b", answers)
    with caplog.at_level(logging.INFO):
        assert tokens(await mesh.ask()) == WHOLE
    assert len(first.requests) == 1
    (warned,) = [one.levelno == logging.WARNING for one in caplog.records if getattr(one, "from", "") == "a"]
    assert warned is not isinstance(error, Overloaded), "a decode that is full or drains is no reason to look"


def breaks_after(count: int) -> Script:
    def script(decode: Decode, stream: OutStream, request: GenerateRequest) -> None:
        start = len(unpack_tokens(request.token_ids))
        decode.send(*(stream.tokens([100 + start + i]) for i in range(count)), stream.error(InvariantBroken("OOM")))

    return script


async def test_what_a_step_that_failed_took_with_it_is_made_elsewhere(mesh: Mesh) -> None:
    """It was a 500, though the other instances were well."""
    Decode(mesh, "a", breaks_after(2))
    second = Decode(mesh, "b", answers)
    assert tokens(await mesh.ask()) == WHOLE
    assert [unpack_tokens(request.token_ids) for request in second.requests] == [[1, 2, 3, *WHOLE[:2]]]


async def test_a_request_that_breaks_instances_breaks_two_at_most(mesh: Mesh) -> None:
    decodes = [Decode(mesh, name, breaks_after(0)) for name in "abcd"]
    with pytest.raises(PeerBroken, match="OOM"):
        await mesh.ask()
    assert sum(len(decode.requests) for decode in decodes) == 2


async def test_a_request_waits_for_nats_and_gives_up_at_its_deadline(mesh: Mesh) -> None:
    """All its tries were over in a few milliseconds, once the buffer of NATS's client was full."""
    decode = Decode(mesh, "a", answers)
    mesh.bus.is_connected = False
    asking = asyncio.create_task(mesh.ask())
    with pytest.raises(DeadlineExceeded):
        await mesh.ask(life_ms=300)
    assert not decode.requests
    mesh.bus.is_connected = True
    assert sum(len(item.token_ids) for item in await asking) == 6
    assert len(decode.requests) == 1


@pytest.mark.parametrize("finish", [None, "stop"])
@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ZeroDivisionError(), InvariantBroken("reader")),
        (Cancelled("the client reads too slowly"), Cancelled("the client reads too slowly")),
    ],
    ids=["defect", "slow client"],
)
async def test_an_error_of_the_reader_moves_no_stream(
    mesh: Mesh, error: Exception, shown: MeshError, finish: Any
) -> None:
    """A client that did not read had its answer computed six times. What a sink has written would be written twice."""

    class Broken(Reading):
        def add_tokens(self, branch: int, item: StreamItem) -> bool:
            if item.token_ids == [104]:
                raise error
            return super().add_tokens(branch, item)

    def script(decode: Decode, stream: OutStream, _: GenerateRequest) -> None:
        decode.send(stream.tokens([103]))
        decode.later(decode.send, stream.tokens([104], finish))

    Decode(mesh, "a", script)
    other = Decode(mesh, "b", answers)
    sink = Broken(1)
    await mesh.client.generate(replace(PROMPT, deadline_unix_ms=now_ms() + 60_000), sink)
    with pytest.raises(type(shown), match=shown.message):
        async for _ in sink.items(0):
            pass
    assert not other.requests
    assert mesh.cancelled() == ([] if finish else [("ns.decode.a.cancel", [0])])


async def test_an_instance_that_nobody_hears_on_nats_is_passed_over(mesh: Mesh) -> None:
    mesh.book.put("a", record("a", "1", model="m"))
    Decode(mesh, "b", answers)
    assert tokens(await mesh.ask()) == WHOLE


async def test_a_wrong_request_is_not_tried_again(mesh: Mesh) -> None:
    first, second = Decode(mesh, "a", fails_with(PromptTooLong("long"))), Decode(mesh, "b", answers)
    with pytest.raises(PromptTooLong):
        await mesh.ask()
    assert (len(first.requests), len(second.requests)) == (1, 0)
    await asyncio.sleep(0)


async def test_a_stream_that_moves_too_often_gives_up_with_the_last_error(mesh: Mesh) -> None:
    decodes = [Decode(mesh, name, fails_with(PeerLost(f"{name} broke"))) for name in "abc"]
    with pytest.raises(PeerLost, match="c broke"):
        await mesh.ask()
    assert [len(d.requests) for d in decodes] == [2, 2, 2]
    assert sum(len(d.requests) for d in decodes) == MAX_MOVES + 1


async def test_a_request_that_finds_no_decode_instance_fails_at_once(mesh: Mesh) -> None:
    with pytest.raises(NoDecodeInstance) as raised:
        await mesh.ask()
    assert raised.value.retry_after_s == 2.0


@pytest.mark.parametrize("sent", [0, 2])
async def test_what_its_only_instance_has_lost_waits_for_one_to_come(mesh: Mesh, sent: int) -> None:
    """Also before its first token."""
    Decode(mesh, "a", dies_after(sent))
    asyncio.get_running_loop().call_later(0.1, Decode, mesh, "b", answers)
    assert tokens(await mesh.ask()) == WHOLE


async def test_a_stream_waits_no_longer_for_another_instance_than_the_setting_says(mesh: Mesh) -> None:
    mesh.client.choice._waits = Waits(1000.0, 0.2)
    Decode(mesh, "a", dies_after(2))
    with pytest.raises(NoDecodeInstance):
        await mesh.ask()


async def test_a_stream_that_waits_gives_up_at_its_deadline(mesh: Mesh) -> None:
    Decode(mesh, "a", dies_after(2))
    with pytest.raises((NoDecodeInstance, DeadlineExceeded)):
        await mesh.ask(life_ms=100)


async def test_a_reader_that_leaves_sending_the_stream(mesh: Mesh) -> None:
    Decode(mesh, "a", lambda decode, stream, _: decode.send(stream.tokens([103])))
    prompt = replace(PROMPT, deadline_unix_ms=now_ms() + 60_000)
    async with reading(mesh.client, prompt) as (deltas,):
        assert (await anext(deltas)).token_ids == [103]
        assert not mesh.cancelled()
    await asyncio.sleep(0)
    assert mesh.cancelled() == [("ns.decode.a.cancel", [0])]


async def test_a_request_cancelled_while_it_is_sent_sending_the_stream(mesh: Mesh) -> None:
    decode = Decode(mesh, "a", answers)

    async def never(request: GenerateRequest) -> GenerateAccepted:
        decode.requests.append(request)
        await asyncio.Event().wait()
        raise AssertionError

    mesh.bus.handlers["ns.decode.a.generate"] = never
    asking = asyncio.create_task(mesh.ask())
    while not decode.requests:
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait((asking,))
    await asyncio.sleep(0)
    assert mesh.cancelled() == [("ns.decode.a.cancel", [0])]


async def test_a_draining_instance_gets_no_new_stream(mesh: Mesh) -> None:
    leaving, staying = Decode(mesh, "a", answers), Decode(mesh, "b", answers)
    mesh.decodes.record_heartbeat(Heartbeat(instance_id="a", epoch="1", step=0, busy=False, draining=True))
    for _ in range(3):
        await mesh.ask()
    assert (len(leaving.requests), len(staying.requests)) == (0, 3)


async def test_the_model_is_listed_while_it_is_served_and_for_a_while_after_with_the_smallest_context(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mesh.client.models() == []
    one = Decode(mesh, "a", answers)
    mesh.book.put("b", record("b", "1", model="m", max_context=50, started_unix_ms=9000))
    [model] = mesh.client.models()
    assert (model.name, model.max_context, model.created_unix_s) == ("m", 50, 5)
    one.lose()
    mesh.book.remove("b")
    assert mesh.client.models() == [model], "requests wait for an instance to come back"
    mesh.client.choice._seen_s.clear()
    assert mesh.client.models() == []


async def test_without_a_wait_for_lost_instances_models_are_served_while_one_is_there(mesh: Mesh) -> None:
    mesh.client.choice._waits = Waits(0.0, 1000.0)
    one = with_adapters(mesh, "a", {"legal": "w1"})
    assert [model.name for model in mesh.client.models()] == ["m", "legal"]
    assert tokens(await mesh.ask()) == WHOLE
    one.lose()
    assert mesh.client.models() == []
    assert len(mesh.client.listed_models()) == 2


async def test_models_that_were_seen_stay_listed_while_no_instance_serves_them(mesh: Mesh) -> None:
    """While the only decode restarted, the list was empty, and clients dropped the model."""
    assert mesh.client.listed_models() == []
    one = with_adapters(mesh, "a", {"legal": "w1"})
    assert len(mesh.client.listed_models()) == 2
    one.lose()
    mesh.client.choice._seen_s.clear()
    assert mesh.client.models() == []
    assert [model.name for model in mesh.client.listed_models()] == ["m", "legal"]
    with_adapters(mesh, "b", {})
    assert [model.name for model in mesh.client.listed_models()] == ["m"]


async def test_an_adapter_is_known_for_a_while_after_its_last_instance_was_lost(mesh: Mesh) -> None:
    """Clients got 404, which they do not try again, while the instance restarted."""
    with_adapters(mesh, "a", {})
    one = with_adapters(mesh, "b", {"legal": "w1"})
    assert [model.name for model in mesh.client.models()] == ["m", "legal"]
    one.lose()
    assert [model.name for model in mesh.client.models()] == ["m", "legal"]
    assert [model.name for model in mesh.client.listed_models()] == ["m", "legal"]
    asking = asyncio.create_task(mesh.ask(model="legal"))
    await asyncio.sleep(0.05)
    assert not asking.done()
    with_adapters(mesh, "b", {"legal": "w1"})
    assert tokens(await asking) == WHOLE
    one.lose()
    mesh.client.choice._seen_s.pop("legal")
    assert [model.name for model in mesh.client.models()] == ["m"]
    assert [model.name for model in mesh.client.listed_models()] == ["m"]


async def test_other_requests_do_not_prolong_the_wait_for_an_adapter(mesh: Mesh) -> None:
    """A request waited until its deadline, for as long as others were answered: one moment of the last contact was for all."""
    with_adapters(mesh, "a", {})
    one = with_adapters(mesh, "b", {"legal": "w1"})
    mesh.client.models()
    one.lose()
    mesh.client.choice._waits = Waits(0.3, 1000.0)
    asking = asyncio.create_task(mesh.ask(model="legal"))
    async with asyncio.timeout(PATIENCE_S):
        while not asking.done():
            await mesh.ask()
            await asyncio.sleep(0.01)
    with pytest.raises(NoDecodeInstance, match="'legal'"):
        asking.result()


async def test_a_stream_moves_only_to_an_instance_that_holds_the_rest_of_it(mesh: Mesh) -> None:
    """It ended early with "length" on one with fewer pages, or was refused as too long."""
    first, large = Decode(mesh, "a", dies_after(2)), Decode(mesh, "c", answers)
    small = Decode(mesh, "b", answers)
    mesh.book.put("b", record("b", "1", model="m", max_context=8))
    for _ in range(4):
        assert tokens(await mesh.ask()) == WHOLE
        first.register("1")
    assert not small.requests
    assert large.requests


async def test_a_request_that_fits_no_instance_is_refused_after_a_while_and_not_sent(mesh: Mesh) -> None:
    small = Decode(mesh, "a", answers)
    mesh.book.put("a", record("a", "1", model="m", max_context=8))
    mesh.client.choice._waits = Waits(0.2, 1000.0)
    with pytest.raises(NoDecodeInstance, match="with 9 tokens of context"):
        await mesh.ask()
    assert not small.requests
    mesh.book.put("a", record("a", "1", model="m", max_context=9))
    assert tokens(await mesh.ask()) == WHOLE


async def test_a_process_that_was_replaced_costs_no_move(mesh: Mesh) -> None:
    """All decodes had restarted under their ids, and requests used up their moves before the new records were read."""
    decode = Decode(mesh, "a", answers)
    decode.refusal = StaleInstance("instance a has epoch 2, not 1")
    asking = asyncio.create_task(mesh.ask())
    async with asyncio.timeout(PATIENCE_S):
        while len(decode.requests) < MAX_MOVES + 2:
            await asyncio.sleep(0.01)
    decode.refusal = None
    assert tokens(await asking) == WHOLE


async def test_a_request_waits_for_a_decode_instance_that_was_there_a_moment_ago(mesh: Mesh) -> None:
    """With the only decode killed, thousands of requests were refused in the two seconds that its restart took."""
    Decode(mesh, "a", answers).lose()
    asking = asyncio.create_task(mesh.ask())
    await asyncio.sleep(0.05)
    assert not asking.done()
    Decode(mesh, "b", answers)
    assert tokens(await asking) == WHOLE


async def test_a_request_waits_for_a_decode_instance_that_is_draining(mesh: Mesh) -> None:
    """The first request after a drain of the only decode was refused at once, if the mesh had been idle."""
    Decode(mesh, "a", answers)
    up = Heartbeat(instance_id="a", epoch="1", step=0, busy=False)
    mesh.decodes.record_heartbeat(up)
    mesh.decodes.record_heartbeat(structs.replace(up, draining=True))
    asking = asyncio.create_task(mesh.ask())
    await asyncio.sleep(0.05)
    assert not asking.done()
    Decode(mesh, "b", answers)
    assert tokens(await asking) == WHOLE


async def test_a_request_outlives_instances_that_have_just_died(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both decodes killed, requests used up their moves before two seconds of silence had passed, and got 502."""
    monkeypatch.setattr("services.frontend.decode_choice.MAX_MOVES", 1)
    dead = [Decode(mesh, name, answers) for name in "ab"]
    mesh.bus.handlers.clear()
    asking = asyncio.create_task(mesh.ask())
    await asyncio.sleep(0.4)
    assert not asking.done()
    for decode in dead:
        decode.lose()
    await asyncio.sleep(0.1)
    Decode(mesh, "c", answers)
    assert tokens(await asking) == WHOLE


async def test_a_request_is_refused_when_no_decode_instance_came_back_in_time(mesh: Mesh) -> None:
    Decode(mesh, "a", answers).lose()
    mesh.client.choice._waits = Waits(0.15, 1000.0)
    began = time.monotonic()
    with pytest.raises(NoDecodeInstance):
        await mesh.ask()
    assert time.monotonic() - began > 0.1
    with pytest.raises(NoDecodeInstance):
        await mesh.ask()


async def test_frames_that_are_lost_for_good_move_a_stream_and_speak_against_nobody(mesh: Mesh) -> None:
    """Each restart of NATS drove every stream off the instance that had its KV, and opened all breakers."""
    asked: list[GenerateRequest] = []

    def script(decode: Decode, stream: OutStream, request: GenerateRequest) -> None:
        asked.append(request)
        if len(asked) > 1:
            answers(decode, stream, request)
            return
        decode.send(stream.tokens([103]))
        mesh.inbox._sources["a"].order._lost(FramesLost("forgotten"))

    Decode(mesh, "a", script)
    assert tokens(await mesh.ask()) == WHOLE
    assert len(asked) == 2
    assert mesh.client.choice._router.health._breakers == {}


async def test_a_stream_of_a_frontend_that_decode_took_for_gone_moves_and_speaks_against_nobody(mesh: Mesh) -> None:
    """NATS had no listener for its tokens for six seconds. Its clients got 499."""

    def script(decode: Decode, stream: OutStream, request: GenerateRequest) -> None:
        if len(decode.requests) > 1:
            answers(decode, stream, request)
        else:
            decode.send(stream.tokens([103]), stream.error(Cancelled("the frontend has gone")))

    decode = Decode(mesh, "a", script)
    assert tokens(await mesh.ask()) == WHOLE
    assert len(decode.requests) == 2
    assert mesh.client.choice._router.health._breakers == {}


def test_requests_that_take_longer_than_they_may_speak_against_nobody() -> None:
    """Three in a row opened the breaker of a healthy decode."""

    def script(decode: Decode, stream: OutStream, request: GenerateRequest) -> None:
        late_s = (request.deadline_unix_ms - now_ms()) / 1000 + 0.002
        error = stream.error(DeadlineExceeded("the request's deadline passed"))
        asyncio.get_running_loop().call_later(late_s, decode.send, error)

    async def test() -> None:
        mesh = Mesh()
        decode = Decode(mesh, "a", script)
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                await mesh.ask(life_ms=5000)
        assert len(decode.requests) == 3
        assert mesh.client.choice._router.health._breakers == {}

    run_virtually(test)


def with_adapters(mesh: Mesh, name: str, adapters: dict[str, str], **facts: Any) -> Decode:
    decode = Decode(mesh, name, answers)
    facts = {"model": "m", "max_context": 100, "started_unix_ms": 5000, **facts}
    mesh.book.put(name, record(name, "1", adapters=adapters, **facts))
    return decode


async def test_a_request_for_an_adapter_goes_to_an_instance_that_has_it_under_the_models_own_name(mesh: Mesh) -> None:
    plain, both = with_adapters(mesh, "a", {}), with_adapters(mesh, "b", {"legal": "w1"})
    for _ in range(3):
        assert tokens(await mesh.ask(model="legal")) == WHOLE
    assert not plain.requests
    assert [(r.model, r.adapter) for r in both.requests] == [("m", "legal")] * 3
    await mesh.ask()
    await mesh.ask()
    assert [(r.model, r.adapter) for r in [*plain.requests, both.requests[-1]]] == [("m", "")] * 2


async def test_a_stream_of_an_adapter_moves_only_to_instances_that_have_it(mesh: Mesh) -> None:
    first, plain, other = (
        with_adapters(mesh, name, adapters) for name, adapters in (("a", {"l": "1"}), ("b", {}), ("c", {"l": "1"}))
    )
    first.script = dies_after(2)
    assert tokens(await mesh.ask(model="l")) == WHOLE
    assert (len(first.requests), len(plain.requests), len(other.requests)) == (1, 0, 1)


async def test_nobody_having_the_adapter_is_nobody_serving_it(mesh: Mesh) -> None:
    with_adapters(mesh, "a", {"legal": "w1"})
    with pytest.raises(NoDecodeInstance, match="'medical'"):
        await mesh.ask(model="medical")


async def test_adapters_are_listed_after_their_model_with_what_those_that_have_them_can_do(mesh: Mesh) -> None:
    with_adapters(mesh, "a", {"legal": "w1"}, max_context=80)
    with_adapters(mesh, "b", {"legal": "w1", "medical": "w2"}, started_unix_ms=9000)
    listed = [(m.name, m.max_context, m.created_unix_s, m.parent) for m in mesh.client.models()]
    assert listed == [("m", 80, 5, None), ("legal", 80, 5, "m"), ("medical", 100, 9, "m")]


def three(**changes: Any) -> SamplingParams:
    return structs.replace(PROMPT.sampling, n=3, **changes)


async def ask_all(mesh: Mesh, sampling: SamplingParams) -> list[list[StreamItem]]:
    prompt = replace(PROMPT, deadline_unix_ms=now_ms() + 60_000, sampling=sampling)

    async def read(deltas: AsyncGenerator[StreamItem, None]) -> list[StreamItem]:
        return [delta async for delta in deltas]

    async with asyncio.timeout(PATIENCE_S), reading(mesh.client, prompt) as branches:
        return list(await asyncio.gather(*map(read, branches)))


def branches_of(request: GenerateRequest) -> list[OutStream]:
    return [OutStream(request.reply_to, request.stream_id + i) for i in range(request.sampling.n)]


def all_answer(decode: Decode, _: OutStream, request: GenerateRequest) -> None:
    for stream in branches_of(request):
        answers(decode, stream, request)


async def test_branches_are_one_request_with_consecutive_streams(mesh: Mesh) -> None:
    decode = Decode(mesh, "a", all_answer)
    assert [tokens(branch) for branch in await ask_all(mesh, three())] == [WHOLE] * 3
    [request] = decode.requests
    assert request.sampling == three()
    assert not mesh.cancelled()


async def test_each_unfinished_branch_moves_by_itself_with_its_own_seed(mesh: Mesh) -> None:
    def script(decode: Decode, _: OutStream, request: GenerateRequest) -> None:
        for count, stream in enumerate(branches_of(request)):
            for number in range(count):
                decode.send(stream.tokens([103 + number], logprobs=[TOLD]))
        first = branches_of(request)[0]
        decode.send(*(first.tokens([t], "length" if t == WHOLE[-1] else None) for t in WHOLE))
        decode.later(decode.lose)

    Decode(mesh, "a", script)
    second = Decode(mesh, "b", answers)
    found = await ask_all(mesh, three(logprobs=1, prompt_logprobs=0))
    assert [tokens(branch) for branch in found] == [WHOLE] * 3
    assert found[2][0].logprobs == [TOLD] * 2
    moved = sorted(second.requests, key=lambda request: request.num_generated)
    for branch, request in zip((1, 2), moved, strict=True):
        assert request.num_generated == branch
        assert unpack_tokens(request.token_ids) == [1, 2, 3, *WHOLE[:branch]]
        assert request.sampling == structs.replace(
            PROMPT.sampling,
            seed=branch_seed(PROMPT.sampling.seed, branch),
            max_tokens=6 - branch,
            logprobs=1,
            prompt_logprobs=None,
        )


async def test_a_branch_that_moves_before_it_began_still_asks_for_the_prompts_logprobs(mesh: Mesh) -> None:
    Decode(mesh, "a", dies_after(0))
    second = Decode(mesh, "b", answers)
    await ask_all(mesh, three(prompt_logprobs=2))
    assert sorted(str(request.sampling.prompt_logprobs) for request in second.requests) == ["2", "None", "None"]


async def test_a_request_that_is_refused_moves_with_all_its_branches(mesh: Mesh) -> None:
    first, second = Decode(mesh, "a", all_answer), Decode(mesh, "b", all_answer)
    first.refusal = Overloaded("leaving")
    assert [tokens(branch) for branch in await ask_all(mesh, three())] == [WHOLE] * 3
    assert [request.sampling.n for request in second.requests] == [3]


async def test_closing_one_branch_sending_it_alone_and_leaving_all(mesh: Mesh) -> None:
    Decode(mesh, "a", lambda decode, _, request: decode.send(*(s.tokens([103]) for s in branches_of(request))))
    prompt = replace(PROMPT, deadline_unix_ms=now_ms() + 60_000, sampling=three())
    sink = Reading(3)
    sink.unwanted.add(1)
    branches = await mesh.client.generate(prompt, sink)
    for queue in sink.came:
        item = await queue.get()
        assert isinstance(item, StreamItem)
        assert item.token_ids == [103]
    await asyncio.sleep(0)
    assert mesh.cancelled() == [("ns.decode.a.cancel", [1])]
    for branch in branches:
        branch.close()
    await asyncio.sleep(0)
    assert mesh.cancelled()[1:] == [("ns.decode.a.cancel", [0]), ("ns.decode.a.cancel", [2])]


async def test_logprobs_of_items_that_are_read_together_stay_in_order(mesh: Mesh) -> None:
    told = [TokenLogprobs(-float(i), ((i, -1.0),)) for i in range(6)]

    def script(decode: Decode, stream: OutStream, _: GenerateRequest) -> None:
        made = [
            stream.tokens([103 + i], logprobs=[told[i]], prompt_logprobs=[TOLD] if i == 0 else None) for i in range(5)
        ]
        decode.send(*made, stream.tokens([108], "length", logprobs=[told[5]]))

    Decode(mesh, "a", script)
    [delta] = await mesh.ask()
    assert delta == StreamItem(0, 0, WHOLE, "length", None, 0, 0, told, [TOLD])


TOLD = TokenLogprobs(-0.5, ((42, -0.5),))
