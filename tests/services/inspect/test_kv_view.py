"""The cached prefixes of instances, from block hashes."""

from msgspec.structs import replace

from components.wire.tokens import block_hashes, seed_hash
from services.inspect.kv import Cache, hits, holders, most_shared
from tests.components.discovery.records import record
from tests.services.inspect.meshes import nixl

PROMPT = list(range(100))


def cache(
    name: str, num_tokens: int, page_size: int = 4, adapter: str = "", salt: str = "", missing: str = ""
) -> Cache:
    about = replace(record(name), kv=nixl(name), adapters={"legal": "w1"})
    seed = seed_hash("m", about.adapters.get(adapter, ""), salt)
    blocks = block_hashes(PROMPT[:num_tokens], page_size, seed)
    return Cache(about, page_size, {block: at for at, block in enumerate(blocks)}, missing)


def test_a_hit_counts_leading_tokens_in_whole_pages_of_each_instance() -> None:
    found = hits([cache("a", 10), cache("b", 64, page_size=32), cache("c", 0, missing="gone")], PROMPT)
    assert [(hit.instance, hit.cached_tokens, hit.missing) for hit in found] == [
        ("b", 64, ""),
        ("a", 8, ""),
        ("c", 0, "gone"),
    ]


def test_a_block_whose_parent_is_gone_is_no_hit() -> None:
    whole = cache("a", 40)
    blocks = dict(list(whole.blocks.items())[1:])
    assert hits([Cache(whole.record, 4, blocks)], PROMPT)[0].cached_tokens == 0


def test_adapters_and_salts_have_blocks_of_their_own() -> None:
    caches = [cache("plain", 40), cache("legal", 40, adapter="legal"), cache("salted", 40, salt="s")]
    by = {
        (adapter, salt): [hit.instance for hit in hits(caches, PROMPT, adapter, salt) if hit.cached_tokens]
        for adapter, salt in (("", ""), ("legal", ""), ("", "s"))
    }
    assert by == {("", ""): ["plain"], ("legal", ""): ["legal"], ("", "s"): ["salted"]}


def test_an_instance_without_the_adapter_has_nothing_of_it() -> None:
    """A misspelt adapter showed the hits of the model."""
    plain = cache("a", 40)
    [hit] = hits([plain], PROMPT, "leagl")
    assert (hit.cached_tokens, hit.missing) == (0, "it has no adapter 'leagl'")
    assert hits([plain], PROMPT)[0].cached_tokens == 40


def test_shared_blocks_are_grouped_by_their_holders_the_most_widely_held_first() -> None:
    groups = most_shared([cache("a", 40), cache("b", 40), cache("c", 8)])
    assert [(list(g.instances), g.blocks, g.tokens) for g in groups] == [(["a", "b", "c"], 2, 8), (["a", "b"], 8, 32)]
    last = groups[0].last_block
    assert holders([cache("a", 40), cache("c", 8), cache("d", 4)], last[:12]) == {last: {"a", "c"}}
    assert not most_shared([cache("a", 40)])
