"""The parameters of a request hold through every process of the mesh, also if one of them dies during the stream."""

import asyncio
import json
import re
from typing import Any, Final

import pytest
from jsonschema import Draft202012Validator
from openai import AsyncOpenAI

from tests.components.structured.random_schemas import random_schema
from tests.mesh.conftest import MODEL
from tests.mesh.harness import MeshProcesses, Worker, metric

pytestmark = pytest.mark.mesh

TRIES: Final = 3  # if one stream begins late, others may have ended when decode is killed
PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall", "old"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LONG: Final = {
    "type": "array",
    "items": {"type": "integer", "minimum": 10, "maximum": 99},
    "minItems": 60,
    "maxItems": 60,
}
ASK: Final = [{"role": "user", "content": "Describe a person in JSON, and nothing else but that."}]


def fits(schema: Any, text: str) -> bool:
    return not list(Draft202012Validator(schema).iter_errors(json.loads(text)))


def asking(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def streamed(
    client: AsyncOpenAI, model: str, began: asyncio.Event | None = None, **fields: Any
) -> dict[int, str]:
    """Return the text of each choice. `began` is set after ten events."""
    texts: dict[int, str] = {}
    pieces = 0
    stream: Any = await client.chat.completions.create(model=model, messages=ASK, stream=True, **fields)
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            assert choice.finish_reason in (None, "stop")
        pieces += 1
        if began is not None and pieces >= 10:
            began.set()
    return texts


def moves(log: str) -> int:
    return log.count('"stream moves"')


def test_a_moved_stream_continues_inside_its_constraint(mock_mesh: MeshProcesses) -> None:
    """kill -9 of the decode that has it, with two branches at different places of their grammar."""
    slow = {"MESH_ENGINE__MOCK__SPEEDUP": "1", "MESH_ENGINE__MOCK__STEP_S": "0.004", "MESH_ENGINE__MOCK__DECODE_S": "0"}
    mock_mesh.start("bootstrap", "prefill", "decode", "decode", "frontend", **slow)
    frontend = mock_mesh.one("frontend")

    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0) as client:
            schemas = [random_schema(seed) for seed in range(10)]
            for _ in range(TRIES):
                began = [asyncio.Event() for _ in range(2)]
                killed = [
                    asyncio.create_task(
                        streamed(client, "mock", event, response_format=asking(LONG), n=2, seed=i, max_tokens=900)
                    )
                    for i, event in enumerate(began)
                ]
                await asyncio.gather(*(event.wait() for event in began))
                mock_mesh.one("decode").kill()
                for texts in await asyncio.gather(*killed):
                    assert len(texts) == 2
                    assert all(fits(LONG, text) for text in texts.values())
                if moves(frontend.logged()):
                    break
                await asyncio.to_thread(mock_mesh.start_one, "decode", **slow)
            else:
                raise AssertionError("no kill hit a stream: this test proved nothing")
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="mock",
                        messages=ASK,
                        response_format=asking(schema),
                        seed=i,
                        max_tokens=400,
                        temperature=1,
                    )
                    for i, schema in enumerate(schemas)
                )
            )
            complete = [
                (schema, answer.choices[0])
                for schema, answer in zip(schemas, answers, strict=True)
                if answer.choices[0].finish_reason == "stop"
            ]
            assert len(complete) >= 8
            assert all(fits(schema, choice.message.content or "") for schema, choice in complete)

    asyncio.run(run())
    assert 10 <= metric(frontend.url, 'kvmesh_structured_output_requests_total{result="compiled"}') < 20


@pytest.mark.model
def test_a_real_model_answers_as_asked_disaggregated(real_mesh: MeshProcesses) -> None:
    frontend = real_mesh.one("frontend")

    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0) as client:

            async def text(**fields: Any) -> list[str]:
                answer = await client.chat.completions.create(
                    model=MODEL, messages=ASK, max_tokens=200, **{"temperature": 0.8, "seed": 1, **fields}
                )
                assert {choice.finish_reason for choice in answer.choices} == {"stop"}
                return [choice.message.content or "" for choice in answer.choices]

            people, greedy, phone, mood, sum_ = await asyncio.gather(
                text(response_format=asking(PERSON), n=2),
                text(response_format=asking(PERSON), temperature=0),
                text(extra_body={"guided_regex": r"\d{3}-\d{4}"}),
                text(extra_body={"structured_outputs": {"choice": ["happy", "sad", "so so"]}}),
                text(extra_body={"guided_grammar": 'root ::= number ("+" number){2}\nnumber ::= [1-9] [0-9]?'}),
            )
            assert len(people) == 2
            assert all(fits(PERSON, person) for person in [*people, *greedy])
            assert re.fullmatch(r"\d{3}-\d{4}", phone[0])
            assert mood[0] in {"happy", "sad", "so so"}
            assert re.fullmatch(r"[1-9]\d?(\+[1-9]\d?){2}", sum_[0])

    asyncio.run(run())


@pytest.mark.model
def test_a_real_model_s_stream_that_moves_stays_what_was_asked_for(real_mesh: MeshProcesses) -> None:
    frontend = real_mesh.one("frontend")

    async def run(second: Worker) -> None:
        async with AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0) as client:
            began = [asyncio.Event() for _ in range(3)]  # some of them go to each decode
            shorter = {**LONG, "minItems": 6, "maxItems": 6}
            streams = [
                asyncio.create_task(
                    streamed(
                        client,
                        MODEL,
                        event,
                        response_format=asking(shorter),
                        n=1 + i % 2,
                        seed=i,
                        temperature=0.5,
                        max_tokens=600,
                    )
                )
                for i, event in enumerate(began)
            ]
            await asyncio.gather(*(event.wait() for event in began))
            second.kill()
            for i, texts in enumerate(await asyncio.gather(*streams)):
                assert len(texts) == 1 + i % 2
                assert all(fits(shorter, text) for text in texts.values())

    before = moves(frontend.logged())
    for _ in range(TRIES):
        second = real_mesh.start_one("decode")
        try:
            asyncio.run(run(second))
        finally:
            second.kill()
        if moves(frontend.logged()) > before:
            return
    raise AssertionError("no kill hit a stream: this test proved nothing")
