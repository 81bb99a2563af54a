"""Formats of tool calls and reasoning by name, and by chat template."""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, Self
from uuid import uuid4

from components.output.glm import KEY, KEY_END, VALUE, VALUE_END, glm
from components.output.grammar import CallStyle, MessageStyle
from components.output.harmony import (
    CHANNEL,
    HARMONY_ANSWERS,
    HARMONY_CALLS,
    HARMONY_MESSAGES,
    MARKERS,
    MESSAGE,
    harmony,
)
from components.output.json_calls import (
    ARGS,
    CALL_ID,
    HERMES,
    PYTHON_TAG,
    TOOL_CALLS,
    hermes,
    llama3_json,
    mistral,
    plain_json,
)
from components.output.marked_calls import DEEPSEEK, KIMI, Markers, deepseek, kimi, kimi_id
from components.output.pythonic import END, START, pythonic
from components.output.qwen3_coder import FUNCTION, qwen3_coder
from components.output.reader import Format
from components.output.reasoning import MISTRAL_THINK, THINK
from components.output.template_names import variables_of

ToolParserName = Literal[
    "hermes",
    "llama3_json",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "qwen3_coder",
    "glm45",
    "pythonic",
    "gpt_oss",
    "json",
]
ReasoningParserName = Literal["qwen3", "deepseek_r1", "mistral", "gpt_oss", "none"]


def call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


def mistral_id() -> str:
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: ToolParserName
    read: Format
    tokens: tuple[str, ...] = ()  # its markers
    style: CallStyle | None = None  # for grammars; None: calls are plain JSON
    new_id: Callable[[], str] = call_id


def _marked(markers: Markers, head: str, end: str = "", between: str = "") -> CallStyle:
    return CallStyle(
        markers.call + head, end + markers.call_end, between, markers.calls, markers.calls_end, marker=markers.calls
    )


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: ReasoningParserName
    begin: str
    end: str
    always: bool = False  # the model reasons unless the prompt prevents it; it may omit `begin`
    messages: MessageStyle | None = None  # if set, `begin` and `end` are those of one message
    read: Format | None = None  # reads the whole answer, with its calls
    special: tuple[str, ...] = ()  # markers, if there are more than `begin` and `end`
    answers: tuple[str, ...] = ()  # beginnings of an answer or a call; (): it begins after `end`
    efforts: tuple[str, ...] = ()  # the model's; (): any

    @property
    def tokens(self) -> tuple[str, ...]:
        """All markers. The detokenizer must output the special tokens among them."""
        return self.special or (self.begin, self.end)

    @property
    def over(self) -> tuple[str, ...]:
        """The markers that end the reasoning."""
        return self.answers or (self.end,)


_MISTRAL: Final = (TOOL_CALLS, ARGS, CALL_ID)
# since version 11 of Mistral's tokenizer
MISTRAL_NAMED: Final = CallStyle(TOOL_CALLS + "{}" + ARGS, "", "", marker=TOOL_CALLS)
PLAIN_JSON: Final = ToolFormat(
    "json", plain_json, style=CallStyle('{"name": "{}", "arguments": ', "}", ", ", before="[", after="]")
)
TOOL_FORMATS: Final[dict[ToolParserName, ToolFormat]] = {
    f.name: f
    for f in (
        ToolFormat(
            "hermes",
            hermes,
            HERMES,
            CallStyle(HERMES[0] + '\n{"name": "{}", "arguments": ', "}\n" + HERMES[1], "\n", marker=HERMES[0]),
        ),
        ToolFormat("llama3_json", llama3_json, (PYTHON_TAG,), CallStyle('{"name": "{}", "parameters": ', "}", "; ")),
        ToolFormat(
            "mistral",
            mistral,
            _MISTRAL,
            CallStyle('{"name": "{}", "arguments": ', "}", ", ", TOOL_CALLS + " [", "]", marker=TOOL_CALLS),
            mistral_id,
        ),
        ToolFormat(
            "deepseek_v3",
            deepseek,
            DEEPSEEK,
            _marked(DEEPSEEK, f"function{DEEPSEEK.separator}{{}}\n```json\n", "\n```", between="\n"),
        ),
        ToolFormat("deepseek_v31", deepseek, DEEPSEEK, _marked(DEEPSEEK, "{}" + DEEPSEEK.separator)),
        ToolFormat("kimi_k2", kimi, KIMI, _marked(KIMI, kimi_id("{}", 0) + KIMI.separator)),
        ToolFormat("qwen3_coder", qwen3_coder, HERMES),
        ToolFormat("glm45", glm, (*HERMES, KEY, KEY_END, VALUE, VALUE_END)),
        ToolFormat("pythonic", pythonic, (START, END)),
        ToolFormat("gpt_oss", harmony, MARKERS, HARMONY_CALLS),
        PLAIN_JSON,
    )
}
REASONING_FORMATS: Final[dict[ReasoningParserName, ReasoningFormat]] = {
    f.name: f
    for f in (
        ReasoningFormat("qwen3", *THINK),
        ReasoningFormat("deepseek_r1", *THINK, always=True),
        ReasoningFormat("mistral", *MISTRAL_THINK),
        ReasoningFormat(
            "gpt_oss",
            HARMONY_MESSAGES.others[0],
            HARMONY_MESSAGES.end,
            messages=HARMONY_MESSAGES,
            read=harmony,
            special=MARKERS,
            answers=HARMONY_ANSWERS,
            efforts=("low", "medium", "high"),
        ),
    )
}


def tool_format_of(template: str, name: ToolParserName | None) -> ToolFormat:
    """The format `name`, else the template's."""
    found = TOOL_FORMATS[name or _shown_by(template)]
    return replace(found, style=MISTRAL_NAMED) if found.name == "mistral" and ARGS in template else found


def _has_channels(template: str) -> bool:
    return CHANNEL in template and MESSAGE in template


def _shown_by(template: str) -> ToolParserName:
    if _has_channels(template):
        return "gpt_oss"
    if FUNCTION in template and HERMES[0] in template:
        return "qwen3_coder"
    if KEY in template and HERMES[0] in template:
        return "glm45"
    if KIMI.call in template:
        return "kimi_k2"
    if DEEPSEEK.calls in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    return next((name for mark, name in _MARKS if mark in template), "hermes")


_MARKS: Final[tuple[tuple[str, ToolParserName], ...]] = (
    (HERMES[0], "hermes"),
    (TOOL_CALLS, "mistral"),
    (START, "pythonic"),
    (PYTHON_TAG, "llama3_json"),
    ('"parameters": ', "llama3_json"),  # Llama 3.2 has no tag
    ("[func_name", "pythonic"),
    ("ipython", "llama3_json"),
)


def reasoning_format_of(template: str) -> ReasoningFormat | None:
    if _has_channels(template):
        return REASONING_FORMATS["gpt_oss"]
    for name in ("qwen3", "mistral"):
        found = REASONING_FORMATS[name]
        if found.begin in template or found.end in template:
            return found
    return None


@dataclass(frozen=True, slots=True)
class FormatOptions:
    tool_format: Literal["auto", "template", "hermes"] = "auto"  # auto: the template, if it describes tools
    tool_parser: ToolParserName | None = None
    reasoning_parser: ReasoningParserName | None = None


@dataclass(frozen=True, slots=True)
class OutputFormats:
    tools: ToolFormat | None  # None: tools are not supported
    instructed: bool  # our own text, not the template, describes the tools
    reasoning: ReasoningFormat | None

    @classmethod
    def of(cls, template: str, options: FormatOptions) -> Self:
        """Choose the formats. Raises: ValueError, if the options contradict the chat template."""
        knows_tools = "tools" in variables_of(template)
        ours = options.tool_format == "hermes" or (options.tool_format == "auto" and not knows_tools)
        if ours and options.tool_parser not in {None, "hermes"}:
            raise ValueError(
                f"--tool-parser {options.tool_parser} needs a model whose chat template supports tools, and --tool-format "
                "auto or template: otherwise the prompt instructs the model to write calls in the format hermes"
            )
        reasoning = reasoning_format_of(template)
        if options.reasoning_parser is not None:
            reasoning = REASONING_FORMATS.get(options.reasoning_parser)
        in_messages = reasoning is not None and reasoning.messages is not None
        if in_messages and ours and options.tool_format == "auto":
            return cls(None, False, reasoning)
        chosen = TOOL_FORMATS["hermes"] if ours else tool_format_of(template, options.tool_parser)
        tools = chosen if ours or knows_tools or options.tool_parser else None
        if tools is not None and (tools.name == "gpt_oss") != in_messages:
            raise ValueError(
                "the format gpt_oss is for both reasoning and calls: set --tool-parser and --reasoning-parser both to "
                "gpt_oss, or set neither; and set --tool-format to auto or template"
            )
        return cls(tools, ours, reasoning)
