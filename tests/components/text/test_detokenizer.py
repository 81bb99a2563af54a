import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from components.text.detokenizer import GIVE_UP_AFTER, Detokenizer
from tests.components.text.tiny_model import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PRINTABLE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=40).filter(
    lambda text: not any(token in text for token in ("<|im_start|>", "<|im_end|>"))  # these are skipped
)


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


@settings(deadline=None)  # the machine may be busy
@given(PRINTABLE, st.lists(st.integers(1, 5), min_size=1))
def test_the_pieces_are_the_decoded_whole_and_none_has_a_broken_character(text: str, sizes: list[int]) -> None:
    ids, detokenizer = ids_of(text), Detokenizer(TOKENIZER)
    pieces: list[str] = []
    while ids:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(detokenizer.feed(ids[:size]))
        ids = ids[size:]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == TOKENIZER.decode(ids_of(text)) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None)  # the machine may be busy
@given(PRINTABLE, st.integers(0, 200))
def test_an_end_within_a_character_drops_only_that_character(text: str, cut: int) -> None:
    ids = ids_of(text)[: cut % (len(text) * 4 + 1)]
    detokenizer = Detokenizer(TOKENIZER)
    shown = "".join(detokenizer.feed([token]) for token in ids) + detokenizer.flush()
    assert shown == TOKENIZER.decode(ids).rstrip("\ufffd")
    assert text.startswith(shown)


@pytest.mark.parametrize("text", ["😀", "👩‍👩‍👧‍👦", "東京", "e\u0301", "🇫🇷", "नमस्ते"])
def test_characters_of_several_tokens_come_whole(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.feed([token]) for token in ids_of(text)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_bytes_that_never_become_a_character_do_not_hold_the_text_back_for_ever() -> None:
    detokenizer, broken = Detokenizer(TOKENIZER), TOKENIZER.token_to_id("Ģ")  # a continuation byte without a start
    shown = "".join(detokenizer.feed([broken]) for _ in range(3 * GIVE_UP_AFTER))
    assert shown
    assert "Paris" in shown + "".join(detokenizer.feed([token]) for token in ids_of(" Paris"))


def test_special_tokens_are_not_shown() -> None:
    end = TOKENIZER.token_to_id("<|im_end|>")
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.feed([*ids_of("Paris"), end]) + detokenizer.flush() == "Paris"


def test_a_continuation_keeps_the_space_that_a_first_word_loses() -> None:
    words = Tokenizer(models.WordLevel({"▁is": 0, "▁Paris": 1, "<unk>": 2}, unk_token="<unk>"))
    words.decoder = decoders.Metaspace()
    assert Detokenizer(words).feed([1]) == "Paris"
    assert Detokenizer(words, [0]).feed([1]) == " Paris"
