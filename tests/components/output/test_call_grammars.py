# the bars in DeepSeek's tokens are wide
"""Each random text of a grammar of calls, drawn through the engine's masks, can be read by its format."""

import json
import random
from functools import cache
from itertools import chain
from typing import Any

import jsonschema  # type: ignore[import-untyped, unused-ignore]
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from components.openai.response_tools import CustomTool
from components.output.calls import whole_calls
from components.output.formats import MISTRAL_NAMED, TOOL_FORMATS
from components.output.grammar import (
    CallableTool,
    CallStyle,
    Grammar,
    Thinking,
    answer_rule,
    calls_or,
    forced_calls,
    strict_calls,
)
from components.output.reader import Reader
from components.output.reasoning import THINK, Reasoning
from components.structured.grammar import start_matcher
from components.structured.mask import GrammarMask
from components.text.byte_letters import byte_letters
from components.wire.sampling import Constraint

END = 256
SPECIAL = [*THINK, *chain.from_iterable(f.tokens for f in TOOL_FORMATS.values())]
F = {
    "type": "object",
    "properties": {
        "s": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "minimum": -50, "maximum": 50},
        "l": {"type": "array", "items": {"$ref": "#/$defs/K"}, "maxItems": 2},
    },
    "required": ["s"],
    "$defs": {"K": {"enum": ["x", "y}", 'z"', "é", None]}},
}
TOOLS = {"f": F, "g": {}}
CALLABLE = [CallableTool("f", F, True), CallableTool("g", None, False)]
STYLES: list[tuple[str, CallStyle]] = [
    *((str(name), found.style) for name, found in TOOL_FORMATS.items() if found.style),
    ("mistral", MISTRAL_NAMED),
]


@cache
def tokenizer(*, special: bool) -> Tokenizer:
    """Tokens are bytes; with `special`, the formats' markers are tokens of their own."""
    made = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(byte_letters())}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|eos|>", *(SPECIAL if special else ())])
    return made


@cache
def vocabulary(*, special: bool) -> LLTokenizer:
    return LLTokenizer(tokenizer(special=special).to_str(), eos_token=[END])


def new_grammar(*, special: bool) -> Grammar:
    vocab = tokenizer(special=True).get_vocab()
    return Grammar({name: vocab[name] for name in SPECIAL} if special else {})


def matcher_of(rules: str, *, special: bool) -> LLMatcher:
    matcher = start_matcher(vocabulary(special=special), Constraint(kind="lark", text=rules))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def drawn(rules: str, seed: int, *, special: bool) -> str | None:
    """Draw a text that the rules allow; None: it has no end."""
    words = np.zeros(-(-vocabulary(special=special).vocab_size // 32), dtype=np.int32)
    mask = GrammarMask(matcher_of(rules, special=special), len(words))
    chance, ids = random.Random(seed), list[int]()
    while len(ids) < 1500:
        mask.fill(words)
        assert mask.fault is None
        (allowed,) = np.nonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        ends = END in allowed
        token = (
            END
            if ends and (len(allowed) == 1 or chance.random() < 0.3)
            else int(chance.choice(list(set(allowed) - {END})))
        )
        if token == END:
            return tokenizer(special=special).decode(ids, skip_special_tokens=False)
        ids.append(token)
        mask.accept(token)
    return None


def allows(rules: str, text: str, *, special: bool) -> str:
    """Return the part of `text` that the rules allow, with a mark if it may end there."""
    ids = tokenizer(special=special).encode(text, add_special_tokens=False).ids
    matcher = matcher_of(rules, special=special)
    taken = matcher.validate_tokens(ids)
    matcher.consume_tokens(ids[:taken])
    shown = tokenizer(special=special).decode(ids[:taken], skip_special_tokens=False)
    return shown + "✓" if taken == len(ids) and matcher.is_accepting() else shown


def parsed(name: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    reader = Reader(TOOL_FORMATS[name].read, TOOLS, lambda: "id")  # type: ignore[index]
    found, last = reader.feed(text), reader.end()
    calls = whole_calls([*found.calls, *last.calls])
    return found.text + last.text, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("name", "style"), STYLES, ids=lambda value: value if isinstance(value, str) else value.head)
def test_whatever_forced_calls_let_through_are_calls(name: str, style: CallStyle, special: bool) -> None:
    several = 0
    for seed in range(10):
        single = seed % 2 == 0
        rules = forced_calls(new_grammar(special=special), style, CALLABLE, None, single=single)
        text = drawn(rules, seed, special=special)
        if text is None:
            continue
        said, calls = parsed(name, text)
        assert said == ""
        assert calls
        assert not single or len(calls) == 1
        several += len(calls) > 1
        for tool, arguments in calls:
            jsonschema.validate(arguments, TOOLS[tool])
            assert tool == "f" or arguments == {}
    assert several


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_may_come_before_what_is_forced(opened: bool, special: bool) -> None:
    style = TOOL_FORMATS["hermes"].style
    assert style is not None
    rules = forced_calls(new_grammar(special=special), style, CALLABLE, Thinking(*THINK, opened), single=True)
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    text = f"{'' if opened else '<think>'}so <tool_cal \n</think>\n\n{call}"
    assert allows(rules, text, special=special) == text + "✓"
    assert allows(rules, call, special=special).endswith("✓") is not opened
    for seed in range(4):
        if (found := drawn(rules, seed, special=special)) is not None:
            reasoning = Reasoning(*THINK, opened=opened)
            assert parsed("hermes", reasoning.feed(found).text)[0] == ""


@pytest.mark.parametrize("special", [False, True])
def test_strict_tools_leave_text_alone_and_hold_calls_to_their_parameters(special: bool) -> None:
    for name, style in STYLES:
        if name == "gpt_oss":  # its calls and answers are messages: test_harmony.py
            continue
        grammar = new_grammar(special=special)
        rules = strict_calls(grammar, style, CALLABLE, None, single=False)
        right = style.before + style.head.replace("{}", "f") + '{"s": "a"}' + style.tail + style.after
        wrong = style.before + style.head.replace("{}", "f") + '{"n": 1'
        unknown = style.before + style.head.replace("{}", "h")
        for text in ("", "Paris, 世界 < [ {", *(("Well, " + right + " and " + right,) if style.marker else (right,))):
            assert allows(rules, text, special=special) == text + "✓", name
            assert parsed(name, text)[1] == [("f", {"s": "a"})] * text.count('"a"')
        assert allows(rules, wrong, special=special) == wrong[: -len('n": 1')]
        assert allows(rules, unknown, special=special) == unknown[: unknown.rindex("h")]


@pytest.mark.parametrize("special", [False, True])
def test_an_answer_in_json_may_replace_calls(special: bool) -> None:
    style = TOOL_FORMATS["hermes"].style
    shape = json.dumps({"type": "object", "properties": {"name": {"type": "integer"}}, "required": ["name"]})
    for kind, text, good, bad in (
        ("json_schema", shape, '{\n "name": 1}', '{"name": '),
        ("regex", r"a/b|\d+", "a/b", "a/"),
        ("lark", 'start: CHOICE\nCHOICE: "yes}" | "no"', "yes}", "yes"),
        ("lark", 'root ::= "yes}" | "no"', "yes}", "yes"),
    ):
        rules = calls_or(
            new_grammar(special=special), style, CALLABLE, Thinking(*THINK, True), answer_rule(kind, text), single=False
        )
        assert allows(rules, f"hm</think>{good}", special=special) == f"hm</think>{good}✓"
        assert allows(rules, f"hm</think>{bad}x", special=special) == f"hm</think>{bad}"
        call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
        assert allows(rules, f"hm</think>{call}", special=special) == f"hm</think>{call}✓"


@pytest.mark.parametrize("special", [False, True])
def test_a_required_input_of_a_custom_tool_matches_its_regex_as_a_whole(special: bool) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": r"get \w+|drop .\d{2}"}
    tool = CustomTool.model_validate({"type": "custom", "name": "q", "format": form}).as_function()
    style = TOOL_FORMATS["hermes"].style
    assert style is not None
    offered = [CallableTool("q", tool["parameters"], False)]
    rules = forced_calls(new_grammar(special=special), style, offered, None, single=True)
    call = '<tool_call>\n{"name": "q", "arguments": {"input": "%s"}}\n</tool_call>'
    for text in ("get a", r"drop \"12"):
        assert allows(rules, call % text, special=special) == call % text + "✓"
    for text, taken in (("forget a", ""), ("drop x123", "drop x12")):
        assert allows(rules, call % text, special=special) == call.partition("%s")[0] + taken
