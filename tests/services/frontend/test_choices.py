"""Several choices and log-probabilities, as the openai package reads them."""

from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from tokenizers.processors import TemplateProcessing

from components.text.tokenizer import TextModel
from components.wire.sampling import SamplingParams
from services.frontend.choice import shown_prompt
from services.frontend.ports import Prompt
from tests.components.text.tiny_model import TEMPLATE, tiny_tokenizer
from tests.services.frontend.fake_mesh import MODEL, FakeMesh, logprobs_of

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "Hello"}]
ANSWERS = ["Paris, of course.", "It is 東京.", "one two"]


async def test_a_chat_has_n_choices_of_one_prompt(openai: AsyncOpenAI, mesh: FakeMesh) -> None:
    mesh.answers = ANSWERS
    answer = await openai.chat.completions.create(model=MODEL, messages=HELLO, n=3)
    assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
        (i, text, "stop") for i, text in enumerate(ANSWERS)
    ]
    [prompt] = mesh.prompts
    assert prompt.sampling.n == 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt.token_ids), "once, not for each choice"
    assert answer.usage.completion_tokens == mesh.deltas
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_n_choices_are_streamed_side_by_side(openai: AsyncOpenAI, mesh: FakeMesh) -> None:
    mesh.answers, mesh.pace_s = ANSWERS, 0.001
    options = {"include_usage": True}
    stream = await openai.chat.completions.create(model=MODEL, messages=HELLO, n=3, stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    for i, text in enumerate(ANSWERS):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == i]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == text
        assert [c.finish_reason for c in mine if c.finish_reason] == ["stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == len(mesh.prompts[0].token_ids)
    order = [c.choices[0].index for c in chunks if c.choices]
    assert order.index(2) < len(order) - order[::-1].index(0), "not one after the other"


async def test_prompts_times_n_choices_are_in_order(openai: AsyncOpenAI, mesh: FakeMesh) -> None:
    mesh.answers = ANSWERS[:2]
    answer = await openai.completions.create(model=MODEL, prompt=["a", "bb"], n=2, echo=True)
    assert [(c.index, c.text) for c in answer.choices] == [
        (prompt * 2 + branch, ["a", "bb"][prompt] + ANSWERS[branch]) for prompt in range(2) for branch in range(2)
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(p.token_ids) for p in mesh.prompts)


@pytest.mark.parametrize("fields", [{}, {"skip_special_tokens": False}])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_offsets_of_an_echo_with_special_tokens_are_places_in_its_text(
    http: httpx.AsyncClient, text: TextModel, fields: dict[str, Any], as_ids: bool
) -> None:
    """A special token in the client's text counted no characters; one of token ids was never shown."""
    given = "<|im_start|>ab é"
    ids = await text.encode_text(given)
    body = {"model": MODEL, "prompt": ids if as_ids else given, "echo": True, "logprobs": 1, "max_tokens": 2, **fields}
    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert choice["text"].startswith("ab é" if as_ids and not fields else given)
    told = choice["logprobs"]
    ends = [*told["text_offset"][1:], len(choice["text"])]
    shown = [choice["text"][at:end] for at, end in zip(told["text_offset"], ends, strict=True)]
    assert shown[0] == ("" if as_ids and not fields else "<|im_start|>")
    assert shown[1] == "a"
    assert "".join(shown) == choice["text"]


async def test_the_tokenizers_own_token_before_an_echo_has_no_text() -> None:
    tokenizer = tiny_tokenizer()
    first = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", first)])
    text = TextModel(tokenizer, TEMPLATE)
    ids = await text.encode_text("ab")
    assert ids[0] == first
    prompt = Prompt("r", MODEL, ids, SamplingParams(max_tokens=1), "", 0, echo="ab")
    shown = shown_prompt(text, prompt, [logprobs_of(token_id, 1) for token_id in ids[1:]], 1)
    assert [token.offset for token in shown] == [0, 0, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_one_choice_and_the_others_go_on(
    openai: AsyncOpenAI, mesh: FakeMesh, stream: bool
) -> None:
    mesh.answers, mesh.pace_s = ["one STOP two three four", "five six seven"], 0.001
    request = {"model": MODEL, "messages": HELLO, "n": 2, "stop": "STOP"}
    shown, ends = ["", ""], ["", ""]
    if stream:
        async for chunk in await openai.chat.completions.create(**request, stream=True):
            choice = chunk.choices[0]
            shown[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason or ""
    else:
        choices = (await openai.chat.completions.create(**request)).choices
        shown, ends = [c.message.content for c in choices], [c.finish_reason for c in choices]
    assert shown == ["one ", "five six seven"]
    assert ends == ["stop", "stop"]
    await mesh.until_idle()
    assert mesh.cancelled == 1


@pytest.mark.parametrize("tokens_per_delta", [1, 3])
async def test_a_chats_logprobs_are_those_of_its_tokens(
    openai: AsyncOpenAI, mesh: FakeMesh, text: TextModel, tokens_per_delta: int
) -> None:
    mesh.answers, mesh.tokens_per_delta = ANSWERS, tokens_per_delta
    request = {"model": MODEL, "messages": HELLO, "n": 3, "logprobs": True, "top_logprobs": 2}
    answer = await openai.chat.completions.create(**request)
    whole = [choice.logprobs.content for choice in answer.choices]
    for told, content in zip(whole, ANSWERS, strict=True):
        assert b"".join(bytes(token.bytes) for token in told).decode() == content
        for token, token_id in zip(told, text._encode(content, add_special_tokens=False), strict=True):
            expected = logprobs_of(token_id, 2)
            assert token.logprob == expected.logprob
            assert [(bytes(top.bytes), top.logprob) for top in token.top_logprobs] == [
                (text.token_bytes.of(other), logprob) for other, logprob in expected.top
            ]
    streamed: list[list[object]] = [[], [], []]
    async for chunk in await openai.chat.completions.create(**request, stream=True):
        if (logprobs := chunk.choices[0].logprobs) is not None:
            streamed[chunk.choices[0].index] += logprobs.content
    assert streamed == whole


async def test_without_the_option_no_log_probabilities_are_sent(openai: AsyncOpenAI, mesh: FakeMesh) -> None:
    answer = await openai.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].logprobs is None
    assert mesh.prompts[0].sampling.logprobs is None


async def test_a_chat_may_ask_for_the_tokens_alone(openai: AsyncOpenAI) -> None:
    answer = await openai.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True)
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content
    assert all(token.top_logprobs == [] for token in told.content)


@pytest.mark.parametrize("prompt", ["Hello, 世界", [70, 71, 72]])
async def test_a_completion_has_log_probabilities_of_the_echoed_prompt_too(
    openai: AsyncOpenAI, mesh: FakeMesh, text: TextModel, prompt: str | list[int]
) -> None:
    mesh.answers = ANSWERS[:2]
    request = {"model": MODEL, "prompt": prompt, "n": 2, "echo": True, "logprobs": 3}
    answer = await openai.completions.create(**request)
    ids = mesh.prompts[0].token_ids
    assert mesh.prompts[0].sampling.prompt_logprobs == 3
    for choice, content in zip(answer.choices, ANSWERS, strict=False):
        own = text._encode(content, add_special_tokens=False)
        told = choice.logprobs
        assert told is not None
        assert told.token_logprobs == [None, *(logprobs_of(i, 0).logprob for i in [*ids[1:], *own])]
        assert told.top_logprobs[0] is None
        assert all(len(top) == 3 for top in told.top_logprobs[1:])
        assert len(told.tokens) == len(told.text_offset) == len(ids) + len(own)
        whole = [(t, o) for t, o in zip(told.tokens, told.text_offset, strict=True) if not t.startswith("bytes:")]
        assert all(choice.text[offset : offset + len(token)] == token for token, offset in whole)
    streamed: list[list[tuple[Any, ...]]] = [[], []]
    async for chunk in await openai.completions.create(**request, stream=True):
        if (logprobs := chunk.choices[0].logprobs) is not None:
            streamed[chunk.choices[0].index] += zip(
                logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset, strict=True
            )
    for choice, found in zip(answer.choices, streamed, strict=True):
        told = choice.logprobs
        assert told is not None
        assert found == list(zip(told.tokens, told.token_logprobs, told.text_offset, strict=True))


@pytest.mark.parametrize("more", [{}, {"stop": "one"}, {"stop_token_ids": [5], "n": 2}])
async def test_a_completion_of_no_tokens_scores_its_prompt(
    openai: AsyncOpenAI, mesh: FakeMesh, more: dict[str, Any]
) -> None:
    """Harnesses score texts so. The mesh generates one token, which the frontend drops."""
    request = {"model": MODEL, "prompt": "Hello, 世界", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = await openai.completions.create(**request, extra_body=more)
    asked = mesh.prompts[0]
    assert asked.sampling.max_tokens == 1
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(asked.token_ids), 0)
    assert len(answer.choices) == more.get("n", 1)
    for choice in answer.choices:
        assert (choice.text, choice.finish_reason) == (request["prompt"], "length")
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [None, *(logprobs_of(i, 0).logprob for i in asked.token_ids[1:])]
    texts = [""] * len(answer.choices)
    async for chunk in await openai.completions.create(**request, stream=True, extra_body=more):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


async def test_a_prompt_s_logprobs_need_no_echo_to_be_asked_for_alone(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": [70, 71, 72], "max_tokens": 0, "prompt_logprobs": 0, "return_token_ids": True}
    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [], "length")
    assert len(choice["prompt_logprobs"]) == 3


async def test_tokens_behind_a_stop_string_are_not_reported(openai: AsyncOpenAI, mesh: FakeMesh) -> None:
    mesh.answer, mesh.tokens_per_delta = "one two three four", 100
    answer = await openai.completions.create(model=MODEL, prompt="a", stop="wo", logprobs=0)
    told = answer.choices[0].logprobs
    assert answer.usage is not None
    assert told is not None
    assert len(told.tokens) == answer.usage.completion_tokens
    assert "".join(told.tokens) == "one two"
    assert all(
        list(top.values()) == [logprob] for top, logprob in zip(told.top_logprobs, told.token_logprobs, strict=True)
    )


async def test_more_of_a_prompt_than_the_mesh_carries_is_refused(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.frontend.prompts.MAX_MESSAGE_BYTES", 1000)
    body = {"model": MODEL, "prompt": "a" * 40, "echo": True, "logprobs": 20}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logprobs"
    assert (await http.post("/v1/completions", json={**body, "logprobs": 0})).status_code == 200


async def test_contradictions_are_refused_in_openais_words(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO, "top_logprobs": 2})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.",
        "type": "invalid_request_error",
        "param": "top_logprobs",
        "code": None,
    }
