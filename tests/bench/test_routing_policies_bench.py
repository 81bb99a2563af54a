from bench.routing_policies import book_us, heartbeat_us, policy_us


def test_every_part_of_a_route_is_measured() -> None:
    assert 0 < policy_us("random", 10, route=False) < policy_us("random", 10, route=True)
    assert book_us(10) > 0
    assert heartbeat_us(10) > 0
