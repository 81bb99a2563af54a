from bench.host_step import WAYS, decode_steps


def test_a_step_is_measured_for_each_way_of_sampling_and_each_sampler() -> None:
    for way in WAYS:
        for sampler in ("cpu", "device"):
            measured = decode_steps(3, 2, way, sampler)
            assert all(seconds > 0 for seconds in measured.spent_s)
            assert measured.launches == (2 if sampler == "device" else None), "the kernel, and the ids to the host"
