import json
import os
from pathlib import Path

import pytest

from components.local_mesh import beside_local_mesh, local_mesh, no_answer_advice, started_at
from services.planner.__main__ import read_settings
from services.planner.config import PlannerSettings


def running(home: Path, pid: int) -> None:
    (home / "local").mkdir(exist_ok=True)
    facts = {
        "pid": pid,
        "etcd_url": "http://e:1",
        "nats_url": "nats://n:2",
        "namespace": "mine",
        "http": ["http://h:3"],
    }
    (home / "local" / "running.json").write_text(json.dumps(facts))


def test_a_planner_finds_the_mesh_by_its_state_directory_and_set_values_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited forever at etcd's usual port, where no server listened."""
    for name in ("ETCD_URL", "NATS_URL", "NAMESPACE"):
        monkeypatch.delenv(f"MESH_{name}", raising=False)
    read = ["--state-dir", str(tmp_path)]
    assert beside_local_mesh(PlannerSettings.read(read)).etcd_url == "http://127.0.0.1:2379"
    running(tmp_path, os.getpid())
    found = beside_local_mesh(PlannerSettings.read([*read, "--prefill", "1..3"]))
    assert (found.etcd_url, found.nats_url, found.namespace) == ("http://e:1", "nats://n:2", "mine")
    assert found.prefill.most == 3
    monkeypatch.setenv("MESH_NATS_URL", "nats://given:4")
    assert beside_local_mesh(PlannerSettings.read(read)).nats_url == "nats://given:4"
    assert local_mesh(tmp_path)["http"] == ["http://h:3"]


def test_a_planner_that_finds_no_mesh_names_the_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waited for NATS at the usual port."""
    for name in ("ETCD_URL", "NATS_URL", "NAMESPACE"):
        monkeypatch.delenv(f"MESH_{name}", raising=False)
    read_settings(["--state-dir", str(tmp_path)])
    line = f"no services.local runs with state directory {tmp_path} (--state-dir): trying the usual ports"
    assert caplog.messages == [line]
    read_settings(["--state-dir", str(tmp_path), "--nats-url", "nats://n:2"])
    running(tmp_path, os.getpid())
    read_settings(["--state-dir", str(tmp_path)])
    assert caplog.messages == [line]


def test_a_mesh_that_has_ended_is_not_found(tmp_path: Path) -> None:
    running(tmp_path, 2**22 + 1)
    assert local_mesh(tmp_path) == {}
    (tmp_path / "local" / "running.json").write_text("")
    assert local_mesh(tmp_path) == {}


def test_a_mesh_whose_process_id_belongs_to_another_process_is_not_found(tmp_path: Path) -> None:
    """`inspect env` printed the addresses and passwords of a mesh that had been killed."""
    own = os.getpid()
    running(tmp_path, own)
    file = tmp_path / "local" / "running.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "started": started_at(own)}))
    assert local_mesh(tmp_path)["pid"] == own
    file.write_text(json.dumps({**facts, "started": started_at(1)}))
    assert local_mesh(tmp_path) == {}


def test_a_mesh_that_was_found_and_does_not_answer_is_named(tmp_path: Path) -> None:
    """The error advised to set the addresses, which were known."""
    read = ["--state-dir", str(tmp_path)]
    assert "no services.local runs" in no_answer_advice(PlannerSettings.read(read))
    running(tmp_path, os.getpid())
    found = beside_local_mesh(PlannerSettings.read(read))
    assert no_answer_advice(found) == f"services.local (pid {os.getpid()}) runs it; its logs are in {tmp_path}/local"
    for given in (["--nats-url", "nats://n:9"], ["--etcd-url", "http://e:9"]):
        other = beside_local_mesh(PlannerSettings.read([*read, *given]))
        assert no_answer_advice(other).startswith("name them with --etcd-url"), given


def test_a_user_finds_its_own_access_and_the_administrators_is_for_those_that_name_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ETCD_URL", "NATS_URL", "NAMESPACE"):
        monkeypatch.delenv(f"MESH_{name}", raising=False)
    running(tmp_path, os.getpid())
    file = tmp_path / "local" / "running.json"
    facts = json.loads(file.read_text())
    mine = {"nats_url": "tls://n:3", "nats_name": "planner", "tls": {"ca": "ca.pem", "certificate": "planner.pem"}}
    file.write_text(json.dumps({**facts, "users": {"planner": mine}}))
    settings = PlannerSettings.read(["--state-dir", str(tmp_path)])
    planner, administrator = beside_local_mesh(settings, "planner"), beside_local_mesh(settings)
    assert (planner.etcd_url, planner.nats_url, planner.nats_name) == ("http://e:1", "tls://n:3", "planner")
    assert planner.tls.given == [Path("ca.pem"), Path("planner.pem")]
    assert (administrator.nats_url, administrator.nats_name, administrator.tls.given) == ("nats://n:2", None, [])
    monkeypatch.setenv("MESH_NATS_URL", "nats://given:4")
    given = beside_local_mesh(PlannerSettings.read(["--state-dir", str(tmp_path)]), "planner")
    assert (given.nats_url, given.nats_name, given.tls.given) == ("nats://given:4", None, [])
