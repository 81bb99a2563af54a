"""A real Prometheus scrapes a real mesh: docs/metrics.md lists all metrics, and the alert "decode-only" fires.

A mesh whose prefill workers were all refused ran decode-only, and no metric showed it.
"""

import asyncio
import json
import random
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import pytest
import yaml

from bench.processes import free_port
from components.aio import background
from tests.mesh.harness import REPO, MeshProcesses, Worker
from tests.mesh.metrics_table import documented_rows, rows
from tests.mesh.mocks import MODEL
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.mesh

DASHBOARD: Final = REPO / "deploy" / "compose" / "grafana" / "dashboards" / "kvmesh.json"
RULES: Final = REPO / "deploy" / "compose" / "prometheus" / "rules.yml"
QUICK: Final = {"5m": "6s", "10m": "10s", "15m": "10s", "1h": "60s"}  # windows of rates
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs prometheus and promtool: apt-get install prometheus",
)


def quick_rules() -> str:
    """The rules of the deployment, with windows of seconds."""
    text = re.sub(r"\[(\w+)\]", lambda window: f"[{QUICK[window[1]]}]", RULES.read_text())
    return re.sub(r"for: \w+", "for: 1s", text)


def page_of(worker: Worker) -> str:
    line = next(x for x in worker.logged().splitlines() if '"event": "ready"' in x)
    return str(json.loads(line)["metrics"])


@contextmanager
def prometheus(targets: str, home: Path) -> Iterator[str]:
    port = free_port()
    (home / "rules.yml").write_text(quick_rules())
    discovery = {"url": targets, "refresh_interval": "1s"}
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "kvmesh", "http_sd_configs": [discovery]}],
    }
    (home / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        f"--config.file={home / 'prometheus.yml'}",
        f"--storage.tsdb.path={home / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    with (home / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


class Watched:
    """The mesh as Prometheus sees it, under a little load."""

    def __init__(self, http: httpx.AsyncClient, prometheus_url: str, frontend_url: str) -> None:
        self.http = http
        self.url = prometheus_url
        self.frontend_url = frontend_url

    async def ask(self, what: str, **query: str) -> Any:
        answer = await self.http.get(f"{self.url}/api/v1/{what}", params=query)
        return answer.raise_for_status().json()["data"]

    async def value(self, query: str) -> float:
        """0 without a result."""
        return sum(float(one["value"][1]) for one in (await self.ask("query", query=query))["result"])

    async def firing(self) -> set[str]:
        alerts = (await self.ask("alerts"))["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    async def until(self, query: str, at_least: float = 1) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    if await self.value(query) >= at_least:
                        return
                except httpx.TransportError:  # it is starting
                    pass
                except httpx.HTTPStatusError as exc:
                    if exc.response.status_code != httpx.codes.SERVICE_UNAVAILABLE:  # it loads its data
                        raise
                await asyncio.sleep(0.2)

    async def until_firing(self, *names: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not {*names} <= await self.firing():
                await asyncio.sleep(0.2)

    async def until_quiet(self) -> None:
        """A process that stalled may have raised an alert, which ends with its window."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.firing():
                await asyncio.sleep(0.2)

    async def send(self) -> None:
        """Send uncached prompts until cancelled."""
        draw = random.Random(1)
        while True:
            prompt = [draw.randrange(256) for _ in range(100)]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": True}
            answer = await self.http.post(f"{self.frontend_url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            await asyncio.sleep(0.1)


@asynccontextmanager
async def watched(mesh: MeshProcesses, home: Path) -> AsyncIterator[Watched]:
    home.mkdir()
    frontend = mesh.one("frontend").url
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        with prometheus(f"{frontend}/metrics/targets", home) as url:
            seen = Watched(http, url, frontend)
            async with background(seen.send(), "load"):
                yield seen


def check_pages(mesh: MeshProcesses) -> None:
    pages = {worker.role: httpx.get(f"{page_of(worker)}/metrics", timeout=PATIENCE_S).text for worker in mesh.workers}
    for role, page in pages.items():
        checked = subprocess.run(
            ["promtool", "check", "metrics"],
            input=page,
            text=True,
            capture_output=True,
            check=False,
            timeout=PATIENCE_S,
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, ""), role
    expected = rows(pages)
    assert documented_rows() == expected, "docs/metrics.md should list:\n" + "\n".join(expected)


class Query(NamedTuple):
    panel: str
    letter: str
    expression: str
    labels: frozenset[str]  # that the legend of a series shows


def queries(namespace: str) -> list[Query]:
    """Return all queries of the dashboard for this mesh, with short windows."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$namespace", namespace).replace("$__rate_interval", "5s")
            assert "$" not in expression, expression
            labels = frozenset(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
            found.append(Query(panel["title"], target["refId"], expression, labels))
    return found


async def check_dashboard(seen: Watched, namespace: str) -> None:
    """Each query must have data, failures as zeros, and series the labels of their legends."""
    every = queries(namespace)
    assert len(every) > 30
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):  # a rate needs two samples
            while await _without_data(seen, every):
                await asyncio.sleep(0.5)
    assert await _without_data(seen, every) == set()
    for one in every:
        for answer in await _series(seen, one):  # a 0 may replace series with labels
            assert one.labels <= answer["metric"].keys() or float(answer["value"][1]) == 0, (one, answer)
    assert await seen.ask("label/namespace/values", **{"match[]": "kvmesh_build_info"}) == [namespace]  # of the menu


async def _without_data(seen: Watched, every: list[Query]) -> set[tuple[str, str]]:
    return {(one.panel, one.letter) for one in every if not await _series(seen, one)}


async def _series(seen: Watched, query: Query) -> list[Any]:
    found = (await seen.ask("query", query=query.expression))["result"]
    return [one for one in found if one["value"][1] != "NaN"]


@needs_prometheus
def test_alerts_stay_quiet_until_all_prefill_workers_are_refused(mock_mesh: MeshProcesses, tmp_path: Path) -> None:
    async def run() -> None:
        async with watched(mock_mesh, tmp_path / "prometheus") as seen:
            await seen.until('sum(kvmesh_kv_transfers_total{job="kvmesh-decode",outcome="completed"})', 20)
            await seen.until('count(up{job=~"kvmesh-.+"} == 1)', 4)
            await asyncio.to_thread(check_pages, mock_mesh)
            [exemplar, *_] = await seen.ask(
                "query_exemplars", query="kvmesh_time_to_first_token_seconds_bucket", start="0", end="9999999999"
            )
            assert len(exemplar["exemplars"][0]["labels"]["trace_id"]) == 32
            await seen.until_quiet()
            await check_dashboard(seen, mock_mesh.namespace)
            mock_mesh.one("prefill").kill()
            await asyncio.to_thread(mock_mesh.start, "prefill", MESH_PREFILL_ENGINE__MOCK__LAYERS="5")
            await seen.until_firing("KvmeshDecodeOnly", "KvmeshPrefillIncompatible")
            reasons = await seen.ask("query", query="sum by (reason) (kvmesh_prompts_computed_on_decode_total) > 0")
            assert "unusable" in {one["metric"]["reason"] for one in reasons["result"]}

    mock_mesh.start("bootstrap", "decode", "prefill", "frontend")
    mock_mesh.start("planner", MESH_PLANNER_CONNECTOR="none")
    wait_until(mock_mesh.one("frontend").models)
    asyncio.run(run())
