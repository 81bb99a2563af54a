"""Sampling parameters in the messages to both workers."""

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields

from components.errors import MalformedMessage
from components.wire.codec import pack, unpack
from components.wire.generate import GenerateRequest
from components.wire.prefill import PrefillRequest
from components.wire.sampling import Constraint, SamplingParams

INT32 = st.integers(0, 2**31 - 1)
FLOATS = st.floats(-100, 100, width=32)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        max_tokens=draw(INT32),
        temperature=draw(FLOATS),
        top_k=draw(st.integers(-1, 100)),
        min_p=draw(FLOATS),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        ignore_eos=draw(st.booleans()),
        logit_bias=tuple(draw(st.dictionaries(INT32, FLOATS, max_size=5)).items()),
        stop_token_ids=tuple(draw(st.lists(INT32, max_size=3))),
        constraint=draw(
            st.none() | st.builds(Constraint, kind=st.sampled_from(["json_schema", "regex", "lark"]), text=st.text())
        ),
    )


def generate(sampling: SamplingParams) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        epoch="e",
        model="m",
        stream_id=1,
        reply_to="s",
        token_ids=b"\1\0\0\0",
        deadline_unix_ms=5,
        sampling=sampling,
    )


def prefill(sampling: SamplingParams) -> PrefillRequest:
    return PrefillRequest(
        request_id="r",
        epoch="e",
        decode_id="d",
        decode_epoch="f",
        room="a",
        stamp=1,
        token_ids=b"\1\0\0\0",
        deadline_unix_ms=5,
        sampling=sampling,
    )


@settings(deadline=None)
@given(samplings())
def test_sampling_arrives_as_it_left(sampling: SamplingParams) -> None:
    for message in (generate(sampling), prefill(sampling)):
        arrived = unpack(pack(message), type(message))
        assert arrived == message
        assert type(arrived.sampling) is SamplingParams
        assert type(arrived.sampling.constraint) is type(sampling.constraint)


def test_every_parameter_arrives() -> None:
    sampling = SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_p=0.75,
        top_k=4,
        min_p=0.25,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.25,
        logit_bias=((7, 1.5), (3, -2.0)),
        min_tokens=2,
        seed=-3,
        ignore_eos=True,
        stop_token_ids=(5,),
        logprobs=3,
        prompt_logprobs=0,
        n=5,
        constraint=Constraint(kind="regex", text="a+"),
    )
    neutral = SamplingParams(max_tokens=9)
    changed = {f.name for f in fields(SamplingParams) if getattr(sampling, f.name) != getattr(neutral, f.name)}
    assert changed == {f.name for f in fields(SamplingParams)} - {"max_tokens"}, "a field without a test"
    assert unpack(pack(generate(sampling)), GenerateRequest).sampling == sampling
    assert unpack(pack(prefill(sampling)), PrefillRequest).sampling == sampling


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"top_k": 1.5}, "sampling.top_k"),
        ({"temperature": "warm"}, "sampling.temperature"),
        ({"stop_token_ids": ["a"]}, "sampling.stop_token_ids"),
        ({"stop_token_ids": b"\1\0\0\0"}, "sampling.stop_token_ids"),
        ({"logit_bias": [[1]]}, "sampling.logit_bias"),
        ({"max_tokens": None}, "sampling.max_tokens"),
        ({"constraint": {"kind": "yaml", "text": ""}}, "sampling.constraint.kind"),
        ({"constraint": "json"}, "sampling.constraint"),
    ],
)
def test_a_wrong_field_of_a_part_is_named_with_its_path(body: dict[str, Any], named: str) -> None:
    tag, packed = msgpack.unpackb(pack(generate(SamplingParams(max_tokens=1))))
    packed["sampling"] |= body
    with pytest.raises(MalformedMessage, match=named):
        unpack(msgpack.packb([tag, packed]), GenerateRequest)


@pytest.mark.parametrize("sampling", [None, 7, [], {}, "x"])
def test_what_is_no_part_is_refused_and_the_field_named(sampling: Any) -> None:
    tag, packed = msgpack.unpackb(pack(generate(SamplingParams(max_tokens=1))))
    packed["sampling"] = sampling
    with pytest.raises(MalformedMessage, match=r"\$\.sampling|missing required field `max_tokens`"):
        unpack(msgpack.packb([tag, packed]), GenerateRequest)


def test_a_newer_peer_may_add_a_field_to_a_part() -> None:
    message = prefill(SamplingParams(max_tokens=1))
    tag, packed = msgpack.unpackb(pack(message))
    packed["sampling"]["mirostat"] = 2
    assert unpack(msgpack.packb([tag, packed]), PrefillRequest) == message
