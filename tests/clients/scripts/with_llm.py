"""Simon Willison's llm, with models of extra-openai-models.yaml; with the argument `responses` they are of /v1/responses.

LLM_USER_PATH is to be a directory of this run alone.
"""

import json
import sys
from importlib.metadata import version
from typing import Any

import llm
import openai
from llm.default_plugins.openai_models import Chat, OpenAIEmbeddingModel, Responses

from tests.clients.scripts import asked
from tests.clients.scripts.asked import (
    ASK,
    ASK_FOR_PERSON,
    ASK_FOR_WEATHER,
    MAX_TOKENS,
    MODEL,
    ROOM,
    TOO_LONG,
    Person,
    Told,
    error_of,
    numbers,
    texts,
)

BASE = f"{asked.URL}/v1"
BY_RESPONSES = sys.argv[1:] == ["responses"]
MUST = {"tool_choice": "required", "parallel_tool_calls": False}


class ChatThatCalls(Chat):  # type: ignore[misc, unused-ignore]  # llm has no option for it
    def build_kwargs(self, prompt: Any, stream: bool) -> Any:
        return super().build_kwargs(prompt, stream) | (MUST if prompt.tools else {})


class ResponsesThatCall(Responses):  # type: ignore[misc, unused-ignore]
    def _build_responses_kwargs(self, prompt: Any, stream: bool) -> Any:
        return super()._build_responses_kwargs(prompt, stream) | (MUST if prompt.tools else {})


entries = [
    {"model_id": name, "model_name": model, "api_base": BASE, "supports_schema": True, "responses": BY_RESPONSES}
    for name, model in (("mesh", MODEL), ("nobody", asked.NO_MODEL))
]
(llm.user_dir() / "extra-openai-models.yaml").write_text(json.dumps(entries))  # JSON is YAML
mesh, nobody = llm.get_model("mesh"), llm.get_model("nobody")
few: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS}

plain = mesh.prompt(ASK, stream=False, **few)
answer = plain.text()
streamed = mesh.prompt(ASK, stream=True, **few)
pieces = list(streamed)
person = mesh.prompt(ASK_FOR_PERSON, schema=Person, temperature=0, max_tokens=ROOM)

calling = (ResponsesThatCall if BY_RESPONSES else ChatThatCalls)(
    "calling", model_name=MODEL, api_base=BASE, supports_tools=True
)
calling.needs_key = None
weather = llm.Tool("get_weather", None, asked.WEATHER, lambda city: f"sunny in {city}")
conversation = calling.conversation()
called = conversation.prompt(ASK_FOR_WEATHER, tools=[weather], temperature=0, max_tokens=ROOM)
calls = called.tool_calls()
after = conversation.prompt("", tool_results=called.execute_tool_calls(), **few)

embeddings = OpenAIEmbeddingModel("embeddings", MODEL)  # reads OPENAI_BASE_URL
asked.tell(
    Told(
        versions={name: version(name) for name in ("llm", "openai")},
        answer=answer,
        usage=numbers(plain.usage().input, plain.usage().output),
        pieces=texts(pieces),
        stream_usage=numbers(streamed.usage().input, streamed.usage().output),
        calls=[(call.name, call.arguments) for call in calls],
        after_call=after.text(),
        person=json.loads(person.text()),
        errors={
            "long": error_of(lambda: mesh.prompt(TOO_LONG, **few).text(), openai.BadRequestError),
            "model": error_of(lambda: nobody.prompt(ASK, **few).text(), openai.NotFoundError),
            "embeddings": error_of(lambda: list(embeddings.embed_batch([ASK], key="none")), openai.BadRequestError),
        },
    )
)
