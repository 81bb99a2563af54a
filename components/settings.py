"""Settings of a service: environment first, command line over it, read once in `main` and passed down as values.

`MESH_X` sets x for every service, `MESH_DECODE_X` for decode alone and wins over it; `--x` wins over both.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliApp,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from components.routing.kv_index import MAX_BLOCKS
from components.routing.policies import POLICIES, check_policy
from components.settings_help import HELP, HELP_ALL, help_text
from components.startup import refuse

ROLES: Final = ("frontend", "decode", "prefill", "bootstrap")
WITH_SETTINGS: Final = (*ROLES, "planner")  # each with a prefix of its own


RoutingPolicy = Annotated[str, AfterValidator(check_policy)]
ABOUT_POLICIES: Final = f"{', '.join(POLICIES)}; NAME@OPTION=NUMBER,… with other numbers; docs/routing.md"


class MeshSettings(BaseSettings):
    """What all services share. A service subclasses it with `env_prefix="MESH_<ROLE>_"` and adds its own fields."""

    model_config = SettingsConfigDict(
        env_prefix="MESH_",
        env_nested_delimiter="__",
        env_ignore_empty=True,
        frozen=True,
        cli_kebab_case=True,
        hide_input_in_errors=True,
        cli_exit_on_error=False,  # one line, and not the usage of all settings
    )

    namespace: Annotated[
        str, Field(pattern=r"^[a-z0-9-]+$", description="first part of every etcd key and NATS subject")
    ] = "kvmesh"
    etcd_url: Annotated[str, Field(description="etcd endpoints, comma-separated")] = "http://127.0.0.1:2379"
    nats_url: Annotated[str, Field(description="NATS servers, comma-separated")] = "nats://127.0.0.1:4222"
    model: Annotated[
        str,
        Field(
            description="smollm2-135m, a directory, hub id, GGUF file or config.json (random weights), mock, or mock:<of these>"
        ),
    ] = "smollm2-135m"
    served_model_name: Annotated[str | None, Field(description="the name clients use; default: from --model")] = None
    kv_index_blocks: Annotated[
        PositiveInt,
        Field(description="blocks of KV, pages that is, that a router remembers of all caches; some 110 bytes each"),
    ] = MAX_BLOCKS
    lease_ttl_s: Annotated[
        float, Field(ge=2.0, description="an instance silent for this long leaves etcd, seconds")
    ] = 10.0
    bootstrap_timeout_s: Annotated[
        PositiveFloat,
        Field(description="longest wait of a transfer for decode's pages, seconds; then both sides give up"),
    ] = 60.0
    transfer_timeout_s: Annotated[
        PositiveFloat, Field(description="from decode's offer of its pages to the last byte of KV, seconds")
    ] = 60.0
    kv_transfer: Annotated[
        str, Field(description="what moves KV: nixl, nixl/<PLUGIN>, mooncake, fake (no KV moves), or a package's own")
    ] = "nixl"
    kv_transfer_host: Annotated[
        str | None,
        Field(
            description="this machine's address for KV transfer; NIXL uses its interface and RDMA devices, or those of "
            "UCX_NET_DEVICES; default: the address that reaches etcd"
        ),
    ] = None
    room_cleanup_s: Annotated[
        PositiveFloat, Field(description="interval of cleaning expired bootstrap rooms, seconds")
    ] = 5.0
    state_dir: Annotated[Path, Field(description="converted models and kept traces")] = Path("~/.cache/kvmesh")
    otlp_endpoint: Annotated[str | None, Field(description="OTLP/HTTP collector, such as http://jaeger:4318")] = None
    traces_per_s: Annotated[
        float,
        Field(ge=0, description="requests traced a second, at most, ten seconds' worth at once; inf: every request"),
    ] = 5.0
    metrics_host: Annotated[str, Field(description="address of a process's own /metrics and /health")] = "127.0.0.1"
    metrics_port: Annotated[int, Field(ge=0, le=65535, description="their port; 0: any free one, found in etcd")] = 0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"

    @property
    def home(self) -> Path:
        """`state_dir`, the same in processes that work in other directories, such as servers in their own."""
        return self.state_dir.expanduser().absolute()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The command line (added by pydantic), then `MESH_<ROLE>_`, then `MESH_`; no .env and no secrets directory."""
        return init_settings, env_settings, EnvSettingsSource(settings_cls, env_prefix="MESH_")

    @classmethod
    def read(cls, argv: list[str] | None = None) -> Self:
        """Settings of this process; exits with a line that names the fault when one is wrong."""
        faults = misspelled(os.environ, cls)
        if faults:
            refuse("\n".join(faults))
        arguments = sys.argv[1:] if argv is None else argv
        if asked := set(arguments) & set(HELP):
            sys.stdout.write(help_text(cls, SHARED, everything=HELP_ALL in asked))
            sys.exit(0)
        try:
            return CliApp.run(cls, cli_args=argv)
        except ValidationError as exc:
            refuse("\n".join(shown_fault(error) for error in exc.errors()))
        except SettingsError as exc:
            refuse(f"settings: {str(exc).removeprefix('error parsing CLI: ')}")


SHARED: Final = frozenset(MeshSettings.model_fields) | {"engine", "verify_kv"}  # names that may follow a bare MESH_


def shown_fault(error: ErrorDetails) -> str:
    """A line for one wrong setting. It never holds the value: that may be a secret, or all settings with their secrets."""
    where = ".".join(map(str, error["loc"]))
    return f"setting {where}: {error['msg']}" if where else f"settings: {error['msg'].removeprefix('Value error, ')}"


def misspelled(environ: Mapping[str, str], settings: type[BaseSettings]) -> list[str]:
    """A line for each `MESH_*` variable that would set nothing: pydantic ignores those in silence.

    Variables with another role's prefix are that role's business.
    """
    own = str(settings.model_config["env_prefix"])
    others = tuple(p for p in (f"MESH_{role.upper()}_" for role in WITH_SETTINGS) if p != own)
    faults = []
    for name in sorted(environ):
        if not name.startswith("MESH_") or name.startswith(others):
            continue
        prefix = own if name.startswith(own) else "MESH_"
        known: Mapping[str, Any] | frozenset[str] = SHARED if prefix == "MESH_" else settings.model_fields
        field = name.removeprefix(prefix).split("__")[0].lower()
        shared = name.removeprefix("MESH_").split("__")[0].lower() in SHARED  # MESH_BOOTSTRAP_TIMEOUT_S is everybody's
        if field not in known and not shared:
            hint = (
                f"did you mean {own}{field.upper()}?"
                if field in settings.model_fields
                else "--help-all lists every name"
            )
            faults.append(f"unknown setting {name}: {hint}")
    return faults
