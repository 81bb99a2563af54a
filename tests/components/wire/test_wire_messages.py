import contextlib
import importlib
import pickle
import pkgutil
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, fields

import components.wire
from components.errors import MalformedMessage
from components.wire import codec
from components.wire.codec import MAX_MESSAGE_BYTES, Struct, message, pack, unpack
from components.wire.embed import EmbeddingModel
from components.wire.generate import CancelStreams
from components.wire.heartbeat import Heartbeat
from components.wire.inspection import Candidate
from components.wire.instances import InstanceRecord, KvEndpoint, RankEndpoint, dump_record, load_record
from components.wire.layout import KvLayout
from components.wire.load import LoadSample
from components.wire.plans import RolePlan
from components.wire.prefill import PagesOffered, RoomOk
from components.wire.sampling import Constraint, SamplingParams
from components.wire.status import Connection, LinkStatus, PageStatus, RoomStatus, TransportStatus

for module in pkgutil.iter_modules(components.wire.__path__):
    importlib.import_module(f"components.wire.{module.name}")

NESTED = (
    *(
        Candidate,
        Connection,
        Constraint,
        EmbeddingModel,
        KvEndpoint,
        RankEndpoint,
        KvLayout,
        LinkStatus,
        LoadSample,
        PageStatus,
        RolePlan,
        RoomStatus,
        TransportStatus,
    ),
    SamplingParams,
)
MESSAGES = sorted(codec._tags, key=lambda cls: cls.__name__)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
    NoneType: st.none(),
}


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for a field's type. An unknown annotation fails the test."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is list:
        return st.lists(values(args[0]), max_size=5)
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple) if args[1] is ... else st.tuples(*map(values, args))
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if origin in (Union, UnionType):
        return st.one_of(*map(values, args))
    if origin is Literal:
        return st.sampled_from(args)
    if annotation in NESTED:
        return instances(annotation)
    return PLAIN[annotation]


def instances(cls: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.builds(cls, **{f.name: values(hints[f.name]) for f in fields(cls)})


def test_a_subject_that_nats_could_not_carry_is_refused() -> None:
    """The first frame of the answer ended decode's connection, and so decode."""
    fields = {"stream_ids": [1]}
    assert unpack(codec._heads[CancelStreams] + msgpack.packb({**fields, "reply_to": "r" * 500}), CancelStreams)
    with pytest.raises(MalformedMessage, match="length <= 500"):
        unpack(codec._heads[CancelStreams] + msgpack.packb({**fields, "reply_to": "r" * 501}), CancelStreams)
    stored = dump_record(
        InstanceRecord(instance_id="i", epoch="1", role="decode", host="h", pid=1, started_unix_ms=1, subject="s" * 501)
    )
    with pytest.raises(MalformedMessage, match="length <= 500"):
        load_record(stored)


def test_every_conversation_is_registered() -> None:
    assert {cls.__module__.rpartition(".")[2] for cls in MESSAGES} >= {
        "generate",
        "heartbeat",
        "prefill",
        "refused",
    }
    assert all(tag.rpartition(".v")[2].isdigit() for tag in codec._tags.values())


@pytest.mark.parametrize("cls", MESSAGES)
def test_a_message_comes_out_as_it_went_in(cls: type) -> None:
    @given(instances(cls))
    def round_trip(value: object) -> None:
        assert unpack(pack(value), cls) == value

    round_trip()


@given(instances(InstanceRecord))
def test_an_instance_record_comes_out_of_etcd_as_it_went_in(record: InstanceRecord) -> None:
    assert load_record(dump_record(record)) == record


@given(st.binary() | st.binary().map(lambda b: b"\x92" + b))
def test_garbage_is_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack(data, *MESSAGES)
    with pytest.raises(MalformedMessage):
        load_record(data)


@given(st.sampled_from(MESSAGES).flatmap(instances), st.data())
def test_a_damaged_message_is_refused_or_still_a_message(value: object, data: st.DataObject) -> None:
    packed = bytearray(pack(value))
    at = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(MalformedMessage):
        unpack(bytes(packed[:at]), *MESSAGES)
    with pytest.raises(MalformedMessage):
        unpack(bytes(packed) + b"\x00", *MESSAGES)
    packed[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(MalformedMessage):
        assert isinstance(unpack(bytes(packed), *MESSAGES), tuple(MESSAGES))


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)))
def test_pickles_are_refused(value: object) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(MalformedMessage):
            unpack(pickle.dumps(value, protocol), *MESSAGES)


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\x7f\xff\xff\xff" * 200,  # arrays that claim two billion items
        b"\xdd\x00\x0f\xff\xff" * 400,  # within the limit, nested
        b"\xdf\x7f\xff\xff\xff",  # a map that does
        b"\xc6\xff\xff\xff\xff",  # bytes that do
        b"\x91" * 100_000 + b"\xc0",  # deeper than any stack
        b"\xd4\x01\x00",  # an extension type
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\x81\x01\x02",  # a map whose key is no string
        msgpack.packb([1, {}]),
        msgpack.packb(["room-ok.v1", []]),
        msgpack.packb(["room-ok.v1", {}, 0]),
    ],
)
def test_a_frame_cannot_claim_more_than_it_is(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack(data, RoomOk)


def test_an_oversized_message_is_refused_before_it_is_read() -> None:
    with pytest.raises(MalformedMessage, match="exceed the limit"):
        unpack(b"\x00" * (MAX_MESSAGE_BYTES + 1), RoomOk)


def test_an_unknown_tag_is_named() -> None:
    with pytest.raises(MalformedMessage, match=r"unknown message tag 'room-ok\.v2'"):
        unpack(msgpack.packb(["room-ok.v2", {"room": "a"}]), RoomOk)


def test_a_message_of_another_conversation_is_refused() -> None:
    with pytest.raises(MalformedMessage, match=r"'room-ok\.v1' where heartbeat\.v1 belongs"):
        unpack(pack(RoomOk(room="a")), Heartbeat)


def test_an_unknown_field_is_ignored_so_that_a_newer_peer_may_add_one() -> None:
    assert unpack(msgpack.packb(["room-ok.v1", {"room": "a", "new": [1]}]), RoomOk) == RoomOk(room="a")
    assert load_record(b'{"new": 1,' + dump_record(RECORD)[1:]) == RECORD


@pytest.mark.parametrize("pages", ["1", [1.0], ["1"], [True], None, {"a": 1}])
def test_a_field_of_the_wrong_type_is_named(pages: object) -> None:
    offer = PagesOffered(
        request_id="r",
        room="r",
        bootstrap_id="b",
        decode_id="d",
        decode_epoch="e",
        pages=[1],
        num_cached_pages=0,
        aux_slot=0,
        deadline_unix_ms=1,
    )
    body = {**asdict(offer), "pages": pages}
    with pytest.raises(MalformedMessage, match=r"'room-pages\.v2': .*\$\.pages"):
        unpack(msgpack.packb(["room-pages.v2", body]), PagesOffered)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(MalformedMessage, match="missing required field `room`"):
        unpack(msgpack.packb(["room-ok.v1", {}]), RoomOk)


def test_a_tag_belongs_to_one_class() -> None:
    with pytest.raises(ValueError, match="already used by RoomOk"):

        @message("room-ok.v1")
        class Another(Struct):
            room: str


RECORD = InstanceRecord(
    instance_id="i", epoch="e", role="decode", host="h", pid=1, started_unix_ms=0, subject="kvmesh.decode.i"
)
