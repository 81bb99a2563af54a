# ruff: noqa: RUF001  # the bars in DeepSeek's tokens are wide
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.output.formats import TOOL_FORMATS
from tests.components.output.reading import read, read_any_way

HARD = '{"s": "a \\"quoted\\" \\\\ \\u00e9 </tool_call> [TOOL_CALLS] {\\n}", "o": {"ü": [1, -2.5e3, null, [true, {}]]}, "n": 0}'
ONE: dict[str, Callable[[str, str], str]] = {  # how a format writes one call, or one of several
    "hermes": lambda name, args: f'<tool_call>\n{{"name": "{name}", "arguments": {args}}}\n</tool_call>',
    "llama3_json": lambda name, args: f'<|python_tag|>{{"name": "{name}", "parameters": {args}}}',
    "mistral": lambda name, args: f"[TOOL_CALLS]{name}[ARGS]{args}",
    "deepseek_v3": lambda name, args: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{args}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": lambda name, args: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{args}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": lambda name, args: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{args}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
}
MARKED = sorted(ONE)
SEVERAL: list[tuple[str, str]] = [  # ways to write f({}) and g({"a": 1}) in one go
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{}}</tool_call><tool_call>{"name":"g","arguments":{"a": 1}}</tool_call>',
    ),
    (
        "hermes",
        '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"arguments": {"a": 1}, "id": 7, "name": "g"}</tool_call>',
    ),
    (  # Granite 4 writes arguments as a text
        "hermes",
        '<tool_call>{"arguments": "{}", "name": "f"}</tool_call><tool_call>{"name": "g", "arguments": "{\\n\\"a\\": 1}"}',
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}}\n<tool_call>\n{"name": "g", "parameters": {"a": 1}'),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}'),
    ("llama3_json", ' {"type": "function", "name": "f", "parameters": {}};{"name": "g", "arguments": {"a": 1}}\n'),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}'),
    ("llama3_json", '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {"a": 1}}'),
    ("llama3_json", '{"name": "f", "parameters": {}}, {"name": "g", "parameters": {"a": 1}}'),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {"a": 1}}'),
    ("llama3_json", '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {"a": 1}}]'),
    ("json", '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]'),
    ("json", '\n{"name": "f", "arguments": {}} ; {"id": "7", "arguments": {"a": 1}, "name": "g"}'),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}, "id": "abcdefghi"}]',
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{"a": 1}'),
    ("mistral", '[TOOL_CALLS]f{}\n[TOOL_CALLS] g {"a": 1}'),
    (
        "deepseek_v3",
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>\n"
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
    ),
    (
        "deepseek_v31",
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            '<｜tool▁call▁begin｜>g<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
    ),
    (
        "kimi_k2",
        (
            "<|tool_calls_section_begin|> <|tool_call_begin|> functions.f:3 <|tool_call_argument_begin|> {} <|tool_call_end|>"
            '<|tool_call_begin|>functions.g:4<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
        ),
    ),
    (
        "kimi_k2",
        (
            "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>"
            '<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{"a": 1}'
        ),
    ),
    (
        "qwen3_coder",
        (
            "<tool_call>\n<function=f>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=g>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
        ),
    ),
    ("qwen3_coder", "<function=f></function><function=g><parameter=a>1</parameter></function></tool_call>"),
    (
        "glm45",
        "<tool_call>f\n</tool_call>\n<tool_call>g\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    ),
    ("glm45", "<tool_call>f</tool_call><tool_call>g<arg_key>a</arg_key><arg_value>1</tool_call>"),
    (
        "gpt_oss",
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|end|>"
            '<|start|>assistant<|channel|>commentary to=functions.g <|constrain|>json<|message|>{"a": 1}'
        ),
    ),
    (
        "gpt_oss",
        ' to=functions.f<|channel|>commentary json<|message|>{}<|end|><|start|>assistant to=g<|message|>{"a": 1}',
    ),
    ("pythonic", "[f(), g(a=1)]"),
    ("pythonic", " <|python_start|>[ f( ) , g(a = 1)]<|python_end|>\n"),
]
NO_CALLS = [
    "",
    " \n\t",
    "Hello, 世界 😀\n\n",
    "<tool_call>",
    "<tool_call>never mind</tool_call> \n",
    '<tool_call>{"name": "f"',
    '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": NaN}"}</tool_call>',
    '<tool_call>["name"]</tool_call>',
    "a <tool_call",
    "a < b, [TOOL, <|python, <｜tool▁ca, <func",
    "[TOOL_CALLS] [1, 2]",
    "[TOOL_CALLS]",
    "[TOOL_CALLS]f[ARGS] no\n more",
    "<|python_tag|>print('x')",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\nnothing\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>no<|tool_call_end|>",
    "<function=f",
    "<tool_call>\n<function=\n>",
    '{"answer": 42}',
    '{"name": "Paris", "arguments": {}}',
    '{"name": "f"}',
    '[{"name": "Ada"}, {"name": "f"}]',
    "[1, 2] and [f(x)]",
    "[f(x)]",
    "[f(x=y)]",
    "[f(x='a",
]


@pytest.mark.parametrize("name", MARKED)
def test_a_call_is_separated_from_text_around_it_wherever_the_text_is_cut(name: str) -> None:
    found = read_any_way(name, f"Let me see: é\n\n{ONE[name]('f', HARD)}\nThat was it. ")
    assert found.text.split() == ["Let", "me", "see:", "é", "That", "was", "it."]
    assert found.calls == [("f", HARD)]
    assert read_any_way(name, ONE[name]("f", HARD) + "\n") == ("", [("f", HARD)])


@pytest.mark.parametrize(("name", "text"), SEVERAL)
def test_several_calls_are_separated_wherever_the_text_is_cut(name: str, text: str) -> None:
    found = read_any_way(name, text)
    assert found.text == ""
    assert [(tool, json.loads(arguments)) for tool, arguments in found.calls] == [("f", {}), ("g", {"a": 1})]


ELEMENTS: dict[str, str] = {  # a call without arguments of the tool {}
    "qwen3_coder": "<tool_call><function={}></function></tool_call>",
    "glm45": "<tool_call>{}\n</tool_call>",
}


@pytest.mark.parametrize("name", [*MARKED, *ELEMENTS])
def test_a_name_that_no_client_could_send_back_makes_no_call(name: str) -> None:
    """A stored response with it could not be continued: requests with such a name are refused."""
    for length, calls in ((256, 1), (257, 0)):
        tool = "f" * length
        call = ONE[name](tool, "{}") if name in ONE else ELEMENTS[name].format(tool)
        found = read_any_way(name, call)
        assert len(found.calls) == calls
        assert calls or found.text.strip() == call.strip()


@pytest.mark.parametrize(("name", "text"), SEVERAL)
def test_a_single_call_is_all_that_is_read_when_one_is_wanted(name: str, text: str) -> None:
    found = read_any_way(name, text + " more <tool_call>", single=True)
    assert found == ("", [("f", "{}")])


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_comes_back_as_it_was(name: str, text: str) -> None:
    found = read_any_way(name, text)
    assert found.calls or found.text == text  # to another format it may be one
    if name != "qwen3_coder":
        assert found == (text, [])


def test_white_space_around_calls_is_kept_between_two_texts_only() -> None:
    """docs/openai.md said that all of it is removed."""
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read_any_way("hermes", f" {call}\n{call} then ").text == "then"
    assert read_any_way("hermes", f"First {call}\n{call} ").text == "First"
    assert read_any_way("hermes", f"First {call}\n{call} then").text == "First \n then"


def test_arguments_that_stop_being_json_are_kept_as_written() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": \'x\'}}</tool_call> and so on'
    assert read_any_way("hermes", text) == ("and so on", [("f", "{\"a\": 'x'}}")])
    assert read_any_way("mistral", '[TOOL_CALLS]f{"a": nope}[TOOL_CALLS]g{}').calls == [
        ("f", '{"a": nope}'),
        ("g", "{}"),
    ]


@pytest.mark.parametrize("name", MARKED)
def test_arguments_that_are_cut_off_are_a_beginning_of_what_they_would_have_been(name: str) -> None:
    whole = ONE[name]("f", HARD)
    for end in range(whole.index("{", whole.index("f")) + 1, len(whole)):
        found = read(name, whole[:end])
        assert all(HARD.startswith(arguments) for _, arguments in found.calls)
        assert not found.calls or found.text == ""


def test_line_ends_that_a_model_forgot_to_escape_are_escaped() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"s": "a\n\tb\x01"}}</tool_call>'
    ((_, arguments),) = read_any_way("hermes", text).calls
    assert json.loads(arguments) == {"s": "a\n\tb\x01"}


def test_arguments_arrive_before_the_call_is_whole() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"s": "once upon a time'
    assert read("hermes", text).calls == [("f", '{"s": "once upon a time')]
    coder = "<tool_call>\n<function=f>\n<parameter=s>\nonce upon\na time"
    assert read_any_way("qwen3_coder", coder).calls == [("f", '{"s": "once upon\\na time')]
    glm = "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>once upon\na time"
    assert read_any_way("glm45", glm).calls == [("f", '{"s": "once upon\\na time')]


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("s", "5", "5"),
        ("s", 'two\n"lines"\\', 'two\n"lines"\\'),
        ("s", "", ""),
        ("k", "x", "x"),
        ("n", "5", 5),
        ("n", "True", True),
        ("n", "None", None),
        ("n", "1e999", "1e999"),
        ("n", "five", "five"),
        ("o", '{"a": [1, "é"]}', {"a": [1, "é"]}),
        ("o", "{'a': (1, True)}", {"a": [1, True]}),
        ("o", "{'a': {1}}", "{'a': {1}}"),
        ("o", "{'a': [true, null]}", {"a": [True, None]}),
        ("o", '["\\ud83d\\ude00", "\\ud83d"]', ["\U0001f600", "\ufffd"]),
        ("sn", "90210", "90210"),
        ("sn", "3.10", "3.10"),
        ("sn", "'x'", "'x'"),
        ("sn", "null", None),
        ("ns", "true", "true"),
        ("ns", "None", None),
        ("kn", "x", "x"),
        ("si", "5", 5),
        ("ref", "1", "1"),
        ("ref", "none", "none"),
        ("one", "1", "1"),
        ("maybe", "1", "1"),
        ("maybe", "null", None),
        ("deep", "1", "1"),
        ("loop", "1", "1"),
        ("lost", "1", 1),
        ("unknown", "[1]", [1]),
        ("unknown", "\\d", "\\d"),
    ],
)
def test_parameters_in_elements_have_the_types_of_their_schemas(parameter: str, text: str, value: Any) -> None:
    coder = f"<tool_call>\n<function=f>\n<parameter={parameter}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    glm = f"<tool_call>f\n<arg_key>{parameter}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    for name, call in (("qwen3_coder", coder), ("glm45", glm)):
        ((_, arguments),) = read_any_way(name, call).calls
        assert json.loads(arguments) == {parameter: value}


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("f(s='a\\'b)]', n=-1)", {"s": "a'b)]", "n": -1}),
        ('f(o={"a": [None, True, ("x",)]})', {"o": {"a": [None, True, ["x"]]}}),
        ("f(s='\\d')", {"s": "\\d"}),
        (
            "f(t=true, n=null, o=[False, {'false': false}], s='null')",
            {"t": True, "n": None, "o": [False, {"false": False}], "s": "null"},
        ),
        ("f(s='hi \\ud83d\\ude00')", {"s": "hi \U0001f600"}),
        ("f(s='\\ud83d \\ude00', t='\\ud83dé')", {"s": "\ufffd \ufffd", "t": "\ufffdé"}),
    ],
)
def test_calls_in_python_become_json(source: str, arguments: Any) -> None:
    ((_, found),) = read_any_way("pythonic", f"[{source}]").calls
    assert json.loads(found) == arguments


def test_python_that_goes_wrong_after_a_call_is_text_again() -> None:
    assert read_any_way("pythonic", "[f(), g(x)] ") == (", g(x)]", [("f", "{}")])


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_depth_and_length_break_nothing(name: str) -> None:
    for text in ("[" * 5000, '{"a":' * 5000, "[f(" + "-" * 50_000 + "1)]", "1" * 9000):
        for call in (text, *(write("f", '{"a": ' + text) for write in ONE.values())):
            read(name, call, range(0, len(call), 1000))


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "[TOOL_CALLS]",
        "[ARGS]",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<|python_tag|>",
        "[CALL_ID]",
    ),
    *(
        '{"name": "f", "arguments": ',
        '"name"',
        '"f"',
        "f",
        "g(",
        "a=",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "'",
        ",",
        ":",
        ";",
    ),
    *("\\", "\\u00", "1", "-", ".", "e", "true", "null", "\n", " ", "é", "😀", "<", ">", "```json", "</", "function"),
]
LETTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
CUTS = st.lists(st.integers(0, 200), max_size=8)


@settings(deadline=None, max_examples=200)  # the machine may be busy
@given(st.sampled_from(sorted(TOOL_FORMATS)), st.lists(st.sampled_from(PIECES) | LETTERS, max_size=16), CUTS)
def test_no_text_breaks_a_format_or_depends_on_how_it_is_cut(name: str, pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    found = read(name, text, [cut for cut in cuts if cut < len(text)])
    assert found == read(name, text)
    assert found.calls or found.text == text


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | LETTERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LETTERS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(LETTERS, VALUES, max_size=3)


@settings(deadline=None, max_examples=200)  # the machine may be busy
@given(st.sampled_from(MARKED), st.lists(ARGUMENTS, max_size=3), st.booleans(), st.sampled_from([None, 1]), CUTS)
def test_calls_come_back_as_they_were_written(
    name: str, arguments: list[dict[str, Any]], ascii_only: bool, indent: int | None, cuts: list[int]
) -> None:
    written = [json.dumps(given, ensure_ascii=ascii_only, indent=indent) for given in arguments]
    text = "So: " + "\n".join(ONE[name]("f", given) for given in written)
    found = read(name, text, [cut for cut in cuts if cut < len(text)])
    assert found == ("So:" if written else "So: ", [("f", given) for given in written])
