"""Errors of a run are one line, before any work."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from components.startup import WrongSettings
from engine.cpu import machine_memory
from services.local.checks import check_plan
from services.local.plan import TIERS, Plan
from tests.services.frontend.test_api_keys import CERTIFICATE

COUNTS = dict.fromkeys(TIERS, 1)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("MESH_")]:
        monkeypatch.delenv(name)


def check(counts: dict[str, int] = COUNTS, **variables: str) -> None:
    """Check a run with these variables: `engine__dtype` is MESH_ENGINE__DTYPE."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(f"MESH_{name.upper()}", value)
        asyncio.run(check_plan(Plan.read(counts)))


def refusal(counts: dict[str, int] = COUNTS, **variables: str) -> str:
    with pytest.raises(WrongSettings) as caught:
        check(counts, **variables)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_plan_as_it_is_by_default_is_not_refused() -> None:
    check()
    check({"bootstrap": 0, "prefill": 0, "decode": 1, "frontend": 1})


def test_settings_of_workers_that_are_not_started_are_not_checked() -> None:
    check({"bootstrap": 0, "prefill": 0, "decode": 1, "frontend": 1}, prefill_engine__dtype="float8")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"engine__dtype": "float8"}, "setting engine.dtype of prefill: Input should be 'auto', 'bfloat16'"),
        ({"model": "/no/such"}, "no model '/no/such': give one of smollm2-135m, a directory that exists"),
        ({"model": "mock:nonsense"}, "no model 'nonsense': give one of"),
        ({"kv_transfer": "nixel"}, "setting kv_transfer: no backend 'nixel'; there are fake"),
        ({"kv_transfer": "nixl/UXC"}, "setting kv_transfer: NIXL has no plugin 'UXC'; it has "),
        ({"frontend_tls_cert": "/c.pem"}, "settings of frontend: tls_cert and tls_key belong together"),
        ({"frontend_port": "0"}, "setting port of frontend: services.local needs a number from 1 to 65535"),
        ({"frontend_tls_cert": "/c.pem", "frontend_tls_key": "/k.pem"}, "--tls-cert /c.pem: No such file or directory"),
        (
            {"frontend_tls_cert": CERTIFICATE.key, "frontend_tls_key": CERTIFICATE.certificate},
            f"cannot serve TLS with {CERTIFICATE.key} and",
        ),
        ({"frontend_api_keys_file": "/no/keys.toml"}, "API keys: /no/keys.toml: No such file or directory"),
        (
            {"engine__lora": json.dumps({"x": "/no/such"})},
            "LoRA adapter 'x': /no/such/adapter_config.json cannot be read",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_a_wrong_option_is_one_line(given: dict[str, str], error: str) -> None:
    assert refusal(**given).startswith(error)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (
            {"frontend_port": "65535", "frontend_share_port": "false"},
            "setting port of frontend: ports 65535 to 65536 are needed, and the last one is 65535: choose 65534 or less",
        ),
        ({"metrics_port": "65533"}, "setting metrics_port: ports 65533 to 65537 are needed"),
    ],
)
def test_ports_beyond_the_last_one_are_refused(given: dict[str, str], error: str) -> None:
    """The whole mesh started, and ended when a process tried to listen there."""
    counts = COUNTS | {"frontend": 2}
    assert refusal(counts, **given).startswith(error)
    check(counts, frontend_port="65535", metrics_port="65531")
    check(counts, frontend_port="65534", frontend_share_port="false")


def test_a_roles_own_variable_is_what_is_checked() -> None:
    assert refusal(engine__dtype="float32", decode_engine__dtype="float8").startswith(
        "setting engine.dtype of decode: "
    )


def test_a_mock_takes_any_adapter() -> None:
    check(model="mock", engine__lora=json.dumps({"x": "any"}))


def test_an_adapter_without_weights_is_refused(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert "adapter_model.safetensors does not exist" in refusal(engine__lora=json.dumps({"x": str(tmp_path)}))


def test_more_memory_than_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 GB was 311 lines, four tracebacks and three tries."""
    monkeypatch.setattr(machine_memory, "available_bytes", lambda: 10_000_000_000)
    assert refusal(engine__kv_memory_gb="6", engine__device="cpu") == (
        "setting engine.kv_memory_gb: KV pages of 2 workers need 12.0 GB, but only 10.0 GB of memory are free here"
    )
    check(engine__kv_memory_gb="4")
    assert refusal(engine__kv_memory_gb="4", engine__kv_offload_gb="2", engine__device="cpu") == (
        "settings engine.kv_memory_gb and engine.kv_offload_gb: KV pages of 2 workers need 12.0 GB, but only 10.0 GB of memory "
        "are free here"
    )


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({}, "no config.json"),
        ({"config.json": "{"}, "config.json is not the JSON of a model"),
        ({"config.json": "{}"}, "has no tokenizer.json: copy the one of the model beside config.json"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "mock:"])
def test_a_directory_that_is_no_model_is_one_line(
    files: dict[str, str], error: str, prefix: str, tmp_path: Path
) -> None:
    """etcd, NATS and all services started, and three tracebacks of the frontend followed."""
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert error in refusal(model=f"{prefix}{tmp_path}")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    check(model=f"{prefix}{tmp_path}")
