"""The settings of each child."""

import importlib
import os
import re
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509

from components.settings import misspelled
from components.startup import WrongSettings
from components.urls import login_of, without_password
from engine.config import EngineConfig
from services.local.accounts import OBSERVER, Accounts, Backends
from services.local.observer import with_certificate, with_observer
from services.local.options import assigned
from services.local.plan import Plan, reachable
from services.local.ready import greeting

ONE_EACH = dict.fromkeys(["bootstrap", "prefill", "decode", "frontend"], 1)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("MESH_")]:
        monkeypatch.delenv(name)


def env_of(plan: Plan) -> dict[str, dict[str, str]]:
    tiers = plan.children(lambda _: Backends("http://e:1", "nats://n:2"))
    return {spec.name: dict(spec.env) for tier in tiers for spec in tier}


def test_children_come_in_the_order_of_dependence_and_find_the_servers() -> None:
    plan = Plan.read({"bootstrap": 1, "prefill": 2, "decode": 1, "frontend": 2})
    env = env_of(plan)
    assert list(env) == plan.names
    assert plan.names == ["bootstrap-0", "prefill-0", "prefill-1", "decode-0", "frontend-0", "frontend-1"]
    assert {e["MESH_ETCD_URL"] for e in env.values()} == {"http://e:1"}
    assert {e["MESH_NATS_URL"] for e in env.values()} == {"nats://n:2"}


@pytest.mark.parametrize(
    ("share", "ports", "told"),
    [
        ("", ["9000", "9000"], "true"),
        ("true", ["9000", "9000"], "true"),
        ("0", ["9000", "9001"], "false"),
    ],
)
def test_several_frontends_share_one_port_unless_set_otherwise(
    share: str, ports: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_FRONTEND_PORT", "9000")
    monkeypatch.setenv("MESH_FRONTEND_SHARE_PORT", share)
    plan = Plan.read({"bootstrap": 0, "prefill": 0, "decode": 1, "frontend": 2})
    env = [env_of(plan)[f"frontend-{i}"] for i in range(2)]
    assert [e["MESH_FRONTEND_PORT"] for e in env] == ports
    assert {e["MESH_FRONTEND_SHARE_PORT"] for e in env} == {told}
    assert plan.urls == [f"http://127.0.0.1:{port}" for port in dict.fromkeys(ports)]


def test_the_greeting_has_https_and_a_key_if_frontends_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"frontend_tls_cert": "c.pem", "frontend_tls_key": "k.pem", "frontend_api_keys_file": "keys.toml"}
    for name, value in {**values, "frontend_port": "9000"}.items():
        monkeypatch.setenv(f"MESH_{name.upper()}", value)
    plan = Plan.read(ONE_EACH)
    assert plan.urls == ["https://127.0.0.1:9000"]
    env = env_of(plan)["frontend-0"]
    assert {name: env[f"MESH_{name.upper()}"] for name in values} == values
    [ask] = [line for line in greeting(plan, "m") if "ask:" in line]
    assert "-k" in ask
    assert "Authorization: Bearer" in ask


def test_the_greeting_shows_a_planner_and_where_the_metrics_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_STATE_DIR", "/tmp/mesh")
    plan = Plan.read(ONE_EACH)
    pages = {"prefill-0": "http://127.0.0.1:41", "decode-0": "http://127.0.0.1:42", "frontend-0": "http://127.0.0.1:43"}
    lines = greeting(plan, "m", pages)
    [planner] = [line for line in lines if "planner:" in line]
    assert planner.endswith("services.planner --connector local --prefill=1..2 --decode=1..2 --state-dir /tmp/mesh")
    at = next(i for i, line in enumerate(lines) if "metrics:" in line)
    assert lines[at].split() == [
        *("metrics:", "prefill-0", "http://127.0.0.1:41/metrics", "decode-0", "http://127.0.0.1:42/metrics")
    ]
    assert lines[at + 1].split() == ["frontend-0", "http://127.0.0.1:43/metrics"]


def test_one_frontend_has_its_port_alone() -> None:
    env = env_of(Plan.read(ONE_EACH))["frontend-0"]
    assert env["MESH_FRONTEND_SHARE_PORT"] == "false"


def test_a_setting_of_one_role_wins_over_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in assigned(["namespace=mine", "engine.max_running=3", "decode.engine.max_running=2"]).items():
        monkeypatch.setenv(name, value)
    plan = Plan.read(ONE_EACH)
    assert plan.settings.namespace == "mine"
    assert [plan.workers[role].engine.max_running for role in ("prefill", "decode")] == [3, 2]
    decode = env_of(plan)["decode-0"]
    assert (decode["MESH_NAMESPACE"], decode["MESH_DECODE_ENGINE__MAX_RUNNING"]) == ("mine", "2")


def test_workers_share_the_cores_unless_their_number_of_threads_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    counts = {"bootstrap": 1, "prefill": 1, "decode": 1, "frontend": 1}
    decode = env_of(Plan.read(counts))["decode-0"]
    assert decode["MESH_ENGINE__THREADS"] == "4"
    assert Path(decode["MESH_ENGINE__SHARED_CORES"]).name == "cores"
    monkeypatch.setenv("MESH_ENGINE__THREADS", "2")
    given = env_of(Plan.read(counts))["decode-0"]
    assert given["MESH_ENGINE__THREADS"] == "2"
    assert "MESH_ENGINE__SHARED_CORES" not in given


def test_a_later_worker_shares_with_those_that_run_and_not_with_all_that_ever_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its number counted as the number of workers, so after each added and removed worker the next got less."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setenv("MESH_METRICS_PORT", "9100")
    plan = Plan.read(ONE_EACH)
    more = plan.one_more("decode", 7, {**ONE_EACH, "decode": 2}, lambda _: Backends("http://e:1", "nats://n:2"))
    assert more.name == "decode-7"
    assert more.env["MESH_ENGINE__THREADS"] == "4"
    assert more.env["MESH_DECODE_ENGINE__GPU_MEMORY_UTILIZATION"] == "0.300"
    assert more.env["MESH_METRICS_PORT"] == "0"


@pytest.mark.parametrize(
    ("given", "shares"),
    [
        ({}, {"prefill": "0.450", "decode": "0.450"}),
        ({"MESH_ENGINE__DEVICE": "cpu"}, {}),
        ({"MESH_PREFILL_ENGINE__DEVICE": "cuda:1"}, {}),
        ({"MESH_DECODE_ENGINE__GPU_MEMORY_UTILIZATION": "0.3"}, {}),
        (
            {"MESH_PREFILL_ENGINE__DEVICE": "cuda:1", "MESH_DECODE_ENGINE__TENSOR_PARALLEL": "2"},
            {"prefill": "0.450", "decode": "0.450"},
        ),
    ],
    ids=["one GPU", "no GPU", "a GPU each", "given", "overlapping"],
)
def test_workers_of_a_gpu_share_its_memory(
    given: dict[str, str], shares: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    env = env_of(Plan.read(ONE_EACH))
    found = {role: env[f"{role}-0"].get(f"MESH_{role.upper()}_ENGINE__GPU_MEMORY_UTILIZATION") for role in shares}
    assert found == shares
    if not shares:
        own = {f"MESH_{role.upper()}_ENGINE__GPU_MEMORY_UTILIZATION" for role in ("prefill", "decode")}
        assert not (own - given.keys()) & {name for of in env.values() for name in of}


def test_every_variable_a_child_gets_is_one_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_METRICS_PORT", "9100")
    monkeypatch.setenv("MESH_LOG_LEVEL", "debug")
    plan = Plan.read(ONE_EACH)
    for name, env in env_of(plan).items():
        role = name.removesuffix("-0")
        classes = vars(importlib.import_module(f"services.{role}.config"))
        assert misspelled(env, classes[f"{role.title()}Settings"]) == []
    assert {"dtype", "threads", "kv_memory_gb"} <= set(EngineConfig.__dataclass_fields__)


def test_draining_ends_before_a_child_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_DECODE_DRAIN_TIMEOUT_S", "3")
    env = env_of(Plan.read(ONE_EACH, stop_timeout_s=5.0))
    assert env["prefill-0"]["MESH_PREFILL_DRAIN_TIMEOUT_S"] == "4"
    assert env["decode-0"]["MESH_DECODE_DRAIN_TIMEOUT_S"] == "3"


def test_processes_on_one_machine_take_metrics_ports_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_METRICS_PORT", "9100")
    env = env_of(Plan.read({"bootstrap": 1, "prefill": 1, "decode": 2, "frontend": 1}))
    everyone = ["bootstrap-0", "prefill-0", "decode-0", "decode-1", "frontend-0"]
    assert [env[name]["MESH_METRICS_PORT"] for name in everyone] == ["9100", "9101", "9102", "9103", "9104"]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("MESH_NAMESPACE", "No Such", "setting namespace: String should match pattern"),
        ("MESH_ECTD_URL", "http://e:1", "unknown setting MESH_ECTD_URL: did you mean MESH_ETCD_URL?"),
        ("MESH_DECODE_PREFIL_POLICY", "x", "did you mean MESH_DECODE_PREFILL_POLICY?"),
        ("MESH_MAX_LOCAL_PREFILL", "1", "did you mean MESH_DECODE_MAX_LOCAL_PREFILL?"),
    ],
)
def test_a_misspelled_variable_and_a_wrong_value_are_named(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(WrongSettings, match=re.escape(told)):
        Plan.read(ONE_EACH)


def test_a_relative_state_directory_becomes_absolute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NATS did not start: it looked for its configuration below its own directory."""
    monkeypatch.setenv("MESH_STATE_DIR", "build/mesh")
    assert Plan.read(ONE_EACH).settings.home == Path.cwd() / "build/mesh"


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("fe80::1", "[fe80::1]"), ("10.0.0.1", "10.0.0.1")],
)
def test_urls_can_be_connected_to(host: str, address: str) -> None:
    assert reachable(host) == address


@pytest.mark.parametrize(
    ("host", "may_kill"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False)]
)
def test_only_a_frontend_on_loopback_may_have_workers_killed(
    host: str, may_kill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_FRONTEND_HOST", host)
    plan = Plan.read(ONE_EACH)
    env = env_of(plan)
    assert env["frontend-0"].get("MESH_FRONTEND_UI_CONTROL") == (plan.subject if may_kill else None)
    assert not [name for name, of in env.items() if name != "frontend-0" and "MESH_FRONTEND_UI_CONTROL" in of]


def test_the_control_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_FRONTEND_UI_CONTROL", "")
    env = env_of(Plan.read(ONE_EACH))["frontend-0"]
    assert env["MESH_FRONTEND_UI_CONTROL"] == ""


def test_the_greeting_has_the_pages_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "  look:     http://127.0.0.1:8000/ui" in greeting(Plan.read(ONE_EACH), "m")
    monkeypatch.setenv("MESH_FRONTEND_UI", "false")
    assert not [line for line in greeting(Plan.read(ONE_EACH), "m") if "look:" in line]


def test_children_send_their_spans_to_an_observer_with_a_secret_of_this_run() -> None:
    plan, spec = with_observer(Plan.read(ONE_EACH))
    assert spec is not None
    assert plan.otlp_endpoint is not None
    login, where = login_of(plan.otlp_endpoint), without_password(plan.otlp_endpoint)
    assert {env["MESH_OTLP_ENDPOINT"] for env in env_of(plan).values()} == {plan.otlp_endpoint}
    assert where == f"http://127.0.0.1:{spec.env['MESH_OBSERVER_PORT']}"
    assert login.password == spec.env["MESH_OBSERVER_TOKEN"]
    assert with_observer(Plan.read(ONE_EACH))[0].otlp_endpoint != plan.otlp_endpoint


def test_with_secure_the_observer_serves_https_with_a_certificate_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, spec = with_observer(Plan.read(ONE_EACH, secure=True))
    assert spec is not None
    assert plan.otlp_endpoint is not None
    assert plan.otlp_endpoint.startswith("https://kvmesh:")
    files = Accounts.make("kvmesh", 1, tmp_path, "10.0.0.7").certificates[OBSERVER]
    env = with_certificate(spec, files).env
    assert (env["MESH_OBSERVER_TLS_CERT"], env["MESH_OBSERVER_TLS_KEY"]) == (str(files.certificate), str(files.key))
    assert files.certificate is not None
    names = x509.load_pem_x509_certificate(files.certificate.read_bytes()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert ip_address("10.0.0.7") in names.value.get_values_for_type(x509.IPAddress)
    monkeypatch.setenv("MESH_OBSERVER_TLS_CERT", "c.pem")
    monkeypatch.setenv("MESH_OBSERVER_TLS_KEY", "k.pem")
    with pytest.raises(WrongSettings, match="unset MESH_OBSERVER_TLS_CERT"):
        Plan.read(ONE_EACH, secure=True)
    assert str(with_observer(Plan.read(ONE_EACH))[0].otlp_endpoint).startswith("https://"), "with yours"


def test_the_observers_own_settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HOST": "0.0.0.0", "PORT": "4319", "TOKEN": "t"}.items():
        monkeypatch.setenv(f"MESH_OBSERVER_{name}", value)
    plan, spec = with_observer(Plan.read(ONE_EACH))
    assert spec is not None
    assert plan.otlp_endpoint == "http://kvmesh:t@127.0.0.1:4319"
    assert spec.env["MESH_OBSERVER_HOST"] == "0.0.0.0"
    monkeypatch.delenv("MESH_OBSERVER_TOKEN")
    with pytest.raises(WrongSettings, match="set MESH_OBSERVER_TOKEN"):
        Plan.read(ONE_EACH)


def test_an_observers_token_with_a_slash_is_one_line_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ended with "setting otlp_endpoint: give http://HOST:PORT", a setting that the user had not set."""
    monkeypatch.setenv("MESH_OBSERVER_TOKEN", "K7/x0")
    with pytest.raises(WrongSettings, match=r"^setting token of observer: a token may only have letters") as caught:
        Plan.read(ONE_EACH)
    assert "K7" not in caught.value.message


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
def test_an_observers_address_of_another_machine_is_one_line(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_OBSERVER_HOST", host)
    monkeypatch.setenv("MESH_OBSERVER_TOKEN", "t")
    with pytest.raises(WrongSettings, match=f"setting host of observer: '{host}' is not an address of this machine"):
        with_observer(Plan.read(ONE_EACH))


def test_with_another_receiver_no_observer_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_OTLP_ENDPOINT", "http://jaeger:4318")
    plan, spec = with_observer(Plan.read(ONE_EACH))
    assert spec is None
    assert {env["MESH_OTLP_ENDPOINT"] for env in env_of(plan).values()} == {"http://jaeger:4318"}
