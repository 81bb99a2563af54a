"""Meshes of `services.local`, with passwords and with certificates: all roles work within their rights."""

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from bench.processes import free_port
from components.discovery.etcd import etcd_client
from components.kv_transfer.open_sockets import Listener, _listener, listeners
from components.local_mesh import beside_local_mesh, local_mesh
from components.messaging.connection import connect_bus
from components.settings import MeshSettings
from components.telemetry.trace_file import FILE_NAME
from services.local.authority import NAMES_OF_THIS_MACHINE, Authority
from services.local.child_process import tethered
from tests.conftest import REPO, ServiceProcess, descendants
from tests.mesh.mocks import MOCK_ENV
from tests.mesh.trace_checks import whole_trace
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

API_KEY: Final = "sk-planted-0123456789abcdef"
PACE: Final = {
    "MESH_ENGINE__MOCK__SPEEDUP": "1",
    "MESH_ENGINE__MOCK__STEP_S": "0.01",
    "MESH_ENGINE__MOCK__ANSWER_TOKENS": "0",
}
ENV: Final = {
    **MOCK_ENV,
    **PACE,
    "MESH_FRONTEND_API_KEYS": f"alice:{API_KEY}",
    "MESH_FRONTEND_DECODE_POLICY": "kv_aware",
    "MESH_DECODE_MAX_LOCAL_PREFILL": "0",
    "MESH_DECODE_LOCAL_PREFILL_ON_QUEUE": "false",
    "MESH_LOG_LEVEL": "debug",
    "MESH_TRACES_PER_S": "inf",
    "MESH_LEASE_TTL_S": "10",
}
MESSAGES: Final = [{"role": "user", "content": "All work and no play " * 20}]
VIOLATION: Final = "violation"


@dataclass(frozen=True, slots=True)
class Mesh:
    process: ServiceProcess
    url: str
    home: Path
    pages: dict[str, str]  # variables of a reader of metrics pages

    def client(self) -> httpx.Client:
        """A new connection, which the kernel gives to one of the frontends."""
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {API_KEY}"}, timeout=PATIENCE_S)

    def settings(self, user: str = "") -> MeshSettings:
        return beside_local_mesh(MeshSettings(state_dir=self.home), user)

    def inspect(self, *command: str, code: int = 0) -> str:
        run = [sys.executable, "-m", "services.inspect", *command, "--state-dir", str(self.home)]
        ended = subprocess.run(
            run, cwd=REPO, env=clean(**self.pages), capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr


def clean(**env: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("MESH_")} | env


def protected_pages(home: Path) -> dict[str, str]:
    """Configure metrics pages with TLS and a password, which the planner reads."""
    files = Authority(home / "pages").issue("page", NAMES_OF_THIS_MACHINE)
    login = home / "pages" / "login"
    login.write_text("prometheus:pages-0123456789abcdef")
    return {
        "MESH_METRICS_TLS_CERT": str(files.certificate),
        "MESH_METRICS_TLS_KEY": str(files.key),
        "MESH_METRICS_LOGIN_FILE": str(login),
        "MESH_TLS__CA": str(files.ca),
    }


@pytest.fixture(scope="module", params=["certificates", pytest.param("passwords", marks=pytest.mark.secure)])
def mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    home = tmp_path_factory.mktemp("secure")
    port = free_port()
    options = ["--model", "mock", "--port", str(port), "--state-dir", str(home), "--frontend", "2", "--decode", "2"]
    options += ["--secure"] if request.param == "certificates" else []
    pages = {} if request.param == "certificates" else protected_pages(home)
    log = home / "output"
    with log.open("wb") as stream:
        popen = subprocess.Popen(
            [*tethered(), sys.executable, "-m", "services.local", *options],
            cwd=REPO,
            env=clean(**ENV, **pages),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    process = ServiceProcess(popen, log)
    try:
        process.wait_for_log("Ready:")
        yield Mesh(process, f"http://127.0.0.1:{port}", home, pages)
        assert process.terminate() == 0, process.logged()
    finally:
        process.kill()


def ask(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={"model": "mock", **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def requests_of_all_kinds(mesh: Mesh) -> None:
    with mesh.client() as one:
        for _ in range(4):
            with mesh.client() as other:
                answer = ask(other, "/v1/chat/completions", messages=MESSAGES, max_tokens=8)
                assert answer["usage"]["completion_tokens"] == 8
        kept = ask(one, "/v1/responses", input="Hello", max_output_tokens=8)
        going = ask(one, "/v1/responses", input="And then?", max_output_tokens=2000, background=True)
        with mesh.client() as other:
            assert other.get(f"/v1/responses/{kept['id']}").json()["status"] == "incomplete"
            assert other.post(f"/v1/responses/{going['id']}/cancel").json()["status"] == "cancelled"
            assert other.delete(f"/v1/responses/{kept['id']}").status_code == 200
        body = {"model": "mock", "messages": MESSAGES, "max_tokens": 2000, "stream": True}
        with one.stream("POST", "/v1/chat/completions", json=body) as stream:
            next(stream.iter_lines())  # and the client leaves: a cancel
        assert one.post("/v1/embeddings", json={"model": "mock", "input": "x"}).status_code == 400


def a_stream_outlives_its_decode(mesh: Mesh) -> None:
    """Frontends request lost frames, and `services.local` announces the death in etcd."""
    body = {"model": "mock", "messages": MESSAGES, "max_tokens": 150, "ignore_eos": True, "stream": True}
    decodes = [line.split() for line in mesh.inspect("workers").splitlines() if line.startswith("decode ")]
    with mesh.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(int(decodes[0][2]), signal.SIGKILL)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    mesh.process.wait_for_log("died (SIGKILL)")


def operation(mesh: Mesh) -> None:
    """Use the roles inspect and planner, with the access in `running.json`."""
    assert "no answer" not in mesh.inspect("workers")
    assert "a decode instance for" in mesh.inspect("route", "--prompt", "Hello")
    assert "runs the mock engine" in mesh.inspect("profile", "prefill", code=1), "the worker has answered"
    command = [
        sys.executable,
        "-m",
        "services.planner",
        "--connector",
        "local",
        "--prefill",
        "2..2",
        "--decode",
        "2..2",
    ]
    log = mesh.home / "planner"
    with log.open("wb") as out:
        planner = subprocess.Popen(
            [*command, "--every-s", "0.5", "--settle-s", "1", "--up-after-s", "0.5", "--state-dir", str(mesh.home)],
            cwd=REPO,
            env=clean(**mesh.pages),
            stdout=out,
            stderr=out,
        )
        try:
            ServiceProcess(planner, log).wait_for_log("scaling")
            assert "decode" in mesh.inspect("planner")
        finally:
            planner.terminate()
            planner.wait(PATIENCE_S)
    mesh.process.wait_for_log("prefill-1    ready")
    assert VIOLATION not in log.read_text().lower()


def test_all_roles_at_work_stay_within_their_rights(mesh: Mesh) -> None:
    requests_of_all_kinds(mesh)
    a_stream_outlives_its_decode(mesh)
    operation(mesh)
    requests_of_all_kinds(mesh)
    said = mesh.process.logged() + (mesh.home / "local" / "nats.log").read_text()
    assert [line for line in said.splitlines() if VIOLATION in line.lower()] == []
    assert "permission denied" not in said.lower()


def test_a_stranger_gets_nothing(mesh: Mesh) -> None:
    """Without a login, in plain text, or with its own certificate."""
    facts = local_mesh(mesh.home)
    for name in ("etcd_url", "nats_url"):
        host, _, port = facts[name].rpartition("@")[2].rpartition("/")[2].partition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            if name == "etcd_url":
                connection.sendall(
                    b"POST /v3/kv/range HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
                    b'Content-Length: 17\r\n\r\n{"key":"AA=="}   '
                )
            else:
                connection.sendall(b'CONNECT {"verbose":false}\r\nSUB > 1\r\nPING\r\n')
            got = received(connection)
        assert b"PONG" not in got
        assert b"kvs" not in got
        if name == "nats_url":
            assert (b"Authorization Violation" in got) or ("tls" in facts and got.count(b"\r\n") == 1), got  # INFO
        else:
            assert b"HTTP/1.1 200" not in got
    if "tls" in facts:  # a stranger that trusts the mesh, and has no certificate
        context = ssl.create_default_context(cafile=facts["tls"]["ca"])
        with pytest.raises(httpx.TransportError), httpx.Client(verify=context, timeout=PATIENCE_S) as client:
            client.get(f"{facts['etcd_url']}/version")


def received(connection: socket.socket) -> bytes:
    """Return all bytes until the server ends the connection."""
    got = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            got += piece
    return got


def secrets_of(mesh: Mesh) -> dict[str, bytes]:
    """Return API keys, passwords and private keys of this mesh, by name."""
    found = {"API key": API_KEY.encode()}
    for key in (mesh.home / "local" / "tls").glob("*.key"):
        found[key.name] = key.read_bytes().splitlines()[1]
    config = (mesh.home / "local" / "nats" / "nats.conf").read_text().split('password: "')[1:]
    found |= {f"password {number}": text.partition('"')[0].encode() for number, text in enumerate(config)}
    if mesh.pages:
        found["password of metrics pages"] = b"pages-0123456789abcdef"
    assert len(found) > 8
    return found


def test_secrets_are_in_no_command_line_log_trace_nor_in_etcd(mesh: Mesh) -> None:
    with mesh.client() as client:
        body = {"model": "mock", "messages": MESSAGES, "max_tokens": 4}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
    whole_trace(mesh.home, answer.headers["x-request-id"], {"frontend.route", "decode.request"})
    places = {f"command line of {pid}": text for pid, text in command_lines()}
    may_hold = {"running.json", "nats.conf"}  # for their user alone
    for path in mesh.home.rglob("*"):
        if path.is_file() and path.name not in may_hold and path.parent.name not in {"tls", "pages"}:
            places[str(path.relative_to(mesh.home))] = path.read_bytes()
    for path in (mesh.home / "local").rglob("*"):
        if path.is_file() and (path.name in may_hold or path.parent.name == "tls"):
            assert path.stat().st_mode & 0o077 == 0, path
    places["etcd"] = etcd_content(mesh)
    for place, known in ((FILE_NAME, b"frontend.route"), ("output", b"Ready"), ("etcd", b"decode")):
        assert any(known in text for name, text in places.items() if name.startswith(place)), f"{place} was not read"
    assert any(b"services.decode" in text for name, text in places.items() if name.startswith("command"))
    for name, secret in secrets_of(mesh).items():
        assert [place for place, text in places.items() if secret in text] == [], name


def command_lines() -> Iterator[tuple[str, bytes]]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            yield entry.name, (entry / "cmdline").read_bytes()
        except OSError:
            continue


def etcd_content(mesh: Mesh) -> bytes:
    settings = mesh.settings()
    with etcd_client(settings.etcd_url, settings.etcd_access()) as client:
        return b"\n".join(meta.key + b" " + value for value, meta in client.get_all())


def test_every_process_of_a_mesh_on_one_machine_listens_on_loopback_alone(mesh: Mesh) -> None:
    """services.local, the servers, the observer, all roles and NIXL's ports; over TCP and UDP."""
    with mesh.client() as client:
        ask(client, "/v1/chat/completions", messages=MESSAGES, max_tokens=4)  # connections for KV exist
    ports: dict[str, set[int]] = {}
    for pid, name in family(mesh.process.popen.pid):
        found = sockets(pid)
        assert [str(one.address) for one in found if not one.address.is_loopback] == [], name
        ports.setdefault(name, set()).update(one.port for one in found)
    listening = {name for name, found in ports.items() if found}
    roles = {"services.frontend", "services.decode", "services.prefill", "services.bootstrap", "services.observer"}
    assert listening == roles | {"etcd", "nats-server"}
    assert len(ports["nats-server"]) == 1, "its monitoring page would show names to everyone"
    assert len(ports["etcd"]) == 2  # for clients and for peers
    assert len(ports["services.bootstrap"]) == 1  # metrics


def family(root: int) -> list[tuple[int, str]]:
    """Return a process and its descendants, with their programs."""
    return [(pid, program_of(pid)) for pid in sorted({root, *descendants(root)})]


def program_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return next((word for word in words if word.startswith("services.")), Path(words[0]).name)


def sockets(pid: int) -> list[Listener]:
    """Return TCP listeners, and UDP sockets that are bound but not connected."""
    process = Path("/proc") / str(pid)
    own = set()
    for entry in (process / "fd").iterdir():
        with suppress(OSError):
            own.add(str(entry.readlink()))
    found = list(listeners(pid))
    for table in ("udp", "udp6"):
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in own and fields[2].endswith(":0000"):
                found.append(_listener(fields[1]))
    return found


def test_the_credential_of_one_role_does_not_open_another_ones_subjects(mesh: Mesh) -> None:
    """The certificates and passwords of a running mesh; tests/components/test_permissions.py has the whole table."""
    settings = mesh.settings("planner")

    async def scenario() -> list[str]:
        refused: list[str] = []
        async with connect_bus(settings.nats_url, "test", settings.nats_access("planner")) as bus:

            async def note(error: Exception) -> None:
                refused.append(str(error))

            bus.client._error_cb = note
            await bus.client.subscribe("kvmesh.>")
            await bus.client.publish("kvmesh.decode.x.generate", b"")
            await bus.flush()
        return refused

    said = asyncio.run(scenario())
    assert len(said) == 2
    assert all("permissions violation" in one for one in said)
