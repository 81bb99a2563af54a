"""Calls that are held to their tools, through every process of the mesh."""

import asyncio
import json
from typing import Any, Final

import jsonschema  # type: ignore[import-untyped, unused-ignore]
import pytest
from openai import AsyncOpenAI

from tests.mesh.conftest import MODEL
from tests.mesh.harness import MeshProcesses

pytestmark = [pytest.mark.mesh, pytest.mark.model]

WEATHER: Final = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "days", "unit"],
}
TOOLS: Final[list[Any]] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather of a city", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "get_time", "description": "The time of day"}},
]
ASK: Final[list[Any]] = [{"role": "user", "content": "What is the weather in Paris in the next two days, in celsius?"}]


def test_a_small_model_gives_valid_calls_where_it_has_to_call(real_mesh: MeshProcesses) -> None:
    async def run() -> None:
        frontend = real_mesh.one("frontend")
        async with AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0) as client:

            async def calls(choice: Any, *, stream: bool = False, **fields: Any) -> list[tuple[str, Any]]:
                request = {
                    "model": MODEL,
                    "messages": ASK,
                    "tools": TOOLS,
                    "tool_choice": choice,
                    "max_tokens": 300,
                    **fields,
                }
                if stream:
                    manager = client.chat.completions.stream(**request)
                    async with manager as streaming:
                        answer = await streaming.get_final_completion()
                else:
                    answer = await client.chat.completions.create(**request)
                made = []
                for told in answer.choices:
                    assert told.finish_reason == "tool_calls"
                    assert told.message.content is None
                    made += [
                        (call.function.name, json.loads(call.function.arguments))
                        for call in told.message.tool_calls or ()
                    ]
                return made

            named = {"type": "function", "function": {"name": "get_weather"}}
            answers = await asyncio.gather(
                calls(named, temperature=0),
                calls(named, stream=True, seed=1),
                calls("required", parallel_tool_calls=False, n=2, seed=2),
                calls("required", stream=True, parallel_tool_calls=False, temperature=0),
            )
        for made in answers:
            assert made
            for name, arguments in made:
                jsonschema.validate(arguments, WEATHER if name == "get_weather" else {"maxProperties": 0})
        assert [[name for name, _ in made] for made in answers[:2]] == [["get_weather"]] * 2
        assert len(answers[2]) == 2

    asyncio.run(run())
