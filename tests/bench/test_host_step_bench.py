from bench.host_step import WAYS, decode_steps, launches


def test_a_step_is_measured_for_each_way_of_sampling() -> None:
    for params in WAYS.values():
        assert all(seconds > 0 for seconds in decode_steps(3, 2, params))
        assert all(seconds > 0 for seconds in decode_steps(3, 2, params, on_device=True))
        assert launches(params) == 2, "the kernel, and the ids to the host"
