"""The sampling part on its way through both workers' messages, and what is not one."""

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from components.errors import MalformedMessage
from components.wire.codec import pack, unpack
from components.wire.generate import GenerateRequest
from components.wire.prefill import PrefillRequest
from components.wire.sampling import Constraint, Sampling, pack_bias, unpack_bias
from engine.ports import SamplingParams
from engine.sampling.wire import sampling_params

INT32 = st.integers(0, 2**31 - 1)
FLOATS = st.floats(-100, 100, width=32)


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    ids, values = pack_bias(draw(st.dictionaries(INT32, FLOATS, max_size=5)))
    return Sampling(
        max_tokens=draw(INT32),
        temperature=draw(FLOATS),
        top_k=draw(st.integers(-1, 100)),
        min_p=draw(FLOATS),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        ignore_eos=draw(st.booleans()),
        logit_bias_ids=ids,
        logit_bias_values=values,
        num_generated=draw(INT32),
        constraint=draw(
            st.none() | st.builds(Constraint, kind=st.sampled_from(["json_schema", "regex", "lark"]), text=st.text())
        ),
    )


def generate(sampling: Sampling) -> GenerateRequest:
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


def prefill(sampling: Sampling) -> PrefillRequest:
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
def test_sampling_arrives_as_it_left(sampling: Sampling) -> None:
    for message in (generate(sampling), prefill(sampling)):
        arrived = unpack(pack(message), type(message))
        assert arrived == message
        assert type(arrived.sampling) is Sampling
        assert type(arrived.sampling.constraint) is type(sampling.constraint)


@settings(deadline=None)
@given(st.dictionaries(INT32, FLOATS))
def test_bias_arrives_as_it_left(bias: dict[int, float]) -> None:
    ids, values = pack_bias(bias)
    assert unpack_bias(Sampling(max_tokens=1, logit_bias_ids=ids, logit_bias_values=values)) == list(bias.items())


def test_every_parameter_of_the_message_reaches_the_engine() -> None:
    ids, values = pack_bias({7: 1.5, 3: -2.0})
    sampling = Sampling(
        max_tokens=9,
        temperature=0.5,
        top_p=0.75,
        top_k=4,
        min_p=0.25,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.25,
        logit_bias_ids=ids,
        logit_bias_values=values,
        min_tokens=2,
        seed=-3,
        ignore_eos=True,
        stop_token_ids=b"\5\0\0\0",
        logprobs=3,
        prompt_logprobs=0,
        n=5,
    )
    assert sampling_params(sampling) == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_p=0.75,
        seed=-3,
        ignore_eos=True,
        stop_token_ids=(5,),
        top_k=4,
        min_p=0.25,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.25,
        logit_bias=((7, 1.5), (3, -2.0)),
        min_tokens=2,
        logprobs=3,
        prompt_logprobs=0,
        n=5,
    )
    neutral = Sampling(max_tokens=9)
    assert sampling_params(neutral) == SamplingParams(9)
    changed = {f.name for f in fields(Sampling) if getattr(sampling, f.name) != getattr(neutral, f.name)}
    assert changed == {f.name for f in fields(Sampling)} - {"max_tokens", "num_generated", "constraint"}, (
        "a field without a test"
    )


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"top_k": 1.5}, "sampling.top_k"),
        ({"temperature": "warm"}, "sampling.temperature"),
        ({"stop_token_ids": [1]}, "sampling.stop_token_ids"),
        ({"max_tokens": None}, "sampling.max_tokens"),
        ({"constraint": {"kind": "yaml", "text": ""}}, "sampling.constraint.kind"),
        ({"constraint": "json"}, "sampling.constraint"),
    ],
)
def test_a_wrong_field_of_a_part_is_named_with_its_path(body: dict[str, Any], named: str) -> None:
    tag, packed = msgpack.unpackb(pack(generate(Sampling(max_tokens=1))))
    packed["sampling"] |= body
    with pytest.raises(MalformedMessage, match=named):
        unpack(msgpack.packb([tag, packed]), GenerateRequest)


@pytest.mark.parametrize("sampling", [None, 7, [], {}, "x"])
def test_what_is_no_part_is_refused_and_the_field_named(sampling: Any) -> None:
    tag, packed = msgpack.unpackb(pack(generate(Sampling(max_tokens=1))))
    packed["sampling"] = sampling
    with pytest.raises(MalformedMessage, match=r"\$\.sampling|missing required field `max_tokens`"):
        unpack(msgpack.packb([tag, packed]), GenerateRequest)


def test_a_newer_peer_may_add_a_field_to_a_part() -> None:
    message = prefill(Sampling(max_tokens=1))
    tag, packed = msgpack.unpackb(pack(message))
    packed["sampling"]["mirostat"] = 2
    assert unpack(msgpack.packb([tag, packed]), PrefillRequest) == message


def test_bytes_that_are_no_numbers_are_refused() -> None:
    whole = Sampling(max_tokens=1)
    for broken in (
        replace(whole, stop_token_ids=b"abc"),
        replace(whole, logit_bias_ids=b"abcd"),
        replace(whole, logit_bias_values=b"abcd"),
        replace(whole, logit_bias_ids=b"ab", logit_bias_values=b"ab"),
    ):
        with pytest.raises(MalformedMessage):
            sampling_params(broken)
