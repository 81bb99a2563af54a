"""Turns of many blocks, or of many items, become a chat in linear time."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from components.anthropic.messages import TextBlock, Thinking, Turn
from components.anthropic.messages import turns as turns_of_messages
from components.openai.items import InputItem, MessageItem, OutputText, ReasoningItem, ReasoningText
from components.openai.items import turns as turns_of_items

COUNT = 40_000


def messages(block: TextBlock | Thinking) -> list[dict[str, Any]]:
    return turns_of_messages((), [Turn.model_construct(role="assistant", content=[block] * 1000)] * (COUNT // 1000))


def items(item: InputItem) -> list[dict[str, Any]]:
    return turns_of_items([item] * COUNT)


@pytest.mark.parametrize(
    ("make", "member", "length"),
    [
        (lambda: messages(TextBlock(text="a")), "content", COUNT),
        (lambda: messages(Thinking(type="thinking", thinking="a" * 100)), "reasoning_content", 100 * COUNT),
        (
            lambda: items(MessageItem(role="assistant", content=[OutputText(type="output_text", text="a")])),
            "content",
            COUNT,
        ),
        (
            lambda: items(
                ReasoningItem(type="reasoning", content=[ReasoningText(type="reasoning_text", text="a" * 99)])
            ),
            "reasoning_content",
            100 * COUNT - 1,
        ),
    ],
    ids=["text blocks", "thinking blocks", "messages", "reasoning items"],
)
def test_each_block_is_added_once(make: Callable[[], list[dict[str, Any]]], member: str, length: int) -> None:
    """Each was added to a copy of those before it: 240,000 blocks, a body of 6 MB, took more than a minute."""
    began = time.process_time()
    [turn] = make()
    assert len(turn[member]) == length
    assert time.process_time() - began < 0.5, "of processor time; it is some hundredths, and was seconds"
