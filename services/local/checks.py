"""What a run is asked for, checked before any work: a wrong option is one line at once, not after a model was converted."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from components.api_keys import BadKeys, read_keys
from components.kv_transfer.choose import check_name
from components.settings import MeshSettings
from components.startup import WrongSettings
from components.tls import Tls, tls_context
from engine.config import EngineConfig
from engine.lora.config import read_adapter_config
from engine.lora.identity import ADAPTER_WEIGHTS
from engine.machine_memory import check_fits
from engine.model.mock_model import is_mock
from services.local.plan import Plan
from services.local.process import CannotStart, run

WORKERS: Final = ("prefill", "decode")
ALWAYS_THERE: Final = ("nixl", "nixl/UCX", "fake")  # backends that every installation has
CUDA: Final = Path("/dev/nvidiactl")


class WorkerSettings(MeshSettings):
    """What a worker will read, as far as it can be checked here; see `_settings_of`."""

    engine: EngineConfig = EngineConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The role's own variables, then what the command line gave, then everybody's variables."""
        return env_settings, init_settings, EnvSettingsSource(settings_cls, env_prefix="MESH_")


class PrefillSettings(WorkerSettings):
    """Of prefill."""

    model_config = SettingsConfigDict(env_prefix="MESH_PREFILL_")


class DecodeSettings(WorkerSettings):
    """Of decode."""

    model_config = SettingsConfigDict(env_prefix="MESH_DECODE_")


async def check_plan(plan: Plan) -> None:
    """Raises: CannotStart, with a line that names the option."""
    try:
        _check_counts(plan)
        workers = {role: _settings_of(plan, role) for role in WORKERS if plan.counts[role]}
        _check_memory(plan, workers)
        _check_tls(plan)
        _check_keys(plan)
        for worker in workers.values():
            _check_adapters(worker)
            check_name(worker.kv_transfer)
    except WrongSettings as exc:
        raise CannotStart(exc.message) from exc
    for setting in {worker.kv_transfer for worker in workers.values()}.difference(ALWAYS_THERE):
        await _check_backend(setting)


def _check_counts(plan: Plan) -> None:
    is_elsewhere = plan.etcd_url is not None  # then another machine may run it
    if plan.counts["prefill"] and not plan.counts["bootstrap"] and not is_elsewhere:
        raise WrongSettings(
            f"--bootstrap 0 beside --prefill {plan.counts['prefill']}: prefill and decode meet at a bootstrap replica; "
            "give --bootstrap 1, or --prefill 0, and decode computes prompts"
        )


def _settings_of(plan: Plan, role: str) -> WorkerSettings:
    given: dict[str, Any] = {name: value for name, value in plan.given.items() if name in WorkerSettings.model_fields}
    given["engine"] = {name.removeprefix("engine__"): value for name, value in plan.given.items() if "engine__" in name}
    if plan.adapters:
        given["engine"]["lora"] = plan.adapters
    try:
        return (PrefillSettings if role == "prefill" else DecodeSettings)(**given)
    except ValidationError as exc:
        fault = exc.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise WrongSettings(f"setting {where} of {role}: {fault['msg']}") from exc
    except SettingsError as exc:
        raise WrongSettings(f"settings of {role}: {exc}") from exc


def _check_memory(plan: Plan, workers: Mapping[str, WorkerSettings]) -> None:
    """The default is not checked: it is small, and a mock's pages take memory only when they are used."""
    asked_gb, count = 0.0, 0
    for role, worker in workers.items():
        engine = worker.engine
        on_cpu = engine.device == "cpu" or (engine.device == "auto" and not CUDA.exists())
        is_default = engine.kv_memory_gb == EngineConfig().kv_memory_gb
        if on_cpu and not is_default and engine.num_pages is None and not is_mock(worker.model):
            asked_gb += plan.counts[role] * engine.kv_memory_gb
            count += plan.counts[role]
    check_fits(round(asked_gb * 1e9), f"--kv-memory-gb: KV pages of {count} worker{'s' * (count > 1)}")


def _check_tls(plan: Plan) -> None:
    certificate, key = plan.frontend("tls_cert"), plan.frontend("tls_key")
    if (certificate is None) != (key is None):
        raise WrongSettings(
            f"--tls-cert and --tls-key belong together: --tls-{'key' if certificate else 'cert'} is missing"
        )
    if certificate is not None and key is not None:
        tls_context(Tls(certificate, key))


def _check_keys(plan: Plan) -> None:
    file = plan.frontend("api_keys_file")
    try:
        read_keys(plan.frontend("api_keys"), None if file is None else Path(file))
    except BadKeys as exc:
        raise WrongSettings(f"API keys: {exc}") from exc


def _check_adapters(worker: WorkerSettings) -> None:
    if is_mock(worker.model):  # which takes any value
        return
    for name, directory in worker.engine.lora.items():
        path = Path(directory).expanduser()
        read_adapter_config(name, path)
        if not (path / ADAPTER_WEIGHTS).is_file():
            raise WrongSettings(f"LoRA adapter {name!r}: {path / ADAPTER_WEIGHTS} is not there")


async def _check_backend(setting: str) -> None:
    """Try a backend out in a process of its own. Raises: CannotStart, with what that says."""
    said: list[str] = []
    if await run([sys.executable, "-m", "components.kv_transfer.check", setting], said.append) != 0:
        raise CannotStart(said[-1] if said else f"setting kv_transfer: {setting} cannot be used here")
