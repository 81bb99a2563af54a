import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from components.openai.events import Events, quote
from components.openai.fields import Usage

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def parsed(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    value: dict[str, Any] = json.loads(event[6:])
    return value


@settings(deadline=None)  # the machine may be busy
@given(TEXT)
def test_any_text_survives_and_breaks_no_line(text: str) -> None:
    assert json.loads(quote(text)) == text
    assert len(quote(text).decode().splitlines()) == 1


@settings(deadline=None)  # the machine may be busy
@given(TEXT, st.integers(0, 127), st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_a_chat_chunk_is_what_a_json_library_would_have_made(text: str, index: int, model: str) -> None:
    events = Events.chat("chatcmpl-1", 7, model, usage_follows=False)
    assert parsed(events.text(index, text)) == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": model,
        "system_fingerprint": None,
        "choices": [{"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}],
    }


def test_a_chat_opens_with_the_role_and_ends_with_an_empty_delta() -> None:
    events = Events.chat("chatcmpl-1", 7, "m", usage_follows=False)
    assert parsed(events.open(0))["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    finish = parsed(events.finish(0, "length"))["choices"][0]
    assert (finish["delta"], finish["finish_reason"]) == ({}, "length")


def test_a_completion_has_text_and_no_opening() -> None:
    events = Events.completion("cmpl-1", 7, "m", usage_follows=False)
    assert events.open(0) == b""
    assert parsed(events.text(2, "a"))["choices"] == [
        {"index": 2, "text": "a", "logprobs": None, "finish_reason": None}
    ]
    assert parsed(events.finish(2, "stop"))["choices"] == [
        {"index": 2, "text": "", "logprobs": None, "finish_reason": "stop"}
    ]


def test_chunks_announce_the_usage_that_the_last_one_holds() -> None:
    events = Events.chat("chatcmpl-1", 7, "m", usage_follows=True)
    assert parsed(events.text(0, "a"))["usage"] is None
    last = parsed(events.usage(Usage.of(3, 2, 1, 1)))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
