import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.output.reasoning import MISTRAL_THINK, THINK, Reasoning


def split(
    text: str, *, opened: bool, cuts: list[int] | range = range(0), marks: tuple[str, str] = THINK
) -> tuple[str, str]:
    reasoning = Reasoning(*marks, opened=opened)
    thought = said = ""
    at = 0
    for cut in [*cuts, len(text)]:
        new = reasoning.feed(text[at:cut])
        thought, said, at = thought + new.reasoning, said + new.text, cut
    last = reasoning.flush()
    return thought + last.reasoning, said + last.text


CASES = [
    ("<think>\nhm\n\nso\n</think>\n\nParis. \n", False, ("hm\n\nso", "Paris. \n")),
    (" \n<think>hm</think>Paris", False, ("hm", "Paris")),
    ("hm\n</think>\n\nParis", True, ("hm", "Paris")),
    ("<think>hm</think>Paris", True, ("hm", "Paris")),
    ("hm </thin k></think>", True, ("hm </thin k>", "")),
    ("hm, cut off </thi", True, ("hm, cut off </thi", "")),
    ("<think>\n\n</think>\n\nParis", False, ("", "Paris")),
    ("Paris <think>not</think>", False, ("", "Paris <think>not</think>")),
    (" \nParis", False, ("", " \nParis")),
    ("<thi", False, ("", "<thi")),
    ("<thi", True, ("<thi", "")),
    ("a</think>b<think>c</think>d", True, ("a", "b<think>c</think>d")),
    ("", False, ("", "")),
    ("", True, ("", "")),
    (" \n", False, ("", " \n")),
    ("</think>", True, ("", "")),
]


@pytest.mark.parametrize(("text", "opened", "expected"), CASES)
def test_reasoning_is_separated_wherever_the_text_is_cut(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert split(text, opened=opened) == expected
    assert split(text, opened=opened, cuts=range(len(text))) == expected
    for cut in range(len(text)):
        assert split(text, opened=opened, cuts=[cut]) == expected


def test_mistrals_marks_are_marks_too() -> None:
    assert split("[THINK]a[/THINK]b", opened=False, marks=MISTRAL_THINK) == ("a", "b")


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", " ", "\n", "a", "é"]), max_size=12),
    st.booleans(),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_no_text_depends_on_how_it_is_cut(pieces: list[str], opened: bool, cuts: list[int]) -> None:
    text = "".join(pieces)
    found = split(text, opened=opened)
    assert split(text, opened=opened, cuts=sorted(cut for cut in cuts if cut < len(text))) == found
    if "<think>" not in text and not opened:
        assert found == ("", text)
