import asyncio
import logging
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from components.discovery.registry import Registration
from components.errors import (
    InvariantBroken,
    ListenerGone,
    MalformedMessage,
    MeshError,
    NobodyListens,
    Overloaded,
    PeerLost,
    PromptTooLong,
    Rejected,
    StaleInstance,
    UnknownModel,
)
from components.kv_transfer.aux import AuxRecord
from components.kv_transfer.checksum import PageChecksums
from components.messaging.call_server import Endpoint
from components.messaging.clocks import now_ms
from components.messaging.fleet import Fleet
from components.messaging.liveness import STALLED_AFTER_S, Liveness, Loss
from components.messaging.outbox import StreamOutbox
from components.routing.candidates import CandidateQuery
from components.routing.health import DEFAULT_SETTINGS, BreakerState
from components.routing.policy import RouteRequest
from components.telemetry.figures import Figures
from components.telemetry.worker_metrics import WorkerMetrics
from components.wire.codec import UNNAMED
from components.wire.generate import (
    CancelStreams,
    GenerateAccepted,
    GenerateRequest,
    PromptOrigin,
    StreamItem,
    unpack_frame,
)
from components.wire.heartbeat import Heartbeat
from components.wire.prefill import (
    KvComing,
    OpenRoom,
    PrefillAccepted,
    PrefillRequest,
    Quiesce,
    Quiet,
    RoomFailed,
    RoomOk,
)
from components.wire.sampling import SamplingParams
from components.wire.step_stats import DraftCounts, StepStats
from components.wire.tokens import pack_tokens
from engine.ports import Exposed, Failed, FinishReason, Phase, TokenOutput
from services.decode.prefill_client import PrefillClient
from services.decode.requests import ActiveRequests
from services.decode.runner import RequestRunner
from services.decode.service import DecodeService
from tests.components.discovery.records import record
from tests.components.kv_transfer.fake_transfer import LAYOUT, FakeTransfer, endpoint
from tests.components.kv_transfer.nixl_peer import Pages
from tests.components.messaging.fake_bus import FakeBus
from tests.services.decode.fake_engine import FakeEngineLoop, FakeRegistry
from tests.services.fake_masks import FakeMasks
from tests.waiting import PATIENCE_S, turns, until

pytestmark = pytest.mark.anyio

ROOM, STAMP, FRONT, ID = "4c", 77, "ns.frontend.f.tokens", "r.1"  # by what is drawn for them below
PAGES = [3, 4, 5]


class Prefill:
    """The prefill instance and the bootstrap replica; a gate, when cleared, holds an answer."""

    def __init__(self) -> None:
        self.asked: list[PrefillRequest] = []
        self.offered: list[OpenRoom] = []
        self.called_off: list[Quiesce] = []
        self.refusal: MeshError | None = None
        self.offer_refusal: MeshError | None = None
        self.quiet_failures: list[Exception] = []  # raised one after another
        self.answers, self.takes, self.quiets = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for gate in (self.answers, self.takes, self.quiets):
            gate.set()

    async def prefill(self, request: PrefillRequest) -> PrefillAccepted:
        self.asked.append(request)
        await self.answers.wait()
        if self.refusal is not None:
            raise self.refusal
        return PrefillAccepted(request_id=request.request_id)

    async def quiesce(self, request: Quiesce) -> Quiet:
        self.called_off.append(request)
        await self.quiets.wait()
        if self.quiet_failures:
            raise self.quiet_failures.pop(0)
        return Quiet(request_id=request.request_id)

    async def open(self, request: OpenRoom) -> RoomOk:
        self.offered.append(request)
        await self.takes.wait()
        if self.offer_refusal is not None:
            raise self.offer_refusal
        return RoomOk(room=request.room)


class Decode:
    def __init__(self, outbox: Any, bus: FakeBus) -> None:
        self.bus, self.engine, self.registry = bus, FakeEngineLoop(), FakeRegistry()
        self.transfer, self.prefill = FakeTransfer(), Prefill()
        self.bus.serve(
            "ns.prefill.p",
            [
                Endpoint("prefill", PrefillRequest, self.prefill.prefill),
                Endpoint("quiesce", Quiesce, self.prefill.quiesce),
            ],
        )
        self.bus.serve("ns.bootstrap.boot", [Endpoint("open", OpenRoom, self.prefill.open)])
        self.registry.book.put("p", record("p", "1", role="prefill", model="m", kv=endpoint("prefill-p")))
        self.registry.book.put("boot", record("boot", "1", role="bootstrap"))
        self.prefills = Liveness(self.registry.book, "prefill")
        self.fleet = Fleet(self.registry.book, self.prefills, "prefill", "round_robin", Random(0))
        self.registration = Registration("d", "mine")
        self.active = ActiveRequests(outbox)
        self.prefill_client = PrefillClient(
            self.bus,
            self.registration,
            self.registry,
            self.transfer,
            1000.0,  # longer than any test: a forgotten transfer must not end by a timeout
            bootstrap_timeout_s=1000.0,
            checksums=None,
            recomputes=True,
        )
        self.masks: Any = FakeMasks()
        self.metrics = WorkerMetrics()
        self.runner = RequestRunner(
            self.engine,
            self.prefill_client,
            self.fleet,
            self.active,
            masks=self.masks,
            metrics=self.metrics,
            model="m",
            max_local_prefill=2,
            local_prefill_on_queue=True,
            on_transfer_failure="recompute",
        )
        self.service = DecodeService(self.registration, self.runner, model="m", metrics=self.metrics)

    async def ask(self, stream_id: int = 1, life_ms: int = 1_000_000, **changes: Any) -> GenerateAccepted:
        request = GenerateRequest(
            request_id="r",
            epoch="mine",
            model="m",
            stream_id=stream_id,
            reply_to=FRONT,
            token_ids=pack_tokens(range(10)),
            deadline_unix_ms=now_ms() + life_ms,
            sampling=SamplingParams(max_tokens=5),
        )
        accepted = await self.service.generate(replace(request, **changes))
        await turns()
        return accepted

    async def reserve(self) -> None:
        self.engine.step(reserved=[Exposed(ID, PAGES, 4, 4)])
        await turns()

    async def land(self, stamp: int = STAMP, num_pages: int = 3) -> None:
        self.transfer.land(ROOM, self.prefill.offered[-1].aux_slot, AuxRecord(stamp, num_pages, 42, 0))
        await turns()

    async def finish(self, engine_id: str = ID, token: int = 43) -> None:
        self.engine.step(tokens=[TokenOutput(engine_id, [token], FinishReason.LENGTH)])
        await turns()

    async def cancel(self, stream_id: int = 1) -> int:
        answer = await self.service.cancel(CancelStreams(reply_to=FRONT, stream_ids=[stream_id]))
        await turns()
        return answer.count

    async def until_nothing_runs(self) -> None:
        """Answers of prefill and bootstrap take several turns of the loop."""
        async with asyncio.timeout(PATIENCE_S):
            while self.runner._tasks or self.runner._remote._settling:
                await asyncio.sleep(0)  # no longer: this is called for thousands of orders of events
        await turns()

    def items(self) -> list[StreamItem]:
        return [item for _, data in self.bus.frames for item in unpack_frame(data).items]

    def tokens(self) -> list[int]:
        return [t for item in self.items() for t in item.token_ids]

    def errors(self) -> list[str]:
        return [item.error.error for item in self.items() if item.error is not None]

    def queues(self) -> dict[str, int]:
        """The queues that are not empty, with their lengths."""
        figures = Figures("decode", "mine")
        self.service.show(figures)
        return {state: count for state, count in figures.status().queues.items() if count}

    def beat(self, queued_tokens: int, prompt_tokens_per_s: float) -> None:
        load = {"queued_tokens": queued_tokens, "prompt_tokens_per_s": prompt_tokens_per_s}
        self.prefills.record_heartbeat(Heartbeat(instance_id="p", epoch="1", step=1, busy=True, **load))

    def local(self, reason: str) -> float | None:
        """Return the number of prompts computed here."""
        name = "kvmesh_prompts_computed_on_decode_total"
        return self.metrics.registry.get_sample_value(name, {"reason": reason})

    def failed_transfers(self) -> dict[str, float]:
        """By cause."""
        samples = (s for family in self.metrics.registry.collect() for s in family.samples)
        shown = [s for s in samples if s.name == "kvmesh_kv_transfers_total" and s.labels["outcome"] == "failed"]
        return {s.labels["cause"]: s.value for s in shown if s.value}

    @property
    def recomputes(self) -> float | None:
        return self.local("transfer_failed")

    def assert_nothing_is_kept(self) -> None:
        assert not self.queues()
        assert not self.runner._tasks
        assert not self.runner._remote._settling
        assert not self.prefill_client._transfers
        assert not len(self.active)
        assert not self.active._by_stream
        assert not self.transfer.expected
        assert self.transfer.aux.num_free == self.transfer.aux.num_slots

    def assert_pinned(self) -> None:
        assert self.engine.did("release") == []
        assert self.transfer.aux.num_free == self.transfer.aux.num_slots - 1
        assert list(self.transfer.expected) == [ROOM], "prefill's write would stall if nobody polled"


@pytest.fixture
async def decode(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Decode]:
    monkeypatch.setattr("services.decode.prefill_client.randbits", lambda _: 76)
    bus = FakeBus()
    async with StreamOutbox(bus, "d", lambda: "mine", lambda: 1).running() as outbox:
        yield Decode(outbox, bus)


async def test_kv_is_fetched_the_first_token_comes_from_prefill_and_nothing_is_kept(decode: Decode) -> None:
    assert await decode.ask() == GenerateAccepted(request_id="r", number=1)
    assert decode.engine.engine.submitted[ID].phase is Phase.DECODE
    assert not decode.prefill.offered
    await decode.reserve()
    [offer] = decode.prefill.offered
    assert (offer.room, offer.request_id, offer.decode_id, offer.decode_epoch) == (ROOM, ID, "d", "mine")
    assert (offer.prefill_id, offer.prefill_epoch) == ("p", "1")
    [asked] = decode.prefill.asked
    assert (asked.room, asked.stamp) == (ROOM, STAMP)
    assert (offer.pages, offer.num_cached_pages) == (PAGES, 1)
    await decode.land()
    assert decode.tokens() == [42]
    await decode.finish()
    assert decode.tokens() == [42, 43]
    assert [item.seq for item in decode.items()] == [0, 1]
    assert decode.items()[-1].finish == "length"
    assert decode.engine.did("recompute") == decode.engine.did("cancel") == []
    decode.assert_nothing_is_kept()


async def test_a_request_goes_through_the_queues_one_after_the_other(decode: Decode) -> None:
    await decode.ask()
    assert decode.queues() == {"prealloc": 1}
    await decode.reserve()
    assert decode.queues() == {"transfer": 1}
    await decode.land()
    assert decode.queues() == {"running": 1}
    await decode.finish()
    assert decode.queues() == {}


async def test_kv_that_is_said_to_come_is_looked_for(decode: Decode) -> None:
    await decode.ask()
    await decode.reserve()
    assert await decode.service.kv_coming(KvComing(room=ROOM)) == RoomOk(room=ROOM)
    assert "kv_coming" in {endpoint.name for endpoint in decode.service.endpoints()}
    assert decode.transfer.hastened == [ROOM]
    await decode.land()
    await decode.finish()


async def test_the_first_token_is_sent_before_its_kv_arrives_and_not_twice(decode: Decode) -> None:
    await decode.ask()
    await decode.reserve()
    coming = KvComing(room=ROOM, request_id=ID, first_token=42)
    for _ in range(2):
        await decode.service.kv_coming(coming)
    await turns()
    assert decode.tokens() == [42]
    assert decode.engine.did("deliver") == []
    await decode.land()
    await decode.service.kv_coming(coming)
    assert ("deliver", ID, 42) in decode.engine.engine.did
    await decode.finish()
    assert decode.tokens() == [42, 43]
    assert [item.seq for item in decode.items()] == [0, 1]
    decode.assert_nothing_is_kept()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("there", "reported"), [(3, 4), (9, 9), (2**31, 10)])
async def test_cached_tokens_are_those_of_prefill_if_it_had_more(
    decode: Decode, there: int, reported: int, *, early: bool
) -> None:
    """Usage reported the 4 tokens that decode had cached. A prompt cached on prefill alone counted as computed."""
    decode.engine.engine.delivered = [TokenOutput(ID, [42], num_cached_tokens=4)]
    await decode.ask()
    await decode.reserve()
    if early:
        await decode.service.kv_coming(KvComing(room=ROOM, request_id=ID, first_token=42, num_cached_tokens=there))
        await turns()
        assert decode.tokens() == [42]
    decode.transfer.land(ROOM, decode.prefill.offered[-1].aux_slot, AuxRecord(STAMP, 3, 42, there))
    await turns()
    await decode.finish()
    assert [item.num_cached_tokens for item in decode.items()] == [reported, 0]


async def test_a_prompt_whose_first_token_was_sent_is_computed_with_it_if_its_kv_does_not_arrive(
    decode: Decode,
) -> None:
    await decode.ask()
    await decode.reserve()
    await decode.service.kv_coming(KvComing(room=ROOM, request_id=ID, first_token=42))
    await decode.service.room_failed(RoomFailed(request_id=ID, room=ROOM, error="TransferFailed", cause="a bad cable"))
    await turns()
    assert ("recompute", ID, 42) in decode.engine.engine.did
    await decode.service.kv_coming(KvComing(room=ROOM, request_id=ID, first_token=42))
    await decode.finish()
    assert decode.tokens() == [42, 43]
    await decode.until_nothing_runs()
    decode.assert_nothing_is_kept()


@pytest.mark.parametrize("between", range(4))
async def test_a_first_token_that_comes_just_after_the_failure_of_its_transfer_is_sent_once(
    decode: Decode, between: int
) -> None:
    """The token comes `between` turns of the event loop after the failure."""
    await decode.ask()
    await decode.reserve()
    await decode.service.room_failed(RoomFailed(request_id=ID, room=ROOM, error="TransferFailed", cause="a bad cable"))
    await turns(between)
    await decode.service.kv_coming(KvComing(room=ROOM, request_id=ID, first_token=42))
    await turns()
    early = [] if ("recompute", ID) in decode.engine.engine.did else [42]
    assert decode.tokens() == early
    assert ("recompute", ID, *early) in decode.engine.engine.did
    await decode.finish()
    assert decode.tokens() == [*early, 43]
    await decode.until_nothing_runs()
    decode.assert_nothing_is_kept()


async def test_a_request_is_in_the_queue_of_its_transfer_until_its_kv_has_arrived(decode: Decode) -> None:
    await decode.ask()
    await decode.reserve()
    assert decode.queues() == {"transfer": 1}
    await decode.service.kv_coming(KvComing(room=ROOM, request_id=ID, first_token=42))
    await turns()
    assert decode.tokens() == [42]
    assert decode.queues() == {"transfer": 1}
    await decode.land()
    assert decode.queues() == {"running": 1}
    await decode.finish()
    assert decode.queues() == {}


@pytest.mark.parametrize(
    ("sampling", "coming"),
    [
        ({"max_tokens": 1}, {}),
        ({"stop_token_ids": (42,)}, {}),
        ({"n": 2}, {}),
        ({"logprobs": 0}, {}),
        ({}, {"room": "another"}),
        ({}, {"first_token": None}),
    ],
    ids=["the last", "an end", "branches", "log-probabilities", "another room", "no token"],
)
async def test_a_first_token_waits_for_its_kv_if_it_could_be_the_last_or_has_more_to_it(
    decode: Decode, sampling: dict[str, Any], coming: dict[str, Any]
) -> None:
    await _waits_for_its_kv(decode, sampling, coming)


async def test_a_first_token_waits_for_its_kv_while_others_run(decode: Decode) -> None:
    decode.engine.stats = StepStats(num_running=1)
    await _waits_for_its_kv(decode, {}, {})


async def _waits_for_its_kv(decode: Decode, sampling: dict[str, Any], coming: dict[str, Any]) -> None:
    await decode.ask(sampling=SamplingParams(**{"max_tokens": 5, **sampling}))
    await decode.reserve()
    await decode.service.kv_coming(KvComing(**{"room": ROOM, "request_id": ID, "first_token": 42, **coming}))
    await turns()
    assert not decode.items()
    await decode.land()
    assert decode.items()
    await decode.cancel(1)
    await decode.until_nothing_runs()


async def test_a_request_whose_kv_does_not_come_waits_for_its_turn_here(decode: Decode) -> None:
    await decode.ask()
    await decode.reserve()
    await decode.service.room_failed(RoomFailed(request_id=ID, room=ROOM, error="PrefillLost", cause="gone"))
    await decode.until_nothing_runs()
    assert decode.queues() == {"waiting": 1}
    await decode.finish()
    assert decode.queues() == {}


async def test_a_prompt_is_computed_here_while_the_queue_at_prefill_lasts_longer(decode: Decode) -> None:
    decode.beat(1000, 100.0)  # ten seconds
    decode.engine.step(stats=StepStats(prompt_tokens=10, step_s=1.0))  # here, ten tokens take one
    await decode.ask(1)
    assert decode.engine.engine.submitted["r.1"].phase is Phase.FULL
    assert decode.queues() == {"waiting": 1}
    assert decode.service.heartbeat().queued_tokens == 10
    assert (decode.service.heartbeat().accepted, decode.service.heartbeat().num_requests) == (1, 1)
    decode.beat(150, 100.0)  # one and a half: within the margin
    await decode.ask(2)
    assert decode.engine.engine.submitted["r.2"].phase is Phase.DECODE
    decode.runner.choice._overflow = False
    decode.beat(1000, 100.0)
    await decode.ask(3)
    assert decode.engine.engine.submitted["r.3"].phase is Phase.DECODE
    for stream_id in (1, 2, 3):
        await decode.cancel(stream_id)
    await decode.until_nothing_runs()
    decode.assert_nothing_is_kept()


async def test_a_stream_that_ends_with_its_first_token_is_over(decode: Decode) -> None:
    decode.engine.engine.delivered = [TokenOutput(ID, [42], FinishReason.STOP)]
    await decode.ask()
    await decode.reserve()
    await decode.land()
    assert decode.items()[-1].finish == "stop"
    decode.assert_nothing_is_kept()


@pytest.mark.parametrize("prefix", [8, 9, 10])
async def test_little_left_to_compute_is_computed_here(decode: Decode, prefix: int) -> None:
    decode.engine.engine.prefix = prefix
    await decode.ask()
    assert decode.engine.engine.submitted[ID].phase is Phase.FULL
    assert not decode.prefill.asked


async def test_a_transfer_too_many_is_none(decode: Decode) -> None:
    taken = [decode.transfer.aux.take() for _ in range(decode.transfer.aux.num_slots)]
    await decode.ask()
    assert decode.engine.engine.submitted[ID].phase is Phase.FULL
    await decode.finish()
    for slot in taken:
        decode.transfer.aux.give_back(slot)
    decode.assert_nothing_is_kept()


async def test_slots_that_others_take_while_prefill_instances_are_asked_leave_none(decode: Decode) -> None:
    """The request failed with QueueFull: free slots were only checked before the queries."""
    taken: list[int] = []

    class Asking:
        are_needed = True

        async def query(self, ask: RouteRequest, *_: object) -> CandidateQuery:
            query = CandidateQuery(decode.fleet.router, ask)
            query.add_answers(1, {"p": 0})
            aux = decode.transfer.aux
            taken.extend(aux.take() for _ in range(aux.num_slots))
            return query

    candidate_queries: Any = Asking()
    decode.fleet.candidate_queries = candidate_queries
    await decode.ask()
    assert decode.errors() == []
    assert decode.engine.engine.submitted[ID].phase is Phase.FULL
    assert decode.local("no_aux_slot") == 1
    await decode.finish()
    for slot in taken:
        decode.transfer.aux.give_back(slot)
    decode.assert_nothing_is_kept()


@pytest.mark.parametrize("change", [{"kv": endpoint("prefill-p", layout=replace(LAYOUT, layers=2))}, {"adapters": {}}])
async def test_a_prefill_that_restarts_with_other_settings_while_it_is_asked_is_not_used(
    change: dict[str, Any], decode: Decode
) -> None:
    """With other layers the transfer failed; with other weights decode would have used wrong KV."""
    decode.engine.engine.adapters = {"legal": "w1"}
    before = {"role": "prefill", "model": "m", "kv": endpoint("prefill-p"), "adapters": {"legal": "w1"}}
    decode.registry.book.put("p", record("p", "1", **before))

    class Asking:
        are_needed = True

        async def query(self, ask: RouteRequest, *_: object) -> CandidateQuery:
            query = CandidateQuery(decode.fleet.router, ask)
            decode.registry.book.put("p", record("p", "2", **{**before, **change}))
            query.add_answers(1, {"p": 0})
            return query

    candidate_queries: Any = Asking()
    decode.fleet.candidate_queries = candidate_queries
    await decode.ask(adapter="legal")
    assert decode.errors() == []
    assert decode.engine.engine.submitted[ID].phase is Phase.FULL
    assert not decode.prefill.asked
    assert decode.local("unusable") == 1
    await decode.finish()
    decode.assert_nothing_is_kept()


async def test_without_prefill_the_prompt_is_computed_here(decode: Decode) -> None:
    decode.registry.book.remove("p")
    await decode.ask()
    assert decode.engine.engine.submitted[ID].phase is Phase.FULL
    await decode.finish()
    decode.assert_nothing_is_kept()


async def test_a_prefill_of_another_layout_is_passed_over_and_said_once_until_it_is_gone(
    decode: Decode, caplog: pytest.LogCaptureFixture
) -> None:
    other = endpoint("prefill-p", layout=replace(LAYOUT, dtype="bfloat16"))
    decode.registry.book.put("p", record("p", "2", role="prefill", model="m", kv=other))
    for number in range(3):
        await decode.ask(number)
    assert not decode.prefill.asked
    assert caplog.messages.count("prefill instance not used") == 1
    assert len(decode.runner.choice._refused) == 1
    decode.registry.book.remove("p")
    assert not decode.runner.choice._refused


async def test_a_prefill_with_another_transfer_backend_is_passed_over_with_both_named(
    decode: Decode, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(endpoint("prefill-p"), backend="nixl/UCX")
    decode.registry.book.put("p", record("p", "2", role="prefill", model="m", kv=other))
    await decode.ask()
    assert not decode.prefill.asked
    assert decode.engine.engine.submitted[ID].phase is Phase.FULL
    [said] = [vars(r)["cause"] for r in caplog.records if r.message == "prefill instance not used"]
    assert said == "prefill and decode must use the same KV transfer backend (--kv-transfer: fake here, nixl/UCX there)"
    await decode.finish()
    decode.assert_nothing_is_kept()


@pytest.mark.parametrize("page_size", [2, 8, 16])
async def test_a_prefill_whose_page_size_divides_ours_or_is_divided_by_it_is_used(
    decode: Decode, page_size: int
) -> None:
    other = endpoint("prefill-p", layout=replace(LAYOUT, page_size=page_size))
    decode.registry.book.put("p", record("p", "1", role="prefill", model="m", kv=other))
    await decode.ask()
    assert len(decode.prefill.asked) == 1
    await decode.reserve()
    await decode.land()
    await decode.finish()
    decode.assert_nothing_is_kept()


async def test_a_prefill_whose_page_size_does_not_fit_is_passed_over_with_both_sizes_named(
    decode: Decode, caplog: pytest.LogCaptureFixture
) -> None:
    other = endpoint("prefill-p", layout=replace(LAYOUT, page_size=6))
    decode.registry.book.put("p", record("p", "1", role="prefill", model="m", kv=other))
    await decode.ask()
    assert not decode.prefill.asked
    assert "(page_size: 4 here, 6 there)" in vars(caplog.records[-1])["cause"]


async def test_an_adapter_goes_to_the_engine_and_to_a_prefill_that_has_its_very_weights(decode: Decode) -> None:
    decode.engine.engine.adapters = {"legal": "w1", "medical": "w2"}
    with_adapters = {"role": "prefill", "model": "m", "kv": endpoint("prefill-p")}
    decode.registry.book.put("p", record("p", "1", adapters={"legal": "w1", "medical": "other"}, **with_adapters))
    await decode.ask(adapter="legal")
    assert ("blocks", "", "legal") in decode.engine.engine.did
    submitted = decode.engine.engine.submitted[ID]
    assert (submitted.adapter, submitted.phase) == ("legal", Phase.DECODE)
    assert [asked.adapter for asked in decode.prefill.asked] == ["legal"]
    await decode.reserve()
    await decode.land()
    await decode.finish()
    decode.assert_nothing_is_kept()


@pytest.mark.parametrize("adapters", [{"medical": "w2"}, {"legal": "other", "medical": "w2"}])
async def test_no_prefill_with_the_adapters_weights_means_computing_here(
    decode: Decode, adapters: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    decode.engine.engine.adapters = {"legal": "w1", "medical": "w2"}
    decode.registry.book.put(
        "p", record("p", "1", role="prefill", model="m", kv=endpoint("prefill-p"), adapters=adapters)
    )
    for stream_id in (1, 2):
        await decode.ask(stream_id, adapter="legal")
        submitted = decode.engine.engine.submitted[f"r.{stream_id}"]
        assert (submitted.adapter, submitted.phase) == ("legal", Phase.FULL)
    assert not decode.prefill.asked
    said = [vars(r)["cause"] for r in caplog.records if r.message == "prefill instance not used"]
    if "legal" in adapters:
        assert said == ["prefill and decode must load the same weights as adapter 'legal' (w1 here, other there)"], (
            "once, and both identities"
        )
    await decode.ask(3, adapter="medical")
    assert decode.engine.engine.submitted["r.3"].phase is Phase.DECODE
    for stream_id in (1, 2, 3):
        await decode.cancel(stream_id)
    await decode.until_nothing_runs()


async def test_a_request_that_comes_twice_is_answered_once(decode: Decode) -> None:
    """The second one replaced the first one, was refused by the engine, and ended the stream.

    Later it was refused, which failed the request if NATS had lost the answer to the first one.
    """
    for _ in range(2):
        assert await decode.ask() == GenerateAccepted(request_id="r", number=1)
    with pytest.raises(Rejected, match=r"request id 'r\.1' is in use"):
        await decode.ask(reply_to="ns.frontend.other.tokens")
    assert decode.engine.did("submit") == [ID]
    await decode.reserve()
    await decode.land()
    await decode.finish()
    assert decode.tokens() == [42, 43]
    assert decode.errors() == []
    decode.assert_nothing_is_kept()


@pytest.mark.parametrize("stream_id", [1, 2])
async def test_a_stream_belongs_to_one_request(decode: Decode, stream_id: int) -> None:
    """Of two requests with one stream, the end of the second failed in the engine's loop."""
    short = pack_tokens([1])
    await decode.ask(stream_id, token_ids=short)
    with pytest.raises(Rejected, match="stream id 1 is in use"):
        await decode.ask(request_id="other", token_ids=short, sampling=SamplingParams(max_tokens=5, n=2))
    await decode.ask(stream_id, request_id="other", token_ids=short, reply_to="ns.frontend.other.tokens")
    for engine_id in (f"r.{stream_id}", f"other.{stream_id}"):
        await decode.finish(engine_id)
    assert [item.token_ids for item in decode.items()] == [[43]] * 2
    decode.assert_nothing_is_kept()


@pytest.mark.parametrize("stream_id", [-1, 2**63 - 1, 2**63])
async def test_a_stream_that_no_frame_can_carry_is_refused(decode: Decode, stream_id: int) -> None:
    with pytest.raises(Rejected, match="out of range"):
        await decode.ask(stream_id)
    decode.assert_nothing_is_kept()


async def test_an_adapter_that_is_not_here_is_refused_at_once(decode: Decode) -> None:
    decode.engine.engine.adapters = {"legal": "w1"}
    with pytest.raises(UnknownModel, match="no adapter 'medical' of 'm'"):
        await decode.ask(adapter="medical")
    assert not decode.engine.engine.submitted


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"epoch": "older"}, StaleInstance),
        ({"model": "other"}, UnknownModel),
        ({"token_ids": b"123"}, MalformedMessage),
    ],
)
async def test_a_wrong_request_is_refused_before_anything_is_taken(
    decode: Decode, changes: dict[str, Any], error: type[MeshError]
) -> None:
    """Before an aux slot is taken: a request that is refused later would keep it."""
    with pytest.raises(error):
        await decode.ask(**changes)
    await turns()
    assert not decode.engine.engine.did
    decode.assert_nothing_is_kept()


async def test_a_leaving_instance_takes_nothing_new(decode: Decode) -> None:
    decode.service.draining = True
    with pytest.raises(Overloaded):
        await decode.ask()


@pytest.mark.parametrize("refusal", [Overloaded("full"), PromptTooLong("long"), InvariantBroken("bug")])
async def test_what_prefill_refuses_is_computed_here(decode: Decode, refusal: MeshError) -> None:
    decode.prefill.refusal = refusal
    await decode.ask()
    await decode.reserve()
    assert decode.engine.did("recompute") == [ID]
    assert decode.recomputes == 1
    assert not decode.prefill.offered
    await decode.finish()
    assert decode.tokens() == [43]
    assert decode.engine.did("release") == [ID]
    decode.assert_nothing_is_kept()


async def test_pages_are_offered_before_prefill_has_answered(decode: Decode) -> None:
    decode.prefill.answers.clear()
    await decode.ask()
    await decode.reserve()
    assert [offer.room for offer in decode.prefill.offered] == [ROOM]
    assert decode.queues() == {"transfer": 1}
    await decode.land()  # its answer is slower than its KV, or was lost
    assert decode.tokens() == [42]
    await decode.finish()
    decode.assert_nothing_is_kept()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("ask ")]


async def test_a_refusal_that_comes_after_the_pages_were_offered_pins_them_until_prefill_is_quiet(
    decode: Decode,
) -> None:
    decode.prefill.answers.clear()
    decode.prefill.quiets.clear()
    await decode.ask()
    await decode.reserve()
    decode.prefill.refusal = Overloaded("full")
    decode.prefill.answers.set()
    await turns()
    assert decode.engine.did("recompute") == [ID]
    assert [q.request_id for q in decode.prefill.called_off] == [ID]
    decode.assert_pinned()
    decode.prefill.quiets.set()
    await turns()
    assert decode.engine.did("release") == [ID]
    await decode.finish()
    assert decode.tokens() == [43]
    decode.assert_nothing_is_kept()


async def test_no_cancel_is_sent_before_prefill_has_answered(decode: Decode) -> None:
    """The cancel could overtake the request and have no effect: prefill would then write into freed pages."""
    decode.prefill.answers.clear()
    await decode.ask()
    await decode.reserve()
    await decode.service.room_failed(RoomFailed(request_id=ID, room=ROOM, error="PrefillLost", cause="gone"))
    await turns()
    assert decode.engine.did("recompute") == [ID]
    assert not decode.prefill.called_off
    decode.assert_pinned()
    decode.prefill.answers.set()
    await decode.until_nothing_runs()
    assert [q.request_id for q in decode.prefill.called_off] == [ID]
    assert decode.engine.did("release") == [ID]
    await decode.finish()
    decode.assert_nothing_is_kept()


@pytest.mark.parametrize(("error", "lost"), [("NobodyListens", True), ("PrefillLost", True), ("TransferFailed", False)])
async def test_the_span_of_a_prefill_that_dies_before_the_offer_reaches_it_is_recorded_here(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, error: str, lost: bool
) -> None:
    """In one of 15 traces the spans that it had exported had no parent."""
    recorded: list[str] = []
    monkeypatch.setattr("services.decode.remote_prefill.record_lost", lambda name, *_: recorded.append(name))
    await decode.ask()
    await decode.reserve()
    await decode.service.room_failed(RoomFailed(request_id=ID, room=ROOM, error=error, cause="no listener"))
    await turns()
    assert decode.engine.did("recompute") == [ID]
    assert recorded == ["prefill.request"] * lost
    await decode.until_nothing_runs()
    await decode.finish()


@pytest.mark.parametrize("stamp", [STAMP, STAMP + 1, 0])
async def test_prefill_proves_by_the_stamp_of_a_request_that_it_writes_no_more(decode: Decode, stamp: int) -> None:
    """Without it decode asks. A prefill whose engine had failed was gone by then, and the pages were pinned for a minute."""
    decode.prefill.quiets.clear()
    await decode.ask()
    await decode.reserve()
    failed = RoomFailed(request_id=ID, room=ROOM, error="PeerLost", cause="broken", stamp=stamp)
    await decode.service.room_failed(failed)
    await turns()
    assert decode.engine.did("recompute") == [ID]
    if stamp == STAMP:
        assert decode.engine.did("release") == [ID]
        assert not decode.prefill.called_off
    else:
        decode.assert_pinned()
    decode.prefill.quiets.set()
    await decode.until_nothing_runs()
    assert decode.engine.did("release") == [ID]
    await decode.finish()
    decode.assert_nothing_is_kept()


@pytest.mark.usefixtures("soon_gone")
async def test_a_report_with_the_stamp_frees_pages_that_are_pinned_already(decode: Decode) -> None:
    decode.prefill.quiet_failures = [Overloaded("busy")] * 1000
    await decode.ask()
    await decode.reserve()
    decode.registry.book.remove("p")
    await until(lambda: decode.engine.did("recompute") == [ID])
    decode.assert_pinned()
    await decode.service.room_failed(RoomFailed(request_id=ID, room=ROOM, error="PeerLost", cause="", stamp=STAMP))
    await until(lambda: decode.engine.did("release") == [ID])
    await decode.finish()
    decode.assert_nothing_is_kept()


async def test_a_bootstrap_that_is_gone_is_computed_around(decode: Decode) -> None:
    decode.registry.book.remove("boot")
    await decode.ask()
    await decode.reserve()
    assert decode.engine.did("recompute") == [ID]
    assert [q.request_id for q in decode.prefill.called_off] == [ID], "prefill would hold its pages till the deadline"


async def test_a_bootstrap_of_another_protocol_is_not_asked(decode: Decode, caplog: pytest.LogCaptureFixture) -> None:
    old = record("boot", "2", role="bootstrap", protocol=UNNAMED, oldest_protocol=UNNAMED)
    decode.registry.book.put("boot", old)
    await decode.ask()
    await decode.reserve()
    assert not decode.prefill.offered
    assert decode.engine.did("recompute") == [ID]
    assert "instance not used: its release has another protocol" in caplog.text


async def test_a_refused_offer_pins_the_pages_until_prefill_is_quiet(decode: Decode) -> None:
    decode.prefill.offer_refusal = Rejected("no")
    decode.prefill.quiets.clear()
    await decode.ask()
    await decode.reserve()
    assert decode.engine.did("recompute") == [ID]
    decode.assert_pinned()
    decode.prefill.quiets.set()
    await turns()
    assert decode.engine.did("release") == [ID]
    await decode.finish()
    decode.assert_nothing_is_kept()


async def test_a_replica_that_is_gone_is_passed_over_and_without_any_the_prompt_is_computed_here(
    decode: Decode,
) -> None:
    for name in ("aaa", "zzz"):
        decode.registry.book.put(name, record(name, "1", role="bootstrap"))
    for stream_id in range(1, 4):
        await decode.ask(stream_id)
        decode.engine.step(reserved=[Exposed(f"r.{stream_id}", PAGES, 4, 4)])
        await turns()
    assert [offer.request_id for offer in decode.prefill.offered] == ["r.1", "r.2", "r.3"]
    del decode.bus.handlers["ns.bootstrap.boot.open"]
    await decode.ask(4)
    decode.engine.step(reserved=[Exposed("r.4", PAGES, 4, 4)])
    await turns()
    assert decode.engine.did("recompute") == ["r.4"]


@pytest.mark.parametrize(("stamp", "num_pages"), [(STAMP + 1, 3), (STAMP, 2)])
async def test_kv_under_another_stamp_is_not_believed(decode: Decode, stamp: int, num_pages: int) -> None:
    decode.prefill.quiets.clear()
    await decode.ask()
    await decode.reserve()
    await decode.land(stamp, num_pages)
    assert decode.tokens() == []
    assert decode.engine.did("recompute") == [ID]
    assert decode.engine.did("release") == []
    decode.prefill.quiets.set()
    await turns()
    assert decode.engine.did("release") == [ID]


async def test_a_first_token_that_the_engine_refuses_is_computed_here(decode: Decode) -> None:
    decode.engine.engine.delivered = Rejected("not in the vocabulary")
    await decode.ask()
    await decode.reserve()
    await decode.land()
    assert decode.engine.did("recompute") == decode.engine.did("release") == [ID]


@pytest.fixture
def soon_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an unreachable prefill count as gone after milliseconds."""
    monkeypatch.setattr("services.decode.prefill_client.QUIESCE_AGAIN_S", 0.005)
    monkeypatch.setattr("services.decode.prefill_client.GONE_AFTER_S", 0.02)


def let_offers_expire(decode: Decode) -> None:
    """Let the time pass in which prefill may write into offered pages."""
    for fetch in decode.prefill_client._transfers.values():
        fetch.offer_end_s = time.monotonic() - 10


@pytest.mark.parametrize("error", [NobodyListens, ListenerGone])
async def test_pages_stay_if_prefill_may_have_the_prompt_though_it_does_not_listen_now(
    decode: Decode, error: type[NobodyListens]
) -> None:
    """Prefill had accepted the prompt, NATS restarted, and decode reconnected first. It took prefill for gone, and reused
    pages into which prefill could write."""
    decode.prefill.answers.clear()
    decode.prefill.quiets.clear()
    await decode.ask()
    await decode.reserve()
    decode.prefill.refusal = error("nobody listens")
    decode.prefill.answers.set()
    await turns()
    assert decode.engine.did("recompute") == [ID]
    if error is ListenerGone:
        decode.assert_pinned()
    assert len(decode.prefill.called_off) == (error is ListenerGone)
    decode.prefill.quiets.set()
    await decode.until_nothing_runs()
    assert decode.engine.did("release") == [ID]
    await decode.finish()
    assert decode.tokens() == [43]
    decode.assert_nothing_is_kept()


@pytest.mark.usefixtures("soon_gone")
@pytest.mark.parametrize("known", ["silent", "gone", "room"])
async def test_a_lost_prefill_is_computed_around_and_its_pages_stay_until_it_may_not_write_any_more(
    decode: Decode, known: str
) -> None:
    """A prefill that is cut off from etcd and NATS may still write, until its offer expires."""
    await decode.ask()
    await decode.reserve()
    decode.bus.handlers.clear()  # it does not answer
    if known == "silent":
        decode.prefills._lose(decode.prefills._health["p"], Loss.SILENT, "silent")
    elif known == "room":
        await decode.service.room_failed(RoomFailed(request_id=ID, room=ROOM, error="PrefillLost", cause="gone"))
    else:
        decode.registry.book.remove("p")
    await turns()
    assert decode.engine.did("recompute") == [ID]
    await asyncio.sleep(0.06)
    decode.assert_pinned()
    let_offers_expire(decode)
    await until(lambda: decode.engine.did("release") == [ID])
    await decode.finish()
    assert decode.tokens() == [43]
    decode.assert_nothing_is_kept()


@pytest.mark.usefixtures("soon_gone")
@pytest.mark.parametrize("step_ms", [120_000, -3_600_000])
async def test_a_step_of_the_wall_clock_does_not_move_the_end_of_an_offer(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, step_ms: int
) -> None:
    """Decode compared the offer's deadline with its wall clock. A clock set forward freed pages into which a prefill that was
    cut off from NATS could still write; a clock set back by an hour kept them for an hour."""
    await decode.ask()
    await decode.reserve()
    decode.bus.handlers.clear()
    monkeypatch.setattr("services.decode.prefill_client.now_ms", lambda: now_ms() + step_ms)
    await decode.cancel()
    await asyncio.sleep(0.06)
    decode.assert_pinned()
    let_offers_expire(decode)
    await until(lambda: decode.engine.did("release") == [ID])
    decode.assert_nothing_is_kept()


@pytest.mark.usefixtures("soon_gone")
async def test_another_process_under_the_same_instance_id_cannot_answer_for_the_first(decode: Decode) -> None:
    """A prefill was frozen after it took an offer, and another process started under its id. Decode sent that the quiesce,
    which it answered at once. Pages were then reused into which the first could still write."""
    await decode.ask()
    await decode.reserve()
    second = StaleInstance("instance p has epoch 2, not 1")
    decode.prefill.quiet_failures += [second] * 1000
    decode.registry.book.put("p", record("p", "2", role="prefill", model="m", kv=endpoint("prefill-p-2")))
    await turns()
    assert decode.engine.did("recompute") == [ID]
    await asyncio.sleep(0.06)
    decode.assert_pinned()
    assert {quiesce.epoch for quiesce in decode.prefill.called_off} == {"1"}
    let_offers_expire(decode)
    await until(lambda: decode.engine.did("release") == [ID])
    await decode.finish()
    decode.assert_nothing_is_kept()


@pytest.mark.usefixtures("soon_gone")
@pytest.mark.parametrize("quiet", ["answers", "gone"])
async def test_a_prefill_that_does_not_answer_and_still_listens_may_write(
    decode: Decode, quiet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost lease was enough: a prefill that was stopped for longer wrote into another request's pages."""
    monkeypatch.setattr("services.decode.prefill_client.QUIESCE_TIMEOUT_S", 0.01)
    decode.prefill.quiets.clear()
    await decode.ask()
    await decode.reserve()
    decode.registry.book.remove("p")
    let_offers_expire(decode)
    await asyncio.sleep(0.06)
    await until(lambda: decode.engine.did("recompute") == [ID])
    decode.assert_pinned()
    if quiet == "gone":
        decode.bus.handlers.clear()
    decode.prefill.quiets.set()
    await until(lambda: decode.engine.did("release") == [ID])
    await decode.finish()
    decode.assert_nothing_is_kept()


@pytest.mark.usefixtures("soon_gone")
async def test_pages_come_back_whatever_quiesce_raises(decode: Decode) -> None:
    """An exception must not end the task that will release the pages and the aux slot."""
    decode.prefill.quiet_failures = [RuntimeError("unable to perform operation on <TCPTransport closed=True>")]
    await decode.ask()
    await decode.reserve()
    await decode.cancel()
    await until(lambda: decode.engine.did("release"))
    decode.assert_nothing_is_kept()


async def test_quiesce_is_repeated_until_it_is_answered(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode repeats it after any error; otherwise the pages would be held forever."""
    monkeypatch.setattr("services.decode.prefill_client.QUIESCE_AGAIN_S", 0.001)
    decode.prefill.quiet_failures = [InvariantBroken("bug"), Overloaded("busy"), MalformedMessage("what")]
    await decode.ask()
    await decode.reserve()
    await decode.cancel()
    await until(lambda: decode.engine.did("release"))
    assert len(decode.prefill.called_off) == 4
    decode.assert_nothing_is_kept()


@pytest.mark.parametrize("stage", ["refused", "no bootstrap", "offer", "stamp", "room"])
async def test_where_failures_are_asked_for_the_client_gets_one_and_every_page_comes_back(
    decode: Decode, stage: str
) -> None:
    decode.runner._on_transfer_failure = "fail"
    decode.prefill.quiets.clear()
    if stage == "refused":  # not as one that is busy
        decode.prefill.refusal = Rejected("no such adapter")
    elif stage == "no bootstrap":
        decode.registry.book.remove("boot")
    elif stage == "offer":
        decode.prefill.offer_refusal = Rejected("no")
    await decode.ask()
    await decode.reserve()
    if stage == "stamp":
        await decode.land(STAMP + 1)
    elif stage == "room":
        await decode.service.room_failed(RoomFailed(request_id=ID, room=ROOM, error="DeadlineExceeded", cause="late"))
        await turns()
    [item] = decode.items()
    assert item.error is not None
    causes = {"refused": "Rejected", "no bootstrap": "NoBootstrapInstance", "offer": "Rejected"}
    causes |= {"stamp": "TransferFailed", "room": "DeadlineExceeded"}
    assert (item.error.error, item.error.fields["cause"]) == ("KvUnavailable", causes[stage])
    assert decode.engine.did("cancel") == [ID]
    assert decode.engine.did("recompute") == []
    assert decode.recomputes == 0
    assert decode.failed_transfers() == {causes[stage]: 1}
    if stage in ("offer", "room"):
        decode.assert_pinned()
    elif stage == "stamp":  # the expected slot has wrong contents
        assert decode.engine.did("release") == []
    decode.prefill.quiets.set()
    await turns()
    assert decode.engine.did("release") == [ID]
    decode.assert_nothing_is_kept()


async def test_a_prompt_too_long_for_its_prefill_is_computed_here_where_failures_are_asked_for(decode: Decode) -> None:
    """The client got a 502: prefill accepts a prompt before its engine, with a smaller pool, refuses it."""
    decode.runner._on_transfer_failure = "fail"
    decode.prefill.quiets.set()
    await decode.ask()
    await decode.reserve()
    late = RoomFailed(request_id=ID, room=ROOM, error="PromptTooLong", cause="130 tokens, and this worker takes 96")
    await decode.service.room_failed(late)
    await turns()
    assert decode.engine.did("recompute") == [ID]
    await decode.finish()
    assert (decode.tokens(), decode.errors()) == ([43], [])
    await decode.until_nothing_runs()
    decode.assert_nothing_is_kept()


@pytest.mark.parametrize("refusal", [Overloaded("leaving"), StaleInstance("restarted"), NobodyListens("gone")])
async def test_a_refused_prompt_is_computed_here_where_failures_are_asked_for(
    decode: Decode, refusal: MeshError
) -> None:
    """The client got a 502 although no KV was lost: each prefill instance had refused the prompt, like one that drains."""
    decode.runner._on_transfer_failure = "fail"
    decode.prefill.refusal = refusal
    await decode.ask()
    assert decode.engine.did("recompute") == [ID]
    await decode.finish()
    assert (decode.tokens(), decode.errors()) == ([43], [])
    await decode.until_nothing_runs()
    decode.assert_nothing_is_kept()


async def test_a_stream_that_has_begun_goes_on_where_failures_are_asked_for(decode: Decode) -> None:
    """It moved here from a dead instance: its client has tokens already."""
    decode.runner._on_transfer_failure = "fail"
    decode.prefill.refusal = Overloaded("full")
    await decode.ask(num_generated=2)
    assert decode.engine.did("recompute") == [ID]
    await decode.finish()
    assert decode.tokens() == [43]
    decode.assert_nothing_is_kept()


async def test_without_prefill_a_prompt_is_computed_here_where_failures_are_asked_for(decode: Decode) -> None:
    decode.runner._on_transfer_failure = "fail"
    decode.registry.book.remove("p")
    await decode.ask()
    assert decode.engine.engine.submitted[ID].phase is Phase.FULL


@pytest.mark.parametrize("missing", ["answer", "pages"])
async def test_without_an_answer_or_pages_in_time_the_prompt_is_computed_here_and_prefill_called_off(
    decode: Decode, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    decode.prefill_client._bootstrap_timeout_s = 0.05
    if missing == "answer":
        decode.prefill.answers.clear()
    await decode.ask()
    await until(lambda: decode.engine.did("recompute"))
    await turns()
    assert not decode.prefill.offered
    decode.prefill.answers.set()  # a cancel waits for its answer
    await turns()
    assert [q.request_id for q in decode.prefill.called_off] == [ID]
    assert decode.engine.did("release") == [ID]
    causes = [vars(r)["cause"] for r in caplog.records if r.message == "computing the prompt here"]
    assert causes == ["no page of this decode instance became free for KV from prefill p within 0.05 s"]
    await decode.finish()
    decode.assert_nothing_is_kept()


@pytest.mark.parametrize("asked", [True, False])
async def test_a_frontend_that_asks_learns_where_the_prompt_was_computed_and_why_not_on_prefill(
    decode: Decode, asked: bool
) -> None:
    decode.prefill.refusal = Overloaded("this instance is draining")
    await decode.ask(wants_origin=asked)
    await decode.reserve()
    await decode.until_nothing_runs()
    await decode.finish()
    [item] = decode.items()
    assert item.origin == (PromptOrigin("p", "this instance is draining") if asked else None)
    await decode.ask(2, token_ids=pack_tokens(range(2)), wants_origin=asked)
    await decode.finish("r.2")
    assert decode.items()[-1].origin == (PromptOrigin("", "only 2 tokens are not cached") if asked else None)


@pytest.mark.parametrize("prediction", [(), (5, 6)])
async def test_draft_counts_are_sent_to_a_frontend_that_sent_a_prediction(
    decode: Decode, prediction: tuple[int, ...]
) -> None:
    await decode.ask(2, token_ids=pack_tokens(range(2)), prediction=pack_tokens(prediction))
    counts = [None, DraftCounts(4, 1), None, DraftCounts(6, 3)]
    for token, of_step in enumerate(counts):
        last = FinishReason.LENGTH if token == 3 else None
        decode.engine.step(tokens=[TokenOutput("r.2", [token], last, draft_counts=of_step)])
    await turns()
    assert decode.tokens() == [0, 1, 2, 3]
    found = [item.draft_counts for item in decode.items()]
    assert [item for item in found if item is not None] == ([(4, 1), (6, 3)] if prediction else [])


async def test_a_prediction_that_is_no_token_ids_is_refused(decode: Decode) -> None:
    with pytest.raises(MalformedMessage, match="whole int32"):
        await decode.ask(prediction=b"abc")
    decode.assert_nothing_is_kept()


async def test_at_debug_a_request_ends_with_a_line_that_names_it(
    decode: Decode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await decode.ask()
    await decode.reserve()
    await decode.land()
    await decode.finish()
    [line] = [vars(record) for record in caplog.records if record.message == "request ended"]
    assert {"request_id": "r", "prompt_tokens": 10, "output_tokens": 2, "prefill": "p"}.items() <= line.items()


async def test_the_time_of_a_transfer_begins_with_the_offer_and_prefill_is_told_its_end(decode: Decode) -> None:
    decode.prefill_client._timeout_s = 0.3
    decode.prefill.quiets.clear()
    await decode.ask()
    await asyncio.sleep(0.4)
    assert not decode.engine.did("recompute")
    before_ms = now_ms()
    await decode.reserve()
    [offer] = decode.prefill.offered
    assert before_ms <= offer.deadline_unix_ms - 300 <= now_ms()
    await until(lambda: decode.engine.did("recompute"))
    decode.assert_pinned()
    decode.prefill.quiets.set()
    await turns()
    assert decode.engine.did("release") == [ID]
    await decode.finish()
    decode.assert_nothing_is_kept()


async def test_prefill_is_asked_for_the_adapter_and_for_no_checksums_by_default(decode: Decode) -> None:
    decode.engine.engine.adapters = {"legal": "w1"}
    kv = endpoint("prefill-p")
    decode.registry.book.put("p", record("p", "1", role="prefill", model="m", kv=kv, adapters={"legal": "w1"}))
    await decode.ask(adapter="legal")
    await decode.reserve()
    [asked] = decode.prefill.asked
    assert (asked.adapter, asked.verify_kv) == ("legal", False)
    await decode.land()
    await decode.finish()


async def test_where_pages_are_verified_prefill_is_asked_for_checksums_and_must_have_readable_pages(
    decode: Decode, caplog: pytest.LogCaptureFixture
) -> None:
    decode.prefill_client._checksums = PageChecksums(Pages(layout=LAYOUT, num_pages=100))
    await decode.ask()
    assert decode.prefill.asked[0].verify_kv
    await decode.reserve()
    await decode.land()
    assert decode.engine.did("recompute") == [ID], "no checksums came"
    kv = replace(endpoint("prefill-p"), device="xpu:0")
    decode.registry.book.put("p", record("p", "2", role="prefill", model="m", kv=kv))
    await decode.ask(2)
    assert len(decode.prefill.asked) == 1
    assert "are on xpu:0" in vars(caplog.records[-1])["cause"]
    for engine_id in (ID, "r.2"):
        await decode.finish(engine_id)
    decode.assert_nothing_is_kept()


async def test_another_rooms_failure_says_nothing(decode: Decode) -> None:
    await decode.ask()
    await decode.reserve()
    await decode.service.room_failed(RoomFailed(request_id=ID, room="another", error="PrefillLost", cause="gone"))
    await decode.service.room_failed(RoomFailed(request_id="x", room=ROOM, error="PrefillLost", cause="gone"))
    await decode.land()
    assert decode.tokens() == [42]


@pytest.mark.parametrize("stage", ["asked", "accepted", "offered", "transferring"])
async def test_a_client_that_leaves_stops_the_work_and_pins_what_prefill_may_write(decode: Decode, stage: str) -> None:
    """Before the offer nothing is exposed, but prefill must be notified, or it holds its pages until the deadline."""
    (decode.prefill.answers if stage == "asked" else decode.prefill.takes).clear()
    decode.prefill.quiets.clear()
    await decode.ask()
    if stage in ("offered", "transferring"):
        await decode.reserve()
    if stage == "transferring":
        decode.prefill.takes.set()
        await turns()
    assert await decode.cancel() == 1
    assert await decode.cancel() == 0
    assert decode.errors() == ["Cancelled"]
    assert decode.engine.did("cancel") == [ID]
    if stage == "asked":
        assert not decode.prefill.called_off, "on a busy bus the word would overtake the question, and stop nothing"
        decode.prefill.answers.set()
        await turns()
    assert [q.request_id for q in decode.prefill.called_off] == [ID]
    if stage in ("offered", "transferring"):
        decode.assert_pinned()
    decode.prefill.quiets.set()
    await turns()
    assert decode.engine.did("release") == [ID]
    assert decode.engine.did("recompute") == []
    decode.assert_nothing_is_kept()


async def test_a_client_that_leaves_while_the_first_token_is_delivered_leaves_nothing(decode: Decode) -> None:
    await decode.ask()
    await decode.reserve()
    decode.transfer.land(ROOM, decode.prefill.offered[-1].aux_slot, AuxRecord(STAMP, 3, 42, 0))
    while not any(entry[0] == "deliver" for entry in decode.engine.engine.did):
        await asyncio.sleep(0)
    await decode.cancel()
    assert decode.engine.did("cancel") == decode.engine.did("release") == [ID]
    decode.assert_nothing_is_kept()


@pytest.mark.parametrize("leaves", [True, False])
async def test_prefill_is_told_whether_the_client_has_gone(decode: Decode, leaves: bool) -> None:
    await decode.ask(life_ms=60_000 if leaves else 200)
    await decode.reserve()
    if leaves:
        await decode.cancel()
    await until(lambda: decode.prefill.called_off)
    assert [asked.cancelled for asked in decode.prefill.called_off] == [leaves]


async def test_a_request_past_its_deadline_ends_though_nobody_cancels_it(decode: Decode) -> None:
    """A killed frontend cancels nothing: its streams were generated to the end."""
    decode.registry.book.remove("p")
    await decode.ask(life_ms=300)
    await until(lambda: not len(decode.active))
    await turns()
    assert decode.errors() == ["DeadlineExceeded"]
    assert decode.engine.did("cancel") == [ID]
    decode.assert_nothing_is_kept()


async def test_a_finished_request_leaves_no_timer(decode: Decode) -> None:
    decode.registry.book.remove("p")
    await decode.ask()
    active = decode.active.find(ID)
    assert active is not None
    await decode.finish()
    assert active.expiry is not None
    assert active.expiry.cancelled()


async def test_what_the_own_engine_refuses_is_told_once(decode: Decode) -> None:
    decode.engine.engine.refusal = PromptTooLong("long")
    await decode.ask()
    await decode.until_nothing_runs()
    assert decode.errors() == ["PromptTooLong"]
    assert [q.request_id for q in decode.prefill.called_off] == [ID]
    decode.assert_nothing_is_kept()


async def test_a_bug_in_the_engine_ends_the_request_instead_of_leaving_it_waiting(decode: Decode) -> None:
    decode.engine.engine.refusal = ZeroDivisionError("bug")
    await decode.ask()
    await decode.until_nothing_runs()
    assert decode.errors() == ["PeerLost"]
    decode.assert_nothing_is_kept()


async def test_a_bug_while_delivering_gives_everything_back(decode: Decode) -> None:
    decode.engine.engine.delivered = ZeroDivisionError("bug")
    await decode.ask()
    await decode.reserve()
    await decode.land()
    assert decode.errors() == ["PeerLost"]
    assert decode.engine.did("release") == [ID]
    decode.assert_nothing_is_kept()


async def test_a_request_that_fails_in_a_step_is_told_and_forgotten(decode: Decode) -> None:
    await decode.ask()
    await decode.reserve()
    await decode.land()
    decode.engine.step(failed=[Failed(ID, InvariantBroken("step failed"))])
    await turns()
    assert decode.errors() == ["InvariantBroken"]
    decode.assert_nothing_is_kept()


async def test_giving_up_hands_every_stream_back_and_waits_until_its_pages_are_safe(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.decode.remote_prefill.SETTLE_TIMEOUT_S", 1000.0)
    decode.prefill.quiets.clear()
    await decode.ask()
    await decode.reserve()
    decode.service.stop_all("leaving")
    await turns()
    assert decode.errors() == ["PeerLost"]
    drained = asyncio.create_task(decode.service.drained())
    await turns()
    assert not drained.done()
    decode.prefill.quiets.set()
    await asyncio.wait_for(drained, PATIENCE_S)
    decode.assert_nothing_is_kept()


@pytest.mark.parametrize("prefill", ["dead", "hung"])
async def test_leaving_does_not_wait_for_pages_that_a_dead_or_hung_prefill_has_pinned(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, prefill: str
) -> None:
    """After a prefill's death decode waited for the end of the offer, for a minute, and was killed."""
    monkeypatch.setattr("services.decode.remote_prefill.SETTLE_TIMEOUT_S", 0.05)
    await decode.ask()
    await decode.reserve()
    if prefill == "dead":
        decode.bus.handlers.clear()
    else:
        decode.prefill.quiets.clear()
    decode.registry.book.remove("p")
    await turns()
    draining = asyncio.create_task(decode.service.drained())
    await asyncio.sleep(0.1)
    assert not draining.done(), "the request is not answered"
    decode.assert_pinned()
    await decode.finish()
    await asyncio.wait_for(draining, PATIENCE_S)
    assert decode.tokens() == [43]
    await decode.until_nothing_runs()


@pytest.mark.parametrize(("blamed", "state"), [(True, BreakerState.OPEN), (False, BreakerState.CLOSED)])
async def test_prefill_is_blamed_for_its_own_faults_and_not_for_those_of_bootstrap(
    decode: Decode, blamed: bool, state: BreakerState
) -> None:
    if blamed:
        decode.prefill.refusal = PeerLost("gone")
    else:
        decode.prefill.offer_refusal = PeerLost("bootstrap is gone")
    for number in range(1, 6):
        await decode.ask(stream_id=number)
        decode.engine.step(reserved=[Exposed(f"r.{number}", PAGES, 4, 4)])
        await turns()
    assert decode.fleet.router.health.state("p") is state
    assert len(decode.prefill.asked) == (DEFAULT_SETTINGS.failures if blamed else 5), (
        "a broken one is worse than nobody here"
    )


async def test_a_failed_step_of_prefill_counts_while_its_transfer_waits_for_our_pages(decode: Decode) -> None:
    """Decode kept choosing the instance: a failed step did not count as its failure."""
    for number in range(1, DEFAULT_SETTINGS.failures + 1):
        await decode.ask(stream_id=number)
        failed = RoomFailed(request_id=f"r.{number}", room=ROOM, error="InvariantBroken", cause="out of memory")
        await decode.service.room_failed(failed)
        await turns()
    assert decode.fleet.router.health.state("p") is BreakerState.OPEN


async def test_a_stalled_prefill_gets_no_new_prompts_though_there_is_no_other(decode: Decode) -> None:
    decode.beat(0, 0.0)
    decode.prefills._clock = lambda: time.monotonic() + STALLED_AFTER_S + 0.1
    decode.prefills.check()
    assert not decode.prefills.is_lost("p")
    await decode.ask()
    assert not decode.prefill.asked
    assert decode.queues() == {"waiting": 1}
