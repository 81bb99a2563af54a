"""Plain `mock` needs no model directory: its tokens are the bytes of the text."""

import asyncio
from pathlib import Path

from components.text.tokenizer import TextModel
from engine.model.mock_model import LETTERS
from engine.model.resolve import model_dir

TEXT = "Hello\n\t 'quoted' é 東京 😀 \x00\x7f\xa0\xad"


def test_every_byte_is_its_own_token(tmp_path: Path) -> None:
    text = TextModel.load(model_dir("mock", tmp_path))
    ids = asyncio.run(text.encode_text(TEXT))
    assert ids == list(TEXT.encode())
    assert text.decode(ids) == TEXT
    assert text.decode(range(0x80)) == bytes(range(0x80)).decode()
    assert text.vocab_size == 258
    assert text.decode(LETTERS) == " abcdefghijklmnopqrstuvwxyz"


def test_it_holds_conversations(tmp_path: Path) -> None:
    text = TextModel.load(model_dir("mock", tmp_path))
    ids = asyncio.run(text.encode_chat([{"role": "user", "content": "Hi"}]))
    assert ids == [256, *b"user\nHi", 257, *b"\n", 256, *b"assistant\n"]
    assert text.detokenizer().feed([*b"abc", 257]) == "abc"
