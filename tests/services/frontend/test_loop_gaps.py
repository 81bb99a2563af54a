"""No request keeps the event loop from others: the longest time without a turn, while large bodies come in."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import pytest

from components.http.server import serve_http
from components.openai.logprobs import ChatLogprobs, CompletionLogprobs
from components.text.tokenizer import TextModel
from components.wire.generate import StreamItem
from components.wire.logprobs import PackedLogprobs, pack_logprobs
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.ports import Prompt, ServedModel
from tests.loop_gap import MAX_GAP_S, longest_gap
from tests.services.frontend.fake_mesh import MODEL, FakeMesh, item_of, logprobs_of
from tests.services.frontend.raw_http import send
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.anyio]
CHAT: Final = "/v1/chat/completions"
TEXT: Final = {"type": "text", "text": "a"}


async def asked(url: str, path: str, body: bytes) -> tuple[int, bytes, float]:
    """Status and body of the answer, and the longest gap meanwhile; again if the machine may have paused."""
    for _ in range(3):
        status, answer, gap_s = await asked_once(url, path, body)
        if gap_s < MAX_GAP_S:
            break
    return status, answer, gap_s


async def asked_once(url: str, path: str, body: bytes) -> tuple[int, bytes, float]:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    async with asyncio.timeout(PATIENCE_S), longest_gap() as gap:
        reader, writer = await send(url, f"{head}connection: close\r\n\r\n".encode() + body)
        answer = bytearray()
        while some := await reader.read(2**16):
            answer += some
        writer.close()
    return int(answer[9:12]), bytes(answer), gap[0]


def packed(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def chat(content: Any, count: int) -> bytes:
    return packed({"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": content}] * count})


def turns_of(turn: Any, count: int) -> bytes:
    return packed({"model": MODEL, "max_tokens": 2, "messages": [turn] * count})


BODIES: Final[dict[str, Callable[[], tuple[str, bytes]]]] = {
    "empty parts": lambda: (CHAT, chat([{}] * 1024, 1300)),
    "empty blocks": lambda: ("/v1/messages", chat([{}] * 1024, 1300)),
    "keys": lambda: (CHAT, packed({"model": MODEL, "x": {str(i): 0 for i in range(300_000)}})),
    "good parts": lambda: (CHAT, chat([TEXT] * 60, 2500)),
    "as many parts as may be": lambda: (CHAT, chat([TEXT] * 60, 330)),
    "as many blocks as may be": lambda: ("/v1/messages", chat([TEXT] * 60, 330)),
    "token ids": lambda: ("/v1/completions", packed({"model": MODEL, "prompt": [5] * 500_000})),
    "long token ids": lambda: ("/v1/completions", packed({"model": MODEL, "prompt": [10_000] * 500_000})),
    "long numbers": lambda: ("/v1/completions", packed({"model": MODEL, "prompt": [10**399] * 9_000})),
    "text": lambda: ("/v1/completions", packed({"model": MODEL, "prompt": "a" * 4_000_000})),
    "turns": lambda: (CHAT, chat("a" * 1500, 2700)),
    "cut short": lambda: (CHAT, chat("é" * 100, 6500)[:-5]),
    "tool calls": lambda: (CHAT, turns_of({"role": "assistant", "tool_calls": [{}] * 1024}, 1300)),
    "tools": lambda: (CHAT, packed({"model": MODEL, "messages": [], "tools": [{}] * 1_000_000})),
    "stop token ids": lambda: ("/v1/completions", packed({"model": MODEL, "stop_token_ids": [{}] * 1_000_000})),
    "items": lambda: ("/v1/responses", packed({"model": MODEL, "input": [{}] * 1_000_000})),
    "nested blocks": lambda: (
        "/v1/messages",
        chat([{"type": "tool_result", "tool_use_id": "a", "content": [{}] * 10}] * 100, 400),
    ),
    "inputs": lambda: ("/v1/embeddings", packed({"model": MODEL, "input": [{}] * 1_000_000})),
    "no token ids": lambda: ("/detokenize", packed({"tokens": [{}] * 1_000_000})),
    "too many token ids": lambda: ("/v1/completions", packed({"model": MODEL, "prompt": [5] * 2_000_000})),
}


@pytest.mark.parametrize("kind", BODIES)
async def test_a_body_as_large_as_it_may_be_blocks_nobody(mesh: FakeMesh, kind: str) -> None:
    """Bodies blocked the event loop for up to a second each, and one of many blocks for more than a minute."""
    path, body = BODIES[kind]()
    settings = FrontendSettings(port=0, drain_timeout_s=2)
    async with serve_http(create_app(mesh, mesh.text, settings), settings) as url:
        await asked(url, CHAT, chat("a", 1))  # what is made once is made
        status, _, gap_s = await asked(url, path, body)
    assert status == 400
    assert gap_s < MAX_GAP_S, gap_s


def calling(num_calls: int, arguments: str) -> list[dict[str, Any]]:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": arguments}} for i in range(num_calls)
    ]
    user = {"role": "user", "content": "a"}
    return [
        user,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c0", "content": "a"},
        user,
    ]


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("num_calls", [1, 20])
async def test_arguments_of_earlier_calls_block_nobody(mesh: FakeMesh, path: str, num_calls: int) -> None:
    """They were parsed in the event loop, and their values were not counted."""
    some = "[]," * (1_300_000 // num_calls)
    messages = calling(num_calls, '{"a": [' + some[: 64_000 if num_calls > 1 else None] + "[]]}")
    settings = FrontendSettings(port=0, drain_timeout_s=2)
    async with serve_http(create_app(mesh, mesh.text, settings), settings) as url:
        await asked(url, CHAT, chat("a", 1))
        status, answer, gap_s = await asked(url, path, packed({"model": MODEL, "messages": messages}))
    assert status in ({400} if path == CHAT or num_calls == 1 else {200}), answer[:500]
    assert gap_s < MAX_GAP_S, gap_s


async def test_many_choices_with_long_stop_strings_block_nobody(mesh: FakeMesh) -> None:
    """Each choice prepared them anew: a body of 5 kB took 0.8 s, before admission."""
    stops = [letter * 1024 for letter in "abcd"]
    body = packed({"model": MODEL, "prompt": ["a"] * 4, "n": 128, "max_tokens": 2, "stop": stops})
    settings = FrontendSettings(port=0, drain_timeout_s=2)
    async with serve_http(create_app(mesh, mesh.text, settings), settings) as url:
        await asked(url, CHAT, chat("a", 1))
        status, _, gap_s = await asked(url, "/v1/completions", body)
    assert status == 200
    assert gap_s < MAX_GAP_S, gap_s


TEXTS: Final = {
    "letters": "a" * 4_000_000,
    "spaces": " " * 4_000_000,
    "combining marks": "e" + "\u0301" * 600_000,
    "ligatures": "\ufdfa" * 4000,  # 18 letters each, once normalised
    "special tokens": "<|im_start|>" * 300_000,
}


@pytest.mark.parametrize("kind", TEXTS)
async def test_a_long_text_to_tokenize_blocks_nobody(mesh: FakeMesh, kind: str) -> None:
    settings = FrontendSettings(port=0, drain_timeout_s=2)
    async with serve_http(create_app(mesh, mesh.text, settings), settings) as url:
        await asked(url, CHAT, chat("a", 1))
        status, _, gap_s = await asked(url, "/tokenize", packed({"prompt": TEXTS[kind]}))
    assert status in {200, 400, 413}
    assert gap_s < MAX_GAP_S, gap_s


async def test_many_token_ids_to_detokenize_block_nobody(mesh: FakeMesh) -> None:
    settings = FrontendSettings(port=0, drain_timeout_s=2)
    async with serve_http(create_app(mesh, mesh.text, settings), settings) as url:
        await asked(url, CHAT, chat("a", 1))
        status, _, gap_s = await asked(url, "/detokenize", packed({"tokens": [5] * 500_000}))
    assert status in {200, 400, 413}
    assert gap_s < MAX_GAP_S, gap_s


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_thousands_of_blocks_of_one_turn_take_linear_time(mesh: FakeMesh, path: str) -> None:
    """Each block was added to a copy of those before it."""
    mesh.served = [ServedModel(MODEL, 2**20, 1)]
    settings = FrontendSettings(port=0, drain_timeout_s=2)
    block = {"type": "thinking", "thinking": "a" * 1000} if path == "/v1/messages" else None
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a" * 1000}]}
    value: dict[str, Any] = {"model": MODEL, "max_tokens": 2}
    if block is None:
        value = {"model": MODEL, "max_output_tokens": 2, "input": [item] * 3800 + [{"role": "user", "content": "a"}]}
    else:
        turns = [{"role": "assistant", "content": [block] * 950}] * 4
        value["messages"] = [{"role": "user", "content": "a"}, *turns, {"role": "user", "content": "a"}]
    async with serve_http(create_app(mesh, mesh.text, settings), settings) as url:
        status, answer, gap_s = await asked(url, path, packed(value))
        assert status == 200, answer[:500]
    assert gap_s < MAX_GAP_S, gap_s


class LongPrompts(FakeMesh):
    """A mesh whose prompts have the log-probabilities that a worker sends; the fake's own tokens take long to make."""

    async def _deltas(self, prompt: Prompt, branch: int) -> AsyncGenerator[StreamItem, None]:
        token_ids, alternatives = prompt.token_ids, prompt.sampling.prompt_logprobs
        told = [logprobs_of(7, alternatives or 0)] * (len(token_ids) - 1)
        packed = await asyncio.to_thread(pack_logprobs, told)
        yield item_of([7], "length", None, PackedLogprobs(packed, len(told)))


def json_of(answer: bytes) -> Any:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    whole = bytearray()
    while (size := int((cut := body.partition(b"\r\n"))[0], 16)) > 0:
        whole += cut[2][:size]
        body = cut[2][size + 2 :]
    return json.loads(whole)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_log_probabilities_of_a_long_prompt_block_nobody(text: TextModel, path: str) -> None:
    """20 alternatives for each of 8,000 tokens made an answer of 11 MB, in one go of 0.8 s."""
    mesh = LongPrompts(text, served=[ServedModel(MODEL, 2**20, 1)])
    settings = FrontendSettings(port=0, drain_timeout_s=2)
    value = {"model": MODEL, "max_tokens": 1, "prompt_logprobs": 20}
    prompt = "a" * 8000
    value |= {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    async with serve_http(create_app(mesh, text, settings), settings) as url:
        status, answer, gap_s = await asked(url, path, packed(value))
    assert status == 200, answer[:500]
    found = json_of(answer)
    told = (found if path == CHAT else found["choices"][0])["prompt_logprobs"]
    assert len(told) == found["usage"]["prompt_tokens"]
    assert told[0] is None
    assert told[1]["26"] == {"logprob": -7 / 64 - 19, "rank": 20, "decoded_token": text.decode([26])}
    assert gap_s < MAX_GAP_S, gap_s


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_log_probabilities_of_a_long_answer_block_nobody(text: TextModel, path: str) -> None:
    """They were written in one go when the answer was over."""
    mesh = FakeMesh(text, "", "a" * 4000, pace_s=0.001, tokens_per_delta=20, served=[ServedModel(MODEL, 2**20, 1)])
    settings = FrontendSettings(port=0, drain_timeout_s=2)
    value: dict[str, Any] = {"model": MODEL, "max_tokens": 10_000}
    value |= {"logprobs": True, "top_logprobs": 20} if path == CHAT else {"logprobs": 20}
    value |= {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    async with serve_http(create_app(mesh, text, settings), settings) as url:
        status, answer, gap_s = await asked(url, path, packed(value))
    assert status == 200, answer[:500]
    told = json_of(answer)["choices"][0]["logprobs"]
    model = ChatLogprobs if path == CHAT else CompletionLogprobs
    assert len(told["content" if path == CHAT else "top_logprobs"]) == 4000
    assert model.model_validate(told).model_dump() == told
    assert gap_s < MAX_GAP_S, gap_s


async def test_log_probabilities_of_128_choices_block_nobody(text: TextModel) -> None:
    mesh = FakeMesh(text, "", "a" * 30, tokens_per_delta=10, served=[ServedModel(MODEL, 2**20, 1)])
    value = {"model": MODEL, "max_tokens": 100, "n": 128, "logprobs": True, "top_logprobs": 20}
    value |= {"messages": [{"role": "user", "content": "a"}]}
    async with serve_http(
        create_app(mesh, text, FrontendSettings(port=0, drain_timeout_s=2)), FrontendSettings(port=0)
    ) as url:
        status, answer, gap_s = await asked(url, CHAT, packed(value))
    assert status == 200, answer[:500]
    assert [len(choice["logprobs"]["content"]) for choice in json_of(answer)["choices"]] == [30] * 128
    assert gap_s < MAX_GAP_S, gap_s
