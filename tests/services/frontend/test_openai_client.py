"""The openai package, unmodified, against a real server."""

from typing import Any

import openai as package
import pytest
from openai import AsyncOpenAI

from components.errors import DecodeLost
from components.text.tokenizer import TextModel
from components.wire.sampling import SamplingParams
from tests.services.frontend.fake_mesh import CONTEXT, MODEL, FakeMesh

pytestmark = pytest.mark.anyio
ANSWER = "The capital of France is Paris."


async def test_a_chat_is_answered(openai: AsyncOpenAI, mesh: FakeMesh, text: TextModel) -> None:
    answer = await openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hello"}])
    prompt = mesh.prompts[0]
    assert text.decode(prompt.token_ids) == "user\nHello\nassistant\n"
    assert prompt.sampling == SamplingParams(max_tokens=CONTEXT - len(prompt.token_ids), seed=prompt.sampling.seed)
    assert prompt.cache_salt == ""
    assert 0 <= prompt.sampling.seed < 2**63
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == MODEL
    assert answer.system_fingerprint is None
    assert answer.usage is not None
    generated = len(await text.encode_text(ANSWER))
    assert answer.usage.prompt_tokens == len(prompt.token_ids)
    assert answer.usage.completion_tokens == generated
    assert answer.usage.total_tokens == len(prompt.token_ids) + generated
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert mesh.cancelled == 0


async def test_a_chat_is_streamed(openai: AsyncOpenAI, mesh: FakeMesh) -> None:
    stream = await openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == mesh.deltas
    assert {c.id for c in chunks} == {f"chatcmpl-{mesh.prompts[0].request_id}"}
    assert mesh.cancelled == 0


async def test_parameters_reach_the_mesh(openai: AsyncOpenAI, mesh: FakeMesh) -> None:
    answer = await openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}],
        max_completion_tokens=3,
        temperature=0,
        top_p=0.5,
        seed=-7,
        user="u",
        presence_penalty=-2,
        frequency_penalty=0.5,
        logit_bias={"7": -100, "9": 2.5},
        extra_body={
            "ignore_eos": True,
            "stop_token_ids": [4, 5],
            "cache_salt": "tenant",
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.25,
            "min_tokens": 2,
        },
    )
    prompt = mesh.prompts[0]
    assert prompt.cache_salt == "tenant"
    assert prompt.sampling == SamplingParams(
        max_tokens=3,
        temperature=0.0,
        top_p=0.5,
        top_k=40,
        min_p=0.05,
        presence_penalty=-2.0,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        logit_bias=((7, -100.0), (9, 2.5)),
        min_tokens=2,
        seed=-7,
        ignore_eos=True,
        stop_token_ids=(4, 5),
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_a_completion_has_16_tokens_unless_it_asks_for_more(openai: AsyncOpenAI, mesh: FakeMesh) -> None:
    mesh.answer = "one two three four five " * 20
    answer = await openai.completions.create(model=MODEL, prompt="a")
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


async def test_two_requests_without_seed_draw_differently(openai: AsyncOpenAI, mesh: FakeMesh) -> None:
    for _ in range(2):
        await openai.completions.create(model=MODEL, prompt="a")
    assert mesh.prompts[0].sampling.seed != mesh.prompts[1].sampling.seed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_delta", [1, 3, 100])
async def test_a_stop_string_across_tokens_ends_the_answer_and_the_work(
    openai: AsyncOpenAI, mesh: FakeMesh, stream: bool, tokens_per_delta: int
) -> None:
    mesh.tokens_per_delta = tokens_per_delta
    mesh.answer = "one two three four five " * 4
    request: dict[str, Any] = {"model": MODEL, "prompt": "a", "stop": ["e t", "never"]}
    if stream:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [c async for c in await openai.completions.create(**request)]
        shown = "".join(c.choices[0].text for c in chunks if c.choices)
        finish, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
    else:
        answer = await openai.completions.create(**request)
        shown, finish, usage = answer.choices[0].text, answer.choices[0].finish_reason, answer.usage
    assert (shown, finish) == ("on", "stop")
    assert usage.completion_tokens == len(mesh.text._encode("one t", add_special_tokens=False))
    await mesh.until_idle()
    assert mesh.cancelled == (tokens_per_delta < 100)  # with all tokens in one delta there was nothing left to do


@pytest.mark.parametrize("tokens_per_delta", [1, 100])
async def test_a_stop_string_ends_no_answer_before_its_least_tokens(
    openai: AsyncOpenAI, mesh: FakeMesh, tokens_per_delta: int
) -> None:
    mesh.tokens_per_delta = tokens_per_delta
    mesh.answer = "one two three two four two five"
    least = len(mesh.text._encode("one two three", add_special_tokens=False))
    for least_tokens, shown in ((0, "one "), (least, "one two three "), (least + 99, mesh.answer)):
        answer = await openai.completions.create(
            model=MODEL, prompt="a", stop="two", extra_body={"min_tokens": least_tokens, "max_tokens": least + 99}
        )
        assert answer.choices[0].text == shown


@pytest.mark.parametrize("answer", ["😀 👩‍👩‍👧‍👦 東京 नमस्ते", 'line\u2028separator\x85\r\n\ttab "quoted" \\ \x7f'])
async def test_any_unicode_arrives_whole(openai: AsyncOpenAI, mesh: FakeMesh, answer: str) -> None:
    mesh.answer = answer
    stream = await openai.completions.create(model=MODEL, prompt="a", stream=True, max_tokens=100)
    pieces = [chunk.choices[0].text async for chunk in stream]
    assert "".join(pieces) == answer
    assert not any("\ufffd" in piece for piece in pieces)
    whole = await openai.completions.create(model=MODEL, prompt="a", max_tokens=100)
    assert whole.choices[0].text == answer


async def test_an_answer_cut_within_a_character_shows_only_whole_ones(openai: AsyncOpenAI, mesh: FakeMesh) -> None:
    mesh.answer = "a👩"
    answer = await openai.completions.create(model=MODEL, prompt="a", max_tokens=2)
    assert answer.choices[0].text == "a"


@pytest.mark.parametrize("prompt", [["a", "b", "c"], [[70], [71], [72, 73]]])
async def test_several_prompts_give_several_choices(openai: AsyncOpenAI, mesh: FakeMesh, prompt: list[str]) -> None:
    mesh.pace_s = 0.001
    answer = await openai.completions.create(model=MODEL, prompt=prompt)
    assert [(c.index, c.text) for c in answer.choices] == [(i, ANSWER) for i in range(3)]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == mesh.deltas
    assert answer.usage.prompt_tokens == sum(len(p.token_ids) for p in mesh.prompts)
    assert len({p.request_id for p in mesh.prompts}) == 3
    shown = ["", "", ""]
    async for chunk in await openai.completions.create(model=MODEL, prompt=prompt, stream=True):
        shown[chunk.choices[0].index] += chunk.choices[0].text
    assert shown == [ANSWER] * 3


async def test_one_of_several_prompts_failing_cancels_the_others(openai: AsyncOpenAI, mesh: FakeMesh) -> None:
    mesh.pace_s, mesh.fail_at, mesh.failure = 0.001, 3, DecodeLost("gone")
    with pytest.raises(package.InternalServerError):
        await openai.completions.create(model=MODEL, prompt=["a", "b"])
    await mesh.until_idle()


@pytest.mark.parametrize("prompt", ["Hello", [70, 71]])
async def test_echo_shows_the_prompt_first(openai: AsyncOpenAI, text: TextModel, prompt: str) -> None:
    lead = prompt if isinstance(prompt, str) else text.decode(prompt)
    answer = await openai.completions.create(model=MODEL, prompt=prompt, echo=True, stop="l")
    assert answer.choices[0].text == f"{lead}The capita"


async def test_errors_arrive_as_the_clients_own_classes(openai: AsyncOpenAI, mesh: FakeMesh) -> None:
    with pytest.raises(package.NotFoundError) as unknown:
        await openai.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "a"}])
    assert unknown.value.code == "model_not_found"
    assert f"There is '{MODEL}'." in unknown.value.message
    with pytest.raises(package.BadRequestError) as bad:
        await openai.completions.create(model=MODEL, prompt="a", temperature=9)
    assert bad.value.param == "temperature"
    mesh.fail_at, mesh.failure = 2, DecodeLost("gone")
    with pytest.raises(package.APIError, match="lost"):
        async for _ in await openai.completions.create(model=MODEL, prompt="a", stream=True):
            pass


async def test_models_are_listed_and_found(openai: AsyncOpenAI) -> None:
    assert [model.id async for model in openai.models.list()] == [MODEL]
    model = await openai.models.retrieve(MODEL)
    assert (model.id, model.created, model.owned_by) == (MODEL, 1_700_000_000, "kvmesh")


async def test_a_model_name_with_a_slash_is_found(openai: AsyncOpenAI, mesh: FakeMesh) -> None:
    mesh.served[0] = type(mesh.served[0])("org/tiny", CONTEXT, 1)
    assert (await openai.models.retrieve("org/tiny")).id == "org/tiny"
