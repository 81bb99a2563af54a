"""Turn token ids into text: without incomplete characters, up to a stop string; and the bytes of tokens."""

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterator, Sequence, Set
from functools import lru_cache
from typing import Any, Final, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from components.text.byte_letters import byte_letters

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
WORD_BEGINS: Final = "\u2581"  # SentencePiece's space
REPLACEMENT: Final = "\ufffd"
LOOK_AFTER: Final = 8  # held tokens; some characters must then be complete
GIVE_UP_AFTER: Final = 64  # held tokens; then this is not text. Each check reads all


class TokenBytes:
    """The bytes of each token, which may be part of a character."""

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
    """Types of a decoder and its parts, which only its pickle reveals."""
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


class StopStrings:
    """Finds stop strings across token boundaries.

    The result does not depend on how the text is cut. Of several stop strings with one end, the longest counts.
    """

    __slots__ = ("_failure", "_held", "_included", "_matched", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        """`included`: show the stop string that ends the text."""
        self._included = included
        self._stops = sorted(stops, key=len, reverse=True)  # the longest begins earliest
        self._failure = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # for each, its longest prefix that ends the text
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    def feed(self, text: str, *, counts: bool = True) -> tuple[str, bool]:
        """The text that is safe to show, and whether a stop string is complete.

        `counts`: whether a stop string that ends in `text` ends the answer.
        """
        unseen = len(self._held)
        self._held += text
        for position in range(unseen, len(self._held)):
            length = self._step(self._held[position], counts=counts)
            if length:
                return self._held[: position + 1 - (0 if self._included else length)], True
        safe = len(self._held) - max(self._matched, default=0)
        shown, self._held = self._held[:safe], self._held[safe:]
        return shown, False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _step(self, char: str, *, counts: bool) -> int:
        """Length of the completed stop string, or 0. Source: Knuth, Morris and Pratt, 1977."""
        for i, stop in enumerate(self._stops):
            length = self._matched[i]
            while length and stop[length] != char:
                length = self._failure[i][length - 1]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                if counts:
                    self.found = stop
                    return length
                length = self._failure[i][-1]
            self._matched[i] = length
        return 0


@lru_cache(maxsize=64)  # choices share their stop strings, and the longest takes a millisecond
def _failure_table(stop: str) -> tuple[int, ...]:
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[length] != stop[i]:
            length = table[length - 1]
        if stop[length] == stop[i]:
            length += 1
        table[i] = length
    return tuple(table)


class Detokenizer(Protocol):
    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; "" within a character."""

    def flush(self) -> str:
        pass


class Pieces(dict[int, bytes]):
    """A byte-level tokenizer's tokens as bytes, without skipped ones."""

    def __init__(self, tokenizer: Tokenizer, skipped: Set[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        piece = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""  # not cached: a model may have more ids than tokens
        self[token_id] = read_byte_level(piece)
        return self[token_id]


class ByteDetokenizer:
    """Detokenizer for byte-level tokenizers, with a tenth of the work of `StreamDetokenizer`.

    Args:
        pieces: shared.
        prefix: the prompt's last tokens if the generation continues a text, which may end within a character.
    """

    __slots__ = ("_pieces", "_rest")

    def __init__(self, pieces: Pieces, prefix: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._rest = b""  # of an incomplete character
        self.feed(prefix)

    def feed(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        data = self._rest + b"".join([pieces[token_id] for token_id in token_ids])
        text, used = utf_8_decode(data, "replace", False)  # not final
        self._rest = data[used:]
        return text

    def flush(self) -> str:
        return ""


class StreamDetokenizer:
    """Detokenizer for any tokenizer.

    Args:
        tokenizer: shared, only read.
        prefix: the prompt's last tokens if the generation continues a text: some decoders drop the space before a
            first word.
        skip: special tokens.
    """

    __slots__ = ("_early", "_held", "_shown", "_skip", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prefix: Sequence[int] = (), *, skip: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._stream = DecodeStream(ids=list(prefix), skip_special_tokens=skip)
        self._shown = list(prefix)  # tokens of the last text, as context for the held ones
        self._held: list[int] = []  # the last one ends within a character
        self._early = 0  # shown characters of the held tokens

    def feed(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            return self._take(token_ids[0])
        return "".join([self._take(token_id) for token_id in token_ids])

    def flush(self) -> str:
        return self._held_text().rstrip(REPLACEMENT)[self._early :] if self._held else ""

    def _take(self, token_id: int) -> str:
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as exc:
            if "Invalid prefix" not in str(exc):
                raise
            return self._restart()  # invalid UTF-8; the decoder's state is unusable
        if text is None:
            return self._complete_part() if len(self._held) > LOOK_AFTER else ""
        if self._early:
            text, self._early = text[self._early :], 0
        self._shown, self._held = self._held, []
        return text

    def _complete_part(self) -> str:
        """Complete characters, if each token ended within the next one."""
        text = self._held_text()
        whole = text.rstrip(REPLACEMENT)
        incomplete = len(text) - len(whole)
        if incomplete > 3 or len(self._held) > GIVE_UP_AFTER:  # a character lacks at most three bytes
            return self._restart()
        new, self._early = whole[self._early :], max(self._early, len(whole))
        return new

    def _restart(self) -> str:
        text = self._held_text()[self._early :]
        # no context: invalid bytes before a text can change its decoding
        self._shown, self._held, self._early = [], [], 0
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        return text

    def _held_text(self) -> str:
        before = self._tokenizer.decode(self._shown, skip_special_tokens=self._skip)
        return self._tokenizer.decode(self._shown + self._held, skip_special_tokens=self._skip).removeprefix(before)


class SelectiveDetokenizer(StreamDetokenizer):
    """Skips only some special tokens: others mark tool calls or reasoning."""

    __slots__ = ("_skipped",)

    def __init__(self, tokenizer: Tokenizer, skipped: Set[int], prefix: Sequence[int]) -> None:
        super().__init__(tokenizer, [token_id for token_id in prefix if token_id not in skipped], skip=False)
        self._skipped = skipped

    def feed(self, token_ids: Sequence[int]) -> str:
        return super().feed([token_id for token_id in token_ids if token_id not in self._skipped])
