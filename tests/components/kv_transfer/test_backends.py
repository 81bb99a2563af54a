import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from components.kv_transfer.backends import known_backends, kv_opener, own_address
from components.settings import WorkerSettings
from components.startup import EX_CONFIG, WrongSettings
from tests.components.kv_transfer.nixl_peer import Pages
from tests.waiting import PATIENCE_S

REPO: Final = Path(__file__).resolve().parents[3]


async def _opens(setting: str, pages: Pages) -> str:
    async with kv_opener(setting)(pages, "agent", "127.0.0.1", 8) as transfer:
        return transfer.endpoint.backend


def test_the_default_is_one_that_there_is() -> None:
    assert WorkerSettings.model_fields["kv_transfer"].default in known_backends()


def test_an_unknown_name_is_refused_with_all_that_there_are() -> None:
    with pytest.raises(WrongSettings, match="no backend 'nixel'; there are fake, mooncake, nixl, and nixl/<PLUGIN>"):
        kv_opener("nixel")


@pytest.mark.anyio
async def test_nixl_takes_a_plugin_and_names_those_it_has_when_asked_for_another() -> None:
    assert await _opens("nixl", Pages()) == "nixl/UCX"
    assert await _opens("nixl/UCX", Pages()) == "nixl/UCX"
    with pytest.raises(WrongSettings, match=r"NIXL has no plugin 'UXC'; it has .*\bUCX\b"):
        await _opens("nixl/UXC", Pages())


@pytest.mark.anyio
async def test_the_fake_backend_reports_its_name(caplog: pytest.LogCaptureFixture) -> None:
    assert await _opens("fake", Pages()) == "fake"
    assert "KV transfer is fake: no KV is moved, and text generated after a transfer is meaningless" in caplog.messages
    with pytest.raises(WrongSettings, match="no plugin 'UCX'"):
        await _opens("fake/UCX", Pages())


@pytest.mark.anyio
async def test_mooncake_refuses_what_it_cannot_move() -> None:
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    with pytest.raises(WrongSettings, match="not on cuda:0: use nixl"):
        await _opens("mooncake", Pages(device="cuda:0"))
    with pytest.raises(WrongSettings, match="no plugin 'rdma'"):
        await _opens("mooncake/rdma", Pages())


def test_a_library_that_is_missing_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("api", "peer", "transfer"):
        monkeypatch.delitem(sys.modules, f"components.kv_transfer.mooncake_{module}", raising=False)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(
        WrongSettings, match=r"'mooncake' cannot be loaded: .*pip install 'kvmesh\[mooncake\]'.*libibverbs1"
    ):
        kv_opener("mooncake")


@pytest.mark.anyio
async def test_another_package_can_bring_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    points = ["elsewhere = elsewhere_kv:opener", "broken = elsewhere_kv:no_such", "fake = elsewhere_kv:opener"]
    (info / "entry_points.txt").write_text("\n".join(["[kvmesh.kv_transfer]", *points]))
    (tmp_path / "elsewhere_kv.py").write_text("def opener(region, agent, **more): return agent, more")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert kv_opener("elsewhere/x")(Pages(), "agent", "10.0.0.1", 8) == (
        "agent",
        {"plugin": "x", "host": "10.0.0.1", "max_request_pages": 8},
    )
    with pytest.raises(WrongSettings, match="there are broken, elsewhere, fake, mooncake, nixl"):
        kv_opener("nothing")
    with pytest.raises(WrongSettings, match=r"'broken' cannot be loaded: .*no_such"):
        kv_opener("broken")
    assert await _opens("fake", Pages()) == "fake"  # ours, whoever takes the name


@pytest.mark.parametrize("url", ["http://127.0.0.1:2379", "http://127.0.0.1:2379,http://10.0.0.1:2379", "localhost"])
def test_beside_etcd_a_worker_is_reached_by_the_loopback(url: str) -> None:
    assert own_address(url) == "127.0.0.1"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_with_a_wrong_name_ends_with_one_line_before_it_loads_a_model(role: str) -> None:
    command = [sys.executable, "-m", f"services.{role}", "--kv-transfer", "nixel", "--model", "no-such-model"]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == EX_CONFIG
    assert ended.stderr.splitlines() == [
        "setting kv_transfer: no backend 'nixel'; there are fake, mooncake, nixl, and nixl/<PLUGIN>"
    ]
