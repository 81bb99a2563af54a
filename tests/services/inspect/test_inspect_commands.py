import asyncio
import json
import os
import subprocess
import sysconfig
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.errors import AuthorizationError
from opentelemetry.trace import StatusCode
from rich.console import Console
from typer.testing import CliRunner

from components.discovery.registry import Registration, join_registry
from components.messaging.bus import Bus
from components.messaging.call_server import serve_calls
from components.messaging.connection import connect_bus
from components.process import subject_of
from components.settings import MeshSettings
from components.startup import EX_CONFIG
from components.telemetry.trace_file import FILE_NAME
from services.inspect import __main__ as inspect
from services.inspect import mesh
from services.inspect.workers import show_workers
from tests.components.discovery.records import record
from tests.components.telemetry.written import writing_tracer
from tests.secured import SECURED
from tests.waiting import PATIENCE_S

RunService = Callable[..., Any]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "console", Console(width=200, color_system=None))
    for name in ("MESH_STATE_DIR", "MESH_ETCD_URL", "MESH_NATS_URL", "MESH_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(inspect.app, list(args))
    said = result.output + (str(result.exception.code) if isinstance(result.exception, SystemExit) else "")
    return result.exit_code, said


@pytest.mark.mesh
def test_the_shell_variables_let_etcdctl_in(etcd_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if SECURED:
        monkeypatch.setenv("MESH_TLS__CA", os.environ["SSL_CERT_FILE"])  # the shell below has only what is printed
    code, text = invoke("env", "--etcd-url", etcd_url, "--nats-url", "nats://a:b@h:1", "--state-dir", str(tmp_path))
    assert code == 0
    script = f'{text}\netcdctl put shell/a "$NATS_URL" && etcdctl get --prefix shell/'
    etcdctl = Path(sysconfig.get_path("scripts")) / "etcdctl"
    shell = {"PATH": f"{etcdctl.parent}:{os.environ['PATH']}"}
    ran = subprocess.run(
        ["/bin/sh", "-c", script], env=shell, check=False, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ran.stdout.split() == ["OK", "shell/a", "nats://a:b@h:1"], ran.stderr


def test_the_shell_variables_name_the_model_of_the_mesh_that_runs_here(tmp_path: Path) -> None:
    """A worker started with them served another model."""
    state = tmp_path / "local"
    state.mkdir()
    mine = {"etcd_url": "http://e:1", "nats_url": "nats://n:2", "namespace": "mine", "model": "mock"}
    (state / "running.json").write_text(json.dumps({"pid": os.getpid(), **mine}))
    code, text = invoke("env", "--json", "--state-dir", str(tmp_path))
    assert code == 0
    found = json.loads(text)
    assert (found["MESH_NATS_URL"], found["MESH_MODEL"]) == ("nats://n:2", "mock")
    assert found["MESH_STATE_DIR"] == str(tmp_path)
    _, text = invoke("env", "--json", "--state-dir", str(tmp_path), "--etcd-url", "http://other:1")
    assert "MESH_MODEL" not in json.loads(text)


def test_without_a_mesh_there_are_no_shell_variables(run_service: RunService, tmp_path: Path) -> None:
    """It printed the usual ports, without servers, with exit code 0."""
    process = run_service("services.inspect", "env", "--state-dir", str(tmp_path))
    assert process.exit_code() == 1
    assert process.logged().startswith(f"no services.local runs with state directory {tmp_path}: name its --state-dir")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    tracer, writer = writing_tracer(tmp_path, "frontend-1")
    for start, name in ((10, "older"), (20, "newer")):
        tracer.start_span(name, start_time=start, attributes={"kvmesh.request_id": f"id-{name}"}).end(start + 5)
    writer.close()
    return tmp_path


def test_without_a_trace_the_error_says_what_to_do(run_service: RunService, tmp_path: Path) -> None:
    process = run_service("services.inspect", "trace", "last", "--state-dir", str(tmp_path))
    assert process.exit_code() == 1
    said = f"no trace is kept in {tmp_path}: send a request first, or set the services' --state-dir"
    assert process.logged().strip() == said


def test_help_all_is_help_here_too(run_service: RunService) -> None:
    process = run_service("services.inspect", "traces", "--help-all")
    assert process.exit_code() == 0
    assert "--count" in process.logged()


def test_the_last_trace_is_the_newest(home: Path) -> None:
    for args in (("trace", "last"), ("trace",)):
        code, text = invoke(*args, "--state-dir", str(home))
        assert code == 0
        assert "newer: 1 spans" in text


@pytest.mark.parametrize("which", ["id-older", "chatcmpl-id-older", "cmpl-id-old"])
def test_a_trace_is_found_by_the_id_that_a_client_was_given(home: Path, which: str) -> None:
    code, text = invoke("trace", which, "--state-dir", str(home))
    assert code == 0
    assert "older: 1 spans" in text


def test_an_unknown_trace_id_is_reported(home: Path) -> None:
    code, text = invoke("trace", "nosuch", "--state-dir", str(home))
    assert code == 1
    assert "no kept trace begins with 'nosuch'" in text


@pytest.mark.parametrize("option", ["--otlp-endpoint", "MESH_OTLP_ENDPOINT"])
def test_an_observer_that_cannot_be_one_is_refused(option: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This host's traces were shown, as if the observer had sent them."""
    given: tuple[str, ...] = (option, "http://x:abc")
    if not option.startswith("--"):
        monkeypatch.setenv(*given)
        given = ()
    for args in (("trace", "last"), ("traces",)):
        code, text = invoke(*args, *given, "--state-dir", str(home))
        assert code == EX_CONFIG
        assert "setting otlp_endpoint: give http://HOST:PORT or https://HOST:PORT" in text
        assert "newer" not in text


def test_a_file_that_is_no_trace_store_is_reported(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"this is no database, " * 100)
    for args in (("trace", "last"), ("traces",)):
        code, text = invoke(*args, "--state-dir", str(tmp_path))
        assert code == 1
        assert f"{tmp_path / FILE_NAME} is damaged: file is not a database" in text


def test_traces_are_listed_a_line_each_newest_first(home: Path) -> None:
    code, text = invoke("traces", "--state-dir", str(home))
    assert code == 0
    assert [line.split()[-1] for line in text.splitlines()] == ["request", "newer", "older"]


def test_slow_and_failed_traces_are_listed(tmp_path: Path) -> None:
    tracer, writer = writing_tracer(tmp_path)
    tracer.start_span("slow one", attributes={"kvmesh.request_id": "s", "kvmesh.slow": True}).end()
    failed = tracer.start_span("failed one", attributes={"kvmesh.request_id": "f"})
    failed.set_status(StatusCode.ERROR, "no decode instance")
    failed.end()
    writer.close()
    state = ("--state-dir", str(tmp_path))
    for which, name in (("slow", "slow one"), ("failed", "failed one: no decode instance")):
        code, text = invoke("trace", which, *state)
        assert code == 0
        assert text.splitlines()[-1].rstrip().endswith(name)
        code, text = invoke("trace", which, "--json", *state)
        assert [trace["name"] for trace in json.loads(text)["traces"]] == [f"{which} one"]


def test_without_slow_traces_the_list_says_so(home: Path) -> None:
    assert invoke("trace", "slow", "--state-dir", str(home)) == (0, f"no slow trace is kept in {home}\n")


def test_a_trace_is_printed_as_json_and_written_for_perfetto(home: Path) -> None:
    state = ("--state-dir", str(home))
    code, text = invoke("trace", "id-older", "--json", *state)
    found = json.loads(text)
    assert (code, found["trace"]["request_id"], found["spans"][0]["name"]) == (0, "id-older", "older")
    file = home / "trace.json"
    code, text = invoke("trace", "last", "--perfetto", str(file), *state)
    assert (code, text) == (0, f"wrote {file}: open it at https://ui.perfetto.dev\n")
    assert [event["name"] for event in json.loads(file.read_text())["traceEvents"]] == ["process_name", "newer"]


def test_a_file_for_perfetto_that_cannot_be_written_is_reported(home: Path) -> None:
    file = home / "nosuch" / "x.json"
    code, text = invoke("trace", "last", "--perfetto", str(file), "--state-dir", str(home))
    assert code == 1
    assert f"{file} cannot be written: No such file or directory" in text


@pytest.mark.parametrize(
    ("variables", "args", "line"),
    [
        ({}, ["workers", "--namespace", "BAD NS"], "setting namespace: "),
        ({"MESH_LEASE_TTL_S": "abc"}, ["traces"], "setting lease_ttl_s: "),
        ({"MESH_TLS": "abc"}, ["traces"], "settings: "),
        ({}, ["env", "--etcd-url", "http://x:abc"], "setting etcd_url: each address must be http://HOST:PORT"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(
    run_service: RunService, tmp_path: Path, variables: dict[str, str], args: list[str], line: str
) -> None:
    """The output was a traceback."""
    process = run_service("services.inspect", *args, "--state-dir", str(tmp_path), env=variables)
    assert process.exit_code() == EX_CONFIG
    (text,) = process.logged().splitlines()
    assert text.startswith(line)


@pytest.mark.parametrize("command", [("workers",), ("planner",), ("profile", "decode"), ("route", "--prompt", "x")])
def test_without_a_mesh_the_state_directory_is_named_as_a_cause(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error named only addresses, although the mesh ran with another --state-dir."""
    limit = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda _: limit(0.05))
    nowhere = {"MESH_NATS_URL": "nats://127.0.0.1:9", "MESH_ETCD_URL": "http://127.0.0.1:9"}
    for name, url in nowhere.items():
        monkeypatch.setenv(name, url)
    code, text = invoke(*command, "--state-dir", str(tmp_path))
    assert code == 1
    assert "no answer from" in text
    assert f"no services.local runs with state directory {tmp_path}: name its --state-dir, or --etcd-url" in text


def test_a_login_that_nats_refuses_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that services.local logs has no password. The error was that NATS does not answer."""

    @asynccontextmanager
    async def refused(*arguments: Any) -> AsyncIterator[Bus]:
        arguments[3](AuthorizationError())
        await asyncio.Event().wait()
        raise AssertionError("nothing sets the event")
        yield

    monkeypatch.setattr(mesh, "connect_bus", refused)
    monkeypatch.setattr(mesh, "CONNECT_S", 0.05)
    code, text = invoke("workers", "--nats-url", "nats://127.0.0.1:9", "--state-dir", str(tmp_path))
    assert code == 1
    assert "no answer from NATS at nats://127.0.0.1:9 (nats: authorization failed): " in text


@pytest.mark.mesh
def test_only_the_server_that_does_not_answer_is_named(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`workers` and `route` named etcd or NATS, whichever it was."""
    open_bus = mesh.open_bus

    @asynccontextmanager
    async def then_short(settings: MeshSettings) -> AsyncIterator[Bus]:
        async with open_bus(settings) as bus:
            monkeypatch.setattr(mesh, "CONNECT_S", 0.1)
            yield bus

    monkeypatch.setattr(mesh, "open_bus", then_short)
    servers = ("--etcd-url", "http://127.0.0.1:9", "--nats-url", nats_url)
    code, text = invoke("workers", *servers, "--state-dir", str(tmp_path))
    assert code == 1
    assert "no answer from etcd at http://127.0.0.1:9: no services.local runs" in text


@pytest.mark.mesh
@pytest.mark.anyio
async def test_workers_of_this_namespace_are_shown_and_no_others(
    etcd_url: str, nats_url: str, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = MeshSettings(etcd_url=etcd_url, nats_url=nats_url, namespace=namespace)
    console = Console(width=220, color_system=None)
    mine, lonely, other = (subject_of(ns, "decode", ns[-3:]) for ns in (namespace, f"{namespace}", f"{namespace}0"))
    async with (
        connect_bus(nats_url, "test") as bus,
        join_registry(etcd_url, namespace, 5) as registry,
        serve_calls(bus, "decode", mine, [], {"instance_id": "registered"}),
        serve_calls(bus, "decode", lonely, [], {"instance_id": "lonely"}),
        serve_calls(bus, "decode", other, [], {"instance_id": "of-another-mesh"}),
        registry.advertise(Registration("registered"), lambda epoch: record("registered", epoch)),
        registry.advertise(Registration("mute"), lambda epoch: record("mute", epoch)),
    ):
        await show_workers(settings, console)
    text = capsys.readouterr().out
    loads = text.partition("metrics and health")[0]
    rows = {name: line for line in loads.splitlines() for name in ("registered", "mute") if name in line}
    assert "no answer" in rows["mute"]
    assert "no answer" not in rows["registered"]
    assert "answers on NATS but is not in etcd: kvmesh-decode lonely" in text
    assert "of-another-mesh" not in text
