import array
import contextlib
import sys

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.errors import MalformedMessage
from components.wire.generate import PromptOrigin, StreamItem, TokenFrame, unpack_frame
from components.wire.logprobs import TokenLogprobs
from components.wire.refused import Refused
from components.wire.step_stats import DraftCounts
from components.wire.tokens import num_tokens, pack_tokens, unpack_tokens
from tests.components.wire.frames import frame_of

int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
counts = st.integers(0, 2**63 - 1)
facts = st.dictionaries(st.text(), st.none() | st.text() | int64 | st.floats(allow_nan=False), max_size=3)
items = st.builds(
    StreamItem,
    stream_id=int64,
    seq=int64,
    token_ids=st.lists(int32, max_size=5),
    finish=st.none() | st.text(),
    error=st.none() | st.builds(Refused, error=st.text(), message=st.text(), fields=facts),
    num_cached_tokens=int64,
    sent_unix_ns=int64,
    logprobs=st.none(),
    prompt_logprobs=st.none(),
    origin=st.none() | st.builds(PromptOrigin, st.text(), st.text()),
    draft_counts=st.none() | st.builds(DraftCounts, counts, counts),
)
float32 = st.floats(width=32, allow_nan=False)


@st.composite
def logprobs(draw: st.DrawFn, count: int) -> list[TokenLogprobs]:
    width = draw(st.integers(0, 3))
    alternatives = st.lists(st.tuples(int32, float32), min_size=width, max_size=width).map(tuple)
    return draw(st.lists(st.builds(TokenLogprobs, float32, alternatives), min_size=count, max_size=count))


@st.composite
def told(draw: st.DrawFn) -> StreamItem:
    item = draw(items)._replace(error=None)
    own = draw(st.none() | logprobs(len(item.token_ids)))
    return item._replace(logprobs=own, prompt_logprobs=draw(st.none() | st.integers(0, 4).flatmap(logprobs)))


frames = st.builds(
    frame_of, instance_id=st.text(), epoch=st.text(), step=int64, items=st.lists(items | told(), max_size=4)
)


@given(frames)
def test_a_frame_comes_out_as_it_went_in_errors_too(frame: TokenFrame) -> None:
    assert unpack_frame(frame.pack()) == frame


@given(st.binary() | st.binary().map(lambda b: b"\x99\x04" + b))
def test_garbage_is_no_frame(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack_frame(data)


@given(frames, st.data())
def test_a_damaged_frame_is_refused_or_still_a_frame(frame: TokenFrame, data: st.DataObject) -> None:
    packed = bytearray(frame.pack())
    at = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(MalformedMessage):
        unpack_frame(bytes(packed[:at]))
    packed[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(MalformedMessage):
        assert isinstance(unpack_frame(bytes(packed)), TokenFrame)


@pytest.mark.parametrize(
    "error",
    ["gone", ["A"], ["A", "b", []], ["A", "b", {"k": [1]}], [1, "b", {}], ["A", None, {}], ["A", "b", {b"k": 1}]],
)
def test_a_bad_error_in_an_item_is_a_malformed_frame(error: object) -> None:
    """The exception of the schema for the error's fields reached the subscription."""
    item = [0, 0, b"", None, error, 0, 0, None, None]
    with pytest.raises(MalformedMessage):
        unpack_frame(msgpack.packb([*HEAD, *NOTHING, [[0, item]]]))


HEAD = [5, "i", "e", 0, 7]
NOTHING = [b"", b"", b"", b""]
ONE = [bytes(8), bytes(8), pack_tokens([1]), bytes(4)]  # token 0, the first of stream 0
ITEM = [0, 0, b"", None, None, 0, 0, None, None]
WRONG = {
    "version": [4, "i", "e", 0, 7, *NOTHING, []],
    "length": [*HEAD, *NOTHING],
    "instance": [5, 0, "e", 0, 7, *NOTHING, []],
    "step": [5, "i", "e", "0", 7, *NOTHING, []],
    "number": [5, "i", "e", 0, -1, *NOTHING, []],
    "no number": [5, "i", "e", 0, "7", *NOTHING, []],
    "a column of text": [*HEAD, "", b"", b"", b"", []],
    "part of a number": [*HEAD, b"", bytes(7), b"", b"", []],
    "a column too short": [*HEAD, bytes(8), bytes(8), b"", b"", []],
    "fewer tokens than items say": [*HEAD, bytes(8), bytes(8), pack_tokens([2]), bytes(4), []],
    "more tokens than items say": [*HEAD, bytes(8), bytes(8), pack_tokens([1]), bytes(8), []],
    "an item without tokens": [*HEAD, bytes(16), bytes(16), pack_tokens([0, 1]), bytes(4), []],
    "an item of less than none": [*HEAD, bytes(16), bytes(16), pack_tokens([-1, 2]), bytes(4), []],
    "others": [*HEAD, *NOTHING, {}],
    "no place": [*HEAD, *NOTHING, [ITEM]],
    "a place behind the end": [*HEAD, *ONE, [[2, ITEM]]],
    "places out of order": [*HEAD, *ONE, [[1, ITEM], [0, ITEM]]],
    "a place below zero": [*HEAD, *ONE, [[-1, ITEM]]],
}


def _with(field: int, value: object) -> list[object]:
    return [*ITEM[:field], value, *ITEM[field + 1 :]]


@pytest.mark.parametrize("what", WRONG)
def test_a_frame_of_the_wrong_shape_is_refused(what: str) -> None:
    with pytest.raises(MalformedMessage):
        unpack_frame(msgpack.packb(WRONG[what]))


@pytest.mark.parametrize(
    "item",
    [
        ITEM[:-1],
        _with(0, "0"),
        _with(2, ""),
        _with(2, b"123"),
        _with(3, 7),
        _with(7, ""),
        [0, 0, b"1234", None, None, 0, 0, bytes(4), None],  # one token, zero counted
        _with(8, bytes(4)),
        _with(8, [2**40, bytes(4)]),
        _with(8, [-1, b"\xff\xff\xff\xff"]),
        [*ITEM, ["p", ""], None],
        [*ITEM, None],
        [*ITEM, ["p"]],
        [*ITEM, ["p", 7]],
    ],
)
def test_an_item_of_the_wrong_shape_is_refused(item: list[object]) -> None:
    unpack_frame(msgpack.packb([*HEAD, *NOTHING, [[0, ITEM]]]))  # the valid form
    with pytest.raises(MalformedMessage):
        unpack_frame(msgpack.packb([*HEAD, *NOTHING, [[0, item]]]))


def test_plain_items_keep_their_place_among_the_others() -> None:
    """The first and last items of a stream are not plain."""
    items = [StreamItem(1, 0, [7], None, None, 3, 5), StreamItem(2, 4, [8]), StreamItem(1, 1, [9])]
    items += [StreamItem(2, 5, [10], "stop"), StreamItem(1, 2, [11])]
    assert unpack_frame(frame_of("i", "e", 1, items).pack()).items == items


def test_where_a_prompt_was_computed_travels_with_its_first_token_and_not_otherwise() -> None:
    """Older receivers refuse an item with a tenth field, so it is sent only on request."""
    origin = PromptOrigin("p1", "the transfer took too long")
    items = [StreamItem(1, 0, [7], None, None, 3, 5, origin=origin), StreamItem(2, 0, [8], None, None, 3, 5)]
    packed = frame_of("i", "e", 1, items).pack()
    assert unpack_frame(packed).items == items
    assert [len(item) for _, item in msgpack.unpackb(packed)[-1]] == [10, 9]


def test_counts_of_drafts_travel_with_their_tokens() -> None:
    """Only requests with a prediction get the eleventh field."""
    items = [
        StreamItem(1, 0, [7], None, None, 3, 5, origin=PromptOrigin("p", ""), draft_counts=DraftCounts(3, 2)),
        StreamItem(2, 0, [8, 9], draft_counts=DraftCounts(5, 1)),
        StreamItem(3, 0, [8]),
    ]
    packed = frame_of("i", "e", 1, items).pack()
    assert unpack_frame(packed).items == items
    assert [len(item) for _, item in msgpack.unpackb(packed)[-1]] == [11, 11]


@pytest.mark.parametrize("counts", [7, [], [1], [1, 2, 3], [1, "2"], [-1, 0], [True, 1], [1.0, 1]])
def test_bad_counts_of_drafts_are_refused(counts: object) -> None:
    unpack_frame(msgpack.packb([*HEAD, *NOTHING, [[0, [*ITEM, None, [2, 1]]]]]))
    with pytest.raises(MalformedMessage, match="counts of drafts"):
        unpack_frame(msgpack.packb([*HEAD, *NOTHING, [[0, [*ITEM, None, counts]]]]))


@given(st.lists(int32))
def test_token_ids_survive_four_bytes_each_whatever_the_byte_order(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert len(packed) == 4 * len(token_ids)
    assert unpack_tokens(packed) == token_ids
    host = array.array("i", token_ids)
    if sys.byteorder == "big":
        host.byteswap()
    assert packed == host.tobytes()


def test_token_ids_are_little_endian_on_the_wire() -> None:
    assert pack_tokens([1, -1]) == b"\x01\x00\x00\x00\xff\xff\xff\xff"


@pytest.mark.parametrize("length", [1, 2, 3, 5, 4001])
def test_a_torn_token_id_is_refused(length: int) -> None:
    for read in (unpack_tokens, num_tokens):
        with pytest.raises(MalformedMessage, match="whole int32"):
            read(b"\0" * length)
