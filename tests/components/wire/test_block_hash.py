import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.routing.kv_index import KvIndex
from components.wire.tokens import HASH_BYTES, PromptBlocks, block_hashes, pack_tokens, seed_hash

tokens = st.lists(st.integers(0, 50_000), max_size=70)
SEED = seed_hash("m", "l", "s")


def test_the_hash_never_changes_in_silence() -> None:
    """Versions meet in one mesh, so another hash needs another name."""
    assert seed_hash("smollm2-135m").hex() == "9c64c1702e52f368ca8151c2c25cc74d"
    assert SEED.hex() == "788a6f635e45be00cd93957c6563dc8a"
    assert [h.hex() for h in block_hashes(range(8), 4, SEED)] == [
        "b834e6d7eb51d6696474628e07095f2a",
        "7bc1e35260583994bb6c78ba8b298c93",
    ]


@given(tokens, st.sampled_from([1, 4, 16]))
def test_there_is_one_hash_a_full_page_and_none_for_a_partial_one(token_ids: list[int], page_size: int) -> None:
    hashes = block_hashes(token_ids, page_size, SEED)
    assert len(hashes) == len(token_ids) // page_size
    assert all(len(h) == HASH_BYTES for h in hashes)
    assert hashes == block_hashes(token_ids[: len(hashes) * page_size], page_size, SEED)


@given(tokens, st.integers(0, 70))
def test_equal_prefixes_have_equal_hashes_and_the_rest_has_not(token_ids: list[int], at: int) -> None:
    changed = [t + 1 if i == at else t for i, t in enumerate(token_ids)]
    same = min(at, len(token_ids)) // 4 if changed != token_ids else len(token_ids) // 4
    ours, theirs = block_hashes(token_ids, 4, SEED), block_hashes(changed, 4, SEED)
    assert ours[:same] == theirs[:same]
    assert not set(ours[same:]) & set(theirs[same:])


def test_a_block_hash_depends_on_all_tokens_before_it() -> None:
    one, two = block_hashes([1, 2, 1, 2], 2, SEED)
    assert one != two
    assert [two] == block_hashes([1, 2], 2, one)


@pytest.mark.parametrize("other", [("n", "l", "s"), ("m", "x", "s"), ("m", "l", "x"), ("m", "s", "l"), ("ml", "", "s")])
def test_models_adapters_and_tenants_share_no_block(other: tuple[str, str, str]) -> None:
    assert not set(block_hashes(range(8), 4, SEED)) & set(block_hashes(range(8), 4, seed_hash(*other)))


def test_page_sizes_share_no_block() -> None:
    assert not set(block_hashes([0] * 32, 4, SEED)) & set(block_hashes([0] * 32, 8, SEED))


def test_hashes_are_computed_as_far_as_they_are_read() -> None:
    tokens = list(range(4 * 10 + 3))
    expected = block_hashes(tokens, 4, SEED)
    blocks = PromptBlocks(pack_tokens(tokens), SEED)(4)
    assert len(blocks) == 10
    one, two = iter(blocks), iter(blocks)
    assert [next(one), next(one)] == expected[:2]
    assert blocks._made == expected[:2], "and no further"
    assert list(two) == expected
    assert list(one) == expected[2:], "each reader gets all, whoever made them"
    fresh = PromptBlocks(pack_tokens(tokens), SEED)(4)
    assert (fresh[:3], fresh[-1], len(fresh)) == (expected[:3], expected[-1], 10)
    assert list(PromptBlocks(b"", SEED)(4)) == []


def test_a_lookup_stops_at_the_first_block_without_a_holder() -> None:
    tokens = list(range(4 * 100))
    index = KvIndex()
    index.add("a", block_hashes(tokens[: 4 * 3], 4, SEED))
    index.add("b", block_hashes(tokens[: 4 * 7], 4, SEED))
    blocks = PromptBlocks(pack_tokens(tokens), SEED)(4)
    assert index.find(blocks) == {"a": 3, "b": 7}
    assert len(blocks._made) == 8
