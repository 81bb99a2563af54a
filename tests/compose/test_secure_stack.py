"""docker-compose.secure.yml with certificates of services.local.authority: answers and refusals."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.compose.docker_engine import DockerEngine, output
from tests.compose.project import Build, Project, project
from tests.conftest import REPO
from tests.mesh.mocks import MOCK_ENV
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

USER_OF_THE_IMAGES: Final = 1000
ENGINE: Final = {name: value for name, value in MOCK_ENV.items() if name.startswith("MESH_ENGINE")}
TOKENS: Final = 24


@pytest.fixture(scope="module")
def secure(engine: DockerEngine, build: Build, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    home = tmp_path_factory.mktemp("secure")
    secrets = home / "secrets"
    output([sys.executable, "-m", "services.local.authority", str(secrets)], {}, cwd=REPO)
    for file in secrets.iterdir():  # as docs/compose.md says
        os.chown(file, USER_OF_THE_IMAGES, USER_OF_THE_IMAGES)
    env = {"MESH_MODEL": "mock", "SECRETS_DIR": str(secrets)}
    files = ["docker-compose.yml", "docker-compose.secure.yml"]
    settings = {"prefill": ENGINE, "decode": ENGINE}
    with project(engine, build, home, "kvmesh-test-secure", files, env, settings) as running:
        running.up()
        yield running


def in_container(secure: Project, service: str, code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["docker", "exec", secure.containers(service)[0], "python", "-c", code],
        env={**os.environ, **secure.engine.env},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def test_requests_are_answered_over_tls(secure: Project) -> None:
    body = {"model": "mock", "prompt": "x" * 200, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    url = f"{secure.url('frontend', 8000)}/v1/completions"
    answer = httpx.post(url, json=body, timeout=PATIENCE_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == TOKENS


@pytest.mark.parametrize("has_certificate", [True, False])
def test_etcd_answers_only_those_with_a_certificate(has_certificate: bool, secure: Project) -> None:
    """From inside the project's network."""
    own = "context.load_cert_chain('/run/secrets/bootstrap-certificate', '/run/secrets/bootstrap-key')\n"
    code = (
        "import ssl, urllib.request as u\n"
        "context = ssl.create_default_context(cafile='/run/secrets/ca')\n"
        f"{own if has_certificate else ''}"
        "print(u.urlopen('https://etcd:2379/health', context=context).read())\n"
    )
    done = in_container(secure, "bootstrap", code)
    assert (done.returncode == 0) == has_certificate, done.stderr
    assert ("true" in done.stdout) == has_certificate
    if not has_certificate:
        assert "certificate required" in done.stderr.lower() or "alert" in done.stderr.lower(), done.stderr


def test_nats_asks_for_a_certificate(secure: Project) -> None:
    code = (
        "import socket, json\n"
        "line = socket.create_connection(('nats', 4222)).makefile().readline()\n"
        "facts = json.loads(line.removeprefix('INFO '))\n"
        "print(facts['tls_required'], facts['tls_verify'])\n"
    )
    assert in_container(secure, "bootstrap", code).stdout.split() == ["True", "True"]


def test_a_role_may_not_register_as_another(secure: Project) -> None:
    """etcd knows the frontend by its certificate."""
    code = (
        "from components.certificates import Certificates, TlsFiles\n"
        "from components.credentials import EtcdAccess\n"
        "from components.discovery.etcd import etcd_client\n"
        "ca, certificate, key = (f'/run/secrets/{n}' for n in ('ca', 'frontend-certificate', 'frontend-key'))\n"
        "files = TlsFiles(ca=ca, certificate=certificate, key=key)\n"
        "with etcd_client('https://etcd:2379', EtcdAccess(Certificates(files))) as client:\n"
        "    client.put('kvmesh/instances/decode/x', '{}')\n"
    )
    done = in_container(secure, "frontend", code)
    assert done.returncode == 1
    assert "permission denied" in done.stderr


def test_a_key_is_read_by_its_role_alone(secure: Project) -> None:
    for role in ("frontend", "prefill", "decode", "bootstrap"):
        listed = secure.engine.docker("exec", secure.containers(role)[0], "ls", "/run/secrets").split()
        assert set(listed) == {"ca", f"{role}-certificate", f"{role}-key"}, role


def test_the_authority_made_no_file_that_others_may_read(secure: Project) -> None:
    secrets = Path(secure.env["SECRETS_DIR"])
    assert {file.stat().st_mode & 0o777 for file in secrets.iterdir()} == {0o600}
