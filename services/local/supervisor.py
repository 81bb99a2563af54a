"""The whole mesh on one machine: opened in the order of dependence, closed in the reverse, whatever ends it."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from components.settings import MeshSettings
from components.urls import without_password
from services.local.checks import check_plan
from services.local.children import Backoff, Child, Supervision, running_children
from services.local.departures import Departures
from services.local.greeting import greeting
from services.local.model import prepare_model
from services.local.output import Output
from services.local.plan import TIERS, Plan
from services.local.process import CannotStart, describe_exit, kill
from services.local.readiness import own_ports, until_ready
from services.local.scaling import Scaling, answer_scaling
from services.local.servers import ETCD, NATS, Kind, Server, running
from services.local.state import own_state

Backends = tuple[str, str]  # URLs of etcd and NATS


async def run_mesh(plan: Plan) -> int:
    """Run `plan` until a signal ends it. Returns: the exit code."""
    output = Output([*plan.names, "model", "local"])
    supervision = Supervision(output, plan.stop_timeout_s)
    serving = asyncio.create_task(_serve(plan, supervision))
    try:
        with _stop_signals(serving, supervision):
            output.error((await serving).message)
    except asyncio.CancelledError:  # by the first signal; by now everything is stopped
        output.say("local", "stopped")
        return 128 + signal.SIGINT if supervision.hurry.is_set() else 0
    except CannotStart as exc:
        output.error(exc.message)
    finally:
        output.close()
    return 1


async def _serve(plan: Plan, supervision: Supervision) -> CannotStart:
    """Serve until cancelled. Returns: why a child could not be kept; raises CannotStart when it did not come to children."""
    settings = plan.settings()
    await check_plan(plan)
    async with AsyncExitStack() as stack:
        stack.enter_context(own_ports(plan))
        backends = await stack.enter_async_context(_backends(plan, settings, supervision))
        await prepare_model(settings.model, plan.model_command(settings), supervision.output)
        departures = Departures(backends[0], settings.namespace, supervision.output)
        tiers = {
            role: await stack.enter_async_context(running_children(specs, supervision, departures.announce))
            for role, specs in zip(TIERS, plan.children(settings, *backends), strict=True)
        }
        children = [child for tier in tiers.values() for child in tier]
        scaling = Scaling(
            tiers,
            lambda role, number: plan.one_more(role, number, settings, *backends),
            supervision.output,
        )
        async with asyncio.TaskGroup() as tasks:
            beside = (
                tasks.create_task(_greet(children, plan, settings, backends, supervision.output)),
                tasks.create_task(answer_scaling(scaling, backends[1], settings.namespace, supervision.output)),
            )
            reason = await supervision.gave_up
            for task in beside:
                task.cancel()
        return reason


@asynccontextmanager
async def _backends(plan: Plan, settings: MeshSettings, supervision: Supervision) -> AsyncIterator[Backends]:
    """The servers given, else our own."""
    if plan.etcd_url and plan.nats_url:
        yield plan.etcd_url, plan.nats_url
        return
    async with AsyncExitStack() as stack:
        home, running_file = stack.enter_context(own_state(settings.home, plan.urls))
        etcd_url, nats_url = plan.etcd_url, plan.nats_url
        if not etcd_url:
            etcd_url = await stack.enter_async_context(_embedded(ETCD, home, supervision))
        if not nats_url:
            nats_url = await stack.enter_async_context(_embedded(NATS, home, supervision))
        running_file.tell(etcd_url=etcd_url, nats_url=nats_url, namespace=settings.namespace, http=plan.urls)
        yield etcd_url, nats_url


@asynccontextmanager
async def _embedded(kind: Kind, home: Path, supervision: Supervision) -> AsyncIterator[str]:
    async with running(kind, home, supervision.hurry) as server:
        monitor = {"monitor": server.monitor_url} if kind is NATS else {}
        supervision.output.say(
            kind.name, "ready", url=without_password(server.url), **monitor, log=str(server.log_file)
        )
        keeper = asyncio.create_task(_keep(server, supervision.output))
        try:
            yield server.url
        finally:
            keeper.cancel()
            await asyncio.wait({keeper})


async def _keep(server: Server, output: Output) -> None:
    """Start `server` again, with its data, whenever it dies."""
    backoff = Backoff()
    while server.process is not None:
        started = time.monotonic()
        returncode = await server.process.wait()
        await kill(server.process)
        delay_s = backoff.after(time.monotonic() - started)
        output.say(server.kind.name, f"died ({describe_exit(returncode)}), next try in {delay_s:g} s", level="error")
        await asyncio.sleep(delay_s)
        try:
            await server.restart()
        except CannotStart as exc:
            output.say(server.kind.name, exc.message, level="error")
        else:
            output.say(server.kind.name, "ready", url=without_password(server.url))


async def _greet(children: list[Child], plan: Plan, settings: MeshSettings, backends: Backends, output: Output) -> None:
    """Say "Ready" once it is true."""
    models = await until_ready(children, settings.served_model_name, output)
    pages = {child.spec.name: child.metrics_url for child in children if child.metrics_url}
    output.print(*greeting(plan, models[0], settings, pages))


@contextmanager
def _stop_signals(serving: asyncio.Task[CannotStart], supervision: Supervision) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP cancels `serving`, whose contexts stop everything; a second one kills."""
    loop, said = asyncio.get_running_loop(), asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if not said.is_set():
            said.set()
            supervision.output.say("local", f"stopping ({number.name}); once more to kill")
            serving.cancel()
        elif number != signal.SIGHUP:  # shell and terminal may each send one
            supervision.hurry.set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
