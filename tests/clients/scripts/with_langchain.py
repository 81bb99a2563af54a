"""langchain-openai: chats, or with the argument `responses` /v1/responses."""

import sys
from importlib.metadata import version
from typing import Any

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

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

COMMON: dict[str, Any] = {"base_url": f"{asked.URL}/v1", "api_key": "none", "max_retries": 0}
HERE: dict[str, Any] = COMMON | {"temperature": 0, "use_responses_api": sys.argv[1:] == ["responses"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": WEATHER},
}


def chat(max_tokens: int = MAX_TOKENS, model: str = MODEL, **fields: Any) -> ChatOpenAI:
    """The model as langchain has it."""
    return ChatOpenAI(model=model, max_tokens=max_tokens, **HERE, **fields)


plain = chat().invoke(ASK)
chunks = list(chat(stream_usage=True).stream(ASK))
whole = chunks[0]
for chunk in chunks[1:]:
    whole += chunk
question = HumanMessage(ASK_FOR_WEATHER)
called = chat(ROOM).bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False).invoke([question])
results = [ToolMessage("sunny", tool_call_id=call["id"]) for call in called.tool_calls]
after = chat().bind_tools([TOOL], tool_choice="none").invoke([question, called, *results])
people = [chat(ROOM).with_structured_output(Person, method=method).invoke(ASK_FOR_PERSON)
          for method in ("json_schema", "function_calling")]  # fmt: skip
for person in people:
    assert isinstance(person, Person)

embeddings = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False, **COMMON)
asked.tell(
    Told(
        versions={name: version(name) for name in ("langchain-openai", "langchain-core", "openai")},
        answer=plain.text,
        usage=[plain.usage_metadata["input_tokens"], plain.usage_metadata["output_tokens"]],
        pieces=texts([chunk.text for chunk in chunks]),
        stream_usage=[whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"]],
        calls=[(call["name"], call["args"]) for call in called.tool_calls],
        after_call=after.text,
        person=people[0].model_dump(),
        errors={
            "long": error_of(lambda: chat().invoke(TOO_LONG), openai.BadRequestError),
            "model": error_of(lambda: chat(model=asked.NO_MODEL).invoke(ASK), openai.NotFoundError),
            "embeddings": error_of(lambda: embeddings.embed_query(ASK), openai.BadRequestError),
        },
    )
)
