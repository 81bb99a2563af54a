"""The output of `--help` and `--help-all`."""

import shutil
import textwrap
from argparse import SUPPRESS
from collections.abc import Iterator
from types import NoneType
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from components.program import program

HELP_ALL: Final = "--help-all"
HELP: Final = ("--help", "-h", HELP_ALL)
OFTEN: Final = frozenset({
    "model", "served_model_name", "etcd_url", "nats_url", "state_dir", "log_level", "host", "port", "tls_cert", "tls_key",
    "api_keys_file", "decode_policy", "prefill_policy", "kv_transfer", "engine.device", "engine.dtype",
    "engine.kv_memory_gb", "engine.gpu_memory_utilization", "engine.max_context", "engine.max_running", "engine.threads",
    "engine.lora", "prefill", "decode", "connector", "ttft_ms", "itl_ms",
})  # fmt: skip
WIDEST: Final = 100  # columns
INDENT: Final = " " * 6
TYPES: Final = {
    "Bounds": "MIN..MAX",
    "bool": "true|false",
    "int": "N",
    "float": "X",
    "Path": "PATH",
    "dict": "JSON",
}


class Setting(NamedTuple):
    path: str  # e.g. engine.page_size
    type: str  # e.g. N
    default: str
    description: str


def help_text(settings: type[BaseSettings], shared: frozenset[str], *, everything: bool) -> str:
    """`everything`, or the common settings. A bare `MESH_` may precede those in `shared`."""
    role = role_of(settings)
    listed = list(settings_in(settings))
    shown = [s for s in listed if everything or s.path in OFTEN]
    typed = program(str(settings.model_config.get("cli_prog_name")))
    lines = [f"usage: {typed} [--SETTING VALUE ...]", ""]
    lines += [*textwrap.wrap(settings.__doc__ or "", columns()), ""]
    lines += [*textwrap.wrap(_about_variables(role), columns()), ""]
    for setting in shown:
        option = f"  --{setting.path.replace('_', '-')} {setting.type}"
        lines += described(f"{option:<40} {variable(setting.path, role, shared)}", setting)
    if not everything:
        lines += ["", f"{len(listed) - len(shown)} more settings: {HELP_ALL}"]
    return "\n".join([*lines, ""])


def columns() -> int:
    return min(WIDEST, shutil.get_terminal_size().columns)


def described(head: str, setting: Setting) -> list[str]:
    default = f" [{setting.default}]" if setting.default else ""
    text = f"{setting.description}{default}".strip()
    return [head, *textwrap.wrap(text, columns(), initial_indent=INDENT, subsequent_indent=INDENT)]


def role_of(settings: type[BaseSettings]) -> str:
    return str(settings.model_config["env_prefix"]).removeprefix("MESH_").removesuffix("_").lower()


def settings_in(settings: type[BaseSettings]) -> Iterator[Setting]:
    """Secrets have no option."""
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
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    kinds = [one for one in get_args(kind) or (kind,) if one is not NoneType]
    return TYPES.get(getattr(kinds[0], "__name__", ""), "TEXT")


def variable(path: str, role: str, shared: frozenset[str]) -> str:
    name = path.upper().replace(".", "__")
    return f"MESH_{name}" if path.partition(".")[0] in shared else f"MESH_{role.upper()}_{name}"


def _about_variables(role: str) -> str:
    return (
        "Each setting is also the environment variable beside it. MESH_LOG_LEVEL, and others without a role in their name, "
        f"apply to every service; MESH_{role.upper()}_LOG_LEVEL applies to {role} alone and wins. Options win over both."
    )
