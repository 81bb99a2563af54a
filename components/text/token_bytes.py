"""The bytes of each token, which may be part of a character."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from tokenizers import Tokenizer

from components.text.byte_letters import byte_letters

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
WORD_BEGINS: Final = "\u2581"  # SentencePiece's space


class TokenBytes:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self._read = _reader(tokenizer)

    def of(self, token_id: int) -> bytes:
        """Empty for an id without a token."""
        if (name := self._added.get(token_id)) is not None:
            return name.encode()
        piece: str | None = self._tokenizer.id_to_token(token_id)
        return b"" if piece is None else self._read(piece)


def _reader(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    kinds = set(_kinds(tokenizer.decoder))
    if "ByteLevel" in kinds:
        return read_byte_level
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return _read_sentence_piece
    return lambda piece: str(tokenizer.decoder.decode([piece])).encode() if tokenizer.decoder else piece.encode()


def _kinds(decoder: Any) -> Iterator[str]:
    """Types of a decoder and its parts, which only its pickle shows."""
    if decoder is not None:
        state = json.loads(decoder.__getstate__())
        for part in (state, *state.get("decoders", ())):
            yield part["type"]


def is_byte_level(tokenizer: Tokenizer) -> bool:
    return list(_kinds(tokenizer.decoder)) == ["ByteLevel"]


def read_byte_level(piece: str) -> bytes:
    """Other letters, as in an added token, are text."""
    try:
        return bytes([_BYTES[letter] for letter in piece])
    except KeyError:
        return piece.encode()


def _read_sentence_piece(piece: str) -> bytes:
    if (match := BYTE_TOKEN.fullmatch(piece)) is not None:
        return bytes.fromhex(match[1])
    return piece.replace(WORD_BEGINS, " ").encode()


_BYTES: Final = {letter: byte for byte, letter in enumerate(byte_letters())}
