"""`fastokens` is used only if its tokens are those of `tokenizers`."""

import logging
from collections.abc import Callable
from typing import Any

import fastokens
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from components.text.encoder import Encoder
from tests.components.text.tiny_model import LINES, tiny_tokenizer

RUNS = st.sampled_from(
    ["a", " ", "\n", "7", "é", "東", "!?", "🙂", "\u0301", "\x00", "'s", "<|im_start|>", "<b>", "word "]
)
LONG = st.lists(st.tuples(RUNS, st.sampled_from([1, 2, 40, 1500])), max_size=12).map(
    lambda runs: "".join(piece * times for piece, times in runs)
)


def with_template(tokenizer: Tokenizer) -> Tokenizer:
    """Add a token before each text, and added tokens of every kind."""
    tokenizer.add_special_tokens([AddedToken("<b>", lstrip=True), AddedToken("<e>", rstrip=True)])
    tokenizer.add_tokens([AddedToken("东京", normalized=False), AddedToken("word", single_word=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<b> $A", special_tokens=[("<b>", tokenizer.token_to_id("<b>"))]
    )
    return tokenizer


def split_by_digits() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def composed() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def plain(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


MADE: dict[str, Tokenizer] = {
    "byte-level": tiny_tokenizer(),
    "special": with_template(tiny_tokenizer()),
    "digits": split_by_digits(),
    "nfc": composed(),
}
ENCODERS = {name: Encoder(tokenizer) for name, tokenizer in MADE.items()}


@pytest.mark.parametrize("name", MADE)
@given(text=st.one_of(st.text(st.characters(exclude_categories=["Cs"])), LONG), special=st.booleans())
def test_gives_what_tokenizers_gives(name: str, text: str, special: bool) -> None:
    encoder = ENCODERS[name]
    assert encoder._fast is not None
    assert encoder.encode(text, add_special_tokens=special) == plain(MADE[name], text, add_special_tokens=special)


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "Hello": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def pieces() -> Tokenizer:
    return Tokenizer(models.Unigram([("<unk>", 0.0), ("Hello", -1.0), ("▁", -2.0)], unk_id=0))


@pytest.mark.parametrize("make", [word_level, pieces])
def test_a_kind_that_fastokens_does_not_know_is_encoded_all_the_same(
    make: Callable[[], Tokenizer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tokenizer = make()
    encoder = Encoder(tokenizer)
    for text in LINES:
        assert encoder.encode(text, add_special_tokens=True) == plain(tokenizer, text, add_special_tokens=True)
    assert encoder._fast is not None or "encoding by tokenizers" in caplog.text


class Wrong:
    """A `fastokens.Tokenizer` with a wrong token, and an error for long texts."""

    def __init__(self, tokenizer: Any, *, off: int = 1, longest: int = 2**20) -> None:
        self._tokenizer = tokenizer
        self._off = off
        self._longest = longest

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        if len(texts[0]) > self._longest:
            raise ValueError("match limit exceeded")
        [encoding] = self._tokenizer.encode_batch(texts, add_special_tokens)
        return [type("Encoding", (), {"ids": [i + self._off for i in encoding.ids]})]


def test_one_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make = fastokens.Tokenizer.from_json_str
    monkeypatch.setattr(
        fastokens, "Tokenizer", type("T", (), {"from_json_str": staticmethod(lambda t: Wrong(make(t)))})
    )
    encoder = Encoder(tiny_tokenizer())
    assert encoder._fast is None
    assert "fastokens gives other ids" in caplog.text
    assert encoder.encode(LINES[0], add_special_tokens=False) == plain(
        tiny_tokenizer(), LINES[0], add_special_tokens=False
    )


def test_a_text_that_is_too_much_for_it_is_encoded_by_tokenizers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = fastokens.Tokenizer.from_json_str
    limited = type("T", (), {"from_json_str": staticmethod(lambda t: Wrong(make(t), off=0, longest=2**18))})
    monkeypatch.setattr(fastokens, "Tokenizer", limited)
    encoder = Encoder(tiny_tokenizer())
    assert encoder._fast is not None
    text = LINES[0] * 20_000
    assert encoder.encode(text, add_special_tokens=False) == plain(tiny_tokenizer(), text, add_special_tokens=False)
    assert "match limit exceeded" in str([record.__dict__ for record in caplog.records])


class PanicException(BaseException):
    """The name of pyo3's error after a panic."""


@pytest.mark.parametrize("when", ["made", "asked"])
def test_a_panic_is_no_end(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    make = fastokens.Tokenizer.from_json_str

    class Panics(Wrong):
        def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
            if "Paris" in texts[0]:
                raise PanicException("called `Option::unwrap()` on a `None` value")
            return super().encode_batch(texts, add_special_tokens)

    def made(text: str) -> Panics:
        if when == "made":
            raise PanicException("unreachable")
        return Panics(make(text), off=0)

    monkeypatch.setattr(fastokens, "Tokenizer", type("T", (), {"from_json_str": staticmethod(made)}))
    encoder = Encoder(tiny_tokenizer())
    assert (encoder._fast is not None) == (when == "asked")
    text = "The capital of France is Paris."
    assert encoder.encode(text, add_special_tokens=False) == plain(tiny_tokenizer(), text, add_special_tokens=False)


def test_who_stops_this_process_is_not_taken_for_a_panic(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fastokens, "Tokenizer", type("T", (), {"from_json_str": staticmethod(stopped)}))
    with pytest.raises(KeyboardInterrupt):
        Encoder(tiny_tokenizer())


def test_every_added_token_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([f"<special {i}>" for i in range(200)])
    make = fastokens.Tokenizer.from_json_str

    class WrongAtTheLast(Wrong):
        def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
            self._off = int("<special 199>" in texts[0])
            return super().encode_batch(texts, add_special_tokens)

    wrong = type("T", (), {"from_json_str": staticmethod(lambda t: WrongAtTheLast(make(t)))})
    monkeypatch.setattr(fastokens, "Tokenizer", wrong)
    assert Encoder(tokenizer)._fast is None
