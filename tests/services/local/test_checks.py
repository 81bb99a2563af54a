"""What is wrong with a run is one line before any work."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components.settings import MeshSettings
from engine import machine_memory
from engine.config import EngineConfig
from services.local.checks import check_plan
from services.local.plan import TIERS, Plan
from services.local.process import CannotStart
from tests.services.frontend.test_api_keys import CERTIFICATE

PLAN = Plan(dict.fromkeys(TIERS, 1))


@pytest.fixture(autouse=True)
def no_mesh_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*MeshSettings.model_fields, *(f"engine__{name}" for name in EngineConfig.__dataclass_fields__)]:
        for prefix in ("MESH_", "MESH_PREFILL_", "MESH_DECODE_"):
            monkeypatch.delenv(f"{prefix}{name.upper()}", raising=False)


def refusal(plan: Plan = PLAN, **given: Any) -> str:
    """What is said of `plan` with these settings."""
    with pytest.raises(CannotStart) as caught:
        asyncio.run(check_plan(replace(plan, given=plan.given | given)))
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_plan_as_it_is_by_default_is_not_refused() -> None:
    asyncio.run(check_plan(PLAN))
    asyncio.run(check_plan(replace(PLAN, counts={"bootstrap": 0, "prefill": 0, "decode": 1, "frontend": 1})))


def test_prefill_workers_want_a_bootstrap_replica() -> None:
    """It said Ready, and decode computed every prompt itself."""
    plan = replace(PLAN, counts=PLAN.counts | {"bootstrap": 0, "prefill": 2})
    assert refusal(plan).startswith("--bootstrap 0 beside --prefill 2: ")
    asyncio.run(check_plan(replace(plan, etcd_url="http://elsewhere:2379")))  # where one may run


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"engine__dtype": "float8"}, "setting engine.dtype of prefill: Input should be 'auto', 'bfloat16'"),
        ({"kv_transfer": "nixel"}, "setting kv_transfer: no backend 'nixel'; there are fake"),
        ({"kv_transfer": "nixl/UXC"}, "setting kv_transfer: NIXL has no plugin 'UXC'; it has "),
        ({"frontend_tls_cert": "/c.pem"}, "--tls-cert and --tls-key belong together: --tls-key is missing"),
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
def test_a_wrong_option_is_one_line(given: dict[str, str], said: str) -> None:
    assert refusal(**given).startswith(said)


def test_a_roles_own_variable_is_what_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_DECODE_ENGINE__DTYPE", "float8")
    assert refusal(engine__dtype="float32").startswith("setting engine.dtype of decode: ")


def test_a_mock_takes_any_adapter() -> None:
    asyncio.run(check_plan(replace(PLAN, given={"model": "mock", "engine__lora": json.dumps({"x": "any"})})))


def test_an_adapter_without_weights_is_refused(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert "adapter_model.safetensors is not there" in refusal(engine__lora=json.dumps({"x": str(tmp_path)}))


def test_more_memory_than_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 GB was 311 lines, four tracebacks and three tries."""
    monkeypatch.setattr(machine_memory, "available_bytes", lambda: 10_000_000_000)
    assert refusal(engine__kv_memory_gb="6", engine__device="cpu") == (
        "--kv-memory-gb: KV pages of 2 workers take 12.0 GB, and 10.0 GB of memory are free here"
    )
    asyncio.run(check_plan(replace(PLAN, given={"engine__kv_memory_gb": "4"})))
