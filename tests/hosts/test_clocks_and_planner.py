"""Hosts whose clocks are an hour apart, and a planner on a host of its own."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

import httpx
import pytest

from components.wire.sampling import SamplingParams
from tests.hosts.hosts import Hosts
from tests.hosts.mesh import HostMesh
from tests.mesh.harness import REPO
from tests.mesh.mocks import MOCK_ENV, MODEL, one_engine
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.hosts, pytest.mark.mesh]

HOUR_S: Final = 3600
TOKENS: Final = 16
SKEWS: Final = {"bootstrap": 0, "prefill": HOUR_S, "decode": -HOUR_S, "frontend": HOUR_S // 2}
PLACES: Final = {"bootstrap": "core"}


@pytest.fixture(scope="module")
def skewed_mesh(
    hosts: Hosts, server_urls: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostMesh]:
    home = tmp_path_factory.mktemp("skewed")
    with HostMesh(*server_urls, "skewed", home, "mock", MOCK_ENV, hosts=hosts) as mesh:
        for role, skew_s in SKEWS.items():
            mesh.modules[role] = "tests.mesh.skewed_service"
            mesh.start_on(PLACES.get(role, role), role, SKEW_S=str(skew_s), SKEWED_MODULE=f"services.{role}")
        yield mesh


def ask(mesh: HostMesh) -> list[str]:
    """Send random prompts. Return the texts of one engine."""
    draw = random.Random(5)
    prompts = [[draw.randrange(ord("a"), ord("z")) for _ in range(100)] for _ in range(10)]
    expected = one_engine(mesh.home, prompts, SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True))
    answers = []
    for prompt in prompts:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        url = f"{mesh.one('frontend').url}/v1/completions"
        answer = httpx.post(url, json=body, timeout=PATIENCE_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        answers.append(answer.json()["choices"][0]["text"])
    assert answers == [bytes(ids).decode() for ids in expected]
    return answers


def test_clocks_of_hosts_may_be_an_hour_apart(skewed_mesh: HostMesh) -> None:
    ask(skewed_mesh)
    assert "computing the prompt here" not in skewed_mesh.one("decode").logged()
    assert any("clock skew" in worker.logged() for worker in skewed_mesh.workers)


def test_a_planner_on_another_host_reads_the_pages_of_all_workers(skewed_mesh: HostMesh, hosts: Hosts) -> None:
    mesh = skewed_mesh
    settings = {
        "MESH_ETCD_URL": mesh.etcd_url,
        "MESH_NATS_URL": mesh.nats_url,
        "MESH_NAMESPACE": mesh.namespace,
        "MESH_STATE_DIR": str(mesh.home),
    }
    mesh.start_on("client", "planner", MESH_PLANNER_EVERY_S="1", MESH_PLANNER_WINDOW_S="4")
    command = hosts["client"].command(sys.executable, "-m", "services.inspect", "planner")
    deadline = time.monotonic() + PATIENCE_S
    shown = ""
    while shown.count("1..1") < 2 or "?" in shown or "no heartbeat" in shown:  # "?": no figures yet
        assert time.monotonic() < deadline, f"{shown}\n{mesh.one('planner').logged()}"
        ask(mesh)
        env = {"PATH": "", **settings}
        shown = subprocess.run(
            command, cwd=REPO, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        ).stdout
    log = [json.loads(line) for line in mesh.one("planner").logged().splitlines() if line.startswith("{")]
    assert not [line for line in log if line.get("level") in ("warning", "error")], log
