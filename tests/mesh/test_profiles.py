"""A torch trace of one worker alone, taken while it serves, by the command line that users have."""

import asyncio
import gzip
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from components.wire.instances import Role
from tests.mesh.harness import Client, MeshProcesses, open_client

pytestmark = [pytest.mark.mesh, pytest.mark.anyio, pytest.mark.timeout(240)]

RunService = Callable[..., Any]
WORKERS: Final[tuple[Role, ...]] = ("prefill", "decode")
PROMPT: Final = [3 + i % 400 for i in range(200)]


class Inspect:
    """`python -m services.inspect profile` against one mesh."""

    def __init__(self, run_service: RunService, mesh: MeshProcesses, home: Path) -> None:
        self._run_service = run_service
        self._where = ["--etcd-url", mesh.etcd_url, "--nats-url", mesh.nats_url, "--namespace", mesh.namespace]
        self._where += ["--state-dir", str(home)]

    def start(self, *args: str) -> Any:
        return self._run_service("services.inspect", "profile", *args, *self._where, env={"COLUMNS": "240"})

    async def run(self, *args: str) -> tuple[int, str]:
        process = self.start(*args)
        code = await asyncio.to_thread(process.popen.wait, 60)
        return code, process.logged()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def inspect(run_service: RunService, tiny_mesh: MeshProcesses, tmp_path: Path) -> Inspect:
    return Inspect(run_service, tiny_mesh, tmp_path)


def forwards(trace: Any) -> list[str]:
    names = [event.get("name", "") for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    return [name for name in names if name.startswith("forward: ")]


def read(path: Path) -> Any:
    with gzip.open(path) as file:
        return json.load(file)


async def keep_busy(client: Client, stop: asyncio.Event) -> int:
    """Requests one after the other, each another prompt; how many came back whole."""
    answered = 0
    while not stop.is_set():
        tokens = await client.generate([5 + answered % 400, *PROMPT], 8, model="tiny")
        assert len(tokens) == 8
        answered += 1
    return answered


async def test_each_worker_gives_a_trace_of_its_own_forwards_while_it_serves(
    tiny_mesh: MeshProcesses, inspect: Inspect, tmp_path: Path
) -> None:
    tiny_mesh.start("bootstrap", "prefill", "decode")
    async with open_client(tiny_mesh, "tiny") as client:
        pids = {r.role: r.pid for role in WORKERS for r in await client.until_usable(role)}
        stop = asyncio.Event()
        load = asyncio.create_task(keep_busy(client, stop))
        traces: dict[Role, Any] = {}
        for role in WORKERS:
            out = tmp_path / f"{role}.json.gz"
            code, said = await inspect.run(role, "--seconds", "2.5", "--out", str(out))
            assert code == 0, said
            assert "idle" not in said
            traces[role] = read(out)
        stop.set()
        assert await load > 2, "it served meanwhile"
        await client.until_quiet()
    for role, trace in traces.items():
        assert trace["role"] == role
        computed = [e for e in trace["traceEvents"] if e.get("cat") == "cpu_op"]
        assert {e["pid"] for e in computed} == {pids[role]}, "nobody else's work"
        assert len([e for e in trace["traceEvents"] if e["name"] == "Record Window End"]) > 1, "all of its segments"
        assert any(e["name"] in ("aten::linear", "aten::mm", "aten::addmm") for e in computed)
    assert {name for name in forwards(traces["decode"]) if "1 decodes" in name}
    assert all(name.startswith("forward: 0 decodes") for name in forwards(traces["prefill"]))
    assert any(name.endswith(" 128 prompt tokens") for name in forwards(traces["prefill"]))


async def test_a_second_profile_of_a_worker_is_refused_by_its_name_and_the_first_arrives(
    tiny_mesh: MeshProcesses, inspect: Inspect, tmp_path: Path
) -> None:
    tiny_mesh.start("decode")
    async with open_client(tiny_mesh, "tiny") as client:
        [record] = await client.until_usable("decode")
        first = inspect.start("decode", "--seconds", "6", "--out", str(tmp_path / "first.json.gz"))
        await asyncio.to_thread(first.wait_for_log, "recording")
        code, said = await inspect.run("decode", "--seconds", "1", "--out", str(tmp_path / "second.json.gz"))
        assert code == 1
        assert f"decode {record.instance_id} is being profiled already" in said
        assert not list(tmp_path.glob("second*"))
        assert await asyncio.to_thread(first.popen.wait, 60) == 0, first.logged()
    assert f"decode {record.instance_id} was idle: it computed nothing" in first.logged()
    assert forwards(read(tmp_path / "first.json.gz")) == []


async def test_what_is_wrong_is_one_sentence(tiny_mesh: MeshProcesses, inspect: Inspect, tmp_path: Path) -> None:
    code, said = await inspect.run("prefill")
    assert (code, said.count("\n")) == (1, 1)
    assert "no prefill instance registered in etcd" in said
    one, _ = tiny_mesh.start("decode", "decode")
    async with open_client(tiny_mesh, "tiny") as client:
        records = await client.until_usable("decode", 2)
        code, said = await inspect.run("decode")
        assert "which one?" in said
        for record in records:
            assert record.instance_id in said
        asked = next(r for r in records if r.instance_id in one.logged())
        begun = inspect.start(
            "decode", "--instance", asked.instance_id, "--seconds", "30", "--out", str(tmp_path / "x")
        )
        await asyncio.to_thread(begun.wait_for_log, "recording")
        one.popen.send_signal(signal.SIGKILL)
        assert await asyncio.to_thread(begun.popen.wait, 30) == 1
        assert f"decode {asked.instance_id} on" in begun.logged()
        assert "is gone: nobody listens on" in begun.logged()
        assert "Traceback" not in begun.logged()
    assert not list(tmp_path.glob("x*"))


async def test_the_mock_engine_has_nothing_to_profile_and_says_so(
    etcd_url: str, nats_url: str, namespace: str, tmp_path: Path, run_service: RunService
) -> None:
    with MeshProcesses(etcd_url, nats_url, namespace, tmp_path, "mock", {"MESH_ENGINE__NUM_PAGES": "64"}) as mesh:
        mesh.start("prefill")
        code, said = await Inspect(run_service, mesh, tmp_path).run("prefill")
    assert code == 1
    assert "this worker runs the mock engine, which computes nothing: profile one with a model" in said


async def test_a_worker_that_is_told_to_leave_does_not_wait_for_its_profile(
    tiny_mesh: MeshProcesses, inspect: Inspect, tmp_path: Path
) -> None:
    decode = tiny_mesh.start_one("decode")
    async with open_client(tiny_mesh, "tiny"):
        process = inspect.start("decode", "--seconds", "60", "--out", str(tmp_path / "x"))
        await asyncio.to_thread(process.wait_for_log, "recording")
        decode.popen.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(decode.popen.wait, 15) == 0, decode.logged()
        assert await asyncio.to_thread(process.popen.wait, 30) == 1
    assert "is gone" in process.logged()
