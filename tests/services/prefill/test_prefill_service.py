import asyncio
import logging
from collections.abc import AsyncIterator
from math import inf
from typing import Any
from zlib import crc32

import pytest
from msgspec.structs import replace

from components.discovery.registry import Registration
from components.errors import (
    DeadlineExceeded,
    Overloaded,
    PromptTooLong,
    Rejected,
    StaleInstance,
    TransferFailed,
    UnknownModel,
)
from components.kv_transfer.aux import AuxBuffer
from components.kv_transfer.writes import Writes
from components.messaging.clocks import now_ms
from components.telemetry.figures import Figures
from components.telemetry.worker_metrics import WorkerMetrics
from components.wire.layout import KvRegion
from components.wire.logprobs import TokenLogprobs
from components.wire.prefill import (
    CloseRooms,
    KvComing,
    PagesOffered,
    PrefillAccepted,
    PrefillRequest,
    Quiesce,
    Quiet,
    RoomFailed,
    RoomOk,
)
from components.wire.sampling import SamplingParams
from components.wire.tokens import pack_tokens
from engine.ports import Exposed, Failed, Phase
from services.prefill.service import PrefillService
from tests.components.discovery.records import record
from tests.components.kv_transfer.fake_transfer import LAYOUT, FakeTransfer, endpoint
from tests.components.kv_transfer.nixl_peer import Pages
from tests.components.messaging.fake_bus import FakeBus
from tests.services.decode.fake_engine import FakeEngineLoop, FakeRegistry
from tests.services.fake_masks import FakeMasks
from tests.waiting import PATIENCE_S, turns, until

pytestmark = pytest.mark.anyio

PAGES = [5, 6, 7]  # of the prompt below: 10 tokens, 4 a page
OFFERED = [20, 10, 30]


ROOM = "room-1"


class Prefill:
    """A prefill instance between a decode and a bootstrap that the test plays."""

    def __init__(self) -> None:
        self.bus, self.engine, self.registry = FakeBus(), FakeEngineLoop(), FakeRegistry()
        self.decode = FakeTransfer()
        self.transfer = FakeTransfer(peer=self.decode)
        book = self.registry.book
        book.put("boot", record("boot", "1", role="bootstrap"))
        book.put("d", record("d", "1", kv=endpoint("decode-d")))
        self.registration = Registration("p", "mine")
        self.masks: Any = FakeMasks()
        self.metrics = WorkerMetrics()
        self.service = PrefillService(
            self.bus,
            self.registration,
            self.registry,
            self.engine,
            self.transfer,
            masks=self.masks,
            metrics=self.metrics,
            writes=Writes(self.transfer),
            bootstrap_timeout_s=inf,
        )

    async def ask(self, request_id: str = "r", life_ms: int = 1_000_000, **changes: Any) -> PrefillAccepted:
        request = PrefillRequest(
            request_id=request_id,
            epoch="mine",
            decode_id="d",
            decode_epoch="1",
            room=ROOM,
            stamp=7,
            token_ids=pack_tokens(range(10)),
            deadline_unix_ms=now_ms() + life_ms,
            sampling=SamplingParams(max_tokens=5, temperature=0.0, seed=3),
        )
        return await self.service.prefill(replace(request, **changes))

    async def offer(self, room: str = ROOM, **changes: Any) -> RoomOk:
        offered = PagesOffered(
            request_id="r",
            room=room,
            bootstrap_id="boot",
            decode_id="d",
            decode_epoch="1",
            pages=OFFERED,
            num_cached_pages=0,
            aux_slot=2,
            deadline_unix_ms=now_ms() + 1_000_000,
        )
        return await self.service.pages(replace(offered, **changes))

    def computed(self, num_computed: int = 10, first_token: int | None = 42) -> None:
        self.engine.step(computed=[Exposed("r", PAGES, num_computed, 0, first_token)])

    def quiesce(self, request_id: str = "r", *, cancelled: bool = False) -> asyncio.Task[Quiet]:
        asked = Quiesce(request_id=request_id, cause="gone", cancelled=cancelled)
        return asyncio.ensure_future(self.service.quiesce(asked))

    def queues(self) -> dict[str, int]:
        """The queues that are not empty, with their lengths."""
        figures = Figures("prefill", "mine")
        self.service.show(figures)
        return {state: count for state, count in figures.status().queues.items() if count}

    def assert_nothing_is_kept(self, request_id: str = "r") -> None:
        assert not self.queues()
        assert self.service.num_transfers == 0
        assert request_id in self.engine.did("release")
        assert self.transfer.aux.num_free == self.transfer.aux.num_slots
        assert self.transfer.in_flight == 0

    @property
    def failures(self) -> list[str]:
        """Return the failures reported to decode."""
        return [failed.error for failed in self.bus.of(RoomFailed)]

    async def closed(self) -> list[str]:
        """Wait for the rooms that prefill reports to bootstrap."""
        self.service._rooms.send_closes()
        await turns()
        return [room for closing in self.bus.of(CloseRooms) for room in closing.rooms]


@pytest.fixture
async def prefill() -> AsyncIterator[Prefill]:
    made = Prefill()
    yield made
    made.service.stop_all("the test is over")
    made.transfer.gate.set()
    await made.service.drained()


async def test_decode_is_told_how_much_of_the_prompt_was_cached_here(prefill: Prefill) -> None:
    prefill.decode.expect(ROOM, 0)
    await prefill.ask()
    await prefill.offer()
    prefill.engine.step(computed=[Exposed("r", PAGES, 10, 8, 42)])
    await turns()
    assert [coming.num_cached_tokens for coming in prefill.bus.of(KvComing)] == [8]
    assert prefill.decode.aux.read(2).num_cached_tokens == 8


async def test_a_prompt_is_computed_at_once_sent_when_pages_are_offered_and_forgotten(prefill: Prefill) -> None:
    landed = prefill.decode.expect(ROOM, 0)
    accepted = await prefill.ask(sampling=SamplingParams(max_tokens=5, stop_token_ids=(9,)), cache_salt="s")
    assert accepted == PrefillAccepted(request_id="r", number=1)
    await turns()
    submitted = prefill.engine.engine.submitted["r"]
    assert (submitted.phase, list(submitted.token_ids), submitted.cache_salt) == (Phase.PREFILL, list(range(10)), "s")
    assert submitted.sampling.stop_token_ids == (9,)
    prefill.computed(num_computed=4, first_token=None)
    await prefill.offer()
    await turns()
    assert prefill.transfer.writes == [([5], [20])]
    assert not prefill.bus.of(KvComing)
    prefill.computed()
    await turns()
    assert prefill.transfer.writes[1:] == [([6, 7], [10, 30])]
    assert prefill.bus.of(KvComing) == [KvComing(room=ROOM, request_id="r", first_token=42)]
    assert landed.done()
    assert prefill.decode.aux.read(2).stamp == 7
    assert await prefill.closed() == [ROOM]
    assert not prefill.failures
    prefill.assert_nothing_is_kept()


async def test_a_room_that_two_replicas_opened_is_closed_at_the_second_at_once(prefill: Prefill) -> None:
    """Decode calls another replica if the first one is slow. The second room stayed open until its deadline."""
    prefill.registry.book.put("boot2", record("boot2", "1", role="bootstrap"))
    await prefill.ask()
    await prefill.offer()
    await prefill.offer(bootstrap_id="boot2", deadline_unix_ms=0)
    prefill.service._rooms.send_closes()
    await turns()
    closing = [subject for subject, message in prefill.bus.sent if isinstance(message, CloseRooms)]
    assert closing == ["ns.bootstrap.boot2.close"]
    prefill.computed()
    await turns()
    prefill.service._rooms.send_closes()
    await turns()
    closing = [subject for subject, message in prefill.bus.sent if isinstance(message, CloseRooms)]
    assert closing[1:] == ["ns.bootstrap.boot.close"]


async def test_bootstrap_and_decode_are_reached_if_all_roles_of_a_host_have_one_id(prefill: Prefill) -> None:
    """Instances were found by id alone, so these messages went to the first instance of any role."""
    book = prefill.registry.book
    for key in ("boot", "d"):
        book.drop(key)
    for role in ("frontend", "bootstrap", "decode"):
        book.put(role, record("host", "1", role=role, kv=endpoint("decode-host") if role == "decode" else None))
    await prefill.ask(decode_id="host")
    await prefill.offer(bootstrap_id="host", decode_id="host")
    prefill.engine.step(failed=[Failed("r", TransferFailed("no memory"))])
    await turns()
    assert await prefill.closed() == [ROOM]
    sent = {type(message): subject for subject, message in prefill.bus.sent}
    assert (sent[RoomFailed], sent[CloseRooms]) == ("ns.decode.host.room_failed", "ns.bootstrap.host.close")


async def test_rooms_that_are_over_are_closed_together(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.prefill.rooms.CLOSE_INTERVAL_S", 0.5)  # all end before it has passed
    for number in range(3):
        await prefill.ask(f"r{number}", room=f"room-{number}")
        await prefill.offer(f"room-{number}", request_id=f"r{number}")
    prefill.engine.step(computed=[Exposed(f"r{number}", PAGES, 10, 0, 42) for number in range(3)])
    await until(lambda: prefill.bus.of(CloseRooms))
    assert prefill.bus.of(CloseRooms) == [CloseRooms(rooms=["room-0", "room-1", "room-2"])]
    assert [subject for subject, message in prefill.bus.sent if isinstance(message, CloseRooms)] == [
        "ns.bootstrap.boot.close"
    ]


async def test_a_prompt_goes_through_the_queues_one_after_the_other(prefill: Prefill) -> None:
    prefill.transfer.gate.clear()
    await prefill.ask()
    assert prefill.queues() == {"bootstrapping": 1}
    await prefill.offer()
    assert prefill.queues() == {"waiting": 1}
    assert prefill.service.heartbeat().queued_tokens == 10
    prefill.computed(num_computed=4, first_token=None)
    assert prefill.queues() == {"computing": 1}
    assert prefill.service.heartbeat().queued_tokens == 6
    prefill.computed()
    assert prefill.queues() == {"inflight": 1}
    assert prefill.service.heartbeat().queued_tokens == 0
    beat = prefill.service.heartbeat()
    assert (beat.accepted, beat.num_requests) == (1, 1)
    with pytest.raises(StaleInstance):
        await prefill.ask(epoch="another")
    prefill.transfer.gate.set()
    await turns()
    assert prefill.queues() == {}
    beat = prefill.service.heartbeat()
    assert (beat.accepted, beat.num_requests) == (1, 0)


@pytest.mark.parametrize(("computed", "queue"), [(0, "waiting"), (4, "computing"), (10, "inflight")])
async def test_computing_goes_on_while_decodes_pages_are_not_known(prefill: Prefill, computed: int, queue: str) -> None:
    prefill.transfer.gate.clear()
    await prefill.ask()
    if computed:
        prefill.computed(computed, 42 if computed == 10 else None)
    assert prefill.queues() == {"bootstrapping": 1}
    await prefill.offer()
    assert prefill.queues() == {queue: 1}
    await prefill.offer()
    assert prefill.queues() == {queue: 1}, "the same offer again changes nothing"


async def test_the_engine_is_told_the_adapter_and_decode_its_refusal(prefill: Prefill) -> None:
    await prefill.ask(adapter="legal")
    await turns()
    assert prefill.engine.engine.submitted["r"].adapter == "legal"
    prefill.engine.engine.refusal = UnknownModel("there is no LoRA adapter 'medical'", param="model")
    await prefill.ask("other", adapter="medical")
    await turns()
    assert prefill.failures == ["UnknownModel"]


async def test_a_message_for_an_earlier_registration_is_stale(prefill: Prefill) -> None:
    with pytest.raises(StaleInstance):
        await prefill.ask(epoch="older")
    prefill.registration.epoch = ""
    with pytest.raises(StaleInstance):
        await prefill.ask()
    assert not prefill.engine.engine.did


async def test_quiesce_is_answered_only_for_a_transfer_of_this_process(prefill: Prefill) -> None:
    """A second process under the instance id of a frozen one answered for it, although the first could still write. An earlier
    release sends no epoch, and is answered."""
    with pytest.raises(StaleInstance):
        await prefill.service.quiesce(Quiesce(request_id="r", cause="gone", epoch="of the frozen one"))
    for epoch in ("", prefill.registration.epoch):
        quiesce = Quiesce(request_id="r", cause="gone", epoch=epoch)
        assert await prefill.service.quiesce(quiesce) == Quiet(request_id="r")


async def test_a_room_whose_pages_do_not_come_is_given_up_and_decode_hears(prefill: Prefill) -> None:
    prefill.service._bootstrap_timeout_s = 0.05
    await prefill.ask()
    prefill.computed()
    await until(lambda: prefill.failures)
    await turns()
    [(subject, failed)] = [each for each in prefill.bus.sent if isinstance(each[1], RoomFailed)]
    assert (subject, failed.request_id, failed.room) == ("ns.decode.d.room_failed", "r", ROOM)
    assert (failed.error, failed.cause) == ("DeadlineExceeded", "decode did not offer its pages within 0.05 s")
    assert failed.stamp == 7, "no write follows"
    assert await prefill.closed() == [], "nobody had opened it"
    prefill.assert_nothing_is_kept()


async def test_pages_are_sent_with_checksums_where_decode_asks_for_them(prefill: Prefill) -> None:
    pages = Pages(layout=LAYOUT, num_pages=100)
    pages.fill(1)
    prefill.engine.engine.kv_region = KvRegion(pages.address, 100, LAYOUT, "cpu")
    prefill.transfer.aux, prefill.decode.aux = (AuxBuffer(8, max_checksums=16) for _ in range(2))
    kv = replace(endpoint("decode-d"), aux_slot_bytes=prefill.decode.aux.slot_bytes)
    prefill.registry.book.put("d", record("d", "1", kv=kv))
    await prefill.ask(verify_kv=True)
    await prefill.offer(num_cached_pages=1)
    landed = prefill.decode.expect(ROOM, 0)
    prefill.computed()
    await asyncio.wait_for(landed, PATIENCE_S)
    sent = tuple(crc32(pages.memory[page].tobytes()) for page in PAGES[1:])
    assert prefill.decode.aux.read(2).checksums == sent
    await prefill.service.drained()


async def test_a_deadline_that_has_passed_starts_nothing(prefill: Prefill) -> None:
    with pytest.raises(DeadlineExceeded):
        await prefill.ask(life_ms=-1)
    assert not prefill.engine.engine.did


async def test_a_leaving_instance_takes_nothing_new(prefill: Prefill) -> None:
    prefill.service.draining = True
    with pytest.raises(Overloaded):
        await prefill.ask()


async def test_a_repeated_call_is_answered_as_before_and_runs_once(prefill: Prefill) -> None:
    """The answer was lost, and no longer kept, when decode repeated its call. The refusal made decode end the transfer."""
    accepted = await prefill.ask()
    await prefill.ask("another")
    prefill.service.draining = True
    assert await prefill.ask() == accepted
    assert prefill.service.num_transfers == 2
    await prefill.offer()
    prefill.computed()
    await turns()
    assert prefill.transfer.writes
    assert not prefill.failures


@pytest.mark.parametrize("other", [{"room": "another"}, {"decode_id": "e"}, {"decode_epoch": "2"}])
async def test_a_request_id_in_use_is_refused_and_does_not_touch_its_owner(
    prefill: Prefill, other: dict[str, str]
) -> None:
    """The end of the second one cancelled the first, and `Quiesce` did not find the first one's writes."""
    await prefill.ask()
    with pytest.raises(Rejected, match="in use"):
        await prefill.ask(**other)
    await prefill.offer()
    prefill.computed()
    await turns()
    assert prefill.transfer.writes
    assert not prefill.failures


@pytest.mark.parametrize(
    "changes",
    [
        {"room": "another"},
        {"decode_epoch": "2"},
        {"decode_id": "another"},
        {"pages": [20, 10]},
        {"pages": [20, 10, 30, 40]},
        {"pages": [20, 10, 100]},
        {"pages": [20, 10, -1]},
        {"num_cached_pages": -1},
        {"num_cached_pages": 4},
        {"aux_slot": 8},
        {"aux_slot": -1},
    ],
)
async def test_an_offer_that_does_not_fit_is_refused_nothing_is_written_and_decode_hears(
    prefill: Prefill, changes: dict[str, Any]
) -> None:
    prefill.registry.book.put("another", record("another", "1", kv=endpoint("decode-another")))
    await prefill.ask()
    prefill.computed()
    with pytest.raises(TransferFailed):
        await prefill.offer(**changes)
    await turns()
    assert not prefill.transfer.writes
    assert [failed.room for failed in prefill.bus.of(RoomFailed)] == [changes.get("room", ROOM)]
    assert await prefill.closed() == [changes.get("room", ROOM)]
    await prefill.offer()
    await turns()
    assert prefill.transfer.writes
    prefill.assert_nothing_is_kept()


async def test_another_decode_instance_cannot_have_a_prompt_written_into_its_memory(prefill: Prefill) -> None:
    """Any registered instance could offer pages for a known room, and got the prompt's KV."""
    prefill.registry.book.put("e", record("e", "1", kv=endpoint("decode-e")))
    await prefill.ask()
    prefill.computed()
    with pytest.raises(TransferFailed, match="decode instance e offers pages for a request of another instance"):
        await prefill.offer(decode_id="e")
    await turns()
    assert not prefill.transfer.writes
    await prefill.offer()
    await turns()
    assert prefill.transfer.writes


async def test_pages_that_come_before_the_request_are_used_with_it(prefill: Prefill) -> None:
    """They are sent over bootstrap, without waiting for the answer to the request."""
    assert await prefill.offer() == RoomOk(room=ROOM)
    await prefill.ask()
    prefill.computed()
    await turns()
    assert prefill.transfer.writes
    prefill.assert_nothing_is_kept()
    assert not prefill.service._rooms._early
    assert not prefill.failures


async def test_an_offer_that_guesses_the_room_does_not_take_the_place_of_the_right_one(prefill: Prefill) -> None:
    """Offers that came before their request were kept by its id alone, which other decode instances may read."""
    await prefill.offer()
    await prefill.offer(room="guessed")
    await prefill.ask()
    prefill.computed()
    await turns()
    assert prefill.transfer.writes
    prefill.assert_nothing_is_kept()
    assert not prefill.service._rooms._early
    assert not prefill.failures
    assert "guessed" in await prefill.closed()


async def test_pages_that_do_not_fit_are_refused_also_when_they_come_first(prefill: Prefill) -> None:
    await prefill.offer(pages=[20, 10])
    assert (await prefill.ask()).number == 1
    prefill.computed()
    await turns()
    assert not prefill.transfer.writes
    assert prefill.failures == ["TransferFailed"]
    await prefill.offer()
    await turns()
    assert prefill.transfer.writes


async def test_pages_that_nobody_asks_about_are_given_back(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.prefill.rooms.EARLY_OFFER_EXPIRY_S", 0.01)
    await prefill.offer()
    await until(lambda: prefill.failures)
    assert await prefill.closed() == [ROOM]
    with pytest.raises(Rejected):
        await prefill.ask()
    monkeypatch.setattr("services.prefill.rooms.MAX_EARLY_OFFERS", 0)
    with pytest.raises(TransferFailed):
        await prefill.offer(request_id="another")


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_client_that_leaves_is_no_failed_transfer(
    prefill: Prefill, cancelled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A load test that ended filled a screen with "transfer failed"."""
    caplog.set_level(logging.DEBUG)
    await prefill.ask()
    await prefill.offer()
    assert await prefill.quiesce(cancelled=cancelled) == Quiet(request_id="r")
    await turns()
    said = {record.message: record.levelno for record in caplog.records if record.name == "services.prefill.outbound"}
    assert said.pop("request ended") == logging.DEBUG
    assert said == ({"cancelled by the client": logging.DEBUG} if cancelled else {"transfer failed": logging.WARNING})
    counts = [
        prefill.metrics.registry.get_sample_value("kvmesh_kv_transfers_total", {"outcome": outcome, "cause": cause})
        for outcome, cause in (("cancelled", ""), ("failed", "TransferFailed"))
    ]
    assert counts == ([1, None] if cancelled else [0, 1])
    assert prefill.failures == ([] if cancelled else ["TransferFailed"])
    prefill.assert_nothing_is_kept()


@pytest.mark.parametrize("how", ["quiesced", "refused", "done"])
async def test_nothing_is_written_for_a_request_that_has_ended(prefill: Prefill, how: str) -> None:
    """Decode may have reused its pages: a repeated request and offer must write nothing there."""
    if how == "done":
        await prefill.ask()
        prefill.computed()
        await prefill.offer()
        await turns()
    elif how == "refused":
        await prefill.offer()
        with pytest.raises(StaleInstance):
            await prefill.ask(epoch="another")
    else:
        await prefill.offer()
        assert await prefill.quiesce() == Quiet(request_id="r")
    assert await prefill.closed() == [ROOM]
    written = len(prefill.transfer.writes)
    with pytest.raises(TransferFailed):
        await prefill.offer()
    with pytest.raises(Rejected, match="was"):
        await prefill.ask()
    await turns()
    assert len(prefill.transfer.writes) == written
    assert not prefill.service._rooms._early
    assert prefill.service.num_transfers == 0


async def test_requests_that_were_over_long_ago_are_forgotten(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.prefill.rooms.ENDED_ID_EXPIRY_S", -1.0)
    for number in range(3):
        await prefill.quiesce(str(number))
    assert len(prefill.service._rooms._ended) == 0


@pytest.mark.parametrize(("page_size", "num_pages"), [(2, 5), (8, 2), (16, 1)])
async def test_an_offer_counts_decodes_pages_which_may_be_of_another_size(
    prefill: Prefill, page_size: int, num_pages: int
) -> None:
    kv = endpoint("decode-d", layout=replace(LAYOUT, page_size=page_size))
    prefill.registry.book.put("d", record("d", "1", kv=kv))
    await prefill.ask()
    prefill.computed()
    pages = list(range(num_pages))
    for wrong in ({"pages": [*pages, 99]}, {"pages": pages[1:]}, {"pages": pages, "num_cached_pages": num_pages + 1}):
        with pytest.raises(TransferFailed):
            await prefill.offer(**wrong)
    await prefill.offer(pages=pages)
    await turns()
    [pieces] = prefill.transfer.pieces
    assert int(pieces.length.sum()) == 10 * LAYOUT.num_stripes * LAYOUT.row_bytes
    assert prefill.decode.aux.read(2).num_pages == num_pages


@pytest.mark.parametrize("error", [PromptTooLong("too long"), ZeroDivisionError("bug")])
async def test_what_the_engine_refuses_is_told_to_decode(prefill: Prefill, error: Exception) -> None:
    prefill.engine.engine.refusal = error
    await prefill.ask()
    await turns()
    assert prefill.failures == ["PromptTooLong" if isinstance(error, PromptTooLong) else "TransferFailed"]
    prefill.assert_nothing_is_kept()


async def test_a_request_that_fails_in_the_engine_ends_its_room(prefill: Prefill) -> None:
    await prefill.ask()
    prefill.engine.step(failed=[Failed("r", TransferFailed("no memory"))])
    await turns()
    assert prefill.failures == ["TransferFailed"]
    prefill.assert_nothing_is_kept()


async def test_quiet_is_told_at_once_for_what_is_unknown(prefill: Prefill) -> None:
    assert await prefill.quiesce("unknown") == Quiet(request_id="unknown")


async def test_quiet_is_told_when_the_write_in_flight_has_ended_and_not_before(prefill: Prefill) -> None:
    prefill.transfer.gate.clear()
    await prefill.ask()
    await prefill.offer()
    prefill.computed()
    await turns()
    assert prefill.transfer.in_flight == 1
    quiet = [prefill.quiesce(), prefill.quiesce()]
    await turns()
    assert not any(q.done() for q in quiet)
    assert "r" not in prefill.engine.did("release"), "pages that NIXL reads were given back"
    prefill.transfer.gate.set()
    await asyncio.gather(*quiet)
    await turns()
    assert prefill.failures == ["TransferFailed"]
    assert len(prefill.transfer.writes) == 1
    prefill.assert_nothing_is_kept()


async def test_quiet_told_before_the_offer_keeps_the_request_from_writing(prefill: Prefill) -> None:
    await prefill.ask()
    await asyncio.wait_for(prefill.quiesce(), PATIENCE_S)
    prefill.computed()
    await turns()
    with pytest.raises(TransferFailed, match="does not hold room"):
        await prefill.offer()
    assert not prefill.transfer.writes
    assert prefill.failures == ["TransferFailed", "TransferFailed"]
    prefill.assert_nothing_is_kept()


async def test_a_deadline_ends_a_transfer_whose_pages_never_come(prefill: Prefill) -> None:
    await prefill.ask(life_ms=200)
    await until(lambda: not prefill.service.num_transfers)
    await turns()
    assert prefill.failures == ["DeadlineExceeded"]
    prefill.assert_nothing_is_kept()


async def test_a_deadline_during_a_write_waits_for_the_write(prefill: Prefill) -> None:
    prefill.transfer.gate.clear()
    await prefill.ask(life_ms=500)
    await prefill.offer()
    prefill.computed()
    await turns()
    quiet = prefill.quiesce()
    await asyncio.sleep(0.55)
    assert not quiet.done()
    assert prefill.transfer.in_flight == 1
    assert "r" not in prefill.engine.did("release")
    prefill.transfer.gate.set()
    await quiet


async def test_a_decode_that_is_gone_ends_its_transfers_and_is_forgotten(prefill: Prefill) -> None:
    prefill.registry.book.put("other", record("other", "1", kv=endpoint("decode-other")))
    await prefill.ask("r")
    await prefill.ask("s", decode_id="other")
    prefill.registry.book.remove("d")
    await turns()
    assert not prefill.failures, "nobody is there to be told"
    assert prefill.transfer.forgotten == ["decode-d"]
    assert prefill.service.num_transfers == 1
    assert not prefill.service._tasks


async def test_a_failed_disconnection_is_logged_by_the_name_of_its_task(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(_agent: str) -> None:
        raise TransferFailed("the library refuses")

    monkeypatch.setattr(prefill.transfer, "disconnect", refuse)
    prefill.registry.book.remove("d")
    await turns()
    (logged,) = (vars(record) for record in caplog.records if record.message == "background task failed")
    assert (logged["task"], logged["cause"]) == ("disconnect d", "the library refuses")
    assert not prefill.service._tasks


async def test_a_decode_that_registers_anew_keeps_its_connection_and_loses_its_transfers(prefill: Prefill) -> None:
    await prefill.ask()
    prefill.registry.book.put("d", record("d", "2", kv=endpoint("decode-d")))
    await turns()
    assert prefill.failures == ["PeerLost"]
    assert not prefill.transfer.forgotten


async def test_a_bug_in_one_transfer_ends_that_transfer_and_tells_decode(
    prefill: Prefill, caplog: pytest.LogCaptureFixture
) -> None:
    prefill.transfer.failure = ZeroDivisionError("bug")  # type: ignore[assignment]
    await prefill.ask()
    await prefill.offer()
    prefill.computed()
    await turns()
    assert prefill.failures == ["InvariantBroken"]
    prefill.assert_nothing_is_kept()
    assert "ZeroDivisionError: bug" in caplog.text


async def test_giving_up_ends_every_transfer(prefill: Prefill) -> None:
    for number in range(3):
        await prefill.ask(f"r{number}")
    prefill.service.stop_all("leaving")
    await asyncio.wait_for(prefill.service.drained(), PATIENCE_S)
    assert prefill.failures == ["PeerLost"] * 3
    await turns()
    assert sorted(prefill.engine.did("release")) == ["r0", "r1", "r2"]


async def test_a_leaving_instance_waits_for_pages_that_are_to_come_and_closes_their_rooms(prefill: Prefill) -> None:
    """It left etcd, decode reused its pages, and the transfer wrote into them."""
    await prefill.ask()
    prefill.service.draining = True
    draining = asyncio.create_task(prefill.service.drained())
    await turns()
    assert not draining.done()
    await prefill.offer()
    prefill.computed()
    await asyncio.wait_for(draining, PATIENCE_S)
    assert prefill.transfer.writes
    assert prefill.bus.of(CloseRooms) == [CloseRooms(rooms=[ROOM])]


async def test_the_first_tokens_logprobs_go_beside_the_pages(prefill: Prefill) -> None:
    told = TokenLogprobs(-0.5, ((42, -0.5), (7, -1.25)))
    await prefill.ask(sampling=SamplingParams(max_tokens=5, logprobs=2, n=3))
    await prefill.offer()
    landed = prefill.decode.expect(ROOM, 0)
    prefill.engine.step(computed=[Exposed("r", PAGES, 10, 0, 42, logprobs=told)])
    await asyncio.wait_for(landed, PATIENCE_S)
    assert prefill.decode.aux.read(2).logprobs == told
    await prefill.service.drained()
