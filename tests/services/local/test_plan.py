"""What each child is given."""

import importlib
import os
from pathlib import Path

import pytest

from components.settings import MeshSettings, misspelled
from engine.config import EngineConfig
from services.local.greeting import greeting
from services.local.plan import Plan, reachable
from services.local.process import CannotStart


@pytest.fixture(autouse=True)
def no_mesh_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*MeshSettings.model_fields, "engine__threads"]:
        monkeypatch.delenv(f"MESH_{name.upper()}", raising=False)


def env_of(plan: Plan) -> dict[str, dict[str, str]]:
    tiers = plan.children(plan.settings(), "http://e:1", "nats://n:2")
    return {spec.name: dict(spec.env) for tier in tiers for spec in tier}


def test_children_come_in_the_order_of_dependence_and_find_the_servers() -> None:
    plan = Plan({"bootstrap": 1, "prefill": 2, "decode": 1, "frontend": 2}, port=9000)
    env = env_of(plan)
    assert list(env) == plan.names
    assert plan.names == ["bootstrap-0", "prefill-0", "prefill-1", "decode-0", "frontend-0", "frontend-1"]
    assert {e["MESH_ETCD_URL"] for e in env.values()} == {"http://e:1"}
    assert {e["MESH_NATS_URL"] for e in env.values()} == {"nats://n:2"}


@pytest.mark.parametrize(
    ("share", "ports", "told"), [(True, ["9000", "9000"], "true"), (False, ["9000", "9001"], "false")]
)
def test_several_frontends_share_one_port_unless_told_otherwise(share: bool, ports: list[str], told: str) -> None:
    plan = Plan({"bootstrap": 0, "prefill": 0, "decode": 1, "frontend": 2}, port=9000, share_port=share)
    env = [env_of(plan)[f"frontend-{i}"] for i in range(2)]
    assert [e["MESH_FRONTEND_PORT"] for e in env] == ports
    assert {e["MESH_FRONTEND_SHARE_PORT"] for e in env} == {told}
    assert plan.urls == [f"http://127.0.0.1:{port}" for port in dict.fromkeys(ports)]


@pytest.mark.parametrize("by", ["option", "variable"])
def test_frontends_with_keys_and_a_certificate_are_greeted_as_such(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"frontend_tls_cert": "c.pem", "frontend_tls_key": "k.pem", "frontend_api_keys_file": "keys.toml"}
    if by == "variable":
        for name, value in values.items():
            monkeypatch.setenv(f"MESH_{name.upper()}", value)
    counts = dict.fromkeys(["bootstrap", "prefill", "decode", "frontend"], 1)
    plan = Plan(counts, port=9000, given=values if by == "option" else {})
    assert plan.urls == ["https://127.0.0.1:9000"]
    env = env_of(plan)["frontend-0"]
    assert {name: env[f"MESH_{name.upper()}"] for name in values} == values
    [ask] = [line for line in greeting(plan, "m", plan.settings()) if "ask:" in line]
    assert "-k" in ask
    assert "Authorization: Bearer" in ask


def test_the_greeting_shows_a_planner_and_where_the_metrics_are() -> None:
    plan = Plan(dict.fromkeys(["bootstrap", "prefill", "decode", "frontend"], 1), given={"state_dir": "/tmp/mesh"})
    pages = {"prefill-0": "http://127.0.0.1:41", "decode-0": "http://127.0.0.1:42", "frontend-0": "http://127.0.0.1:43"}
    lines = greeting(plan, "m", plan.settings(), pages)
    [planner] = [line for line in lines if "planner:" in line]
    assert planner.endswith("services.planner --connector local --prefill=1..2 --decode=1..2 --state-dir /tmp/mesh")
    at = next(i for i, line in enumerate(lines) if "metrics:" in line)
    assert lines[at].split() == [
        *("metrics:", "prefill-0", "http://127.0.0.1:41/metrics", "decode-0", "http://127.0.0.1:42/metrics")
    ]
    assert lines[at + 1].split() == ["frontend-0", "http://127.0.0.1:43/metrics"]


def test_one_frontend_has_its_port_alone() -> None:
    env = env_of(Plan(dict.fromkeys(["bootstrap", "prefill", "decode", "frontend"], 1)))["frontend-0"]
    assert env["MESH_FRONTEND_SHARE_PORT"] == "false"


def test_a_given_setting_wins_over_the_environment_and_a_role_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_NAMESPACE", "outer")
    monkeypatch.setenv("MESH_DECODE_ENGINE__THREADS", "1")
    plan = Plan(dict.fromkeys(["bootstrap", "prefill", "decode", "frontend"], 1), given={"namespace": "inner"})
    decode = env_of(plan)["decode-0"]
    assert (decode["MESH_NAMESPACE"], decode["MESH_DECODE_ENGINE__THREADS"]) == ("inner", "1")


def test_workers_share_the_cores_unless_their_number_of_threads_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    counts = {"bootstrap": 1, "prefill": 1, "decode": 1, "frontend": 1}
    decode = env_of(Plan(counts))["decode-0"]
    assert decode["MESH_ENGINE__THREADS"] == "4"
    assert Path(decode["MESH_ENGINE__SHARED_CORES"]).name == "cores"
    given = env_of(Plan(counts, given={"engine__threads": "2"}))["decode-0"]
    assert given["MESH_ENGINE__THREADS"] == "2"
    assert "MESH_ENGINE__SHARED_CORES" not in given


def test_every_variable_a_child_gets_is_one_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_METRICS_PORT", "9100")
    plan = Plan(
        dict.fromkeys(["bootstrap", "prefill", "decode", "frontend"], 1),
        given={
            "log_level": "debug",
            "otlp_endpoint": "http://o:4318",
            "engine__dtype": "float32",
            "engine__threads": "2",
        },
    )
    for name, env in env_of(plan).items():
        role = name.removesuffix("-0")
        classes = vars(importlib.import_module(f"services.{role}.config"))
        assert misspelled(env, classes[f"{role.title()}Settings"]) == []
    assert {"dtype", "threads", "kv_memory_gb"} <= set(EngineConfig.__dataclass_fields__)


def test_draining_ends_before_a_child_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_DECODE_DRAIN_TIMEOUT_S", "3")
    env = env_of(Plan(dict.fromkeys(["bootstrap", "prefill", "decode", "frontend"], 1), stop_timeout_s=5.0))
    assert env["prefill-0"]["MESH_PREFILL_DRAIN_TIMEOUT_S"] == "4"
    assert env["decode-0"]["MESH_DECODE_DRAIN_TIMEOUT_S"] == "3"


def test_processes_on_one_machine_take_metrics_ports_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_METRICS_PORT", "9100")
    env = env_of(Plan({"bootstrap": 1, "prefill": 1, "decode": 2, "frontend": 1}))
    everyone = ["bootstrap-0", "prefill-0", "decode-0", "decode-1", "frontend-0"]
    assert [env[name]["MESH_METRICS_PORT"] for name in everyone] == ["9100", "9101", "9102", "9103", "9104"]


def test_a_misspelled_variable_and_a_wrong_value_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotStart, match="setting namespace: String should match pattern"):
        Plan({}, given={"namespace": "No Such"}).settings()
    monkeypatch.setenv("MESH_ECTD_URL", "http://e:1")
    with pytest.raises(CannotStart, match="unknown setting MESH_ECTD_URL"):
        Plan({}).settings()


def test_a_relative_state_directory_is_the_same_for_servers_that_work_in_their_own() -> None:
    """NATS did not start: it looked for its configuration below its own directory."""
    settings = Plan({}, given={"state_dir": "build/mesh"}).settings()
    assert settings.home == Path.cwd() / "build/mesh"


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("fe80::1", "[fe80::1]"), ("10.0.0.1", "10.0.0.1")],
)
def test_urls_can_be_connected_to(host: str, address: str) -> None:
    assert reachable(host) == address
