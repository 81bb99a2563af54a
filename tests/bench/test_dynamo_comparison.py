import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from bench.closed_loop import Prompts, Run, figures, measure
from bench.mesh import mock_env
from bench.peers.dynamo import KVMESH, NODELAY, STOCK, Case, count_stream, verdicts, with_sums
from bench.peers.dynamo_servers import (
    VERSION,
    NoDelay,
    check_environment,
    compile_nodelay,
    ready_line,
    routed_cached_tokens,
    worker_options,
)

CHUNK = 'data: {"id":"x","choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n'
USAGE = 'data: {"id":"x","choices":[],"usage":{"prompt_tokens":230,"completion_tokens":%d}}\n\n'
CLIENTS = 2
SOCKETS = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
opened = socket.create_connection(listener.getsockname())
accepted, _ = listener.accept()
print([s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in (accepted, opened)])
"""


def stream(tokens: int) -> bytes:
    events = [*[CHUNK % "a"] * tokens, USAGE % tokens, "data: [DONE]\n\n"]
    chunks = [f"{len(event):x}\r\n{event}\r\n" for event in events]
    return ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + "".join(chunks) + "0\r\n\r\n").encode()


@asynccontextmanager
async def answering(answer: bytes, piece: int) -> AsyncIterator[int]:
    """Serve the same answer to every request, in pieces of `piece` bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):  # the client has closed
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                for start in range(0, len(answer), piece):
                    writer.write(answer[start : start + piece])
                    await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()
        closed.release()

    closed = asyncio.Semaphore(0)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        for _ in range(CLIENTS):
            await closed.acquire()


def load(answer: bytes, piece: int = 1 << 20) -> Run:
    async def run() -> Run:
        async with answering(answer, piece) as port:
            return await measure(port, Prompts("m", 200, 3), {"client": [os.getpid()]}, CLIENTS, seconds=0.5)

    return asyncio.run(run())


@pytest.mark.parametrize("piece", [100, 1 << 20])
def test_a_stream_ends_with_its_last_bytes_however_they_come(piece: int) -> None:
    run = load(stream(3), piece)
    assert run.failed == 0
    assert len(run.ttft_s) >= 2
    assert run.prompt_tokens == {230}
    line = figures(run, 3, label="x")
    assert line["requests"] == len(run.ttft_s)
    assert set(line["cpu_s_per_1k_tokens"]) == {"client"}
    if piece > 100:
        assert line["events_per_request"] == 4


def test_an_answer_of_another_length_fails_and_its_end_is_told() -> None:
    run = load(stream(2))
    assert (run.failed, run.ttft_s) == (CLIENTS, [])  # both clients stop
    assert '"completion_tokens":2' in run.answer_end


def test_an_error_in_the_stream_fails() -> None:
    assert load(stream(3).replace(b'"content":"a"', b'"error":"a"', 1)).failed == CLIENTS


def test_no_prompt_is_like_another() -> None:
    prompts = Prompts("m", 200, 64)
    texts = [json.loads(prompts.request().partition(b"\r\n\r\n")[2]) for _ in range(50)]
    beginnings = {" ".join(text["messages"][0]["content"].split()[:12]) for text in texts}
    assert len(beginnings) == 50
    assert {len(text["messages"][0]["content"].split()) for text in texts} == {200}
    assert texts[0]["stream_options"] == {"include_usage": True}


def test_events_with_text_and_tokens_are_counted_apart() -> None:
    text = CHUNK % "one" + CHUNK % "" + CHUNK % "two and three" + USAGE % 3 + "data: [DONE]\n\n"
    assert count_stream(text) == (2, 3)
    with pytest.raises(SystemExit, match="overloaded"):
        count_stream('data: {"error":{"message":"overloaded"}}\n\n')


def line(label: str, case: Case, clients: int, req_s: float, ttft: float, *, kv: bool = True) -> dict[str, Any]:
    spent = {"client": 0.004, "frontend": 0.02, "decode": 0.01}
    shape = {"case": case, "round": 0, "concurrency": clients, "routes_by_kv": kv, "cores_others": 0.1}
    measured = {"req_s": req_s, "ttft_ms_p50": ttft, "tpot_ms_p50": 6.0, "cpu_s_per_1k_tokens": spent}
    return with_sums({"label": label, **shape, **measured})


def judged(
    case: Case, clients: int, ours: tuple[float, float], *, kv: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    lines = [line(KVMESH, case, clients, *ours, kv=kv), line(STOCK, case, clients, 700, 44)]
    against_stock, against_nodelay = verdicts([*lines, line(NODELAY, case, clients, 800, 50)], case, clients)
    return against_stock, against_nodelay


def test_targets_are_judged_against_the_peer_that_does_not_wait() -> None:
    stock, nodelay = judged(Case.disaggregated, 64, (1400, 45))
    assert (stock["req_s"], nodelay["req_s"]) == (2.0, 1.75)
    assert not [name for name in stock if name.startswith("met_")]
    assert (nodelay["met_req_s"], nodelay["met_kvmesh_req_s"], nodelay["kvmesh_req_s"]) == (True, True, 1400)
    assert "met_ttft_ms_p50" not in nodelay  # a target only for one client
    assert nodelay["servers_cpu_s_per_1k_tokens"] == 1.0


def test_a_rate_of_our_own_and_a_ratio_are_missed_one_by_one() -> None:
    _, nodelay = judged(Case.disaggregated, 64, (1399, 45))
    assert (nodelay["met_req_s"], nodelay["met_kvmesh_req_s"]) == (True, False)


def test_paced_the_frontends_processor_time_is_a_target() -> None:
    _, nodelay = judged(Case.paced, 64, (900, 45))
    assert (nodelay["met_req_s"], nodelay["met_kvmesh_frontend_cpu_s_per_1k_tokens"]) == (False, True)
    assert nodelay["tpot_ms_p50"] == 1.0


def test_no_target_is_met_without_routing_by_kv() -> None:
    _, nodelay = judged(Case.disaggregated, 64, (1400, 45), kv=False)
    assert nodelay["everything_on"] is False
    assert not any(met for name, met in nodelay.items() if name.startswith("met_"))


def test_cached_tokens_of_all_phases_show_that_the_peer_routes_by_kv() -> None:
    name = "dynamo_component_router_kv_selected_cached_prefix_tokens_total"
    page = f'# HELP {name} x\n{name}{{phase="decode"}} 0\n{name}{{phase="prefill"}} 192\n{name}_other{{}} 7\n'
    assert routed_cached_tokens(page) == 192
    assert routed_cached_tokens(page.replace("192", "0")) == 0


def test_with_prefill_workers_the_peer_is_ready_when_it_knows_of_them() -> None:
    assert set(worker_options(disaggregated=True, bootstrap_port=1)) == {"prefill", "decode"}
    assert set(worker_options(disaggregated=False, bootstrap_port=1)) == {"worker"}
    assert ready_line(disaggregated=True) != ready_line(disaggregated=False)


def test_an_environment_without_the_version_is_refused_with_the_command_that_makes_it(tmp_path: Path) -> None:
    for name in ("ai_dynamo", "ai_dynamo_runtime"):
        with pytest.raises(SystemExit, match=rf"{name}-{VERSION}.*sh bench/peers/make_dynamo\.sh"):
            check_environment(tmp_path)
        (tmp_path / f"lib/python3.12/site-packages/{name}-{VERSION}.dist-info").mkdir(parents=True)
    check_environment(tmp_path)


@pytest.mark.parametrize(("where", "expected"), [(NoDelay.accepted, [1, 0]), (NoDelay.everywhere, [1, 1])])
def test_the_library_makes_a_process_send_at_once(tmp_path: Path, where: NoDelay, expected: list[int]) -> None:
    env = {**os.environ, "LD_PRELOAD": str(compile_nodelay(tmp_path, where))}
    told = subprocess.run([sys.executable, "-c", SOCKETS], env=env, capture_output=True, text=True, check=True)
    assert json.loads(told.stdout) == expected


def test_mock_engines_cost_nothing_but_what_is_said() -> None:
    assert mock_env(1, {})["MESH_ENGINE__MOCK__SPEEDUP"] == "inf"
    paced = mock_env(1, {"STEP_S": 0.0057})
    assert paced["MESH_ENGINE__MOCK__STEP_S"] == "0.0057"
    assert "MESH_ENGINE__MOCK__SPEEDUP" not in paced
