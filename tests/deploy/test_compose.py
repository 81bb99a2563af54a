"""The compose files as data: names of settings, health checks, order of start; and `config` where there is a compose."""

import importlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from pydantic_settings import BaseSettings

from components.settings import ROLES, SHARED, MeshSettings, misspelled
from services.local.servers import MAX_PAYLOAD_BYTES

COMPOSE: Final = Path(__file__).resolve().parents[2] / "deploy" / "compose"
BASE: Final = COMPOSE / "docker-compose.yml"
GPU: Final = COMPOSE / "docker-compose.gpu.yml"
SECURE: Final = COMPOSE / "docker-compose.secure.yml"
BACKENDS: Final = {"etcd", "nats", "jaeger"}
MONITORS: Final = {"prometheus", "grafana"}
OURS: Final = (*ROLES, "planner")
DOCKER_SOCKET: Final = "/var/run/docker.sock:/var/run/docker.sock"


def load(path: Path) -> dict[str, Any]:
    data = yaml.safe_load(path.read_text())
    assert isinstance(data, dict)
    return data


def settings_of(role: str) -> type[BaseSettings]:
    """The settings class of `services.<role>`: what its `__main__` reads."""
    module = importlib.import_module(f"services.{role}.config")
    (found,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, MeshSettings) and value.__module__ == module.__name__
    )
    return found


def variables_of(service: dict[str, Any]) -> dict[str, str]:
    environment = service.get("environment", {})
    assert isinstance(environment, dict)
    return environment


@pytest.mark.parametrize("file", [BASE, GPU], ids=lambda path: path.stem)
@pytest.mark.parametrize("role", OURS)
def test_every_variable_is_a_setting_of_its_service(file: Path, role: str) -> None:
    service = load(file)["services"].get(role, {})
    variables = variables_of(service)
    assert [name for name in variables if not name.startswith("MESH_")] == []
    assert misspelled(variables, settings_of(role)) == []


def test_every_nested_variable_is_a_setting_of_the_engine() -> None:
    fields = importlib.import_module("engine.config").EngineConfig.__dataclass_fields__
    for service in [*load(BASE)["services"].values(), *load(GPU)["services"].values()]:
        for name in variables_of(service):
            if "ENGINE__" in name:
                assert name.partition("ENGINE__")[2].lower() in fields


def test_variables_of_the_caller_have_names_of_settings() -> None:
    known = {f"MESH_{name.upper()}" for name in SHARED} | {
        f"MESH_{role.upper()}_{name.upper()}" for role in OURS for name in settings_of(role).model_fields
    }
    known.add("COMPOSE_PROJECT_NAME")  # which Compose itself sets
    text = BASE.read_text() + GPU.read_text()
    assert set(re.findall(r"\$\{(\w+)", text)) <= known
    assert all(default for default in re.findall(r"\$\{\w+(:-\S+?)?\}", text))  # it starts with nothing set


def test_every_service_has_a_health_check_and_comes_back() -> None:
    for name, service in load(BASE)["services"].items():
        if name == "model":  # ends by itself
            assert service["restart"] == "no"
            continue
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["restart"] == "unless-stopped", name


@pytest.mark.parametrize("role", OURS)
def test_health_checks_ask_the_port_that_the_service_is_given(role: str) -> None:
    service = load(BASE)["services"][role]
    port = variables_of(service)["MESH_FRONTEND_PORT" if role == "frontend" else "MESH_METRICS_PORT"]
    assert f"http://127.0.0.1:{port}/health" in " ".join(service["healthcheck"]["test"])


@pytest.mark.parametrize("role", OURS)
def test_services_run_the_module_of_their_name_after_etcd_and_nats(role: str) -> None:
    service = load(BASE)["services"][role]
    assert service["command"] == ["python", "-m", f"services.{role}"]
    assert {name: service["depends_on"][name]["condition"] for name in ("etcd", "nats")} == {
        "etcd": "service_healthy",
        "nats": "service_healthy",
    }


def test_all_our_services_except_the_planner_share_one_image() -> None:
    ours = {name: service for name, service in load(BASE)["services"].items() if name not in BACKENDS | MONITORS}
    assert set(ours) == {*OURS, "model"}
    assert {service["image"] for service in ours.values()} == {"kvmesh", "kvmesh-planner"}
    assert ours["planner"]["profiles"] == ["planner"], "nobody gets it, and the Docker socket in it, unasked"


def test_images_are_pinned_and_nothing_names_this_machine() -> None:
    for name, service in load(BASE)["services"].items():
        if name in BACKENDS | MONITORS:
            assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+[\w.-]*", service["image"]), name
        for volume in set(service.get("volumes", [])) - ({DOCKER_SOCKET} if name == "planner" else set()):
            assert not volume.startswith(("/", "~")), f"{name}: {volume}"
    for path in filter(Path.is_file, COMPOSE.rglob("*")):
        assert not re.search(r"/(root|home|work|Users)/", path.read_text()), path


def test_only_the_endpoint_and_the_viewers_are_published_and_on_loopback() -> None:
    published = {name: service["ports"] for name, service in load(BASE)["services"].items() if "ports" in service}
    assert set(published) == {"frontend", "jaeger", *MONITORS}
    for (port,) in published.values():
        assert port.startswith(("127.0.0.1:", "${MESH_FRONTEND_HOST:-127.0.0.1}:"))


def test_monitoring_comes_only_when_it_is_asked_for_and_its_files_are_there() -> None:
    for name, service in load(BASE)["services"].items():
        assert (service.get("profiles") == ["metrics"]) == (name in MONITORS), name
    for name in MONITORS:
        for volume in load(BASE)["services"][name]["volumes"]:
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (COMPOSE / source).exists(), volume


def test_nats_accepts_the_same_payload_as_on_one_box() -> None:
    size = re.search(r"max_payload: (\d+)MB", (COMPOSE / "nats.conf").read_text())
    assert size is not None
    assert int(size[1]) * 1024 * 1024 == MAX_PAYLOAD_BYTES


def test_the_planner_adds_workers_like_those_that_are_there() -> None:
    """It interpolates the file again with its own environment: what the caller may set for workers must be in it."""
    services = load(BASE)["services"]
    asked = {name for role in ("prefill", "decode") for name in re.findall(r"\$\{(\w+)", str(services[role]))}
    assert asked <= set(variables_of(services["planner"]))
    file = variables_of(services["planner"])["MESH_PLANNER_COMPOSE_FILE"]
    assert f":-{BASE.relative_to(BASE.parents[2])}}}" in file, "where it is mounted, seen from the image's directory"


def test_the_gpu_override_changes_only_services_that_exist() -> None:
    assert set(load(GPU)["services"]) < set(load(BASE)["services"])


def test_compose_accepts_the_files() -> None:
    """With docker-compose or docker's plugin. Without either it passed, and had checked nothing."""
    command = _compose()
    if not command:
        pytest.skip("neither docker-compose nor docker's compose plugin is installed")
    for files in ([BASE], [BASE, GPU], [BASE, SECURE]):
        flags = [flag for file in files for flag in ("-f", str(file))]
        done = subprocess.run(
            [*command, *flags, "config", "-q"], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr


def _compose() -> list[str]:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker"):
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False, timeout=30)
        if plugin.returncode == 0 and b"ompose" in plugin.stdout:
            return ["docker", "compose"]
    return []
