"""Log-probabilities in the two shapes that OpenAI gives them."""

import json
import math

import pytest

from components.errors import Rejected
from components.openai.chat import ChatRequest
from components.openai.completions import CompletionRequest
from components.openai.events import Events
from components.openai.fields import parse_body
from components.openai.logprobs import ChatLogprobs, CompletionLogprobs, ShownToken

PARIS = ShownToken(b" Paris", -0.25, [(b" Paris", -0.25), (b" Lyon", -2.5)], 9)
HALF = ShownToken(b"\xf0\x9f", -1.5, [(b"\xf0\x9f", -1.5)], 15)


def test_a_chat_lists_its_tokens() -> None:
    assert ChatLogprobs.of([PARIS, HALF]).model_dump() == {
        "content": [
            {
                "token": " Paris",
                "logprob": -0.25,
                "bytes": [32, 80, 97, 114, 105, 115],
                "top_logprobs": [
                    {"token": " Paris", "logprob": -0.25, "bytes": [32, 80, 97, 114, 105, 115]},
                    {"token": " Lyon", "logprob": -2.5, "bytes": [32, 76, 121, 111, 110]},
                ],
            },
            {
                "token": "\\xf0\\x9f",
                "logprob": -1.5,
                "bytes": [240, 159],
                "top_logprobs": [{"token": "\\xf0\\x9f", "logprob": -1.5, "bytes": [240, 159]}],
            },
        ],
        "refusal": None,
    }


def test_a_completion_has_parallel_lists() -> None:
    drawn = ShownToken(b" Nice", -7.0, [(b" Paris", -0.25)], 17)
    first = ShownToken(b"The", None, [], 0)
    assert CompletionLogprobs.of([first, PARIS, HALF, drawn]).model_dump() == {
        "tokens": ["The", " Paris", "bytes:\\xf0\\x9f", " Nice"],
        "token_logprobs": [None, -0.25, -1.5, -7.0],
        "top_logprobs": [
            None,
            {" Paris": -0.25, " Lyon": -2.5},
            {"bytes:\\xf0\\x9f": -1.5},
            {" Paris": -0.25, " Nice": -7.0},
        ],
        "text_offset": [0, 9, 15, 17],
    }


def test_what_is_impossible_is_still_a_number() -> None:
    never = ShownToken(b"a", -math.inf, [(b"b", -math.inf)], 0)
    chat = json.loads(ChatLogprobs.of([never]).model_dump_json())["content"][0]
    assert (chat["logprob"], chat["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
    assert json.loads(CompletionLogprobs.of([never]).model_dump_json())["top_logprobs"] == [
        {"b": -9999.0, "a": -9999.0}
    ]


def test_a_chunk_carries_them_and_stays_one_line() -> None:
    line_end = ShownToken("\u2028".encode(), -1.0, [], 0)
    event = Events.chat("c", 1, "m", usage_follows=False).text(2, "x", ChatLogprobs.of([line_end]))
    assert len(event.decode().splitlines()) == 2
    choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
    assert choice["delta"] == {"content": "x"}
    assert choice["logprobs"]["content"][0]["token"] == "\u2028"


CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
TEXT = {"model": "m", "prompt": "a"}


@pytest.mark.parametrize(
    ("kind", "body", "alternatives", "of_prompt"),
    [
        (ChatRequest, CHAT, None, None),
        (ChatRequest, {**CHAT, "logprobs": False}, None, None),
        (ChatRequest, {**CHAT, "logprobs": True}, 0, None),
        (ChatRequest, {**CHAT, "logprobs": True, "top_logprobs": 20}, 20, None),
        (CompletionRequest, TEXT, None, None),
        (CompletionRequest, {**TEXT, "echo": True}, None, None),
        (CompletionRequest, {**TEXT, "logprobs": 0}, 0, None),
        (CompletionRequest, {**TEXT, "logprobs": 20, "echo": True}, 20, 20),
    ],
)
def test_what_a_request_asks_for(
    kind: type[ChatRequest] | type[CompletionRequest], body: dict[str, object], alternatives: int, of_prompt: int
) -> None:
    request = parse_body(kind, json.dumps(body).encode())
    assert (request.alternatives, request.prompt_alternatives) == (alternatives, of_prompt)


@pytest.mark.parametrize(
    ("kind", "body", "param", "message"),
    [
        (ChatRequest, {**CHAT, "top_logprobs": 2}, "top_logprobs", "only allowed when 'logprobs' is enabled"),
        (ChatRequest, {**CHAT, "logprobs": False, "top_logprobs": 0}, "top_logprobs", "only allowed when"),
        (ChatRequest, {**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        (ChatRequest, {**CHAT, "logprobs": 3}, "logprobs", "valid boolean"),
        (CompletionRequest, {**TEXT, "logprobs": 21}, "logprobs", "less than or equal to 20"),
        (CompletionRequest, {**TEXT, "logprobs": -1}, "logprobs", "greater than or equal to 0"),
        (CompletionRequest, {**TEXT, "logprobs": True}, "logprobs", "valid integer"),
        (CompletionRequest, {**TEXT, "n": 0}, "n", "greater than or equal to 1"),
        (CompletionRequest, {**TEXT, "n": 129}, "n", "less than or equal to 128"),
        (CompletionRequest, {**TEXT, "n": 3, "best_of": 2}, "best_of", "send the value of 'n'"),
        (CompletionRequest, {**TEXT, "best_of": 2}, "best_of", "send the value of 'n'"),
    ],
)
def test_what_contradicts_itself_or_is_out_of_bounds_is_refused(
    kind: type[ChatRequest] | type[CompletionRequest], body: dict[str, object], param: str, message: str
) -> None:
    with pytest.raises(Rejected, match=message) as refused:
        parse_body(kind, json.dumps(body).encode())
    assert refused.value.fields["param"] == param
