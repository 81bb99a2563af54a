"""What users of vLLM know beside the text: token ids, the prompt's log-probabilities, usage in each chunk; how it is shown."""

import json
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from components.openai.chat import ChatRequest
from components.openai.events import Events
from components.output.calls import CallDelta
from components.text.tokenizer import TextModel
from services.frontend import generation, reply
from services.frontend.app import create_app
from services.frontend.choice import TextDelta
from services.frontend.config import FrontendSettings
from services.frontend.dialects.chat import DetailedStream
from services.frontend.generation import Generation
from services.frontend.metrics import GapCounts
from services.frontend.ports import ServedModel
from tests.components.text.tiny_model import TEMPLATE, tiny_tokenizer
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.services.frontend.thinking_model import TWO, thinking_model

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Hello"}


async def chunks_of(http: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = await http.post(path, json={**body, "stream": True})
    assert answer.is_success, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def ids(text: TextModel, answer: str) -> list[int]:
    return text._encode(answer, add_special_tokens=False)


async def test_token_ids_of_an_answer_and_of_its_prompt(
    http: httpx.AsyncClient, mesh: FakeMesh, text: TextModel
) -> None:
    mesh.answers = ["Paris.", "Hello."]
    chat = (await http.post(CHAT, json={**HELLO, "n": 2, "return_token_ids": True})).json()
    assert [c["token_ids"] for c in chat["choices"]] == [ids(text, a) for a in mesh.answers]
    assert chat["prompt_token_ids"] == mesh.prompts[0].token_ids
    completion = (
        await http.post(COMPLETION, json={**TEXT, "prompt": ["Hello", "Paris"], "return_token_ids": True})
    ).json()
    assert [c["prompt_token_ids"] for c in completion["choices"]] == [p.token_ids for p in mesh.prompts[1:]]
    assert completion["choices"][0]["token_ids"] == ids(text, "Paris.")
    for path, body in ((CHAT, HELLO), (COMPLETION, TEXT)):
        plain = (await http.post(path, json=body)).text
        assert "token_ids" not in plain
        assert "prompt_logprobs" not in plain


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (COMPLETION, TEXT)])
async def test_token_ids_in_a_stream(
    http: httpx.AsyncClient, mesh: FakeMesh, text: TextModel, path: str, body: dict[str, Any]
) -> None:
    mesh.answers = ["Paris é.", "Hello."]
    chunks = await chunks_of(http, path, **body, n=2, return_token_ids=True)
    told: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        [choice] = chunk["choices"]
        told[choice["index"]] += choice.get("token_ids", [])
    assert told == {i: ids(text, answer) for i, answer in enumerate(mesh.answers)}
    if path == CHAT:
        prompts = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
        assert prompts == [mesh.prompts[0].token_ids]
    else:
        prompts = [c["choices"][0]["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c["choices"][0]]
        assert prompts == [mesh.prompts[0].token_ids] * 2


async def test_token_ids_end_where_a_stop_string_is_complete(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.tokens_per_delta = 100
    answer = (await http.post(COMPLETION, json={**TEXT, "stop": "capital", "return_token_ids": True})).json()
    [choice] = answer["choices"]
    assert choice["text"] == "The "
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    assert mesh.text.decode(choice["token_ids"]).endswith("capital")


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (COMPLETION, TEXT)])
@pytest.mark.parametrize("last", [True, False])
async def test_each_chunk_has_the_usage_so_far(
    http: httpx.AsyncClient, mesh: FakeMesh, path: str, body: dict[str, Any], last: bool
) -> None:
    options = {"include_usage": last, "continuous_usage_stats": True}
    chunks = await chunks_of(http, path, **body, stream_options=options)
    usages = [chunk["usage"] for chunk in chunks]
    counted = [usage["completion_tokens"] for usage in usages]
    assert counted == sorted(counted)
    assert counted[-1] == mesh.deltas
    assert counted[0] == 1
    assert {usage["prompt_tokens"] for usage in usages} == {len(mesh.prompts[0].token_ids)}
    assert (chunks[-1]["choices"] == []) == last


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 1000])
@pytest.mark.parametrize(
    ("answer", "thought"),
    [("<think>hm</think>Yes", "<think>hm</think>"), ("hm", "hm"), ("hm</think>", "hm</think>")],
)
async def test_tokens_of_reasoning_are_counted(
    settings: FrontendSettings, answer: str, thought: str, tokens_per_delta: int
) -> None:
    mesh = FakeMesh(thinking_model(), answer=answer, tokens_per_delta=tokens_per_delta)
    mesh.served = [ServedModel(MODEL, 4096, 1)]
    transport = httpx.ASGITransport(create_app(mesh, mesh.text, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        usage = (await http.post(CHAT, json=HELLO)).json()["usage"]
        plain = (await http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(ids(mesh.text, thought))}
    assert plain["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("tokens_per_delta", [1, 1000])
async def test_chunks_of_reasoning_and_calls_have_the_usage_and_each_token_once(
    settings: FrontendSettings, tokens_per_delta: int
) -> None:
    """If one delta became several chunks, only the first one had the usage so far."""
    mesh = FakeMesh(thinking_model(), answer=f"hm</think>So: {TWO}", tokens_per_delta=tokens_per_delta)
    mesh.served = [ServedModel(MODEL, 4096, 1)]
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    transport = httpx.ASGITransport(create_app(mesh, mesh.text, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        options = {"continuous_usage_stats": True}
        chunks = await chunks_of(http, CHAT, **HELLO, tools=tools, return_token_ids=True, stream_options=options)
    choices = [chunk["choices"][0] for chunk in chunks]
    told = [name for choice in choices for name in ("reasoning", "content", "tool_calls") if choice["delta"].get(name)]
    assert list(dict.fromkeys(told)) == ["reasoning", "content", "tool_calls"]
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    whole = ids(mesh.text, mesh.answer)
    assert counted == sorted(counted)
    assert counted[-1] == len(whole)
    thought = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert thought == sorted(thought)
    assert thought[-1] == len(ids(mesh.text, "hm</think>"))
    assert [token_id for choice in choices for token_id in choice.get("token_ids", [])] == whole


@pytest.mark.parametrize("fields", [{"return_token_ids": True}, {"stream_options": {"continuous_usage_stats": True}}])
def test_text_held_back_until_the_end_is_sent_although_no_token_comes_with_it(
    mesh: FakeMesh, text: TextModel, fields: dict[str, Any]
) -> None:
    request = ChatRequest.model_validate({**HELLO, "stream": True, **fields})
    generation = Generation(mesh, text, [], GapCounts(), lambda *_: None)
    events = Events.chat("id", 1, MODEL, usage_follows=False)
    stream = DetailedStream(events, lambda _: None, generation, request)
    first, calls = CallDelta(0, "call_1", "f", ""), CallDelta(0, None, None, "{}")
    data = stream.piece(TextDelta(1, "", "tool_calls", None, "hm", [first, calls]))
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in data.splitlines() if line]
    assert [next(iter(delta), None) for delta in deltas] == [
        "role",
        "reasoning_content",
        "tool_calls",
        "tool_calls",
        None,
    ]


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (COMPLETION, TEXT)])
async def test_the_prompts_log_probabilities_have_vllms_shape(
    http: httpx.AsyncClient, mesh: FakeMesh, path: str, body: dict[str, Any]
) -> None:
    answer = (
        await http.post(
            path, json={**body, "prompt_logprobs": 2, "n": 2, "logprobs": 1 if path == COMPLETION else None}
        )
    ).json()
    prompt = mesh.prompts[0].token_ids
    told = [answer["prompt_logprobs"]] if path == CHAT else [c["prompt_logprobs"] for c in answer["choices"]]
    for entries in told:
        assert entries[0] is None
        assert len(entries) == len(prompt)
        for token, entry in zip(prompt[1:], entries[1:], strict=True):
            assert list(entry) == [str(token), str(token + 1)]
            assert entry[str(token)]["logprob"] == pytest.approx(-token / 64)
            assert [entry[str(token)]["rank"], entry[str(token + 1)]["rank"]] == [1, 2]
            assert entry[str(token)]["decoded_token"] == mesh.text.token_bytes.of(token).decode(errors="replace")
    if path == COMPLETION:  # without echo the answer's own list has the answer's tokens alone
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == mesh.deltas / 2


async def test_an_echo_has_as_many_alternatives_as_requested(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    body = {**TEXT, "echo": True, "logprobs": 1, "prompt_logprobs": 4}
    [choice] = (await http.post(COMPLETION, json=body)).json()["choices"]
    assert mesh.prompts[0].sampling.prompt_logprobs == 4
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [4] * (len(mesh.prompts[0].token_ids) - 1)
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])


async def test_a_conversation_continues_with_its_last_message(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    begun = [*HELLO["messages"], {"role": "assistant", "content": "The capital"}]
    body = {"model": MODEL, "messages": begun, "continue_final_message": True}
    plain = (await http.post(CHAT, json=body)).json()["choices"][0]["message"]["content"]
    assert mesh.text.decode(mesh.prompts[0].token_ids).endswith("The capital")
    assert (await http.post(CHAT, json={**body, "echo": True})).json()["choices"][0]["message"]["content"] == (
        "The capital" + plain
    )
    await http.post(CHAT, json={**HELLO, "add_generation_prompt": False})
    await http.post(CHAT, json=HELLO)
    closed, opened = (prompt.token_ids for prompt in mesh.prompts[2:])
    assert opened[: len(closed)] == closed != opened


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_shown_when_asked_for(http: httpx.AsyncClient, stream: bool) -> None:
    body = {**TEXT, "stop": "tal of", "include_stop_str_in_output": True}
    if stream:
        chunks = await chunks_of(http, COMPLETION, **body)
        shown = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    else:
        shown = (await http.post(COMPLETION, json=body)).json()["choices"][0]["text"]
    assert shown == "The capital of"


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_a_token_that_ends_the_answer_is_no_text_unless_asked_for(
    http: httpx.AsyncClient, mesh: FakeMesh, text: TextModel, logprobs: int | None
) -> None:
    last = ids(text, mesh.answer)[-1]
    body = {**TEXT, "stop_token_ids": [last], "logprobs": logprobs}
    whole = (await http.post(COMPLETION, json={**body, "include_stop_str_in_output": True})).json()["choices"][0][
        "text"
    ]
    cut = (await http.post(COMPLETION, json=body)).json()
    assert whole == mesh.answer
    assert cut["choices"][0]["text"] == text.decode(ids(text, mesh.answer)[:-1])
    assert cut["usage"]["completion_tokens"] == len(ids(text, mesh.answer))


async def test_special_tokens_are_text_when_asked_for(http: httpx.AsyncClient, mesh: FakeMesh, text: TextModel) -> None:
    special = text._tokenizer.id_to_token(min(text.specials))
    mesh.answer = f"a{special}b"
    assert (await http.post(COMPLETION, json=TEXT)).json()["choices"][0]["text"] == "ab"
    body = {**TEXT, "skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert (await http.post(COMPLETION, json=body)).json()["choices"][0]["text"] == f"a{special}b"
    mesh.answer = f"ab{special}"  # the end of the answer is not shown, as in vLLM
    assert (await http.post(COMPLETION, json=body)).json()["choices"][0]["text"] == "ab"
    body["include_stop_str_in_output"] = True
    assert (await http.post(COMPLETION, json=body)).json()["choices"][0]["text"] == f"ab{special}"


@pytest.mark.parametrize("special", [False, True])
async def test_the_models_end_token_is_no_text_also_if_the_tokenizer_does_not_call_it_special(
    settings: FrontendSettings, *, special: bool
) -> None:
    """`Paris.<|end|>` was the answer."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<|end|>", special=special)])
    mesh = FakeMesh(TextModel(tokenizer, TEMPLATE, ends={tokenizer.token_to_id("<|end|>")}))
    mesh.answer = "Paris.<|end|>"
    transport = httpx.ASGITransport(create_app(mesh, mesh.text, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:

        async def shown(**fields: Any) -> str:
            body = {**TEXT, "skip_special_tokens": False, **fields}
            return str((await http.post(COMPLETION, json=body)).json()["choices"][0]["text"])

        assert await shown() == "Paris."
        assert await shown(skip_special_tokens=True) == "Paris."
        assert await shown(stop="London") == "Paris."
        assert await shown(include_stop_str_in_output=True) == "Paris.<|end|>"
        if not special:
            assert await shown(ignore_eos=True) == "Paris.<|end|>"
        mesh.answer = "a<|end|>b"
        assert await shown() == "a<|end|>b"


async def test_special_tokens_around_a_prompt_can_be_asked_for_or_left_out(settings: FrontendSettings) -> None:
    tokenizer = tiny_tokenizer()
    start = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)])
    mesh = FakeMesh(TextModel(tokenizer, TEMPLATE))
    transport = httpx.ASGITransport(create_app(mesh, mesh.text, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for path, body, default in ((COMPLETION, TEXT, True), (CHAT, HELLO, False)):
            for asked in (True, False):
                await http.post(path, json={**body, "add_special_tokens": asked})
            await http.post(path, json=body)
            plain, without, by_default = [p.token_ids for p in mesh.prompts]
            assert plain == [start, *without]
            assert by_default == (plain if default else without)
            mesh.prompts.clear()


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 5}, {"return_token_ids": True}])
async def test_a_client_that_reads_gets_a_long_prompt_with_each_of_many_choices(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """Its stream was cut off with 499, since the choices together were more than may wait for a client."""
    monkeypatch.setattr(reply, "MAX_HELD_BYTES", 50_000)
    monkeypatch.setattr(generation, "AT_ONCE_TOKENS", 2000)
    value = {"model": MODEL, "prompt": [50 + i % 100 for i in range(400)], "n": 64, "max_tokens": 4, **fields}
    answer = await http.post("/v1/completions", json={**value, "stream": True})
    assert answer.status_code == 200, answer.text
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    finished = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(finished) == list(range(64))
