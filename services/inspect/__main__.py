"""python -m services.inspect: who is registered, what is busy, what one request did, what one worker computes."""

import asyncio
import functools
import inspect
import os
import shlex
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console

from components.discovery.etcd import endpoints
from components.local_mesh import beside_local_mesh
from components.settings import MeshSettings
from components.telemetry.trace_store import FILE_NAME, TraceStore
from components.urls import without_password
from components.wire.inspection import ExplainRoute
from services.inspect.profile import profile_worker
from services.inspect.route import show_route
from services.inspect.trace_view import trace_list, trace_table
from services.inspect.workers import show_planners, show_workers

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
MESH: Final = {
    "etcd_url": Annotated[str | None, typer.Option(help="etcd endpoints [env: MESH_ETCD_URL]")],
    "nats_url": Annotated[str | None, typer.Option(help="NATS servers [env: MESH_NATS_URL]")],
    "namespace": Annotated[str | None, typer.Option(help="name of the mesh [env: MESH_NAMESPACE]")],
    **STATE_DIR,
}


def command(options: dict[str, Any], user: str = "inspect") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command whose first argument is settings made of `options`.

    These come first, then the environment, then what a `services.local` here wrote for `user`.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            values = {name: value for name in options if (value := given.pop(name)) is not None}
            function(beside_local_mesh(MeshSettings(**values), user), **given)

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
    wide: Annotated[bool, typer.Option("--wide", help="also epochs, hosts, pages and calls")] = False,
) -> None:
    """Show all instances: what etcd holds and NATS answers."""
    asyncio.run(show_workers(settings, _console(wide=wide), wide=wide))


@command(MESH)
def planner(settings: MeshSettings) -> None:
    """Show how many workers are needed, why, and latest changes."""
    asyncio.run(show_planners(settings, console))


@command(STATE_DIR)
def trace(
    settings: MeshSettings,
    which: Annotated[str, typer.Argument(help="last, or the beginning of a trace id or request id")] = "last",
    *,
    wide: Annotated[bool, typer.Option("--wide", "--verbose", help="all attributes, such as route.compared")] = False,
) -> None:
    """Show one request as a tree of spans with times.

    Traces are read from this host.
    """
    store = TraceStore(settings.home)
    with _readable(settings.home):
        newest = store.last_trace_ids(1)
        last = newest[0] if newest else ""
        wanted = last if which == "last" else which.removeprefix("chatcmpl-").removeprefix("cmpl-")
        spans = store.trace(wanted) if wanted else []
    if not spans:
        kept = "no trace is kept" if not newest else f"no kept trace begins with {which!r}"
        sys.exit(f"{kept} in {settings.home}: send a request first, or name the services' --state-dir")
    _console(wide=wide).print(trace_table(spans, console.width, wide=wide))


@command(STATE_DIR)
def traces(settings: MeshSettings, *, count: Annotated[int, typer.Option(help="traces to list")] = 20) -> None:
    """List the newest traces."""
    store = TraceStore(settings.home)
    with _readable(settings.home):
        kept = [store.trace(trace_id) for trace_id in store.last_trace_ids(count)]
    console.print(trace_list(filter(None, kept)))  # removed meanwhile: empty


@command(MESH)
def profile(
    settings: MeshSettings,
    role: Annotated[Literal["prefill", "decode"], typer.Argument(help="role of the worker")],
    *,
    seconds: Annotated[float, typer.Option(help="how long to record, at most 60")] = 5.0,
    instance: Annotated[str | None, typer.Option(help="beginning of the instance id, if there are several")] = None,
    out: Annotated[Path | None, typer.Option(help="file to write [profile-ROLE-ID.json.gz]")] = None,
) -> None:
    """Record a torch trace of a worker at work, for Perfetto."""
    asyncio.run(profile_worker(settings, console, role, instance, seconds=seconds, out=out))


@command(MESH)
def route(
    settings: MeshSettings,
    *,
    prompt: Annotated[str, typer.Option(help="text of the prompt")],
    chat: Annotated[bool, typer.Option(help="wrap it in the model's chat template")] = True,
    adapter: Annotated[str, typer.Option(help="name of a LoRA adapter")] = "",
    session: Annotated[str, typer.Option(help="`prompt_cache_key` or `user` of the request")] = "",
    cache_salt: Annotated[str, typer.Option(help="`cache_salt` of the request")] = "",
) -> None:
    """Show which instances a prompt would go to, and why.

    The prompt is not computed.
    """
    asked = ExplainRoute(text=prompt, chat=chat, adapter=adapter, session=session, cache_salt=cache_salt)
    asyncio.run(show_route(settings, console, asked))


@command(MESH, user="")
def env(settings: MeshSettings) -> None:
    """Print addresses and passwords as shell variables.

    They are for etcdctl, nats and services started by hand. Usage: eval "$(python -m services.inspect env)"
    """
    for name, value in shell_variables(settings).items():
        print(f"export {name}={shlex.quote(value)}")  # rich would wrap it


def shell_variables(settings: MeshSettings) -> dict[str, str]:
    members = endpoints(settings.etcd_url)
    variables = {
        "MESH_ETCD_URL": settings.etcd_url,
        "MESH_NATS_URL": settings.nats_url,
        "MESH_NAMESPACE": settings.namespace,
        "NATS_URL": settings.nats_url,
        "ETCDCTL_ENDPOINTS": without_password(settings.etcd_url),
    }
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


@contextmanager
def _readable(home: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as exc:
        sys.exit(f"{home / FILE_NAME} cannot be read: {exc}")


if __name__ == "__main__":
    # The other commands of kvmesh have a longer help; here every option is in the help.
    app(["--help" if argument == "--help-all" else argument for argument in sys.argv[1:]])
