"""Settings of the bootstrap service."""

from pydantic_settings import SettingsConfigDict

from components.settings import MeshSettings


class BootstrapSettings(MeshSettings):
    """kvmesh bootstrap: opens bootstrap rooms, each pairing one prefill and one decode instance for one KV transfer."""

    model_config = SettingsConfigDict(env_prefix="MESH_BOOTSTRAP_", cli_prog_name="python -m services.bootstrap")
