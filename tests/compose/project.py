"""A compose project of the committed files, with an override for this machine."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from bench.processes import free_port
from components.telemetry.trace_reader import ObserverTraceReader
from tests.compose.docker_engine import BUILD_S, DockerEngine, compose_command, output
from tests.conftest import REPO
from tests.waiting import wait_until

COMPOSE: Final = REPO / "deploy" / "compose"
BUILT: Final = ("model", "bootstrap", "prefill", "decode", "frontend", "planner", "etcd-users", "response-stream")
UP_S: Final = 300.0
OBSERVER_PORT: Final = 4318
TOKEN: Final = "of-the-tests"
HEALTH: Final = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{OBSERVER_PORT}/health', timeout=3)"


@dataclass(frozen=True, slots=True)
class Build:
    """The inputs of builds of images."""

    images: Mapping[str, str]  # variables that name base images
    secrets: Mapping[str, Path]  # of the Dockerfile


@dataclass(frozen=True, slots=True)
class Project:
    engine: DockerEngine
    name: str
    files: Sequence[Path]
    env: Mapping[str, str]  # as a user's .env

    @property
    def variables(self) -> dict[str, str]:
        """The environment for compose and for upgrade.sh."""
        return {
            **self.engine.env,
            **self.env,
            "COMPOSE_PROJECT_NAME": self.name,
            "COMPOSE_FILE": os.pathsep.join(map(str, self.files)),
            "COMPOSE_COMMAND": " ".join(compose_command()),
            "COMPOSE_PROGRESS": "plain",
        }

    def compose(self, *arguments: str, timeout_s: float = UP_S) -> str:
        return output([*compose_command(), *arguments], self.variables, timeout_s=timeout_s)

    def up(self, *arguments: str) -> None:
        try:
            self.compose("up", "--detach", "--wait", *arguments)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.compose('ps', '--all')}\n{self.logs()}") from exc

    def upgrade(self, *arguments: str) -> None:
        output([str(COMPOSE / "upgrade.sh"), *arguments], self.variables, timeout_s=UP_S)

    def logs(self, *services: str) -> str:
        return self.compose("logs", "--no-color", "--tail", "40", *services)[-12_000:]

    def containers(self, service: str) -> list[str]:
        """Return the ids of running containers."""
        return self.compose("ps", "--quiet", "--status", "running", service).split()

    def addresses(self, service: str) -> list[str]:
        found = []
        for container in self.containers(service):
            networks: Any = self.engine.inspected(container)["NetworkSettings"]
            found += [network["IPAddress"] for network in networks["Networks"].values()]
        return [address for address in found if address]

    def url(self, service: str, port: int) -> str:
        """Return the URL on loopback."""
        return f"http://{self.compose('port', service, str(port)).strip()}"

    def traces(self) -> ObserverTraceReader:
        address = self.compose("port", "jaeger", str(OBSERVER_PORT)).strip()
        return ObserverTraceReader(f"http://tests:{TOKEN}@{address}")


@contextmanager
def project(
    engine: DockerEngine,
    build: Build,
    home: Path,
    name: str,
    files: Sequence[str],
    env: Mapping[str, str],
    settings: Mapping[str, Mapping[str, str]],
) -> Iterator[Project]:
    """Yield a project that is not up. It is taken down at the end, and may leave nothing.

    `settings`: further variables of services' containers.
    """
    override = home / f"{name}.yml"
    committed = [COMPOSE / file for file in files]
    override.write_text(_override(build, committed, settings))
    free = {f"{viewer}_PORT": str(free_port()) for viewer in ("JAEGER", "PROMETHEUS", "GRAFANA", "MESH_FRONTEND")}
    observer = {"MESH_OTLP_ENDPOINT": f"http://tests:{TOKEN}@jaeger:{OBSERVER_PORT}"}
    running = Project(engine, name, [*committed, override], {**build.images, **free, **observer, **env})
    try:
        yield running
    finally:
        profiles = [flag for profile in ("planner", "metrics") for flag in ("--profile", profile)]
        running.compose(*profiles, "down", "--volumes", "--remove-orphans")
        assert engine.left(name) == []


def _override(build: Build, committed: Sequence[Path], settings: Mapping[str, Mapping[str, str]]) -> str:
    """Builds use this machine's network and pip's settings. Our observer replaces Jaeger."""
    known = {name for file in committed for name in yaml.safe_load(file.read_text())["services"]}
    services: dict[str, Any] = {
        name: {"build": {"network": "host", "secrets": list(build.secrets)}} for name in BUILT if name in known
    }
    services["jaeger"] = {
        "image": "kvmesh:${KVMESH_TAG:-latest}",
        "build": {"context": str(REPO), "dockerfile": "deploy/compose/Dockerfile", "target": "mesh"}
        | {"args": {"PYTHON_IMAGE": "${PYTHON_IMAGE}"}, **services["frontend"]["build"]},
        "command": ["python", "-m", "services.observer"],
        "environment": {"MESH_OBSERVER_HOST": "0.0.0.0", "MESH_OBSERVER_TOKEN": TOKEN},
        "ports": [f"127.0.0.1::{OBSERVER_PORT}"],
        "healthcheck": {"test": ["CMD", "python", "-c", HEALTH], "start_period": "60s"},
    }
    for name, variables in settings.items():
        services[name]["environment"] = dict(variables)
    secrets = {name: {"file": str(path)} for name, path in build.secrets.items()}
    return yaml.safe_dump({"services": services, "secrets": secrets})


def until_it_answers(url: str) -> None:
    def answers() -> bool:
        try:
            return httpx.get(url, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(answers, f"{url} does not answer")


def build_images(project: Project) -> None:
    project.compose("--profile", "planner", "build", timeout_s=BUILD_S)
