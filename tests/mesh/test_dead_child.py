"""A child of `services.local` that dies is announced to the mesh at once; the observer shows the stream that moved."""

import asyncio
import itertools
import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from bench.processes import free_port
from components.discovery.registry import join_registry
from components.telemetry.trace_reader import ObserverTraceReader
from tests.conftest import RunService
from tests.mesh.mocks import MOCK_ENV

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(120)]

TOKENS = 300
PACE = {"MESH_ENGINE__MOCK__SPEEDUP": "1", "MESH_ENGINE__MOCK__STEP_S": "0.02"}
LETTERS = "".join(map(chr, range(97, 123)))


def test_a_stream_whose_decode_is_killed_stands_still_for_less_than_its_silence_would_be_waited_for(
    run_service: RunService, etcd_url: str, nats_url: str, namespace: str, tmp_path: Path
) -> None:
    """It stood still for 2.1 to 2.9 s: `services.local` knew that the process had died, and kept it to itself."""
    port, observer_port = free_port(), free_port()
    env = {**MOCK_ENV, **PACE, "MESH_LEASE_TTL_S": "10", "MESH_NAMESPACE": namespace, "MESH_STATE_DIR": str(tmp_path)}
    env |= {"MESH_ETCD_URL": etcd_url, "MESH_NATS_URL": nats_url}
    env |= {"MESH_OBSERVER_PORT": str(observer_port), "MESH_OBSERVER_TOKEN": "t0ken"}
    process = run_service(
        "services.local", "--model", "mock", "--port", str(port), "--prefill", "0", "--decode", "2", env=env
    )
    process.wait_for_log("Ready:", 60)

    async def stream(prompt: str) -> list[float]:
        """When each token came."""
        body = {"model": "mock", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as answer,
        ):
            return [
                time.monotonic()
                async for line in answer.aiter_lines()
                if line.startswith("data: {") and json.loads(line[6:])["choices"]
            ]

    async def main() -> list[list[float]]:
        async with join_registry(etcd_url, namespace, 10.0) as registry:
            decodes = registry.book.of_role("decode")
        streams = [asyncio.create_task(stream(prompt)) for prompt in (LETTERS, LETTERS.upper())]
        await asyncio.sleep(2)
        os.kill(decodes[0].pid, signal.SIGKILL)
        return await asyncio.gather(*streams)

    streams = asyncio.run(main())
    assert all(len(came) > TOKENS / 2 for came in streams), "tokens come one by one"
    longest = [max(b - a for a, b in itertools.pairwise(came)) for came in streams]
    assert max(longest) < 1.5, longest
    assert process.logged().count("died (SIGKILL)") == 1
    frontend = [line for line in process.logged().splitlines() if "frontend-0" in line]
    assert any("moves" in line or "moved" in line for line in frontend), "the kill hit no stream"
    observer = ObserverTraceReader(f"http://any:t0ken@127.0.0.1:{observer_port}")
    deadline = time.monotonic() + 20
    while not any(trace.moved and len(trace.decode_ids) == 2 for trace in observer.recent()):
        assert time.monotonic() < deadline, observer.recent()
        time.sleep(0.1)
    assert process.terminate(30) == 0, process.logged()
