"""The anthropic package."""

import json
from typing import Any

import anthropic

from tests.clients.scripts import asked
from tests.clients.scripts.asked import (
    ASK,
    ASK_FOR_PERSON,
    ASK_FOR_WEATHER,
    MAX_TOKENS,
    MODEL,
    ROOM,
    TOO_LONG,
    WEATHER,
    Person,
    Told,
    error_of,
    texts,
)

client = anthropic.Anthropic(base_url=asked.URL, api_key="none", max_retries=0)
# 2.12 of the package has no argument for the temperature
COMMON: dict[str, Any] = {"model": MODEL, "max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}
TOOLS: dict[str, Any] = {
    "tools": [{"name": "get_weather", "description": "Weather of a city", "input_schema": WEATHER}]
}


def said(message: Any) -> str:
    """The text of a message."""
    return "".join(block.text for block in message.content if block.type == "text")


def usage_of(message: anthropic.types.Message) -> list[int]:
    """Tokens of prompt and answer; the API counts those from the cache by themselves."""
    return [message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0), message.usage.output_tokens]


ask: Any = [{"role": "user", "content": ASK}]
plain = client.messages.create(messages=ask, **COMMON)
with client.messages.stream(messages=ask, **COMMON) as stream:
    pieces = list(stream.text_stream)
    final = stream.get_final_message()

question: Any = {"role": "user", "content": ASK_FOR_WEATHER}
must: Any = {"type": "any", "disable_parallel_tool_use": True}
called = client.messages.create(messages=[question], tool_choice=must, **TOOLS, **COMMON | {"max_tokens": ROOM})
calls = [block for block in called.content if block.type == "tool_use"]
results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
turns: Any = [question, {"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
after = client.messages.create(messages=turns, tool_choice={"type": "none"}, **TOOLS, **COMMON)
person = client.messages.create(
    messages=[{"role": "user", "content": ASK_FOR_PERSON}],
    output_config={"format": {"type": "json_schema", "schema": Person.model_json_schema()}},
    **COMMON | {"max_tokens": ROOM},
)
asked.tell(
    Told(
        versions={"anthropic": anthropic.__version__},
        answer=said(plain),
        usage=usage_of(plain),
        pieces=texts(pieces),
        stream_usage=usage_of(final),
        calls=[(call.name, call.input) for call in calls],
        after_call=said(after),
        person=Person.model_validate(json.loads(said(person))).model_dump(),
        errors={
            "long": error_of(
                lambda: client.messages.create(messages=[{"role": "user", "content": TOO_LONG}], **COMMON),
                anthropic.BadRequestError,
            ),
            "model": error_of(
                lambda: client.messages.create(messages=ask, **COMMON | {"model": asked.NO_MODEL}),
                anthropic.NotFoundError,
            ),
        },
    )
)
