"""A model that reasons and calls tools, as far as its template and what a fake mesh says for it go."""

from functools import cache

from components.text.tokenizer import TextModel
from tests.components.text.tiny_model import TEMPLATE, tiny_tokenizer

THINKS = TEMPLATE.replace("m.content", "m.content + (m.tool_calls | tojson if m.tool_calls else '')") + (
    "{{ tools or '' }}<tool_call>{% if enable_thinking is not false %}<think>\n{% else %}<think></think>{% endif %}"
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TWO = CALL + "\n" + CALL.replace('"f"', '"g"').replace("1", "[2, 3]")


@cache
def thinking_model() -> TextModel:
    """Text side of such a model."""
    return TextModel(tiny_tokenizer(), THINKS)
