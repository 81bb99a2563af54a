"""compose and Kubernetes, with a fake command and a fake API, which answer like the real ones."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from components.errors import BackendUnavailable, Rejected
from components.planning.planner import Change
from components.startup import WrongSettings
from services.planner.compose import ComposeConnector
from services.planner.kubernetes import Api, KubernetesConnector, Workload, in_cluster

pytestmark = pytest.mark.anyio

FAKE = Path(__file__).with_name("fake_docker.py")


@pytest.fixture
def compose(tmp_path: Path) -> ComposeConnector:
    (tmp_path / "containers.json").write_text(json.dumps({"prefill": 2, "decode": 1}))
    return ComposeConnector(f"{sys.executable} {FAKE} {tmp_path} compose", "deploy/compose/docker-compose.yml", "mesh")


def said(home: Path, verb: str) -> list[list[str]]:
    lines = (json.loads(line) for line in (home / "said.jsonl").read_text().splitlines())
    return [line for line in lines if verb in line]


async def test_compose_scales_one_service_and_leaves_the_others_alone(
    compose: ComposeConnector, tmp_path: Path
) -> None:
    assert await compose.counts() == {"prefill": 2, "decode": 1}
    await compose.scale(Change("prefill", 2, 1, ""))
    assert await compose.counts() == {"prefill": 1, "decode": 1}, "while it drains, it is none of those that are kept"
    with pytest.raises(BackendUnavailable, match="another change is in progress"):
        await compose.scale(Change("decode", 1, 2, ""))
    (tmp_path / "drained").touch()
    await asyncio.gather(*compose._tasks)
    assert await compose.counts() == {"prefill": 1, "decode": 1}
    [up] = said(tmp_path, "up")
    assert up[:5] == ["compose", "-f", "deploy/compose/docker-compose.yml", "-p", "mesh"]
    assert up[5:] == ["up", "--detach", "--no-deps", "--no-recreate", "--scale", "prefill=1", "prefill"]


async def test_compose_is_not_scaled_if_another_user_has_scaled_it(compose: ComposeConnector, tmp_path: Path) -> None:
    """The planner scaled from 2 to 3 while an operator scaled to 5: two containers were removed."""
    (tmp_path / "containers.json").write_text(json.dumps({"prefill": 5, "decode": 1}))
    with pytest.raises(Rejected, match="5 prefill containers run, not 2"):
        await compose.scale(Change("prefill", 2, 3, ""))
    assert await compose.counts() == {"prefill": 5, "decode": 1}
    assert not said(tmp_path, "up")


def test_compose_files_are_given_one_over_the_other() -> None:
    assert ComposeConnector("docker compose", "a.yml:b.yml", "mesh")._command == [
        "docker", "compose", "-f", "a.yml", "-f", "b.yml", "-p", "mesh",
    ]  # fmt: skip


async def test_a_compose_command_that_fails_shows_in_the_counts(
    compose: ComposeConnector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken").touch()
    await compose.scale(Change("prefill", 2, 3, ""))
    await asyncio.gather(*compose._tasks)
    assert await compose.counts() == {"prefill": 2, "decode": 1}
    assert "scaling failed" in caplog.text
    with pytest.raises(BackendUnavailable, match="no-such-docker cannot be run"):
        await ComposeConnector("no-such-docker compose").counts()


class Scales(BaseHTTPRequestHandler):
    """`autoscaling/v1` Scale of one Deployment and one StatefulSet, with versions that a patch may ask for."""

    replicas: dict[str, int] = {}
    version = 1
    asked: list[tuple[str, str, str | None, Any]] = []
    interfere = False  # another user scales between our read and write

    def do_GET(self) -> None:
        self._answer(None)

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        self._answer(body)

    def _answer(self, body: Any) -> None:
        cls = type(self)
        cls.asked.append((self.command, self.path, self.headers["Authorization"], body))
        name = self.path.split("/")[-2]
        if name not in cls.replicas:
            self._send(404, {"kind": "Status", "message": f'deployments.apps "{name}" not found'})
        elif body is not None and (cls.interfere or body["metadata"]["resourceVersion"] != str(cls.version)):
            self._send(409, {"kind": "Status", "message": "the object has been modified"})
        else:
            if body is not None:
                cls.replicas[name] = body["spec"]["replicas"]
                cls.version += 1
            meta = {"name": name, "namespace": "serving", "resourceVersion": str(cls.version)}
            spec = {"replicas": cls.replicas[name]} if cls.replicas[name] else {}
            self._send(200, {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": meta, "spec": spec})

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[str]:
    Scales.replicas, Scales.version, Scales.asked, Scales.interfere = {"p": 2, "d": 1}, 1, [], False
    with ThreadingHTTPServer(("127.0.0.1", 0), Scales) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def connector(url: str, account: Path | None = None, prefill: str = "deployment/p") -> KubernetesConnector:
    workloads = {
        "prefill": Workload.parse(prefill, "kubernetes_prefill"),
        "decode": Workload.parse("statefulset/d", "d"),
    }
    return KubernetesConnector(Api(url, "serving", account), workloads)


async def test_kubernetes_is_asked_for_replicas_of_the_scale_subresource(api: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    kubernetes = connector(api, tmp_path)
    assert await kubernetes.counts() == {"prefill": 2, "decode": 1}
    await kubernetes.scale(Change("prefill", 2, 3, ""))
    assert await kubernetes.counts() == {"prefill": 3, "decode": 1}
    path = "/apis/apps/v1/namespaces/serving/deployments/p/scale"
    patch = {"metadata": {"resourceVersion": "1"}, "spec": {"replicas": 3}}
    assert ("PATCH", path, "Bearer secret", patch) in Scales.asked
    assert any(asked[1] == "/apis/apps/v1/namespaces/serving/statefulsets/d/scale" for asked in Scales.asked)


async def test_two_planners_that_scale_kubernetes_at_once_change_it_once(api: str) -> None:
    kubernetes = connector(api)
    with pytest.raises(Rejected, match="2 prefill replicas are requested, not 1"):
        await kubernetes.scale(Change("prefill", 1, 2, ""))
    Scales.interfere = True
    with pytest.raises(Rejected, match="it has changed meanwhile"):
        await kubernetes.scale(Change("prefill", 2, 3, ""))
    assert Scales.replicas == {"p": 2, "d": 1}


def test_what_a_restart_does_not_help_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner ended with 1, so a supervisor restarted it repeatedly."""
    with pytest.raises(WrongSettings, match="setting kubernetes_prefill: 'pod/x' is not deployment/NAME"):
        Workload.parse("pod/x", "kubernetes_prefill")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(WrongSettings, match="not in a Kubernetes cluster"):
        in_cluster(None, None)


async def test_errors_of_kubernetes_are_reported(api: str) -> None:
    with pytest.raises(BackendUnavailable, match=r"HTTP 404 .*not found"):
        await connector(api, prefill="deployment/none").counts()
    Scales.replicas["p"] = 0  # no `replicas` in its answer
    assert (await connector(api).counts())["prefill"] == 0
    with pytest.raises(BackendUnavailable, match="Kubernetes at http"):
        await connector("http://127.0.0.1:1").counts()
    assert in_cluster("http://127.0.0.1:8001", None) == Api("http://127.0.0.1:8001", "default")
