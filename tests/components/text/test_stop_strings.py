from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from components.text.detokenizer import StopStrings

LETTERS = st.text(alphabet="ab", max_size=24)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, stops: list[str], early: int = 0) -> tuple[str, bool]:
    """Apply the definition: the first end at which a stop string is complete, and the longest of those."""
    for end in range(early + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def shown_of(pieces: list[str], stops: list[str], early: int = 0) -> tuple[str, bool]:
    stopper, shown = StopStrings(stops), ""
    for i, piece in enumerate(pieces):
        text, matched = stopper.feed(piece, counts=i >= early)
        shown += text
        if matched:
            return shown, True
    return shown + stopper.flush(), False


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@settings(deadline=None)  # the machine may be busy
@given(LETTERS, STOPS, st.lists(st.integers(0, 1000), max_size=8))
def test_any_cut_of_the_text_gives_the_defined_result(text: str, stops: list[str], cuts: list[int]) -> None:
    assert shown_of(cut(text, cuts), stops) == expected(text, stops)


@settings(deadline=None)  # the machine may be busy
@given(LETTERS, STOPS)
def test_exactly_what_could_still_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    before, matched = expected(text, stops)
    if matched:
        return
    stopper = StopStrings(stops)
    shown, _ = stopper.feed(text)
    could_become = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    assert len(before) - len(shown) == max(could_become, default=0)


def test_a_stop_string_across_three_pieces_is_cut_out() -> None:
    assert shown_of(["one <", "en", "d> two"], ["<end>"]) == ("one ", True)


def test_a_false_start_is_shown_as_soon_as_it_is_one() -> None:
    stopper = StopStrings(["<end>"])
    assert stopper.feed("a<en") == ("a", False)
    assert stopper.feed("tity>") == ("<entity>", False)


def test_the_end_of_the_text_frees_what_was_held() -> None:
    stopper = StopStrings(["\n\n"])
    assert stopper.feed("line\n") == ("line", False)
    assert stopper.flush() == "\n"


def test_a_long_stop_string_costs_no_more_per_character() -> None:
    stopper = StopStrings(["a" * 1000 + "b"])
    shown = "".join(stopper.feed("a")[0] for _ in range(5000)) + stopper.flush()
    assert shown == "a" * 5000


@settings(deadline=None)
@given(LETTERS, STOPS, st.integers(0, 24))
def test_a_stop_string_that_ends_too_early_is_text(text: str, stops: list[str], early: int) -> None:
    assert shown_of(list(text), stops, early) == expected(text, stops, early)
