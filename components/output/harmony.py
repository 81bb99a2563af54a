"""gpt-oss's answers: messages in channels, with reasoning, text or a call.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}

The prompt ends with `<|start|>assistant`. `<|return|>` ends an answer, and `<|call|>` an answer with a call. Both are end
tokens of the model, but included in the text, so that even a call that is not JSON has an end.

Source: openai/harmony, docs/format.md.
"""

import re
from typing import Final

from components.output.calls import is_tool_name
from components.output.grammar import CallStyle, MessageStyle
from components.output.reader import Reader, Steps, ignore

START, CHANNEL, CONSTRAIN, MESSAGE, END = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"
IN_HEADER: Final = (START, CHANNEL, CONSTRAIN)
MARKERS: Final = (*IN_HEADER, MESSAGE, END, "<|call|>", "<|return|>")
NEXT: Final = f"{START}assistant"  # between two messages of an answer
FUNCTIONS: Final = "functions."  # namespace of the client's tools
CALL: Final = f"{CHANNEL}commentary to={FUNCTIONS}"
HARMONY_CALLS: Final = CallStyle(f"{CALL}{{}} {CONSTRAIN}json{MESSAGE}", "", f"{END}{NEXT}", marker=CALL)
HARMONY_MESSAGES: Final = MessageStyle(
    others=(f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}commentary{MESSAGE}"),
    end=END,
    next=NEXT,
    answer=f"{CHANNEL}final{MESSAGE}",
)
# how messages begin, except reasoning
HARMONY_ANSWERS: Final = (f"{CHANNEL}final", f"{CHANNEL}commentary", f"{CHANNEL}analysis to=", f"{NEXT} to=")
TO_OTHERS: Final = frozenset({"assistant", "user", "all"})  # recipients that are not tools
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_BETWEEN: Final = "\n\n"  # between messages joined into one text


def harmony(r: Reader) -> Steps[None]:
    """Read an answer. Text without a header belongs to it, because a prompt may end within a message."""
    header = "to=" if (yield from r.literal(" to=")) else ""  # the part of the header that the prompt does not contain
    marker = START if header else (yield from r.until(MARKERS, r.emit_text))
    while marker:
        if marker in IN_HEADER or marker == MESSAGE:
            header, whole = yield from _header(r, header)
            marker = (yield from _content(r, header)) if whole else (yield from r.until(MARKERS, r.emit_text))
            header = ""
        else:
            r.skip(len(marker))
            marker = yield from r.until(MARKERS, r.emit_text)


def _header(r: Reader, begun: str) -> Steps[tuple[str, bool]]:
    """Skip to the message's content. Return `begun` with the rest of the header, and whether content follows."""
    parts = [begun]
    while (marker := (yield from r.until(MARKERS, parts.append))) in IN_HEADER:
        r.skip(len(marker))
        parts.append(marker)
    r.skip(len(marker))
    return "".join(parts), marker == MESSAGE


def _content(r: Reader, header: str) -> Steps[str]:
    """Report a message's content. Return the marker after it."""
    recipient = _RECIPIENT.search(header)
    name = recipient[1].removeprefix(FUNCTIONS) if recipient is not None else ""
    if r.tools and name not in TO_OTHERS and is_tool_name(name):
        return (yield from _call(r, name))
    channel = _CHANNEL.search(header)
    reasons = channel is not None and channel[1] == "analysis"
    emit, between = (r.emit_thought, r.has_thought) if reasons else (r.emit_text, r.has_text)

    def emit_content(text: str) -> None:
        nonlocal between
        emit(_BETWEEN + text if between else text)
        between = False

    return (yield from r.until(MARKERS, emit_content))


def _call(r: Reader, name: str) -> Steps[str]:
    """Report a call, with `{}` if it has no arguments. Return the marker after it."""
    given = False

    def argue(text: str) -> None:
        nonlocal given
        given = True
        r.argue(text)

    yield from r.spaces()
    r.begin_call(name)
    whole = yield from r.value(argue)
    marker = yield from r.until(MARKERS, ignore if whole else argue)
    if marker and not given:
        r.argue("{}")
    if marker or whole:
        r.end_call()
    return marker
