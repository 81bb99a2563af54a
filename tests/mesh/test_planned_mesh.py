"""A real planner grows a mesh of mock engines under load, and shrinks it afterwards."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.processes import free_port
from tests.conftest import RunService, ServiceProcess
from tests.mesh.mocks import MOCK_ENV
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

QUICK = {
    "EVERY_S": "0.5",
    "WINDOW_S": "4",
    "UP_AFTER_S": "1",
    "DOWN_AFTER_S": "4",
    "SETTLE_S": "1",
    "PREFILL": "1..2",
    "DECODE": "1",
    "TTFT_MS": "1000",
    "CONNECTOR": "local",
}
SLOW_PROMPTS = {  # 0.3 s for each prompt of 150 tokens
    "MESH_PREFILL_ENGINE__MOCK__SPEEDUP": "1",
    "MESH_PREFILL_ENGINE__MOCK__STEP_S": "0",
    "MESH_PREFILL_ENGINE__MOCK__PROMPT_TOKEN_S": "0.002",
}


@pytest.fixture
def env(etcd_url: str, nats_url: str, namespace: str, tmp_path: Path) -> dict[str, str]:
    return {
        **MOCK_ENV,
        **SLOW_PROMPTS,
        "MESH_ETCD_URL": etcd_url,
        "MESH_NATS_URL": nats_url,
        "MESH_NAMESPACE": namespace,
        "MESH_STATE_DIR": str(tmp_path),
        "MESH_LOG_FORMAT": "json",
        "MESH_LEASE_TTL_S": "10",  # no process dies here
    }


@pytest.fixture
def mesh(run_service: RunService, env: dict[str, str]) -> Iterator[tuple[ServiceProcess, str]]:
    """`services.local` and its URL, with a worker of each role."""
    port = free_port()
    process = run_service("services.local", "--model", "mock", "--port", str(port), env=env)
    process.wait_for_log("Ready:")
    yield process, f"http://127.0.0.1:{port}"
    assert process.terminate() == 0, process.logged()


class Load:
    """Uncached prompts at a rate that can be changed."""

    def __init__(self, url: str) -> None:
        self.per_s = 0.0
        self.answered = 0
        self._url = url
        self._sent = 0

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client, asyncio.TaskGroup() as tasks:
            while True:
                if self.per_s:
                    tasks.create_task(self._one(client, self._sent))
                    self._sent += 1
                await asyncio.sleep(1 / (self.per_s or 20))

    async def finish(self) -> None:
        """Stop, and wait for all answers."""
        self.per_s = 0.0
        await until(lambda: self.answered == self._sent, lambda: f"{self.answered} of {self._sent}")

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        prompt = [number % 250 + 1, number // 250 + 1, *range(1, 149)]
        body = {"model": "mock", "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        answer = await client.post(f"{self._url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        self.answered += 1


def test_a_mesh_grows_under_load_and_shrinks_after_and_no_request_fails(
    mesh: tuple[ServiceProcess, str], run_service: RunService, env: dict[str, str]
) -> None:
    process, url = mesh
    planner = run_service("services.planner", env={**env, **{f"MESH_PLANNER_{k}": v for k, v in QUICK.items()}})
    planner.wait_for_log('"event": "ready"')

    async def until_logged(process: ServiceProcess, text: str) -> None:
        await asyncio.to_thread(process.wait_for_log, text)

    async def main() -> None:
        load = Load(url)
        running = asyncio.create_task(load.run())
        try:
            load.per_s = 4.5  # the work of 1.35 workers
            await until_logged(process, "starting prefill-1")
            await until_logged(planner, '"before": 1, "after": 2')
            await load.finish()
            await until_logged(process, "stopping prefill-1 after its requests")
            load.per_s = 3.0  # while it leaves
            await until_logged(process, "prefill-1    stopped")
            await load.finish()
            assert not running.done(), running
        finally:
            running.cancel()
            await asyncio.wait({running})

    asyncio.run(main())
    shown = run_service("services.inspect", "planner", env=env)
    assert shown.exit_code() == 0, shown.logged()
    assert "connector local: leads" in shown.logged()
    assert "prefill 1 → 2" in shown.logged()
    assert planner.terminate() == 0, planner.logged()
    assert "Traceback" not in planner.logged()
