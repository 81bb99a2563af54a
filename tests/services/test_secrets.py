"""No error message, log line or output of a start holds a secret: API keys, and the passwords of etcd and NATS."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nats.errors
import pytest
import typer

from components.api_keys import BadKeys, parse_list, read_keys
from components.discovery.etcd import etcd_client, refused, unreachable
from components.errors import BackendUnavailable
from components.messaging import nats_errors
from components.startup import WrongSettings
from services.frontend.config import FrontendSettings
from services.local.options import assigned
from services.local.plan import Plan
from tests.waiting import PATIENCE_S

SECRET = "sk-0123456789abcdefgh"
ETCD_URL = f"http://root:{SECRET}@127.0.0.1:1"
NATS_URL = f"nats://kvmesh:{SECRET}@127.0.0.1:1"
SECRETS = {
    "MESH_FRONTEND_API_KEYS": f"alice:{SECRET}",
    "MESH_ETCD_URL": ETCD_URL,
    "MESH_NATS_URL": NATS_URL,
    "MESH_OTLP_ENDPOINT": f"http://user:{SECRET}@collector:4318",
}
FAULTS = [
    {"MESH_FRONTEND_TLS_CERT": "cert.pem"},  # an error of several settings together
    {"MESH_FRONTEND_PORT": SECRET},
    {"MESH_LEASE_TTL_S": SECRET},
    {"MESH_LOG_LEVEL": SECRET},
    {"MESH_NAMESPACE": f"Not {SECRET}"},
]


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("MESH_")]:
        monkeypatch.delenv(name)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: next(iter(fault)))
def test_a_wrong_setting_is_named_without_a_value(fault: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All settings were printed with it, API keys among them, when the fault was one of several settings together."""
    for name, value in fault.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        FrontendSettings.read([])
    assert "setting" in str(stopped.value)
    assert SECRET not in str(stopped.value)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: next(iter(fault)))
def test_the_settings_of_a_whole_mesh_are_named_without_a_value(
    fault: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fault.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WrongSettings, match="setting") as raised:
        Plan.read(dict.fromkeys(("bootstrap", "prefill", "decode", "frontend"), 1))
    assert SECRET not in raised.value.message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"frontend.api_keys=alice:{SECRET}", "set MESH_FRONTEND_API_KEYS or give --api-keys-file"),
        (f"api-keys={SECRET}", "set MESH_FRONTEND_API_KEYS or give --api-keys-file"),
        (f"etcd_url={ETCD_URL}", "set the variable MESH_ETCD_URL"),
        (f"decode.nats_url=nats://a:1,{NATS_URL}", "set the variable MESH_DECODE_NATS_URL"),
        (f"otlp_endpoint={SECRETS['MESH_OTLP_ENDPOINT']}", "set the variable MESH_OTLP_ENDPOINT"),
    ],
)
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(text: str, told: str) -> None:
    with pytest.raises(typer.BadParameter, match=told) as raised:
        assigned([text])
    assert SECRET not in raised.value.message


def test_a_frontend_that_does_not_start_prints_no_secret(tmp_path: Path) -> None:
    env = os.environ | {"MESH_FRONTEND_TLS_CERT": "cert.pem", "MESH_STATE_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "services.frontend"],
        check=False,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0
    assert "tls_cert and tls_key belong together" in said
    assert SECRET not in said


@pytest.mark.parametrize(
    "keys", [f"{SECRET}!:alice", f"a:{SECRET},a:{SECRET}2", f"{SECRET}:x,{SECRET}:y", f"a:{SECRET} b"]
)
def test_keys_that_cannot_be_used_are_not_quoted(keys: str) -> None:
    """A key before the colon counted as a name, and was quoted."""
    with pytest.raises(BadKeys, match=r"key [12]") as raised:
        parse_list(keys)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "text", [f'[a]\nkey = "{SECRET}', f'[a]\nkey = "{SECRET}"\nkeys = 1', f'[a]\nkey = "{SECRET} "']
)
def test_a_file_of_keys_that_cannot_be_used_is_not_quoted(text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(BadKeys, match=r"keys\.toml") as raised:
        read_keys(None, file)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "said",
    [
        lambda: unreachable(ETCD_URL, "refused"),
        lambda: refused(ETCD_URL, "bad password"),
        lambda: nats_errors.unreachable(NATS_URL, OSError("refused")),
        lambda: nats_errors.unreachable(NATS_URL, nats.errors.Error("nats: 'Authorization Violation'")),
    ],
)
def test_a_server_that_cannot_be_reached_is_named_without_its_password(said: Callable[[], str]) -> None:
    assert SECRET not in said()
    assert "127.0.0.1:1" in said()


def test_the_facts_of_an_outage_of_etcd_hold_no_password() -> None:
    with pytest.raises(BackendUnavailable) as raised, etcd_client(ETCD_URL):
        pass
    assert SECRET not in f"{raised.value.message} {raised.value.fields}"
