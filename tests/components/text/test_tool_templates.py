# ruff: noqa: RUF001  # the bars in DeepSeek's tokens are wide
from typing import Any

import pytest

from components.errors import Rejected
from components.output.formats import FormatOptions, OutputFormats
from components.output.template_names import variables_of
from components.text.chat_template import template_variables
from components.text.tokenizer import TextModel
from tests.components.text.tiny_model import TEMPLATE, tiny_text_model, tiny_tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "é", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": "ü"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Well.", "tool_calls": [CALL, {**CALL, "id": "bbbbbbbbb"}]},
    {"role": "tool", "content": "1", "tool_call_id": "abcdefghi", "name": "f"},
    {"role": "tool", "content": "2", "tool_call_id": "bbbbbbbbb", "name": "f"},
    {"role": "user", "content": "So?"},
]
NATIVE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
)
AS_TEXT = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<｜tool▁calls▁begin｜>' + c['function']['arguments'] }}{% endfor %}{% endfor %}{{ tools or '' }}"
)
AS_OBJECT = (  # as in Qwen3-Coder's
    "{{ tools or '' }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}:"
    "{% for name, value in c.function.arguments|items %}{{ name }}={{ value }};{% endfor %}{% endfor %}{% endfor %}"
)


def test_a_template_that_knows_tools_is_given_them_as_they_are() -> None:
    shown = tiny_text_model(NATIVE).render(TALK, [TOOL])
    assert '"description": "é"' in shown
    assert shown.endswith("[assistant]Well.<tool_call>fü<tool_call>fü[tool]1[tool]2[user]So?")


def test_a_template_that_puts_texts_together_is_given_arguments_as_text() -> None:
    assert '<｜tool▁calls▁begin｜>{"a": "ü"}' in tiny_text_model(AS_TEXT).render(TALK, [TOOL])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"a": "ü"}, "a=ü;"),
        ('{"a": "ü", "b": "cut o', "a=ü;b=cut o;"),
        ('{"a": "ü", "b":', "a=ü;"),
        ("{'a': 1}", ""),
        ('["ü"]', ""),
        ("", ""),
    ],
)
def test_a_template_that_needs_objects_is_given_what_can_be_read_of_arguments_that_are_not_json(
    arguments: object, shown: str
) -> None:
    """After a call that `max_tokens` had cut off, each request of the conversation was a 400."""
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    talk = [TALK[1], {"role": "assistant", "content": "", "tool_calls": [call]}, TALK[3]]
    assert tiny_text_model(AS_OBJECT).render(talk, [TOOL]).endswith(f"<tool_call>f:{shown}1")


def test_a_template_that_shows_any_arguments_is_given_those_that_are_not_json_as_they_are() -> None:
    call = {**CALL, "function": {"name": "f", "arguments": '{"a": "cut o'}}
    talk = [TALK[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    either = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert tiny_text_model(either + "{{ tools or '' }}").render(talk) == '{"a": "cut o'


def test_a_template_for_tools_is_used_with_tools_alone() -> None:
    text = TextModel(tiny_tokenizer(), TEMPLATE, {}, tool_template="{{ tools | length }} of <tool_call>")
    assert text.render(TALK[:2], [TOOL]) == "1 of <tool_call>"
    assert "Be brief." in text.render(TALK[:2])


def test_a_template_that_knows_no_tools_is_given_them_in_words() -> None:
    text = tiny_text_model()
    assert text.formats.instructed
    shown = text.render(TALK, [TOOL])
    system, user, assistant, answers, so, _ = shown.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\nYou can call functions")
    assert '{"name": "f", "description": "é", "parameters": ' in system
    assert user == "user\nHello<|im_end|>\n"
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>'
    assert assistant == f"assistant\nWell.\n{call}\n{call}<|im_end|>\n"
    both = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert answers == f"user\n{both}<|im_end|>\n"
    assert so == "user\nSo?<|im_end|>\n"
    assert text.render([{"role": "user", "content": "Hello"}], [TOOL]).startswith("<|im_start|>system\nYou can call")


def test_earlier_calls_are_shown_though_no_tool_is_offered() -> None:
    shown = tiny_text_model().render(TALK)
    assert "<tool_call>" in shown
    assert "You can call" not in shown


@pytest.mark.parametrize(
    ("template", "name", "reasoning"),
    [
        (TEMPLATE, "hermes", None),
        (NATIVE, "hermes", None),
        ("{{ tools }}<tool_call>\n<function=x>", "qwen3_coder", None),
        ("{{ tools }}<tool_call>f<arg_key>a</arg_key> <think>", "glm45", "qwen3"),
        ("{{ tools }}<tool_call> <think>", "hermes", "qwen3"),
        ("{{ tools }}<|python_tag|>", "llama3_json", None),
        ('{{ tools }}{"name": function name, "parameters": ', "llama3_json", None),
        ("{{ tools }}[func_name1(params_name1=x)] ipython", "pythonic", None),
        ("{{ tools }}[TOOL_CALLS]", "mistral", None),
        ("{{ tools }}[TOOL_CALLS][ARGS][THINK]", "mistral", "mistral"),
        ("{{ tools }}<｜tool▁calls▁begin｜> ```json </think>", "deepseek_v3", "qwen3"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek_v31", None),
        ("{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|> <think>", "kimi_k2", "qwen3"),
        ("{{ tools }}<|channel|>analysis<|message|>", "gpt_oss", "gpt_oss"),
        ("{{ tools }} in no format that we know", "hermes", None),
    ],
)
def test_formats_are_those_that_the_template_shows(template: str, name: str, reasoning: str | None) -> None:
    found = OutputFormats.of(template, FormatOptions())
    assert found.tools is not None
    assert found.tools.name == name
    assert (found.reasoning and found.reasoning.name) == reasoning
    assert found.instructed == ("tools" not in template)


def test_kimis_template_gets_the_names_of_calls_in_their_ids() -> None:
    """It shows a call and its result by the id alone. A client's own ids hid the names from the model."""
    template = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}<|tool_call_begin|>{{ call.id }}"
        "<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}{% endfor %}"
        "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}: {{ m.content }} {% endif %}{% endfor %}{{ tools or '' }}"
    )

    def turn(*calls: tuple[str, str]) -> list[dict[str, Any]]:
        made = [{"id": key, "type": "function", "function": {"name": name, "arguments": {}}} for key, name in calls]
        results = [{"role": "tool", "content": name, "tool_call_id": key} for key, name in reversed(calls)]
        return [{"role": "assistant", "content": "", "tool_calls": made}, *results]

    shown = tiny_text_model(template).render([*turn(("call_9", "f"), ("call_8", "g")), *turn(("call_9", "f"))])
    names = [part.split("<")[0].split(":")[:2] for part in shown.split("<|tool_call_begin|>")[1:]]
    assert names == [["functions.f", "0"], ["functions.g", "1"], ["functions.f", "2"]]
    results = [part.split(": ")[0] for part in shown.split("## Return of ")[1:]]
    assert results == ["functions.g:1", "functions.f:0", "functions.f:2"]


def test_flags_go_over_what_the_template_shows() -> None:
    options = FormatOptions("template", "llama3_json", "deepseek_r1")
    found = OutputFormats.of(NATIVE, options)
    assert found.tools is not None
    assert found.reasoning is not None
    assert (found.tools.name, found.reasoning.name, found.instructed) == ("llama3_json", "deepseek_r1", False)
    assert OutputFormats.of("<think>", FormatOptions(reasoning_parser="none")).reasoning is None
    assert OutputFormats.of(NATIVE, FormatOptions("hermes")).instructed
    assert OutputFormats.of(TEMPLATE, FormatOptions("template")).tools is None
    with pytest.raises(ValueError, match="--tool-parser mistral"):
        OutputFormats.of(TEMPLATE, FormatOptions(tool_parser="mistral"))


CHANNELS = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
    "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('either') }}{% endif %}"
    "{% if m.tool_calls and m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}{% endif %}"
    "{% if m.role != 'assistant' or not m.tool_calls %}({{ m.role }}){{ m.content }}{% endif %}"
    "{% if m.tool_calls %}<to={{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments.a }}>{% endif %}"
    "{% endfor %}"
)


def test_gpt_oss_is_shown_one_call_a_turn_each_with_its_result_and_earlier_reasoning() -> None:
    """Its template shows the first call of a turn only, and refuses reasoning and text in a turn with a call."""
    system, user, assistant, one, two, so = TALK
    talk = [system, user, {**assistant, "reasoning_content": "Hm."}, two, one, so]
    shown = tiny_text_model(CHANNELS).render(talk, [TOOL])
    assert shown == (
        "f(system)Be brief.(user)Hello<|channel|>analysis<|message|>Hm.\n\nWell.<to=fü>(tool)1<to=fü>(tool)2(user)So?"
    )
    strange = {**one, "tool_call_id": "unknown"}
    assert (
        tiny_text_model(CHANNELS)
        .render([user, {**assistant, "content": ""}, strange])
        .endswith("<to=fü><to=fü>(tool)1")
    )


def test_defaults_that_gpt_osss_template_joins_to_texts_are_texts() -> None:
    shown = (
        "{{ tools[0].function.parameters.properties.k.default ~ tools[0].function.parameters.properties.n.default }}"
    )
    properties = {"k": {"enum": [1, None], "default": None}, "n": {"type": "integer", "default": 5}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    text = tiny_text_model("<|channel|><|message|>" + shown)
    assert text.render(TALK[:2], [tool]) == "<|channel|><|message|>null5"
    assert "description" not in tool["function"]


def test_the_format_gpt_oss_is_used_for_calls_and_reasoning_or_for_neither() -> None:
    without_tools = "<|channel|>final<|message|>"
    found = OutputFormats.of(without_tools, FormatOptions())
    assert (found.tools, found.instructed, found.reasoning and found.reasoning.name) == (None, False, "gpt_oss")
    both = OutputFormats.of("{{ tools }}", FormatOptions("auto", "gpt_oss", "gpt_oss"))
    assert (both.tools and both.tools.name, both.reasoning and both.reasoning.name) == ("gpt_oss", "gpt_oss")
    for options in (
        FormatOptions(tool_parser="hermes"),
        FormatOptions(reasoning_parser="none"),
        FormatOptions(reasoning_parser="qwen3"),
        FormatOptions("hermes"),
    ):
        with pytest.raises(ValueError, match="for both reasoning and calls"):
            OutputFormats.of(CHANNELS, options)
    with pytest.raises(ValueError, match="for both reasoning and calls"):
        OutputFormats.of(NATIVE, FormatOptions(tool_parser="gpt_oss"))


ON_OFF, EFFORT, NEITHER = {"enable_thinking"}, {"reasoning_effort"}, set[str]()


@pytest.mark.parametrize(
    ("known", "effort", "given", "variables"),
    [
        (NEITHER, None, {}, {}),
        (ON_OFF, "none", {}, {"enable_thinking": False}),
        (ON_OFF, "medium", {}, {"enable_thinking": True}),
        (ON_OFF, None, {"enable_thinking": False}, {"enable_thinking": False}),
        (ON_OFF, "none", {"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking"}, "medium", {}, {"thinking": True}),
        (EFFORT, "high", {}, {"reasoning_effort": "high"}),
        (EFFORT | ON_OFF, "none", {}, {"enable_thinking": False}),
        (EFFORT | ON_OFF, "low", {}, {"reasoning_effort": "low"}),
    ],
)
def test_reasoning_is_set_as_the_template_can(
    known: set[str], effort: str | None, given: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert template_variables(effort, given, known.__contains__) == variables


@pytest.mark.parametrize(
    ("known", "effort", "given", "param"),
    [
        (ON_OFF, "none", {"enable_thinking": True}, "reasoning_effort"),
        (ON_OFF, "high", {"enable_thinking": False}, "reasoning_effort"),
        (NEITHER, None, {"enable_thinking": False}, "chat_template_kwargs.enable_thinking"),
        (ON_OFF, None, {"enable_thinking": "no"}, "chat_template_kwargs.enable_thinking"),
        ({"bos_token"}, None, {"bos_token": "x"}, "chat_template_kwargs.bos_token"),
        (NEITHER, None, {"messages": []}, "chat_template_kwargs.messages"),
    ],
)
def test_a_variable_that_has_no_effect_or_contradicts_the_effort_is_refused(
    known: set[str], effort: str | None, given: dict[str, Any], param: str
) -> None:
    with pytest.raises(Rejected) as caught:
        template_variables(effort, given, known.__contains__)
    assert caught.value.fields["param"] == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("known", "efforts", "effort", "variables"),
    [
        (NEITHER, (), "none", {}),
        (NEITHER, (), "high", {}),
        (ON_OFF, (), "max", {"enable_thinking": True}),
        (ON_OFF, (), "low", {"enable_thinking": True}),
        (ON_OFF, (), "minimal", {"enable_thinking": False}),
        (EFFORT, (), "xhigh", {"reasoning_effort": "xhigh"}),
        (EFFORT, ("low", "medium", "high"), "low", {"reasoning_effort": "low"}),
        (EFFORT, ("low", "medium", "high"), "max", {"reasoning_effort": "high"}),
        (EFFORT, ("low", "medium", "high"), "minimal", {"reasoning_effort": "low"}),
        (EFFORT, ("low", "medium", "high"), "none", {"reasoning_effort": "low"}),
    ],
)
def test_an_effort_becomes_the_nearest_that_the_model_has(
    known: set[str], efforts: tuple[str, ...], effort: str, variables: dict[str, Any]
) -> None:
    """Agents send the effort of another model, and were refused by those that do not have it."""
    assert template_variables(effort, {}, known.__contains__, efforts) == variables


def test_special_tokens_that_a_format_is_made_of_are_shown() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "[OTHER]"])
    tokenizer.add_tokens(["<think>"])
    text = TextModel(tokenizer, TEMPLATE)
    ids = tokenizer.encode("é[TOOL_CALLS]f[OTHER]<think><|im_end|>", add_special_tokens=False).ids
    assert text.special_ids(["[TOOL_CALLS]", "<think>", "[NONE]"]) == {tokenizer.token_to_id("[TOOL_CALLS]")}
    assert set(text.marker_ids(["[TOOL_CALLS]", "<think>", "[NONE]"])) == {"[TOOL_CALLS]", "<think>"}
    assert text.detokenizer().feed(ids) == "éf<think>"
    shown = text.detokenizer((), text.special_ids(["[TOOL_CALLS]"]))
    assert "".join(shown.feed([token]) for token in ids) + shown.flush() == "é[TOOL_CALLS]f<think>"
    assert text.ends_with(tokenizer.encode("a<think>\n\n").ids, "<think>")


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %} enable_thinking", {"tools"}),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", {"tools"}),
        ("{% if c is defined %}{% set tools = c %}{% endif %}{{ tools }}{% break %}", None),
        ("{% for m in messages %}{% if m %}{% continue %}{% endif %}{% endfor %}", {"messages"}),
        ("{% generation %}{{ tools }}{% endgeneration %}", None),
    ],
)
def test_the_variables_of_a_template_are_those_it_asks_for(template: str, names: set[str] | None) -> None:
    found = variables_of(template)
    assert found == names if names is not None else "tools" in found
