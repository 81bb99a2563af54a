"""The addresses of KV transfer: any client that reaches UCX's port can end the process."""

import json
import logging
import os
import socket
import subprocess
import sys
from ipaddress import ip_address

import pytest

from components.kv_transfer import open_sockets, ucx_settings
from components.kv_transfer.open_sockets import Listener, listeners, new_listeners_logged
from components.kv_transfer.ucx_settings import choose_devices, leave_out_rdma
from tests.waiting import PATIENCE_S

OPEN_AGENT = """
import json, sys
from components.kv_transfer.open_sockets import listeners
from components.kv_transfer.ucx_settings import choose_devices, leave_out_rdma
from components.kv_transfer.nixl_api import nixl_agent, nixl_agent_config
choose_devices(sys.argv[1])
leave_out_rdma()
agent = nixl_agent("a", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
print(json.dumps([str(listener.address) for listener in listeners()]))
"""


def own_address() -> str | None:
    """Return an address of this machine other than loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def addresses_of_an_agent(host: str, **env: str) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if name != ucx_settings.UCX_DEVICES}
    command = [sys.executable, "-c", OPEN_AGENT, host]
    ran = subprocess.run(command, env=clean | env, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    return list(json.loads(ran.stdout.splitlines()[-1]))


def test_on_one_machine_nixl_listens_on_loopback_alone() -> None:
    """It listened on each interface by default: 21 bytes from the network ended decode."""
    assert set(addresses_of_an_agent("127.0.0.1")) == {"127.0.0.1"}


def test_elsewhere_nixl_listens_on_the_interface_with_the_address() -> None:
    own = own_address()
    if own is None:
        pytest.skip("this machine has no interface but loopback")
    assert set(addresses_of_an_agent(own)) == {own}
    assert set(addresses_of_an_agent(own, UCX_NET_DEVICES="lo")) == {"127.0.0.1"}, "the environment wins"


def test_a_machine_without_rdma_devices_does_not_load_their_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """With libibverbs1 installed, each worker ended with SIGSEGV on SIGTERM."""
    for devices, modules in (([], "^ib"), (["mlx5_0:1"], None)):
        monkeypatch.setenv(ucx_settings.UCX_MODULES, "")
        monkeypatch.delenv(ucx_settings.UCX_MODULES)
        monkeypatch.setattr(ucx_settings, "_rdma_devices", lambda found=devices: found)
        leave_out_rdma()
        assert os.environ.get(ucx_settings.UCX_MODULES) == modules


def test_rdma_devices_are_used_beside_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ucx_settings.UCX_DEVICES, "")
    monkeypatch.setattr(ucx_settings, "_rdma_devices", lambda: ["mlx5_0:1"])
    monkeypatch.setattr(ucx_settings, "_interface", lambda _: "eth1")
    choose_devices("10.0.0.1")
    assert os.environ[ucx_settings.UCX_DEVICES] == "eth1,mlx5_0:1"


def test_an_address_that_is_not_this_machines_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ucx_settings.UCX_DEVICES, "")
    choose_devices("203.0.113.7")
    assert not os.environ[ucx_settings.UCX_DEVICES]
    assert "no interface has the address for KV transfer" in caplog.text


def test_the_listeners_of_a_process_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("::1", 0), family=socket.AF_INET6) as two:
        wanted = {Listener(ip_address(s.getsockname()[0]), s.getsockname()[1]) for s in (one, two)}
        assert wanted <= listeners()
        assert wanted <= listeners(os.getpid())
    assert not wanted & listeners()


@pytest.mark.parametrize(("address", "level"), [("127.0.0.1", logging.INFO), ("8.8.8.8", logging.WARNING)])
def test_a_public_address_is_warned_of(
    address: str, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "components")
    found = iter([set(), {Listener(ip_address(address), 7)}])
    monkeypatch.setattr(open_sockets, "listeners", lambda: next(found))
    with new_listeners_logged():
        pass
    [said] = caplog.records
    assert (said.levelno, vars(said)["addresses"]) == (level, [f"{address}:7"])
