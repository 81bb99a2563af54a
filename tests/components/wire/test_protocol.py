"""What releases send each other: each message is understood, or refused by a named error.

`recorded/protocol-1.json` is commit 3bf9314, the last release before records named a protocol. If messages change, the
recording of today's protocol changes too, and what `components/wire/codec.py` lists.
"""

import json
from base64 import b64decode
from typing import Any, Final

import jsonschema
import msgspec
import pytest

from components.errors import MalformedMessage
from components.wire import codec
from components.wire.codec import OLDEST, PROTOCOL, UNNAMED, UnknownMessage, understood, unpack
from components.wire.generate import FRAME_VERSION, GenerateRequest, OtherFrameVersion, TokenFrame, unpack_frame
from components.wire.instances import InstanceRecord, load_record
from components.wire.kv_events import KvEventBatch, unpack_batch
from tests.components.wire.recording import RECORDED, message_of, recording


def recorded(protocol: int) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RECORDED / f"protocol-{protocol}.json").read_text())
    return loaded


RELEASE: Final = recorded(UNNAMED)
PLAIN: Final = ("frame", "kv-events", "record")  # no [tag, fields] pairs
TAGS: Final = {tag: cls for cls, tag in codec._tags.items()}


def test_messages_are_those_that_were_recorded_for_this_protocol() -> None:
    """If a message has changed, record it again. If an older process would not understand it, raise PROTOCOL too.
    python -m tests.components.wire.recording tests/components/wire/recorded/protocol-<PROTOCOL>.json
    """
    assert recording() == recorded(PROTOCOL)


@pytest.mark.parametrize("tag", sorted(set(RELEASE["bytes"]) - {*PLAIN}))
def test_a_message_of_the_last_release_is_understood_or_unknown_by_its_tag(tag: str) -> None:
    data = b64decode(RELEASE["bytes"][tag])
    if tag in TAGS:
        assert isinstance(unpack(data, TAGS[tag]), TAGS[tag])
    else:
        with pytest.raises(UnknownMessage, match=tag):
            unpack(data, *TAGS.values())


def test_a_token_frame_of_the_last_release_is_read_or_names_the_instance_whose_streams_end() -> None:
    data = b64decode(RELEASE["bytes"]["frame"])
    if RELEASE["versions"]["frame"] == FRAME_VERSION:
        assert isinstance(unpack_frame(data), TokenFrame)
    else:
        with pytest.raises(OtherFrameVersion) as raised:
            unpack_frame(data)
        assert raised.value.instance_id == "i"


def test_the_sender_of_a_request_reads_the_frames_that_answer_it() -> None:
    """FRAME_VERSION changed twice without requests: streams of other releases hung until their deadline."""
    tag = codec._tags[GenerateRequest]
    assert (tag in RELEASE["schemas"]) <= (RELEASE["versions"]["frame"] == FRAME_VERSION)
    before = [recorded(protocol) for protocol in range(UNNAMED, PROTOCOL)]
    assert all(tag not in r["schemas"] for r in before if r["versions"]["frame"] != FRAME_VERSION)


def test_kv_events_of_the_last_release_are_read_or_refused() -> None:
    data = b64decode(RELEASE["bytes"]["kv-events"])
    try:
        assert isinstance(unpack_batch(data), KvEventBatch)
    except MalformedMessage as exc:
        assert "version" in exc.message  # noqa: PT017 - either is right


def test_a_record_of_the_last_release_is_read_and_its_instance_not_paired_with_ours() -> None:
    record = load_record(b64decode(RELEASE["bytes"]["record"]))
    assert (record.protocol, record.oldest_protocol) == (UNNAMED, UNNAMED)
    assert record.is_understood is understood(UNNAMED, UNNAMED) is (OLDEST <= UNNAMED)


@pytest.mark.parametrize("tag", sorted({*TAGS, "record"}))
def test_a_message_of_today_is_understood_by_the_last_release_or_unknown_to_it_by_its_tag(tag: str) -> None:
    """A release that reports an unknown tag as MalformedMessage is older than `OLDEST`."""
    if tag not in RELEASE["schemas"]:
        assert OLDEST > UNNAMED, "the last release would be asked what it does not understand"
        return
    cls = InstanceRecord if tag == "record" else TAGS[tag]
    for message in (message_of(cls), _least(message_of(cls))):
        sent = json.loads(msgspec.json.encode(message))
        jsonschema.validate(sent, RELEASE["schemas"][tag])


def _least(message: Any) -> Any:
    """Return the message with the default of each optional field, which is not sent."""
    required = {field.name for field in msgspec.structs.fields(type(message)) if field.required}
    return type(message)(**{name: getattr(message, name) for name in required})


@pytest.mark.parametrize(
    ("protocol", "oldest", "works"),
    [
        (PROTOCOL, OLDEST, True),
        (PROTOCOL + 1, PROTOCOL, True),
        (PROTOCOL + 1, PROTOCOL + 1, False),
        (OLDEST - 1, OLDEST - 1, False),
    ],
)
def test_two_processes_work_together_if_each_is_new_enough_for_the_other(
    protocol: int, oldest: int, works: bool
) -> None:
    assert understood(protocol, oldest) is works
