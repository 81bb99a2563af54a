"""Run the whole mesh on one machine: open its parts in order of dependency, and close them in reverse."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from components.discovery.registry import remove_record
from components.errors import BackendUnavailable, MeshError
from components.messaging.connection import connect_bus
from components.messaging.records import Records
from components.permissions import ADMINISTRATOR
from components.startup import EX_CONFIG, WrongSettings
from components.urls import without_password
from engine.model.resolve import independent_name
from services.local.accounts import OBSERVER as OBSERVER_USER
from services.local.accounts import Accounts, Backends, Reach
from services.local.checks import check_plan, own_ports
from services.local.child_process import CannotStart, describe_exit, kill, run
from services.local.children import Announce, Child, RestartDelays, Supervision, running_children
from services.local.lossy_stdout import console_on_stdout
from services.local.observer import NAME as OBSERVER
from services.local.observer import running_observer, with_certificate, with_observer
from services.local.output import Output
from services.local.plan import TIERS, Plan
from services.local.ready import greeting, until_ready
from services.local.scaling import Scaling, answer_scaling
from services.local.servers import ETCD, NATS, Kind, Server, running
from services.local.state_dir import own_folder, own_state, writing

MODEL: Final = "model"


async def run_mesh(plan: Plan) -> int:
    """Returns: the exit code."""
    with console_on_stdout() as console:
        return await _supervise(plan, Output([*plan.names, MODEL, "local", OBSERVER], console))


async def _supervise(plan: Plan, output: Output) -> int:
    supervision = Supervision(output, plan.stop_timeout_s)
    serving = asyncio.create_task(_serve(plan, supervision))
    try:
        with _stop_signals(serving, supervision):
            error = await serving
    except asyncio.CancelledError:  # by a signal; everything has stopped
        output.report("local", "stopped")
        return 128 + signal.SIGINT if supervision.hurry.is_set() else 0
    except (CannotStart, WrongSettings) as exc:
        error = exc
    finally:
        output.close()
    output.error(error.message)
    return EX_CONFIG if isinstance(error, WrongSettings) else 1


async def _serve(plan: Plan, supervision: Supervision) -> CannotStart | WrongSettings:
    """Returns: why a child could not be kept running. Raises: CannotStart, WrongSettings, before any child runs."""
    await check_plan(plan)
    plan, observer = with_observer(plan)
    async with AsyncExitStack() as stack:
        stack.enter_context(own_ports(plan))
        reach = await stack.enter_async_context(_backends(plan, supervision))
        await prepare_model(plan.settings.model, plan.model_command(), supervision.output)
        if observer is not None and plan.secure:
            observer = with_certificate(observer, reach(OBSERVER_USER).tls)
        await stack.enter_async_context(running_observer(observer, supervision))
        announce = _announcer(plan, reach, supervision.output)
        tiers = {
            role: await stack.enter_async_context(running_children(specs, supervision, announce))
            for role, specs in zip(TIERS, plan.children(reach), strict=True)
        }
        children = [child for tier in tiers.values() for child in tier]
        scaling = Scaling(
            tiers, lambda role, number, counts: plan.one_more(role, number, counts, reach), supervision.output
        )
        async with asyncio.TaskGroup() as tasks:
            others = (
                tasks.create_task(_greet(children, plan, supervision.output)),
                tasks.create_task(
                    answer_scaling(scaling, reach("local").applied(plan.settings), plan.subject, supervision.output)
                ),
            )
            reason = await supervision.gave_up
            for task in others:
                task.cancel()
        return reason


@asynccontextmanager
async def _backends(plan: Plan, supervision: Supervision) -> AsyncIterator[Reach]:
    given, settings = plan.settings.model_fields_set, plan.settings
    if {"etcd_url", "nats_url"} <= given:
        yield lambda _: Backends(settings.etcd_url, settings.nats_url)
        return
    async with AsyncExitStack() as stack:
        home, running_file = stack.enter_context(own_state(settings.home, plan.urls))
        certificates = stack.enter_context(own_folder(home / "tls")) if plan.secure else None
        with writing(home):
            accounts = Accounts.make(settings.namespace, plan.counts["frontend"], certificates, plan.observer.host)
            servers = {
                kind: await stack.enter_async_context(_embedded(kind, home, supervision, accounts))
                for kind, setting in ((ETCD, "etcd_url"), (NATS, "nats_url"))
                if setting not in given
            }

        def reach(user: str) -> Backends:
            return Backends(
                servers[ETCD].url_of(user) if ETCD in servers else settings.etcd_url,
                servers[NATS].url_of(user) if NATS in servers else settings.nats_url,
                user if NATS in servers else None,
                accounts.certificates.get(user),
            )

        users = {user: reach(user).settings() for user in ("inspect", "planner")}
        traces = {} if plan.otlp_endpoint is None else {"otlp_endpoint": plan.otlp_endpoint}
        model = independent_name(settings.model)
        facts = {"users": users, "namespace": settings.namespace, "http": plan.urls, "model": model, **traces}
        with writing(home):
            running_file.write(**reach(ADMINISTRATOR).settings(), **facts)
        if NATS in servers:
            await _make_response_stream(plan, reach(ADMINISTRATOR), supervision.output)
        yield reach


async def _make_response_stream(plan: Plan, administrator: Backends, output: Output) -> None:
    """Create the stream of stored responses, which frontends have no right to create."""
    if plan.frontend.max_stored_responses == 0:
        return
    settings = administrator.applied(plan.frontend)
    try:
        async with connect_bus(settings.nats_url, "local", settings.nats_access(ADMINISTRATOR)) as bus:
            await Records(bus, f"{settings.namespace}.responses", settings.stored_config).make()
    except MeshError as exc:
        output.report("local", "responses are not stored", level="warning", cause=exc.message)


@asynccontextmanager
async def _embedded(kind: Kind, home: Path, supervision: Supervision, accounts: Accounts) -> AsyncIterator[Server]:
    async with running(kind, home, supervision.hurry, accounts) as server:
        supervision.output.report(kind.name, "ready", url=without_password(server.url), log=str(server.log_file))
        keeper = asyncio.create_task(_keep(server, supervision.output))
        try:
            yield server
        finally:
            keeper.cancel()
            await asyncio.wait({keeper})


async def _keep(server: Server, output: Output) -> None:
    delays = RestartDelays()
    while server.process is not None:
        started = time.monotonic()
        returncode = await server.process.wait()
        await kill(server.process)
        delay_s = delays.after(time.monotonic() - started)
        output.report(server.kind.name, f"died ({describe_exit(returncode)}), restart in {delay_s:g} s", level="error")
        await asyncio.sleep(delay_s)
        try:
            await server.restart()
        except (CannotStart, OSError) as exc:  # a full disk, for example, may have room later
            output.report(server.kind.name, str(exc), level="error")
        else:
            output.report(server.kind.name, "ready", url=without_password(server.url))


async def prepare_model(model: str, command: Sequence[str], output: Output) -> None:
    """Run `command` before any worker starts, or two would do its work twice. Raises: CannotStart, WrongSettings."""
    last_line = ""

    def show(line: str) -> None:
        nonlocal last_line
        last_line = output.show(MODEL, line) or line or last_line

    try:
        returncode = await run(command, show)
    finally:
        output.end_progress(MODEL)
    if returncode == EX_CONFIG:
        raise WrongSettings(last_line)
    if returncode != 0:
        raise CannotStart(last_line or f"model {model!r} could not be prepared: {describe_exit(returncode)}")


def _announcer(plan: Plan, reach: Reach, output: Output) -> Announce:
    mine = reach("local").applied(plan.settings)
    access = mine.etcd_access()

    async def announce(name: str, instance_id: str) -> None:
        """Remove a dead child's record from etcd: without that, others notice its silence after two seconds."""
        role = name.rpartition("-")[0]
        try:
            await asyncio.to_thread(remove_record, mine.etcd_url, mine.namespace, role, instance_id, access)
        except BackendUnavailable as exc:
            output.report("local", f"cannot remove {name} from etcd", level="warning", cause=exc.message)

    return announce


async def _greet(children: list[Child], plan: Plan, output: Output) -> None:
    models = await until_ready(children, plan.settings.served_model_name, output, plan.settings.page_access())
    pages = {child.spec.name: child.metrics_url for child in children if child.metrics_url}
    output.print(*greeting(plan, models[0], pages))


@contextmanager
def _stop_signals(serving: asyncio.Task[CannotStart | WrongSettings], supervision: Supervision) -> Iterator[None]:
    """Handle signals. The first one cancels `serving`, whose contexts stop everything. The second one kills."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if not stopping.is_set():
            stopping.set()
            supervision.output.report("local", f"stopping ({number.name}); once more to kill")
            if not supervision.gave_up.done():  # else everything stops already, and the reason is to be shown
                serving.cancel()
        elif number != signal.SIGHUP:  # shell and terminal may each send one
            supervision.hurry.set()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
