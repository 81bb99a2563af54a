"""`python -m services.local`: the whole mesh on one machine, with real etcd and NATS, until Ctrl-C."""

import signal

# The imports take a second, in which Ctrl-C would print a traceback. A script's background job ignores the signal.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import asyncio
import os
import sys
import textwrap
from typing import Annotated

import typer

from components.program import program
from components.settings import EMPTY
from components.settings_help import columns
from components.startup import WrongSettings, refuse
from services.local.options import adapters, assigned, device_settings, setting_lines, tp_settings
from services.local.plan import Plan
from services.local.supervisor import run_mesh

ABOUT_SET = (
    "Names for --set NAME=VALUE. A name without a role applies to all services, such as engine.page_size; with a role in "
    "front, such as decode.engine.page_size, to that role only. drain_timeout_s is 8 here by default, because a "
    "process is killed 10 s after SIGTERM."
)

app = typer.Typer(rich_markup_mode=None, add_completion=False)  # rich cuts long names


def _help_all(context: typer.Context, asked: bool) -> None:
    if asked:
        typer.echo("\n".join([context.get_help(), "", *textwrap.wrap(ABOUT_SET, columns()), "", *setting_lines()]))
        raise typer.Exit


def _not_empty(value: str | None) -> str | None:
    if value == "":
        raise typer.BadParameter(EMPTY)
    return value


@app.command()
def main(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="smollm2-135m, a directory, a hub id, a GGUF file, a config.json, or mock [smollm2-135m]",
            callback=_not_empty,
        ),
    ] = None,
    prefill: Annotated[
        int, typer.Option(metavar="N", min=0, help="prefill workers; 0: decode computes prompts, no bootstrap runs")
    ] = 1,
    decode: Annotated[int, typer.Option(metavar="N", min=1, help="decode workers")] = 1,
    frontend: Annotated[int, typer.Option(metavar="N", min=1, help="HTTP frontends, all on one port")] = 1,
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="address that frontends listen on [127.0.0.1]", callback=_not_empty),
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=65535, help="port that frontends listen on [8000]")
    ] = None,
    api_keys_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="TOML file of API keys for clients; docs/openai.md [no key is needed]",
            callback=_not_empty,
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE",
            help="device of the workers: cpu, cuda, cuda:1, or prefill=cuda:0,decode=cuda:1 [the first GPU, else cpu]",
        ),
    ] = None,
    tp: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N",
            help="devices of each worker, which hold the model together: 2, or prefill=2,decode=4 [1]",
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="LoRA adapter that clients ask for as model NAME; may be repeated"),
    ] = None,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure",
            help="TLS and a certificate for each role between the processes, made for this run; docs/security.md",
        ),
    ] = False,
    state_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="directory of converted models, traces, the servers' data [~/.cache/kvmesh]",
            callback=_not_empty,
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error [info]", callback=_not_empty)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="any other setting, such as decode.engine.page_size=32; may be repeated"
        ),
    ] = None,
    _: Annotated[
        bool, typer.Option("--help-all", is_eager=True, callback=_help_all, help="list the settings for --set")
    ] = False,
) -> None:
    """Run etcd, NATS, bootstrap, prefill, decode and frontend on this machine until Ctrl-C.

    Each setting is also an environment variable: decode.engine.page_size is MESH_DECODE_ENGINE__PAGE_SIZE,
    port is MESH_FRONTEND_PORT. Options take precedence over variables. Secrets can only be set as variables.
    """
    os.umask(0o077)  # only this user may read the logs, traces and passwords of this run
    options = {
        "MESH_MODEL": model,
        "MESH_FRONTEND_HOST": host,
        "MESH_FRONTEND_PORT": port,
        "MESH_FRONTEND_API_KEYS_FILE": api_keys_file,
        "MESH_STATE_DIR": state_dir,
        "MESH_LOG_LEVEL": log_level,
    }
    given = {name: str(value) for name, value in options.items() if value is not None}
    given |= device_settings(device or []) | tp_settings(tp or []) | adapters(lora or [])
    assignments = assigned(set_ or [])
    if twice := given.keys() & assignments.keys():
        raise typer.BadParameter(f"{min(twice)} is given by an option, too", param_hint="--set")
    os.environ.update(given | assignments)  # read below, and inherited by the services
    counts = {"bootstrap": min(prefill, 1), "prefill": prefill, "decode": decode, "frontend": frontend}
    try:
        plan = Plan.read(counts, secure=secure)
    except WrongSettings as exc:
        refuse(f"error: {exc.message}")
    sys.exit(asyncio.run(run_mesh(plan)))


if __name__ == "__main__":
    app(prog_name=program("python -m services.local"))
