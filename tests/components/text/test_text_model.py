import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment

from components.errors import Rejected
from components.startup import WrongSettings
from components.text import tokenizer as module
from components.text.tokenizer import TextModel
from tests.components.text.tiny_model import TEMPLATE, tiny_text_model, tiny_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def save(directory: Path, config: Mapping[str, Any]) -> None:
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    written = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(written))


def test_a_conversation_is_rendered_open_for_the_assistant() -> None:
    assert tiny_text_model().render(HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_template_tokens_become_single_ids() -> None:
    text = tiny_text_model()
    ids = asyncio.run(text.encode_chat(HELLO))
    assert ids[0] == tiny_tokenizer().token_to_id("<|im_start|>")
    assert text.decode(ids) == "user\nHello\nassistant\n"


@pytest.mark.parametrize("place", ["config", "file", "named"])
def test_a_template_is_found_wherever_a_model_directory_keeps_it(tmp_path: Path, place: str) -> None:
    named = [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": "other"}]
    save(tmp_path, {"config": {"chat_template": TEMPLATE}, "file": {}, "named": {"chat_template": named}}[place])
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert TextModel.load(tmp_path).render(HELLO) == tiny_text_model().render(HELLO)


def test_a_model_without_template_reports_it_and_accepts_plain_text(tmp_path: Path) -> None:
    save(tmp_path, {})
    text = TextModel.load(tmp_path)
    with pytest.raises(Rejected, match="no chat template") as caught:
        text.render(HELLO)
    assert caught.value.fields["param"] == "model"
    assert text.decode(asyncio.run(text.encode_text("Hello"))) == "Hello"


def test_truncation_that_a_tokenizer_file_asks_for_is_switched_off(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    save(tmp_path, {})
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = TextModel.load(tmp_path)
    assert text.decode(asyncio.run(text.encode_text("Hello, how are you today?"))) == "Hello, how are you today?"


def test_a_directory_without_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    """The frontend ended with a traceback, and its supervisor restarted it."""
    with pytest.raises(WrongSettings, match=r"no tokenizer\.json: copy the one of the model beside config\.json"):
        TextModel.load(tmp_path)


def test_a_template_that_refuses_gives_its_reason() -> None:
    with pytest.raises(Rejected, match="nobody may speak") as caught:
        tiny_text_model().render([{"role": "user", "content": "42", "name": "nobody"}])
    assert caught.value.fields["param"] == "messages"


def test_a_warmed_up_model_compiles_no_template_for_the_first_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frontend's first chat took 30 ms longer to tokenise than the next one."""
    text = tiny_text_model(TEMPLATE + "{# compiled by no other test #}")
    text.warm_up()
    compiled: list[str] = []
    monkeypatch.setattr(Environment, "from_string", lambda self, source: compiled.append(source))
    assert asyncio.run(text.encode_chat(HELLO))
    assert not compiled


@pytest.mark.parametrize("template", [None, "{{ messages[9].content }}", "{% if %}"])
def test_a_model_without_a_usable_template_is_warmed_up_too(template: str | None) -> None:
    text = tiny_text_model(template)
    text.warm_up()
    assert text.decode(asyncio.run(text.encode_text("Hello"))) == "Hello"


@pytest.mark.parametrize(
    "template", ["{{ messages[9].content }}", "{{ 1 / 0 }}", "{{ messages[0].content + 1 }}", "{% if %}"]
)
def test_a_template_that_breaks_is_a_refusal_and_no_crash(template: str) -> None:
    with pytest.raises(Rejected, match="chat template"):
        tiny_text_model(template).render(HELLO)


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    with pytest.raises(Rejected, match=r"unsafe|undefined"):
        tiny_text_model("{{ messages.__class__.__mro__ }}").render(HELLO)


def test_only_a_long_prompt_leaves_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    encode = TextModel._encode

    def spy(self: TextModel, text: str, *, add_special_tokens: bool) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(self, text, add_special_tokens=add_special_tokens)

    async def both(text: TextModel, content: str) -> Sequence[list[int]]:
        return [await text.encode_text(content), await text.encode_chat([{"role": "user", "content": content}])]

    monkeypatch.setattr(TextModel, "_encode", spy)
    asyncio.run(both(tiny_text_model(), "short"))
    assert threads == [True, True]
    asyncio.run(both(tiny_text_model(), "long " * module.INLINE_CHARS))
    assert threads[2:] == [False, False]
