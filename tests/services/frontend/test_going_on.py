"""A turn that goes on (`continue_final_message`), of a model that reasons and calls tools."""

from threading import current_thread, main_thread
from typing import Any

import openai as package
import pytest
from tokenizers import Tokenizer, decoders, models

from components.output.formats import FormatOptions
from components.output.parser import ContinuingParser
from components.output.reader import Parsed
from components.structured.checker import ConstraintChecker
from components.text.tokenizer import INLINE_CHARS, TextModel
from components.wire.sampling import Constraint
from services.frontend.ports import ServedModel
from tests.components.text.tiny_model import TEMPLATE
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.services.frontend.test_tool_calls import HELLO, SHAPE, STRICT, THINKS, ask, calls_of, model, served

pytestmark = pytest.mark.anyio
R1 = FormatOptions(reasoning_parser="deepseek_r1")
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def going_on(said: str, *, echo: bool = False, **fields: Any) -> dict[str, Any]:
    begun = [*HELLO, {"role": "assistant", "content": said}]
    return {"messages": begun, "extra_body": {"continue_final_message": True, "echo": echo, **fields}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(
    ("begun", "answer", "new", "whole"),  # content and reasoning
    [
        ("Paris", " is it.", (" is it.", None), ("Paris is it.", None)),
        ("Paris ", "is it.", ("is it.", None), ("Paris is it.", None)),
        ("<think>\nhm, ", "so</think>\n\nParis", ("Paris", "so"), ("Paris", "hm, so")),
        ("<think>hm</think>\n\nParis", " is it.", (" is it.", None), ("Paris is it.", "hm")),
        ("hm</think>Paris", " is it.", (" is it.", None), ("Paris is it.", "hm")),
        ("So:", f" {CALL}", (None, None), ("So:", None)),
    ],
)
async def test_the_answer_begins_where_the_text_has_led_to(
    begun: str, answer: str, new: tuple[str | None, ...], whole: tuple[str | None, ...], echo: bool, stream: bool
) -> None:
    """A format that reasons by default took all of a continued answer for reasoning."""
    mesh = FakeMesh(model(TEMPLATE, R1), answer=answer)
    async with served(mesh) as client:
        (choice,) = await ask(client, stream=stream, **going_on(begun, echo=echo))
    assert mesh.text.decode(mesh.prompts[0].token_ids).endswith(begun)
    message = choice["message"]
    assert (message["content"], message.get("reasoning_content")) == (whole if echo else new)
    calls = [("f", '{"a": 1}')] if CALL in answer else []
    assert (calls_of(choice), choice["finish_reason"]) == (calls, "tool_calls" if calls else "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
async def test_a_call_that_goes_on_is_told_whole_and_those_before_it_are_not_told_again(
    stream: bool, echo: bool
) -> None:
    mesh = FakeMesh(model(), answer=' 2}}</tool_call> <tool_call>{"name": "g", "arguments": {}}</tool_call>')
    begun = f'So: {CALL}<tool_call>{{"name": "f", "arguments": {{"a":'
    async with served(mesh) as client:
        (choice,) = await ask(client, stream=stream, **going_on(begun, echo=echo))
    assert calls_of(choice) == [("f", '{"a": 1}')] * echo + [("f", '{"a": 2}'), ("g", "{}")]
    assert choice["message"]["content"] == ("So:" if echo else None)


async def test_what_the_answer_is_held_to_begins_where_reasoning_does_not_go_on(checker: ConstraintChecker) -> None:
    mesh = FakeMesh(model(THINKS), answer="{}")
    async with served(mesh, checker) as client:
        for begun in ("<think>hm", "<think>hm</think>\n", "So: "):
            await ask(client, stream=False, response_format=SHAPE, tools=package.omit, **going_on(begun))
    inside, behind, answering = (prompt.sampling.constraint for prompt in mesh.prompts)
    assert inside is not None
    assert inside.text.endswith("start: thought SPACES answer")
    assert behind == answering == Constraint(kind="json_schema", text='{"type":"object"}')


@pytest.mark.parametrize(
    ("parser", "begun", "fields"),
    [
        ("hermes", CALL[:30], {"tool_choice": "required"}),
        ("hermes", CALL[:40], {"tool_choice": "required"}),
        ("hermes", "Let me see <tool_c", {"tools": [STRICT]}),
        ("hermes", CALL[:40], {"response_format": SHAPE}),
        ("hermes", CALL, {"parallel_tool_calls": False}),
        ("llama3_json", "Let me see.", {"tool_choice": "required"}),
        ("llama3_json", "Let me see.", {"tools": [STRICT]}),
        ("pythonic", "Let me see.", {"tool_choice": "required"}),
    ],
)
async def test_what_cannot_follow_the_text_is_refused(
    checker: ConstraintChecker, parser: Any, begun: str, fields: dict[str, Any]
) -> None:
    mesh = FakeMesh(model(TEMPLATE + "{{ tools }}", FormatOptions(tool_parser=parser)))
    async with served(mesh, checker) as client:
        with pytest.raises(package.BadRequestError, match="continue_final_message") as caught:
            await ask(client, stream=False, **going_on(begun), **fields)
        assert caught.value.param == "continue_final_message"
        assert not mesh.prompts
        await ask(client, stream=False, **going_on("Let me see."))


async def test_a_call_that_is_required_may_follow_what_was_said(checker: ConstraintChecker) -> None:
    mesh = FakeMesh(model(), answer=CALL)
    async with served(mesh, checker) as client:
        (choice,) = await ask(client, stream=False, tool_choice="required", **going_on("Let me see. "))
    assert (choice["message"]["content"], calls_of(choice)) == (None, [("f", '{"a": 1}')])


async def test_a_long_text_is_read_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[bool] = []
    begin = ContinuingParser.begin

    def seen(self: ContinuingParser) -> Parsed:
        readers.append(current_thread() is main_thread())
        return begin(self)

    monkeypatch.setattr(ContinuingParser, "begin", seen)
    mesh = FakeMesh(model(), answer="So.")
    async with served(mesh) as client:
        for words, on_the_loop in ((1, True), (INLINE_CHARS, False)):
            mesh.served = [ServedModel(MODEL, 2**16, 1)]
            readers.clear()
            await ask(client, stream=False, n=2, **going_on("a " * words))
            assert readers == [on_the_loop] * 3  # for the request, and for each choice


async def test_a_message_with_calls_does_not_go_on() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    begun = [*HELLO, {"role": "assistant", "content": "So:", "tool_calls": [call]}]
    mesh = FakeMesh(model())
    async with served(mesh) as client:
        with pytest.raises(package.BadRequestError) as caught:
            await ask(client, stream=False, messages=begun, extra_body={"continue_final_message": True})
    assert caught.value.param == "continue_final_message"


def test_where_marks_are_special_tokens_a_first_word_keeps_its_space() -> None:
    words = Tokenizer(models.WordLevel({"▁is": 0, "▁Paris": 1, "<unk>": 2}, unk_token="<unk>"))
    words.decoder = decoders.Metaspace()
    words.add_special_tokens(["<call>", "<end>"])
    text = TextModel(words, TEMPLATE)
    mark, end = (words.token_to_id(name) for name in ("<call>", "<end>"))
    assert text.detokenizer([0, end, 1], {mark}).feed([end, 1, mark]) == " Paris<call>"
    assert text.detokenizer([], {mark}).feed([1, mark]) == "Paris<call>"
