from engine.kv.page_pool import PrefixCache


def test_the_longest_known_prefix_is_matched() -> None:
    prefix = PrefixCache()
    prefix.insert([b"a", b"b", b"c"], [7, 3, 5])
    assert prefix.match([b"a", b"b", b"x"]) == [7, 3]
    assert prefix.match([b"x", b"a"]) == []


def test_a_chain_with_a_forgotten_link_is_matched_up_to_it() -> None:
    prefix = PrefixCache()
    prefix.insert([b"a", b"b", b"c"], [7, 3, 5])
    prefix.forget(3)
    assert prefix.match([b"a", b"b", b"c"]) == [7]
    assert 3 not in prefix


def test_a_block_that_is_known_already_keeps_its_page() -> None:
    prefix = PrefixCache()
    prefix.insert([b"a"], [7])
    prefix.insert([b"a"], [8])
    assert prefix.match([b"a"]) == [7]
    assert 8 not in prefix
