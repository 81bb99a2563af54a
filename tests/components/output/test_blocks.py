from hypothesis import given, settings
from hypothesis import strategies as st

from components.output.blocks import Blocks
from components.output.calls import Call, CallDelta, whole_calls

PIECES = st.lists(st.tuples(st.sampled_from(["", "a", "bb"]), st.sampled_from(["", "c", "dd"])), max_size=12)


@settings(deadline=None)  # the machine may be busy
@given(PIECES, st.lists(st.text("xy", max_size=6), max_size=3))
def test_blocks_hold_all_text_in_order_and_never_two_of_a_kind_in_a_row(
    pieces: list[tuple[str, str]], arguments: list[str]
) -> None:
    blocks = Blocks()
    steps = [step for reasoning, text in pieces for step in blocks.feed(reasoning, text, ())]
    deltas = [
        delta
        for i, whole in enumerate(arguments)
        for delta in (CallDelta(i, f"id{i}", f"f{i}", ""), *(CallDelta(i, None, None, char) for char in whole))
    ]
    steps += [step for delta in deltas for step in blocks.feed("", "", [delta])]
    for kind, expected in (("reasoning", [p[0] for p in pieces]), ("text", [p[1] for p in pieces])):
        assert "".join(block.text for block in blocks.all if block.kind == kind) == "".join(expected)
    assert [Call(b.id, b.name, b.text) for b in blocks.all if b.kind == "call"] == whole_calls(deltas)
    assert [block.index for block in blocks.all] == list(range(len(blocks.all)))
    kinds = [block.kind for block in blocks.all if block.kind != "call"]
    assert all(kinds[i] != kinds[i - 1] for i in range(1, len(kinds)))
    begun = [step.block for step in steps if step.begins]
    assert begun == blocks.all
    assert [step.ended for step in steps if step.ended is not None] == blocks.all[:-1], "each ends as the next begins"


def test_a_whole_answer_has_the_blocks_of_its_stream() -> None:
    blocks = Blocks()
    blocks.add("Hm.", "See.", [CallDelta(0, "1", "f", "{}"), CallDelta(1, "2", "f", '{"a":1}')])
    assert [(block.kind, block.id, block.text) for block in blocks.all] == [
        ("reasoning", "", "Hm."),
        ("text", "", "See."),
        ("call", "1", "{}"),
        ("call", "2", '{"a":1}'),
    ]
    empty = Blocks()
    empty.add("", "", [])
    assert empty.all == []


def test_text_that_comes_with_the_rest_of_a_call_follows_it() -> None:
    """It split the call, and the second part had no id and no name."""
    blocks = Blocks()
    second = [CallDelta(1, "id1", "g", ""), CallDelta(1, None, None, "{}")]
    for text, calls in (
        ("", [CallDelta(0, "id0", "f", ""), CallDelta(0, None, None, '{"a"')]),
        ("So:", [CallDelta(0, None, None, ": "), CallDelta(0, None, None, "1}"), *second]),
    ):
        list(blocks.feed("", text, calls))
    assert [(block.kind, block.id, block.name, block.text) for block in blocks.all] == [
        ("call", "id0", "f", '{"a": 1}'),
        ("text", "", "", "So:"),
        ("call", "id1", "g", "{}"),
    ]
