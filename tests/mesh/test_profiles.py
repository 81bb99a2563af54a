"""`inspect profile`: a torch trace of one worker while it serves."""

import asyncio
import gzip
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from components.wire.instances import Role
from services.inspect import __main__ as inspect_main
from tests.mesh.harness import Client, MeshProcesses, open_client
from tests.mesh.preloaded import Preloaded

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]

RunService = Callable[..., Any]
WIDE: Final = {"COLUMNS": "240"}
WORKERS: Final[tuple[Role, ...]] = ("prefill", "decode")
SHORTER_THAN_PROFILE_S: Final = 50.0  # the profile takes 60 s
PROMPT: Final = [3 + i % 400 for i in range(200)]


class Inspect:
    """`python -m services.inspect profile` against one mesh."""

    def __init__(self, run_service: RunService, mesh: MeshProcesses, home: Path) -> None:
        self._run_service = run_service
        user = mesh.as_user("inspect")
        self._where = ["--etcd-url", user.etcd_url, "--nats-url", user.nats_url, "--namespace", mesh.namespace]
        self._where += ["--state-dir", str(home)]

    def start(self, *args: str) -> Any:
        return self._run_service("services.inspect", "profile", *args, *self._where, env=WIDE)

    async def run(self, *args: str) -> tuple[int, str]:
        """Run it in this process, where it starts at once. One at a time: it replaces sys.stdout."""
        command = ["profile", *args, *self._where]
        result = await asyncio.to_thread(CliRunner().invoke, inspect_main.app, command, env=WIDE)
        return result.exit_code, result.output


@pytest.fixture
def inspect(run_service: RunService, shared_tiny_mesh: MeshProcesses, tmp_path: Path) -> Inspect:
    return Inspect(run_service, shared_tiny_mesh, tmp_path)


def forwards(trace: Any) -> list[str]:
    names = [event.get("name", "") for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    return [name for name in names if name.startswith("forward: ")]


def read(path: Path) -> Any:
    with gzip.open(path) as file:
        return json.load(file)


async def keep_busy(client: Client, stop: asyncio.Event) -> int:
    """Send different prompts, one at a time; return the number of answers."""
    answered = 0
    while not stop.is_set():
        tokens = await client.generate([5 + answered % 400, *PROMPT], 8, model="tiny")
        assert len(tokens) == 8
        answered += 1
    return answered


async def test_each_worker_gives_a_trace_of_its_own_forwards_while_it_serves(
    shared_tiny_mesh: MeshProcesses, inspect: Inspect, tmp_path: Path
) -> None:
    outs = {role: tmp_path / f"{role}.json.gz" for role in WORKERS}
    async with open_client(shared_tiny_mesh, "tiny") as client:
        records = {role: (await client.until_usable(role))[0] for role in WORKERS}
        stop = asyncio.Event()
        load = asyncio.create_task(keep_busy(client, stop))
        options = ("--json", "--seconds", "2", "--instance")
        recording = {
            role: inspect.start(role, *options, records[role].instance_id, "--out", str(outs[role])) for role in WORKERS
        }
        codes = await asyncio.gather(*(asyncio.to_thread(recording[role].exit_code) for role in WORKERS))
        stop.set()
        assert await load > 2, "it served meanwhile"
        await client.until_quiet()
    for role, code in zip(WORKERS, codes, strict=True):
        assert code == 0, recording[role].logged()
        facts = json.loads(recording[role].logged())
        assert facts["steps"] > 0, "it was not idle"
        assert (facts["file"], facts["role"], facts["instance"]) == (str(outs[role]), role, records[role].instance_id)
    traces = {role: read(out) for role, out in outs.items()}
    for role, trace in traces.items():
        assert trace["role"] == role
        computed = [e for e in trace["traceEvents"] if e.get("cat") == "cpu_op"]
        assert {e["pid"] for e in computed} == {records[role].pid}, "only its own work"
        assert len([e for e in trace["traceEvents"] if e["name"] == "Record Window End"]) > 1, "all of its segments"
        assert any(e["name"] in ("aten::linear", "aten::mm", "aten::addmm") for e in computed)
    assert {name for name in forwards(traces["decode"]) if "1 decodes" in name}
    assert all(name.startswith("forward: 0 decodes") for name in forwards(traces["prefill"]))
    assert any(name.endswith(" 128 prompt tokens") for name in forwards(traces["prefill"]))


async def test_a_second_profile_of_a_worker_is_refused_by_its_name_and_the_first_arrives(
    shared_tiny_mesh: MeshProcesses, inspect: Inspect, tmp_path: Path
) -> None:
    async with open_client(shared_tiny_mesh, "tiny") as client:
        [record] = await client.until_usable("prefill")
        first = inspect.start("prefill", "--seconds", "5", "--out", str(tmp_path / "first.json.gz"))
        await asyncio.to_thread(first.wait_for_log, "recording")
        code, output = await inspect.run("prefill", "--seconds", "1", "--out", str(tmp_path / "second.json.gz"))
        assert code == 1
        assert f"prefill {record.instance_id} is being profiled already" in output
        assert not list(tmp_path.glob("second*"))
        assert await asyncio.to_thread(first.exit_code) == 0, first.logged()
    assert f"prefill {record.instance_id} was idle: it computed nothing" in first.logged()
    assert forwards(read(tmp_path / "first.json.gz")) == []


async def test_the_worker_to_profile_must_be_named_and_one_that_dies_is_reported(
    shared_tiny_mesh: MeshProcesses, inspect: Inspect, tmp_path: Path
) -> None:
    async with open_client(shared_tiny_mesh, "tiny") as client:
        records = await client.until_usable("decode", 2)
        code, output = await inspect.run("decode")
        assert code == 1
        assert "which one?" in output
        for record in records:
            assert record.instance_id in output
        victim = [worker for worker in shared_tiny_mesh.workers if worker.role == "decode"][1]
        profiled = next(r for r in records if r.pid == victim.popen.pid)
        begun = inspect.start(
            "decode", "--instance", profiled.instance_id, "--seconds", "60", "--out", str(tmp_path / "x")
        )
        await asyncio.to_thread(begun.wait_for_log, "recording")
        victim.popen.send_signal(signal.SIGKILL)
        assert await asyncio.to_thread(begun.popen.wait, SHORTER_THAN_PROFILE_S) == 1
        assert f"decode {profiled.instance_id} on" in begun.logged()
        assert "is gone: no process listens on" in begun.logged()
        assert "Traceback" not in begun.logged()
    assert not list(tmp_path.glob("x*"))


async def test_a_worker_that_is_stopped_does_not_wait_for_its_profile(
    shared_tiny_mesh: MeshProcesses, inspect: Inspect, tmp_path: Path
) -> None:
    decode = shared_tiny_mesh.one("decode")
    async with open_client(shared_tiny_mesh, "tiny") as client:
        [profiled] = [r for r in await client.until_usable("decode") if r.pid == decode.popen.pid]
        out = str(tmp_path / "x")
        process = inspect.start("decode", "--instance", profiled.instance_id, "--seconds", "60", "--out", out)
        await asyncio.to_thread(process.wait_for_log, "recording")
        decode.popen.terminate()
        assert await asyncio.to_thread(decode.popen.wait, SHORTER_THAN_PROFILE_S) == 0, decode.logged()
        assert await asyncio.to_thread(process.popen.wait, SHORTER_THAN_PROFILE_S) == 1
    assert "is gone" in process.logged()


async def test_without_such_a_worker_or_with_one_that_computes_nothing_it_is_one_sentence(
    etcd_url: str, nats_url: str, preloaded: Preloaded, namespace: str, tmp_path: Path, run_service: RunService
) -> None:
    with MeshProcesses(
        etcd_url, nats_url, namespace, tmp_path, "mock", {"MESH_ENGINE__NUM_PAGES": "64"}, preloaded
    ) as mesh:
        inspect = Inspect(run_service, mesh, tmp_path)
        code, output = await inspect.run("prefill")
        assert (code, output.count("\n")) == (1, 1)
        assert "no prefill instance registered in etcd" in output
        mesh.start("prefill")
        code, output = await inspect.run("prefill")
    assert code == 1
    assert "this worker runs the mock engine, which computes nothing: profile one with a model" in output
