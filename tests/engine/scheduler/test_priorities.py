"""Who goes first, who gives way when pages run out, and that nobody waits for ever."""

from pathlib import Path

import pytest

from engine.core import EngineCore
from engine.ports import EngineRequest, SamplingParams
from engine.scheduler.scheduler import OVERTAKERS
from tests.engine.mock_engine import make_mock
from tests.engine.tiny_engine import Seen, check_pages, greedy, prompt, run

pytestmark = pytest.mark.usefixtures("pipeline")


def endless(max_tokens: int) -> SamplingParams:
    return greedy(max_tokens, ignore_eos=True)


def request(name: str, priority: int, length: int = 10, max_tokens: int = 1) -> EngineRequest:
    return EngineRequest(name, prompt(length, start=sum(name.encode()) % 97), endless(max_tokens), priority=priority)


def order_of_first_tokens(engine: EngineCore, requests: list[EngineRequest]) -> list[str]:
    for one in requests:
        engine.submit(one)
    order: list[str] = []
    while engine.has_work():
        order += [t.request_id for t in engine.step().tokens if t.request_id not in order]
        check_pages(engine)
    return order


def test_lower_numbers_go_first_and_equals_in_order_of_arrival(tmp_path: Path) -> None:
    engine = make_mock(tmp_path, max_running=1)
    requests = [request(f"{priority}{i}", priority) for i in range(3) for priority in (1, 0, -1)]
    assert order_of_first_tokens(engine, requests) == ["-10", "-11", "-12", "00", "01", "02", "10", "11", "12"]


def test_the_running_batch_is_not_disturbed_by_a_better_one(tmp_path: Path) -> None:
    engine = make_mock(tmp_path, max_running=1)
    engine.submit(request("first", 5, max_tokens=9))
    engine.step()
    assert order_of_first_tokens(engine, [request("urgent", 0)]) == ["first", "urgent"]
    assert engine.step().stats.retractions == 0


def test_the_youngest_of_the_worst_priority_is_retracted(tmp_path: Path, caplog) -> None:  # type: ignore[no-untyped-def]
    engine = make_mock(tmp_path, num_pages=12, reserve_tokens=0, max_step_tokens=120)
    requests = [request(name, int(name[0]), 17, 60) for name in ("0-old", "2-old", "1-old", "2-young", "0-young")]
    with caplog.at_level("INFO", logger="engine.scheduler.scheduler"):
        seen = run(engine, requests)
    retracted = [record.request_id for record in caplog.records if record.msg == "request retracted"]
    assert retracted[0] == "2-young"
    assert list(dict.fromkeys(retracted))[:2] == ["2-young", "2-old"]
    assert "0-old" not in retracted
    for one in requests:
        assert seen.tokens[one.request_id] == run(make_mock(tmp_path), [one]).tokens[one.request_id]


def test_a_worse_one_is_overtaken_by_so_many_and_no_more(tmp_path: Path) -> None:
    engine = make_mock(tmp_path, max_running=1)
    requests = [request("worse", 1), *(request(f"better{i}", 0) for i in range(OVERTAKERS + 20))]
    order = order_of_first_tokens(engine, requests)
    assert order.index("worse") in (OVERTAKERS - 1, OVERTAKERS)


def test_a_retracted_request_of_bad_priority_still_ends_under_a_stream_of_better_ones(tmp_path: Path) -> None:
    engine = make_mock(tmp_path, num_pages=8, reserve_tokens=0, max_running=4)
    engine.submit(request("poor", 1, 17, 80))
    seen = Seen()
    for i in range(5 * OVERTAKERS):
        engine.submit(request(f"rich{i}", 0, 17, 40))
        for _ in range(16):  # they come a little faster than two at a time can go
            seen.take(engine.step())
        if "poor" in seen.finish:
            break
    assert len(seen.tokens["poor"]) == 80
