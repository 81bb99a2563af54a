"""The inputs of chat templates: how a prompt ends, variables, and tools for templates without them."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Final, NamedTuple

from components.errors import Rejected
from components.output.marked_calls import kimi_id

SWITCHES: Final = ("enable_thinking", "thinking")  # names in templates
EFFORT: Final = "reasoning_effort"
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # ascending
TOOLS_HEAD: Final = """\
You can call functions to help with what the user asks. These are the functions, one JSON object in each line:
<tools>
"""
TOOLS_TAIL: Final = """
</tools>
To call one, write its name and its arguments as a JSON object between these tags:
<tool_call>
{"name": "function name", "arguments": {"argument name": "value"}}
</tool_call>"""


class Ending(NamedTuple):
    """How the prompt of a conversation ends."""

    open_turn: bool = True
    continue_last: bool = False  # continue the last message's text
    add_special_tokens: bool = False  # the model's own, around the template's text


NEXT_TURN = Ending()


def template_variables(
    effort: str | None,
    given: Mapping[str, Any],
    mentions: Callable[[str], bool],
    efforts: Sequence[str] = (),
) -> dict[str, Any]:
    """Template variables that a client may set.

    Args:
        effort: the request's `reasoning_effort`. It is guidance: the nearest one that the model has is set, or none.
        given: its `chat_template_kwargs`.
        mentions: whether the template reads a variable.
        efforts: those that the model knows; without any, the template decides.
    Raises: Rejected if the template would ignore one of `given`, or `effort` contradicts it.
    """
    variables: dict[str, Any] = {name: _switch(name, value, mentions) for name, value in given.items()}
    if effort is None:
        return variables
    switch = next((name for name in SWITCHES if mentions(name)), None)
    if mentions(EFFORT) and not (effort == "none" and switch):
        variables[EFFORT] = _nearest(effort, efforts or (effort,))
    elif switch:
        on = _nearest(effort, ("none", "medium")) != "none"
        if variables.setdefault(switch, on) != on:
            raise Rejected(f"'{EFFORT}' contradicts 'chat_template_kwargs'; send one of them.", param=EFFORT)
    return variables


def _nearest(effort: str, efforts: Sequence[str]) -> str:
    return min(efforts, key=lambda known: abs(EFFORTS.index(known) - EFFORTS.index(effort)))


def _switch(name: str, value: Any, mentions: Callable[[str], bool]) -> bool:
    param = f"chat_template_kwargs.{name[:64]}"
    if name not in SWITCHES or not mentions(name):
        known = [f"'{switch}'" for switch in SWITCHES if mentions(switch)]
        hint = f"of this model's template only {' and '.join(known)} can be set" if known else "leave it out"
        raise Rejected(f"'{param}' is not supported: {hint}.", param=param, code="unsupported_parameter")
    if not isinstance(value, bool):
        raise Rejected(f"'{param}' must be true or false.", param=param, code="invalid_value")
    return value


def instructed(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Keep roles and content only, and describe `tools` in the system message.

    For a template without tools, in Hermes' format, which most small models know.
    """
    uses_tools = tools or any("tool_calls" in message or message["role"] == "tool" for message in messages)
    if not uses_tools:
        return messages
    turns: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            answer = f"<tool_response>\n{content}\n</tool_response>"
            if turns and turns[-1].get("answers"):
                turns[-1]["content"] += f"\n{answer}"
            else:
                turns.append({"role": "user", "content": answer, "answers": True})
            continue
        calls = [_written(call["function"]) for call in message.get("tool_calls", ())]
        kept = {key: value for key, value in message.items() if key not in {"tool_calls", "tool_call_id"}}
        turns.append({**kept, "content": "\n".join([content, *calls] if content else calls) if calls else content})
    if tools:
        _add_to_system_message(
            turns,
            TOOLS_HEAD + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools) + TOOLS_TAIL,
        )
    return [{key: value for key, value in turn.items() if key != "answers"} for turn in turns]


def in_messages(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """A conversation as gpt-oss's template reads it: one call a turn, its result next, its reasoning as `thinking`.

    The template refuses a turn with a call, `thinking` and `content`, and shows `content` as reasoning there. It shows only the
    first system message, so all are joined.
    """
    instructions = [str(message["content"]) for message in messages if message["role"] == "system"]
    if instructions:
        others = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": "\n\n".join(instructions)}, *others]
    groups: list[list[Mapping[str, Any]]] = []
    by_call: dict[str, list[Mapping[str, Any]]] = {}
    for message in messages:
        if message["role"] == "tool" and (group := by_call.get(message.get("tool_call_id", ""))) is not None:
            group.append(message)
            continue
        turn = {key: value for key, value in message.items() if key not in {"reasoning_content", "tool_calls"}}
        thoughts = [message["reasoning_content"]] if message.get("reasoning_content") else []
        calls = message.get("tool_calls", ())
        if calls and thoughts and turn["content"]:
            thoughts.append(turn["content"])
            turn["content"] = ""
        if thoughts:
            turn["thinking"] = "\n\n".join(thoughts)
        groups.append([{**turn, "tool_calls": calls[:1]} if calls else turn])
        groups += [[{"role": turn["role"], "content": "", "tool_calls": [call]}] for call in calls[1:]]
        by_call.update(zip([call["id"] for call in calls], groups[-len(calls) :], strict=True) if calls else ())
    return [turn for group in groups for turn in group]


def numbered(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Give calls, and their results, the ids that Kimi's model writes."""
    number = count()
    ids: dict[str, str] = {}
    turns: list[Mapping[str, Any]] = []
    for message in messages:
        turn = dict(message)
        if calls := message.get("tool_calls"):
            ids |= {call["id"]: kimi_id(call["function"]["name"], next(number)) for call in calls}
            turn["tool_calls"] = [{**call, "id": ids[call["id"]]} for call in calls]
        if (answered := message.get("tool_call_id")) in ids:
            turn["tool_call_id"] = ids[answered]
        turns.append(turn)
    return turns


def described(tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Tools as gpt-oss's template requires: with descriptions, and some defaults as texts."""
    found = []
    for tool in tools:
        function = {"description": "", **tool["function"]}
        parameters = function.get("parameters", {})
        if isinstance(properties := parameters.get("properties"), dict):
            shown = {name: _with_text_default(about) for name, about in properties.items()}
            function["parameters"] = {**parameters, "properties": shown}
        found.append({**tool, "function": function})
    return found


def _with_text_default(about: Any) -> Any:
    """The template appends the default of a parameter with `enum` or `oneOf` to a text."""
    if not isinstance(about, dict) or not (about.get("enum") or about.get("oneOf")) or "default" not in about:
        return about
    default = about["default"]
    return {**about, "default": default if isinstance(default, str) else json.dumps(default, ensure_ascii=False)}


def _add_to_system_message(turns: list[dict[str, Any]], instruction: str) -> None:
    if turns and turns[0]["role"] == "system":
        turns[0]["content"] += f"\n\n{instruction}"
    else:
        turns.insert(0, {"role": "system", "content": instruction})


def _written(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {text}}}\n</tool_call>'
