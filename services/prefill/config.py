"""Settings of the prefill service."""

from typing import Annotated

from pydantic import Field, PositiveFloat
from pydantic_settings import SettingsConfigDict

from components.settings import MeshSettings
from engine.config import EngineConfig


class PrefillSettings(MeshSettings):
    """kvmesh prefill: computes prompts and writes their KV pages into a decode instance's memory."""

    model_config = SettingsConfigDict(env_prefix="MESH_PREFILL_", cli_prog_name="python -m services.prefill")

    engine: EngineConfig = EngineConfig()
    drain_timeout_s: Annotated[PositiveFloat, Field(description="how long a stopping worker finishes, seconds")] = 30.0
