"""However the tokens of an answer are cut into frames, its stream says what the answer in one piece says."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pytest
from starlette.types import ASGIApp, Message

from components.text.tokenizer import TextModel
from components.wire.generate import StreamItem
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.ports import Prompt, ServedModel
from tests.services.frontend.fake_mesh import MODEL, FakeMesh, item_of, logprobs_of
from tests.services.frontend.test_gpt_oss import CALL as HARMONY_CALL
from tests.services.frontend.test_gpt_oss import NEXT, PREAMBLE
from tests.services.frontend.test_gpt_oss import THOUGHT as ANALYSIS
from tests.services.frontend.test_gpt_oss import text as gpt_oss
from tests.services.frontend.thinking_model import CALL, thinking_model

pytestmark = pytest.mark.anyio

G: Final = CALL.replace('"f"', '"g"').replace("1", '"é"')
THOUGHT: Final = f"Hm, 東京.\n</think>\n\nSee 😀.\n{CALL}\nThen é. {G} Bye."
PLAIN: Final = "one é two 東京 three 😀 stop here"
HELLO: Final = [{"role": "user", "content": "Hello"}]
PARAMETERS: Final = {"type": "object", "properties": {"a": {}}}
FUNCTIONS: Final = [{"name": name, "parameters": PARAMETERS} for name in "fg"]
SMALL: Final = {"max_tokens": 300}


@dataclass(slots=True)
class CutMesh(FakeMesh):
    sizes: list[int] = field(default_factory=list)  # tokens of each frame; the last has the rest

    async def _deltas(self, prompt: Prompt, branch: int) -> AsyncGenerator[StreamItem, None]:
        ids = self.text._encode(self.answer, add_special_tokens=False)
        count, sizes = prompt.sampling.logprobs, iter(self.sizes)
        asked = prompt.sampling.prompt_logprobs
        of_prompt = None if asked is None else [logprobs_of(token, asked) for token in prompt.token_ids[1:]]
        at = 0
        while at < len(ids):
            frame = ids[at : at + next(sizes, len(ids))]
            at += len(frame)
            told = None if count is None else [logprobs_of(token, count) for token in frame]
            yield item_of(frame, "stop" if at >= len(ids) else None, told, of_prompt)
            of_prompt = None


class Said(NamedTuple):
    """An answer, in any API's form."""

    reasoning: str
    text: str
    calls: list[tuple[str, Any]]
    finish: list[Any]
    usage: list[Any]
    logprobs: list[Any]


def said_by_chat(chunks: list[dict[str, Any]]) -> Said:
    deltas = [(chunk, choice) for chunk in chunks for choice in chunk["choices"]]
    texts = [choice.get("delta") or choice.get("message") or {"content": choice.get("text")} for _, choice in deltas]
    calls: dict[int, list[str]] = {}
    for delta in texts:
        for i, call in enumerate(delta.get("tool_calls") or ()):
            if "name" in call["function"]:
                assert call["id"]
                calls[call.get("index", i)] = [call["function"]["name"], ""]
            calls[call.get("index", i)][1] += call["function"]["arguments"]
    told = [choice["logprobs"] for _, choice in deltas if choice["logprobs"]]
    return Said(
        "".join(delta.get("reasoning") or "" for delta in texts),
        "".join(delta.get("content") or "" for delta in texts),
        [(name, arguments) for name, arguments in calls.values()],
        [choice["finish_reason"] for _, choice in deltas if choice["finish_reason"] is not None],
        [chunk["usage"] for chunk in chunks if chunk.get("usage")],
        [token for logprobs in told for token in logprobs.get("content") or logprobs.get("tokens")],
    )


def said_by_items(response: Mapping[str, Any]) -> Said:
    items = response["output"]

    def of(kind: str) -> str:
        return "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])

    calls = [item for item in items if item["type"] == "function_call"]
    assert all(call["call_id"] for call in calls)
    return Said(
        of("reasoning"),
        of("message"),
        [(call["name"], call["arguments"]) for call in calls],
        [response["status"]],
        [response["usage"]],
        [],
    )


def said_by_responses(events: list[dict[str, Any]]) -> Said:
    """Every event belongs to the open item, and the deltas of an item make its text."""
    if len(events) == 1:
        return said_by_items(events[0])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    shown: list[str] = []
    items: list[Any] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(shown) == len(items)
            shown.append("")
        elif kind.endswith(".delta"):
            assert event["output_index"] == len(items) == len(shown) - 1
            shown[-1] += event["delta"]
        elif kind == "response.output_item.done":
            items.append(event["item"])
    assert [item.get("arguments", "".join(p["text"] for p in item.get("content", ()))) for item in items] == shown
    [last] = [event["response"] for event in events if event["type"] == "response.completed"]
    assert last["output"] == items
    return said_by_items(last)


def said_by_message(message: Mapping[str, Any]) -> Said:
    blocks = message["content"]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    assert all(call["id"] for call in calls)
    return Said(
        "".join(block.get("thinking", "") for block in blocks),
        "".join(block.get("text", "") for block in blocks),
        [(call["name"], call["input"]) for call in calls],
        [(message["stop_reason"], message["stop_sequence"])],
        [message["usage"]["output_tokens"]],
        [],
    )


def said_by_messages(events: list[dict[str, Any]]) -> Said:
    if len(events) == 1:
        return said_by_message(events[0])
    blocks: list[Any] = []
    message: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "partial": ""})
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                delta = event["delta"]
                name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial"}[
                    delta["type"]
                ]
                blocks[-1][name] += delta.get("partial_json", delta.get(name))
            case "message_delta":
                assert not message
                message = {**event["delta"], "usage": event["usage"]}
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["partial"])
    return said_by_message({**message, "content": blocks})


class Api(NamedTuple):
    path: str
    body: Mapping[str, Any]
    said: Callable[[list[dict[str, Any]]], Said]


APIS: Final = {
    "chat": Api(
        "/v1/chat/completions",
        {"messages": HELLO, "tools": [{"type": "function", "function": function} for function in FUNCTIONS]},
        said_by_chat,
    ),
    "responses": Api(
        "/v1/responses",
        {"input": "Hello", "tools": [{"type": "function", **function} for function in FUNCTIONS]},
        said_by_responses,
    ),
    "messages": Api(
        "/v1/messages",
        {
            "messages": HELLO,
            **SMALL,
            "tools": [{"name": function["name"], "input_schema": PARAMETERS} for function in FUNCTIONS],
        },
        said_by_messages,
    ),
    "completions": Api("/v1/completions", {"prompt": "é", "echo": True}, said_by_chat),
}


async def asked(app: ASGIApp, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream without the last mark, or the answer."""
    sent: list[bytes] = []
    status: list[int] = []
    inbox = asyncio.Queue[Message]()  # the client stays
    inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})

    async def send(message: Message) -> None:
        status.extend([message["status"]] if "status" in message else [])
        sent.append(message.get("body", b""))

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "client": None}
    await app(scope, inbox.get, send)
    whole = b"".join(sent).decode()
    assert status == [200], whole
    if not body.get("stream"):
        return [json.loads(whole)]
    data = [line.removeprefix("data: ") for line in whole.split("\n") if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


def cuts(count: int) -> Iterator[list[int]]:
    """In two at each place, in equal parts of each size, and frames of one and of many in turn."""
    yield from ([at] for at in range(1, count))
    yield from ([size] * count for size in range(1, 8))
    yield from ([1, size] * count for size in range(2, 6))


@pytest.fixture(scope="module")
def thinking() -> TextModel:
    return thinking_model()


@pytest.mark.parametrize(
    ("api", "answer", "more"),
    [
        ("chat", THOUGHT, {"stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 1}),
        ("chat", THOUGHT, {"stream_options": {"include_usage": True}, "stop": "Bye"}),
        ("responses", THOUGHT, {}),
        ("messages", THOUGHT, {}),
        ("messages", THOUGHT, {"stop_sequences": ["n é. <"]}),
        (
            "completions",
            PLAIN,
            {"stream_options": {"include_usage": True}, "stop": ["stop he", "p her"], "logprobs": 1},
        ),
    ],
)
async def test_a_stream_has_the_same_content_as_the_whole_answer(
    api: str, answer: str, more: dict[str, Any], thinking: TextModel
) -> None:
    """Text that followed a call in one frame cut this call in two, the second half without an id and a name."""
    mesh = CutMesh(thinking, answer=answer, served=[ServedModel(MODEL, 4096, 1)])
    app = create_app(mesh, mesh.text, FrontendSettings(request_lines_per_s=0))
    path, body, said = APIS[api]
    request = {"model": MODEL, **body, **more}
    whole = said(await asked(app, path, {name: it for name, it in request.items() if name != "stream_options"}))
    count = len(mesh.text._encode(answer, add_special_tokens=False))
    for sizes in cuts(count):
        mesh.sizes = sizes
        assert said(await asked(app, path, {**request, "stream": True})) == whole, sizes


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_so_does_one_of_several_messages(api: str) -> None:
    answer = f"{PREAMBLE}{NEXT}{ANALYSIS}{NEXT}{ANALYSIS}{NEXT}{HARMONY_CALL}"
    mesh = CutMesh(gpt_oss(), answer=answer, served=[ServedModel(MODEL, 4096, 1)])
    app = create_app(mesh, mesh.text, FrontendSettings(request_lines_per_s=0))
    path, body, said = APIS[api]
    usage = {"stream_options": {"include_usage": True}} if api == "chat" else {}
    whole = said(await asked(app, path, {"model": MODEL, **body}))
    for sizes in cuts(len(mesh.text._encode(answer, add_special_tokens=False))):
        mesh.sizes = sizes
        assert said(await asked(app, path, {"model": MODEL, **body, "stream": True, **usage})) == whole, sizes
