"""The compose files as data: names of settings, health checks, order of start; and `config` where there is a compose."""

import importlib
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic_settings import BaseSettings

from components.settings import ROLES, SHARED, MeshSettings, misspelled
from services.local.servers import MAX_PAYLOAD_BYTES
from tests.compose.docker_engine import compose_command
from tests.deploy.compose_files import load
from tests.waiting import PATIENCE_S

COMPOSE: Final = Path(__file__).resolve().parents[2] / "deploy" / "compose"
BASE: Final = COMPOSE / "docker-compose.yml"
GPU: Final = COMPOSE / "docker-compose.gpu.yml"
TP: Final = COMPOSE / "docker-compose.tp.yml"
SECURE: Final = COMPOSE / "docker-compose.secure.yml"
CLUSTER: Final = COMPOSE / "docker-compose.cluster.yml"
EXAMPLE: Final = COMPOSE / ".env.example"
FILES: Final = (BASE, GPU, TP, SECURE, CLUSTER)
READ: Final = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")  # a variable and its default
BACKENDS: Final = {"etcd", "nats", "jaeger"}
MONITORS: Final = {"prometheus", "grafana"}
OURS: Final = (*ROLES, "planner")
DOCKER_SOCKET: Final = "${DOCKER_SOCKET:-/var/run/docker.sock}:/var/run/docker.sock"


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


@pytest.mark.parametrize("file", [BASE, GPU, TP, CLUSTER], ids=lambda path: path.stem)
@pytest.mark.parametrize("role", OURS)
def test_every_variable_is_a_setting_of_its_service(file: Path, role: str) -> None:
    service = load(file)["services"].get(role, {})
    variables = variables_of(service)
    passed_on = {name for name, _ in READ.findall(file.read_text())} if role == "planner" else set()
    assert [name for name in variables if not name.startswith("MESH_") and name not in passed_on] == []
    assert misspelled(variables, settings_of(role)) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_values_of_all_variables_are_valid(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frontend ended at once: its setting did not accept a number from the environment."""
    for role in OURS & load(file)["services"].keys():
        with monkeypatch.context() as patch:
            for name, value in variables_of(load(file)["services"][role]).items():
                if text := READ.sub(lambda found: found[2], str(value)):
                    patch.setenv(name, text)
            settings_of(role)()


def test_every_nested_variable_is_a_setting_of_the_engine() -> None:
    fields = importlib.import_module("engine.config").EngineConfig.__dataclass_fields__
    for service in [service for file in (BASE, GPU, TP) for service in load(file)["services"].values()]:
        for name in variables_of(service):
            if "ENGINE__" in name:
                assert name.partition("ENGINE__")[2].lower() in fields


def test_variables_of_the_caller_have_names_of_settings() -> None:
    known = {f"MESH_{name.upper()}" for name in SHARED} | {
        f"MESH_{role.upper()}_{name.upper()}" for role in OURS for name in settings_of(role).model_fields
    }
    read = {name for file in FILES for name, _ in READ.findall(file.read_text())}
    assert {name for name in read if name.startswith("MESH_")} <= known


def test_the_example_explains_every_variable_that_the_files_read_with_its_default() -> None:
    read: dict[str, set[str]] = {}
    for file in FILES:
        assert file.read_text().count("${") == len(READ.findall(file.read_text()))
        for name, default in READ.findall(file.read_text()):
            read.setdefault(name, set()).add(default)
    assert {name: defaults for name, defaults in read.items() if len(defaults) > 1} == {}
    explained = dict(re.findall(r"^#(\w+)=(.*)$", EXAMPLE.read_text(), re.MULTILINE))
    assert explained == {name: default for name, (default,) in read.items()}
    assert ".env\n" in (COMPOSE.parents[1] / ".gitignore").read_text(), "a user's own holds secrets"


def test_variables_have_the_same_defaults_as_the_dockerfile() -> None:
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE))
    explained = dict(re.findall(r"^#(\w+)=(.*)$", EXAMPLE.read_text(), re.MULTILINE))
    assert set(arguments) == {"PYTHON_IMAGE", "DOCKER_CLI_IMAGE"}
    assert arguments == {name: explained[name] for name in arguments}


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


def test_only_workers_have_the_image_with_a_compiler() -> None:
    ours = {name: service for name, service in load(BASE)["services"].items() if name not in BACKENDS | MONITORS}
    assert set(ours) == {*OURS, "model"}
    images = {name: service["image"].partition(":")[0] for name, service in ours.items()}
    workers = {"prefill": "kvmesh-worker", "decode": "kvmesh-worker"}
    assert images == {**dict.fromkeys(ours, "kvmesh"), **workers, "planner": "kvmesh-planner"}
    targets = {name: service["build"]["target"] for name, service in ours.items()}
    assert targets == {**dict.fromkeys(ours, "mesh"), **dict.fromkeys(workers, "worker"), "planner": "planner"}
    assert ours["planner"]["profiles"] == ["planner"], "nobody gets it, and the Docker socket in it, unasked"


def test_images_are_pinned_and_nothing_names_this_machine() -> None:
    for name, service in load(BASE)["services"].items():
        if name in BACKENDS | MONITORS:
            (image,) = READ.findall(service["image"])
            assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+[\w.-]*", image[1]), name
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
    """It interpolates the file with its own environment, which must hold the variables for workers."""
    services = load(BASE)["services"]
    asked = {name for role in ("prefill", "decode") for name in re.findall(r"\$\{(\w+)", str(services[role]))}
    assert asked <= set(variables_of(services["planner"]))
    file = variables_of(services["planner"])["MESH_PLANNER_COMPOSE_FILE"]
    assert f":-{BASE.relative_to(BASE.parents[2])}}}" in file, "where it is mounted, seen from the image's directory"


def test_each_worker_on_gpus_has_one_of_its_own_and_the_rights_that_rdma_needs() -> None:
    services = load(GPU)["services"]
    assert set(services) == {"prefill", "decode", "prefill-2", "decode-2"}
    seen = []
    for name, service in services.items():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        (gpu,) = device["device_ids"]
        seen += READ.findall(gpu)
        assert device["capabilities"] == ["gpu"]
        assert service["ipc"] == "host"
        assert service["ulimits"] == {"memlock": -1}
        assert service["cap_add"] == ["IPC_LOCK"]
        assert service["build"]["target"] == "worker-cuda"
        assert variables_of(service) == {"MESH_ENGINE__DEVICE": "cuda"}
        if name not in load(BASE)["services"]:
            assert service["extends"] == {"file": BASE.name, "service": name.removesuffix("-2")}
            assert service["profiles"] == ["four-gpus"]
    assert len(set(seen)) == 4
    assert len({default for _, default in seen}) == 4


def test_each_worker_on_two_gpus_has_them_for_its_ranks() -> None:
    """The list replaces that of docker-compose.gpu.yml, to which Compose would add."""
    assert TP.read_text().count("devices: !override\n") == 2
    seen = []
    for role, service in load(TP)["services"].items():
        assert role in {"prefill", "decode"}
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        seen += [READ.findall(gpu)[0] for gpu in device["device_ids"]]
        variables = variables_of(service)
        assert variables == {"MESH_ENGINE__DEVICE": "cuda:0", "MESH_ENGINE__TENSOR_PARALLEL": len(device["device_ids"])}
    assert len({name for name, _ in seen}) == len({default for _, default in seen}) == 4


def test_each_member_of_the_cluster_is_named_to_the_others_and_to_every_service() -> None:
    services = load(CLUSTER)["services"]
    members = {kind: [kind, f"{kind}-2", f"{kind}-3"] for kind in ("etcd", "nats")}
    assert set(services) == {*members["etcd"], *members["nats"], *OURS}
    for role in OURS:
        variables = variables_of(services[role])
        assert variables["MESH_ETCD_URL"] == ",".join(f"http://{name}:2379" for name in members["etcd"])
        assert variables["MESH_NATS_URL"] == ",".join(f"nats://{name}:4222" for name in members["nats"])
    for name in members["etcd"]:
        variables = variables_of(services[name])
        assert variables["ETCD_NAME"] == name
        assert variables["ETCD_INITIAL_CLUSTER"] == ",".join(f"{peer}=http://{peer}:2380" for peer in members["etcd"])
        assert variables["ETCD_ADVERTISE_CLIENT_URLS"] == f"http://{name}:2379"
        assert variables["ETCD_INITIAL_ADVERTISE_PEER_URLS"] == f"http://{name}:2380"
    config = (COMPOSE / "nats.cluster.conf").read_text()
    for name in members["nats"]:
        assert services[name]["hostname"] == name, "JetStream knows a member by it"
        assert f'"nats://{name}:6222"' in config
    alone = (COMPOSE / "nats.conf").read_text().splitlines()[1:]
    assert {line.split("  ")[0] for line in alone} <= {line.split("  ")[0] for line in config.splitlines()}


def test_images_run_as_a_user_and_only_those_of_workers_have_a_compiler() -> None:
    stages = dict(
        re.findall(r"^FROM \S+ AS (\S+)\n((?:(?!FROM ).*\n?)*)", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE)
    )
    for target in ("mesh", "worker", "worker-cuda"):
        assert "\nUSER mesh\n" in stages[target]
        assert ("g++" in stages[target]) == (target != "mesh")


def test_compose_accepts_the_files() -> None:
    """Without Compose it passed without a check."""
    command = compose_command()
    if not command:
        pytest.skip("there is no Compose 2")
    for files in ([BASE], [BASE, GPU], [BASE, GPU, TP], [BASE, SECURE], [BASE, CLUSTER]):
        flags = [flag for file in files for flag in ("-f", str(file))]
        done = subprocess.run(
            [*command, *flags, "config", "-q"], capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
