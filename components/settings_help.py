"""`--help` of a service: the settings that are often needed; `--help-all`: all that it uses. Names are never cut."""

import shutil
import textwrap
from argparse import SUPPRESS
from collections.abc import Iterator
from types import NoneType
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

HELP_ALL: Final = "--help-all"
HELP: Final = ("--help", "-h", HELP_ALL)
# Of the settings that all services share, those that every service uses, and those that some do.
BY_EACH: Final = frozenset({
    "namespace", "etcd_url", "nats_url", "lease_ttl_s", "state_dir", "otlp_endpoint", "traces_per_s", "metrics_host",
    "metrics_port", "log_level", "log_format",
})  # fmt: skip
BY_SOME: Final = {
    "frontend": frozenset({"model", "served_model_name", "kv_index_blocks"}),
    "prefill": frozenset({"model", "served_model_name", "bootstrap_timeout_s", "kv_transfer", "kv_transfer_host"}),
    "decode": frozenset({
        "model", "served_model_name", "kv_index_blocks", "bootstrap_timeout_s", "transfer_timeout_s", "kv_transfer",
        "kv_transfer_host",
    }),
    "bootstrap": frozenset({"room_cleanup_s"}),
    "planner": frozenset(),
}  # fmt: skip
OFTEN: Final = frozenset({
    "model", "served_model_name", "etcd_url", "nats_url", "state_dir", "log_level", "host", "port", "tls_cert", "tls_key",
    "api_keys_file", "decode_policy", "prefill_policy", "kv_transfer", "engine.device", "engine.dtype",
    "engine.kv_memory_gb", "engine.max_context", "engine.max_running", "engine.threads", "engine.lora", "prefill",
    "decode", "connector", "ttft_ms", "itl_ms",
})  # fmt: skip
INDENT: Final = " " * 6


class Setting(NamedTuple):
    """One setting, for its reader."""

    path: str  # engine.page_size
    type: str
    default: str
    description: str


def help_text(settings: type[BaseSettings], shared: frozenset[str], *, everything: bool) -> str:
    """What `--help` prints.

    Args:
        settings: of the service.
        shared: names of settings that a bare MESH_ may precede.
        everything: also those that are seldom needed.
    """
    role = role_of(settings)
    used = BY_SOME[role]
    others = frozenset().union(*BY_SOME.values()) - used
    listed = [setting for setting in settings_in(settings) if setting.path not in others]
    shown = [s for s in listed if everything or s.path in OFTEN]
    width = min(100, shutil.get_terminal_size().columns)
    lines = [f"usage: {settings.model_config.get('cli_prog_name')} [--SETTING VALUE ...]", ""]
    lines += textwrap.wrap(settings.__doc__ or "", width)
    lines += ["", *textwrap.wrap(_about_variables(role), width), ""]
    for setting in shown:
        lines += _lines(setting, role, shared, width)
    if not everything:
        lines += ["", f"{len(listed) - len(shown)} settings more: {HELP_ALL}"]
    return "\n".join([*lines, ""])


def role_of(settings: type[BaseSettings]) -> str:
    """`decode` for MESH_DECODE_."""
    return str(settings.model_config["env_prefix"]).removeprefix("MESH_").removesuffix("_").lower()


def settings_in(settings: type[BaseSettings]) -> Iterator[Setting]:
    """All settings, those of nested classes by their path, but those that are only environment variables."""
    for name, field in settings.model_fields.items():
        yield from _of_field(name, field)


def _of_field(path: str, field: FieldInfo) -> Iterator[Setting]:
    if SUPPRESS in field.metadata:
        return
    if hasattr(kind := field.annotation, "__pydantic_fields__"):
        nested: dict[str, FieldInfo] = kind.__pydantic_fields__  # type: ignore[union-attr]
        for name, inner in nested.items():
            yield from _of_field(f"{path}.{name}", inner)
        return
    default = field.get_default(call_default_factory=True)
    yield Setting(path, _type(kind), "" if default in (None, {}) else str(default), field.description or "")


def _type(kind: Any) -> str:
    """What may stand behind the option."""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    kinds = [one for one in get_args(kind) or (kind,) if one is not NoneType]
    name = getattr(kinds[0], "__name__", "")
    return {
        "Bounds": "LEAST..MOST",
        "bool": "true|false",
        "int": "N",
        "float": "X",
        "Path": "PATH",
        "dict": "JSON",
    }.get(name, "TEXT")


def _lines(setting: Setting, role: str, shared: frozenset[str], width: int) -> list[str]:
    option = f"  --{setting.path.replace('_', '-')} {setting.type}"
    default = f" [{setting.default}]" if setting.default else ""
    text = textwrap.wrap(
        f"{setting.description}{default}".strip(), width, initial_indent=INDENT, subsequent_indent=INDENT
    )
    return [f"{option:<40} {variable(setting.path, role, shared)}", *text]


def variable(path: str, role: str, shared: frozenset[str]) -> str:
    """The environment variable of a setting."""
    name = path.upper().replace(".", "__")
    return f"MESH_{name}" if path.partition(".")[0] in shared else f"MESH_{role.upper()}_{name}"


def _about_variables(role: str) -> str:
    return (
        "Each setting is an environment variable, too, which stands beside it. A variable of all services, such as "
        f"MESH_LOG_LEVEL, has another name for {role} alone, MESH_{role.upper()}_LOG_LEVEL, "
        "which wins over it; options win over both."
    )
