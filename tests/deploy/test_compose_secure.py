"""docker-compose.secure.yml as data, and its NATS and etcd as real servers with the certificates that it names."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from bench.processes import free_port
from components.certificates import Certificates, TlsFiles
from components.credentials import EtcdAccess, NatsAccess
from components.discovery.etcd import etcd_client
from components.errors import BackendUnavailable
from components.messaging.connection import connect_bus
from components.messaging.records import Records
from components.permissions import ROLES, certified_users
from components.settings import misspelled
from services.local.authority import main as make_certificates
from services.local.servers import ETCD, NATS, Site, running
from tests.conftest import REPO
from tests.deploy.compose_files import load
from tests.deploy.test_compose import BASE, COMPOSE, OURS, SECURE, settings_of, variables_of
from tests.waiting import PATIENCE_S, wait_until

CONFIG: Final = COMPOSE / "nats.secure.conf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("secrets")
    make_certificates(found)
    return found


def identity(folder: Path, name: str) -> Certificates:
    return Certificates(TlsFiles(ca=folder / "ca.pem", certificate=folder / f"{name}.pem", key=folder / f"{name}.key"))


def placed(text: str, folder: Path) -> str:
    """Replace the paths by those of files that Compose would mount."""
    for name, secret in load(SECURE)["secrets"].items():
        text = text.replace(f"/run/secrets/{name}", str(folder / Path(secret["file"]).name))
    assert "/run/secrets" not in text
    return text


def test_it_changes_only_services_that_exist_and_adds_those_of_the_administrator() -> None:
    assert set(load(SECURE)["services"]) - set(load(BASE)["services"]) == {"etcd-users", "response-stream"}
    assert set(OURS) | {"etcd", "nats"} < set(load(SECURE)["services"])


@pytest.mark.parametrize("role", OURS)
def test_each_role_has_a_certificate_of_its_own_and_the_settings_to_use_it(role: str) -> None:
    service = load(SECURE)["services"][role]
    assert misspelled(variables_of(service), settings_of(role)) == []
    values: dict[str, Any] = {}
    for name, value in variables_of(service).items():
        if not name.startswith("MESH_"):  # which the planner passes on to Compose
            continue
        head, _, rest = name.removeprefix("MESH_").lower().partition("__")
        if rest:
            values.setdefault(head, {})[rest] = value
        else:
            values[head] = value
    read = settings_of(role)(**values)
    used = [str(path).removeprefix("/run/secrets/") for path in read.tls.given]  # type: ignore[attr-defined]
    assert used == service["secrets"] == ["ca", f"{role}-certificate", f"{role}-key"]
    needed = {"etcd-users", *(["response-stream"] if role == "frontend" else [])}
    assert service["depends_on"] == {name: {"condition": "service_completed_successfully"} for name in needed}


def test_every_secret_is_declared_and_made_by_the_command_that_the_file_names(folder: Path) -> None:
    declared = load(SECURE)["secrets"]
    used = {name for service in load(SECURE)["services"].values() for name in service.get("secrets", ())}
    assert used == set(declared)
    for secret in declared.values():
        assert (folder / Path(secret["file"]).name).is_file()
    assert "python -m services.local.authority deploy/compose/secrets" in SECURE.read_text()
    assert "deploy/compose/secrets/" in (REPO / ".gitignore").read_text()


def test_the_users_of_nats_are_those_of_the_permissions() -> None:
    assert CONFIG.read_text().endswith(certified_users("kvmesh"))
    assert "max_payload: 8MB" in CONFIG.read_text()


@asynccontextmanager
async def nats(home: Path, folder: Path) -> AsyncIterator[str]:
    def command(site: Site) -> list[str]:
        given = NATS.command(site)
        text = placed(CONFIG.read_text(), folder)
        for old, new in (
            ("$HOSTNAME", site.name),
            ("0.0.0.0:4222", f"127.0.0.1:{site.port}"),
            ("127.0.0.1:8222", f"127.0.0.1:{site.second_port}"),
            ('"/data"', f'"{site.home}/data"'),
        ):
            assert old in text
            text = text.replace(old, new)
        Path(given[-1]).write_text(text)
        return given

    async with running(replace(NATS, command=command), home) as server:
        yield f"tls://127.0.0.1:{server._site.port}"


@pytest.mark.mesh
def test_its_nats_admits_each_role_by_its_certificate_and_no_one_else(tmp_path: Path, folder: Path) -> None:
    async def scenario() -> None:
        async with nats(tmp_path, folder) as url:
            for role in ROLES:
                access = NatsAccess(identity(folder, role), inbox=f"_INBOX.kvmesh.{role}")
                async with asyncio.timeout(PATIENCE_S), connect_bus(url, role, access) as bus:
                    assert bus.is_connected
            stranger = NatsAccess(identity(folder, "etcd"))  # signed by the authority, but no user
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1), connect_bus(url, "stranger", stranger):
                    pass

    asyncio.run(scenario())


@pytest.mark.mesh
def test_its_frontends_store_responses_in_the_stream_that_its_command_makes(tmp_path: Path, folder: Path) -> None:
    service = load(SECURE)["services"]["response-stream"]
    env = {name: placed(value, folder) for name, value in variables_of(service).items()}

    async def scenario() -> None:
        async with nats(tmp_path, folder) as url:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *service["command"][1:], cwd=REPO, env={**os.environ, **env, "MESH_NATS_URL": url}
            )
            assert await process.wait() == 0
            access = NatsAccess(identity(folder, "frontend"), inbox="_INBOX.kvmesh.frontend")
            async with connect_bus(url, "frontend", access) as bus:
                config = settings_of("frontend")().stored_config  # type: ignore[attr-defined]
                records = Records(bus, "kvmesh.responses", config)
                await records.open()
                await records.put("a", b"x")
                assert await records.get("a") == b"x"

    asyncio.run(scenario())


@pytest.mark.mesh
def test_its_etcd_admits_users_once_the_command_has_run_and_a_second_time(tmp_path: Path, folder: Path) -> None:
    port, peers = free_port(), free_port()
    command = [placed(part, folder) for part in load(SECURE)["services"]["etcd"]["command"][1:]]
    command = [
        part.replace("0.0.0.0:2379", f"127.0.0.1:{port}").replace("//etcd:2379", f"//127.0.0.1:{port}")
        for part in command
    ]
    command = [part.replace("/etcd-data", str(tmp_path / "data")) for part in command]
    binary = ETCD.command(Site("x", tmp_path, port, peers))[0]
    url = f"https://127.0.0.1:{port}"
    own = [f"--listen-peer-urls=http://127.0.0.1:{peers}", f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}"]
    own += [f"--initial-cluster=etcd=http://127.0.0.1:{peers}", "--log-level=error"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen([binary, *command, *own], stdout=log, stderr=log) as etcd,
    ):
        try:
            variables = variables_of(load(SECURE)["services"]["etcd-users"])
            env = {name: placed(value, folder) for name, value in variables.items()}
            env["MESH_ETCD_URL"] = url
            users = load(SECURE)["services"]["etcd-users"]["command"][1:]
            root = EtcdAccess(identity(folder, "root"))
            wait_until(lambda: answers(url, root), (tmp_path / "log").read_text)
            for _ in range(2):  # as after `docker compose up` once more
                ended = subprocess.run(
                    [sys.executable, *users],
                    cwd=REPO,
                    env={**os.environ, **env},
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=PATIENCE_S,
                )
                assert ended.returncode == 0, ended.stderr
            with etcd_client(url, EtcdAccess(identity(folder, "decode"))) as client:
                client.put("kvmesh/instances/decode/x", "{}")
            with (
                pytest.raises(BackendUnavailable, match="permission denied"),
                etcd_client(url, EtcdAccess(identity(folder, "frontend"))) as client,
            ):
                client.put("kvmesh/instances/decode/x", "{}")
        finally:
            etcd.kill()


def answers(url: str, access: EtcdAccess) -> bool:
    try:
        with etcd_client(url, access):
            return True
    except BackendUnavailable:
        return False
