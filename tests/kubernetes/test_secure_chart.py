"""The chart in its secure form: certificates from Secrets, rights of each role, an endpoint with https and API keys."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from components.permissions import ADMINISTRATOR
from services.local.authority import Authority
from tests.deploy.helm import CHART, EXAMPLES
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.servers import start_servers
from tests.kubernetes.test_chart_on_kubernetes import VALUES

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(400)]

SPACE: Final = "--namespace=secure"
KEY: Final = "sk-secret0123456"
ROLES: Final = ("frontend", "prefill", "decode", "bootstrap")
ONE: Final = ("frontend.replicas=1", "decode.replicas=1", "bootstrap.replicas=1")
BODY: Final = {"model": "mock", "prompt": "Say it again and again. " * 8, "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def secured(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster.kubectl("create", "namespace", "secure")
    _make_secrets(cluster, tmp_path_factory.mktemp("authority"))
    start_servers(cluster, SPACE, secure=True)
    file = cluster.work / "secure.json"
    file.write_text(json.dumps(VALUES))
    settings = [part for setting in ONE for part in ("--set-json", setting)]
    values = ["--values", str(EXAMPLES / "secure.yaml"), "--values", str(file)]
    cluster.helm("install", "mesh", str(CHART), SPACE, *values, *settings, timeout_s=180)
    for role in ROLES:
        status = ("rollout", "status", SPACE, f"deployment/mesh-kvmesh-{role}", "--timeout=170s")
        cluster.kubectl(*status, timeout_s=180)
    yield cluster
    cluster.helm("uninstall", "mesh", SPACE)
    cluster.kubectl("delete", "namespace", "secure", "--timeout=120s", timeout_s=130)


def _make_secrets(cluster: Cluster, folder: Path) -> None:
    authority = Authority(folder)
    hosts = {"etcd": ["etcd"], "nats": ["nats"], "https": ["mesh-kvmesh-frontend.secure"]}
    for name in (*ROLES, ADMINISTRATOR, *hosts):
        files = authority.issue(name, hosts.get(name, ()))
        secret = {"https": "kvmesh-https", "etcd": "etcd-tls", "nats": "nats-tls"}.get(name, f"mesh-kvmesh-{name}-tls")
        parts = (f"ca.crt={files.ca}", f"tls.crt={files.certificate}", f"tls.key={files.key}")
        flags = [f"--from-file={part}" for part in parts]
        cluster.kubectl("create", "secret", "generic", secret, SPACE, *flags)
    keys = folder / "keys.toml"
    keys.write_text(f'[alice]\nkey = "{KEY}"\n')
    cluster.kubectl("create", "secret", "generic", "kvmesh-api-keys", SPACE, f"--from-file=keys.toml={keys}")


def ask(cluster: Cluster, *headers: str) -> tuple[str, Any]:
    """Return the HTTP status and the answer."""
    address = cluster.get("service", SPACE, "mesh-kvmesh-frontend")["spec"]["clusterIP"]
    flags = [part for header in headers for part in ("--header", header)]
    url = f"https://{address}:8000/v1/completions"
    sent = ("--header", "Content-Type: application/json", "--data", json.dumps(BODY))
    text = cluster.run("curl", "--insecure", "--silent", "--write-out", "\n%{http_code}", *flags, *sent, url)
    answer, _, status = text.rpartition("\n")
    return status, json.loads(answer)


def test_it_answers_over_https_with_a_key_and_kv_moves(secured: Cluster) -> None:
    for _ in range(3):
        status, answer = ask(secured, f"Authorization: Bearer {KEY}")
        assert status == "200", answer
        assert answer["usage"]["completion_tokens"] == 4
    (decode,) = secured.get("pods", SPACE, "--selector=app.kubernetes.io/component=decode")["items"]
    page = secured.run("curl", "--silent", "--fail", f"http://{decode['status']['podIP']}:9100/metrics")
    counts = [line for line in page.splitlines() if line.startswith("kvmesh_kv_transfers_total{")]
    assert any('outcome="completed"' in line and float(line.rpartition(" ")[2]) > 0 for line in counts), counts


def test_it_refuses_a_client_without_a_key(secured: Cluster) -> None:
    assert ask(secured)[0] == "401"


def test_every_role_keeps_to_its_rights(secured: Cluster) -> None:
    for role in ROLES:
        log = secured.kubectl("logs", SPACE, f"deployment/mesh-kvmesh-{role}").lower()
        assert log
        assert "permissions violation" not in log, log
        assert "permission denied" not in log, log
