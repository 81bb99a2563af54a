"""Tools for a chat template without them, in Hermes' format, which most small models know."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

HEAD: Final = """\
You can call functions to help with what the user asks. These are the functions, one JSON object in each line:
<tools>
"""
TAIL: Final = """
</tools>
To call one, write its name and its arguments as a JSON object between these tags:
<tool_call>
{"name": "function name", "arguments": {"argument name": "value"}}
</tool_call>"""


def instructed(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Keep roles and content only, and describe `tools` in the system message."""
    told = tools or any("tool_calls" in message or message["role"] == "tool" for message in messages)
    if not told:
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
        _tell(turns, HEAD + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools) + TAIL)
    return [{key: value for key, value in turn.items() if key != "answers"} for turn in turns]


def _tell(turns: list[dict[str, Any]], instruction: str) -> None:
    if turns and turns[0]["role"] == "system":
        turns[0]["content"] += f"\n\n{instruction}"
    else:
        turns.insert(0, {"role": "system", "content": instruction})


def _written(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {text}}}\n</tool_call>'
