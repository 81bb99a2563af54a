from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from components.text.detokenizer import TokenBytes
from components.text.tokenizer import TextModel
from engine.model.mock_model import mock_dir
from tests.components.text.tiny_model import tiny_tokenizer


@pytest.mark.parametrize("text", ["The capital of France is Paris.", "😀 東京\u2028नमस्ते\n\tx"])
def test_the_bytes_of_byte_level_tokens_make_the_text(text: str) -> None:
    tokenizer = tiny_tokenizer()
    names = TokenBytes(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(names.of(i) for i in ids).decode() == text


def test_every_byte_has_a_token_in_the_mocks_vocabulary(tmp_path: Path) -> None:
    names = TextModel.load(mock_dir(tmp_path)).token_bytes
    assert [names.of(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert names.of(257) == b"<|im_end|>"
    assert names.of(5000) == b""


def test_sentence_pieces_have_spaces_and_bytes_of_their_own() -> None:
    vocabulary = {"<unk>": 0, "<0xE2>": 1, "\u2581the": 2, "s": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    names = TokenBytes(tokenizer)
    assert [names.of(i) for i in range(1, 5)] == [b"\xe2", b" the", b"s", b"</s>"]
