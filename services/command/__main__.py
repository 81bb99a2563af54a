"""The command `kvmesh`: each subcommand is `python -m` of one module, with the same options."""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from components.program import become
from components.version import VERSION

# name: (module, help)
COMMANDS: Final = {
    "up": ("services.local", "Run the whole mesh on this machine."),
    "frontend": ("services.frontend", "Serve the OpenAI API."),
    "prefill": ("services.prefill", "Compute prompts."),
    "decode": ("services.decode", "Generate tokens."),
    "bootstrap": ("services.bootstrap", "Pair prefill and decode workers for KV transfers."),
    "planner": ("services.planner", "Start and stop workers as the load needs."),
    "observer": ("services.observer", "Keep traces of several hosts."),
    "inspect": ("services.inspect", "Look inside a running mesh."),
    "bench": ("bench", "Measure a mesh, or a part of it."),
}
FORWARD_ALL: Final = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
COMPLETION: Final = "services.command.completion"  # imported for the first TAB: it would double the time of --help


class Commands(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # typer's classes of these are private
        """While a shell completes the options of a command, return the real one."""
        name, command, rest = super().resolve_command(ctx, args)
        if ctx.resilient_parsing and name in COMMANDS:
            command = import_module(COMPLETION).command_with_options(name, COMMANDS[name][0])
        return name, command, rest


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A mesh that serves large language models with prefill and decode on separate workers.",
    epilog="kvmesh COMMAND --help lists a command's options.",
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvmesh {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    *,
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def starting(name: str, module: str) -> Callable[[typer.Context], None]:
    def start(context: typer.Context) -> None:
        become(module, context.args, f"kvmesh {name}")

    return start


for _name, (_module, _help) in COMMANDS.items():
    app.command(_name, short_help=_help, context_settings=dict(FORWARD_ALL), add_help_option=False)(
        starting(_name, _module)
    )


def main() -> None:
    """Run as the installed command.

    Modules of the current directory are not imported: many projects have a `services` or an `engine`.
    """
    os.environ["PYTHONSAFEPATH"] = "1"  # for all child processes, too
    app()


if __name__ == "__main__":
    app()
