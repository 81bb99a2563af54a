from math import inf

from components.token_bucket import BURST_S, TokenBucket


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(rate: TokenBucket, requests: int, clock: Clock, gap_s: float = 0.0) -> int:
    count = 0
    for _ in range(requests):
        clock.now += gap_s
        count += rate.take()
    return count


def test_every_request_is_traced_while_they_are_few() -> None:
    clock = Clock()
    assert kept(TokenBucket(20, clock), 5000, clock, gap_s=0.06) == 5000


def test_under_load_so_many_a_second_are() -> None:
    clock = Clock()
    rate = TokenBucket(20, clock)
    kept(rate, 1000, clock)
    assert 19 * 10 <= kept(rate, 5000, clock, gap_s=0.002) <= 21 * 10


def test_a_burst_after_quiet_is_traced() -> None:
    clock = Clock()
    rate = TokenBucket(20, clock)
    assert kept(rate, 1000, clock) == 20 * BURST_S
    clock.now += 3600
    assert kept(rate, 1000, clock) == 20 * BURST_S


def test_zero_is_none_and_a_small_rate_still_begins_with_one() -> None:
    clock = Clock()
    assert kept(TokenBucket(0, clock), 100, clock, gap_s=1) == 0
    assert kept(TokenBucket(0.01, clock), 100, clock) == 1


def test_infinity_is_all() -> None:
    clock = Clock()
    assert kept(TokenBucket(inf, clock), 5000, clock) == 5000
