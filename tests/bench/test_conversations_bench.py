"""bench.conversations: its requests, their order, and its figures from workers' counters."""

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import generate_latest

from bench.conversations import Talked, Turn, compare, conversations, converse, equal, spread
from bench.load.client import Run
from bench.processes import free_port
from bench.worker_counters import Counted, counted
from components.telemetry.worker_metrics import WorkerMetrics
from components.wire.step_stats import StepStats
from tests.bench.served import served


def make(draw: random.Random, count: int, turns: int, first_len: int = 0, system: str = "") -> list[list[Turn]]:
    return conversations(draw, count, turns, first_len=first_len, turn_len=40, output_len=7, think_s=0.5, system=system)


def test_conversations_share_what_is_asked_for_and_nothing_else() -> None:
    talks = make(random.Random(1), 30, 4, first_len=200, system="be brief")
    assert [len(talk) for talk in talks] == [4] * 30
    firsts = [talk[0].text for talk in talks]
    assert all(text.startswith("be brief ") for text in firsts)
    assert len({" ".join(text.split()[:14]) for text in firsts}) == 30
    assert all(222 <= len(text.split()) <= 262 for text in firsts)
    later = [turn for talk in talks for turn in talk[1:]]
    assert all(20 <= len(turn.text.split()) <= 60 and turn.output_len == 7 for turn in later)
    assert all(talk[0].think_s == 0 for talk in talks)
    assert sum(turn.think_s for turn in later) / len(later) == pytest.approx(0.5, rel=0.3)
    assert make(random.Random(1), 30, 4, first_len=200, system="be brief") == talks


@dataclass
class Endpoint:
    """A chat server whose answers name the request; a turn `fail` is refused."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most: int = 0

    async def events(self, body: dict[str, Any]) -> Any:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0.02)
        answer = f"to {body['messages'][-1]['content']}"
        deltas: list[dict[str, str]] = [
            {"role": "assistant", "content": ""},
            {"content": answer[:2]},
            {"content": answer[2:]},
        ]
        for delta in deltas:
            yield f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': None}]})}\n\n"
            await asyncio.sleep(0.02)
        yield f"data: {json.dumps({'choices': [{'delta': {}, 'finish_reason': 'length'}]})}\n\n"
        usage = {"prompt_tokens": len(body["messages"]), "completion_tokens": 2}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
        self.in_flight -= 1


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    app = FastAPI()
    port = free_port()
    state = Endpoint(f"http://127.0.0.1:{port}")

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        state.bodies.append(body)
        if body["messages"][-1]["content"] == "fail":
            return JSONResponse({"error": {"message": "not this"}}, 400)
        return StreamingResponse(state.events(body))

    with served(app, port):
        yield state


def test_a_turn_is_asked_behind_all_that_was_said(endpoint: Endpoint) -> None:
    talks = [[Turn(f"{who}{at}", 2) for at in range(3)] for who in "abc"]
    run, answers = asyncio.run(converse(endpoint.url, "m", talks, users=2))
    assert answers == [[f"to {who}{at}" for at in range(3)] for who in "abc"]
    assert (run.failed, len(run.ttft_s), run.prompt_tokens) == (0, 9, 3 * (1 + 3 + 5))
    assert endpoint.most == 2
    [last] = [body for body in endpoint.bodies if body["messages"][-1]["content"] == "b2"]
    assert [(m["role"], m["content"]) for m in last["messages"]] == [
        ("user", "b0"),
        ("assistant", "to b0"),
        ("user", "b1"),
        ("assistant", "to b1"),
        ("user", "b2"),
    ]
    assert all(ttft >= 0.04 for ttft in run.ttft_s), "who speaks is no token"
    assert (len(run.itl_s), len(run.ends_s)) == (9, 9)


def test_a_conversation_ends_with_a_turn_that_fails_and_a_user_pauses(endpoint: Endpoint) -> None:
    talks = [[Turn("a", 2), Turn("fail", 2), Turn("never", 2)], [Turn("b", 2), Turn("c", 2, think_s=0.3)]]
    run, answers = asyncio.run(converse(endpoint.url, "m", talks, users=1))
    assert answers == [["to a"], ["to b", "to c"]]
    assert (run.failed, len(run.ttft_s)) == (1, 3)
    assert "not this" in next(iter(run.reasons))
    assert [body["messages"][-1]["content"] for body in endpoint.bodies] == ["a", "fail", "b", "c"]
    assert run.duration_s >= 0.3


def test_a_workers_page_is_read_as_it_is_written() -> None:
    metrics = WorkerMetrics()
    before = counted(generate_latest(metrics.registry).decode())
    assert before == (0, 0, 0)
    metrics.record(StepStats(prompt_tokens=300, prefix_queries=370, prefix_hits=70, decode_tokens=5, step_s=0.1))
    metrics.transferred("d", 1000, 0.1)
    assert counted(generate_latest(metrics.registry).decode()).since(before) == (300, 70, 1)
    with pytest.raises(TypeError):
        counted("kvmesh_prompt_tokens_total 3.0\n")


def talked(prefills: list[Counted], local: float, ttft_s: float) -> dict[str, Any]:
    run = Run(ttft_s=[ttft_s] * 8, prompt_tokens=1000, duration_s=2.0)
    return Talked(run, [], prefills, [Counted(local, 40, 0)]).figures()


def test_what_decode_computes_itself_counts() -> None:
    found = talked([Counted(100, 300, 3), Counted(300, 0, 5)], 50, 0.2)
    assert (found["computed"], found["computed_by_decode"], found["prefill_found"], found["decode_found"]) == (
        450,
        50,
        300,
        40,
    )
    assert (found["load_spread"], found["requests_spread"]) == (1.5, 1.25)
    assert spread([]) == spread([0, 0]) == 0


def test_a_target_is_met_by_medians_over_rounds() -> None:
    even = [Counted(250, 0, 4)] * 4
    lines = [{"label": "round_robin", **talked(even, 0, ttft)} for ttft in (0.2, 0.3, 0.4)]
    lines += [{"label": "kv_aware", **talked([Counted(90, 0, 4)] * 4, 30, ttft)} for ttft in (0.5, 0.1, 0.1)]
    found = compare(lines, "kv_aware", "round_robin")
    assert (found["computed"], found["met_computed"]) == (0.39, True)
    assert (found["load_spread"], found["met_load_spread"]) == (1, True)
    assert (found["ttft_ms_p50"], found["met_ttft_ms_p50"]) == (0.333, True)
    uneven = [{"label": "kv_aware", **talked([Counted(500, 0, 8), *even[:3]], 0, 0.9)}]
    found = compare(lines[:3] + uneven, "kv_aware", "round_robin")
    assert not any(found[f"met_{name}"] for name in ("computed", "load_spread", "ttft_ms_p50"))


def test_answers_are_compared_conversation_by_conversation() -> None:
    assert equal([[["a", "b"], ["c"]], [["a", "b"], ["x"]]]) == "1 of 2"
