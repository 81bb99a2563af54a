"""The requests and figures of bench.long_prompts."""

import json

from bench.long_prompts import Load, Requests, _figures


def test_requests_are_whole_and_no_two_prompts_begin_alike() -> None:
    requests = Requests("m", 100, 2)
    prompts = set()
    for _ in range(20):
        head, _, body = requests.next().partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}\r\n".encode() in head + b"\r\n"
        [message] = json.loads(body)["messages"]
        assert len(message["content"].split()) == 100
        prompts.add(" ".join(message["content"].split()[:12]))
    assert len(prompts) == 20


def test_the_largest_stall_is_told_beside_the_quantiles() -> None:
    load = Load(short_s=[0.01, 0.02, 0.03], health_s=[0.001] * 99 + [0.2], stall_s=[0.0, 0.004])
    figures = _figures(load, label="x")
    assert (figures["short_ttft_ms_p50"], figures["health_ms_p50"], figures["health_ms_max"]) == (20.0, 1.0, 200.0)
    assert (figures["client_stall_ms_max"], figures["failed"], figures["label"]) == (4.0, 0, "x")
