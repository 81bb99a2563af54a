"""A text that continues another one: only new text is reported."""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.output.calls import CallDelta, whole_calls
from components.output.formats import REASONING_FORMATS, TOOL_FORMATS, ToolFormat
from components.output.parser import OutputParser
from components.output.plan import OutputPlan
from components.output.reader import Parsed
from tests.components.output.reading import FORMATS, TOOLS

CALL = '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'


class Told(NamedTuple):
    text: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, str]] = ()
    called: bool = False


def plan(before: str = "", *, name: str = "hermes", opened: bool = False) -> OutputPlan:
    numbers = count()
    tokens = next(found.tokens for found in TOOL_FORMATS.values() if found.name == name)
    tools = ToolFormat(TOOL_FORMATS["json"].name, FORMATS[name], tokens, new_id=lambda: f"id-{next(numbers)}")
    return OutputPlan(REASONING_FORMATS["qwen3"], opened, tools, TOOLS, before=before, free=True)


def told(parser: OutputParser, text: str, cuts: Iterable[int] = ()) -> Told:
    parts: list[Parsed] = []
    at = 0
    parser.begin()
    for cut in [*sorted(cuts), len(text)]:
        parts.append(parser.feed(text[at:cut]))
        at = cut
    parts.append(parser.flush())
    deltas: list[CallDelta] = [delta for part in parts for delta in part.calls]
    return Told(
        "".join(part.text for part in parts),
        "".join(part.reasoning for part in parts),
        tuple((call.name, call.arguments) for call in whole_calls(deltas)),
        parser.called,
    )


@pytest.mark.parametrize(
    ("before", "rest", "expected"),
    [
        ("Paris is", " the capital.", Told(" the capital.")),
        ("Paris ", "is it. ", Told("is it. ")),
        ("Paris", "", Told()),
        ("Paris <tool", "box", Told("box")),
        ("Paris <tool", f"{CALL[5:]}", Told("", "", (("f", '{"n": 1}'),), called=True)),
        ("Paris. ", CALL, Told("", "", (("f", '{"n": 1}'),), called=True)),
        (CALL, " That was it.", Told("That was it.")),
        (CALL, CALL, Told("", "", (("f", '{"n": 1}'),), called=True)),
        (CALL[:30], CALL[30:], Told("", "", (("f", '{"n": 1}'),), called=True)),
        (CALL[:-15], f"{CALL[-15:]}So.", Told("So.", "", (("f", '{"n": 1}'),), called=True)),
        (CALL + CALL[:-15], "", Told("", "", (("f", '{"n": '),))),
        ("<think>hm ", "so</think>Paris", Told("Paris", "so")),
        ("<think>hm</thi", "nk>Paris", Told("Paris")),
        ("<think>hm</thi", "s", Told("", "s")),
        ("<think>", "\nhm", Told("", "hm")),
        ("<thi", "nk>hm</think>a", Told("a", "hm")),
        ("<thi", "s", Told("s")),
        ("<think>hm</think>\n\n", "\nParis", Told("Paris")),
        ("Paris", "<think>no</think>", Told("<think>no</think>")),
        # The first characters were lost.
        ("<tool_call>", f"{CALL[11:]}<b>now</b>", Told("<b>now</b>", "", (("f", '{"n": 1}'),), called=True)),
        (CALL[:-4], f"{CALL[-4:]}<b>now</b>", Told("<b>now</b>", "", (), called=False)),
        ("<think>hm</thi", "nk><b>Paris</b>", Told("<b>Paris</b>")),
        ("<thi", "nk><b>hm</think>a", Told("a", "<b>hm")),
    ],
)
def test_only_new_text_is_sent_wherever_the_rest_is_cut(before: str, rest: str, expected: Told) -> None:
    for cuts in ([], range(len(rest)), *([cut] for cut in range(len(rest)))):
        assert told(plan(before).parser(), rest, cuts) == expected, (before, rest, cuts)


def test_text_after_a_call_of_mistrals_is_new() -> None:
    """A bracket after the call was read as the one before it, if both came at once."""
    rest = 'f{"n": 1}[ARGS]'
    expected = Told("[ARGS]", "", (("ff", '{"n": 1}'),), called=True)
    for cuts in ([], range(len(rest)), *([cut] for cut in range(len(rest)))):
        assert told(plan("[TOOL_CALLS]f", name="mistral").parser(), rest, cuts) == expected, cuts


def test_calls_that_were_whole_before_do_not_make_the_rest_a_call() -> None:
    parser = plan(CALL).parser()
    parser.begin()
    parser.feed(" Well.")
    assert not parser.called


@settings(deadline=None)  # the machine may be busy
@given(
    st.sampled_from(["hermes", "llama3_json", "pythonic", "json"]),
    st.lists(
        st.sampled_from(
            [
                "<think>",
                "</think>",
                CALL,
                "<tool_call>",
                '{"name": "f", ',
                '"arguments": {',
                "}}",
                "[f(n=1",
                ")]",
                *"< \na",
            ]
        ),
        max_size=10,
    ),
    st.booleans(),
    st.integers(0, 200),
    st.lists(st.integers(0, 80), max_size=4),
)
def test_what_was_there_and_what_is_new_make_the_whole(
    name: str, pieces: list[str], opened: bool, at: int, cuts: list[int]
) -> None:
    text = "".join(pieces)
    before, rest = text[: at % (len(text) + 1)], text[at % (len(text) + 1) :]
    whole = told(plan(name=name, opened=opened).parser(), text)
    new = told(plan(before, name=name, opened=opened).parser(), rest, [cut for cut in cuts if cut < len(rest)])
    assert told(plan(before, name=name, opened=opened).parser(reports_before=True), rest) == whole
    first = plan(name=name, opened=opened).parser()
    shown = first.feed(before)
    assert whole.calls[len(whole.calls) - len(new.calls) :] == new.calls
    for all_of_it, early, late in (
        (whole.text, shown.text, new.text),
        (whole.reasoning, shown.reasoning, new.reasoning),
    ):
        assert all_of_it.startswith(early)
        assert all_of_it.endswith(late)
        assert first.held.startswith(all_of_it[len(early) : len(all_of_it) - len(late)])
