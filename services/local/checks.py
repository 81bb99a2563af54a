"""Checks before a run, so that an invalid setting is reported in one line at once, not after a model conversion."""

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from components.api_keys import BadKeys, read_keys
from components.http.listening import cannot_listen
from components.http.tls import tls_context
from components.kv_transfer.backends import check_name
from components.settings import WorkerSettings
from components.startup import WrongSettings
from components.text.tokenizer_file import check_tokenizer_file
from engine.config import EngineConfig
from engine.cpu.machine_memory import check_fits
from engine.lora.adapter_config import ADAPTER_WEIGHTS, read_adapter_config
from engine.model.mock_model import PREFIX, is_mock
from engine.model.resolve import check_config_file, check_model_name, gguf_file, local_path
from services.local.child_process import CannotStart, run
from services.local.plan import Plan

ALWAYS_THERE: Final = ("nixl", "nixl/UCX", "fake")
LAST_PORT: Final = 65535
CUDA: Final = Path("/dev/nvidiactl")


async def check_plan(plan: Plan) -> None:
    """Raises: WrongSettings; CannotStart, if there is no process for a check."""
    _check_memory(plan)
    _check_model(plan.settings.model)
    _check_frontend(plan)
    _check_ports(plan)
    if plan.observer.https is not None:
        tls_context(plan.observer.https)
    for worker in plan.workers.values():
        _check_adapters(worker, worker.engine)
        check_name(worker.kv_transfer)
    for setting in {worker.kv_transfer for worker in plan.workers.values()}.difference(ALWAYS_THERE):
        await _check_backend(setting)


def _check_memory(plan: Plan) -> None:
    """The default is small, and a mock's pages take memory only when they are used."""
    engines = [(plan.counts[role], worker.engine) for role, worker in plan.workers.items() if not is_mock(worker.model)]
    asked = {"engine.kv_memory_gb": _pool_gb, "engine.kv_offload_gb": _evicted_gb}
    names = [name for name, needs_gb in asked.items() if any(needs_gb(engine) for _, engine in engines)]
    total_gb = sum(count * needs_gb(engine) for needs_gb in asked.values() for count, engine in engines)
    workers = sum(count for count, engine in engines if _pool_gb(engine) or _evicted_gb(engine))
    settings = f"setting{'s' * (len(names) > 1)} {' and '.join(names)}"
    check_fits(round(total_gb * 1e9), f"{settings}: KV pages of {workers} worker{'s' * (workers > 1)}")


def _pool_gb(engine: EngineConfig) -> float:
    """Return the main memory for a worker's pools, if its settings fix it."""
    on_cpu = engine.device == "cpu" or (engine.device == "auto" and not CUDA.exists())
    return engine.tensor_parallel * (engine.kv_memory_gb or 0) if on_cpu and engine.num_pages is None else 0


def _evicted_gb(engine: EngineConfig) -> float:
    return engine.tensor_parallel * (engine.kv_offload_gb or 0)


def _check_model(model: str) -> None:
    """Check the name, and a directory; another model is checked when it is downloaded or converted."""
    name = model.removeprefix(PREFIX)
    check_model_name(name)
    path = local_path(name)
    if path is not None and gguf_file(path) is None:
        check_config_file(path)
        check_tokenizer_file(path)


def _check_frontend(plan: Plan) -> None:
    frontend = plan.frontend
    if not frontend.port:
        raise WrongSettings(f"setting port of frontend: services.local needs a number from 1 to {LAST_PORT}")
    if frontend.https is not None:
        tls_context(frontend.https)
    try:
        read_keys(frontend.api_keys.get_secret_value() if frontend.api_keys else None, frontend.api_keys_file)
    except BadKeys as exc:
        raise WrongSettings(f"API keys: {exc}") from exc


def _check_ports(plan: Plan) -> None:
    """Check that there are enough ports, as processes use consecutive ones."""
    ports = [port for _, port in plan.addresses]
    _check_last("port of frontend", ports[0], ports[-1])
    if first := plan.settings.metrics_port:
        _check_last("metrics_port", first, first + len(plan.names) - 1)


def _check_last(setting: str, first: int, last: int) -> None:
    if last > LAST_PORT:
        raise WrongSettings(
            f"setting {setting}: ports {first} to {last} are needed, and the last one is {LAST_PORT}: choose "
            f"{LAST_PORT - (last - first)} or less"
        )


def _check_adapters(worker: WorkerSettings, engine: EngineConfig) -> None:
    if is_mock(worker.model):
        return
    for name, directory in engine.lora.items():
        path = Path(directory).expanduser()
        read_adapter_config(name, path)
        if not (path / ADAPTER_WEIGHTS).is_file():
            raise WrongSettings(f"LoRA adapter {name!r}: {path / ADAPTER_WEIGHTS} does not exist")


async def _check_backend(setting: str) -> None:
    lines: list[str] = []
    if await run([sys.executable, "-m", "components.kv_transfer.try_backend", setting], lines.append) != 0:
        raise WrongSettings(lines[-1] if lines else f"setting kv_transfer: {setting} cannot be used here")


@contextmanager
def own_ports(plan: Plan) -> Iterator[None]:
    """Hold the frontends' ports until the block ends. Raises: CannotStart.

    Frontends share a port with any process that shares it, also of another mesh. So each port is bound alone once. The Unix
    socket shows another `services.local` that a port is taken before a frontend listens.
    """
    with ExitStack() as held:
        for host, port in plan.addresses:
            try:
                name = held.enter_context(socket.socket(socket.AF_UNIX))
                name.bind(f"\0kvmesh {host or '0.0.0.0'}:{port}")  # noqa: S104 - a name, not an address
                family, kind, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
                with socket.socket(family, kind) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
                    probe.listen()
            except (OSError, UnicodeError) as exc:
                raise CannotStart(cannot_listen(host, port, exc)) from exc
        yield
