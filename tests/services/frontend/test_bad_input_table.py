"""What a client may get wrong, line by line, and what it is told; after each, the next request is answered.

Failures of the mesh (no worker, a worker lost) and of connections have tests in test_bad_inputs, test_streaming,
test_admission_http, test_api_keys and tests/components/http/test_http_connection.
"""

import json
import math
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import httpx
import pytest

from components.errors import Rejected
from components.openai.chat import ChatRequest
from components.openai.fields import parse_body
from tests.services.frontend.fake_mesh import CONTEXT, MODEL, FakeMesh
from tests.services.frontend.test_bad_inputs import error_of

pytestmark = pytest.mark.anyio

CHAT: Final = "/v1/chat/completions"
COMPLETION: Final = "/v1/completions"
USER: Final = {"role": "user", "content": "Hello"}
HELLO: Final = {"model": MODEL, "messages": [USER]}


class Row(NamedTuple):
    what: str
    body: bytes | dict[str, Any]
    status: int
    code: str | None
    param: str | None
    path: str = CHAT
    headers: dict[str, str] = {"content-type": "application/json"}
    method: str = "POST"
    told: tuple[str, ...] = ()  # words of the message


def chat(what: str, code: str | None = "invalid_value", param: str | None = None, told: str = "", **fields: Any) -> Row:
    """A chat that is wrong in one field, which is the parameter to be blamed unless `param` says another."""
    blamed = next(iter(fields)) if param is None else param
    return Row(what, {**HELLO, **fields}, 400, code, blamed, told=(told,) if told else ())


def text(what: str, code: str | None = "invalid_value", param: str | None = None, **fields: Any) -> Row:
    """A completion that is wrong in one field."""
    blamed = next(iter(fields)) if param is None else param
    return Row(what, {"model": MODEL, "prompt": "a", **fields}, 400, code, blamed, COMPLETION)


def number(field: str, value: str) -> Row:
    """A chat with a number that Python's JSON would not write."""
    body = f'{{"model":"{MODEL}","messages":[{json.dumps(USER)}],"{field}":{value}}}'.encode()
    return Row(f"{field} {value[:9]}", body, 400, "invalid_value", field)


def broken(what: str, body: bytes, code: str = "invalid_json", *told: str) -> Row:
    """No JSON, or none that we take."""
    return Row(what, body, 400, code, None, told=told)


def message(what: str, at: str, code: str | None = "invalid_value", **fields: Any) -> Row:
    """A chat whose one message is wrong."""
    return Row(what, {**HELLO, "messages": [{**USER, **fields}]}, 400, code, f"messages[0]{at}")


def field(name: str, value: str) -> bytes:
    return f'{{"model":"{MODEL}","messages":[{json.dumps(USER)}],"{name}":{value}}}'.encode()


DEEP: Final = "[" * 60_000
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "maximum": math.nan}}},
    },
}
TOOL_MAXIMUM: Final = "tools[0].function.parameters.properties.a.maximum"
IMAGE: Final = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/never-fetched.png"}}

TABLE: Final = [
    # the body
    broken("malformed JSON", b'{"model": "ti'),
    broken("no body", b""),
    broken("two values", b"{}{}"),
    broken("not UTF-8", b'{"model": "\xff"}'),
    broken("a byte order mark", b"\xef\xbb\xbf{}"),
    broken("half a surrogate", field("user", '"\\ud800"')),
    broken("deep nesting", b'{"model":' + DEEP.encode()),
    broken("deep nesting of what is not looked at", field("tools", DEEP)),
    broken("a key twice", field("model", '"other"'), "invalid_json", "uplicate key", "model"),
    broken("a key twice, deeper", field("metadata", '{"a":"1","a":"2"}'), "invalid_json", "uplicate key"),
    broken("a number of 5000 digits", field("seed", "9" * 5000)),
    broken("thousands of keys", field("metadata", json.dumps({f"k{i}": "" for i in range(4000)})), "invalid_value", "2048"),
    Row("an array", b"[]", 400, "invalid_value", None),
    Row("null", b"null", 400, "invalid_value", None),
    Row("wrong content type", b"{}", 415, "unsupported_media_type", None, headers={"content-type": "text/plain"}),
    Row("no content type", b"{}", 415, "unsupported_media_type", None, headers={}),
    Row("body over the limit", b" " * 70_000, 413, "request_too_large", None, told=("65536",)),
    # routes
    Row("wrong method", b"", 405, "method_not_allowed", None, method="GET"),
    Row("wrong method", b"", 405, "method_not_allowed", None, method="DELETE", path="/v1/models"),
    Row("unknown path", b"", 404, "unknown_url", None, path="/v1/../v1/models", method="GET"),
    # messages and models
    chat("empty messages", messages=[]),
    Row("missing messages", {"model": MODEL}, 400, "missing_required_parameter", "messages"),
    Row("missing model", {"messages": [USER]}, 400, "missing_required_parameter", "model"),
    Row("unknown model", {**HELLO, "model": "gpt-5"}, 404, "model_not_found", "model", told=("gpt-5",)),
    chat("model too long", model="m" * 257),
    message("unknown role", ".role", role="king"),
    message("content missing", ".content", "missing_required_parameter", content=None),
    message("a number for text", ".content", content=7),
    message("no parts", ".content", content=[]),
    message("image_url, and no fetch", ".content[0].type", content=[IMAGE]),
    message("audio", ".content[0].type", content=[{"type": "input_audio"}]),
    message("too many parts", ".content", content=[{"type": "text", "text": ""}] * 1025),
    chat("a name that the template does not show", None, messages=[{**USER, "name": "nobody"}]),
    message("name too long", ".name", name="n" * 257),
    message("unknown field of a message", ".weight", "unknown_parameter", weight=1),
    chat("messages that are no list", messages={"role": "user"}, told="array"),
    # parameters
    chat("unknown parameter", "unknown_parameter", temprature=1),
    number("temperature", "NaN"),
    number("temperature", "1e999"),
    number("temperature", "-1e999"),
    number("temperature", "Infinity"),
    number("temperature", "-Infinity"),
    Row("a maximum that is no number", field("tools", json.dumps([TOOL])), 400, "invalid_value", TOOL_MAXIMUM),
    number("top_p", "NaN"),
    number("presence_penalty", "1e999"),
    number("seed", "9223372036854775808"),
    number("seed", "-9223372036854775809"),
    number("seed", "1" + "0" * 400),
    chat("temperature negative", temperature=-0.1),
    chat("temperature too high", temperature=2.1),
    chat("temperature as text", temperature="1"),
    chat("top_p below 0", top_p=-0.1),
    chat("top_p over 1", top_p=1.1),
    chat("n = 0", n=0),
    chat("n over the limit", n=129),
    chat("n a fraction", n=1.5),
    chat("n a bool", n=True),
    text("prompts times n over the limit", param="n", prompt=["a"] * 128, n=5),
    text("too many prompts", prompt=["a"] * 129),
    chat("max_tokens 0", max_tokens=0),
    chat("max_tokens negative", max_tokens=-1),
    chat("max_completion_tokens 0", max_completion_tokens=0),
    chat("two limits of tokens", None, "max_completion_tokens", max_tokens=1, max_completion_tokens=2),
    chat("over context", "context_length_exceeded", "messages", str(CONTEXT), max_tokens=CONTEXT),
    text("a prompt over context", "context_length_exceeded", prompt=[5] * CONTEXT),
    chat("stop of 5", stop=["a", "b", "c", "d", "e"]),
    chat("stop of nothing", stop=""),
    chat("a stop of nothing among others", stop=["a", ""]),
    chat("a stop too long", stop="s" * 1025),
    chat("a stop that is no text", stop=[1]),
    chat("logit_bias out of vocabulary", logit_bias={"999999": 1}),
    chat("logit_bias over 100", param="logit_bias.1", logit_bias={"1": 100.5}),
    chat("logit_bias under -100", param="logit_bias.1", logit_bias={"1": -101}),
    chat("logit_bias of what is no token", logit_bias={"one": 1}),
    chat("logit_bias of too many", logit_bias={str(i): 1 for i in range(1025)}),
    chat("top_logprobs over 20", logprobs=True, param="top_logprobs", top_logprobs=21),
    chat("top_logprobs without logprobs", None, top_logprobs=2),
    chat("top_k below -1", top_k=-2),
    chat("min_p over 1", min_p=1.5),
    chat("repetition_penalty 0", repetition_penalty=0),
    chat("penalty over 2", frequency_penalty=2.5),
    chat("min_tokens over max_tokens", min_tokens=6, max_tokens=5),
    chat("min_tokens over context", min_tokens=CONTEXT + 1),
    chat("guided_json that is no schema", guided_json=5),
    chat("a schema that is none", param="structured_outputs.json", structured_outputs={"json": 5}),
    chat("priority too high", priority=128),
    text("max_tokens 0, and nothing of the prompt is shown", max_tokens=0),
    text("min_tokens over max_tokens 0", param="min_tokens", max_tokens=0, echo=True, min_tokens=1),
    text("token ids negative", prompt=[-1]),
    text("token ids out of vocabulary", prompt=[999_999]),
    text("token ids beyond int32", prompt=[2**31]),
    text("token ids and text", prompt=[1, "a"]),
    text("a token id that is a bool", prompt=[True]),
    text("an empty prompt", prompt=""),
    text("a prompt of no tokens", prompt=[]),
    text("text among lists of token ids", param="prompt[1]", prompt=[[1], "a"]),
    text("token ids of the second prompt negative", param="prompt[1]", prompt=[[1], [-1]]),
    chat("stop_token_ids out of vocabulary", stop_token_ids=[999_999]),
    chat("stop_token_ids negative", param="stop_token_ids[0]", stop_token_ids=[-1]),
    chat("stop_token_ids of too many", stop_token_ids=[1] * 129),
    chat("stream_options without stream", None, stream_options={"include_usage": True}),
    chat("empty stream_options without stream", None, stream_options={}),
    chat("user too long", user="u" * 513),
    chat("prompt_cache_key too long", prompt_cache_key="u" * 513),
    chat("cache_salt too long", cache_salt="s" * 257),
    chat("metadata of too many", metadata={str(i): "" for i in range(17)}),
    chat("metadata too long", param="metadata.a", metadata={"a": "v" * 513}),
    # what is for us to set
    chat("kv_transfer_params", "unknown_parameter", kv_transfer_params={"do_remote_prefill": True}),
    chat("bootstrap_room", "unknown_parameter", bootstrap_room=1),
    chat("bootstrap_host", "unknown_parameter", bootstrap_host="10.0.0.7"),
    chat("chat_template", "unknown_parameter", chat_template="{{ 1 }}"),
    chat("chat_template_kwargs", "unsupported_parameter", "chat_template_kwargs.a", chat_template_kwargs={"a": 1}),
    chat("request_id", "unknown_parameter", request_id="mine"),
    chat("mm_processor_kwargs", "unknown_parameter", mm_processor_kwargs={}),
    text("prompt_embeds", "unknown_parameter", prompt_embeds="AAAA"),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.what)
async def test_a_bad_input_is_refused_by_name_and_nothing_is_generated(
    http: httpx.AsyncClient, mesh: FakeMesh, row: Row
) -> None:
    content = row.body if isinstance(row.body, bytes) else json.dumps(row.body).encode()
    answer = await http.request(row.method, row.path, content=content, headers=row.headers)
    if row.path.startswith("/v1/.."):  # httpx makes it plain; raw spellings are tried in test_api_keys
        assert answer.is_success
        return
    told = error_of(answer, row.status, row.code, row.param)
    assert all(word in told for word in row.told), told
    assert len(told) < 600
    assert "pydantic" not in told
    assert "Python" not in told
    assert not mesh.prompts
    assert (await http.post(CHAT, json=HELLO)).status_code == 200


def _keys(count: int) -> bytes:
    return b"{" + b",".join(b'"k%d":1' % i for i in range(count)) + b"}"


@pytest.mark.parametrize(
    "make",
    [
        lambda: _keys(5000),
        lambda: b'{"model":"m","messages":[' + b",".join([_keys(2000)] * 2) + b"]}",
        lambda: b'{"model":"m","messages":[' + b",".join([b"{}"] * 15_000) + b"]}",
        lambda: b'{"model":"m","messages":[' + b",".join([b'{"role":"x","content":1,"z":1}'] * 2000) + b"]}",
        lambda: b'{"model":"m","prompt":"","stop_token_ids":[' + b",".join([b'"x"'] * 15_000) + b"]}",
    ],
    ids=["unknown keys", "unknown keys of messages", "empty messages", "wrong messages", "wrong ids"],
)
async def test_a_body_full_of_faults_costs_little_more_than_one_with_one(
    http: httpx.AsyncClient, make: Callable[[], bytes]
) -> None:
    """Of a body of eight megabytes pydantic made a million errors, in nine seconds of the event loop."""
    body = make()
    assert len(body) < 65_536
    began = time.process_time()
    answer = await http.post(CHAT, content=body, headers={"content-type": "application/json"})
    took_s = time.process_time() - began
    assert answer.status_code == 400
    assert took_s < 0.25, "of processor time; it is a few milliseconds"


def test_a_body_as_large_as_they_may_be_full_of_faults_is_refused_soon() -> None:
    body = _keys(300_000)
    assert len(body) < 4 * 2**20
    with pytest.raises(Rejected, match="is too complex"):
        parse_body(ChatRequest, body)
    with pytest.raises(Rejected, match="60000 keys"):
        parse_body(ChatRequest, _keys(60_000))
    with pytest.raises(Rejected, match=r"'messages'.*4096"):
        parse_body(ChatRequest, json.dumps({**HELLO, "messages": [USER] * 4097}).encode())
