"""python -m services.inspect: look inside a running mesh, and change its processes."""

import asyncio
import functools
import inspect
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import typer
from rich.console import Console

from components.discovery.etcd import endpoints
from components.local_mesh import ADDRESSES, beside_local_mesh, local_mesh, no_answer_advice
from components.program import program
from components.settings import MeshSettings, wrong_settings_refused
from components.startup import WrongSettings, refuse
from components.urls import without_password
from components.wire.control import Control, LogLevel, Work
from components.wire.inspection import ExplainRoute
from services.inspect.change import show_drain, show_set
from services.inspect.doctor import show_doctor
from services.inspect.events import show_events
from services.inspect.kv import Prefix, show_kv
from services.inspect.profile import profile_worker
from services.inspect.rooms import show_rooms
from services.inspect.route import show_route
from services.inspect.top import show_top
from services.inspect.traces import show_trace, show_traces
from services.inspect.workers import show_planners, show_workers

R = TypeVar("R")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich drops [text in brackets]
    help="Look inside a running kvmesh mesh.",
)
WIDE: Final = 240  # columns
PIPED_WIDTH: Final = 200  # columns; rich's 80 would cut addresses off
console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH)

STATE_DIR: Final = {
    "state_dir": Annotated[Path | None, typer.Option(help="the services' state directory [env: MESH_STATE_DIR]")]
}
TRACES: Final = {
    "otlp_endpoint": Annotated[str | None, typer.Option(help="the observer [env: MESH_OTLP_ENDPOINT]")],
    **STATE_DIR,
}
MESH: Final = {
    "etcd_url": Annotated[str | None, typer.Option(help="etcd endpoints [env: MESH_ETCD_URL]")],
    "nats_url": Annotated[str | None, typer.Option(help="NATS servers [env: MESH_NATS_URL]")],
    "namespace": Annotated[str | None, typer.Option(help="name of the mesh [env: MESH_NAMESPACE]")],
    **STATE_DIR,
}
AsJson = Annotated[bool, typer.Option("--json", help="for programs")]


def command(options: dict[str, Any], user: str = "inspect") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command whose first argument is settings made of `options`.

    Options have precedence, then the environment, then the addresses that a local mesh has written for `user`.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            values = {name: value for name in options if (value := given.pop(name)) is not None}
            with wrong_settings_refused(MeshSettings):
                settings = MeshSettings(**values)
            try:
                function(beside_local_mesh(settings, user), **given)
            except WrongSettings as exc:
                refuse(exc.message)

        own = list(inspect.signature(function).parameters.values())[1:]
        keyword = inspect.Parameter.KEYWORD_ONLY
        added = [inspect.Parameter(n, keyword, default=None, annotation=kind) for n, kind in options.items()]
        run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
        return app.command()(run)

    return register


@command(MESH)
def workers(
    settings: MeshSettings,
    *,
    wide: Annotated[bool, typer.Option("--wide", help="show epochs, hosts, pages and calls as well")] = False,
    as_json: AsJson = False,
) -> None:
    """Show all instances: their records in etcd and their answers over NATS."""
    _run(show_workers(settings, _console(wide=wide), wide=wide, as_json=as_json))


@command(MESH)
def top(
    settings: MeshSettings,
    *,
    once: Annotated[bool, typer.Option("--once", help="print it once and exit")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object per second, each on a line")] = False,
) -> None:
    """Show load, KV usage, heartbeats and links.

    Refreshed once a second until Ctrl-C.
    """
    _run(show_top(settings, console, once=once, as_json=as_json))


@command(MESH)
def rooms(settings: MeshSettings, *, as_json: AsJson = False) -> None:
    """Show open bootstrap rooms, as each side reports them."""
    _run(show_rooms(settings, console, as_json=as_json))


@command(MESH)
def kv(
    settings: MeshSettings,
    *,
    prompt: Annotated[
        str, typer.Option(help="text of a prompt: show how many of its tokens each instance has cached")
    ] = "",
    chat: Annotated[bool, typer.Option(help="wrap it in the model's chat template")] = True,
    token_ids: Annotated[str, typer.Option(help="the same for a prompt's token ids, such as 1,2,3")] = "",
    first: Annotated[int | None, typer.Option(min=1, help="only use this many tokens from the start")] = None,
    block: Annotated[str, typer.Option(help="beginning of a block hash: show which instances have such a block")] = "",
    adapter: Annotated[str, typer.Option(help="name of a LoRA adapter")] = "",
    cache_salt: Annotated[str, typer.Option(help="`cache_salt` of the request; with API keys, TENANT/SALT")] = "",
    as_json: AsJson = False,
) -> None:
    """Show which instances have cached which prefixes.

    Without a prompt, show how much is cached and which prefixes are shared most.
    """
    try:
        ids = [int(one) for one in token_ids.split(",")] if token_ids else []
    except ValueError:
        raise typer.BadParameter(
            f"{token_ids!r} is not a list of numbers separated by commas", param_hint="--token-ids"
        ) from None
    if any(not 0 <= one < 2**31 for one in ids):
        raise typer.BadParameter("token ids are numbers from 0 to 2147483647", param_hint="--token-ids")
    if sum(map(bool, (prompt, ids, block))) > 1:
        raise typer.BadParameter("give one of --prompt, --token-ids and --block")
    wanted = Prefix(prompt, chat, ids, first, block, adapter, cache_salt)
    _run(show_kv(settings, console, wanted, as_json=as_json))


@command(MESH)
def events(
    settings: MeshSettings,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON objects, each on a line")] = False,
) -> None:
    """Show when instances register, leave or drain, as it happens.

    Runs until Ctrl-C.
    """
    _run(show_events(settings, console, as_json=as_json))


@command(MESH)
def doctor(settings: MeshSettings, *, as_json: AsJson = False) -> None:
    """Find problems and suggest how to fix them.

    The exit status is 1 if there is a problem.
    """
    sys.exit(not _run(show_doctor(settings, console, as_json=as_json)))


@command(MESH)
def set(  # noqa: A001 - the name of the command
    settings: MeshSettings,
    which: Annotated[str, typer.Argument(help="all, a role, or the beginning of an instance id")],
    *,
    log_level: Annotated[LogLevel | None, typer.Option(help="lowest level of messages to log")] = None,
    logger: Annotated[str, typer.Option(help="name of a logger, such as components.routing; default: all")] = "",
    traces_per_s: Annotated[float | None, typer.Option(help="requests to trace per second; inf: all")] = None,
    as_json: AsJson = False,
) -> None:
    """Change the log level or the trace rate of processes.

    The change is lost at a restart.
    """
    if log_level is None and traces_per_s is None:
        raise typer.BadParameter("give --log-level or --traces-per-s")
    if logger and log_level is None:
        raise typer.BadParameter("--logger needs a --log-level")
    wanted = Control(log_level=log_level, logger=logger, traces_per_s=traces_per_s)
    sys.exit(not _run(show_set(settings, console, which, wanted, as_json=as_json)))


@command(MESH)
def drain(
    settings: MeshSettings,
    instance: Annotated[str, typer.Argument(help="beginning of the id of an instance")],
    *,
    stop: Annotated[bool, typer.Option("--stop", help="stop the process, as SIGTERM does")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="let it accept new requests again")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="wait until it has no work left")] = False,
    as_json: AsJson = False,
) -> None:
    """Let an instance finish its requests and accept no new ones.

    It keeps running, unless --stop is given.
    """
    if stop and undo:
        raise typer.BadParameter("give --stop or --undo")
    work: Work = "stop" if stop else "go-on" if undo else "drain"
    control = Control(work=work)
    sys.exit(not _run(show_drain(settings, console, instance, control, wait=wait, as_json=as_json)))


@command(MESH)
def planner(settings: MeshSettings, *, as_json: AsJson = False) -> None:
    """Show how many workers are needed and why, and the latest changes."""
    asyncio.run(show_planners(settings, console, as_json=as_json))


@command(TRACES)
def trace(
    settings: MeshSettings,
    which: Annotated[
        str, typer.Argument(help="last, slow, failed, or the beginning of a trace id or request id")
    ] = "last",
    *,
    wide: Annotated[
        bool, typer.Option("--wide", "--verbose", help="show all attributes, such as route.compared")
    ] = False,
    perfetto: Annotated[Path | None, typer.Option(help="write the trace to a file for ui.perfetto.dev")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    count: Annotated[int, typer.Option(min=1, help="number of traces to list, for slow and failed")] = 20,
) -> None:
    """Show one request as a tree of spans with times, or list slow or failed ones.

    Traces are read from the observer, if there is one, or from this host's file.
    """
    show_trace(settings, _console(wide=wide), which, wide=wide, perfetto=perfetto, as_json=as_json, count=count)


@command(TRACES)
def traces(
    settings: MeshSettings,
    *,
    count: Annotated[int, typer.Option(min=1, help="number of traces to list")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """List the newest traces."""
    show_traces(settings, console, count, as_json=as_json)


@command(MESH)
def profile(
    settings: MeshSettings,
    role: Annotated[Literal["prefill", "decode"], typer.Argument(help="role of the worker")],
    *,
    seconds: Annotated[float, typer.Option(help="how long to record, at most 60")] = 5.0,
    instance: Annotated[
        str | None, typer.Option(help="beginning of the instance id, if there are several workers")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="file to write [profile-ROLE-ID.json.gz]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the file's name and facts as JSON")] = False,
) -> None:
    """Record a torch profile of a worker, for Perfetto."""
    asyncio.run(profile_worker(settings, console, role, instance, seconds=seconds, out=out, as_json=as_json))


@command(MESH)
def route(
    settings: MeshSettings,
    *,
    prompt: Annotated[str, typer.Option(help="text of the prompt")],
    chat: Annotated[bool, typer.Option(help="wrap it in the model's chat template")] = True,
    adapter: Annotated[str, typer.Option(help="name of a LoRA adapter")] = "",
    session: Annotated[str, typer.Option(help="`prompt_cache_key` or `user` of the request")] = "",
    cache_salt: Annotated[str, typer.Option(help="`cache_salt` of the request")] = "",
    as_json: AsJson = False,
) -> None:
    """Show to which instances a prompt would be routed, and why.

    The prompt is not computed.
    """
    asked = ExplainRoute(text=prompt, chat=chat, adapter=adapter, session=session, cache_salt=cache_salt)
    asyncio.run(show_route(settings, console, asked, as_json=as_json))


@command(MESH, user="")
def env(settings: MeshSettings, *, as_json: AsJson = False) -> None:
    """Print addresses, passwords and the model as shell variables.

    They are for etcdctl, nats and services that are started by hand. Usage: eval "$(python -m services.inspect env)"
    """
    variables = shell_variables(settings)
    if not ADDRESSES & settings.model_fields_set:  # the usual ports would be a guess
        raise SystemExit(no_answer_advice(settings))
    if as_json:
        print(json.dumps(variables))
        return
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")  # rich would wrap it


def shell_variables(settings: MeshSettings) -> dict[str, str]:
    members = endpoints(settings.etcd_url)
    variables = {
        "MESH_ETCD_URL": settings.etcd_url,
        "MESH_NATS_URL": settings.nats_url,
        "MESH_NAMESPACE": settings.namespace,
        **({"MESH_OTLP_ENDPOINT": settings.otlp_endpoint} if settings.otlp_endpoint else {}),
        "NATS_URL": settings.nats_url,
        "ETCDCTL_ENDPOINTS": without_password(settings.etcd_url),
    }
    local = local_mesh(settings.home)
    if "model" in local and local["etcd_url"] == settings.etcd_url:  # else it is another mesh
        variables |= {"MESH_MODEL": local["model"], "MESH_STATE_DIR": str(settings.home)}
    if members[0].user is not None:
        variables["ETCDCTL_USER"] = f"{members[0].user}:{members[0].password}"
    for name, of_etcdctl, of_nats in (("ca", "CACERT", "CA"), ("certificate", "CERT", "CERT"), ("key", "KEY", "KEY")):
        if (path := getattr(settings.tls, name)) is not None:
            variables |= {f"MESH_TLS__{name.upper()}": str(path)}
            variables |= {f"ETCDCTL_{of_etcdctl}": str(path), f"NATS_{of_nats}": str(path)}
    return variables


def _console(*, wide: bool) -> Console:
    if not wide:
        return console
    return Console(file=console.file, width=max(console.width, WIDE), force_terminal=console.is_terminal)


def _run(work: Coroutine[Any, Any, R]) -> R:
    """Run `work` without log lines, because the output has their facts. Ctrl-C is a normal end."""
    logger = logging.getLogger("components")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        logger.setLevel(level)


if __name__ == "__main__":
    # Other kvmesh commands have --help-all for more options; here --help shows all of them.
    arguments = ["--help" if argument == "--help-all" else argument for argument in sys.argv[1:]]
    app(arguments, prog_name=program("python -m services.inspect"))
