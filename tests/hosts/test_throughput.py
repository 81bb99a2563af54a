"""KV between two hosts beside iperf3 on the same link."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from typing import Any, Final

import pytest

from tests.hosts.hosts import Hosts
from tests.mesh.harness import REPO
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.hosts

PAGES: Final = 64  # of 369 kB
PORT: Final = 5201


def test_kv_crosses_the_link_beside_iperf3(hosts: Hosts) -> None:
    """The bench checks the bytes that land. The figures are printed: their ratio depends on the machine."""
    if shutil.which("iperf3") is None:
        pytest.skip("no iperf3: apt install iperf3")
    kv = _kv_gb_s(hosts)
    tcp = _iperf_gb_s(hosts)
    print(f"\nKV {kv:.2f} GB/s, iperf3 {tcp:.2f} GB/s, ratio {kv / tcp:.2f}")  # noqa: T201
    assert kv > 0


def _kv_gb_s(hosts: Hosts) -> float:
    receiver = shlex.join(hosts["decode"].command())
    command = [
        sys.executable,
        "-m",
        "bench.transfer",
        "--page-size",
        "16",
        "--pages",
        str(PAGES),
        "--rounds",
        "5",
        "--receiver",
        receiver,
    ]
    env = os.environ | {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "mesh0"}
    shown = _output(hosts["prefill"].command(*command), env)
    return float(json.loads(shown.splitlines()[0])["neighbours_gb_s"])


def _iperf_gb_s(hosts: Hosts) -> float:
    server = subprocess.Popen(
        hosts["decode"].command("iperf3", "--server", "--one-off", "--forceflush", "--port", str(PORT)),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    while "listening" not in server.stdout.readline():
        assert server.poll() is None
    client = ("iperf3", "--client", hosts["decode"].address, "--port", str(PORT), "--time", "3", "--json")
    result: Any = json.loads(_output(hosts["prefill"].command(*client), dict(os.environ)))
    server.communicate(timeout=PATIENCE_S)
    return float(result["end"]["sum_received"]["bits_per_second"]) / 8e9


def _output(command: list[str], env: dict[str, str]) -> str:
    ran = subprocess.run(command, cwd=REPO, env=env, stdout=subprocess.PIPE, check=True, timeout=PATIENCE_S, text=True)
    return ran.stdout
