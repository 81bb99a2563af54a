"""gpt-oss's messages, as clients see them and as grammars allow them."""

import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.output.calls import CallDelta, whole_calls
from components.output.formats import REASONING_FORMATS, TOOL_FORMATS
from components.output.grammar import TEXT, CallableTool, Thinking, answer_rule, calls_or, forced_calls
from components.output.harmony import HARMONY_CALLS, HARMONY_MESSAGES, MARKERS
from components.output.plan import OutputPlan
from tests.components.output.reading import TOOLS
from tests.components.output.test_call_grammars import CALLABLE, allows, drawn, new_grammar

THOUGHT = "<|channel|>analysis<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"
ANSWER = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
NEXT = "<|end|><|start|>assistant"
Seen = tuple[str, str, list[tuple[str, str]]]


def seen(text: str, cuts: Iterable[int] = (), *, tools: bool = True, before: str = "") -> Seen:
    """Return reasoning, answer, and calls as (name, arguments)."""
    plan = OutputPlan(
        REASONING_FORMATS["gpt_oss"],
        False,
        TOOL_FORMATS["gpt_oss"] if tools else None,
        TOOLS if tools else {},
        before=before,
    )
    parser = plan.parser()
    parser.begin()
    thought, answer, deltas, at = "", "", list[CallDelta](), 0
    for cut in [*sorted(cuts), len(text)]:
        parsed = parser.feed(text[at:cut])
        thought, answer, deltas, at = thought + parsed.reasoning, answer + parsed.text, [*deltas, *parsed.calls], cut
    parsed = parser.flush()
    thought, answer, deltas = thought + parsed.reasoning, answer + parsed.text, [*deltas, *parsed.calls]
    assert parser.has_thought == bool(thought)
    assert parser.called == bool(deltas) or tools is False
    return thought, answer, [(call.name, call.arguments) for call in whole_calls(deltas)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THOUGHT}Simple.{NEXT}{ANSWER}4, é\n", ("Simple.", "4, é\n", [])),
        (f"{ANSWER}4", ("", "4", [])),
        (f"{THOUGHT} Hm.\n{NEXT}{THOUGHT}Well.{NEXT}{ANSWER}4", ("Hm.\n\n\nWell.", "4", [])),
        (f'{THOUGHT}Look.{NEXT}{CALL}{{"s": "<a>"}}', ("Look.", "", [("f", '{"s": "<a>"}')])),
        (f"{THOUGHT}Look.{NEXT}{PREAMBLE}My plan:\n1. f{NEXT}{CALL}{{}}", ("Look.", "My plan:\n1. f", [("f", "{}")])),
        (f"{PREAMBLE}One{NEXT}{ANSWER}two", ("", "One\n\ntwo", [])),
        (f"{THOUGHT}x{NEXT} to=functions.f<|channel|>commentary json<|message|>{{}}", ("x", "", [("f", "{}")])),
        (" to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}", ("", "", [("f", "{}")])),
        ("<|channel|>commentary to=f<|message|>{}", ("", "", [("f", "{}")])),
        ('<|channel|>analysis to=python code<|message|>print("x")<|call|>', ("", "", [("python", 'print("x")')])),
        (f"{CALL}{{}} <|call|>", ("", "", [("f", "{}")])),
        (f"{CALL}{{'s': 1}}<|call|>", ("", "", [("f", "{'s': 1}")])),
        ("<|channel|>commentary to=user<|message|>Hello", ("", "Hello", [])),
        ("<|channel|>other<|message|>Hello", ("", "Hello", [])),
        ("<|message|>Hello", ("", "Hello", [])),
        ("Hello <|end|>", ("", "Hello ", [])),
        (" to be", ("", " to be", [])),
        (f"{THOUGHT}Cut o", ("Cut o", "", [])),
        (f"{THOUGHT}Cut <|end", ("Cut <|end", "", [])),
        (f"{THOUGHT}x{NEXT}<|channel|>fi", ("x", "", [])),
        (f"{THOUGHT}x{NEXT}<|channel|>commentary to=functions.f", ("x", "", [])),
        (f"{THOUGHT}x{NEXT}<|channel|>commentary to=functions.f<|call|>", ("x", "", [])),
        (f"{THOUGHT}x{NEXT}{CALL}<|call|>", ("x", "", [("f", "{}")])),
        (f"{PREAMBLE}Plan.{NEXT}{ANSWER}", ("", "Plan.", [])),
        (f"<|channel|>analysis<|end|><|start|>assistant{ANSWER}4", ("", "4", [])),
        ("", ("", "", [])),
    ],
)
def test_messages_become_reasoning_text_and_calls_wherever_the_text_is_cut(text: str, expected: Seen) -> None:
    for cuts in ([], range(len(text)), *([cut] for cut in range(1, len(text)))):
        assert seen(text, cuts) == expected


def test_a_call_that_is_cut_off_is_a_beginning() -> None:
    text = f'{CALL}{{"s": "once upon'
    plan = OutputPlan(REASONING_FORMATS["gpt_oss"], False, TOOL_FORMATS["gpt_oss"], TOOLS)
    parser = plan.parser()
    found, last = parser.feed(text), parser.flush()
    assert [call.arguments for call in whole_calls([*found.calls, *last.calls])] == ['{"s": "once upon']
    assert not parser.called
    assert parser.undecided


def test_without_tools_a_call_is_text() -> None:
    assert seen(f"{THOUGHT}x{NEXT}{CALL}{{}}", tools=False) == ("x", "{}", [])


def test_one_call_is_all_if_one_is_wanted() -> None:
    plan = OutputPlan(REASONING_FORMATS["gpt_oss"], False, TOOL_FORMATS["gpt_oss"], TOOLS, single=True)
    parser = plan.parser()
    found = parser.feed(f"{THOUGHT}x{NEXT}{CALL}{{}}{NEXT}{CALL}{{}}")
    assert (found.reasoning, len(whole_calls(found.calls)), parser.done) == ("x", 1, True)


def test_an_answer_that_is_continued_is_the_rest_of_its_message() -> None:
    assert seen(" world", before="Hello") == ("", " world", [])
    assert seen(f" world{NEXT}{CALL}{{}}", before="Hello") == ("", " world", [("f", "{}")])


PIECES = [
    *MARKERS,
    "analysis",
    "final",
    "commentary",
    " to=",
    "functions.",
    "f",
    " ",
    "json",
    "{",
    "}",
    '"',
    "a",
    "é\n",
    "assistant",
]


@settings(deadline=None, max_examples=300)  # the machine may be busy
@given(st.lists(st.sampled_from(PIECES), max_size=24), st.lists(st.integers(0, 200), max_size=8), st.booleans())
def test_no_text_breaks_it_or_depends_on_how_it_is_cut(pieces: list[str], cuts: list[int], tools: bool) -> None:
    text = "".join(pieces)
    plan = OutputPlan(
        REASONING_FORMATS["gpt_oss"], False, TOOL_FORMATS["gpt_oss"] if tools else None, TOOLS if tools else {}
    )
    results = []
    for at in ([], [cut for cut in sorted(cuts) if cut < len(text)]):
        parser, shown = plan.parser(), []
        for start, end in zip([0, *at], [*at, len(text)], strict=True):
            shown.append(parser.feed(text[start:end]))
        shown.append(parser.flush())
        calls = whole_calls([delta for part in shown for delta in part.calls])
        texts = ["".join(part.text for part in shown), "".join(part.reasoning for part in shown)]
        results.append((texts, [(call.name, call.arguments) for call in calls]))
    assert results[0] == results[1]


THINKING = Thinking(HARMONY_MESSAGES.others[0], HARMONY_MESSAGES.end, False, HARMONY_MESSAGES)
REASONED = f"{THOUGHT}so{NEXT}{THOUGHT}well{NEXT}{PREAMBLE}A plan.{NEXT}"


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("before", ["", REASONED])
def test_a_required_call_may_follow_reasoning(before: str, special: bool) -> None:
    rules = forced_calls(new_grammar(special=special), HARMONY_CALLS, CALLABLE, THINKING, single=False)
    call = f'{before}{CALL}{{"s": "a"}}'
    assert allows(rules, call, special=special) == f"{call}✓"
    two = f"{call}{NEXT}{CALL.replace('functions.f', 'functions.g')}{{}}"
    assert allows(rules, two, special=special) == f"{two}✓"
    assert not allows(rules, f"{before}{ANSWER}4", special=special).endswith("✓")
    wrong = f'{before}{CALL}{{"n": 1'
    assert allows(rules, wrong, special=special) == wrong.removesuffix('n": 1')


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("before", ["", REASONED])
def test_with_strict_tools_the_model_answers_or_calls_them(before: str, special: bool) -> None:
    rules = calls_or(new_grammar(special=special), HARMONY_CALLS, CALLABLE, THINKING, TEXT, single=False)
    for text in (f"{before}{ANSWER}Paris, 世界 {{", f'{before}{CALL}{{"s": "a"}}'):
        assert allows(rules, text, special=special) == f"{text}✓"
    unknown = f"{before}{CALL.replace('functions.f', 'functions.h')}"
    assert allows(rules, unknown, special=special) == f"{before}<|channel|>commentary to=functions."


@pytest.mark.parametrize("special", [False, True])
def test_an_answer_in_json_follows_reasoning_in_its_own_channel(special: bool) -> None:
    shape = json.dumps({"type": "object", "properties": {"name": {"type": "integer"}}, "required": ["name"]})
    rule = answer_rule("json_schema", shape)
    rules = calls_or(new_grammar(special=special), HARMONY_CALLS, CALLABLE, THINKING, rule, single=True)
    right = f'{REASONED}{ANSWER}{{"name": 1}}'
    assert allows(rules, right, special=special) == f"{right}✓"
    assert allows(rules, f"{REASONED}{ANSWER}x", special=special) == f"{REASONED}{ANSWER}"
    call = f"{REASONED}{CALL.replace('functions.f', 'functions.g')}{{}}"
    assert allows(rules, call, special=special) == f"{call}✓"
    continued = calls_or(new_grammar(special=special), None, (), None, rule, single=True)
    assert allows(continued, '{"name": 1}', special=special) == '{"name": 1}✓'


@pytest.mark.parametrize("special", [False, True])
def test_what_the_grammar_lets_through_is_read_as_reasoning_and_calls(special: bool) -> None:
    read = 0
    for seed in range(8):
        rules = forced_calls(
            new_grammar(special=special), HARMONY_CALLS, [CallableTool("g", None, True)], THINKING, single=True
        )
        text = drawn(rules, seed, special=special)
        if text is not None:
            assert seen(text)[2] == [("g", "{}")]
            read += 1
    assert read
