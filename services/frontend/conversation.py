"""The prompt of a conversation, and the plan for its answer: how it is parsed, and its constraint."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from components.errors import Rejected
from components.openai.chat import ChatRequest, Conversation, chars_of_calls
from components.openai.fields import AskedConstraint
from components.openai.tokens import TokenizeRequest
from components.output.formats import PLAIN_JSON, ReasoningFormat, ToolFormat
from components.output.grammar import (
    TEXT,
    CallableTool,
    CallStyle,
    Grammar,
    Thinking,
    answer_rule,
    calls_or,
    forced_calls,
    strict_calls,
)
from components.output.json_calls import PYTHON_TAG
from components.output.plan import OutputPlan
from components.output.reasoning import Reasoning
from components.structured.schema import fault_in_schema
from components.text.chat_template import template_variables
from components.text.tokenizer import TextModel
from components.wire.sampling import Constraint


class AnswerPlan(NamedTuple):
    output: OutputPlan | None = None  # None: the text is shown as it is
    asked: AskedConstraint | None = None  # replaces the constraint in the request's fields; None: that one applies


async def conversation_of(text: TextModel, request: ChatRequest | TokenizeRequest) -> Conversation:
    """The request's conversation. Long arguments of earlier calls are parsed in a thread."""
    return await text.run(chars_of_calls(request.messages or ()), request.conversation)


async def encode_conversation(text: TextModel, conversation: Conversation) -> list[int]:
    formats = text.formats
    if conversation.tools and formats.tools is None:
        raise _unsupported("tools", "this model's chat template has no tools")
    reasoning = formats.reasoning
    variables = template_variables(
        conversation.effort,
        conversation.variables,
        text.mentions,
        () if reasoning is None else reasoning.efforts,
    )
    tools = [tool.for_template() for tool in conversation.tools]
    return await text.encode_chat(conversation.messages, tools, variables, conversation.ending, conversation.call_chars)


async def plan_answer(
    text: TextModel, conversation: Conversation, prompt: Sequence[int], asked: AskedConstraint | None
) -> AnswerPlan:
    """Return the answer plan for one request.

    Args:
        text: the model's formats.
        conversation: tools, and which of them to call.
        prompt: its token ids, by `encode_conversation`.
        asked: the constraint in the request's fields. It applies to the answer, not to reasoning or calls.
    Raises: Rejected, if the constraint is not compatible with the tools, or with the text that the answer continues.
    """
    reasoning = text.formats.reasoning
    tools = text.formats.tools if conversation.tools else None
    if reasoning is None and tools is None:
        return AnswerPlan()
    before = conversation.begun
    thinking = None if reasoning is None else _thinking(text, reasoning, prompt, before)
    opened = (thinking is not None and thinking.opened) or (reasoning is not None and reasoning.end in before)
    if tools is not None and tools.style is None and conversation.choice.mode in {"required", "named"}:
        tools = PLAIN_JSON
    tokens = (*(tools.tokens if tools else ()), *(reasoning.tokens if reasoning else ()))
    single = not conversation.parallel or conversation.choice.mode == "named"
    grammar = Grammar(text.marker_ids(tokens))
    combined: AskedConstraint | None = None
    if tools is not None:
        # a continued answer is already a message, and in this format calls are separate messages
        answer_only = thinking is None and reasoning is not None and reasoning.messages is not None
        combined = _constraint_of(grammar, tools, conversation, thinking, asked, single=single, answer_only=answer_only)
    elif asked is not None and thinking is not None:
        rule = calls_or(grammar, None, (), thinking, _answer_rule(asked), single=single)
        combined = AskedConstraint(Constraint(kind="lark", text=rule), asked.param)
    output = OutputPlan(
        reasoning,
        opened,
        tools,
        {tool.function.name: tool.function.parameters or {} for tool in conversation.tools},
        single,
        text.special_ids(tokens),
        before,
        free=combined is None,
    )
    if before:
        await _check_continuation(text, output, combined)
    return AnswerPlan(output, combined)


def _thinking(text: TextModel, reasoning: ReasoningFormat, prompt: Sequence[int], before: str) -> Thinking | None:
    """Return the reasoning that follows the prompt, which ends with `before`; None if there is none, or it has ended."""
    if (style := reasoning.messages) is not None:
        within = before.strip() or text.ends_with(prompt, style.answer)
        return None if within else Thinking(reasoning.begin, reasoning.end, False, style)
    if not before.strip():
        if text.ends_with(prompt, reasoning.end):
            return None
        opened = reasoning.always or text.ends_with(prompt, reasoning.begin)
        return Thinking(reasoning.begin, reasoning.end, opened)
    read = Reasoning(reasoning.begin, reasoning.end, opened=reasoning.end in before)
    read.feed(before)
    return None if read.over else Thinking(reasoning.begin, reasoning.end, read.inside)


async def _check_continuation(text: TextModel, output: OutputPlan, combined: AskedConstraint | None) -> None:
    """Raises: Rejected, if no text both continues the last message and satisfies the constraint."""
    parser = output.parser()
    answer, _, calls = await text.run(len(output.before), parser.begin)
    param = "continue_final_message"
    if parser.done:
        raise _unsupported(param, "the last message already has a tool call, and only one is allowed")
    if combined is None:
        return
    if parser.undecided:
        raise _unsupported(param, f"'{combined.param}' cannot begin where the last message ends")
    bare = output.tools is not None and output.tools.style is not None and not output.tools.style.marker
    if combined.param == "tools" and bare and (answer.strip() or calls):
        raise _unsupported(param, "this model's calls are whole answers, and the last message already has text")


def _constraint_of(
    grammar: Grammar,
    tools: ToolFormat,
    conversation: Conversation,
    thinking: Thinking | None,
    asked: AskedConstraint | None,
    *,
    single: bool,
    answer_only: bool,
) -> AskedConstraint | None:
    """Combine tools and the request's constraint into one constraint. `answer_only`: no calls are possible."""
    mode, name, _ = conversation.choice
    callable_tools = _callable_tools(conversation)
    strict = any(tool.strict for tool in callable_tools)
    if answer_only and (strict or mode in {"required", "named"}):
        raise _unsupported(
            "continue_final_message", "this model's calls are messages of their own, and the last one has text"
        )
    if mode in {"required", "named"}:
        assert tools.style is not None
        wanted = [tool for tool in callable_tools if mode == "required" or tool.name == name]
        rules = forced_calls(grammar, tools.style, wanted, thinking, single=single)
        return AskedConstraint(Constraint(kind="lark", text=rules), "tools")
    if asked is not None:
        style = None if answer_only else _style_beside_answers(grammar, tools, asked)
        rules = calls_or(grammar, style, callable_tools, thinking, _answer_rule(asked), single=single)
        return AskedConstraint(Constraint(kind="lark", text=rules), asked.param)
    if not strict:
        return None
    if tools.style is None:
        raise _unsupported(
            "tools", f"with {tools.name} calls, 'strict' needs the 'tool_choice' 'required' or a named one"
        )
    if thinking is not None and thinking.messages is not None:
        rules = calls_or(grammar, tools.style, callable_tools, thinking, TEXT, single=single)
    else:
        rules = strict_calls(grammar, tools.style, callable_tools, thinking, single=single)
    return AskedConstraint(Constraint(kind="lark", text=rules), "tools")


def _callable_tools(conversation: Conversation) -> list[CallableTool]:
    """Convert the tools for the grammar. Raises: Rejected, if a strict tool's schema is not supported."""
    found = []
    for i, tool in enumerate(conversation.tools):
        function, strict = tool.function, bool(tool.function.strict)
        if strict and function.parameters is not None and (fault := fault_in_schema(function.parameters)) is not None:
            param = f"tools[{i}].function.parameters"
            raise Rejected(f"Invalid '{param}' of a strict tool: {fault}.", param=param, code="invalid_value")
        found.append(CallableTool(function.name, function.parameters, strict))
    return found


def _style_beside_answers(grammar: Grammar, tools: ToolFormat, asked: AskedConstraint) -> CallStyle:
    """Return a style of calls that cannot be confused with an answer in JSON. Raises: Rejected."""
    style = tools.style
    if style is not None and style.marker:
        return style
    if style is not None and PYTHON_TAG in tools.tokens and grammar.knows(PYTHON_TAG):
        return replace(style, before=PYTHON_TAG)
    raise _unsupported(asked.param, f"it cannot be combined with 'tools' in {tools.name} calls; send only one of them")


def _answer_rule(asked: AskedConstraint) -> str:
    """Return the grammar rule of the answer. Raises: Rejected, naming the request's field; a later check could not."""
    kind, text = asked.constraint.kind, asked.constraint.text
    try:
        fault = fault_in_schema(json.loads(text)) if kind == "json_schema" else None
        if fault is None:
            return answer_rule(kind, text)
    except ValueError as exc:
        fault = str(exc)
    raise Rejected(f"Invalid '{asked.param}': {fault}.", param=asked.param, code="invalid_value")


def _unsupported(param: str, why: str) -> Rejected:
    return Rejected(f"'{param}' is not supported: {why}.", param=param, code="unsupported_parameter")
