"""Settings of the prefill service."""

from pydantic_settings import SettingsConfigDict

from components.settings import WorkerSettings
from engine.config import EngineConfig


class PrefillSettings(WorkerSettings):
    """kvmesh prefill: computes prompts and writes their KV pages into a decode instance's memory."""

    model_config = SettingsConfigDict(env_prefix="MESH_PREFILL_", cli_prog_name="python -m services.prefill")

    engine: EngineConfig = EngineConfig()
