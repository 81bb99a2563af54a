from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from components.text.detokenizer import (
    GIVE_UP_AFTER,
    ByteDetokenizer,
    Detokenizer,
    Pieces,
    StreamDetokenizer,
    is_byte_level,
)
from tests.components.text.tiny_model import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SPECIALS = {token_id for token_id, token in TOKENIZER.get_added_tokens_decoder().items() if token.special}
PRINTABLE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=40).filter(
    lambda text: not any(token in text for token in ("<|im_start|>", "<|im_end|>"))  # these are skipped
)
MAKERS: list[Callable[[], Detokenizer]] = [
    lambda: StreamDetokenizer(TOKENIZER),
    lambda: ByteDetokenizer(Pieces(TOKENIZER, SPECIALS)),
]
both = pytest.mark.parametrize("make", MAKERS, ids=["stream", "bytes"])


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


@both
@settings(deadline=None)  # the machine may be busy
@given(PRINTABLE, st.lists(st.integers(1, 5), min_size=1))
def test_the_pieces_are_the_decoded_whole_and_none_has_a_broken_character(
    make: Callable[[], Detokenizer], text: str, sizes: list[int]
) -> None:
    ids, detokenizer = ids_of(text), make()
    pieces: list[str] = []
    while ids:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(detokenizer.feed(ids[:size]))
        ids = ids[size:]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == TOKENIZER.decode(ids_of(text)) == text
    assert not any("\ufffd" in piece for piece in pieces)


@both
@settings(deadline=None)  # the machine may be busy
@given(PRINTABLE, st.integers(0, 200))
def test_an_end_within_a_character_drops_only_that_character(
    make: Callable[[], Detokenizer], text: str, cut: int
) -> None:
    ids = ids_of(text)[: cut % (len(text) * 4 + 1)]
    detokenizer = make()
    shown = "".join(detokenizer.feed([token]) for token in ids) + detokenizer.flush()
    assert shown == TOKENIZER.decode(ids).rstrip("\ufffd")
    assert text.startswith(shown)


@both
@pytest.mark.parametrize("text", ["😀", "👩‍👩‍👧‍👦", "東京", "e\u0301", "🇫🇷", "नमस्ते"])
def test_characters_of_several_tokens_come_whole(make: Callable[[], Detokenizer], text: str) -> None:
    detokenizer = make()
    pieces = [detokenizer.feed([token]) for token in ids_of(text)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@both
def test_bytes_that_never_become_a_character_do_not_hold_the_text_back_for_ever(
    make: Callable[[], Detokenizer],
) -> None:
    detokenizer, broken = make(), TOKENIZER.token_to_id("Ģ")  # a continuation byte without a start
    shown = "".join(detokenizer.feed([broken]) for _ in range(3 * GIVE_UP_AFTER))
    assert shown
    assert "Paris" in shown + "".join(detokenizer.feed([token]) for token in ids_of(" Paris"))


@both
def test_special_tokens_are_not_shown(make: Callable[[], Detokenizer]) -> None:
    end = TOKENIZER.token_to_id("<|im_end|>")
    detokenizer = make()
    assert detokenizer.feed([*ids_of("Paris"), end]) + detokenizer.flush() == "Paris"


def test_a_continuation_keeps_the_space_that_a_first_word_loses() -> None:
    words = Tokenizer(models.WordLevel({"▁is": 0, "▁Paris": 1, "<unk>": 2}, unk_token="<unk>"))
    words.decoder = decoders.Metaspace()
    assert StreamDetokenizer(words).feed([1]) == "Paris"
    assert StreamDetokenizer(words, [0]).feed([1]) == " Paris"


BYTES = [TOKENIZER.token_to_id(letter) for letter in "abĠĢÂÃâĤ¬ðŁĺĢíłÿ"]


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.sampled_from([i for i in BYTES if i is not None]), max_size=30), st.integers(1, 4))
def test_whatever_the_bytes_are_the_text_is_the_decoded_whole(ids: list[int], size: int) -> None:
    detokenizer = ByteDetokenizer(Pieces(TOKENIZER, SPECIALS))
    shown = "".join(detokenizer.feed(ids[at : at + size]) for at in range(0, len(ids), size))
    whole = TOKENIZER.decode(ids)
    assert whole.startswith(shown)
    assert not whole.removeprefix(shown).rstrip("\ufffd")  # an incomplete character at most
    assert len(whole) - len(shown) <= 3


def test_an_added_token_is_read_as_the_tokenizer_reads_it() -> None:
    tokenizer = tiny_tokenizer()
    texts = ["<think>", "two words", "é", "東"]
    tokenizer.add_tokens([AddedToken(text, special=False) for text in texts])
    for text in texts:
        ids = [*ids_of("a"), tokenizer.token_to_id(text), *ids_of("b")]
        assert ByteDetokenizer(Pieces(tokenizer, set())).feed(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_continuation_completes_the_character_that_its_prompt_ends_within() -> None:
    ids = ids_of("東")
    assert len(ids) > 1
    assert ByteDetokenizer(Pieces(TOKENIZER, SPECIALS), [*ids_of("x"), *ids[:-1]]).feed(ids[-1:]) == "東"


def test_ids_that_are_no_tokens_show_nothing_and_are_not_kept() -> None:
    pieces = Pieces(TOKENIZER, SPECIALS)
    assert ByteDetokenizer(pieces).feed([10**9, *ids_of("a"), 2**40 % 2**32]) == "a"
    assert 10**9 not in pieces


def test_only_tokenizers_of_bytes_alone_are_read_as_bytes() -> None:
    assert is_byte_level(TOKENIZER)
    other = tiny_tokenizer()
    other.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert not is_byte_level(other)
    other.decoder = decoders.Metaspace()
    assert not is_byte_level(other)
