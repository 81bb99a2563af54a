"""Builds the subcommands of `kvmesh` with their options, so that a shell can complete them."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from pydantic_settings import BaseSettings

from components.settings import WITH_SETTINGS
from components.settings_help import Setting, settings_in


def command_with_options(name: str, module: str) -> Any:  # typer's class of it is private
    """Build the command `name` with its options, and with no action."""
    if name in WITH_SETTINGS:
        settings = getattr(import_module(f"{module}.config"), f"{name.title()}Settings")
        return typer.main.get_command(app_of_settings(settings))
    return typer.main.get_command(import_module(f"{module}.__main__").app)


def app_of_settings(settings: type[BaseSettings]) -> typer.Typer:
    def nothing(**_: str | None) -> None:
        pass

    options = {setting.path.replace(".", "__"): _option(setting) for setting in settings_in(settings)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in options.items()]
    nothing.__annotations__ = options
    nothing.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(nothing)
    return app


def _option(setting: Setting) -> Any:
    name = f"--{setting.path.replace('_', '-')}"
    choices = setting.type.split("|") if "|" in setting.type else []
    return Annotated[str | None, typer.Option(name, help=setting.description, autocompletion=_choosing(choices))]


def _choosing(choices: list[str]) -> Callable[[str], list[str]]:
    def choose(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return choose
