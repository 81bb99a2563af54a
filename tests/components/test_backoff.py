from components.backoff import Backoff


def test_waits_double_to_a_limit_with_jitter_and_start_over_after_success() -> None:
    """Without jitter, thousands of processes sent requests to a recovering etcd at the same moments."""
    backoff = Backoff(first_s=1, last_s=5)
    for most in (1, 2, 4, 5, 5):
        assert most / 2 <= backoff.failed() <= most
    assert backoff.failures == 5
    backoff.reset()
    assert backoff.failures == 0
    assert 0.5 <= backoff.failed() <= 1
    assert len({Backoff().failed() for _ in range(10)}) > 1


def test_without_jitter_waits_are_exact() -> None:
    backoff = Backoff(first_s=1, last_s=5, jitter=0.0)
    assert [backoff.failed() for _ in range(5)] == [1, 2, 4, 5, 5]
