"""gpt-oss's messages through the endpoint: reasoning, preambles, calls, constraints and earlier turns."""

import json
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai as package
import pytest
from prometheus_client import CollectorRegistry

from components.output.harmony import MARKERS
from components.structured.checker import ConstraintChecker, open_checker
from components.structured.metrics import ConstraintMetrics
from components.text.tokenizer import TextModel
from engine.model.mock_model import mock_dir
from tests.components.text.tiny_model import tiny_tokenizer
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.services.frontend.test_tool_calls import HELLO, NAMED, SHAPE, STRICT, F, G, ask, calls_of, served
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio
# a small one with what matters of gpt-oss's: names of fields, markers, and one call a turn
TEMPLATE = (
    "{% for t in tools or [] %}{{ '// ' + t.function.description + t.function.name + '\n' }}{% endfor %}"
    "{{ reasoning_effort or 'medium' }}"
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking or '') + '<|end|>' }}"
    "{{ '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}"
    "{% elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
THOUGHT, NEXT = "<|channel|>analysis<|message|>They say hello.", "<|end|><|start|>assistant"
ANSWER = "<|channel|>final<|message|>Hello!"
CALL = "<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}"
PREAMBLE = "<|channel|>commentary<|message|>Let me look."


@cache
def text() -> TextModel:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens(list(MARKERS))
    ends = {tokenizer.token_to_id(name) for name in ("<|return|>", "<|call|>")}
    return TextModel(tokenizer, TEMPLATE, {}, ends=ends)


@pytest.fixture(scope="module")
async def checker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ConstraintChecker]:
    folder: Path = mock_dir(tmp_path_factory.mktemp("models"))
    text()._tokenizer.save(str(folder / "tokenizer.json"))  # its markers have ids there, too
    async with open_checker(folder, 2.0, ConstraintMetrics(CollectorRegistry())) as opened:
        yield opened


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_delta", [1, 5, 1000])
async def test_a_client_sees_reasoning_text_and_calls_and_no_marker(tokens_per_delta: int, stream: bool) -> None:
    mesh = FakeMesh(text(), tokens_per_delta=tokens_per_delta)
    mesh.answers = [
        f"{THOUGHT}{NEXT}{ANSWER}<|return|>",
        f"{THOUGHT}{NEXT}{PREAMBLE}{NEXT}{CALL}<|call|>",
        ANSWER,
    ]
    async with served(mesh) as client:
        said, called, plain = await ask(client, stream=stream, n=3)
        without = await ask(client, stream=stream, n=3, tools=package.omit)
    assert [choice["message"].get("reasoning_content") for choice in (said, called)] == ["They say hello."] * 2
    assert "reasoning_content" not in plain["message"]
    assert [choice["message"]["content"] for choice in (said, called, plain)] == ["Hello!", "Let me look.", "Hello!"]
    assert [calls_of(choice) for choice in (said, called, plain)] == [[], [("g", "{}")], []]
    assert [choice["finish_reason"] for choice in (said, called, plain)] == ["stop", "tool_calls", "stop"]
    assert [choice["message"]["content"] for choice in without] == ["Hello!", "Let me look.\n\n{}", "Hello!"]
    assert [choice["finish_reason"] for choice in without] == ["stop"] * 3


async def test_tokens_of_reasoning_are_counted_up_to_the_answer() -> None:
    mesh = FakeMesh(text())
    mesh.answer = f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{ANSWER}"
    before = len(mesh.text._encode(mesh.answer.removesuffix("<|message|>Hello!"), add_special_tokens=False))
    async with served(mesh) as client:
        usage = (await client.chat.completions.create(model=MODEL, messages=HELLO)).usage
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == before
        for call in (CALL, " to=functions.g<|channel|>commentary json<|message|>{}", PREAMBLE):
            mesh.answer = f"{THOUGHT}{NEXT}{call}"
            usage = (await client.chat.completions.create(model=MODEL, messages=HELLO, tools=[G])).usage
            assert usage is not None
            assert usage.completion_tokens_details is not None
            assert usage.completion_tokens_details.reasoning_tokens is not None
            thought = len(mesh.text._encode(f"{THOUGHT}{NEXT}", add_special_tokens=False))
            assert 0 <= usage.completion_tokens_details.reasoning_tokens - thought <= 10
        mesh.answer = ANSWER
        plain = (await client.chat.completions.create(model=MODEL, messages=HELLO)).usage
        assert plain is not None
        assert plain.completion_tokens_details is not None
        assert not plain.completion_tokens_details.reasoning_tokens


async def test_the_other_dialects_show_the_same_parts() -> None:
    mesh = FakeMesh(text(), answer=f"{THOUGHT}{NEXT}{CALL}")
    async with served(mesh) as client, httpx.AsyncClient(base_url=str(client.base_url), timeout=PATIENCE_S) as http:
        tool = {"type": "function", "name": "g"}
        response = (await http.post("responses", json={"model": MODEL, "input": "Hello", "tools": [tool]})).json()
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 99, "tools": [{"name": "g", "input_schema": {}}]}
        message = (await http.post("messages", json=body)).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call"]
    assert response["output"][0]["content"][0]["text"] == "They say hello."
    assert [block["type"] for block in message["content"]] == ["thinking", "tool_use"]
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("tokens_per_delta", [1, 4, 8, 13, 1000])
async def test_blocks_are_in_the_order_in_which_they_were_written(tokens_per_delta: int) -> None:
    """The end of an announcement that came with the beginning of reasoning in one frame was cut off from it."""
    answer = f"{PREAMBLE}{NEXT}{THOUGHT}{NEXT}{THOUGHT}{NEXT}{CALL}"
    mesh = FakeMesh(text(), answer=answer, tokens_per_delta=tokens_per_delta)
    body = {"model": MODEL, "input": "Hello", "tools": [{"type": "function", "name": "g"}], "stream": True}
    async with served(mesh) as client, httpx.AsyncClient(base_url=str(client.base_url), timeout=PATIENCE_S) as http:
        events = (await http.post("responses", json=body)).text
    last = json.loads(events.rstrip().rpartition("data: ")[2])["response"]["output"]
    shown = [(item["type"], item["content"][0]["text"] if "content" in item else item["name"]) for item in last]
    wanted = [("message", "Let me look."), ("reasoning", "They say hello.\n\nThey say hello."), ("function_call", "g")]
    assert shown == (wanted if tokens_per_delta < 1000 else [wanted[1], wanted[0], wanted[2]])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_header_that_was_cut_off_makes_no_call(stream: bool) -> None:
    """A limit within the name gave a call of another tool, whose name is its beginning."""
    mesh = FakeMesh(text(), answer=f"{THOUGHT}{NEXT}{CALL}")
    tokens = mesh.text._encode(mesh.answer, add_special_tokens=False)
    async with served(mesh) as client:
        for limit in range(1, len(tokens)):
            (choice,) = await ask(client, stream=stream, max_completion_tokens=limit)
            assert all(name == "g" for name, _ in calls_of(choice))
        mesh.answer = f"{THOUGHT}{NEXT}{CALL.removesuffix('{}')}<|call|>"
        (choice,) = await ask(client, stream=stream)
    assert (calls_of(choice), choice["finish_reason"]) == ([("g", "{}")], "tool_calls")


async def test_instructions_anywhere_reach_the_model() -> None:
    """The template shows the first system message only."""
    mesh = FakeMesh(text(), answer=ANSWER)
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        *HELLO,
        {"role": "assistant", "content": "Hi."},
        {"role": "system", "content": "Now in French."},
        *HELLO,
    ]
    async with served(mesh) as client:
        await ask(client, stream=False, messages=turns, tools=package.omit)
    prompt = mesh.text.decode(mesh.prompts[0].token_ids, skip=False)
    assert prompt.startswith(
        "medium<|start|>system<|message|>Be brief.\n\nBe kind.\n\nNow in French.<|end|><|start|>user"
    )
    assert prompt.count("<|start|>system") == 1


@pytest.mark.parametrize(("effort", "nearest"), [("none", "low"), ("minimal", "low"), ("xhigh", "high")])
async def test_an_effort_that_the_model_does_not_have_is_the_nearest_one(effort: str, nearest: str) -> None:
    mesh = FakeMesh(text(), answer=ANSWER)
    async with served(mesh) as client:
        await ask(client, stream=False, reasoning_effort=effort, tools=package.omit)
    assert mesh.text.decode(mesh.prompts[0].token_ids, skip=False).startswith(nearest)


async def test_an_empty_message_that_is_continued_is_the_answer(checker: ConstraintChecker) -> None:
    mesh = FakeMesh(text(), answer="{}")
    template = TEMPLATE.replace("+ m.content + '<|end|>' }}{% else", "+ m.content }}{% else")
    mesh.text = TextModel(text()._tokenizer, template, {}, ends=text().ends)
    begun = [*HELLO, {"role": "assistant", "content": ""}]
    async with served(mesh, checker) as client:
        await ask(client, stream=False, messages=begun, response_format=SHAPE, tools=package.omit,
                  extra_body={"continue_final_message": True})  # fmt: skip
    constraint = mesh.prompts[-1].sampling.constraint
    assert constraint is not None
    assert '"final"' not in constraint.text


async def test_calls_and_answers_are_held_to_their_channels(checker: ConstraintChecker) -> None:
    mesh = FakeMesh(text(), answer=f"{THOUGHT}{NEXT}{CALL}")

    async def rules(**fields: Any) -> str | None:
        await ask(client, stream=False, **fields)
        constraint = mesh.prompts[-1].sampling.constraint
        return None if constraint is None else constraint.text

    async with served(mesh, checker) as client:
        assert await rules() is None
        required, named = await rules(tool_choice="required"), await rules(tool_choice=NAMED)
        assert required is not None
        assert named is not None
        assert '"final"' not in required
        assert "other*" in required.replace("(other)*", "other*")
        assert ("call_1" in required, "call_1" in named) == (True, False)
        for fields in ({"tools": [STRICT, G]}, {"response_format": SHAPE}, {"response_format": SHAPE, "tools": [F]}):
            held = await rules(**fields)
            assert held is not None
            assert '"final"' in held
        mesh.answer = "x"
        begun = [*HELLO, {"role": "assistant", "content": "Hello"}]
        more = {"continue_final_message": True}
        held = await rules(messages=begun, response_format=SHAPE, extra_body=more)
        assert held is not None
        assert '"final"' not in held
        for fields in ({"tool_choice": "required"}, {"tools": [STRICT]}):
            with pytest.raises(package.BadRequestError, match="messages of their own"):
                await rules(messages=begun, extra_body=more, **fields)


async def test_earlier_turns_reach_the_template_under_the_names_that_it_reads() -> None:
    mesh = FakeMesh(text(), answer=ANSWER)
    call = {"id": "c", "type": "function", "function": {"name": "g", "arguments": '{"a": 1}'}}
    turns = [
        *HELLO,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [call, {**call, "id": "d"}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "one"},
        {"role": "tool", "tool_call_id": "d", "content": "two"},
    ]
    async with served(mesh) as client:
        await ask(client, stream=False, messages=turns, reasoning_effort="low")
    assert mesh.text.decode(mesh.prompts[0].token_ids, skip=False) == (
        "// f\n// g\nlow<|start|>user<|message|>Hello<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>"
        '<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        "<|start|>tool<|message|>one<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|><|end|>"
        '<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        "<|start|>tool<|message|>two<|end|><|start|>assistant"
    )
