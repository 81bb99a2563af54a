"""Options of `services.local` as the environment variables that its services read."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

import typer

from components.settings import SHARED, nearest, suggestion
from components.settings_help import Setting, described, settings_in, variable
from engine.config import checked_device
from services.local.plan import SETTINGS

WORKERS: Final = ("prefill", "decode")
LOG_FORMAT: Final = "log_format"
TP_FORM: Final = "give N for all workers, or prefill=N,decode=N"
DEVICE_FORM: Final = "give cpu, cuda or cuda:N for all workers, or prefill=cuda:0,decode=cuda:1"


def settable() -> Iterator[tuple[str, str, Setting]]:
    """(name, variable, setting) of all that `--set` takes."""
    for role, settings in SETTINGS.items():
        for setting in settings_in(settings):
            if setting.path == LOG_FORMAT:
                continue
            own = variable(setting.path, role, frozenset())
            shared = variable(setting.path, role, SHARED)
            if shared != own:
                yield setting.path, shared, setting
            yield f"{role}.{setting.path}", own, setting


def assigned(given: Sequence[str]) -> dict[str, str]:
    """Variables of `--set NAME=VALUE …`. Raises: typer.BadParameter; it never quotes a value."""
    variables = {name: variable for name, variable, _ in settable()}
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise _wrong(f"{name}: write {name}=VALUE" if name else "write NAME=VALUE")
        if name.rpartition(".")[2] == LOG_FORMAT:
            raise _wrong(f"{name}: services.local reads the logs of its services as JSON")
        if name not in variables:
            raise _unknown(name, variables)
        if _has_password(value):
            raise _wrong(_secret(name, f"set the variable {variables[name]} instead"))
        if variables[name] in found:
            raise _wrong(f"{name} is given twice")
        found[variables[name]] = value
    return found


def _wrong(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="--set")


def _unknown(name: str, variables: Mapping[str, str]) -> typer.BadParameter:
    if name.removeprefix("frontend.") == "api_keys":
        return _wrong(_secret("frontend.api_keys", "set MESH_FRONTEND_API_KEYS or give --api-keys-file instead"))
    by_variable = {variable: name for name, variable in variables.items()}
    if name.upper() in by_variable:
        return _wrong(f"{name} is a variable: write --set {by_variable[name.upper()]}=VALUE")
    if (shared := name.partition(".")[2]) in variables:
        return _wrong(f"unknown setting {name}: did you mean {shared}?")
    ends = [known for known in variables if known.endswith(f".{name}")]  # threads → engine.threads
    return _wrong(f"unknown setting {name}: {suggestion(ends[:3] or nearest(name, variables))}")


def _secret(name: str, advice: str) -> str:
    return f"{name} is a secret, and everyone on this machine can read a command line: {advice}"


def _has_password(value: str) -> bool:
    try:
        return any(urlsplit(url).password for url in value.split(","))
    except ValueError:
        return False


def setting_lines() -> list[str]:
    lines: dict[str, list[str]] = {}
    shared = {name for name, _, _ in settable() if name.partition(".")[0] not in SETTINGS}
    for name, _, setting in settable():
        if name in shared or setting.path not in shared:
            lines.setdefault(name, described(f"  {name}={setting.type}", setting))
    return [line for of_one in lines.values() for line in of_one]


def device_settings(given: Sequence[str]) -> dict[str, str]:
    """Variables of `--device`. Raises: typer.BadParameter."""
    return _by_role("--device", DEVICE_FORM, "ENGINE__DEVICE", _is_device, given)


def _is_device(name: str) -> bool:
    try:
        return bool(checked_device(name))
    except ValueError:
        return False


def tp_settings(given: Sequence[str]) -> dict[str, str]:
    """Variables of `--tp`. Raises: typer.BadParameter."""
    return _by_role(
        "--tp", TP_FORM, "ENGINE__TENSOR_PARALLEL", lambda ranks: ranks.isdecimal() and int(ranks) > 0, given
    )


def _by_role(
    option: str, form: str, setting: str, is_value: Callable[[str], bool], given: Sequence[str]
) -> dict[str, str]:
    """Variables of an option such as `decode=2,prefill=1`, or `2` for all workers. Raises: typer.BadParameter."""
    found: dict[str, str] = {}
    for part in ",".join(given).split(",") if given else []:
        role, equals, value = (word.strip() for word in part.rpartition("="))
        if not is_value(value) or (equals and role not in WORKERS):
            raise typer.BadParameter(f"{part!r}: {form}", param_hint=option)
        name = f"MESH_{role.upper()}_{setting}" if equals else f"MESH_{setting}"
        if name in found:
            raise typer.BadParameter(f"{part!r} sets {role or 'all workers'} twice: {form}", param_hint=option)
        found[name] = value
    return found


def adapters(given: Sequence[str]) -> dict[str, str]:
    pairs = [item.partition("=") for item in given]
    if not all(name and directory for name, _, directory in pairs):
        raise typer.BadParameter(f"{' '.join(given)}: give NAME=DIRECTORY", param_hint="--lora")
    return {"MESH_ENGINE__LORA": json.dumps({name: directory for name, _, directory in pairs})} if pairs else {}
