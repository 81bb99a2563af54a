"""A prompt that a prefill instance refuses is sent to another one."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count, permutations, product

import pytest

from components.errors import (
    DeadlineExceeded,
    InvariantBroken,
    ListenerGone,
    MeshError,
    NobodyListens,
    Overloaded,
    PromptTooLong,
    StaleInstance,
)
from components.kv_transfer.aux import AuxRecord
from components.messaging.call_server import Endpoint
from components.messaging.outbox import StreamOutbox
from components.wire.prefill import OpenRoom, PrefillAccepted, PrefillRequest, Quiesce, Quiet, RoomFailed, RoomOk
from engine.ports import Exposed
from tests.components.discovery.records import record
from tests.components.kv_transfer.fake_transfer import endpoint
from tests.components.messaging.fake_bus import FakeBus
from tests.services.decode.test_decode_service import ID, PAGES, Decode
from tests.waiting import turns, until

pytestmark = pytest.mark.anyio

REFUSED = Overloaded("this instance is draining")


class Prefills:
    """Prefill instances and a bootstrap replica. Every call of an instance ends as the next of `outcomes`; None: accepted."""

    def __init__(self, bus: FakeBus) -> None:
        self.bus = bus
        self.outcomes: Iterator[MeshError | None] = iter(())
        self.asked: list[tuple[str, PrefillRequest]] = []
        self.offered: list[OpenRoom] = []
        self.called_off: list[str] = []
        self.answers, self.quiets = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.quiets.set()
        bus.serve("ns.bootstrap.boot", [Endpoint("open", OpenRoom, self._open)])

    def add(self, decode: Decode, name: str) -> None:
        async def prefill(request: PrefillRequest) -> PrefillAccepted:
            self.asked.append((name, request))
            outcome = next(self.outcomes, None)
            await self.answers.wait()
            if outcome is not None:
                raise outcome
            return PrefillAccepted(request_id=request.request_id)

        async def quiesce(request: Quiesce) -> Quiet:
            self.called_off.append(name)
            await self.quiets.wait()
            return Quiet(request_id=request.request_id)

        self.bus.serve(
            f"ns.prefill.{name}",
            [Endpoint("prefill", PrefillRequest, prefill), Endpoint("quiesce", Quiesce, quiesce)],
        )
        kv = endpoint(f"prefill-{name}")
        decode.registry.book.put(name, record(name, "1", role="prefill", model="m", kv=kv))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.asked]

    async def _open(self, request: OpenRoom) -> RoomOk:
        self.offered.append(request)
        return RoomOk(room=request.room)


class Mesh:
    def __init__(self, decode: Decode, prefills: Prefills) -> None:
        self.decode, self.prefills = decode, prefills

    async def ask(self, *outcomes: MeshError | None) -> None:
        self.prefills.outcomes = iter(outcomes)
        await self.decode.ask()

    async def land(self) -> None:
        """Let the instance with the last prompt write everything."""
        offer, (_, asked) = self.prefills.offered[-1], self.prefills.asked[-1]
        self.decode.transfer.land(offer.room, offer.aux_slot, AuxRecord(asked.stamp, len(PAGES), 42, 0))
        await turns()

    async def finish(self) -> list[int]:
        await self.decode.finish()
        await self.decode.until_nothing_runs()
        self.decode.assert_nothing_is_kept()
        return self.decode.tokens()


@asynccontextmanager
async def open_decode() -> AsyncIterator[Mesh]:
    bus = FakeBus()
    async with StreamOutbox(bus, "d", lambda: "mine", lambda: 1).running() as outbox:
        decode = Decode(outbox, bus)
        prefills = Prefills(bus)
        for name in ("p", "q"):
            prefills.add(decode, name)
        yield Mesh(decode, prefills)


@pytest.fixture(autouse=True)
def waits_end_where_a_test_shortens_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen time limits, which on a busy machine expired before the awaited event."""
    for name in ("prefill_client.CALL_TIMEOUT_S", "prefill_client.CONFIRM_NOT_WRITING_S"):
        monkeypatch.setattr(f"services.decode.{name}", 1000.0)
    monkeypatch.setattr("services.decode.remote_prefill.REFUSAL_TIMEOUT_S", 1000.0)


@pytest.fixture(autouse=True)
def rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = count(1)
    monkeypatch.setattr("services.decode.prefill_client.randbits", lambda _: next(numbers))


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with open_decode() as mesh:
        yield mesh


@pytest.mark.parametrize("refusal", [REFUSED, StaleInstance("restarted"), NobodyListens("gone")])
async def test_a_refused_prompt_is_computed_by_another_prefill_instance(mesh: Mesh, refusal: MeshError) -> None:
    """The refusal counted as a failed transfer, so an orderly restart of prefill instances could raise an alert."""
    await mesh.ask(refusal)
    await mesh.decode.reserve()
    assert sorted(mesh.prefills.names) == ["p", "q"]
    [offer] = mesh.prefills.offered
    name, asked = mesh.prefills.asked[-1]
    assert (offer.prefill_id, offer.room, offer.pages) == (name, asked.room, PAGES)
    await mesh.land()
    assert await mesh.finish() == [42, 43]
    assert mesh.decode.engine.did("submit") == [ID]
    assert not mesh.decode.engine.did("recompute")
    assert not mesh.decode.failed_transfers()
    assert mesh.decode.recomputes == 0


@pytest.mark.parametrize("when", ["before", "after", "meanwhile"])
async def test_the_pages_are_offered_to_the_other_instance_whenever_they_were_reserved(mesh: Mesh, when: str) -> None:
    """`meanwhile`: after the refusal, until the other instance is chosen."""
    mesh.prefills.answers.clear()
    mesh.prefills.quiets.clear()
    await mesh.ask(REFUSED)
    if when == "before":
        await mesh.decode.reserve()
        assert len(mesh.prefills.offered) == 1
    mesh.prefills.answers.set()
    if when == "meanwhile":
        mesh.decode.engine.step(reserved=[Exposed(ID, PAGES, 4, 4)])
    await turns()
    if when == "before":
        assert len(mesh.prefills.asked) == 1, "the instance that refused may still write"
        assert not mesh.decode.engine.did("release")
    mesh.prefills.quiets.set()
    await turns()
    if when == "after":
        await mesh.decode.reserve()
    first, second = mesh.prefills.asked
    assert first[1].room != second[1].room
    assert mesh.prefills.offered[-1].room == second[1].room
    await mesh.land()
    assert await mesh.finish() == [42, 43]
    assert mesh.decode.engine.engine.did[-1][0] == "deliver"


async def test_a_prompt_is_computed_here_if_the_instance_that_refused_does_not_confirm_that_it_writes_nothing(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.decode.prefill_client.CONFIRM_NOT_WRITING_S", 0.01)
    mesh.prefills.answers.clear()
    mesh.prefills.quiets.clear()
    await mesh.ask(REFUSED)
    await mesh.decode.reserve()
    mesh.prefills.answers.set()
    await until(lambda: mesh.decode.engine.did("recompute"))
    assert len(mesh.prefills.asked) == 1
    assert not mesh.decode.engine.did("release"), "it may still write"
    mesh.prefills.quiets.set()
    assert await mesh.finish() == [43]
    assert mesh.decode.engine.did("release") == [ID]
    assert mesh.decode.recomputes == 1


async def refused_room(mesh: Mesh) -> None:
    """A leaving instance refuses the pages, before its refusal of the prompt arrives."""
    mesh.prefills.answers.clear()
    await mesh.ask(REFUSED)
    await mesh.decode.reserve()
    [offer] = mesh.prefills.offered
    report = RoomFailed(request_id=ID, room=offer.room, error="TransferFailed", cause="this instance has no such room")
    await mesh.decode.service.room_failed(report)
    await turns()


async def test_a_refused_prompt_is_computed_by_another_instance_if_the_report_of_its_room_arrives_first(
    mesh: Mesh,
) -> None:
    """Decode did not wait for the answer, ignored the refusal, and computed the prompt itself."""
    await refused_room(mesh)
    mesh.prefills.answers.set()
    await turns()
    assert sorted(mesh.prefills.names) == ["p", "q"]
    await mesh.land()
    assert await mesh.finish() == [42, 43]
    assert not mesh.decode.engine.did("recompute")


async def test_a_prompt_whose_transfer_failed_is_computed_here_if_no_answer_follows(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.decode.remote_prefill.REFUSAL_TIMEOUT_S", 0.01)
    await refused_room(mesh)
    await until(lambda: mesh.decode.engine.did("recompute"))
    mesh.prefills.answers.set()
    assert await mesh.finish() == [43]
    assert len(mesh.prefills.asked) == 1


async def test_a_client_that_leaves_while_pages_are_taken_back_leaves_nothing(mesh: Mesh) -> None:
    mesh.prefills.answers.clear()
    mesh.prefills.quiets.clear()
    await mesh.ask(REFUSED)
    await mesh.decode.reserve()
    mesh.prefills.answers.set()
    await turns()
    assert await mesh.decode.cancel() == 1
    assert not mesh.decode.engine.did("release")
    mesh.prefills.quiets.set()
    await mesh.decode.until_nothing_runs()
    assert len(mesh.prefills.asked) == 1
    assert mesh.decode.engine.did("release") == [ID]
    mesh.decode.assert_nothing_is_kept()


async def test_when_all_refuse_the_prompt_is_computed_here(mesh: Mesh) -> None:
    await mesh.ask(REFUSED, REFUSED)
    await mesh.decode.reserve()
    assert sorted(mesh.prefills.names) == ["p", "q"]
    assert not mesh.prefills.offered
    assert mesh.decode.engine.did("recompute") == [ID]
    assert await mesh.finish() == [43]
    assert mesh.decode.recomputes == 1
    assert mesh.decode.failed_transfers() == {"Overloaded": 1}


async def test_in_a_fleet_that_refuses_everything_a_prompt_is_sent_to_three_instances(mesh: Mesh) -> None:
    for name in ("s", "t", "u"):
        mesh.prefills.add(mesh.decode, name)
    await mesh.ask(*[REFUSED] * 5)
    assert len(set(mesh.prefills.names)) == len(mesh.prefills.names) == 3
    assert mesh.decode.engine.did("recompute") == [ID]
    assert await mesh.finish() == [43]


@pytest.mark.parametrize(
    "failure", [DeadlineExceeded("late"), ListenerGone("gone"), InvariantBroken("bug"), PromptTooLong("long")]
)
async def test_what_may_be_accepted_or_fails_everywhere_is_not_sent_to_another_instance(
    mesh: Mesh, failure: MeshError
) -> None:
    await mesh.ask(failure)
    assert len(mesh.prefills.asked) == 1
    assert mesh.decode.engine.did("recompute") == [ID]
    assert await mesh.finish() == [43]


@pytest.mark.parametrize("events", [*permutations(("refused", "reserved", "quiet", "cancelled"), 3)], ids="-".join)
async def test_in_every_order_each_token_is_sent_once_and_offered_pages_come_back_when_nobody_writes(
    events: tuple[str, ...],
) -> None:
    for pauses in product(range(4), repeat=3):
        async with open_decode() as mesh:
            mesh.prefills.answers.clear()
            mesh.prefills.quiets.clear()
            await mesh.ask(REFUSED)
            done: set[str] = set()
            for event, pause in zip((*events, "refused", "quiet", "reserved"), (*pauses, 9, 9, 9), strict=True):
                if event in done:
                    continue
                done.add(event)
                match event:
                    case "refused":
                        mesh.prefills.answers.set()
                    case "quiet":
                        mesh.prefills.quiets.set()
                    case "reserved":
                        mesh.decode.engine.step(reserved=[Exposed(ID, PAGES, 4, 4)])
                    case "cancelled":
                        await mesh.decode.cancel()
                await turns(pause)
                if mesh.prefills.offered and "quiet" not in done:
                    assert not mesh.decode.engine.did("release"), (events, pauses)
            await turns()
            if "cancelled" in done:
                await mesh.decode.until_nothing_runs()
                assert not mesh.decode.tokens(), (events, pauses)
                mesh.decode.assert_nothing_is_kept()
                continue
            await mesh.land()
            assert await mesh.finish() == [42, 43], (events, pauses)
            assert len(mesh.prefills.asked) == 2
            assert not mesh.decode.engine.did("recompute")


async def test_a_settled_transfer_does_not_remove_a_later_one_of_the_same_request(mesh: Mesh) -> None:
    client, prefill = mesh.decode.prefill_client, mesh.decode.registry.book.of_role("prefill")[0]
    earlier, later = client.begin(ID, prefill), client.begin(ID, prefill)
    await client.wait_until_pages_safe(earlier)
    assert client.is_under_way(ID)
    await client.wait_until_pages_safe(later)
    mesh.decode.assert_nothing_is_kept()
