"""Token ids to text, incrementally, without incomplete characters."""

from codecs import utf_8_decode
from collections.abc import Sequence, Set
from typing import Final, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from components.text.token_bytes import read_byte_level

REPLACEMENT: Final = "\ufffd"
LOOK_AFTER: Final = 8  # held tokens: some characters must be complete
GIVE_UP_AFTER: Final = 64  # held tokens: this is no text, and each look reads all


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
    """A tenth of the work of `StreamDetokenizer`.

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
    """For any tokenizer.

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
        self._shown = list(prefix)  # the last text's tokens: context for the held ones
        self._held: list[int] = []  # the last one ends within a character
        self._early = 0  # characters of the held tokens already shown

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
            return self._restart()  # invalid UTF-8 shortened the text; the decoder's state is unusable
        if text is None:
            return self._look() if len(self._held) > LOOK_AFTER else ""
        if self._early:
            text, self._early = text[self._early :], 0
        self._shown, self._held = self._held, []
        return text

    def _look(self) -> str:
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
        # without context: invalid bytes before a text can change its decoding
        self._shown, self._held, self._early = [], [], 0
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        return text

    def _held_text(self) -> str:
        before = self._tokenizer.decode(self._shown, skip_special_tokens=self._skip)
        return self._tokenizer.decode(self._shown + self._held, skip_special_tokens=self._skip).removeprefix(before)


class SelectiveDetokenizer(StreamDetokenizer):
    """Skips only some special tokens: others mark tool calls or reasoning."""

    __slots__ = ("_skipped",)

    def __init__(self, tokenizer: Tokenizer, skipped: Set[int], prefix: Sequence[int] = ()) -> None:
        super().__init__(tokenizer, [token_id for token_id in prefix if token_id not in skipped], skip=False)
        self._skipped = skipped

    def feed(self, token_ids: Sequence[int]) -> str:
        return super().feed([token_id for token_id in token_ids if token_id not in self._skipped])
