"""Imports go one way: services → components and engine, and the engine imports no sockets. The source is parsed, not run."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

REPO: Final = Path(__file__).resolve().parents[1]
OURS: Final = ("components", "engine", "services")

# What the engine may take from components: modules without I/O.
FOR_THE_ENGINE: Final = {
    "components.errors",
    "components.lifecycle",
    "components.startup",
    "components.text.byte_letters",
    "components.wire.tokens",
    "components.wire.codec",
    "components.wire.embed",
    "components.wire.layout",
    "components.wire.logprobs",
    "components.wire.sampling",
    "components.wire.step_stats",
}
SHARED_BY_WORKERS: Final = ("services.worker", "services.worker_requests")  # modules, no services
# None of these comes with a package's __init__ (importing any submodule runs it), nor into the engine.
SOCKET_LIBRARIES: Final = {
    "aiohttp",
    "asyncio",
    "etcd3",
    "fastapi",
    "ftplib",
    "grpc",
    "http",
    "httpx",
    "nats",
    "nixl",
    "opentelemetry",
    "prometheus_client",
    "requests",
    "socket",
    "socketserver",
    "ssl",
    "starlette",
    "urllib",
    "uvicorn",
    "uvloop",
}

# The parts of components, lowest first: each imports only parts before it.
COMPONENTS_ORDER: Final = (
    "components.errors",
    "components.program",
    "components.version",
    "components.urls",
    "components.planning",
    "components.settings_help",
    "components.aio",
    "components.backoff",
    "components.token_bucket",
    "components.lifecycle",
    "components.startup",
    "components.followed_files",
    "components.certificates",
    "components.credentials",
    "components.permissions",
    "components.wire",
    "components.http",
    "components.settings",
    "components.kv_transfer",
    "components.routing",
    "components.structured",
    "components.local_mesh",
    "components.process",
    "components.telemetry",
    "components.output",
    "components.discovery",
    "components.text",
    "components.messaging",
    "components.openai",
    "components.process_health",
    "components.process_control",
    "components.anthropic",
    "components.api_keys",
)
# The parts of the engine, lowest first: each imports only parts before it.
ENGINE_ORDER: Final = (
    *("engine.config", "engine.errors", "engine.ports"),
    *("engine.cpu", "engine.device", "engine.loop"),
    *("engine.sampling", "engine.kv", "engine.scheduler"),
    *("engine.kernels", "engine.attention", "engine.sharding", "engine.lora", "engine.model", "engine.compilation"),
    *(
        "engine.runner",
        "engine.core",
        "engine.parts",
        "engine.parallel",
        "engine.build",
        "engine.follower",
        "engine.mock",
        "engine.start",
    ),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> list[Path]:
    return sorted(path for package in OURS for path in (REPO / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that `path` may import; `from a import b` counts as a, and as a.b if b is a module."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = str(node.module)
            for alias in node.names:
                inner = REPO.joinpath(*module.split("."), alias.name)
                yield f"{module}.{alias.name}" if inner.is_dir() or inner.with_suffix(".py").exists() else module


def top(name: str) -> str:
    return name.partition(".")[0]


def service(name: str) -> str:
    return ".".join(name.split(".")[:2])


def fault(importer: str, imported: str) -> str | None:
    """Return why module `importer` must not import `imported`; None: it may."""
    match top(importer), top(imported):
        case "services", "services" if service(imported) not in (service(importer), *SHARED_BY_WORKERS):
            reads_settings = service(importer) == "services.local" and imported.endswith(".config")
            return None if reads_settings else "no service imports another; services.local imports their settings"
        case "components", "services" | "engine":
            return "components import neither services nor the engine"
        case "engine", "services":
            return "the engine imports no service"
        case "engine", "components" if imported not in FOR_THE_ENGINE:
            return "the engine imports only modules without I/O from components"
        case "engine", library if library in SOCKET_LIBRARIES - {"asyncio"}:  # its loop hands results to the event loop
            return "the engine knows no socket"
        case _:
            return None


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("services.decode.service", "services.decode.config", True),
        ("services.decode.service", "services.prefill.config", False),
        ("services.decode.service", "services.worker", True),
        ("services.worker", "services.decode.config", False),
        ("services.local.plan", "services.decode.config", True),
        ("services.local.plan", "services.decode.service", False),
        ("services.planner.config", "services.decode.config", False),
        ("services.decode.service", "engine.core.engine_core", True),
        ("components.routing.policy", "engine.ports", False),
        ("components.wire.prefill", "services.bootstrap.service", False),
        ("engine.core.engine_core", "components.errors", True),
        ("engine.core.engine_core", "components.discovery.registry", False),
        ("engine.core.engine_core", "services.decode.config", False),
        ("engine.core.engine_core", "torch.nn.functional", True),
        ("engine.core.engine_core", "nats", False),
        ("engine.core.engine_core", "socket", False),
        ("engine.loop.engine_loop", "asyncio", True),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    assert (fault(importer, imported) is None) is allowed


def test_every_import_goes_the_right_way() -> None:
    faults = [
        f"{path.relative_to(REPO)} imports {imported}: {why}"
        for path in sources()
        for imported in imports(path)
        if (why := fault(module_name(path), imported))
    ]
    assert not faults, "\n".join(faults)


def part(name: str) -> str:
    return ".".join(name.split(".")[:2])


@pytest.mark.parametrize("order", [COMPONENTS_ORDER, ENGINE_ORDER], ids=["components", "engine"])
def test_packages_have_an_order(order: tuple[str, ...]) -> None:
    package = top(order[0])
    found = {part(module_name(path)) for path in sources() if top(module_name(path)) == package}
    assert sorted(order) == sorted(found - {package})
    place = {name: i for i, name in enumerate(order)}
    faults = {
        f"{path.relative_to(REPO)} imports {imported}, which is above it"
        for path in sources()
        for imported in imports(path)
        if part(module_name(path)) in place
        if place.get(part(imported), -1) > place[part(module_name(path))]
    }
    assert not faults, "\n".join(sorted(faults))


def test_what_the_engine_may_import_from_components_has_no_io() -> None:
    """Nor have the modules that they import in turn, with package initialisers."""
    seen: set[str] = set()
    queue = sorted(FOR_THE_ENGINE)
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        for path in files_run_by(name):
            for imported in imports(path):
                assert top(imported) not in SOCKET_LIBRARIES, f"{path.relative_to(REPO)} imports {imported}"
                if top(imported) in OURS:
                    queue.append(imported)


def files_run_by(name: str) -> list[Path]:
    """Return the source files that importing module `name` runs."""
    parts = name.split(".")
    packages = [REPO.joinpath(*parts[:depth], "__init__.py") for depth in range(1, len(parts) + 1)]
    return [path for path in [*packages, REPO.joinpath(*parts).with_suffix(".py")] if path.exists()]


def test_package_initialisers_import_no_socket_library() -> None:
    faults = [
        f"{path.relative_to(REPO)} imports {imported}"
        for path in sources()
        if path.name == "__init__.py"
        for imported in imports(path)
        if top(imported) in SOCKET_LIBRARIES
    ]
    assert not faults, "\n".join(faults)


def test_no_import_inside_a_function() -> None:
    faults = [
        f"{path.relative_to(REPO)}:{node.lineno}"
        for path in sources()
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not faults, f"imports inside functions: {', '.join(sorted(set(faults)))}"
