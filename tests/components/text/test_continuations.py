"""An answer's text continues its prompt's, also if a character's tokens are on both sides."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from components.text.tokenizer import TextModel


def sentence_pieces() -> Tokenizer:
    """Make a tokenizer of letters, and bytes for other characters, as in Llama 2, Mistral and Gemma."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefg", "▁yes"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


TOKENIZER = sentence_pieces()
MODEL = TextModel(TOKENIZER, None)
TEXTS = st.text(st.sampled_from("ab \n😻😹é東👍🏽"), max_size=60)


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


@settings(deadline=None)  # the machine may be busy
@given(TEXTS, TEXTS, st.booleans())
@example("x 😻😹", "😻😻 yes", False)
@example("a" * 40 + "😻" * 20, "b", False)
def test_the_pieces_are_what_the_decoded_whole_adds_to_the_prompt(prompt: str, answer: str, selective: bool) -> None:
    """The answer began with text of the prompt, or with "\ufffd"."""
    before, whole = ids_of(prompt), ids_of(prompt + answer)
    shown_specials = frozenset({TOKENIZER.token_to_id("</s>")}) if selective else frozenset()
    detokenizer = MODEL.detokenizer(before, shown_specials)
    pieces = [detokenizer.feed([token_id]) for token_id in whole[len(before) :]]
    shown = "".join(pieces) + detokenizer.flush()
    assert TOKENIZER.decode(before) + shown == TOKENIZER.decode(whole)
    assert all(piece == "" or "\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("prompt", ["broken \ufffd", "a \ufffd\ufffd\ufffd"])
def test_a_prompt_that_ends_with_a_replacement_character_is_not_repeated(prompt: str) -> None:
    before, whole = ids_of(prompt), ids_of(f"{prompt} yes")
    assert whole[: len(before)] == before
    assert MODEL.detokenizer(before).feed(whole[len(before) :]) == " yes"


def test_the_first_word_of_all_loses_its_space() -> None:
    assert MODEL.detokenizer().feed(ids_of("a")) == "a"
