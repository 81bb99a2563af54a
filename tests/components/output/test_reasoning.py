# ruff: noqa: RUF001  # the bars in DeepSeek's tokens are wide
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.output.calls import CallDelta, whole_calls
from components.output.formats import REASONING_FORMATS, TOOL_FORMATS, ToolParserName
from components.output.plan import OutputPlan
from components.output.reader import Parsed, Reader
from components.output.reasoning import MISTRAL_THINK, THINK, Reasoning


def split(
    text: str, *, opened: bool, cuts: list[int] | range = range(0), marks: tuple[str, str] = THINK
) -> tuple[str, str]:
    reasoning = Reasoning(*marks, opened=opened)
    thought = said = ""
    at = 0
    for cut in [*cuts, len(text)]:
        new = reasoning.feed(text[at:cut])
        thought, said, at = thought + new.reasoning, said + new.text, cut
    last = reasoning.flush()
    return thought + last.reasoning, said + last.text


CASES = [
    ("<think>\nhm\n\nso\n</think>\n\nParis. \n", False, ("hm\n\nso", "Paris. \n")),
    (" \n<think>hm</think>Paris", False, ("hm", "Paris")),
    ("hm\n</think>\n\nParis", True, ("hm", "Paris")),
    ("<think>hm</think>Paris", True, ("hm", "Paris")),
    ("hm </thin k></think>", True, ("hm </thin k>", "")),
    ("hm, cut off </thi", True, ("hm, cut off </thi", "")),
    ("<think>\n\n</think>\n\nParis", False, ("", "Paris")),
    ("Paris <think>not</think>", False, ("", "Paris <think>not</think>")),
    (" \nParis", False, ("", " \nParis")),
    ("<thi", False, ("", "<thi")),
    ("<thi", True, ("<thi", "")),
    ("a</think>b<think>c</think>d", True, ("a", "b<think>c</think>d")),
    ("", False, ("", "")),
    ("", True, ("", "")),
    (" \n", False, ("", " \n")),
    ("</think>", True, ("", "")),
]


@pytest.mark.parametrize(("text", "opened", "expected"), CASES)
def test_reasoning_is_separated_wherever_the_text_is_cut(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert split(text, opened=opened) == expected
    assert split(text, opened=opened, cuts=range(len(text))) == expected
    for cut in range(len(text)):
        assert split(text, opened=opened, cuts=[cut]) == expected


CALL = '<tool_call>\n{"name": "f", "arguments": {"s": "x"}}\n</tool_call>'
WITHIN = [
    (f"I call.\n{CALL}", ("I call.", "", 1)),
    (f"I call.{CALL}\n{CALL}", ("I call.", "", 2)),
    (f"I call.\n{CALL}\n</think>\n\n", ("I call.", "", 1)),
    (f"<think>I call.\n{CALL}\n</think>\n\nDone.", ("I call.", "Done.", 1)),
    (f"I call.\n{CALL} </thi", ("I call.", "</thi", 1)),
    (f"As <tool_call> tags, so:\n{CALL}", ("As <tool_call> tags, so:", "", 1)),
    (f"As <tool_call> tags, so:</think>\n{CALL}", ("As <tool_call> tags, so:", "", 1)),
    ("As <tool_call> tags </tool_call>.", ("As <tool_call> tags </tool_call>.", "", 0)),
    (
        'Like <tool_call>{"name": "other", "arguments": {}}',
        ('Like <tool_call>{"name": "other", "arguments": {}}', "", 0),
    ),
    ('Cut <tool_call>{"name": "f"', ('Cut <tool_call>{"name": "f"', "", 0)),
    ('Cut <tool_call>{"name": "f"</think>b', ('Cut <tool_call>{"name": "f"', "b", 0)),
    ("Cut <tool_", ("Cut <tool_", "", 0)),
]


def calling(text: str, cuts: Iterable[int] = (), *, free: bool = True) -> tuple[str, str, int]:
    """Return reasoning, answer and the number of calls of a model whose prompt ends with `<think>`."""
    plan = OutputPlan(REASONING_FORMATS["qwen3"], True, TOOL_FORMATS["hermes"], {"f": {}}, free=free)
    parser = plan.parser()
    thought = said = ""
    calls: list[CallDelta] = []
    at = 0
    for cut in [*cuts, len(text)]:
        new = parser.feed(text[at:cut])
        thought, said, calls, at = thought + new.reasoning, said + new.text, [*calls, *new.calls], cut
    last = parser.flush()
    return thought + last.reasoning, said + last.text, len(whole_calls([*calls, *last.calls]))


@pytest.mark.parametrize(("text", "expected"), WITHIN)
def test_a_call_within_the_reasoning_ends_it_wherever_the_text_is_cut(
    text: str, expected: tuple[str, str, int]
) -> None:
    """Such a call was shown as reasoning, and an agent got neither an answer nor a call."""
    assert calling(text) == expected
    assert calling(text, range(len(text))) == expected
    for cut in range(len(text)):
        assert calling(text, [cut]) == expected


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "mistral", "deepseek_v3", "deepseek_v31"])
def test_calls_of_each_format_end_the_reasoning(name: ToolParserName) -> None:
    calls = {
        "hermes": CALL,
        "qwen3_coder": "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "glm45": "<tool_call>f</tool_call>",
        "mistral": '[TOOL_CALLS]f[ARGS]{"s": "x"}',
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```",
        "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    }
    parser = OutputPlan(REASONING_FORMATS["qwen3"], True, TOOL_FORMATS[name], {"f": {}}, free=True).parser()
    new, last = parser.feed(f"hm{calls[name]}"), parser.flush()
    assert (new.reasoning + last.reasoning, new.text + last.text) == ("hm", "")
    assert [call.name for call in whole_calls([*new.calls, *last.calls])] == ["f"]


def test_what_may_become_a_call_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was read again with each token: a long one blocked the frontend's event loop for minutes in all."""
    real, read = Reader.feed, []

    def feed(reader: Reader, text: str) -> Parsed:
        read.append(text)
        return real(reader, text)

    monkeypatch.setattr(Reader, "feed", feed)
    begun = '<tool_call>{"arguments": {"s": "' + "x" * 500
    assert calling(begun, range(len(begun))) == (begun, "", 0)
    assert len(read) <= 2 * len(begun)


def test_with_a_constraint_only_the_marker_ends_the_reasoning() -> None:
    assert calling(f"hm {CALL}</think>{CALL}", free=False) == (f"hm {CALL}", "", 1)


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(
        st.sampled_from([CALL, "<tool_call>", '{"name": "f"', ', "arguments": {', "}", "</think>", "<", " ", "a"])
    ),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_no_call_within_the_reasoning_depends_on_how_it_is_cut(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    assert calling(text, sorted(cut for cut in cuts if cut < len(text))) == calling(text)


def test_mistrals_marks_are_marks_too() -> None:
    assert split("[THINK]a[/THINK]b", opened=False, marks=MISTRAL_THINK) == ("a", "b")


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", " ", "\n", "a", "é"]), max_size=12),
    st.booleans(),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_no_text_depends_on_how_it_is_cut(pieces: list[str], opened: bool, cuts: list[int]) -> None:
    text = "".join(pieces)
    found = split(text, opened=opened)
    assert split(text, opened=opened, cuts=sorted(cut for cut in cuts if cut < len(text))) == found
    if "<think>" not in text and not opened:
        assert found == ("", text)
