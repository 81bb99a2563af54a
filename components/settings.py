"""Settings of a process, from the environment and the command line.

`MESH_X` sets x in every process, `MESH_DECODE_X` only in decode. The second wins; `--x` wins over both.
"""

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliApp,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from components.certificates import Certificates, TlsFiles
from components.credentials import (
    ETCD_LOGIN,
    INBOX,
    METRICS_LOGIN,
    NATS_LOGIN,
    EtcdAccess,
    NatsAccess,
    PageAccess,
    credentials_file,
    login_file,
    nkey_file,
)
from components.followed_files import FollowedFiles
from components.settings_help import HELP, HELP_ALL, help_text
from components.startup import refuse
from components.urls import Login, checked_etcd_urls, checked_http_url, checked_nats_urls

ROLES: Final = ("frontend", "decode", "prefill", "bootstrap")
WITH_SETTINGS: Final = (*ROLES, "planner", "observer")
LIKENESS: Final = 0.75  # from 0 to 1, for suggestions
EMPTY: Final = "its value is empty; give one, or leave the option out"


class MeshSettings(BaseSettings):
    """Settings of every process. A service subclasses this with `env_prefix="MESH_<ROLE>_"`."""

    model_config = SettingsConfigDict(
        env_prefix="MESH_",
        env_nested_delimiter="__",
        env_ignore_empty=True,
        frozen=True,
        cli_kebab_case=True,
        hide_input_in_errors=True,
        cli_exit_on_error=False,  # pydantic would print the usage of all settings
    )

    namespace: Annotated[
        str, Field(pattern=r"^[a-z0-9-]+$", description="name of this mesh: first part of etcd keys and NATS subjects")
    ] = "kvmesh"
    etcd_url: Annotated[
        str, AfterValidator(checked_etcd_urls), Field(description="etcd endpoints, comma-separated")
    ] = "http://127.0.0.1:2379"
    nats_url: Annotated[str, AfterValidator(checked_nats_urls), Field(description="NATS servers, comma-separated")] = (
        "nats://127.0.0.1:4222"
    )
    tls: TlsFiles = TlsFiles()
    etcd_login_file: Annotated[
        Path | None, Field(description="file with a line user:password for etcd; default: as the certificate says")
    ] = None
    nats_login_file: Annotated[
        Path | None, Field(description="file with a line user:password for NATS; default: as the certificate says")
    ] = None
    nats_nkey_file: Annotated[Path | None, Field(description="file with the seed of a NATS user's nkey")] = None
    nats_credentials_file: Annotated[
        Path | None, Field(description="file with a NATS user's JWT and seed, as nsc writes it")
    ] = None
    nats_name: Annotated[
        str | None,
        Field(
            pattern=r"^[A-Za-z0-9_-]+$",
            description="name under which NATS allows this process's answers and tokens; default: the role",
        ),
    ] = None
    instance_id: Annotated[
        str | None,
        Field(
            pattern=r"^[a-z0-9-]+$",
            max_length=63,
            description="name of this process among those of its role, for rights of its own; default: random",
        ),
    ] = None
    lease_ttl_s: Annotated[
        float, Field(ge=2.0, description="seconds without contact after which etcd drops a process's record")
    ] = 10.0
    state_dir: Annotated[Path, Field(description="directory of converted models, compiled models and traces")] = Path(
        "~/.cache/kvmesh"
    )
    otlp_endpoint: Annotated[
        str | None,
        AfterValidator(lambda url: url if url is None else checked_http_url(url)),
        Field(
            description="OTLP/HTTP receiver of traces, such as services.observer or http://jaeger:4318; default: a file on "
            "this host"
        ),
    ] = None
    traces_per_s: Annotated[
        float, Field(ge=0, description="requests traced per second, with bursts of ten seconds' worth; inf: all")
    ] = 5.0
    trace_tail: Annotated[
        bool, Field(description="also keep the traces of requests that failed, moved or were slow, whatever the rate")
    ] = True
    traces_held_per_s: Annotated[
        float,
        Field(
            ge=0,
            description="requests a second whose spans are held for that, on average; beyond it only sampled requests have "
            "traces; inf: all",
        ),
    ] = 50.0
    metrics_host: Annotated[str, Field(description="address of this process's /metrics and /health")] = "127.0.0.1"
    metrics_port: Annotated[int, Field(ge=0, le=65535, description="port of /metrics and /health; 0: any free one")] = 0
    metrics_tls_cert: Annotated[
        Path | None, Field(description="PEM file with the certificate of the metrics page, which is https then")
    ] = None
    metrics_tls_key: Annotated[Path | None, Field(description="PEM file with the private key of that certificate")] = (
        None
    )
    metrics_login_file: Annotated[
        Path | None,
        Field(description="file with a line user:password, which readers of metrics pages must give; default: none"),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="least severe messages to log")
    ] = "info"
    log_format: Annotated[
        Literal["console", "json"], Field(description="console: for people; json: one object per line")
    ] = "console"

    @property
    def home(self) -> Path:
        """Absolute, since servers run in other directories."""
        return self.state_dir.expanduser().absolute()

    def etcd_access(self) -> EtcdAccess:
        return EtcdAccess(Certificates(self.tls), login_file(self.etcd_login_file, ETCD_LOGIN))

    def page_access(self) -> PageAccess:
        """As a reader of other processes' metrics pages."""
        return PageAccess(Certificates(self.tls), self.metrics_login())

    def metrics_login(self) -> FollowedFiles[Login] | None:
        return login_file(self.metrics_login_file, METRICS_LOGIN)

    def nats_access(self, role: str) -> NatsAccess:
        return NatsAccess(
            Certificates(self.tls),
            login_file(self.nats_login_file, NATS_LOGIN),
            nkey_file(self.nats_nkey_file),
            credentials_file(self.nats_credentials_file),
            f"{INBOX}.{self.namespace}.{self.nats_name or role}",
        )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, EnvSettingsSource(settings_cls, env_prefix="MESH_")

    @classmethod
    def read(cls, argv: list[str] | None = None) -> Self:
        faults = misspelled(os.environ, cls)
        if faults:
            refuse("\n".join(faults))
        arguments = sys.argv[1:] if argv is None else argv
        if asked := set(arguments) & set(HELP):
            sys.stdout.write(help_text(cls, SHARED, everything=HELP_ALL in asked))
            sys.exit(0)
        if empty := options_without_text(arguments):
            refuse("\n".join(f"option {option}: {EMPTY}" for option in empty))
        with wrong_settings_refused(cls):
            return CliApp.run(cls, cli_args=argv)


class ModelSettings(MeshSettings):
    model: Annotated[
        str,
        Field(
            description="smollm2-135m, a directory, hub id, GGUF file or config.json (random weights), mock, or "
            "mock:MODEL with that model's tokenizer"
        ),
    ] = "smollm2-135m"
    served_model_name: Annotated[
        str | None, Field(description="name of the model for clients; default: from the model setting")
    ] = None


class WorkerSettings(ModelSettings):
    """Settings of prefill and decode workers."""

    kv_transfer: Annotated[
        str,
        Field(
            description="backend that moves KV pages: nixl, nixl/PLUGIN, mooncake, fake (moves nothing), or one of another "
            "package"
        ),
    ] = "nixl"
    kv_transfer_host: Annotated[
        str | None,
        Field(
            description="this machine's address for KV transfer. NIXL uses its interface and RDMA devices, or those of "
            "UCX_NET_DEVICES. Default: the address that reaches etcd"
        ),
    ] = None
    bootstrap_timeout_s: Annotated[
        PositiveFloat, Field(description="seconds that prefill and decode wait for the offer of decode's pages")
    ] = 60.0
    drain_timeout_s: Annotated[
        PositiveFloat, Field(description="seconds that a stopping worker may take to finish its requests")
    ] = 30.0


# A bare MESH_ may precede these. Other processes ignore them: a mesh's processes often share one environment.
OF_SOME: Final = frozenset({
    "model", "served_model_name", "engine", "kv_transfer", "kv_transfer_host", "kv_index_blocks", "bootstrap_timeout_s",
    "transfer_timeout_s", "room_cleanup_s", "verify_kv",
})  # fmt: skip
SHARED: Final = frozenset(MeshSettings.model_fields) | OF_SOME


def options_without_text(arguments: Sequence[str]) -> list[str]:
    """Options with an empty value, such as a shell's unset variable: pydantic would use their defaults."""
    parts = [argument.partition("=") for argument in arguments if argument.startswith("--")]
    joined = [option for option, equals, value in parts if equals and not value]
    return joined + [one for one, value in pairwise(arguments) if not value and one.startswith("--") and "=" not in one]


@contextmanager
def wrong_settings_refused(settings: type[BaseSettings]) -> Iterator[None]:
    """A wrong setting ends the process with a line that names it."""
    try:
        yield
    except ValidationError as exc:
        refuse("\n".join(shown_fault(error, settings) for error in exc.errors()))
    except SettingsError as exc:
        what = str(exc).removeprefix("error parsing CLI: ")
        if not what.startswith("unrecognized arguments"):
            refuse(f"settings: {what}")
        options = re.findall(r"(?<!\S)--([\w.-]+)", what)  # without values, which may be secrets
        if not options:
            refuse("settings: there is a value without an option")
        refuse("\n".join(f"unknown option --{option}: {_hint(option, settings)}" for option in options))


def shown_fault(error: ErrorDetails, settings: type[BaseSettings]) -> str:
    """A line without the value, which may be a secret."""
    where, what = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    if error["type"] == "unexpected_keyword_argument":
        what = f"there is no such setting; {suggestion(_similar(where, settings))}"
    return f"setting {where}: {what}" if where else f"settings: {what}"


def _hint(option: str, settings: type[BaseSettings]) -> str:
    return suggestion([f"--{name.replace('_', '-')}" for name in _similar(option.replace("-", "_"), settings)])


def _similar(name: str, settings: type[BaseSettings]) -> list[str]:
    """Names like `name`, among those at the same place."""
    place, dot, last = name.rpartition(".")
    beside = {known.rpartition(".")[2] for known in names_of(settings) if known.rpartition(".")[0] == place}
    return [f"{place}{dot}{near}" for near in nearest(last, beside)]


def names_of(settings: type[BaseSettings]) -> Iterator[str]:
    """Names of all settings; nested ones with a dot."""
    for name, field in settings.model_fields.items():
        yield from _with_nested(name, field.annotation)


def _with_nested(name: str, kind: object) -> Iterator[str]:
    yield name
    kind = getattr(kind, "__origin__", kind)  # of Annotated
    if isinstance(kind, type) and is_dataclass(kind):
        for nested in fields(kind):
            yield from _with_nested(f"{name}.{nested.name}", nested.type)


def misspelled(environ: Mapping[str, str], *settings: type[BaseSettings]) -> list[str]:
    """A line for each `MESH_*` variable that no process reads: pydantic would ignore it."""
    prefixes = {cls: str(cls.model_config["env_prefix"]) for cls in settings}
    others = tuple({f"MESH_{role.upper()}_" for role in WITH_SETTINGS} - set(prefixes.values()))
    known = {f"MESH_{name.upper()}" for name in SHARED}
    known |= {f"{prefix}{name.upper()}" for cls, prefix in prefixes.items() for name in cls.model_fields}
    faults = []
    for name in sorted(environ):
        field, nested, rest = name.partition("__")
        if name.startswith("MESH_") and not name.startswith(others) and field.upper() not in known:
            hints = [f"{near}{nested}{rest}" for near in nearest(field.upper(), known)[:1]]
            is_of_others = any(field.removeprefix(prefix).lower() in SHARED for prefix in prefixes.values())
            hint = "its service does not use it" if is_of_others else suggestion(hints)
            faults.append(f"unknown setting {name}: {hint}")
    return faults


def nearest(name: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, sorted(known), cutoff=LIKENESS)


def suggestion(names: list[str]) -> str:
    return f"did you mean {' or '.join(names)}?" if names else f"{HELP_ALL} lists every name"
