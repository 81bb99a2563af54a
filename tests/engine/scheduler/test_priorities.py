"""The order of requests, the choice for preemption, and no starvation."""

from math import inf
from pathlib import Path

import pytest

from components.wire.sampling import SamplingParams
from engine.core.engine_core import EngineCore
from engine.ports import OVERTAKEN_TOKENS, OVERTAKERS, EngineRequest, Phase
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
    assert engine.step().stats.preemptions == 0


def test_the_youngest_of_the_worst_priority_is_preempted(tmp_path: Path, caplog) -> None:  # type: ignore[no-untyped-def]
    engine = make_mock(tmp_path, num_pages=12, reserve_tokens=0, max_step_tokens=120)
    requests = [request(name, int(name[0]), 17, 60) for name in ("0-old", "2-old", "1-old", "2-young", "0-young")]
    with caplog.at_level("INFO", logger="engine.scheduler.scheduler"):
        seen = run(engine, requests)
    preempted = [record.request_id for record in caplog.records if record.msg == "request preempted"]
    assert preempted[0] == "2-young"
    assert list(dict.fromkeys(preempted))[:2] == ["2-young", "2-old"]
    assert "0-old" not in preempted
    for one in requests:
        assert seen.tokens[one.request_id] == run(make_mock(tmp_path), [one]).tokens[one.request_id]


def test_a_worse_one_is_overtaken_by_so_many_and_no_more(tmp_path: Path) -> None:
    engine = make_mock(tmp_path, max_running=1)
    requests = [request("worse", 1), *(request(f"better{i}", 0) for i in range(OVERTAKERS + 20))]
    order = order_of_first_tokens(engine, requests)
    assert order.index("worse") in (OVERTAKERS - 1, OVERTAKERS)


def test_a_preempted_request_of_bad_priority_still_ends_under_a_stream_of_better_ones(tmp_path: Path) -> None:
    engine = make_mock(tmp_path, num_pages=8, reserve_tokens=0, max_running=4)
    engine.submit(request("poor", 1, 17, 80))
    seen = Seen()
    for i in range(5 * OVERTAKERS):
        engine.submit(request(f"rich{i}", 0, 17, 40))
        for _ in range(16):  # slightly faster than two at a time
            seen.take(engine.step())
        if "poor" in seen.finish:
            break
    assert len(seen.tokens["poor"]) == 80


def test_a_long_prompt_lets_shorter_ones_pass_that_come_soon_after_it(tmp_path: Path) -> None:
    engine = make_mock(tmp_path, num_pages=512, max_step_tokens=48, pack_tokens=10)
    length = 4 * OVERTAKEN_TOKENS
    long = [request("long", 0, length), request("longer", 0, 2 * length), request("as long", 0, length)]
    order = order_of_first_tokens(engine, [*long, *(request(f"{i}", 0) for i in range(8))])
    assert order == ["0", "long", "1", "2", "as long", "3", "4", "5", "longer", "6", "7"]


@pytest.mark.parametrize(("speedup", "steps"), [(1e6, [1800, 1200]), (inf, [3000])])
def test_prompts_share_a_step_until_they_keep_a_device_busy(tmp_path: Path, speedup: float, steps: list[int]) -> None:
    engine = make_mock(tmp_path, num_pages=2048, max_step_tokens=8192, mock={"speedup": speedup})
    for number in range(5):
        engine.submit(request(str(number), 0, 600))
    computed = []
    while engine.has_work():
        computed.append(engine.step().stats.prompt_tokens)
    assert [tokens for tokens in computed if tokens] == steps


def test_a_long_prompt_that_is_being_computed_delays_no_short_one(tmp_path: Path) -> None:
    """A short one waits for the step in flight and the next one."""
    engine = make_mock(tmp_path, num_pages=512, max_step_tokens=48)
    engine.submit(request("long", 0, 40 * 48))
    for _ in range(3):
        engine.step()
    seen = Seen()
    engine.submit(request("short", 0, max_tokens=20))
    engine.submit(request("as long", 0, 40 * 48))
    for _ in range(3):
        seen.take(engine.step())
    assert "short" in seen.tokens
    steps = 0
    while "long" not in seen.tokens:
        assert "as long" not in seen.tokens
        seen.take(engine.step())
        steps += 1
        check_pages(engine)
    assert steps < 42, "it goes on beside the short one's answer"


def test_no_request_waits_for_pages_that_a_later_one_was_given(tmp_path: Path) -> None:
    """Only computation is reordered: decode reserves pages first in, first out, and prefill holds its own until then."""
    engine = make_mock(tmp_path, num_pages=100, max_step_tokens=48, reserve_tokens=0)
    for name in ("first", "second"):
        engine.submit(EngineRequest(name, prompt(1000, start=len(name)), endless(1), Phase.PREFILL))
    for i in range(4):
        engine.submit(EngineRequest(f"{i}", prompt(100, start=i), endless(1), Phase.PREFILL))
    computed: list[str] = []
    for _ in range(200):
        computed += [one.request_id for one in engine.step().computed if one.first_token is not None]
    assert computed == ["first"], "it is held, and the second needs as many: the others stand behind it"
    engine.release("first")
    while engine.has_work():
        computed += [one.request_id for one in engine.step().computed if one.first_token is not None]
    assert computed == ["first", "0", "1", "second", "2", "3"]


def test_a_stream_of_short_prompts_passes_a_long_one_so_often_and_no_more(tmp_path: Path) -> None:
    """Even if a step has room only for a short one."""
    engine = make_mock(tmp_path, num_pages=512, max_step_tokens=48, pack_tokens=16)
    engine.submit(request("long", 0, 8 * OVERTAKEN_TOKENS))
    engine.step()
    seen = Seen()
    passed = 0
    while "long" not in seen.tokens:
        engine.submit(request(f"{passed}", 0, 40))
        passed += 1
        seen.take(engine.step())
        check_pages(engine)
        assert passed < 2 * (8 + 8 * OVERTAKEN_TOKENS // 48)


def test_a_step_of_priority_is_worth_more_than_any_length(tmp_path: Path) -> None:
    engine = make_mock(tmp_path, num_pages=8192, max_running=1, max_step_tokens=8192, model="mock")
    requests = [request("long", -1, 4000), request("short", 0)]
    engine.submit(request("computes", 0))
    engine.step()
    assert order_of_first_tokens(engine, requests)[-2:] == ["long", "short"]
