"""The options of `python -m services.local`."""

import json
import os
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from components.settings import misspelled
from components.startup import EX_CONFIG
from services.decode.config import DecodeSettings
from services.local.__main__ import app
from services.local.accounts import Backends
from services.local.options import adapters, assigned, device_settings, settable, tp_settings
from services.local.plan import SETTINGS, Plan
from services.prefill.config import PrefillSettings
from tests.waiting import PATIENCE_S

OPTIONS = (
    *(
        "model",
        "prefill",
        "decode",
        "frontend",
        "host",
        "port",
        "api-keys-file",
        "device",
        "tp",
        "lora",
        "secure",
        "state-dir",
    ),
    *("log-level", "set", "help-all", "help"),
)


def ended(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.local", *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MESH_")}
    env = clean | {"COLUMNS": "80"} | env
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=env)


def test_adapters_become_the_setting_of_both_kinds_of_workers() -> None:
    given = adapters(["legal=adapters/legal", "org/m=/with=sign"])
    assert json.loads(given["MESH_ENGINE__LORA"]) == {"legal": "adapters/legal", "org/m": "/with=sign"}
    assert adapters([]) == {}


@pytest.mark.parametrize("given", ["legal", "=directory", "legal="])
def test_an_adapter_without_name_or_directory_is_refused(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="NAME=DIRECTORY"):
        adapters([given])


@pytest.mark.parametrize("option", ["--model", "--host", "--api-keys-file", "--state-dir", "--log-level"])
def test_an_empty_option_of_the_mesh_is_refused(option: str) -> None:
    """`--state-dir "$DIR"` without that variable put the mesh's data and passwords into the working directory."""
    result = CliRunner().invoke(app, [option, ""])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}': its value is empty; give one, or leave the option out" in result.output


def test_help_has_the_common_options_and_fits_into_80_columns() -> None:
    """It listed 26 options, most of them settings of other services."""
    text = ended("--help").stdout
    assert tuple(re.findall(r"^  --([a-z-]+)", text, re.MULTILINE)) == OPTIONS
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) < 45


def test_it_and_inspect_load_neither_torch_nor_numpy() -> None:
    """Checking the name of a KV transfer backend loaded numpy: 0.1 s."""
    program = (
        "import services.inspect.__main__, services.local.__main__, sys; print({'numpy', 'torch'} & {*sys.modules})"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"
    )


def test_help_all_has_every_setting_once_and_cuts_no_name() -> None:
    """At 80 columns variables were cut: MESH_FRONTEND_HOS…"""
    text = ended("--help-all").stdout
    assert "kv_memory_gb" in text
    assert "kv-memory-gb" not in text, "--set takes the other spelling, too, but this list has underscores"
    listed = re.findall(r"^  ([a-z_.]+)=", text, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {"log_level", "engine.page_size", "decode.max_local_prefill", "frontend.tls_cert"} <= set(listed)
    roles = tuple(f"{role}." for role in SETTINGS)
    names = {name for name, _, _ in settable()}
    assert {name for name in names if not name.startswith(roles) or name.partition(".")[2] not in names} == set(listed)


@pytest.mark.parametrize(
    ("text", "variable", "value"),
    [
        ("engine.page_size=32", "MESH_ENGINE__PAGE_SIZE", "32"),
        ("decode.engine.page-size=32", "MESH_DECODE_ENGINE__PAGE_SIZE", "32"),
        ("engine.mock.step_s=0", "MESH_ENGINE__MOCK__STEP_S", "0"),
        ("frontend.decode_policy=kv_aware@queued=1", "MESH_FRONTEND_DECODE_POLICY", "kv_aware@queued=1"),
        ("bootstrap_timeout_s=5", "MESH_BOOTSTRAP_TIMEOUT_S", "5"),
        ("etcd_url=http://127.0.0.1:2379", "MESH_ETCD_URL", "http://127.0.0.1:2379"),
        ("prefill.kv_transfer=fake", "MESH_PREFILL_KV_TRANSFER", "fake"),
        ("frontend.cors_origins=", "MESH_FRONTEND_CORS_ORIGINS", ""),
    ],
)
def test_an_assignment_is_the_variable_of_its_name(text: str, variable: str, value: str) -> None:
    assert assigned([text]) == {variable: value}


def test_every_name_for_set_is_a_variable_that_a_service_reads() -> None:
    assert misspelled({variable: "" for _, variable, _ in settable()}, *SETTINGS.values()) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("engine.page_sze=32", "unknown setting engine.page_sze: did you mean engine.page_size or"),
        ("decode.engin.page_size=32", "did you mean decode.engine.page_size"),
        ("max_local_prefill=1", "unknown setting max_local_prefill: did you mean decode.max_local_prefill?"),
        ("threads=2", "did you mean engine.threads or"),
        ("frontend.max_local_prefill=1", "unknown setting frontend.max_local_prefill"),
        (
            "frontend.transfer_timeout_s=1",
            "unknown setting frontend.transfer_timeout_s: did you mean transfer_timeout_s?",
        ),
        ("zzz=1", "unknown setting zzz: --help-all lists every name"),
        ("MESH_DECODE_VERIFY_KV=true", "MESH_DECODE_VERIFY_KV is a variable: write --set decode.verify_kv=VALUE"),
        ("engine.threads", "engine.threads: write engine.threads=VALUE"),
        ("decode.log_format=console", "reads the logs of its services as JSON"),
    ],
)
def test_a_wrong_assignment_is_refused_with_the_right_name(text: str, told: str) -> None:
    with pytest.raises(typer.BadParameter, match=re.escape(told)):
        assigned([text])


def test_a_setting_that_is_given_twice_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match=r"engine\.threads is given twice"):
        assigned(["engine.threads=1", "engine.threads=2"])
    twice = ended("--port", "8001", "--set", "frontend.port=8002")
    assert twice.returncode == 2
    assert "MESH_FRONTEND_PORT is given by an option, too" in twice.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--set", "decode.prefill_policy=best"],
            "error: setting prefill_policy of decode: 'best' is not one of round_robin",
        ),
        (
            ["--set", "engine.page_size=17"],
            "error: setting engine of prefill: page_size is 17; it must be",
        ),
        (["--set", "frontend.tls_cert=c.pem"], "error: settings of frontend: tls_cert and tls_key belong together"),
    ],
)
def test_a_wrong_value_of_any_service_is_one_line_before_anything_starts(arguments: list[str], told: str) -> None:
    refused = ended(*arguments)
    assert refused.returncode == EX_CONFIG
    assert refused.stderr.startswith(told)
    assert refused.stderr.count("\n") == 1
    assert refused.stdout == ""


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ([], {}),
        (["cuda"], {"MESH_ENGINE__DEVICE": "cuda"}),
        (["cuda:1"], {"MESH_ENGINE__DEVICE": "cuda:1"}),
        (
            ["prefill=cuda:0,decode=cuda:1"],
            {"MESH_PREFILL_ENGINE__DEVICE": "cuda:0", "MESH_DECODE_ENGINE__DEVICE": "cuda:1"},
        ),
        (["cpu", "decode=cuda:1"], {"MESH_ENGINE__DEVICE": "cpu", "MESH_DECODE_ENGINE__DEVICE": "cuda:1"}),
    ],
)
def test_devices_are_for_all_workers_or_for_those_of_a_role(
    given: list[str], settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two GPUs, prefill and decode ran on the same one."""
    assert device_settings(given) == settings
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    plan = Plan.read(dict.fromkeys(["bootstrap", "prefill", "decode", "frontend"], 1))
    tiers = plan.children(lambda _: Backends("http://e:1", "nats://n:2"))
    for role, read in (("prefill", PrefillSettings), ("decode", DecodeSettings)):
        (env,) = [spec.env for tier in tiers for spec in tier if spec.name == f"{role}-0"]
        wanted = settings.get(f"MESH_{role.upper()}_ENGINE__DEVICE", settings.get("MESH_ENGINE__DEVICE", "auto"))
        assert plan.workers[role].engine.device == wanted
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            assert read().engine.device == wanted


@pytest.mark.parametrize("given", ["", "frontend=cuda", "decode=", "decode=cuda:0,decode=cuda:1", "cpu,cuda", "cuda,"])
def test_a_device_for_an_unknown_role_or_given_twice_is_refused(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="prefill=cuda:0,decode=cuda:1"):
        device_settings([given])


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ([], {}),
        (["2"], {"MESH_ENGINE__TENSOR_PARALLEL": "2"}),
        (
            ["prefill=4,decode=2"],
            {"MESH_PREFILL_ENGINE__TENSOR_PARALLEL": "4", "MESH_DECODE_ENGINE__TENSOR_PARALLEL": "2"},
        ),
    ],
)
def test_ranks_are_for_all_workers_or_for_those_of_a_role(
    given: list[str], settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tp_settings(given) == settings
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for role, read in (("prefill", PrefillSettings), ("decode", DecodeSettings)):
        own = settings.get(f"MESH_{role.upper()}_ENGINE__TENSOR_PARALLEL")
        assert read().engine.tensor_parallel == int(own or settings.get("MESH_ENGINE__TENSOR_PARALLEL", "1"))


@pytest.mark.parametrize("given", ["", "0", "two", "frontend=2", "decode=", "decode=2,decode=4", "2,4"])
def test_ranks_for_an_unknown_role_or_given_twice_are_refused(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="prefill=N,decode=N"):
        tp_settings([given])
