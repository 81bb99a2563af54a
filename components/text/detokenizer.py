"""Token ids to text, a few at a time, without ever showing half a character."""

from codecs import utf_8_decode
from collections.abc import Sequence, Set
from typing import Final, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from components.text.token_bytes import read_byte_level

REPLACEMENT: Final = "\ufffd"
LOOK_AFTER: Final = 8  # tokens held: more than one character has, so look whether whole ones are among them
GIVE_UP_AFTER: Final = 64  # tokens held: this is no text, and each look costs as much as is held


class Detokenizer(Protocol):
    """The text of one generation."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that became whole with these tokens; "" while a character is incomplete."""

    def flush(self) -> str:
        """What is whole and was not shown; the generation is over, so the rest is dropped."""


class Pieces(dict[int, bytes]):
    """The bytes of a byte-level tokenizer's tokens, read when they are met; nothing of those to skip."""

    def __init__(self, tokenizer: Tokenizer, skipped: Set[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        piece = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""  # not kept: a model may have more ids than its tokenizer has tokens
        self[token_id] = read_byte_level(piece)
        return self[token_id]


class ByteDetokenizer:
    """For byte-level tokenizers, whose text is that of their tokens' bytes: a tenth of the work of `StreamDetokenizer`.

    Args:
        pieces: shared.
        prefix: the prompt's last tokens, when the generation continues a text: it may end within a character.
    """

    __slots__ = ("_pieces", "_rest")

    def __init__(self, pieces: Pieces, prefix: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._rest = b""  # of a character
        self.feed(prefix)

    def feed(self, token_ids: Sequence[int]) -> str:
        """As of any detokenizer; bytes that can be no character are shown as U+FFFD."""
        pieces = self._pieces
        data = self._rest + b"".join([pieces[token_id] for token_id in token_ids])
        text, used = utf_8_decode(data, "replace", False)  # not final
        self._rest = data[used:]
        return text

    def flush(self) -> str:
        """Nothing: what is whole has been shown."""
        return ""


class StreamDetokenizer:
    """For any tokenizer. Special tokens are skipped.

    Args:
        tokenizer: shared, only read.
        prefix: the prompt's last tokens, when the generation continues a text rather than begins one; some decoders
            drop the space before a first word.
    """

    __slots__ = ("_early", "_held", "_shown", "_skip", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prefix: Sequence[int] = (), *, skip: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip  # special tokens
        self._stream = DecodeStream(ids=list(prefix), skip_special_tokens=skip)
        self._shown = list(prefix)  # tokens of the last text shown: the context that the held ones are decoded in
        self._held: list[int] = []  # tokens since then: the last of them ends within a character
        self._early = 0  # characters of the held tokens' text that are shown already

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that became whole with these tokens; "" while a character is incomplete."""
        if len(token_ids) == 1:  # as good as always
            return self._take(token_ids[0])
        return "".join([self._take(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """The whole characters among the tokens still held; the generation is over, so the rest is dropped."""
        return self._held_text().rstrip(REPLACEMENT)[self._early :] if self._held else ""

    def _take(self, token_id: int) -> str:
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as exc:  # tokenizers raises no class of its own
            if "Invalid prefix" not in str(exc):
                raise
            return self._restart()  # bytes that are no UTF-8 made the decoded text shrink; the stream is unusable
        if text is None:
            return self._look() if len(self._held) > LOOK_AFTER else ""
        if self._early:
            text, self._early = text[self._early :], 0
        self._shown, self._held = self._held, []
        return text

    def _look(self) -> str:
        """Whole characters from tokens that, for long, have each ended within the next one."""
        text = self._held_text()
        whole = text.rstrip(REPLACEMENT)
        incomplete = len(text) - len(whole)
        if incomplete > 3 or len(self._held) > GIVE_UP_AFTER:  # a character lacks at most three bytes
            return self._restart()
        new, self._early = whole[self._early :], max(self._early, len(whole))
        return new

    def _restart(self) -> str:
        """Show what is held, broken as it is, and begin anew after it."""
        text = self._held_text()[self._early :]
        # without context: broken bytes before a text can change how it decodes, and show something twice
        self._shown, self._held, self._early = [], [], 0
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        return text

    def _held_text(self) -> str:
        before = self._tokenizer.decode(self._shown, skip_special_tokens=self._skip)
        return self._tokenizer.decode(self._shown + self._held, skip_special_tokens=self._skip).removeprefix(before)


class SelectiveDetokenizer(StreamDetokenizer):
    """Of special tokens it skips only some: others mark calls of tools, or reasoning."""

    __slots__ = ("_skipped",)

    def __init__(self, tokenizer: Tokenizer, skipped: Set[int], prefix: Sequence[int] = ()) -> None:
        super().__init__(tokenizer, [token_id for token_id in prefix if token_id not in skipped], skip=False)
        self._skipped = skipped

    def feed(self, token_ids: Sequence[int]) -> str:
        """As of any detokenizer."""
        return super().feed([token_id for token_id in token_ids if token_id not in self._skipped])
