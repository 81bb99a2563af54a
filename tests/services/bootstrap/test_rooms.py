from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from components.errors import BY_NAME, IncompatibleLayout, MalformedMessage, TransferFailed
from components.wire.rooms import CloseRoom, OfferPages, OpenRoom, PagesOffered, RoomFailed
from services.bootstrap.rooms import Note, RoomBook
from tests.components.kv_transfer.fake_transfer import LAYOUT

parties = st.tuples(st.sampled_from("ab"), st.sampled_from("12"))  # (instance id, epoch)


def opening(
    prefill: tuple[str, str] = ("p", "1"), decode: tuple[str, str] = ("d", "1"), deadline: int = 100
) -> OpenRoom:
    return OpenRoom(
        request_id="r",
        prefill_id=prefill[0],
        prefill_epoch=prefill[1],
        decode_id=decode[0],
        decode_epoch=decode[1],
        deadline_unix_ms=deadline,
    )


def offering(
    room: str, decode: tuple[str, str] = ("d", "1"), pages: tuple[int, ...] = (4, 2), cached: int = 1
) -> OfferPages:
    return OfferPages(
        room=room, decode_id=decode[0], decode_epoch=decode[1], pages=list(pages), num_cached_pages=cached, aux_slot=7
    )


def told(notes: list[Note]) -> list[tuple[str, str, str]]:
    """(role, instance, error) of each."""
    return sorted((n.role, n.instance_id, n.message.error) for n in notes if isinstance(n.message, RoomFailed))


def test_an_offer_reaches_the_prefill_that_opened_the_room() -> None:
    book = RoomBook("boot")
    opened = book.open(opening())
    assert opened.room.startswith("boot/")
    [note] = book.offer(offering(opened.room))
    assert (note.role, note.instance_id) == ("prefill", "p")
    assert note.message == PagesOffered(
        request_id="r",
        room=opened.room,
        decode_id="d",
        decode_epoch="1",
        pages=[4, 2],
        num_cached_pages=1,
        aux_slot=7,
    )


def test_rooms_and_stamps_are_never_the_same_and_a_stamp_is_never_what_an_empty_slot_says() -> None:
    book = RoomBook("boot")
    opened = [book.open(opening()) for _ in range(500)]
    assert len({o.room for o in opened}) == len({o.stamp for o in opened}) == 500
    assert all(0 < o.stamp < 2**63 for o in opened)


@pytest.mark.parametrize("other", [("d", "2"), ("x", "1")])
def test_a_stranger_cannot_offer_its_pages(other: tuple[str, str]) -> None:
    book = RoomBook("boot")
    room = book.open(opening()).room
    with pytest.raises(TransferFailed, match="another decode instance"):
        book.offer(offering(room, other))
    assert book.offer(offering(room)), "the rightful one still can"


def test_a_second_offer_is_refused_and_changes_nothing() -> None:
    book = RoomBook("boot")
    room = book.open(opening()).room
    book.offer(offering(room))
    with pytest.raises(MalformedMessage, match="has an offer already"):
        book.offer(offering(room, pages=(9, 9)))
    assert len(book) == 1


@pytest.mark.parametrize("cached", [-1, 3])
def test_an_offer_whose_counts_do_not_fit_is_refused(cached: int) -> None:
    book = RoomBook("boot")
    room = book.open(opening()).room
    with pytest.raises(MalformedMessage):
        book.offer(offering(room, cached=cached))
    assert book.offer(offering(room))


def test_a_room_that_is_over_takes_no_offer_and_closing_it_again_is_fine() -> None:
    book = RoomBook("boot")
    room = book.open(opening()).room
    assert book.close(CloseRoom(room=room)) == []
    assert book.close(CloseRoom(room=room, error="TransferFailed")) == []
    with pytest.raises(TransferFailed, match="is not open here"):
        book.offer(offering(room))


@pytest.mark.parametrize(("error", "expected"), [("PromptTooLong", "PromptTooLong"), ("NoSuchError", "TransferFailed")])
def test_prefills_failure_is_told_to_decode(error: str, expected: str) -> None:
    book = RoomBook("boot")
    notes = book.close(CloseRoom(room=book.open(opening()).room, error=error, cause="why"))
    assert told(notes) == [("decode", "d", expected)]
    assert not len(book)


def test_a_lost_side_is_told_to_the_other_in_that_epoch_alone() -> None:
    book = RoomBook("boot")
    book.open(opening())
    book.open(opening(prefill=("p", "2")))
    book.open(opening(decode=("d", "2")))
    assert told(book.instance_gone("p", "2")) == [("decode", "d", "PrefillLost")]
    assert told(book.instance_gone("d", "2")) == [("prefill", "p", "PeerLost")]
    assert len(book) == 1
    assert book.instance_gone("p", "3") == []


def test_an_expired_room_fails_on_both_sides() -> None:
    book = RoomBook("boot")
    book.open(opening(deadline=100))
    book.open(opening(deadline=101))
    assert told(book.expire(100)) == [("decode", "d", "DeadlineExceeded"), ("prefill", "p", "DeadlineExceeded")]
    assert len(book) == 1


def test_a_room_waits_for_pages_until_one_deadline_and_for_the_last_byte_until_another() -> None:
    book = RoomBook("boot")
    waiting, sending = (book.open(replace(opening(deadline=100), offer_deadline_unix_ms=10)).room for _ in range(2))
    book.offer(replace(offering(sending), deadline_unix_ms=50))
    assert book.expire(9) == []
    notes = book.expire(10)
    assert told(notes) == [("decode", "d", "DeadlineExceeded"), ("prefill", "p", "DeadlineExceeded")]
    assert {n.message.cause for n in notes} == {"decode did not offer its pages in time"}  # type: ignore[union-attr]
    assert {n.message.room for n in notes} == {waiting}
    assert book.expire(49) == []
    notes = book.expire(50)
    assert {n.message.cause for n in notes} == {"the transfer did not end in time"}  # type: ignore[union-attr]
    assert not len(book)


def test_neither_outlives_the_room_itself() -> None:
    book = RoomBook("boot")
    book.open(replace(opening(deadline=100), offer_deadline_unix_ms=200))
    book.offer(replace(offering(book.open(opening(deadline=100)).room), deadline_unix_ms=200))
    assert len(book.expire(100)) == 4


def test_a_pair_whose_pages_do_not_fit_is_refused_and_both_values_are_named() -> None:
    book = RoomBook("boot")
    room = book.open(replace(opening(), layout=LAYOUT)).room
    other = replace(LAYOUT, model="n", layers=9)
    with pytest.raises(
        IncompatibleLayout, match=r"prefill here and decode there: .*model: m here, n there, layers: 1 here, 9"
    ):
        book.offer(replace(offering(room), layout=other))
    assert book.offer(replace(offering(room), layout=LAYOUT)), "nothing was handed out"


class Rooms(RuleBasedStateMachine):
    """Any order of messages and losses: every room ends, whoever must hear of a failure does, nothing is kept."""

    rooms = Bundle("rooms")

    @initialize()
    def start(self) -> None:
        self.book = RoomBook("boot")
        self.now = 0
        self.open_: dict[str, OpenRoom] = {}
        self.offered: set[str] = set()

    @rule(target=rooms, prefill=parties, decode=parties, life=st.integers(1, 5))
    def open(self, prefill: tuple[str, str], decode: tuple[str, str], life: int) -> str:
        request = opening(("p" + prefill[0], prefill[1]), ("d" + decode[0], decode[1]), self.now + life)
        room = self.book.open(request).room
        assert room not in self.open_
        self.open_[room] = request
        return room

    @rule(room=rooms, decode=parties)
    def offer(self, room: str, decode: tuple[str, str]) -> None:
        of = self.open_.get(room)
        mine = ("d" + decode[0], decode[1])
        if of is None or mine != (of.decode_id, of.decode_epoch):
            with pytest.raises(TransferFailed):
                self.book.offer(offering(room, mine))
        elif room in self.offered:
            with pytest.raises(MalformedMessage):
                self.book.offer(offering(room, mine))
        else:
            [note] = self.book.offer(offering(room, mine))
            assert (note.role, note.instance_id) == ("prefill", of.prefill_id)
            self.offered.add(room)

    @rule(room=rooms, error=st.none() | st.sampled_from([*sorted(BY_NAME), "Unknown"]))
    def close(self, room: str, error: str | None) -> None:
        of = self.open_.pop(room, None)
        notes = self.book.close(CloseRoom(room=room, error=error))
        expected = [] if of is None or error is None else [("decode", of.decode_id)]
        assert [(n.role, n.instance_id) for n in notes] == expected

    @rule(role=st.sampled_from("pd"), party=parties)
    def lose(self, role: str, party: tuple[str, str]) -> None:
        gone = (role + party[0], party[1])
        hit = {}
        for room, of in self.open_.items():
            if (of.prefill_id, of.prefill_epoch) == gone:
                hit[room] = ("decode", of.decode_id, "PrefillLost")
            elif (of.decode_id, of.decode_epoch) == gone:
                hit[room] = ("prefill", of.prefill_id, "PeerLost")
        assert told(self.book.instance_gone(*gone)) == sorted(hit.values())
        for room in hit:
            del self.open_[room]

    @rule(seconds=st.integers(0, 3))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        over = [room for room, of in self.open_.items() if of.deadline_unix_ms <= self.now]
        notes = self.book.expire(self.now)
        heard = sorted((n.message.room, n.role) for n in notes)
        assert heard == sorted((room, role) for room in over for role in ("prefill", "decode"))
        for room in over:
            del self.open_[room]

    @invariant()
    def holds_what_is_open_and_nothing_else(self) -> None:
        if hasattr(self, "book"):
            assert set(self.book._rooms) == set(self.open_)

    def teardown(self) -> None:
        if hasattr(self, "book"):
            self.book.expire(self.now + 10)
            assert not len(self.book), "a room outlived its deadline"


TestRooms = Rooms.TestCase
TestRooms.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
