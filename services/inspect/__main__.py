"""python -m services.inspect: who is registered, what is busy, what one request did, what one worker computes."""

import asyncio
import os
import shlex
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from rich.console import Console

from components.discovery.etcd import endpoints
from components.local_mesh import beside_local_mesh
from components.settings import MeshSettings
from components.telemetry.trace_store import FILE_NAME, TraceStore
from components.urls import without_password
from components.wire.routes import ExplainRoute
from services.inspect.planner import show_planner
from services.inspect.profile import profile_worker
from services.inspect.route import show_route
from services.inspect.trace_view import trace_line, trace_table
from services.inspect.workers import show_workers

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look inside a running kvmesh mesh.")
WIDE: Final = 240
PIPED_WIDTH: Final = 200  # rich's 80 would cut addresses that somebody wants to grep for
console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH)

EtcdUrl = Annotated[str | None, typer.Option(help="[env: MESH_ETCD_URL]")]
NatsUrl = Annotated[str | None, typer.Option(help="[env: MESH_NATS_URL]")]
Namespace = Annotated[str | None, typer.Option(help="[env: MESH_NAMESPACE]")]
StateDir = Annotated[Path | None, typer.Option(help="where the services keep their traces [env: MESH_STATE_DIR]")]


@app.command()
def workers(
    etcd_url: EtcdUrl = None,
    nats_url: NatsUrl = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
    *,
    wide: Annotated[bool, typer.Option("--wide", help="with epochs, hosts, pages and calls")] = False,
) -> None:
    """What etcd knows and what NATS answers, side by side."""
    settings = _settings(state_dir, etcd_url=etcd_url, nats_url=nats_url, namespace=namespace)
    asyncio.run(show_workers(settings, _console(wide=wide), wide=wide))


@app.command()
def planner(
    nats_url: NatsUrl = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> None:
    """How many workers the planner thinks are needed, why, and what it did last."""
    settings = _settings(state_dir, nats_url=nats_url, namespace=namespace)
    asyncio.run(show_planner(settings, console))


@app.command()
def trace(
    which: Annotated[str, typer.Argument(help="last, or the beginning of a trace id or request id")] = "last",
    state_dir: StateDir = None,
    *,
    wide: Annotated[
        bool, typer.Option("--wide", "--verbose", help="with all attributes, such as route.compared")
    ] = False,
) -> None:
    """One request as a tree with times, from the traces kept on this host."""
    settings = _settings(state_dir)
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


@app.command()
def traces(count: Annotated[int, typer.Option(help="how many")] = 20, state_dir: StateDir = None) -> None:
    """The newest traces, a line each."""
    home = _settings(state_dir).home
    store = TraceStore(home)
    with _readable(home):
        kept = [store.trace(trace_id) for trace_id in store.last_trace_ids(count)]
    for spans in filter(None, kept):  # else trimmed meanwhile
        console.print(trace_line(spans), soft_wrap=True)


@app.command()
def profile(
    role: Annotated[Literal["prefill", "decode"], typer.Argument(help="what it is")],
    *,
    seconds: Annotated[float, typer.Option(help="how long to record, at most 60")] = 5.0,
    instance: Annotated[str | None, typer.Option(help="the beginning of its id, where there are several")] = None,
    out: Annotated[Path | None, typer.Option(help="(default: profile-ROLE-ID.json.gz)")] = None,
    etcd_url: EtcdUrl = None,
    nats_url: NatsUrl = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> None:
    """What one worker computes while it serves: a torch trace that opens in Perfetto."""
    settings = _settings(state_dir, etcd_url=etcd_url, nats_url=nats_url, namespace=namespace)
    asyncio.run(profile_worker(settings, console, role, instance, seconds=seconds, out=out))


@app.command()
def route(
    *,
    prompt: Annotated[str, typer.Option(help="what a user would say")],
    chat: Annotated[bool, typer.Option(help="as a message in the model's chat template; else as it is")] = True,
    adapter: Annotated[str, typer.Option(help="a LoRA adapter by name")] = "",
    session: Annotated[str, typer.Option(help="as `prompt_cache_key` or `user` of a request")] = "",
    cache_salt: Annotated[str, typer.Option(help="as `cache_salt` of a request")] = "",
    etcd_url: EtcdUrl = None,
    nats_url: NatsUrl = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> None:
    """Which instances a prompt would go to now, and why, without sending it."""
    settings = _settings(state_dir, etcd_url=etcd_url, nats_url=nats_url, namespace=namespace)
    asked = ExplainRoute(text=prompt, chat=chat, adapter=adapter, session=session, cache_salt=cache_salt)
    asyncio.run(show_route(settings, console, asked))


@app.command()
def env(
    etcd_url: EtcdUrl = None,
    nats_url: NatsUrl = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> None:
    """Print the mesh's addresses and passwords as shell variables, for etcdctl, nats and services started by hand.

    Use it as: eval "$(python -m services.inspect env)"
    """
    settings = _settings(state_dir, etcd_url=etcd_url, nats_url=nats_url, namespace=namespace)
    for name, value in shell_variables(settings).items():
        print(f"export {name}={shlex.quote(value)}")  # for a shell: rich would wrap it


def shell_variables(settings: MeshSettings) -> dict[str, str]:
    """By name: those of kvmesh's services, of etcdctl and of the nats command."""
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
    return variables


def _console(*, wide: bool) -> Console:
    """Where to print; with `wide`, lines may be longer than the terminal's."""
    if not wide:
        return console
    return Console(file=console.file, width=max(console.width, WIDE), force_terminal=console.is_terminal)


@contextmanager
def _readable(home: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as exc:
        sys.exit(f"{home / FILE_NAME} cannot be read: {exc}")


def _settings(state_dir: Path | None, **given: str | None) -> MeshSettings:
    """Flags, then the environment, then what a `services.local` that runs here says of itself, then the defaults."""
    values = {name: value for name, value in given.items() if value is not None}
    if state_dir is not None:
        values["state_dir"] = str(state_dir)
    return beside_local_mesh(MeshSettings(**values))  # type: ignore[arg-type]


if __name__ == "__main__":
    app()
