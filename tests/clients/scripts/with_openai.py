"""The openai package: chats, or with the argument `responses` /v1/responses."""

import json
import sys
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessageParam

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
    numbers,
    texts,
)

client = openai.OpenAI(base_url=f"{asked.URL}/v1", api_key="none", max_retries=0)
WHAT = {"name": "get_weather", "description": "Weather of a city", "parameters": WEATHER}


def chats() -> Told:
    """By /v1/chat/completions."""
    ask: list[ChatCompletionMessageParam] = [{"role": "user", "content": ASK}]
    common: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS}
    plain = client.chat.completions.create(messages=ask, **common)
    stream = client.chat.completions.create(messages=ask, stream=True, stream_options={"include_usage": True}, **common)
    chunks = list(stream)
    assert chunks[-1].usage is not None
    assert plain.usage is not None

    tools: dict[str, Any] = {"tools": [{"type": "function", "function": WHAT}], "parallel_tool_calls": False}
    question: list[Any] = [{"role": "user", "content": ASK_FOR_WEATHER}]
    called = (
        client.chat.completions.create(
            messages=question, tool_choice="required", **tools, **common | {"max_tokens": ROOM}
        )
        .choices[0]
        .message
    )
    assert called.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in called.tool_calls]
    after = client.chat.completions.create(
        messages=[*question, called, *results], tool_choice="none", **tools, **common
    )
    parsed = (
        client.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": ASK_FOR_PERSON}],
            response_format=Person,
            temperature=0,
            max_tokens=ROOM,
        )
        .choices[0]
        .message.parsed
    )
    return Told(
        versions={"openai": openai.__version__},
        answer=plain.choices[0].message.content or "",
        usage=[plain.usage.prompt_tokens, plain.usage.completion_tokens],
        pieces=texts([choice.delta.content for chunk in chunks for choice in chunk.choices]),
        stream_usage=[chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens],
        calls=[
            (call.function.name, json.loads(call.function.arguments))
            for call in called.tool_calls
            if call.type == "function"
        ],
        after_call=after.choices[0].message.content or "",
        person=parsed and parsed.model_dump(),
        errors={
            "long": error_of(
                lambda: client.chat.completions.create(messages=[{"role": "user", "content": TOO_LONG}], **common),
                openai.BadRequestError,
            ),
            "model": error_of(
                lambda: client.chat.completions.create(messages=ask, **common | {"model": asked.NO_MODEL}),
                openai.NotFoundError,
            ),
            "embeddings": error_of(lambda: client.embeddings.create(model=MODEL, input=[ASK]), openai.BadRequestError),
        },
    )


def responses() -> Told:
    """By /v1/responses."""
    common: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": MAX_TOKENS}
    plain = client.responses.create(input=ASK, **common)
    with client.responses.stream(input=ASK, **common) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert plain.usage is not None
    assert final.usage is not None

    tools: Any = [{"type": "function", "strict": True, **WHAT}]
    called = client.responses.create(
        input=ASK_FOR_WEATHER,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        **common | {"max_output_tokens": ROOM},
    )
    calls = [item for item in called.output if item.type == "function_call"]
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    after = client.responses.create(
        input=results, previous_response_id=called.id, tools=tools, tool_choice="none", **common
    )
    parsed = client.responses.parse(
        model=MODEL, input=ASK_FOR_PERSON, text_format=Person, temperature=0, max_output_tokens=ROOM
    ).output_parsed
    return Told(
        versions={"openai": openai.__version__},
        answer=plain.output_text,
        usage=numbers(plain.usage.input_tokens, plain.usage.output_tokens),
        pieces=texts(pieces),
        stream_usage=numbers(final.usage.input_tokens, final.usage.output_tokens),
        calls=[(call.name, json.loads(call.arguments)) for call in calls],
        after_call=after.output_text,
        person=parsed and parsed.model_dump(),
        errors={
            "long": error_of(lambda: client.responses.create(input=TOO_LONG, **common), openai.BadRequestError),
            "model": error_of(
                lambda: client.responses.create(input=ASK, **common | {"model": asked.NO_MODEL}), openai.NotFoundError
            ),
        },
    )


asked.tell(responses() if sys.argv[1:] == ["responses"] else chats())
