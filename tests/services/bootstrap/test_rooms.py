import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from components.errors import IncompatibleLayout, MalformedMessage
from components.wire.rooms import OpenRoom, PagesOffered, RoomFailed
from services.bootstrap.rooms import Note, RoomBook
from tests.components.kv_transfer.fake_transfer import LAYOUT

parties = st.tuples(st.sampled_from("ab"), st.sampled_from("12"))  # (instance id, epoch)


def opening(
    room: str = "one",
    prefill: tuple[str, str] = ("p", "1"),
    decode: tuple[str, str] = ("d", "1"),
    deadline: int = 100,
    cached: int = 1,
) -> OpenRoom:
    return OpenRoom(
        room=room,
        request_id="r",
        prefill_id=prefill[0],
        prefill_epoch=prefill[1],
        decode_id=decode[0],
        decode_epoch=decode[1],
        pages=[4, 2],
        num_cached_pages=cached,
        aux_slot=7,
        deadline_unix_ms=deadline,
    )


def told(notes: list[Note]) -> list[tuple[str, str, str]]:
    """(role, instance, error) of each."""
    return sorted((n.role, n.instance_id, n.message.error) for n in notes if isinstance(n.message, RoomFailed))


def test_the_pages_of_a_room_go_to_prefill() -> None:
    note = RoomBook("boot").open(opening(), sent_unix_ms=50)
    assert (note.role, note.instance_id) == ("prefill", "p")
    assert note.message == PagesOffered(
        request_id="r",
        room="one",
        bootstrap_id="boot",
        decode_id="d",
        decode_epoch="1",
        pages=[4, 2],
        num_cached_pages=1,
        aux_slot=7,
        deadline_unix_ms=100,
        sender="boot",
        sent_unix_ms=50,
    )


def test_a_room_that_is_open_is_not_opened_again() -> None:
    book = RoomBook("boot")
    book.open(opening())
    with pytest.raises(MalformedMessage, match="room one is open already"):
        book.open(opening(decode=("x", "1")))
    assert told(book.instance_gone("p", "1")) == [("decode", "d", "PrefillLost")]


@pytest.mark.parametrize("cached", [-1, 3])
def test_an_offer_whose_counts_do_not_fit_opens_nothing(cached: int) -> None:
    book = RoomBook("boot")
    with pytest.raises(MalformedMessage):
        book.open(opening(cached=cached))
    assert not len(book)


def test_a_room_is_closed_once_and_closing_it_again_is_fine() -> None:
    book = RoomBook("boot")
    book.open(opening())
    assert [book.close("one"), book.close("one"), book.close("another")] == [True, False, False]
    assert not len(book)


def test_a_lost_side_is_told_to_the_other_in_that_epoch_alone() -> None:
    book = RoomBook("boot")
    book.open(opening("one"))
    book.open(opening("two", prefill=("p", "2")))
    book.open(opening("three", decode=("d", "2")))
    assert told(book.instance_gone("p", "2")) == [("decode", "d", "PrefillLost")]
    assert told(book.instance_gone("d", "2")) == [("prefill", "p", "PeerLost")]
    assert len(book) == 1
    assert book.instance_gone("p", "3") == []


def test_an_expired_room_fails_on_both_sides() -> None:
    book = RoomBook("boot")
    book.open(opening("one", deadline=100))
    book.open(opening("two", deadline=101))
    assert book.expire(99) == []
    notes = book.expire(100)
    assert told(notes) == [("decode", "d", "DeadlineExceeded"), ("prefill", "p", "DeadlineExceeded")]
    assert {n.message.cause for n in notes} == {"the transfer did not end in time"}  # type: ignore[union-attr]
    assert {n.message.room for n in notes} == {"one"}
    assert len(book) == 1


def test_a_pair_whose_pages_do_not_fit_is_refused_and_both_values_are_named() -> None:
    book = RoomBook("boot")
    other = replace(LAYOUT, model="n", layers=9)
    with pytest.raises(
        IncompatibleLayout, match=r"prefill here and decode there: .*model: m here, n there, layers: 1 here, 9"
    ):
        book.open(replace(opening(), layout=other), LAYOUT)
    assert book.open(replace(opening(), layout=LAYOUT), LAYOUT), "nothing was handed out"


class Rooms(RuleBasedStateMachine):
    """Any order of messages and losses: every room ends, whoever must hear of a failure does, nothing is kept."""

    rooms = Bundle("rooms")

    @initialize()
    def start(self) -> None:
        self.book = RoomBook("boot")
        self.now = 0
        self.open_: dict[str, OpenRoom] = {}

    @rule(target=rooms, name=st.sampled_from("uvwxyz"), prefill=parties, decode=parties, life=st.integers(1, 5))
    def open(self, name: str, prefill: tuple[str, str], decode: tuple[str, str], life: int) -> str:
        request = opening(name, ("p" + prefill[0], prefill[1]), ("d" + decode[0], decode[1]), self.now + life)
        if name in self.open_:
            with pytest.raises(MalformedMessage):
                self.book.open(request)
        else:
            note = self.book.open(request)
            assert (note.role, note.instance_id) == ("prefill", request.prefill_id)
            self.open_[name] = request
        return name

    @rule(room=rooms)
    def close(self, room: str) -> None:
        assert self.book.close(room) == (self.open_.pop(room, None) is not None)

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
