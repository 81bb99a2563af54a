"""Metrics pages with TLS and a password, and their readers: planner, inspect doctor, services.local, Prometheus."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
import httpx
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from components.certificates import TlsFiles
from components.discovery.book import InstanceBook
from components.discovery.pages import page_of, scrape_targets
from components.errors import PeerLost
from components.process_health import protection_of
from components.settings import MeshSettings
from components.startup import WrongSettings
from components.telemetry.metrics_page import serve_metrics
from services.inspect.facts import _page_error
from services.local.authority import NAMES_OF_THIS_MACHINE, Authority
from services.local.ready import _models
from services.planner.pages import PageReader
from tests.components.discovery.records import record
from tests.waiting import PATIENCE_S

PASSWORD = "s3cret-of-pages"


@dataclass(frozen=True, slots=True)
class Files:
    settings: MeshSettings
    login: Path


@pytest.fixture
def files(tmp_path: Path) -> Files:
    signed = Authority(tmp_path / "tls").issue("page", NAMES_OF_THIS_MACHINE)
    login = tmp_path / "login"
    login.write_text(f"prometheus:{PASSWORD}\n")
    settings = MeshSettings(
        tls={"ca": signed.ca},
        metrics_tls_cert=signed.certificate,
        metrics_tls_key=signed.key,
        metrics_login_file=login,
    )
    return Files(settings, login)


@asynccontextmanager
async def page(settings: MeshSettings) -> AsyncIterator[str]:
    facts = {"models": ["m"]}
    protection = protection_of(settings)
    async with serve_metrics(
        CollectorRegistry(), "127.0.0.1", 0, lambda: True, facts=lambda: facts, protection=protection
    ) as url:
        yield url


@pytest.mark.anyio
async def test_its_readers_reach_it_and_others_do_not(files: Files, tmp_path: Path) -> None:
    knowing, strange = files.settings.page_access(), MeshSettings(tls={"ca": files.settings.tls.ca}).page_access()
    async with page(files.settings) as url:
        assert url.startswith("https://")
        assert await PageReader(knowing).read(f"{url}/metrics", str) == ""
        with pytest.raises(PeerLost, match="answers 401"):
            await PageReader(strange).read(f"{url}/metrics", str)
        with pytest.raises(PeerLost, match="certificate verify failed"):
            await PageReader().read(f"{url}/metrics", str)
        assert await anyio.to_thread.run_sync(_page_error, url, knowing) == ""
        assert "401" in await anyio.to_thread.run_sync(_page_error, url, strange)
        assert await anyio.to_thread.run_sync(_models, url, strange) == ["m"], "probes need no password"
        other = tmp_path / "other"
        other.write_text("prometheus:another")
        wrong = files.settings.model_copy(update={"metrics_login_file": other}).page_access()
        with pytest.raises(PeerLost, match="answers 401"):
            await PageReader(wrong).read(f"{url}/metrics/targets", str)


@pytest.mark.anyio
async def test_as_prometheus_gives_user_and_password(files: Files) -> None:
    async with (
        page(files.settings) as url,
        httpx.AsyncClient(verify=files.settings.page_access().context(url), timeout=PATIENCE_S) as client,
    ):
        refused = await client.get(f"{url}/metrics")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, 'Basic realm="kvmesh"')
        for path in ("/metrics", "/metrics/targets"):
            assert (await client.get(url + path, auth=("prometheus", PASSWORD))).status_code == 200
            assert (await client.get(url + path, auth=("prometheus", PASSWORD + "x"))).status_code == 401
            assert (await client.get(url + path, auth=("other", PASSWORD))).status_code == 401
        for path in ("/live", "/ready", "/health"):
            assert (await client.get(url + path)).status_code == 200


@pytest.mark.anyio
async def test_a_password_without_tls_is_asked_for_too(files: Files) -> None:
    settings = files.settings.model_copy(update={"metrics_tls_cert": None, "metrics_tls_key": None})
    async with page(settings) as url:
        assert url.startswith("http://")
        with pytest.raises(PeerLost, match="answers 401"):
            await PageReader().read(f"{url}/metrics", str)
        await PageReader(settings.page_access()).read(f"{url}/metrics", str)


@pytest.mark.anyio
async def test_a_renewed_certificate_is_shown_without_a_restart(files: Files, tmp_path: Path) -> None:
    renewed = Authority(tmp_path / "renewed").issue("page", NAMES_OF_THIS_MACHINE)
    reader = files.settings.model_copy(update={"tls": TlsFiles(ca=renewed.ca)}).page_access()
    async with page(files.settings) as url:
        with pytest.raises(PeerLost, match="certificate verify failed"):
            await PageReader(reader).read(f"{url}/metrics", str)
        for new, old in (
            (renewed.key, files.settings.metrics_tls_key),
            (renewed.certificate, files.settings.metrics_tls_cert),
        ):
            assert new is not None
            assert old is not None
            new.replace(old)
        assert await PageReader(reader).read(f"{url}/metrics", str) == ""


def test_prometheus_learns_the_scheme_also_of_pages_on_other_hosts() -> None:
    book = InstanceBook()
    remote = replace(record("d", host="other"), http="https://127.0.0.1:9")
    book.put("d", remote)
    assert page_of(remote, "box") == "https://other:9/metrics"
    assert [one.labels["__scheme__"] for one in scrape_targets(book, "mesh")] == ["https"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics_tls_key": None}, "MESH_METRICS_TLS_CERT and MESH_METRICS_TLS_KEY belong together"),
        ({"metrics_tls_cert": Path("/nowhere.pem")}, "MESH_METRICS_TLS_CERT /nowhere.pem: No such file"),
        ({"metrics_login_file": Path("/nowhere")}, "MESH_METRICS_LOGIN_FILE /nowhere"),
    ],
)
@pytest.mark.anyio
async def test_a_wrong_file_is_named(files: Files, changes: dict[str, Path | None], message: str) -> None:
    with pytest.raises(WrongSettings, match=message):
        async with page(files.settings.model_copy(update=changes)):
            pass
