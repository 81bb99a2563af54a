"""Requests that generate nothing and get one JSON answer, among them tokenising, detokenising and counting tokens."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, closing
from functools import partial
from typing import TypeVar
from uuid import uuid4

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from components.anthropic.messages import CountRequest, TokenCountAnswer
from components.openai.completions import check_vocabulary
from components.openai.fields import parse_body
from components.openai.parts import AT_ONCE_BYTES, Parts, filled, items_of, some_of, text_filled
from components.openai.responses import InputTokens, InputTokensRequest
from components.openai.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from services.frontend import tracing
from services.frontend.answer_form import AnswerForm, error_of
from services.frontend.conversation import conversation_of, encode_conversation
from services.frontend.dialects.messages import MessagesDialect
from services.frontend.dialects.responses import ResponsesDialect
from services.frontend.exchange import Frontend
from services.frontend.gate import caller_of
from services.frontend.incoming import Body, cancelled_on_disconnect, limited_time, read_json_body
from services.frontend.metrics import NO_MODEL
from services.frontend.ports import ServedModel
from services.frontend.prompts import find_model
from services.frontend.request_timeline import RequestTimeline
from services.frontend.stored import StoredResponses

R = TypeVar("R", bound=BaseModel)


class Call:
    def __init__(self, frontend: Frontend, request: Request, timeline: RequestTimeline, form: AnswerForm) -> None:
        self.frontend = frontend
        self.scope = request.scope
        self.id = form.request_id
        self.model = NO_MODEL  # set once it is known to be ours
        self.deadline_unix_ms = int((time.time() + frontend.settings.request_timeout_s) * 1000)
        self.timeline = timeline
        self.prompt_tokens = 0
        self.form = form


async def answered(
    frontend: Frontend,
    request: Request,
    body: type[R],
    work: Callable[[Call, R], Awaitable[Parts]],
    *,
    operation: str,
    form: type[AnswerForm],
) -> Response:
    """Answer with what `work` makes of the request's body, or with a refusal. `operation`: the name of the span."""
    route = request.url.path if request.scope.get("route") is None else request.scope["route"].path
    label = caller_of(request.scope).label
    request_id = uuid4().hex  # the client's own is never a key
    with tracing.begin_timeline(request.scope, operation, request_id, label, "frontend.read") as timeline:
        call = Call(frontend, request, timeline, form(request_id))
        try:
            async with limited_time(frontend.settings.request_timeout_s):
                data = await read_json_body(request.scope, request.receive, frontend.settings.max_body_bytes)
                async with cancelled_on_disconnect(request.receive, lambda: False):
                    timeline.begin("frontend.validate")
                    parsed = await Body(data, frontend.text).made_into(partial(parse_body, body))
                    parts = await work(call, parsed)
                    timeline.begin("frontend.answer")
                    response = _response_of(parts)
                    response.raw_headers += call.form.headers(label or call.id)
        except Exception as exc:  # noqa: BLE001 - bugs are logged by `error_of`
            error = error_of(exc, call.id)
            tracing.describe_error(timeline, error, exc)
            response = call.form.failure(error, label or call.id)
        frontend.lines.end(
            timeline, route, call.model, response.status_code, label=label, prompt_tokens=call.prompt_tokens
        )
    frontend.metrics.requests.labels(call.model, route, str(response.status_code)).inc()
    return response


def _response_of(parts: Parts) -> Response:
    """A long answer is made while its client reads it."""
    first = some_of(parts)
    if len(first) < AT_ONCE_BYTES:
        return Response(first, media_type="application/json")
    return _Long(_in_turns(first, parts))


class _Long(StreamingResponse):
    """Closes its parts as soon as it is over, also if its client has left."""

    media_type = "application/json"

    def __init__(self, parts: AsyncGenerator[bytes, None]) -> None:
        super().__init__(parts)
        self._parts = parts

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._parts):
            await super().stream_response(send)


async def _in_turns(first: bytes, parts: Parts) -> AsyncGenerator[bytes, None]:
    some = first
    with closing(parts):
        while some:
            yield some
            await asyncio.sleep(0)
            some = some_of(parts)


async def tokenize(call: Call, request: TokenizeRequest) -> Parts:
    request.check()
    text, model = call.frontend.text, _model(call, request.model)
    if request.prompt is not None:
        tokens = await text.encode_text(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    else:
        tokens = await encode_conversation(text, await conversation_of(text, request))
    answer = Tokenized(count=len(tokens), max_model_len=model.max_context, tokens=[])
    if not request.return_token_strs:
        return filled(answer, tokens=items_of(tokens))
    both = answer.model_copy(update={"token_strs": []})
    return filled(both, tokens=items_of(tokens), token_strs=items_of(tokens, text.names))


async def detokenize(call: Call, request: DetokenizeRequest) -> Parts:
    _model(call, request.model)
    text, tokens = call.frontend.text, request.tokens

    def decoded() -> str:
        check_vocabulary(tokens, text.vocab_size, "tokens")
        return text.decode(tokens, skip=False)

    return text_filled(Detokenized(prompt=""), await text.run(len(tokens), decoded))


async def count_tokens(call: Call, request: CountRequest) -> Parts:
    dialect = MessagesDialect(call.id)
    call.form = dialect
    dialect.take(request)
    _model(call, request.model)
    [prompt] = (await dialect.encode(call.frontend.text)).prompts
    return filled(TokenCountAnswer(input_tokens=len(prompt)))


async def count_input_tokens(stored: StoredResponses | None, call: Call, request: InputTokensRequest) -> Parts:
    call.form = dialect = ResponsesDialect(stored, call.id)
    await dialect.read_prompt(request, _model(call, request.model).name, call.frontend.text, call.scope)
    [prompt] = (await dialect.encode(call.frontend.text)).prompts
    return filled(InputTokens(input_tokens=len(prompt)))


def _model(call: Call, name: str | None) -> ServedModel:
    """The model that is named, else the one that is served. Raises: UnknownModel, NoDecodeInstance."""
    models = call.frontend.mesh.models()
    model = find_model(models, name if name is not None else next((model.name for model in models), ""))
    call.model = model.name
    return model
