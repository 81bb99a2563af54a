"""A child of `services.local` that dies is announced to the mesh at once; the observer shows the stream that moved."""

import asyncio
import json
import os
import re
import signal
from collections import Counter
from pathlib import Path

import httpx
import pytest

from bench.processes import free_port
from components.discovery.registry import join_registry
from components.telemetry.trace_reader import ObserverTraceReader
from tests.conftest import RunService
from tests.mesh.mocks import MOCK_ENV
from tests.waiting import PATIENCE_S, until, wait_until

pytestmark = pytest.mark.mesh

TOKENS = 300
TRIES = 3  # if a process stalls for two seconds, silence is the first sign of the death
PACE = {"MESH_ENGINE__MOCK__SPEEDUP": "1", "MESH_ENGINE__MOCK__STEP_S": "0.02"}
LETTERS = "".join(map(chr, range(97, 123)))


def test_a_stream_whose_decode_is_killed_moves_at_its_death_and_not_for_its_silence(
    run_service: RunService, etcd_url: str, nats_url: str, namespace: str, tmp_path: Path
) -> None:
    """It waited 2.1 to 2.9 s: `services.local` noticed the death, but did not report it."""
    port, observer_port = free_port(), free_port()
    env = {**MOCK_ENV, **PACE, "MESH_LEASE_TTL_S": "10", "MESH_NAMESPACE": namespace, "MESH_STATE_DIR": str(tmp_path)}
    env |= {"MESH_ETCD_URL": etcd_url, "MESH_NATS_URL": nats_url}
    env |= {"MESH_OBSERVER_PORT": str(observer_port), "MESH_OBSERVER_TOKEN": "t0ken"}
    process = run_service(
        "services.local", "--model", "mock", "--port", str(port), "--prefill", "0", "--decode", "2", env=env
    )
    process.wait_for_log("Ready:")

    async def stream(prompt: str, events: Counter[str]) -> None:
        body = {"model": "mock", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        async with (
            httpx.AsyncClient(timeout=PATIENCE_S) as client,
            client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    events[prompt] += bool(json.loads(line[6:])["choices"])

    def ended() -> int:
        """Return the number of requests in the log of `services.local`."""
        return len(re.findall(r"frontend-0 .*\brequest  ", process.logged()))

    async def kill_one() -> list[str]:
        """Return the frontend's log lines of the streams that left the killed decode."""
        async with join_registry(etcd_url, namespace, 10.0) as registry:
            await until(lambda: len(registry.book.of_role("decode")) == 2)
            decodes = registry.book.of_role("decode")
        before = ended()
        events = Counter({LETTERS: 0, LETTERS.upper(): 0})
        streams = [asyncio.create_task(stream(prompt, events)) for prompt in events]
        await until(lambda: min(events.values()) > TOKENS / 3 or any(one.done() for one in streams), lambda: events)
        os.kill(decodes[0].pid, signal.SIGKILL)
        await asyncio.gather(*streams)
        assert min(events.values()) > TOKENS / 2, "tokens come one by one"
        await until(lambda: ended() == before + len(streams), process.logged)  # which come after their moves
        move = f"stream moves  from={decodes[0].instance_id}"
        return [line for line in process.logged().splitlines() if "frontend-0" in line and move in line]

    tries: list[list[str]] = []
    while not any("left etcd" in line for moves in tries for line in moves):
        assert len(tries) < TRIES, tries
        tries.append(asyncio.run(kill_one()))
    assert process.logged().count("died (SIGKILL)") == len(tries)
    observer = ObserverTraceReader(f"http://any:t0ken@127.0.0.1:{observer_port}")
    wait_until(lambda: any(trace.moved and len(trace.decode_ids) == 2 for trace in observer.listed()), observer.listed)
    assert process.terminate() == 0, process.logged()
