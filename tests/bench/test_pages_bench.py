import random

from bench.pages import CASES, Traffic, deal


def test_every_prompt_gets_its_pages() -> None:
    traffic = Traffic(256, 4, (20, 200), (5, 60))
    dealt = list(deal(traffic, 200, random.Random(1)))
    assert len(dealt) == 200
    assert all(2 <= len(set(pages)) == len(pages) <= 13 for pages, _ in dealt)
    assert all(seconds > 0 for _, seconds in dealt)


def test_the_pools_hold_what_lives_in_them_at_once() -> None:
    for traffic in CASES:
        longest = -(-(traffic.prompt_tokens[1] + traffic.answer_tokens[1]) // 16)
        assert traffic.live * longest < traffic.num_pages
