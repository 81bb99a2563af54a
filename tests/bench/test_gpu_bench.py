"""The arithmetic of bench.gpu; the rest of it needs a device."""

from bench.gpu import idle_share


def test_time_in_which_no_kernel_ran_is_idle_and_kernels_may_overlap() -> None:
    assert idle_share([(0, 4), (1, 2), (3, 5), (6, 10)]) == 0.1
    assert idle_share([(7, 8)]) == 0.0
